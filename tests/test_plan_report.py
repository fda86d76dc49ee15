"""A plan as text, as JSON and as plots: a picture at any width, with and without Unicode."""

from __future__ import annotations

import io
import json
import os
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from sample_plan import block_outlook, plan_report, sample_outlook

from knapspec_edge.apps import plots
from knapspec_edge.apps.certify import Certification, PlanCertificate
from knapspec_edge.apps.plan import PlanReport
from knapspec_edge.apps.plan_report import CURVE_ROWS, picture, renderables, slots, title, to_json
from knapspec_edge.apps.plots.plan import drawing
from knapspec_edge.apps.report import Table, fitting
from knapspec_edge.records import SKIP, Draft, Kind, Mode, ModeKind, Plan, SubLayer
from knapspec_edge.search.outlook import Outlook

GOLDEN = Path(__file__).parent / "golden"


def text_of(report: PlanReport, width: int = 100, *, unicode: bool = True) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None, highlight=False)
    for renderable in renderables(report, width, unicode=unicode):
        console.print(renderable, markup=False)
    lines = console.file.getvalue().split("\n")  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in lines)


def drawn(outlook: Outlook, width: int, *, unicode: bool = True) -> str:
    """The section with the picture, without its headings."""
    text = text_of(plan_report(outlook), width, unicode=unicode)
    start = text.index("One column per layer\n") + len("One column per layer\n")
    return text[start : text.index("\n\n", start)]


def with_modes(outlook: Outlook, modes: list[Mode]) -> Outlook:
    draft = Draft(Plan(tuple(modes)), 4, 0.7)
    return replace(outlook, draft=draft)


@pytest.mark.parametrize(
    ("name", "report", "width", "unicode"),
    [
        ("plan-on-100", plan_report(), 100, True),
        ("plan-on-70", plan_report(), 70, True),
        ("plan-off-100-ascii", plan_report(sample_outlook(pays=False)), 100, False),
        ("plan-blocks-80", plan_report(block_outlook()), 80, True),
    ],
)
def test_the_whole_report(name: str, report: PlanReport, width: int, unicode: bool) -> None:
    """REGOLD=1 writes the files anew."""
    shown = text_of(report, width, unicode=unicode)
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("REGOLD"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(shown, encoding="utf-8")
    assert shown == path.read_text(encoding="utf-8")


def test_the_picture_has_one_column_per_layer() -> None:
    assert drawn(sample_outlook(), 100) == (
        "           0\nattention  █·······\nMLP        █······█\n           █ runs   · skipped"
    )


def test_without_unicode() -> None:
    shown = text_of(plan_report(sample_outlook(pays=False)), 100, unicode=False)
    assert shown.isascii()
    assert drawn(sample_outlook(), 100, unicode=False) == (
        "           0\nattention  #.......\nMLP        #......#\n           # runs   . skipped"
    )


@pytest.mark.parametrize("width", [40, 60, 80, 100, 200])
@pytest.mark.parametrize("n_layer", [8, 30, 80])
def test_a_model_wider_than_the_terminal_comes_in_strips(width: int, n_layer: int) -> None:
    outlook = sample_outlook(n_layer)
    lines = drawn(outlook, width).split("\n")
    assert max(map(len, lines)) <= width
    rows = {"attention": "", "MLP": ""}
    for line in lines[:-1]:
        name = line.split()[0]
        if name in rows:
            rows[name] += line[11:]
    assert outlook.draft is not None
    for kind, name in ((Kind.ATTENTION, "attention"), (Kind.MLP, "MLP")):
        modes = [outlook.draft.plan.modes[s.index] for s in outlook.sublayers if s.kind is kind]
        assert rows[name] == "".join("·" if mode == SKIP else "█" for mode in modes)
    # each strip begins with the number of its first layer
    if n_layer == 80 and width == 60:
        assert [line.split()[0] for line in lines[:-1:3]] == ["0", "40"]


def test_nothing_is_wider_than_the_terminal() -> None:
    for width in (60, 80, 100, 130):
        for outlook in (sample_outlook(80), block_outlook()):
            text = text_of(plan_report(outlook), width)
            assert max(map(len, text.split("\n"))) <= width


def test_windowed_attention_is_distinct() -> None:
    outlook = sample_outlook()
    modes = [SKIP if i % 2 else Mode(ModeKind.WINDOW, 4, 256) for i in range(16)]
    shown = drawn(with_modes(outlook, modes), 100)
    assert "attention  ▒▒▒▒▒▒▒▒\n" in shown
    assert "MLP        ········\n" in shown
    assert shown.endswith("▒ recent tokens only")
    assert "attention  wwwwwwww\n" in drawn(with_modes(outlook, modes), 100, unicode=False)


def test_rows_for_every_kind_and_for_several_of_a_kind_in_a_layer() -> None:
    kinds = [
        (0, Kind.RECURRENT), (0, Kind.MLP), (1, Kind.ATTENTION), (1, Kind.ATTENTION), (1, Kind.MLP),
    ]  # fmt: skip
    sublayers = tuple(SubLayer(i, layer, kind) for i, (layer, kind) in enumerate(kinds))
    assert slots(sublayers) == [
        ("recurrent", {0: 0}),
        ("MLP", {0: 1, 1: 4}),
        ("attention", {1: 2}),
        ("attention 2", {1: 3}),
    ]
    outlook = replace(
        sample_outlook(), sublayers=sublayers, draft=Draft(Plan.skipping(5, [2]), 3, 0.7)
    )
    assert picture(outlook).rows == (
        ("recurrent", "█ "), ("MLP", "██"), ("attention", " ·"), ("attention 2", " █"),
    )  # fmt: skip


def test_colours_where_there_are_some() -> None:
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system="standard")
    for renderable in renderables(plan_report(), 80):
        console.print(renderable)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "\x1b[36m█" in shown
    assert "\x1b[2m·" in shown


def test_the_budget_curve_is_short_however_many_cuts_there_are() -> None:
    outlook = sample_outlook(80)
    assert len(outlook.curve) > 100
    text = text_of(plan_report(outlook))
    start = text.index("What skipping could gain")
    table = text[start : text.index("\n\n", start)].split("\n")
    assert len(table) <= CURVE_ROWS + 5
    assert f"The best of {len(outlook.curve)} cuts" in text


def test_off_stands_where_it_belongs() -> None:
    def places(outlook: Outlook) -> list[str]:
        text = text_of(plan_report(outlook))
        rows = text[text.index("Judged plans") :].split("\n")[4:8]
        return [row.split()[0] for row in rows]

    assert places(sample_outlook()) == ["1", "2", "off", "3"]
    assert places(sample_outlook(pays=False)) == ["off", "1", "2", "3"]


def test_without_a_draft_there_is_no_picture() -> None:
    outlook = sample_outlook(draft=None, judged=(), state="off", why="no", runner_up="none")
    text = text_of(plan_report(outlook))
    assert "One column per layer" not in text
    assert "Judged plans" not in text
    assert "What sublayers cost" in text
    with pytest.raises(ValueError, match="no draft"):
        picture(outlook)


@pytest.mark.parametrize("shares", [(0.0,), (-0.5, 0.0), (-0.5, 0.4)])
def test_cuts_that_save_nothing_do_not_break_the_report(shares: tuple[float, ...]) -> None:
    found = sample_outlook()
    curve = tuple(replace(found.curve[0], saved_share=share) for share in shares)
    text = text_of(plan_report(replace(found, curve=curve)))
    assert ("What skipping could gain" in text) == (max(shares) > 0.0)
    assert "Judged plans" in text


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (-5.0, "0 s ago"), (89.0, "89 s ago"), (90.0, "2 min ago"), (3600.0, "60 min ago"),
        (5400.0, "2 h ago"), (86400.0, "24 h ago"), (200_000.0, "2 days ago"),
    ],
)  # fmt: skip
def test_the_age_of_the_profile(seconds: float, words: str) -> None:
    report = plan_report()
    report = replace(report, shown_at=report.outlook.measured_at + seconds)
    assert f"times     measured {words}, at 5 contexts" in text_of(report)


def test_names_do_not_drive_the_terminal() -> None:
    text = text_of(plan_report(model="a\x1b[31mb", path="/x\x07\ny"))
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "\x1b" not in title(plan_report(model="a\x1b[31mb"))


def test_columns_that_belong_together_stay_together() -> None:
    row = tuple("xxxx" for _ in range(7))
    table = Table(tuple("abcdefg"), (row,), "", together=3)
    assert [piece.columns for piece in fitting(table, 45)] == [tuple("abcdefg")]
    assert [piece.columns for piece in fitting(table, 40)] == [tuple("abcd"), tuple("aefg")]
    # a group that is too wide by itself is parted all the same
    assert [piece.columns for piece in fitting(table, 20)] == [
        ("a", "b", "c"), ("a", "d"), ("a", "e", "f"), ("a", "g"),
    ]  # fmt: skip


def test_json_has_everything() -> None:
    data = to_json(plan_report(warnings=("careful",)))
    json.dumps(data, allow_nan=False)
    assert data["model"] == {
        "name": "A small model", "path": "/models/small.gguf", "architecture": "llama",
        "n_sublayers": 16,
    }  # fmt: skip
    assert data["context_tokens"] == 512
    assert data["warnings"] == ["careful"]
    assert len(data["items"]) == 16
    assert len(data["judged"]) == 3
    odd = to_json(plan_report(sample_outlook(rest_ms=float("nan"))))
    assert odd["rest_ms"] is None


def test_the_certificate_stands_beside_what_was_measured() -> None:
    outlook = sample_outlook()
    plans = tuple(
        PlanCertificate(judged.draft.plan, 40, 38 - n, 5 - n, 2 - n, n, 0.99 - 0.01 * n)
        for n, judged in enumerate(outlook.judged)
    )
    found = Certification(512, 40, 576, 49_152, 1.0, 5e-5, 7e-6, plans)
    report = plan_report(outlook, certification=found)
    text = text_of(report)
    start = text.index("What the cosine alone guarantees")
    assert text[start : text.index("\n\n", start)].split("\n") == [
        "What the cosine alone guarantees",
        "Share of 40 positions, by the states in front of the head (576 dimensions, 49,152 tokens)",
        "       measured         guaranteed         as          median",
        "plan  agreement  picks       tight  published  broken  cosine",
        "   1       0.95  38/40       0.125      0.050       0  0.9900",
        "   2       0.93  37/40       0.100      0.025       1  0.9800",
        "   3       0.90  36/40       0.075      0.000       2  0.9700",
        "needed  the median position takes a cosine of 0.999950 (as published 0.999993)",
    ]
    data = to_json(report)["certificate"]
    assert data["plans"][1]["guaranteed_tight"] == 0.1
    assert to_json(plan_report())["certificate"] is None
    none = text_of(plan_report(outlook, certification=replace(found, plans=())))
    assert "needed  the median position" in none


# -- plots


@pytest.mark.parametrize(
    "outlook",
    [
        sample_outlook(),
        sample_outlook(80, pays=False),
        block_outlook(),
        sample_outlook(draft=None, judged=(), curve=(), state="off"),
    ],
    ids=["on", "80 layers", "blocks", "no draft"],
)
def test_plans_are_drawn(outlook: Outlook, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="plots are an extra")
    report = plan_report(outlook, warnings=("<careful>",))
    for suffix in plots.SUFFIXES:
        path = tmp_path / f"plan{suffix}"
        plots.save(drawing(report), path)
        assert path.stat().st_size > 1000
    root = ElementTree.parse(tmp_path / "plan.svg").getroot()
    ids = {element.get("id") or "" for element in root.iter()}
    assert sum(1 for name in ids if name.startswith("axes_")) == 3
    page = (tmp_path / "plan.html").read_text(encoding="utf-8")
    assert "A small model at 512 tokens of context" in page
    assert "&lt;careful&gt;" in page
    assert "What this rests on" in page
