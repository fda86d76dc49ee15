"""The comparison of bench: pairing, identity, and what is printed when texts differ."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from knapspec_edge.apps import bench
from knapspec_edge.apps.bench import PLAIN, Report, Run, Side

TOLERANCE = 0.2


def make_run(
    side: str,
    tokens: list[int],
    *,
    speed: float = 10.0,
    prompt: int = 0,
    margins: list[float] | None = None,
    drafted: int = 0,
    accepted: int = 0,
    rounds: int = 0,
) -> Run:
    return Run(
        side=side,
        prompt=prompt,
        repeat=0,
        speculated=drafted > 0,
        prompt_tokens=5,
        completion_tokens=len(tokens),
        prompt_ms=1.0,
        predicted_ms=1000.0 * (len(tokens) - 1) / speed,
        per_second=speed,
        draft_n=drafted,
        draft_n_accepted=accepted,
        rounds=rounds,
        tokens=tokens,
        margins=[1.0] * len(tokens) if margins is None else margins,
    )


def summarize(name: str, runs: list[Run]) -> Side:
    plain = {(r.prompt, r.repeat): r for r in runs if r.side == PLAIN}
    mine = [r for r in runs if r.side == name]
    return bench._summary(name, mine, plain, TOLERANCE)


def test_the_first_difference_is_found_with_plain_decodings_margin() -> None:
    plain = make_run(PLAIN, [1, 2, 3, 4], margins=[9.0, 8.0, 0.125, 7.0])
    same = make_run("a", [1, 2, 3, 4])
    flipped = make_run("b", [1, 2, 9, 4], margins=[0.0, 0.0, 5.0, 0.0])
    short = make_run("c", [1, 2, 3])
    bench._compare([flipped, plain, same, short])
    assert (plain.differs_at, same.differs_at) == (None, None)
    assert (flipped.differs_at, flipped.margin) == (2, 0.125)
    assert (short.differs_at, short.margin) == (3, 7.0)


def test_ratios_are_paired() -> None:
    """The median of ratios of one round each, not the ratio of medians."""
    runs = []
    for prompt, (plain, other) in enumerate([(10, 20), (100, 150), (1000, 1200)]):
        runs.append(make_run(PLAIN, [1, 2], speed=plain, prompt=prompt))
        runs.append(make_run("a", [1, 2], speed=other, prompt=prompt))
    side = summarize("a", runs)
    assert side.ratio == pytest.approx(1.5)
    assert side.ratio_low == pytest.approx(1.35)
    assert side.ratio_high == pytest.approx(1.75)
    assert side.per_second == 150


def test_no_speed_up_for_a_text_that_differs_without_explanation() -> None:
    plain = make_run(PLAIN, [1, 2, 3], margins=[1.0, 0.5, 1.0])
    wrong = make_run("a", [1, 7, 3], speed=99.0)
    bench._compare([plain, wrong])
    side = summarize("a", [plain, wrong])
    assert (side.identical, side.explained, side.unexplained) == (0, 0, 1)
    assert side.ratio is None


def test_rounding_explains_a_close_call() -> None:
    plain = make_run(PLAIN, [1, 2, 3], margins=[1.0, 0.15, 1.0])
    flipped = make_run("a", [1, 7, 3], speed=20.0)
    bench._compare([plain, flipped])
    side = summarize("a", [plain, flipped])
    assert (side.identical, side.explained, side.unexplained) == (0, 1, 0)
    assert side.ratio == pytest.approx(2.0)
    assert side.largest_margin == 0.15


def test_drafts_are_summed() -> None:
    runs = [
        make_run(PLAIN, [1, 2, 3, 4, 5]),
        make_run("a", [1, 2, 3, 4, 5], drafted=8, accepted=2, rounds=2),
    ]
    side = summarize("a", runs)
    assert side.speculated
    assert side.acceptance == 0.25
    assert side.tokens_per_round == 2.0
    plain = summarize(PLAIN, runs)
    assert not plain.speculated
    assert plain.acceptance is None
    assert plain.ratio is None


def make_report(sides: list[Side], *, complete: bool = True) -> Report:
    environment = {
        "model": "m.gguf",
        "model_type": "Q4_1",
        "devices": ["CPU"],
        "settings": {"threads": 2, "flash_attn": "auto", "kv_type": "f16"},
    }
    options = {"max_tokens": 8, "n_prompts": 1, "repeats": 1}
    plans = {"p": {"skipped": ["mlp 3"], "max_tokens": 4, "min_probability": 0.7}}
    return Report(environment, options, plans, sides, [make_run(PLAIN, [1])], ["a note"], complete)


def test_markdown_says_what_it_compares() -> None:
    plain = make_run(PLAIN, [1, 2, 3])
    wrong = make_run("p", [1, 7, 3], drafted=4, accepted=1, rounds=2)
    bench._compare([plain, wrong])
    runs = [plain, wrong]
    text = bench.markdown(make_report([summarize(PLAIN, runs), summarize("p", runs)]))
    assert "not given: the text differs" in text
    assert "**1 unexplained**" in text
    assert "p: skips mlp 3; up to 4 drafted, stop below 0.70" in text
    assert "* a note" in text
    assert "Interrupted" not in text
    assert "Interrupted" in bench.markdown(make_report([summarize(PLAIN, runs)], complete=False))


def test_json_holds_no_answers() -> None:
    data = make_report([]).to_json()
    assert "tokens" not in data["runs"][0]
    assert "margins" not in data["runs"][0]
    assert json.loads(json.dumps(data))["plans"]["p"]["max_tokens"] == 4


def test_prompts_are_distinct() -> None:
    assert len(set(bench.PROMPTS)) == len(bench.PROMPTS) == 20


@pytest.mark.model
@pytest.mark.slow
def test_a_real_comparison_with_the_unpatched_library(tmp_path: Path) -> None:
    from knapspec_edge import models
    from knapspec_edge.engine import Engine
    from knapspec_edge.errors import DownloadError
    from knapspec_edge.native import library
    from knapspec_edge.records import Draft, Plan
    from knapspec_edge.search import plan_file

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
        options = bench.Options(
            n_prompts=2,
            max_tokens=24,
            warmup_tokens=2,
            plans=(file,),
            best=False,
            unpatched=Path(pristine),
        )
        seen = []
        kernels = library.load()._lib
        kernels.knapspec_set_kernels(False)
        try:
            reports = list(
                bench.run(engine, options, lambda done, total, run: seen.append(run.side))
            )
        finally:
            kernels.knapspec_set_kernels(True)
    assert len(reports) == 2
    assert not reports[0].complete
    assert reports[1].complete
    plain, forced, other = reports[1].sides
    # alternating: the order is rotated from prompt to prompt, and reversed
    assert seen == [
        PLAIN, "plan forced", bench.UNPATCHED,
        PLAIN, bench.UNPATCHED, "plan forced",
    ]  # fmt: skip
    assert (plain.name, plain.speculated, plain.draft_n) == (PLAIN, False, 0)
    assert forced.speculated
    assert forced.acceptance is not None
    assert forced.unexplained == other.unexplained == 0
    # upstream's kernels on both sides, one token at a time: the same text, whatever the type
    assert other.identical == other.runs == 2
    assert all(side.per_second > 0 for side in reports[1].sides)
