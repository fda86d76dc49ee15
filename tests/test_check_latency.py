"""scripts/check_latency.py: what it samples, how it copes with drift, what it says."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
from fakes import sublayers_of
from hypothesis import given
from hypothesis import strategies as st
from scripted_tools import load

from knapspec_edge.errors import Interrupted, UsageError
from knapspec_edge.latency.costs import Costs
from knapspec_edge.latency.profiler import measure_latency
from knapspec_edge.records import ModeKind, Pick, Plan, Sampling
from knapspec_edge.terminal import Terminal

check = load("check_latency")
Pass = check.Pass


@dataclass
class Truth:
    """What a pass really costs, ms: the truth that measurements should find."""

    attention: float = 0.1
    attention_per_token: float = 0.0002
    mlp: float = 0.2
    rest: float = 2.0
    growth: float = 0.3  # of a pass, per further token

    def step_ms(self, context_tokens: float) -> float:
        return self.draft_ms(Plan.full(8), context_tokens)

    def draft_ms(self, plan: Plan, context_tokens: float) -> float:
        attention = self.attention + self.attention_per_token * context_tokens
        costs = (attention, self.mlp)
        kept = [i for i, m in enumerate(plan.modes) if m.kind is not ModeKind.SKIP]
        return self.rest + sum(costs[i % 2] for i in kept)

    def verify_ms(self, context_tokens: float, width: int) -> float:
        return self.step_ms(context_tokens) * (1.0 + self.growth * (width - 1))


class TimedBackend:
    """Keeps the length of its cache and a clock that the passes advance; computes nothing.

    The first pass of a plan and width after a change takes 5 ms more, as building a graph does.
    `speed(calls)` multiplies times. `computed` is how much of the cache was really computed.
    """

    def __init__(self, n_ctx: int = 2048, filled_factor: float = 1.0) -> None:
        self.n_ctx = n_ctx
        self.n_vocab = 50
        self.n_past = 0
        self.max_verify_tokens = 32
        self.sublayers = sublayers_of(4)
        self.traits = ()
        self.head_sizes = ()
        self.refusal = None
        self.truth = Truth()
        self.now_ms = 0.0
        self.calls = 0
        self.fail_at: int | None = None
        self.filled_factor = filled_factor
        self.filled = False
        self._graph: object = None

    def speed(self, call: int) -> float:
        return 1.0

    def clock(self) -> float:
        return self.now_ms / 1000.0

    def _pass(self, n: int, plan: Plan | None) -> None:
        assert 0 <= self.n_past <= self.n_ctx - n
        self.calls += 1
        if self.fail_at == self.calls:
            raise Interrupted("interrupted")
        if plan is None:
            ms = self.truth.verify_ms(self.n_past, n)
        else:
            ms = self.truth.draft_ms(plan, self.n_past) * (1.0 + self.truth.growth * (n - 1))
        if self._graph != (n, plan):
            self._graph = (n, plan)
            ms += 5.0
        self.now_ms += ms * self.speed(self.calls) * (self.filled_factor if self.filled else 1.0)
        self.n_past += n

    def decode(self, token: int, sampling: Sampling, plan: Plan | None = None) -> Pick:
        self._pass(1, plan)
        return Pick(0, 1.0, 1.0)

    def verify(self, tokens: Sequence[int], sampling: Sampling) -> list[Pick]:
        self._pass(len(tokens), None)
        return [Pick(0, 1.0, 1.0)] * len(tokens)

    def evaluate(self, tokens: Sequence[int], plan: Plan | None = None) -> None:
        self._pass(len(tokens), plan)

    append = evaluate

    def prefill(self, tokens: Sequence[int], sampling: Sampling) -> Pick:
        self._pass(len(tokens), None)
        return Pick(0, 1.0, 1.0)

    def fill(self, n_tokens: int) -> None:
        assert self.n_past <= n_tokens <= self.n_ctx
        self.filled = True
        self.n_past = n_tokens

    def truncate(self, n_tokens: int) -> None:
        assert 0 <= n_tokens <= self.n_past
        if n_tokens == 0:
            self.filled = False
        self.n_past = n_tokens


def some_passes(rng: random.Random, contexts: Sequence[int] = (200, 900)) -> list[Pass]:
    return [
        p
        for c in contexts
        for p in (
            *(Pass(c, 1, s) for s in check.random_plans(rng, 8, 6)),
            *(Pass(c, width) for width in check.random_widths(rng, 4, 32)),
        )
    ]


# ---------------------------------------------------------------------------------------------
# What is sampled


@given(st.integers(1, 80), st.integers(0, 40), st.integers())
def test_random_plans_are_distinct_and_of_the_asked_sizes(n_sublayers, count, seed):
    plans = check.random_plans(random.Random(seed), n_sublayers, count)
    assert len(set(plans)) == len(plans) <= count
    for plan in plans:
        assert plan == tuple(sorted(set(plan)))
        assert plan[0] >= 0
        assert plan[-1] < n_sublayers
        assert len(plan) == 1 or 0.04 * n_sublayers - 1 < len(plan) <= 0.6 * n_sublayers
    if n_sublayers >= 12:
        assert len(plans) == count


def test_random_plans_avoid_those_of_the_fit():
    every = {(i,) for i in range(3)}
    assert check.random_plans(random.Random(0), 3, 10, every - {(1,)}) == [(1,)]
    assert check.random_plans(random.Random(0), 3, 10, every) == []


def test_random_plans_reach_from_few_sublayers_to_many():
    sizes = [len(p) for p in check.random_plans(random.Random(0), 60, 200)]
    assert min(sizes) <= 5
    assert max(sizes) >= 34
    assert 15 < sum(sizes) / len(sizes) < 24


@given(
    st.integers(1, 8),
    st.integers(1, 500),
    st.floats(1.5, 400.0),
    st.lists(st.integers(1, 100_000), max_size=10),
    st.integers(),
)
def test_random_contexts_keep_away_from_the_grid(count, least, times, avoid, seed):
    most = round(least * times)
    found = check.random_contexts(random.Random(seed), count, least, most, avoid)
    assert found == sorted(set(found))
    assert len(found) <= count
    for context in found:
        assert least <= context <= most
        assert all(abs(context - c) > 0.03 * c for c in avoid)


def test_random_contexts_spread_over_the_whole_range():
    grid = [128, 222, 512, 990, 2048, 4062]
    for seed in range(20):
        found = check.random_contexts(random.Random(seed), 4, 128, 4062, grid)
        assert len(found) == 4
        for band, context in enumerate(found):
            low, high = (128 * (4062 / 128) ** ((band + k) / 4) for k in (0, 1))
            assert low - 1 < context < high + 1


@pytest.mark.parametrize("widest", [1, 2, 9, 16, 24, 32])
def test_random_widths_stay_below_the_widest(widest):
    for seed in range(10):
        widths = check.random_widths(random.Random(seed), 8, widest)
        assert widths == sorted(set(widths))
        assert all(2 <= b <= widest for b in widths)
        assert sum(b > 16 for b in widths) == (widest >= 24)
        assert len([b for b in widths if b <= 16]) == min(8, max(0, min(widest, 16) - 1))
    assert check.random_widths(random.Random(0), 0, 32) == []


# ---------------------------------------------------------------------------------------------
# Measuring


def test_the_truth_is_measured_and_predicted_without_error():
    backend, rng = TimedBackend(), random.Random(1)
    measured, steps = check.measure(backend, Truth(), some_passes(rng), 3, rng, clock=backend.clock)
    assert backend.n_past == 0
    assert len(measured) == 22
    for m in [*measured, *steps]:
        assert m.raw_error == pytest.approx(0.0, abs=1e-9)
        assert m.corrected_error == pytest.approx(0.0, abs=1e-9)
    assert {len(m.samples_ms) for m in measured} == {3}


def test_a_predictor_that_is_wrong_throughout_shows_in_the_raw_error_only():
    class Slow(Truth):
        def draft_ms(self, plan: Plan, context_tokens: float) -> float:
            return 1.1 * super().draft_ms(plan, context_tokens)

    backend, rng = TimedBackend(), random.Random(1)
    measured, steps = check.measure(backend, Slow(), some_passes(rng), 1, rng, clock=backend.clock)
    for row in check.summarise(measured):
        assert row.raw.bias == row.raw.median == pytest.approx(0.1)
        assert row.corrected.median == pytest.approx(0.0, abs=1e-9)
    assert all(s.raw_error == pytest.approx(0.1) for s in steps)


def test_a_predictor_that_is_wrong_about_sublayers_shows_in_both():
    backend, rng = TimedBackend(), random.Random(1)
    # the step is right, the plans are not
    predictor = Truth(attention=0.15, mlp=0.15)
    measured, _ = check.measure(backend, predictor, some_passes(rng), 1, rng, clock=backend.clock)
    drafts = next(r for r in check.summarise(measured) if r.context_tokens is None)
    assert drafts.kind == "draft step"
    assert drafts.corrected.median == pytest.approx(drafts.raw.median)
    assert drafts.corrected.high > drafts.corrected.median > 0.001


def test_a_drifting_machine_shows_in_the_raw_error_only():
    class Throttled(TimedBackend):
        def speed(self, call: int) -> float:
            return 1.0 + call / 2000.0

    backend, rng = Throttled(), random.Random(1)
    measured, steps = check.measure(backend, Truth(), some_passes(rng), 3, rng, clock=backend.clock)
    for row in check.summarise(measured):
        assert row.raw.bias < -0.05
        # the time from one reference to the next alone would leave 1 %
        assert row.corrected.high < 0.002
    assert all(s.raw_error < -0.05 for s in steps)


def test_passes_that_something_else_slowed_down_do_not_count():
    class Disturbed(TimedBackend):
        def speed(self, call: int) -> float:
            return 1.0 if call % 2 else 1.5

    backend = Disturbed()
    backend.fill(100)
    for _ in range(2):
        ms = check.fastest_ms(backend, Pass(100), lambda n: [1] * n, backend.clock)
        assert ms == pytest.approx(backend.truth.step_ms(100))


def test_a_slow_pass_is_timed_less_often():
    backend = TimedBackend()
    backend.truth = Truth(rest=100.0)
    backend.fill(100)
    ms = check.fastest_ms(backend, Pass(100), lambda n: [1] * n, backend.clock)
    assert ms == pytest.approx(backend.truth.step_ms(100))
    slow, backend.calls = backend.calls, 0
    backend.truth = Truth()
    check.fastest_ms(backend, Pass(100), lambda n: [1] * n, backend.clock)
    assert (slow, backend.calls) == (3, 4)


def test_the_cache_is_emptied_when_a_pass_fails():
    backend, rng = TimedBackend(), random.Random(1)
    backend.fail_at = 30
    with pytest.raises(Interrupted):
        check.measure(backend, Truth(), some_passes(rng), 3, rng, clock=backend.clock)
    assert backend.n_past == 0


def test_the_profiler_passes_the_check_on_a_machine_without_noise():
    backend, rng = TimedBackend(), random.Random(1)
    profile = measure_latency(backend, budget_seconds=10.0, clock=backend.clock)
    costs = Costs(profile)
    measured, steps = check.measure(
        backend, costs, some_passes(rng, (180, 400, 700, 1500)), 2, rng, clock=backend.clock
    )
    for row in check.summarise(measured):
        assert row.raw.high < 0.02
    again = Costs(check.profile_of_check(profile, measured, steps))
    for mine, theirs in zip(costs.class_costs, again.class_costs, strict=True):
        assert mine.line.intercept == pytest.approx(theirs.line.intercept, abs=0.01)
        assert mine.line.slope == pytest.approx(theirs.line.slope, abs=1e-5)
    # 0.1 + 0.0002 n = 0.2
    assert again.crossing_tokens() == pytest.approx(500, rel=0.05)
    lines = check.class_table(costs, again)
    assert "| Θ(n) |" in lines[2]
    assert "| Θ(1) |" in lines[3]


# ---------------------------------------------------------------------------------------------
# Statistics


def test_errors_are_summed_up():
    errors = check.Errors.of([-0.3, 0.1, 0.1, 0.2, -0.1])
    assert errors.count == 5
    assert errors.median == pytest.approx(0.1)
    assert errors.bias == pytest.approx(0.1)
    assert errors.high == pytest.approx(0.26)  # 0.2 + 0.6 * (0.3 - 0.2)
    with pytest.raises(ValueError, match="no errors"):
        check.Errors.of([])


@given(st.lists(st.floats(-1.0, 5.0), min_size=1, max_size=30))
def test_errors_agree_with_the_obvious(errors):
    found = check.Errors.of(errors)
    ordered = sorted(abs(e) for e in errors)
    assert ordered[(len(ordered) - 1) // 2] <= found.median <= ordered[len(ordered) // 2]
    assert found.median <= found.high <= ordered[-1]
    assert abs(found.bias) <= ordered[-1]


def test_rows_are_per_kind_and_context_and_in_total():
    measured = [
        check.Measured(Pass(c, w, s), 1.1, 1.0, [1.0, 1.0], [1.0, 1.02])
        for c in (700, 200)
        for w, s in ((1, (0,)), (1, (1,)), (4, ()))
    ]
    rows = check.summarise(measured)
    assert [(r.kind, r.context_tokens, r.raw.count) for r in rows] == [
        ("draft step", 200, 2),
        ("draft step", 700, 2),
        ("draft step", None, 4),
        ("verification", 200, 1),
        ("verification", 700, 1),
        ("verification", None, 2),
    ]
    assert rows[0].raw.bias == pytest.approx(0.1)
    assert rows[0].repeatability == pytest.approx(0.01 / 1.01)
    text = check.table(rows)
    assert len(text) == 2 + len(rows)
    assert len({line.count("|") for line in text}) == 1
    assert "+10.0 %" in text[2]


def test_one_context_needs_no_total():
    measured = [check.Measured(Pass(200, 4), 1.0, 1.0, [1.0], [1.0])]
    assert [r.context_tokens for r in check.summarise(measured)] == [200]


def test_a_line_without_an_interval_is_shown_without_one():
    line = check.Line(0.5, 0.001, math.inf, math.inf, 2, 0.0)
    assert check._line(line) == "0.5000 + 1.0000"


# ---------------------------------------------------------------------------------------------
# Filled cells


@pytest.mark.parametrize("factor", [1.0, 0.9])
def test_filled_cells_are_compared_with_computed_ones(factor):
    now = {"backends": 0}
    clocks: list[TimedBackend] = []

    @contextmanager
    def opened() -> Iterator[TimedBackend]:
        backend = TimedBackend(filled_factor=factor)
        clocks.append(backend)
        now["backends"] += 1
        yield backend
        now["backends"] -= 1

    ratios = check.check_fill(
        opened,
        [200, 800],
        random.Random(0),
        rounds=5,
        clock=lambda: sum(b.now_ms for b in clocks) / 1000.0,
    )
    assert now["backends"] == 0
    assert len(clocks) == 4  # no cells are used twice
    assert [(r.context_tokens, r.width, r.pairs) for r in ratios] == [
        (200, 1, 5),
        (200, 8, 5),
        (800, 1, 5),
        (800, 8, 5),
    ]
    for r in ratios:
        assert [r.low, r.median, r.high] == pytest.approx([factor] * 3)
        assert r.computed_ms * factor == pytest.approx(r.filled_ms)
    assert len({line.count("|") for line in check.fill_table(ratios)}) == 1


# ---------------------------------------------------------------------------------------------
# The program


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--plans", "-1"], "--plans"),
        (["--plans", "0", "--widths", "0"], "nothing to check"),
        (["--repeats", "0"], "--repeats"),
        (["--contexts", "0"], "--contexts"),
        (["--budget", "nan"], "--budget"),
        (["--ctx", "0"], "--ctx"),
        (["--threads", "0"], "--threads"),
        (["--json", "missing/out.json"], "no folder"),
    ],
)
def test_bad_options_get_one_line(arguments, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert check.main(["model.gguf", *arguments]) == 2
    shown = capsys.readouterr()
    assert words in shown.err
    assert shown.err.count("\n") == 1
    assert shown.out == ""


def test_a_missing_model_gets_one_line(capsys, tmp_path):
    assert check.main([str(tmp_path / "none.gguf")]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_a_profile_that_was_cut_short_leaves_nothing_to_check():
    options = check._parser().parse_args(["x", "--budget", "0.1"])
    with pytest.raises(UsageError, match="raise --budget 0.1 or --ctx 165"):
        check._check_predictions(TimedBackend(n_ctx=165), options, random.Random(0), Terminal())


def test_the_report_holds_every_table(capsys):
    backend = TimedBackend()
    options = check._parser().parse_args(
        ["x", "--plans", "3", "--widths", "2", "--repeats", "1", "--budget", "0.2"]
    )
    # on the wall clock a pass that computes nothing takes no time to speak of, but some
    data = check._check_predictions(backend, options, random.Random(0), Terminal())
    text = capsys.readouterr().out
    for words in ("The profile took", "| draft step | all | 12 ", "| verification | all | 12 "):
        assert words in text
    assert "| attention | 4 |" in text
    assert "Attention overtakes MLP" in text
    restored = json.loads(json.dumps(data, allow_nan=False))
    assert len(restored["passes"]) == 4 * (3 + 3)
    assert {len(m["samples_ms"]) for m in restored["passes"]} == {1}
