"""The comparison of bench: pairing, identity, forms, resuming, and what is said of differences."""

from __future__ import annotations

import csv
import io
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scripted import fake_of, scripted_engine

from knapspec_edge.apps.bench import report as forms
from knapspec_edge.apps.bench import rows, runner, sides
from knapspec_edge.apps.bench.options import Options, from_texts, parse_names, parse_policies
from knapspec_edge.apps.bench.resume import Rows, key_of, missing
from knapspec_edge.apps.bench.rows import PLAIN, Run, Summary
from knapspec_edge.apps.bench.tasks import OwnPrompt
from knapspec_edge.config import BENCH_TASKS
from knapspec_edge.decode.policy import FixedPolicy
from knapspec_edge.engine import Engine
from knapspec_edge.errors import ContextError, Interrupted, NativeError, PlanError, UsageError
from knapspec_edge.records import Draft, Plan, Sampling
from knapspec_edge.search import plan_file

TOLERANCE = 0.2
ENVIRONMENT = {
    "version": "0.1",
    "model": "m.gguf",
    "model_fingerprint": "model one",
    "model_type": "Q4_1",
    "model_architecture": "llama",
    "model_size": 98_000_000,
    "model_n_params": 134_000_000,
    "settings": {
        "ctx_tokens": 512, "threads": 2, "threads_batch": 2, "flash_attn": "auto",
        "kv_type": "f16", "gpu_layers": 0, "devices": ["CPU"],
    },
    "library_digest": "library one",
    "library_build": {},
    "devices": ["A processor, fast"],
    "machine": {"devices": ["A processor, fast"]},
    "python": "3.11",
}  # fmt: skip


def make_run(
    side: str,
    tokens: Sequence[int] = range(21),
    *,
    speed: float = 10.0,
    visit: str = "0",
    margins: list[float] | None = None,
    drafted: int = 0,
    accepted: int = 0,
    rounds: int = 0,
    **more: Any,
) -> Run:
    values: dict[str, Any] = {
        "side": side,
        "task": "chat",
        "prompt": "chat-1",
        "context": 256,
        "repeat": 0,
        "visit": visit,
        "place": 0,
        "speculated": drafted > 0,
        "prompt_tokens": 256,
        "completion_tokens": len(tokens),
        "prompt_ms": 512.0,
        "start_ms": 1.0,
        "predicted_ms": 1000.0 * (len(tokens) - 1) / speed,
        "per_second": speed,
        "draft_n": drafted,
        "draft_n_accepted": accepted,
        "rounds": rounds,
        "tokens": list(tokens),
        "margins": [1.0] * len(tokens) if margins is None else margins,
    }
    return Run(**{**values, **more})


def summarize(name: str, runs: list[Run]) -> Summary:
    found = rows.summarize(name, runs, TOLERANCE)
    assert found is not None
    return found


# -- arithmetic, worked by hand


def test_the_first_difference_is_found_with_plain_decodings_margin() -> None:
    plain = make_run(PLAIN, [1, 2, 3, 4], margins=[9.0, 8.0, 0.125, 7.0])
    same = make_run("a", [1, 2, 3, 4])
    flipped = make_run("b", [1, 2, 9, 4], margins=[0.0, 0.0, 5.0, 0.0])
    short = make_run("c", [1, 2, 3])
    for run in (plain, same, flipped, short):
        rows.compare(plain, run)
    assert (plain.differs_at, same.differs_at) == (None, None)
    assert (flipped.differs_at, flipped.margin) == (2, 0.125)
    assert (short.differs_at, short.margin) == (3, 7.0)


def test_ratios_are_paired() -> None:
    """The median of ratios of one visit each, not the ratio of medians."""
    runs = []
    for visit, (plain, other) in enumerate([(10, 20), (100, 150), (1000, 1200)]):
        runs.append(make_run(PLAIN, speed=plain, visit=str(visit)))
        runs.append(make_run("a", speed=other, visit=str(visit)))
    side = summarize("a", runs)
    assert side.ratio == pytest.approx(1.5)
    assert side.ratio_low == pytest.approx(1.35)
    assert side.ratio_high == pytest.approx(1.75)
    assert side.per_second == 150
    assert (side.per_second_low, side.per_second_high) == (85, 675)
    assert side.per_second_mean == pytest.approx(1370 / 3)
    assert summarize(PLAIN, runs).ratio is None


def test_answers_of_other_visits_are_no_pairs() -> None:
    runs = [
        make_run(PLAIN, speed=10, visit="first"),
        make_run(PLAIN, speed=100, visit="second"),
        make_run("a", speed=120, visit="second"),
        make_run("a", speed=999, visit="third"),
    ]
    assert summarize("a", runs).ratio == pytest.approx(1.2)


def test_short_answers_are_compared_and_not_timed() -> None:
    runs = [
        make_run(PLAIN, range(8), speed=10, visit="short"),
        make_run("a", range(8), speed=900, visit="short"),
        make_run(PLAIN, range(9), speed=10, visit="long"),
        make_run("a", range(9), speed=20, visit="long"),
    ]
    side = summarize("a", runs)
    assert (side.runs, side.timed, side.identical) == (2, 1, 2)
    assert side.ratio == 2.0
    only_short = summarize("a", runs[:2])
    assert (only_short.ratio, only_short.per_second) == (None, None)


def test_no_speed_up_for_a_text_that_differs_without_explanation() -> None:
    plain = make_run(PLAIN, margins=[1.0, 0.5, *[1.0] * 19])
    wrong = make_run("a", [0, 7, *range(2, 21)], speed=99.0)
    rows.compare(plain, wrong)
    side = summarize("a", [plain, wrong])
    assert (side.identical, side.explained, side.unexplained) == (0, 0, 1)
    assert side.ratio is None
    assert side.per_second == 99.0


def test_rounding_explains_a_close_call() -> None:
    plain = make_run(PLAIN, margins=[1.0, 0.15, *[1.0] * 19])
    flipped = make_run("a", [0, 7, *range(2, 21)], speed=20.0)
    rows.compare(plain, flipped)
    side = summarize("a", [plain, flipped])
    assert (side.identical, side.explained, side.unexplained) == (0, 1, 0)
    assert side.ratio == pytest.approx(2.0)
    assert side.largest_margin == 0.15


def test_drafts_are_summed_and_costs_count_in_plain_steps() -> None:
    # plain: 100 ms per step. 20 tokens in 8 rounds: 24 drafted at 40 ms, 8 passes at 130 ms
    runs = [
        make_run(PLAIN, speed=10.0),
        make_run(
            "a", speed=10.0, drafted=24, accepted=12, rounds=8, draft_ms=960.0, verify_ms=1040.0,
            plan_ms=100.0, overhead_ms=0.0, model_ms=2090.0,
        ),
    ]  # fmt: skip
    side = summarize("a", runs)
    assert side.speculated
    assert side.acceptance == 0.5
    assert side.tokens_per_round == 2.5
    assert side.draft_cost == pytest.approx(0.4)
    assert side.verify_cost == pytest.approx(1.3)
    assert side.plan_share == pytest.approx(0.05)
    assert side.draft_share == pytest.approx(0.48)
    # planning is no part of what the cost model predicts: 2090 of 1900 ms
    assert side.model_error == pytest.approx(0.1)
    plain = summarize(PLAIN, runs)
    assert not plain.speculated
    assert (plain.acceptance, plain.draft_cost, plain.tokens_per_round) == (None, None, None)


def test_groups() -> None:
    runs = [
        make_run(side, visit=f"{context}{task}", context=context, task=task, speed=speed)
        for context in (2048, 256)
        for task in ("qa", "chat")
        for side, speed in ((PLAIN, 10.0), ("a", 20.0))
    ]
    found = rows.summaries([PLAIN, "a"], runs, TOLERANCE, by_task=False)
    assert [(s.context, s.side, s.runs) for s in found] == [
        (256, PLAIN, 2), (256, "a", 2), (2048, PLAIN, 2), (2048, "a", 2),
    ]  # fmt: skip
    by_task = rows.summaries([PLAIN, "a"], runs, TOLERANCE, by_task=True)
    assert [(s.context, s.task) for s in by_task if s.side == "a"] == [
        (256, "qa"), (256, "chat"), (2048, "qa"), (2048, "chat"),
    ]  # fmt: skip
    assert rows.summarize("nobody", runs, TOLERANCE) is None


# -- what is asked for


def test_names_are_read() -> None:
    assert parse_names("qa, code,qa", BENCH_TASKS, "--tasks") == ("qa", "code")
    assert parse_names("all", BENCH_TASKS, "--tasks") == BENCH_TASKS
    assert parse_policies("plain,auto,x", ("plain", "x", "y")) == ("auto", "x")
    assert parse_policies("plain", ("plain", "x")) == ()
    assert parse_policies("all", ("plain", "x", "y")) == ("auto", "x", "y")
    assert parse_policies("y, all", ("plain", "x", "y")) == ("auto", "x", "y")
    assert not from_texts(policies="lookup, all").named
    assert from_texts(policies="lookup").named
    with pytest.raises(
        UsageError, match="--policies 'fast': 'fast' is none of plain, auto, x, all"
    ):
        parse_policies("fast", ("plain", "x"))


def test_what_excludes_each_other_is_said(tmp_path: Path) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "a"}\n')
    with pytest.raises(UsageError, match="--contexts and --tasks are for the prompts that bench"):
        from_texts(prompts=str(prompts), tasks="qa")
    python = Path(sys.executable)
    for peer, said in (
        ("ik", "--peer ik=.*compared greedily; leave --temp"),
        ("auto", "a side of the comparison has this name"),
    ):
        with pytest.raises(UsageError, match=said):
            from_texts(
                peers=[f"{peer}={python}"],
                sampling=Sampling(temperature=0.7 if peer == "ik" else 0.0),
            )
    plans = [tmp_path / folder / "a.json" for folder in ("x", "y")]
    for plan in plans:
        plan.parent.mkdir()
        plan.write_text("{}")
    with pytest.raises(UsageError, match="two plan files are called a"):
        from_texts(plans=[str(plan) for plan in plans])
    chosen = from_texts(policies="all")
    assert not chosen.named
    assert from_texts(policies="knapspec").named
    assert from_texts(contexts="256,6K", policies="plain", max_tokens=100).ctx_tokens() == 6400
    # room for what the planner measures behind the prompt
    assert from_texts(contexts="6K", policies="auto", max_tokens=10).ctx_tokens() == 6400
    assert from_texts(contexts="6K", policies="plain", max_tokens=10).ctx_tokens() == 6400 - 0


# -- forms


def make_report(runs: list[Run], **more: Any) -> runner.Report:
    names = list(dict.fromkeys(r.side for r in runs))
    values: dict[str, Any] = {
        "environment": {**ENVIRONMENT, "time": "2026-01-01T00:00:00+0000"},
        "options": {**Options(max_tokens=8).to_json(), "explained_margin": TOLERANCE},
        "plans": {"p": {"skipped": ["mlp 3"], "max_tokens": 4, "min_probability": 0.7}},
        "sides": [s for n in names if (s := rows.summarize(n, runs, TOLERANCE)) is not None],
        "by_context": rows.summaries(names, runs, TOLERANCE, by_task=False),
        "by_task": rows.summaries(names, runs, TOLERANCE, by_task=True),
        "prompt_speeds": runner.prompt_speeds(runs),
        "runs": runs,
        "notes": ["a note"],
        "complete": True,
    }
    return runner.Report(**{**values, **more})


def drafting() -> Run:
    return make_run("p", speed=15.0, drafted=8, accepted=2, rounds=10, draft_ms=1.0, verify_ms=2.0)


def test_markdown_says_what_it_compares() -> None:
    plain, wrong = make_run(PLAIN), make_run("q", [0, 7, *range(2, 21)], speed=30.0)
    rows.compare(plain, wrong)
    text = forms.markdown(make_report([plain, drafting(), wrong]))
    assert "not given: the text differs" in text
    assert "**1 unexplained**" in text
    assert "3.00×" not in text, "no speed-up of a text that differs"
    assert "| 256 | p | yes | 15.0 (15.0–15.0) | 1.50× (1.50–1.50) | 8 | 0.25 | 2.00 |" in text
    assert "p: skips mlp 3; up to 4 drafted, stop below 0.70" in text
    # 256 tokens in 512 ms, and llama-bench's columns
    assert (
        "| llama Q4_1 | 93.46 MiB | 134.00 M | CPU | 2 | f16 | auto | pp256 | 500.00 ± 0.00 |"
        in text
    )
    assert "| tg21 @ d256 | 10.00 ± 0.00 |" in text
    assert ", 2 threads, flash attention auto" in text
    assert "* a note" in text
    assert "Not complete" not in text
    assert "Not complete" in forms.markdown(make_report([plain], complete=False))
    said = forms.remarks(make_report([plain], complete=False))
    assert said == ["a note", "Not complete: the figures are of the rows that were finished."]
    widths = {line.count("|") for line in text.splitlines() if line.startswith("| 256")}
    assert widths == {12}


def test_csv_has_llama_benchs_columns() -> None:
    plain = make_run(PLAIN)
    text = forms.csv_table(make_report([plain, drafting()]))
    table = list(csv.DictReader(io.StringIO(text)))
    assert [(r["policy"], r["n_prompt"], r["n_gen"], r["n_depth"]) for r in table] == [
        (PLAIN, "256", "0", "0"), (PLAIN, "0", "21", "256"), ("p", "0", "21", "256"),
    ]  # fmt: skip
    drawn = table[2]
    assert (drawn["speedup"], drawn["acceptance"], drawn["avg_ts"]) == ("1.5", "0.25", "15.0")
    assert (drawn["task"], drawn["context"], drawn["type_k"]) == ("chat", "256", "f16")
    assert drawn["cpu_info"] == "A processor, fast"
    assert all(None not in row and set(row) == set(forms.CSV_COLUMNS) for row in table)
    wrong = make_run("q", [9, *range(1, 21)], speed=30.0)
    rows.compare(plain, wrong)
    last = list(csv.DictReader(io.StringIO(forms.csv_table(make_report([plain, wrong])))))[-1]
    assert (last["speedup"], last["unexplained"]) == ("", "1")


def test_json_holds_no_answers() -> None:
    data = make_report([make_run(PLAIN), drafting()]).to_json()
    assert "tokens" not in data["runs"][0]
    assert "margins" not in data["runs"][0]
    assert json.loads(json.dumps(data, allow_nan=False))["plans"]["p"]["max_tokens"] == 4
    assert data["sides"][1]["ratio"] == pytest.approx(1.5)


# -- rows that outlive a run


SAME = {**ENVIRONMENT, "max_tokens": 8, "sampling": {"temperature": 0.0}}


def test_rows_are_read_back(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    plain, other = make_run(PLAIN), make_run("a", visit="0")
    shown: list[dict[str, Any]] = []
    with Rows(file, SAME, shown.append) as kept:
        kept.append(plain, "digest", None)
        assert len(file.read_text().splitlines()) == 1, "at once"
        kept.append(other, "digest", "plan one")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert lines == shown
    assert next(iter(lines[0])) == "side"
    assert {"machine", "library_digest", "model_fingerprint", "settings"} <= set(lines[0])
    wanted: dict[Any, tuple[str, str | None]] = {
        key_of(plain): ("digest", None),
        key_of(other): ("digest", "plan one"),
        ("b", "chat", "chat-1", 256, 0): ("digest", None),
    }
    with Rows(file, SAME) as again:
        found, notes = again.kept(wanted)
    assert notes == []
    assert [run.side for run in found] == [PLAIN, "a"]
    assert replace(found[0], tokens=plain.tokens, margins=plain.margins) == plain
    assert missing(wanted, found) == {("b", "chat", "chat-1", 256, 0)}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_fingerprint": "model two"}, "1 of another model"),
        ({"library_digest": "library two"}, "1 of another library"),
        ({"machine": {"devices": ["slow"]}}, "1 of another machine"),
        ({"max_tokens": 9}, "1 of another --max-tokens"),
        ({"sampling": {"temperature": 1.0}}, "1 of another sampling"),
        ({"settings": {**ENVIRONMENT["settings"], "threads": 4}}, "1 of another setting"),  # type: ignore[dict-item]
        ({"settings": {**ENVIRONMENT["settings"], "ctx_tokens": 9}}, None),  # type: ignore[dict-item]
        ({"version": "0.2"}, None),
    ],
)
def test_rows_of_something_else_do_not_count(
    tmp_path: Path, change: dict[str, Any], said: str | None
) -> None:
    file = tmp_path / "rows.jsonl"
    run = make_run("a")
    with Rows(file, SAME) as kept:
        kept.append(run, "digest", None)
    with Rows(file, {**SAME, **change}) as again:
        found, notes = again.kept({key_of(run): ("digest", None)})
        assert len(found) == (said is None)
        assert len(notes) == (said is not None)
        if said is not None:
            assert said in notes[0]
            assert str(file) in notes[0]
            assert "\n" not in notes[0]
            # once it was measured again there is nothing left to say
            again.append(run, "digest", None)
    with Rows(file, {**SAME, **change}) as third:
        assert third.kept({key_of(run): ("digest", None)})[1] == []


def test_another_prompt_or_plan_does_not_count(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    run = make_run("a")
    with Rows(file, SAME) as kept:
        kept.append(run, "digest", "plan one")
    with Rows(file, SAME) as again:
        found, notes = again.kept({key_of(run): ("other digest", "plan two")})
    assert found == []
    assert "1 of another prompt and plan or draft model" in notes[0]


def test_files_of_something_else_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"text": "mine"}\n')
    with pytest.raises(UsageError, match="line 1 of .* give another file with --resume"):
        Rows(file, SAME)
    assert file.read_text() == '{"text": "mine"}\n'


# -- the comparison itself, on the scripted model


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.setattr(runner, "environment", lambda _: ENVIRONMENT)
    return scripted_engine(lambda _: "There was once a hare who ran and ran. " * 3, harm=0.1)


def save_plan(engine: Engine, file: Path, skipped: list[int]) -> Path:
    sublayers = engine.backend.sublayers
    draft = Draft(Plan.skipping(len(sublayers), skipped), 3, 0.2)
    plan_file.save(file, draft, sublayers, engine.fingerprint(), "")
    return file


def own_prompts(n: int = 3) -> tuple[OwnPrompt, ...]:
    return tuple(OwnPrompt(f"prompt-{i}", "mine", f"Question {i}?", ()) for i in range(n))


def options(engine: Engine, tmp_path: Path, **more: Any) -> Options:
    values: dict[str, Any] = {
        "policies": (),
        "prompts": own_prompts(),
        "max_tokens": 40,
        "warmup_tokens": 2,
        "plans": (
            save_plan(engine, tmp_path / "one.json", [1]),
            save_plan(engine, tmp_path / "two.json", [1, 2]),
        ),
    }
    return Options(**{**values, **more})


def test_sides_take_turns_and_share_the_prompt(engine: Engine, tmp_path: Path) -> None:
    order: list[tuple[str, str]] = []
    calls: list[int] = []
    backend = fake_of(engine)
    prefill = backend.prefill

    def counted(tokens: Sequence[int], *rest: Any) -> Any:
        calls.append(len(tokens))
        return prefill(tokens, *rest)

    backend.prefill = counted  # type: ignore[method-assign]
    reports = list(
        runner.run(
            engine, options(engine, tmp_path), lambda d, t, r: order.append((r.prompt, r.side))
        )
    )
    assert [report.complete for report in reports] == [False, False, True]
    report = reports[-1]
    by_place = sorted(report.runs, key=lambda r: (r.visit, r.place))
    assert [r.side for r in by_place] == [
        PLAIN, "plan one", "plan two",
        PLAIN, "plan two", "plan one",
        "plan two", PLAIN, "plan one",
    ]  # fmt: skip
    assert len(order) == 9
    # a prompt is computed once; then each side takes its last token
    assert [calls.count(r.prompt_tokens) for r in by_place[::3]] == [3, 3, 3]
    assert len({r.prompt_ms for r in by_place[:3]}) == 1
    for side in report.sides[1:]:
        assert side.speculated
        assert side.draft_n > side.draft_n_accepted > 0
        assert (side.identical, side.unexplained) == (3, 0)
        assert side.ratio is not None
    assert report.sides[0].draft_n == 0
    for run in report.runs:
        parts = (run.draft_ms, run.verify_ms, run.plan_ms, run.overhead_ms)
        assert sum(part for part in parts if part is not None) == pytest.approx(run.predicted_ms)


def test_tasks_make_prompts_of_the_lengths_asked_for(engine: Engine, tmp_path: Path) -> None:
    engine = scripted_engine(n_ctx=1100)
    chosen = options(
        engine, tmp_path, prompts=(), plans=(), tasks=("summarize", "chat"), contexts=(450, 900),
        repeats=2, max_tokens=10,
    )  # fmt: skip
    report = list(runner.run(engine, chosen))[-1]
    assert [(r.context, r.repeat, r.task) for r in report.runs] == [
        (context, repeat, task)
        for context in (450, 900)
        for repeat in (0, 1)
        for task in ("summarize", "chat")
    ]
    assert all(r.prompt_tokens == r.context for r in report.runs)
    assert [s["context"] for s in report.prompt_speeds] == [450, 900]


def test_a_length_that_does_not_fit_is_said_before_anything_is_measured(
    engine: Engine, tmp_path: Path
) -> None:
    engine = scripted_engine(n_ctx=1000)
    rows: list[Any] = []
    chosen = options(
        engine, tmp_path, prompts=(), plans=(), tasks=("chat",), contexts=(450, 960), max_tokens=40
    )
    runner._Comparison(engine, chosen, None, None, rows.append).prompts()  # 1000: just fits
    chosen = replace(chosen, max_tokens=41)
    said = "prompts of 960 tokens and answers of 41 .* context of 1001, and it has 1000: raise"
    with pytest.raises(ContextError, match=said):
        list(runner.run(engine, chosen, sink=rows.append))
    assert not rows


def test_resuming_measures_what_is_missing(engine: Engine, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    one = options(engine, tmp_path, resume=file, plans=(tmp_path / "one.json",))
    assert len(list(runner.run(engine, one))[-1].runs) == 6
    before = file.read_text().splitlines()
    again: list[str] = []
    report = list(runner.run(engine, one, lambda d, t, r: again.append(r.side)))[-1]
    assert again == []
    assert report.complete
    assert len(report.runs) == 6
    assert f"6 of 6 rows were in {file}" in report.notes
    both = options(engine, tmp_path, resume=file)
    report = list(runner.run(engine, both, lambda d, t, r: again.append(r.side)))[-1]
    # the other plan alone, each time beside a plain answer of its own
    assert sorted(again) == [PLAIN] * 3 + ["plan two"] * 3
    assert [s.side for s in report.sides] == [PLAIN, "plan one", "plan two"]
    assert [s.runs for s in report.sides] == [6, 3, 3]
    assert all(s.ratio is not None for s in report.sides[1:])
    lines = file.read_text().splitlines()
    assert lines[: len(before)] == before
    assert len(lines) == 12


def test_an_interrupt_keeps_finished_rows(engine: Engine, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    chosen = options(engine, tmp_path, resume=file)

    def stop(done: int, total: int, run: Run) -> None:
        if done == 5:
            raise Interrupted("enough")

    reports: list[runner.Report] = []
    with pytest.raises(Interrupted):
        reports.extend(runner.run(engine, chosen, stop))
    assert len(reports) == 1
    assert not reports[0].complete
    assert len(file.read_text().splitlines()) == 5
    seen: list[str] = []
    report = list(runner.run(engine, chosen, lambda d, t, r: seen.append(r.side)))[-1]
    assert report.complete
    assert 4 <= len(seen) <= 5
    assert {s.side: s.identical for s in report.sides if s.side != PLAIN} == {
        "plan one": 3, "plan two": 3,
    }  # fmt: skip


class Failing(FixedPolicy):
    """Goes wrong in its third answer."""

    def __init__(self) -> None:
        super().__init__(None)
        self.answers = 0

    def begin(self, sampling: Sampling, prompt: Sequence[int]) -> None:
        self.answers += 1
        if self.answers == 3:
            raise NativeError("the device is gone")


def test_a_side_that_fails_does_not_end_the_comparison(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner._Comparison, "policy", lambda self, name: Failing())
    chosen = options(engine, tmp_path, policies=("knapspec-paper",), plans=())
    report = list(runner.run(engine, chosen))[-1]
    assert report.failed
    assert not report.complete
    assert [s.runs for s in report.sides] == [3, 1]
    assert any("knapspec-paper failed and is left out from prompt-1 on" in n for n in report.notes)


@pytest.mark.parametrize("named", [True, False])
def test_what_cannot_be_had(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    def refuse(self: Any, name: str) -> Any:
        raise PlanError("not with this model")

    monkeypatch.setattr(runner._Comparison, "policy", refuse)
    chosen = options(engine, tmp_path, policies=("knapspec",), plans=(), named=named)
    if named:
        with pytest.raises(PlanError, match="not with this model"):
            list(runner.run(engine, chosen))
    else:
        report = list(runner.run(engine, chosen))[-1]
        assert [s.side for s in report.sides] == [PLAIN]
        assert "knapspec is left out: not with this model" in report.notes
        assert report.complete


def test_a_wrong_text_gets_no_speed_up(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_side: Callable[..., sides.Answer] = sides.own_side

    def wrong(engine: Engine, name: str, *rest: Any) -> sides.Answer:
        answer = own_side(engine, name, *rest)

        def changed(prompt: Sequence[int], max_tokens: int) -> Run:
            run = answer(prompt, max_tokens)
            if name == "plan two" and max_tokens > 2:
                run.tokens[5] += 1
            return run

        return changed

    monkeypatch.setattr(runner, "own_side", wrong)
    report = list(runner.run(engine, options(engine, tmp_path)))[-1]
    _, right, changed = report.sides
    assert right.ratio is not None
    assert (changed.ratio, changed.unexplained) == (None, 3)
    assert "**3 unexplained**" in forms.markdown(report)


# -- drawings


def test_plots_are_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from knapspec_edge.apps.plots.bench import NAMES, check_folder, write

    runs = [
        make_run(side, speed=speed, visit=str(visit), context=context, **more)
        for visit, context in enumerate((256, 2048))
        for side, speed, more in (
            (PLAIN, 10.0, {"verify_ms": 2000.0, "draft_ms": 0.0, "model_ms": 2100.0}),
            (
                "name_with $ a",
                12.0,
                {"drafted": 8, "accepted": 4, "rounds": 12, "draft_ms": 300.0, "verify_ms": 1300.0},
            ),
        )
    ]
    for number, report in enumerate((make_report(runs), make_report(runs[:1]), make_report([]))):
        folder = tmp_path / "new" / str(number)
        check_folder(folder)
        written = write(report, folder)
        assert [path.stem for path in written] == list(NAMES)
        assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write plots into"):
        check_folder(tmp_path / "file")


# -- a real one


@pytest.mark.model
@pytest.mark.slow
def test_a_real_comparison_with_the_unpatched_library(tmp_path: Path) -> None:
    from knapspec_edge import models
    from knapspec_edge.apps.peers import unpatched
    from knapspec_edge.errors import DownloadError
    from knapspec_edge.native import library

    pristine = os.environ.get("KNAPSPEC_EDGE_PRISTINE_LIB")
    if not pristine or library.library_file("llama") is None:
        pytest.skip("needs both builds of llama.cpp; run scripts/test")
    try:
        model = models.obtain(models.default_model().name)
    except DownloadError as error:
        pytest.skip(f"the demo model cannot be fetched: {error}")
    with Engine.open(model, ctx=512, spec="off") as engine:
        n = len(engine.backend.sublayers)
        file = tmp_path / "forced.json"
        plan_file.save(
            file,
            Draft(Plan.skipping(n, [20, 24, 30]), 3, 0.2),
            engine.backend.sublayers,
            engine.fingerprint(),
            "llama",
        )
        chosen = Options(
            policies=(),
            tasks=("chat",),
            contexts=(256,),
            repeats=2,
            max_tokens=24,
            warmup_tokens=2,
            plans=(file,),
            peers=(unpatched(pristine),),
        )
        seen: list[str] = []
        kernels = library.load()._lib
        kernels.knapspec_set_kernels(False)
        try:
            reports = list(runner.run(engine, chosen, sink=lambda row: seen.append(row["side"])))
        finally:
            kernels.knapspec_set_kernels(True)
    assert len(reports) == 2
    assert not reports[0].complete
    assert reports[1].complete
    plain, forced, other = reports[1].sides
    places = [(r.visit[-1], r.place, r.side) for r in reports[1].runs]
    # alternating: the order is rotated from prompt to prompt, and reversed
    assert [side for _, _, side in sorted(places)] == [
        PLAIN, "plan forced", "unpatched llama.cpp",
        PLAIN, "unpatched llama.cpp", "plan forced",
    ]  # fmt: skip
    assert len(seen) == 6
    assert (plain.side, plain.speculated, plain.draft_n) == (PLAIN, False, 0)
    assert forced.speculated
    assert forced.acceptance is not None
    assert forced.unexplained == other.unexplained == 0
    # upstream's kernels on both sides, one token at a time: the same text, whatever the type
    assert other.identical == other.runs == 2
    assert all(side.per_second for side in reports[1].sides)
    assert reports[1].environment["model_size"] > 0
