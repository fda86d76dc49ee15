"""Measuring, searching and deciding, on the toy model and its virtual clock."""

from __future__ import annotations

import json
import logging
import math
import os
import random
import time
from pathlib import Path

import naive
import pytest
from fakes import Costs, FakeBackend, ToyModel, interrupted, sublayers_of
from hypothesis import given, settings
from hypothesis import strategies as st

from knapspec_edge.config import Config
from knapspec_edge.decode.guard import SpeedGuard
from knapspec_edge.decode.session import Session
from knapspec_edge.errors import Interrupted, NativeError, PlanError, UsageError
from knapspec_edge.latency import kept
from knapspec_edge.latency.drift import DriftTracker
from knapspec_edge.latency.store import Store, default_folder
from knapspec_edge.records import GREEDY, SKIP, Draft, Kind, Mode, ModeKind, Plan
from knapspec_edge.search import plan_file, planner
from knapspec_edge.search.acceptance import judge
from knapspec_edge.search.candidates import candidate_plans
from knapspec_edge.search.draft_length import FixedRule
from knapspec_edge.search.judged import Measured
from knapspec_edge.search.knapsack import Option, solve
from knapspec_edge.search.measurement import choose_effort
from knapspec_edge.search.online import OnlinePlanner
from knapspec_edge.search.planner import Decision, decide, measurement_key
from knapspec_edge.search.throughput import (
    Window,
    can_pay,
    expected_tokens,
    expected_tokens_geometric,
    replay,
    tokens_per_ms,
)

CALIBRATION = [1 + (7 * i * i) % 22 for i in range(300)]
CONFIG = Config()
# Cheap verification and harmless skips: speculation pays.
FAST = Costs(fixed_ms=0.2, head_ms=0.3, attention_ms=1.0, mlp_ms=1.0, per_token=0.02)
# A pass over b tokens costs nearly b steps: it cannot.
SLOW = Costs(per_token=0.9)


def toy(
    costs: Costs = FAST, harm: dict[int, float] | None = None, n_layer: int = 6, **options: object
) -> FakeBackend:
    model = ToyModel(end_tokens=frozenset(), default_harm=0.01, harm=harm or {})
    return FakeBackend(model, n_layer=n_layer, n_ctx=1024, costs=costs, **options)  # type: ignore[arg-type]


def decide_for(backend: FakeBackend, store: Store | None = None, config: Config = CONFIG):
    return decide(backend, "toy", CALIBRATION, config, store, clock=backend.clock)


def measure(backend: FakeBackend) -> Measured:
    """What `decide` measured."""
    measured = decide_for(backend).measured
    assert measured is not None
    return measured


def keys_of(backend: FakeBackend) -> dict[str, dict[str, object]]:
    """Of everything that `decide_for` keeps."""
    return {
        "latency": kept.latency_key(backend, "toy"),
        "fidelity": kept.fidelity_key(backend, "toy"),
        "decision": measurement_key(backend, "toy", CALIBRATION),
    }


# Fewer passes and sublayers, where it only matters that something was measured.
QUICK = Config(measure_budget_seconds=3.0)


def small() -> FakeBackend:
    return toy(n_layer=2)


def quick(store: Store) -> Decision:
    return decide_for(small(), store, QUICK)


class TestThroughput:
    @given(st.lists(st.floats(0, 1), max_size=8))
    def test_expected_tokens_equals_enumeration(self, acceptance: list[float]) -> None:
        assert expected_tokens(acceptance) == pytest.approx(
            naive.tokens_per_round_enumerated(acceptance)
        )

    def test_expected_tokens_equals_dice(self) -> None:
        acceptance = [0.9, 0.8, 0.7, 0.5]
        thrown = naive.tokens_per_round(acceptance, 40_000, seed=1)
        assert expected_tokens(acceptance) == pytest.approx(thrown, rel=0.02)

    @given(st.floats(0, 1), st.integers(0, 12))
    def test_geometric_is_the_same_with_equal_places(self, alpha: float, gamma: int) -> None:
        assert expected_tokens_geometric(alpha, gamma) == pytest.approx(
            expected_tokens([alpha] * gamma), rel=1e-6
        )

    def test_tokens_per_ms_of_a_known_round(self) -> None:
        # 3 drafted at 2 ms, verification 5 ms, 3.3 tokens: 3.3 tokens in 11 ms
        assert tokens_per_ms(3.3, 3, 2.0, 5.0) == pytest.approx(0.3)

    @settings(max_examples=300)
    @given(st.floats(0.01, 0.999), st.floats(0.01, 1.5), st.floats(0.0, 1.0))
    def test_break_even(self, alpha: float, c: float, s: float) -> None:
        """α > c + s exactly where some γ beats plain decoding, with t_verify(b) = 1 + s(b - 1)."""
        best = max(
            tokens_per_ms(expected_tokens_geometric(alpha, g), g, c, 1.0 + s * g)
            for g in range(1, 60)
        )
        if abs(alpha - c - s) > 1e-6:
            assert (best > 1.0) == can_pay(alpha, c, s)

    @given(
        st.lists(st.tuples(st.booleans(), st.floats(0, 1)), min_size=1, max_size=30),
        st.integers(1, 8),
        st.floats(0, 1),
    )
    def test_replay_stays_within_what_a_round_can_do(self, rows, gamma, threshold) -> None:
        agree, probability = [a for a, _ in rows], [p for _, p in rows]
        window = Window(tuple(agree), tuple(probability))
        rule = FixedRule(gamma, threshold)
        result = replay([window], rule, 1.0, lambda b: 2.0 + b)
        if len(rows) < gamma:
            assert result is None
            return
        assert result is not None
        assert 1.0 <= result.drafted_per_round <= gamma
        assert 1.0 <= result.tokens_per_round <= result.drafted_per_round + 1.0 + 1e-9
        assert result.tokens_per_round <= expected_tokens(result.acceptance) + 1e-9 or threshold > 0
        spent = result.drafted_per_round * 2.0 + 3.0  # draft at 1 ms each, verification 2 + (d + 1)
        assert result.ms_per_token == pytest.approx(spent / result.tokens_per_round)

    def test_replay_by_hand(self) -> None:
        window = Window((True, False, True), (0.9, 0.9, 0.1))
        result = replay([window], FixedRule(2, 0.5), 1.0, float)
        # from 0: two drafted, one right; from 1: two drafted (the second doubtful), none right
        assert result is not None
        assert result.tokens_per_round == 1.5
        assert result.drafted_per_round == 2.0
        assert result.ms_per_token == pytest.approx((5.0 + 5.0) / 3.0)
        assert result.acceptance == (0.5, 0.0)


options = st.lists(
    st.builds(Option, st.integers(0, 6), st.sampled_from([0.0, 0.1, 0.25, 0.5, 1.0, 2.5])),
    min_size=1,
    max_size=3,
)


class TestKnapsack:
    @settings(max_examples=200)
    @given(st.lists(options, max_size=6))
    def test_equals_brute_force_for_every_saving(self, items: list[list[Option]]) -> None:
        expected = naive.knapsack([[(o.saving_units, o.loss) for o in item] for item in items])
        found = solve(items)
        assert {s.saving_units: pytest.approx(s.loss) for s in found} == expected
        assert [s.saving_units for s in found] == sorted(expected)
        for s in found:
            chosen = [item[k] for item, k in zip(items, s.options, strict=True)]
            assert sum(o.saving_units for o in chosen) == s.saving_units
            assert sum(o.loss for o in chosen) == pytest.approx(s.loss)

    def test_three_modes(self) -> None:
        full, window, skip = Option(0, 0.0), Option(2, 0.1), Option(3, 0.5)
        by_saving = {s.saving_units: s for s in solve([[full, window, skip]] * 2)}
        assert by_saving[4].options == (1, 1)
        assert by_saving[5].loss == pytest.approx(0.6)
        assert by_saving[6].options == (2, 2)
        assert 1 not in by_saving

    def test_nonsense_is_refused(self) -> None:
        with pytest.raises(ValueError, match="without options"):
            solve([[]])
        with pytest.raises(ValueError, match="0 or more"):
            solve([[Option(-1, 0.0)]])
        with pytest.raises(ValueError, match="0 or more"):
            solve([[Option(0, math.nan)]])


class TestMeasurement:
    """What a decision rests on: latency (test_profiler.py), text and fidelity together."""

    def test_costs_are_what_the_model_costs(self) -> None:
        costs = Costs(fixed_ms=1, head_ms=2, attention_ms=0.5, mlp_ms=0.7, per_token=0.3)
        backend = toy(costs)
        measured = measure(backend)
        n = measured.context_tokens
        assert n == CONFIG.measure_context_tokens
        step = costs.step_ms(backend.sublayers, n, None)
        assert measured.step_ms == pytest.approx(step, rel=1e-3)
        attention = costs.attention_ms + costs.attention_ms_per_1k * n / 1000
        assert measured.costs.saving_ms(0, n) == pytest.approx(attention, rel=1e-2)
        assert measured.costs.saving_ms(1, n) == pytest.approx(0.7, rel=1e-2)
        assert measured.costs.max_width == CONFIG.measure_verify_max == 9
        for b in range(1, 10):
            wide = measured.costs.verify_ms(n, b)
            assert wide == pytest.approx(step * (1 + 0.3 * (b - 1)), rel=1e-2)

    def test_agreement_finds_the_harmful_items(self) -> None:
        backend = toy(harm={1: 0.9, 10: 0.4})
        fidelity = measure(backend).fidelity
        by_index = {i.index: i.agreement for i in fidelity.agreements(backend.sublayers)}
        assert len(by_index) == 12
        assert by_index[1] < 0.4
        assert 0.3 < by_index[10] < 0.85
        assert all(a > 0.85 for i, a in by_index.items() if i not in (1, 10))
        assert fidelity.batch_agreement == 1.0
        assert fidelity.batch_total == CONFIG.measure_window_tokens - 1

    def test_the_window_is_the_targets_own_text(self) -> None:
        backend = toy()
        measured = measure(backend)
        text = measured.text
        expected, _ = naive.plain(
            backend.model, list(text.prompt), len(text.window), naive.Sampling()
        )
        assert list(text.window) == expected
        assert len(text.window) == CONFIG.measure_window_tokens
        assert len(text.prompt) == measured.context_tokens == CONFIG.measure_context_tokens

    def test_single_agreements_equal_a_naive_count(self) -> None:
        backend = toy(harm={3: 0.5})
        measured = measure(backend)
        text = [*measured.text.prompt]
        same = 0
        for token in measured.text.window:
            text.append(token)
            plan = Plan.skipping(12, [3])
            ours = backend.model.pick(text, naive.Sampling(), plan).token
            same += ours == backend.model.pick(text, naive.Sampling(), None).token
        (count,) = [c for c in measured.fidelity.counts if c.index == 3]
        assert (count.agreed, count.total) == (same, len(measured.text.window))
        assert (count.mode, count.context_tokens) == ("skip", measured.context_tokens)

    @pytest.mark.parametrize("step_factor", [0.2, 2, 10, 100])
    def test_a_slow_model_is_measured_less_and_the_record_says_so(self, step_factor: float) -> None:
        costs = Costs(*(x * step_factor for x in (0.5, 1.0, 0.3, 0.1, 0.4)), per_token=0.3)
        backend = toy(costs, n_layer=20)
        measured = measure(backend)
        full = costs.step_ms(backend.sublayers, 256, None)
        budget_ms = 1000.0 * CONFIG.measure_budget_seconds
        if step_factor == 0.2:
            assert measured.notes == ()
            assert backend.now_ms < budget_ms
        else:
            assert len(measured.text.window) < CONFIG.measure_window_tokens
            (tokens,) = {c.total for c in measured.fidelity.counts}
            assert tokens < CONFIG.measure_window_tokens
            assert any(f"shortened to {tokens} tokens" in note for note in measured.notes)
        if step_factor >= 10:
            items = measured.fidelity.agreements(backend.sublayers)
            probed = [i for i in items if i.probed]
            assert len(probed) < len(items) == 40
            assert {0, 1, 2, 3, 38, 39} <= {i.index for i in probed}
            assert any("interpolated" in note for note in measured.notes)
            assert len(measured.text.prompt) < CONFIG.measure_context_tokens
            context = f"at a context of {len(measured.text.prompt)} tokens"
            assert any(context in note for note in measured.notes)
            assert len(measured.costs.profile.samples) < 70
        if step_factor == 100:
            assert measured.costs.profile.notes
        # However slow: no more than a few hundred steps.
        assert backend.now_ms < max(CONFIG.measure_overrun * budget_ms, 400 * full)

    def test_less_effort_for_slower_models_in_the_promised_order(self) -> None:
        efforts = [choose_effort(ms, 0.2 * ms, 60, 9_000, CONFIG) for ms in (2, 10, 30, 100)]
        assert [e.window_tokens for e in efforts] == sorted(
            (e.window_tokens for e in efforts), reverse=True
        )
        assert [e.probe_stride for e in efforts] == sorted(e.probe_stride for e in efforts)
        assert efforts[0].probe_stride == 1
        assert efforts[0].window_tokens == 48
        assert efforts[-1].probe_stride > 1
        assert efforts[-1].window_tokens == 12

    def test_interpolated_values_lie_between_their_neighbours(self) -> None:
        backend = toy(Costs(100, 100, 50, 0, 50, 0.3), n_layer=20, harm={0: 0.95, 1: 0.95})
        items = measure(backend).fidelity.agreements(backend.sublayers)
        guessed = [i for i in items if not i.probed]
        assert guessed
        for item in guessed:
            kin = [
                i.agreement
                for i in items
                if i.probed and i.index % 2 == item.index % 2 and abs(i.index - item.index) < 16
            ]
            assert min(kin) <= item.agreement <= max(kin)

    def test_progress_rises_to_the_end(self) -> None:
        backend = toy()
        seen: list[float] = []
        decide(backend, "toy", CALIBRATION, CONFIG, None, seen.append, clock=backend.clock)
        assert seen == sorted(seen)
        assert seen[0] < 0.2
        assert seen[-1] == 1.0
        assert len(seen) > 50

    @pytest.mark.parametrize("place", [0.0, 0.01, 0.2, 0.5, 0.7, 0.8, 0.9, 0.97, 1.0])
    @pytest.mark.parametrize("error", [interrupted(), KeyboardInterrupt()])
    def test_an_interrupt_leaves_the_cache_empty(self, place: float, error: BaseException) -> None:
        counted = toy()
        decide_for(counted)
        backend = toy()
        backend.fail_at[round(place * (counted.n_computed - 1))] = error
        with pytest.raises(type(error)):
            decide_for(backend)
        assert backend.tokens == ()

    def test_small_contexts(self) -> None:
        for n_ctx in (18, 30, 64, 100):
            backend = FakeBackend(ToyModel(end_tokens=frozenset()), n_ctx=n_ctx)
            text = measure(backend).text
            assert len(text.prompt) + len(text.window) <= n_ctx
            assert backend.tokens == ()
        for n_ctx in (2, 10, 16, 17):
            backend = FakeBackend(n_ctx=n_ctx)
            decision = decide_for(backend)
            assert decision.state == "off"
            assert "--ctx" in decision.reason
            assert backend.tokens == ()

    def test_misuse_is_refused(self) -> None:
        backend = toy()
        backend.prefill([1, 2], naive.Sampling())
        with pytest.raises(ValueError, match="empty"):
            decide_for(backend)
        with pytest.raises(ValueError, match="calibration"):
            decide(toy(), "toy", [1])

    def test_parallel_residuals_are_one_kind(self) -> None:
        backend = toy(parallel=True)
        decision = decide_for(backend)
        assert decision.measured is not None
        assert [c.kind for c in decision.measured.costs.classes] == [Kind.BLOCK]
        assert decision.draft is not None

    def test_judging_compares_with_the_targets_own_tokens(self) -> None:
        backend = toy(harm={3: 0.5})
        text = measure(backend).text
        backend.prefill(text.prompt, naive.Sampling())
        plans = [Plan.full(12), Plan.skipping(12, [3])]
        whole, harmed = judge(backend, text.window, plans, 8)
        assert whole.agreement == 1.0
        assert harmed.agreement < 0.8
        assert len(whole.agree) == len(whole.windows[0].probability) == len(text.window) - 1
        assert judge(backend, text.window, [], 8) == []


class TestDecision:
    def test_on_where_it_pays_and_the_prediction_holds(self) -> None:
        backend = toy()
        decision = decide_for(backend)
        assert decision.state == "on"
        assert decision.reason.startswith("on: ")
        assert decision.draft is not None
        assert decision.draft.plan.skipped
        assert decision.predicted_ratio is not None
        assert decision.predicted_ratio > 1.2
        assert backend.tokens == ()

        def speed(draft: Draft | None, policy: OnlinePlanner | None = None) -> float:
            session = Session(backend, clock=backend.clock)
            generation = session.generate(
                list(decision.measured.text.prompt), draft=draft, policy=policy, max_tokens=400
            )
            assert len(list(generation)) == 400
            return generation.stats.predicted_per_second

        plain = speed(None)
        assert decision.baseline_per_second == pytest.approx(plain, rel=0.05)
        # as it stands, with one length and one threshold
        best = decision.alternatives[0]
        assert best.fixed_ratio == pytest.approx(speed(decision.draft) / plain, rel=0.1)
        # As it is decoded with, without the plain steps that the guard takes. Drafts of 8 tokens
        # turn a standard error of acceptance on 63 places, 0.04, into a fifth of the speed.
        book = planner.open_book(backend, decision, Store(enabled=False), {})
        drift = DriftTracker(decision.measured.costs)
        policy = OnlinePlanner(backend, book, drift, forced=True, clock=backend.clock)
        assert decision.predicted_ratio == pytest.approx(speed(None, policy) / plain, rel=0.3)

    def test_off_where_verification_is_dear_with_the_numbers_and_a_draft_to_force(self) -> None:
        backend = toy(SLOW)
        decision = decide_for(backend)
        assert decision.state == "off"
        assert decision.draft is not None
        assert decision.draft.plan.skipped
        assert decision.predicted_ratio is not None
        assert decision.predicted_ratio < 1.0
        best = decision.alternatives[0]
        for figure in (
            f"{best.draft_cost:.2f} of a step",
            f"agrees {best.agreement:.2f}",
            f"verifying {best.draft.max_tokens + 1} tokens costs {best.verify_cost:.1f} steps",
            f"predicted {decision.predicted_ratio:.2f}x of plain decoding",
        ):
            assert figure in decision.reason
        assert "\n" not in decision.reason

    def test_off_wins_a_gain_within_the_margin(self) -> None:
        backend = toy()
        ratio = decide_for(backend).predicted_ratio
        assert ratio is not None
        above = decide_for(toy(), config=Config(plan_margin=ratio - 1.0 + 0.01))
        below = decide_for(toy(), config=Config(plan_margin=ratio - 1.0 - 0.01))
        assert (above.state, below.state) == ("off", "on")
        assert "less than" in above.reason

    def test_the_winner_was_timed_in_real_rounds(self) -> None:
        decision = decide_for(toy())
        assert decision.alternatives[0].timed
        assert sum(a.timed for a in decision.alternatives) == CONFIG.plan_finalists
        assert len({a.draft.plan for a in decision.alternatives}) == len(decision.alternatives)

    def test_finalists_are_judged_on_tokens_they_were_not_chosen_by(self) -> None:
        backend = toy()
        decision = decide_for(backend)
        assert decision.measured is not None
        text = decision.measured.text
        # the target's own continuation behind the window, obtained the obvious way
        context = [*text.prompt, *text.window]
        fresh = [backend.prefill(context, GREEDY).token]
        while len(fresh) < CONFIG.plan_fresh_tokens:
            fresh.append(backend.decode(fresh[-1], GREEDY).token)
        backend.truncate(len(context))
        timed = [a for a in decision.alternatives if a.timed]
        assert len(timed) == CONFIG.plan_finalists
        for alternative in timed:
            expected = judge(
                backend, fresh, [alternative.draft.plan], CONFIG.plan_judge_block_tokens
            )
            assert alternative.agreement == expected[0].agreement

    def test_a_draft_that_is_slow_in_real_rounds_is_not_declared_on(self) -> None:
        """Costs by differences say it pays; rounds, which switch graphs, say it does not."""
        backend = toy()
        last: list[str] = [""]

        def switch(call: str) -> None:
            if call == "decode" and last[0] == "verify":
                backend.now_ms += 40.0
            last[0] = call

        backend.on_call = switch
        assert decide_for(toy()).state == "on"
        assert decide_for(backend).state == "off"

    def test_a_busy_machine_is_not_believed_and_measured_again_later(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        backend = toy()
        noise = random.Random(1)

        def busy(_: str) -> None:
            backend.now_ms += noise.expovariate(1 / 80.0)

        backend.on_call = busy
        decision = decide_for(backend, Store(tmp_path))
        assert decision.state == "off"
        assert "too busy" in decision.reason
        assert decision.draft is not None
        assert backend.clock() < 3 * CONFIG.measure_budget_seconds
        # Not at every start, which would cost seconds each time on a machine that is always busy.
        quiet = toy()
        again = decide_for(quiet, Store(tmp_path))
        assert (again.reason, quiet.log) == (decision.reason, [])
        later = time.time() + CONFIG.measure_retry_seconds + 1
        monkeypatch.setattr(time, "time", lambda: later)
        assert decide_for(quiet, Store(tmp_path)).state == "on"
        later += 1e9
        assert decide_for(toy(), Store(tmp_path)).from_cache

    def test_rounds_on_a_machine_that_is_no_longer_at_rest_are_not_believed(self) -> None:
        """The profile is good, but by the time of the real rounds something else runs."""
        backend = toy()
        texts = [0]

        def later(call: str) -> None:
            texts[0] += call == "evaluate"
            backend.now_ms += 25.0 if texts[0] else 0.0

        backend.on_call = later
        decision = decide_for(backend)
        assert decision.state == "off"
        step = FAST.step_ms(backend.sublayers, CONFIG.measure_context_tokens, None)
        assert f"too busy to measure (a step took {step:.1f} to {step + 25:.1f} ms)" in (
            decision.reason
        )

    def test_what_made_it_busy_is_said_only_where_it_shows(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(planner, "_disturbance", lambda *_: (25.71, 25.74))
        assert decide_for(toy()).reason == (
            "off: the machine was too busy to measure (noise hid what its parts cost); it will be "
            "measured again later"
        )

    def test_drift_of_the_machine_does_not_hide_what_sublayers_cost(self) -> None:
        backend = toy()

        def slower_and_slower(_: str) -> None:
            backend.now_ms += backend.now_ms * 2e-4

        backend.on_call = slower_and_slower
        measured = measure(backend)
        assert measured.costs.saving_ms(1, measured.context_tokens) == pytest.approx(1.0, rel=0.25)

    def test_a_starved_machine_is_a_reason_not_an_error(self) -> None:
        """Every pass takes so long that no sublayer was left out in time."""
        decision = decide_for(toy(Costs(3e4, 3e4, 1e4, 0, 1e4, 0.3)))
        assert decision.state == "off"
        assert decision.reason.startswith("off: ")
        assert "no time to measure" in decision.reason
        assert decision.draft is not None, "for --spec on, which is honoured where it can be"

    @pytest.mark.parametrize("first", ["decode", "prefill"])
    def test_a_wrong_estimate_does_not_cost_minutes(self, first: str) -> None:
        """Fast at first, then something else takes the machine: while passes are timed, or only
        once the text is computed."""
        backend = toy(Costs(0.2, 0.3, 0.1, 0.0, 0.1, 0.05), n_layer=20)
        calls = {"decode": 0, "prefill": 0}

        def taken(call: str) -> None:
            if call in calls:
                calls[call] += 1
            late = calls[first] > (60 if first == "decode" else 0)
            backend.now_ms += 150.0 if late else 0.0

        backend.on_call = taken
        measured = measure(backend)
        assert any("out of time" in n or "not at rest" in n for n in measured.notes)
        assert len(measured.fidelity.agreements(backend.sublayers)) == 40
        assert backend.clock() < 3.5 * CONFIG.measure_budget_seconds

    def test_harmful_items_are_never_left_out(self) -> None:
        backend = toy(harm={1: 0.9, 10: 0.5})
        for alternative in decide_for(backend).alternatives:
            assert not {1, 10} & set(alternative.draft.plan.skipped)

    def test_candidates_go_from_shallow_to_deep(self) -> None:
        backend = toy()
        measured = measure(backend)
        plans = candidate_plans(
            measured.costs, measured.fidelity, measured.context_tokens, backend.sublayers
        )
        depths = [len(p.skipped) for p in plans]
        assert 3 <= len(plans) <= CONFIG.plan_shortlist
        assert depths == sorted(depths)
        assert depths[-1] > 2 * depths[0]

    def test_off_when_nothing_can_be_left_out(self) -> None:
        backend = toy(harm={i: 0.9 for i in range(12)})
        backend.branch_refusal = "a stream that is read twice"
        decision = decide_for(backend)
        assert (decision.state, decision.draft, decision.alternatives) == ("off", None, ())
        assert "no sublayer can be left out" in decision.reason
        assert decision.baseline_per_second is not None

    def test_a_refusal_is_the_reason_and_nothing_is_measured(self) -> None:
        backend = FakeBackend(refusal="mamba keeps a state that cannot be rolled back")
        decision = decide_for(backend)
        assert decision.state == "off"
        assert "cannot be rolled back" in decision.reason
        assert decision.draft is None
        assert backend.log == []

    def test_a_failing_measurement_is_a_reason_not_an_error(self) -> None:
        backend = toy()
        backend.fail_at[60] = NativeError("graph allocation failed")
        decision = decide_for(backend)
        assert decision.state == "off"
        assert "graph allocation failed" in decision.reason
        assert backend.tokens == ()
        assert decide_for(FakeBackend(n_ctx=10)).state == "off"

    def test_no_draft_is_longer_than_verification_allows(self) -> None:
        for most in (2, 3, 5):
            decision = decide_for(toy(max_verify_tokens=most))
            assert decision.draft is not None
            assert decision.draft.max_tokens <= most - 1
        assert decide_for(toy(max_verify_tokens=1)).state == "off"

    def test_interrupted_is_not_swallowed(self) -> None:
        backend = toy()
        backend.fail_at[100] = interrupted()
        with pytest.raises(Interrupted):
            decide_for(backend)


class TestStore:
    def test_the_second_time_nothing_is_computed(self, tmp_path: Path) -> None:
        store = Store(tmp_path / "deep" / "er")
        first = quick(store)
        backend = small()
        second = decide_for(backend, store, QUICK)
        assert backend.log == []
        assert second.from_cache
        assert not first.from_cache
        assert second.reason == first.reason
        assert second.draft == first.draft
        assert second.alternatives == first.alternatives
        # the latency profile, the fidelity counts, and what was decided on
        assert [p.suffix for p in (tmp_path / "deep" / "er").iterdir()] == 3 * [".json"]

    def test_every_part_of_the_key_matters(self, tmp_path: Path) -> None:
        store = Store(tmp_path)
        quick(store)
        keys = []
        for change in ({"threads": 8}, {"kv_type": "q8_0"}, {"devices": ["gpu"]}):
            backend = small()
            backend.settings.update(change)
            keys.append(measurement_key(backend, "toy", CALIBRATION))
            assert store.load(keys[-1]) is None
        backend = small()
        assert store.load(measurement_key(backend, "other", CALIBRATION)) is None
        assert store.load(measurement_key(backend, {"file": "toy"}, CALIBRATION)) is None
        assert store.load(measurement_key(backend, "toy", CALIBRATION[1:])) is None
        assert store.load(measurement_key(backend, "toy", CALIBRATION)) is not None
        # the size of a context that is large enough does not
        backend.settings["ctx_tokens"] = 8192
        backend.n_ctx = 8192
        assert store.load(measurement_key(backend, "toy", CALIBRATION)) is not None

    @pytest.mark.parametrize("which", ["latency", "decision", "fidelity"])
    @pytest.mark.parametrize(
        "content",
        [
            b"", b"{", b"\xff\xfe", b"[]", b"null", b"{}",
            b'{"format": "knapspec-edge measurement", "version": 99, "key": {}, "content": {}}',
            b"[" * 100_000,
        ],
    )  # fmt: skip
    def test_a_damaged_file_is_measured_again_with_one_line(
        self, tmp_path: Path, content: bytes, which: str
    ) -> None:
        warnings: list[str] = []
        store = Store(tmp_path, warn=warnings.append)
        good = quick(store)
        path = store.path(keys_of(small())[which])
        path.write_bytes(content)
        if which == "fidelity":
            # nothing looks at the counts until there are new ones to add
            assert quick(store).from_cache
            assert warnings == []
            store.path(keys_of(small())["decision"]).unlink()
        again = quick(store)
        assert (again.reason, again.from_cache) == (good.reason, False)
        assert len(warnings) == 1
        assert "measuring again" in warnings[0]
        assert "\n" not in warnings[0]
        assert quick(store).from_cache
        assert len(warnings) == 1

    def test_what_is_not_damaged_is_not_measured_again(self, tmp_path: Path) -> None:
        store = Store(tmp_path)
        whole = small()
        decide_for(whole, store, QUICK)
        store.path(keys_of(small())["decision"]).unlink()
        backend = small()
        decide_for(backend, store, QUICK)
        assert 0 < backend.clock() < 0.7 * whole.clock()
        assert "fill" not in {call for call, _ in backend.log}  # so no latency was measured

    def test_a_profile_that_does_not_reach_far_enough_is_measured_again(
        self, tmp_path: Path
    ) -> None:
        """One of a small context would be wrong by half at the end of a large one."""
        store = Store(tmp_path)
        costs = Costs(0.2, 0.3, 1.0, 3.0, 1.0, 0.02)

        def at(n_ctx: int, most: int = 16) -> tuple[Decision, FakeBackend]:
            backend = FakeBackend(
                ToyModel(end_tokens=frozenset()),
                n_layer=2, n_ctx=n_ctx, costs=costs, max_verify_tokens=most,
            )  # fmt: skip
            return decide_for(backend, store, QUICK), backend

        for n_ctx, most in ((64, 16), (1024, 2), (1024, 16)):
            decision, backend = at(n_ctx, most)
            assert "fill" in {call for call, _ in backend.log}
            assert decision.measured is not None
            assert decision.measured.costs.max_width >= min(most, 8)
        step = costs.step_ms(backend.sublayers, 900, None)
        assert decision.measured is not None
        assert decision.measured.costs.step_ms(900) == pytest.approx(step, rel=0.02)
        # what reaches further serves smaller contexts too
        for n_ctx, most in ((1024, 16), (512, 16), (512, 4)):
            assert "fill" not in {call for call, _ in at(n_ctx, most)[1].log}

    def test_counts_of_the_first_measurement_only_are_kept(self, tmp_path: Path) -> None:
        store = Store(tmp_path)
        first = quick(store).measured
        backend = small()
        other = [1 + (5 * i) % 21 for i in range(300)]
        second = decide(backend, "toy", other, QUICK, store, clock=backend.clock).measured
        assert first is not None
        assert second is not None
        assert second.text != first.text
        total = kept.load_fidelity(store, keys_of(backend)["fidelity"], backend)
        assert total.counts == first.fidelity.counts, "`profile` sees to it that its texts differ"
        assert total.runs == 1

    def test_a_foreign_key_in_the_right_place_is_ignored(self, tmp_path: Path) -> None:
        warnings: list[str] = []
        store = Store(tmp_path, warn=warnings.append)
        store.save({"a": 1}, {"x": 1})
        store.path({"a": 1}).rename(store.path({"a": 2}))
        assert store.load({"a": 2}) is None
        assert len(warnings) == 1

    @pytest.mark.parametrize("which", ["latency", "decision"])
    def test_content_of_another_shape_is_measured_again(self, tmp_path: Path, which: str) -> None:
        warnings: list[str] = []
        store = Store(tmp_path, warn=warnings.append)
        backend = small()
        decide_for(backend, store, QUICK)
        key = keys_of(backend)[which]
        good = store.load(key)
        assert good is not None
        wrong: list[dict[str, object]] = [{}, {"profile": 3}, {"profile": {}, "finalists": None}]
        if which == "decision":
            wrong += [{**good, "finalists": [{}]}, {**good, "fidelity": 7}, {**good, "window": "a"}]
            timed = next(f for f in good["finalists"] if f["timing"] is not None)
            for name in ("plain_step_ms", "draft_step_ms", "verify_ms", "draft_tokens"):
                for value in (0, -1.0, math.inf, math.nan, "1"):
                    impossible = {**timed, "timing": {**timed["timing"], name: value}}
                    wrong.append({**good, "finalists": [impossible]})
        for content in wrong:
            warnings.clear()
            store = Store(tmp_path, warn=warnings.append)  # each says a thing once
            store.save(key, content)
            assert not quick(store).from_cache
            assert len(warnings) == 1
            assert "no valid measurement; measuring again" in warnings[0]
            assert quick(store).from_cache

    def test_a_decision_on_another_profile_is_made_again_in_silence(self, tmp_path: Path) -> None:
        warnings: list[str] = []
        store = Store(tmp_path, warn=warnings.append)
        quick(store)
        key = keys_of(small())["decision"]
        content = store.load(key)
        assert content is not None
        store.save(key, {**content, "latency_at": content["latency_at"] - 1.0})
        assert not quick(store).from_cache
        assert quick(store).from_cache
        assert warnings == []

    def test_a_stale_profile_is_measured_again(self, tmp_path: Path) -> None:
        store = Store(tmp_path)
        first = quick(store)
        latency_key = keys_of(small())["latency"]
        assert first.measured is not None
        profile = first.measured.costs.profile
        kept.mark_stale(store, latency_key, profile, "rounds take 1.4 times as long")
        backend = small()
        again = decide_for(backend, store, QUICK)
        assert not again.from_cache
        assert "fill" in {call for call, _ in backend.log}
        assert again.reason == first.reason
        assert quick(store).from_cache
        # counted on the same text as before: that is no further evidence
        fidelity = kept.load_fidelity(store, keys_of(backend)["fidelity"], backend)
        assert fidelity.counts == first.measured.fidelity.counts

    def test_a_folder_that_cannot_be_written_costs_one_line(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        warnings: list[str] = []
        blocked = tmp_path / "file"
        blocked.write_text("not a folder")
        decision = quick(Store(blocked / "below", warn=warnings.append))
        assert decision.state == "on"
        assert sum("cannot keep" in w for w in warnings) == 1

        warnings.clear()

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        decision = quick(Store(tmp_path / "disk", warn=warnings.append))
        assert decision.state == "on"
        assert len(warnings) == 1
        assert "No space left" in warnings[0]
        assert list((tmp_path / "disk").iterdir()) == []

    def test_it_lives_in_the_users_cache_and_warns_by_log(
        self, user_cache: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        assert default_folder() == user_cache / "measurements"
        store = Store()
        quick(store)
        assert len(list(default_folder().iterdir())) == 3
        store.path(keys_of(small())["latency"]).write_text("?")
        with caplog.at_level(logging.WARNING):
            quick(store)
        assert len(caplog.records) == 1


class TestPlanFile:
    SUBLAYERS = sublayers_of(3)
    DRAFT = Draft(Plan((*Plan.skipping(5, [1, 2]).modes, Mode(ModeKind.WINDOW, 4, 256))), 5, 0.65)

    def save(self, path: Path) -> dict[str, object]:
        plan_file.save(path, self.DRAFT, self.SUBLAYERS, "finger", "llama")
        return json.loads(path.read_text())

    def test_round_trip(self, tmp_path: Path) -> None:
        path = tmp_path / "plan.json"
        self.save(path)
        assert plan_file.load(path, self.SUBLAYERS, "finger", "llama") == self.DRAFT
        assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]

    def test_another_model_is_refused_with_the_reason(self, tmp_path: Path) -> None:
        path = tmp_path / "plan.json"
        self.save(path)
        with pytest.raises(PlanError, match="another model file"):
            plan_file.load(path, self.SUBLAYERS, "other")
        with pytest.raises(PlanError, match="6 sublayers, this one has 8"):
            plan_file.load(path, sublayers_of(4), "finger")
        with pytest.raises(PlanError, match="architecture llama, this one is gemma3"):
            plan_file.load(path, self.SUBLAYERS, "finger", "gemma3")
        with pytest.raises(PlanError, match="attention 0 in place 0"):
            plan_file.load(path, sublayers_of(6, parallel=True), "finger")

    def test_anything_else_is_no_plan_in_one_line(self, tmp_path: Path) -> None:
        path = tmp_path / "plan.json"
        good = self.save(path)
        entries = good["sublayers"]
        assert isinstance(entries, list)
        bad: list[object] = [
            3,
            {},
            {**good, "version": 2},
            {**good, "max_tokens": 0},
            {**good, "max_tokens": "many"},
            {**good, "min_probability": 2},
            {**good, "min_probability": None},
            {**good, "sublayers": 5},
            {**good, "sublayers": [*entries[:-1], 7]},
            {**good, "sublayers": [*entries[:-1], {**entries[-1], "mode": "half"}]},
            {**good, "sublayers": [*entries[:-1], {**entries[-1], "kind": "magic"}]},
            {k: v for k, v in good.items() if k != "model"},
        ]
        for data in bad:
            path.write_text(json.dumps(data))
            with pytest.raises(UsageError) as caught:
                plan_file.load(path, self.SUBLAYERS, "finger")
            assert str(path) in str(caught.value)
            assert "\n" not in str(caught.value)
        path.write_bytes(b"\x00\xff")
        with pytest.raises(UsageError, match="not JSON"):
            plan_file.load(path, self.SUBLAYERS, "finger")
        with pytest.raises(UsageError, match="cannot read"):
            plan_file.load(tmp_path / "absent.json", self.SUBLAYERS, "finger")
        with pytest.raises(UsageError, match="cannot write"):
            plan_file.save(tmp_path / "no" / "p.json", self.DRAFT, self.SUBLAYERS, "finger")


class TestGuard:
    """Auto goes on plainly when speculation turns out to be a loss here."""

    LOSING = Draft(Plan.skipping(12, [1]), 4, 0.0)

    def answer(self, backend: FakeBackend, guard: SpeedGuard | None, draft: Draft, n: int = 300):
        session = Session(backend, clock=backend.clock)
        generation = session.generate(CALIBRATION[:20], draft=draft, max_tokens=n, guard=guard)
        tokens = [event.token for event in generation]
        return tokens, generation.stats

    def test_a_loss_is_stopped_soon_and_the_text_stays(self) -> None:
        guard = SpeedGuard()
        tokens, stats = self.answer(toy(SLOW), guard, self.LOSING)
        plain, plain_stats = self.answer(toy(SLOW), None, Draft(Plan.full(12), 0, 0.0))
        assert tokens == plain
        assert stats.speculation_stopped is not None
        assert "x of plain decoding" in stats.speculation_stopped
        assert stats.draft_n > 0
        step = plain_stats.predicted_ms / plain_stats.completion_tokens
        lost_steps = (stats.predicted_ms - plain_stats.predicted_ms) / step
        # the allowance, one round beyond it, and the first round, which is not judged
        assert 0 < lost_steps < Config().guard_loss_steps + 2 * 9

    def test_a_gain_goes_on(self) -> None:
        draft = Draft(Plan.skipping(12, [1, 2, 3, 4]), 4, 0.0)
        tokens, stats = self.answer(toy(FAST), SpeedGuard(), draft)
        _, unguarded = self.answer(toy(FAST), None, draft)
        assert stats.speculation_stopped is None
        assert stats.predicted_ms < 1.1 * unguarded.predicted_ms

    def test_explicit_speculation_is_never_stopped(self) -> None:
        _, stats = self.answer(toy(SLOW), None, self.LOSING)
        assert stats.speculation_stopped is None
        assert sum(stats.accepted_lengths.values()) >= stats.rounds - 1

    def test_a_conversation_in_which_it_never_pays_loses_less_each_time(self) -> None:
        guard = SpeedGuard()
        drafted = [self.answer(toy(SLOW), guard, self.LOSING)[1].draft_n for _ in range(4)]
        assert drafted[0] > drafted[2] >= drafted[3] > 0
        good = Draft(Plan.skipping(12, [1, 2, 3, 4]), 4, 0.0)
        assert self.answer(toy(FAST), guard, good)[1].speculation_stopped is None
        assert self.answer(toy(SLOW), guard, self.LOSING)[1].draft_n >= drafted[1]

    def test_plain_speed_is_measured_again_as_the_context_grows(self) -> None:
        draft = Draft(Plan.skipping(12, [1, 2, 3, 4]), 3, 0.0)
        _, stats = self.answer(toy(FAST), SpeedGuard(), draft, 900)
        plain_rounds = stats.rounds - sum(stats.accepted_lengths.values())
        assert plain_rounds > 2 * Config().guard_plain_rounds

    def test_one_stalled_round_is_forgiven(self) -> None:
        backend = toy(FAST)
        calls = [0]

        def stall(call: str) -> None:
            calls[0] += call == "verify"
            if call == "verify" and calls[0] == 9:
                backend.now_ms += 1e5

        backend.on_call = stall
        draft = Draft(Plan.skipping(12, [1, 2, 3, 4]), 4, 0.0)
        _, stats = self.answer(backend, SpeedGuard(), draft)
        assert stats.speculation_stopped is None


def test_kinds_in_files_are_the_words_of_the_records() -> None:
    assert {k.value for k in Kind} == {"attention", "mlp", "block", "recurrent"}
    assert plan_file.parse_mode(str(SKIP)) == SKIP


def test_an_interrupt_after_the_latency_phase_costs_no_second_one(tmp_path: Path) -> None:
    store = Store(tmp_path)
    backend = toy()

    def stop(call: str) -> None:
        if call == "prefill":
            raise interrupted()

    backend.on_call = stop
    with pytest.raises(Interrupted):
        decide_for(backend, store)
    again = toy()
    assert decide_for(again, store).state == "on"
    assert not again.calls("append"), "passes without a head belong to the latency phase"
