"""A profile as text, as JSON and as plots: right figures, readable at any width, nothing leaks."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from sample_report import (
    ATTENTION,
    CONTEXTS,
    FIXED_MS,
    HEAD_MS,
    MLP,
    TOKEN_SHARE,
    WIDTHS,
    Class,
    attention_ms,
    latency_profile,
    profile_report,
)

from knapspec_edge.apps import plots
from knapspec_edge.apps.plots.profile import drawing, drawn_settings
from knapspec_edge.apps.profile import ProfileReport
from knapspec_edge.apps.profile_report import (
    MAX_GROUPS,
    groups_of,
    law,
    renderables,
    sections,
    to_json,
    verification_widths,
)
from knapspec_edge.apps.report import Table, fitting
from knapspec_edge.errors import KnapspecError, UsageError
from knapspec_edge.latency.costs import Costs
from knapspec_edge.latency.fidelity import Fidelity, ItemCount
from knapspec_edge.latency.profiler import INTERRUPTED
from knapspec_edge.records import Kind


def text_of(report: ProfileReport, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None, highlight=False)
    for renderable in renderables(report, width):
        console.print(renderable, markup=False)
    lines = console.file.getvalue().split("\n")  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in lines)


def unwrapped(text: str) -> str:
    return " ".join(text.split())


def rows_below(text: str, caption: str) -> list[list[str]]:
    """The cells of the first table behind a caption, headings left out."""
    lines = text[text.index(caption) :].split("\n")[1:]
    rows = []
    for line in lines:
        cells = line.split()
        if cells and re.fullmatch(r"[\d,]+", cells[0]) and len(cells) > 1:
            rows.append(cells)
        elif rows:
            break
    return rows


# -- what is said


def test_the_cost_table_shows_what_was_measured() -> None:
    rows = rows_below(text_of(profile_report()), "A step of one token")
    assert [row[0] for row in rows] == [f"{c:,}" for c in CONTEXTS]
    for row, context in zip(rows, CONTEXTS, strict=True):
        step_ms = HEAD_MS + FIXED_MS + 4 * attention_ms(context) + 4 * 0.25
        step, per_second, attention, mlp, head, rest, share = row[1:-1]
        assert float(step) == pytest.approx(step_ms, rel=0.01)
        assert float(per_second) == pytest.approx(1000.0 / step_ms, rel=0.01)
        assert float(attention) == pytest.approx(attention_ms(context), rel=0.03)
        assert float(mlp) == pytest.approx(0.25, rel=0.02)
        assert float(head) == pytest.approx(HEAD_MS, rel=0.05)
        assert float(rest) == pytest.approx(FIXED_MS, rel=0.1)
        assert float(share) == pytest.approx(100 * 4 * attention_ms(context) / step_ms, abs=2)
        assert row[-1] == "%"


def test_the_verification_table_is_in_steps() -> None:
    text = text_of(profile_report())
    (_, *widths), *rows = [
        line.split()
        for line in text[text.index("A pass over several") :].split("\n")[2 : 3 + len(CONTEXTS)]
    ]
    assert [int(w) for w in widths] == [1, *WIDTHS]
    assert len(rows) == len(CONTEXTS)
    for row in rows:
        for width, steps in zip(widths, row[1:], strict=True):
            assert float(steps) == pytest.approx(1 + TOKEN_SHARE * (int(width) - 1), rel=0.02)


def test_slopes_have_confidence_and_constants_are_called_constant() -> None:
    attention, mlp = (law(group) for group in groups_of(Costs(latency_profile())))
    found = re.fullmatch(
        r"([\d.]+) ± ([\d.]+) ms \+ ([\d.]+) ± ([\d.]+) ms per 1,000 tokens of context", attention
    )
    assert found is not None, attention
    intercept, intercept_error, slope, slope_error = (float(x) for x in found.groups())
    assert intercept == pytest.approx(0.05, abs=0.01)
    assert slope == pytest.approx(0.2, rel=0.05)
    assert 0.0 < intercept_error < 0.05
    assert 0.0 < slope_error < 0.1
    found = re.fullmatch(r"([\d.]+) ± ([\d.]+) ms, constant", mlp)
    assert found is not None, mlp
    assert float(found[1]) == pytest.approx(0.25, rel=0.02)


def test_the_crossing_and_the_cost_of_a_further_token_are_said() -> None:
    text = unwrapped(text_of(profile_report()))
    # 0.05 + 0.0002 n = 0.25
    found = re.search(r"attention costs more than an MLP from ([\d,]+) tokens on", text)
    assert found is not None
    assert int(found[1].replace(",", "")) == pytest.approx(1000, rel=0.1)
    assert f"each further token costs {TOKEN_SHARE:.2f} of a step (pass of 4, 1,024 tokens" in text
    never = latency_profile((replace(ATTENTION, ms=lambda _: 0.05), MLP), contexts=(128, 512, 1024))
    assert "attention never costs as much" in unwrapped(text_of(profile_report(never)))
    single = text_of(profile_report(latency_profile(contexts=(128,))))
    assert "crossing      not known: measured at one context only" in single
    assert "measured at one context only (4 sublayers" in unwrapped(single)


def test_device_setting_threads_and_where_it_is_kept() -> None:
    text = text_of(profile_report(), 120)
    for expected in (
        "A small model (96.6 MB, 135 million parameters; 4 attention, 4 MLP sublayers)",
        "CUDA0, CPU; 3 of 4 layers on a GPU, the rest on the CPU\n",
        "4: step 5.00 ms, pass of several 9.00 ms; 2: step 8.00 ms",
        "21 s of a budget of 20 s",
        "/cache/measurements",
        "Flash attention on, f16 keys and values, 4 threads (8 for several tokens)\n",
        "Flash attention off, f16 keys and values, 4 threads\n",
        "the machine was not at rest",
    ):
        assert expected in text
    assert "unified" not in text
    changed = profile_report(
        device={"devices": ["MTL0"], "offloaded_layers": 4, "n_layers": 4, "unified_memory": True},
        kept_in=None,
        interrupted=True,
    )
    text = unwrapped(text_of(changed))
    assert "MTL0; 4 of 4 layers on a GPU; unified memory" in text
    assert "not kept the cache folder could not be written" in text
    assert text.startswith("What passes cost on this machine (interrupted: from what was measured")
    result = changed.results[0]
    early = replace(result, profile=replace(result.profile, notes=(INTERRUPTED,)))
    text = unwrapped(text_of(replace(changed, results=(early,))))
    assert "not kept interrupted too early; it will be measured again" in text


def test_the_best_setting_for_each_purpose_and_by_how_much() -> None:
    text = unwrapped(text_of(profile_report()))
    assert "Best setting at 1,024 tokens of context (predicted)" in text
    plain = "plain decoding flash attention on, f16 keys and values, 4 threads (8 for several"
    assert f"{plain} tokens): 200 tokens/s; 4.0 % faster than flash attention off" in text
    speculation = "speculation flash attention off, f16 keys and values, 4 threads: 250 tokens/s"
    assert f"{speculation} with the best draft, 30 % faster than without; 25.0 % faster" in text
    report = profile_report()
    slow = replace(report.results[0], best_for=("plain", "speculation"), speculation_ms=10.0)
    text = unwrapped(text_of(replace(report, results=(slow,))))
    assert "100 tokens/s with the best draft, 200 tokens/s without: does not pay" in text
    assert "than flash attention" not in text


def test_harmless_and_harmful_sublayers_with_counts() -> None:
    profile = latency_profile(
        (replace(ATTENTION, count=8), replace(MLP, count=8)), contexts=(128, 512, 1024)
    )
    text = unwrapped(text_of(profile_report(profile)))
    harmless = "most harmless attention 0: 1.00 (40 of 40), attention 1: 0.97 (39 of 40)"
    assert harmless in text
    assert "most harmful MLP 7: 0.62 (25 of 40), MLP 6: 0.65 (26 of 40)" in text
    assert "(2 runs so far)" in text
    assert "0.975 (39 of 40)" in text
    assert "mean 0.81 at 256 tokens exactness" in text
    counts = [
        ItemCount(0, "skip", 256, 9, 10),
        ItemCount(1, "skip", 256, 0, 10),
        ItemCount(0, "skip", 4096, 7, 10),
        ItemCount(2, "skip", 4096, 16, 20),
    ]
    text = unwrapped(text_of(profile_report(fidelity=Fidelity(tuple(counts), runs=1))))
    assert "most harmless attention 0: 0.80 (16 of 20), attention 2: 0.80 (16 of 20)" in text
    assert (
        "mean 0.90 at 256 tokens, 0.70 at 4,096 tokens (of the 1 judged at every context)" in text
    )
    assert "most harmful" not in text
    without = text_of(profile_report(fidelity=Fidelity()))
    assert "What sublayers contribute" not in without
    assert "speculation     not known: what sublayers contribute was not measured" in without


def test_kinds_of_sublayers_are_merged_where_there_are_many() -> None:
    def window(n: int) -> Class:
        return Class(f"attention {n}", Kind.ATTENTION, 2, lambda _: 0.1, n_cells=512)

    full = Class("attention F", Kind.ATTENTION, 2, attention_ms, n_cells=4096)
    mlps = [Class(f"mlp {n}", Kind.MLP, 2, lambda _, n=n: 0.1 * n) for n in (1, 2, 3)]
    few = groups_of(Costs(latency_profile([window(0), full, *mlps[:2]])))
    assert [group.name for group in few] == ["attention 0", "attention F", "MLP 1", "MLP 2"]
    assert [group.window_tokens for group in few] == [512, 0, 0, 0]
    many = groups_of(Costs(latency_profile([window(0), full, window(1), *mlps])))
    assert [group.name for group in many] == ["attention, window", "attention, full", "MLP"]
    assert len(many) <= MAX_GROUPS
    assert [len(group.members) for group in many] == [4, 2, 6]
    mlp = many[2]
    assert mlp.ms(512) == pytest.approx(0.2, rel=0.02)
    assert mlp.points[0][1] == pytest.approx(0.2, rel=0.02)
    assert "constant" in law(mlp)


# -- how it is laid out


MANY = [
    Class("attention A", Kind.ATTENTION, 3, attention_ms, n_cells=512),
    Class("attention B", Kind.ATTENTION, 3, attention_ms, n_cells=8192),
    Class("mlp A", Kind.MLP, 3, lambda _: 1234.5),
    Class("mlp B", Kind.MLP, 3, lambda _: 0.0123),
]


@pytest.mark.parametrize("width", [24, 33, 40, 60, 80, 81, 100, 200])
def test_no_line_is_wider_than_the_terminal_and_nothing_is_cut(width: int) -> None:
    profile = latency_profile(MANY, widths=(*WIDTHS, 24, 32))
    report = profile_report(profile, notes=("note " * 60, "x" * 150), path="/a/b" * 60)
    text = text_of(report, width)
    assert max(len(line) for line in text.split("\n")) <= width
    assert "…" not in text
    wide = text_of(report, 250)
    for section in sections(report):
        for part in section.parts:
            if isinstance(part, Table):
                for cell in (cell for row in part.rows for cell in row):
                    assert re.search(rf"(?<!\S){re.escape(cell)}(?!\S)", text), cell
                    assert cell in wide


def test_tables_come_in_as_few_pieces_as_fit() -> None:
    table = Table(("a", "bb\nb", "ccc", "d"), (("10", "20", "30", "40"),), "numbers")
    assert fitting(table, 100) == [table]
    pieces = fitting(table, 9)
    assert [piece.columns for piece in pieces] == [("a", "bb\nb"), ("a", "ccc"), ("a", "d")]
    assert [piece.rows for piece in pieces] == [(("10", "20"),), (("10", "30"),), (("10", "40"),)]


def test_names_from_files_do_not_drive_the_terminal() -> None:
    evil = "\x1b[31mred\x1b]0;title\x07\r\n[bold]x[/bold]"
    report = profile_report(
        model=evil, path=evil, notes=(evil,), device={"devices": [evil]}, kept_in=evil
    )
    text = text_of(report)
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", text)
    assert "[bold]x[/bold]" in text


def test_verification_widths_end_with_the_widest() -> None:
    costs = Costs(latency_profile(widths=(2, 3, 4, 7)))
    assert verification_widths(costs) == [1, 2, 3, 4, 5, 6, 7]
    assert verification_widths(Costs(latency_profile(widths=()))) == [1]
    assert "A pass over" not in text_of(profile_report(latency_profile(widths=())))


# -- for programs


def test_json_holds_the_whole_measurement() -> None:
    report = profile_report(interrupted=True, warnings=("careful",))
    data = json.loads(json.dumps(to_json(report), allow_nan=False))
    assert data["model"]["name"] == "A small model"
    assert data["model"]["sublayers"][5] == {"index": 5, "layer": 1, "kind": "mlp"}
    assert data["device"]["offloaded_layers"] == 3
    assert (data["interrupted"], data["warnings"]) == (True, ["careful"])
    assert data["threads"][0] == {"threads": 4, "step_ms": 5.0, "pass_ms": 9.0}
    assert len(data["settings"]) == 2
    setting = data["settings"][0]
    assert setting["best_for"] == ["plain"]
    assert (setting["plain_ms"], setting["speculation_ms"]) == (5.0, 5.5)
    profile = report.results[0].profile
    assert len(setting["samples"]) == len(profile.samples)
    skipping = next(s for s in setting["samples"] if s["skipped"])
    assert skipping["low_ms"] < skipping["median_ms"] < skipping["high_ms"]
    assert skipping["samples"] == 5
    attention, mlp = setting["classes"]
    assert attention["members"] == [0, 1, 2, 3]
    assert attention["line"]["slope_ms_per_token"] == pytest.approx(0.0002, rel=0.05)
    assert attention["line"]["slope_half_width_ms_per_token"] > 0.0
    for cost in attention["costs"]:
        expected = attention_ms(cost["context_tokens"])
        assert cost["ms"] == pytest.approx(expected, rel=0.05)
        assert cost["fitted_ms"] == pytest.approx(expected, rel=0.05)
        assert cost["standard_error_ms"] > 0.0
    step = setting["steps"][-1]
    assert step["context_tokens"] == 2048
    assert step["shares"]["mlp"] == pytest.approx(4 * 0.25 / step["step_ms"], rel=0.02)
    cells = {(v["context_tokens"], v["width_tokens"]): v for v in setting["verification"]}
    assert set(cells) == {(c, w) for c in CONTEXTS for w in (1, *WIDTHS)}
    assert cells[512, 8]["steps"] == pytest.approx(1 + 7 * TOKEN_SHARE, rel=0.02)
    assert setting["crossing_tokens"] == pytest.approx(1000, rel=0.1)
    assert 0.0 <= setting["fit_error"]["median"] <= setting["fit_error"]["worst"] < 0.1
    count = data["fidelity"]["counts"][6]
    assert count == {
        "index": 6, "sublayer": "mlp 2", "mode": "skip", "context_tokens": 256,
        "agreed": 34, "total": 40,
    }  # fmt: skip


def test_json_has_null_where_nothing_is_known() -> None:
    data = to_json(profile_report(latency_profile(contexts=(128,))))
    assert data["settings"][0]["classes"][0]["line"]["slope_half_width_ms_per_token"] is None
    json.dumps(data, allow_nan=False)


# -- plots


def matplotlib_or_skip() -> None:
    pytest.importorskip("matplotlib", reason="plots are an extra")


def test_a_png_and_an_svg_are_drawn_and_repeat(tmp_path: Path) -> None:
    matplotlib_or_skip()
    report = profile_report()
    png, svg = tmp_path / "a.png", tmp_path / "a.SVG"
    plots.save(drawing(report), png)
    assert png.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    width, height = (int.from_bytes(png.read_bytes()[i : i + 4], "big") for i in (16, 20))
    assert width > 1000
    assert height > 500
    plots.save(drawing(report), svg)
    first = svg.read_bytes()
    root = ElementTree.fromstring(first)
    assert root.tag.endswith("}svg")
    ids = {element.get("id") or "" for element in root.iter()}
    # two settings of three panels
    assert sum(1 for name in ids if name.startswith("axes_")) == 6
    plots.save(drawing(report), svg)
    assert svg.read_bytes() == first
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.SVG", "a.png"]


@pytest.mark.parametrize(
    "profile",
    [
        latency_profile(contexts=(128,)),
        latency_profile(contexts=(128,), widths=()),
        latency_profile(MANY, widths=(2,)),
        latency_profile((Class("block", Kind.BLOCK, 4, attention_ms, n_cells=512),)),
        latency_profile((replace(ATTENTION, ms=lambda _: 0.0), replace(MLP, ms=lambda _: 0.0))),
        latency_profile(contexts=(1, 2, 3, 100, 131_000)),
    ],
    ids=["one context", "no verification", "many classes", "blocks", "nothing seen", "wide range"],
)
def test_odd_profiles_are_shown_and_drawn(profile: Any, tmp_path: Path) -> None:
    report = profile_report(profile)
    text = text_of(report, 80)
    assert max(len(line) for line in text.split("\n")) <= 80
    assert "nan" not in text
    json.dumps(to_json(report), allow_nan=False)
    matplotlib_or_skip()
    for suffix in plots.SUFFIXES:
        plots.save(drawing(report), tmp_path / f"odd{suffix}")


def test_a_report_without_a_setting_or_a_mark_is_drawn(tmp_path: Path) -> None:
    matplotlib_or_skip()
    report = profile_report()
    unmarked = tuple(replace(r, best_for=()) for r in report.results)
    assert drawn_settings(report) == list(report.results)
    assert drawn_settings(replace(report, results=unmarked)) == [unmarked[0]]
    plots.save(drawing(replace(report, results=())), tmp_path / "empty.html")
    assert "A small model" in (tmp_path / "empty.html").read_text(encoding="utf-8")


class Page(HTMLParser):
    """Checks that elements are closed, and collects what a browser would fetch or show."""

    VOID = ("meta", "br", "link", "img")

    def __init__(self, source: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.fetched: list[str] = []
        self.text: list[str] = []
        self.feed(source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "xlink:href") and not (value or "").startswith("#"):
                self.fetched.append(f"{tag} {value}")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_the_page_is_whole_escaped_and_needs_nothing_else(tmp_path: Path) -> None:
    matplotlib_or_skip()
    evil = '<script>alert(1)</script> & $x^2$ "q"'
    report = profile_report(
        model=evil, path=evil, device={"devices": [evil]}, notes=(evil,), warnings=(evil,)
    )
    path = tmp_path / "p.html"
    plots.save(drawing(report), path)
    source = path.read_text(encoding="utf-8")
    page = Page(source)
    assert "script" not in page.tags
    assert page.fetched == []
    assert "url(http" not in source
    assert source.count("<svg") == 1
    assert "currentColor" in source
    assert "prefers-color-scheme: dark" in source
    shown = unwrapped(" ".join(page.text))
    assert shown.count(evil) >= 5  # title, heading, model, file, device, note, warning
    for section in sections(report):
        for part in section.parts:
            rows = part.rows if isinstance(part, Table) else part.pairs
            assert all(unwrapped(cell) in shown for row in rows for cell in row)


def test_a_plot_is_refused_before_measuring(tmp_path: Path, monkeypatch: Any) -> None:
    for name in ("plot.pdf", "plot", "png", "plot.png.gz", ""):
        with pytest.raises(UsageError, match=r"a plot is a \.png, \.svg or \.html file"):
            plots.check(tmp_path / name if name else Path(""))
    matplotlib_or_skip()
    with pytest.raises(UsageError, match="none.*: No such file or directory"):
        plots.check(tmp_path / "none" / "plot.png")
    (tmp_path / "folder.svg").mkdir()
    with pytest.raises(UsageError, match="it is a folder"):
        plots.check(tmp_path / "folder.svg")
    with pytest.raises(UsageError, match="cannot write the plot"):
        plots.check(tmp_path / ("x" * 300 + ".png"))
    with pytest.raises(UsageError, match="cannot write the plot"):
        plots.check(tmp_path / "a\0b.png")
    (tmp_path / "device.png").symlink_to(os.devnull)
    with pytest.raises(UsageError, match=r"device\.png: it is not a file"):
        plots.check(tmp_path / "device.png")
    plots.check(tmp_path / "plot.html")
    assert {p.name for p in tmp_path.iterdir()} == {"folder.svg", "device.png"}


def test_a_read_only_plot_is_left_alone(tmp_path: Path, monkeypatch: Any) -> None:
    matplotlib_or_skip()
    path = tmp_path / "plot.png"
    path.write_bytes(b"old")
    monkeypatch.setattr(os, "access", lambda name, mode: mode != os.W_OK)  # root may write all
    with pytest.raises(UsageError, match=r"plot\.png: the file is read-only"):
        plots.check(path)
    assert path.read_bytes() == b"old"


def test_a_link_keeps_leading_to_the_plot(tmp_path: Path) -> None:
    matplotlib_or_skip()
    (tmp_path / "there").mkdir()
    link = tmp_path / "link.svg"
    link.symlink_to(Path("there") / "plot.svg")
    plots.check(link)
    plots.save(drawing(profile_report()), link)
    assert link.is_symlink()
    assert b"<svg" in (tmp_path / "there" / "plot.svg").read_bytes()
    assert [p.name for p in (tmp_path / "there").iterdir()] == ["plot.svg"]


def test_a_missing_matplotlib_is_one_line(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    python = re.escape(shlex.quote(sys.executable))
    line = rf"^plots need matplotlib: {python} -m pip install 'knapspec-edge\[plot\]'$"
    with pytest.raises(UsageError, match=line):
        plots.check(tmp_path / "plot.png")
    with pytest.raises(UsageError, match=line):
        plots.save(drawing(profile_report()), tmp_path / "plot.png")


def test_a_failed_write_leaves_the_old_plot(tmp_path: Path, monkeypatch: Any) -> None:
    matplotlib_or_skip()
    path = tmp_path / "plot.png"
    path.write_bytes(b"old")

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(KnapspecError, match="cannot write the plot .*plot.png: No space left"):
        plots.save(drawing(profile_report()), path)
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["plot.png"]
