"""What a decision means in figures: items, curve, judged plans, and the sentences about them."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace

import pytest
from fakes import Costs as ToyCosts
from fakes import FakeBackend, ToyModel
from hypothesis import given
from hypothesis import strategies as st
from sample_plan import (
    CONTEXT,
    alternating,
    block_outlook,
    decision_of,
    finalist,
    measured_of,
    sample_outlook,
)

from knapspec_edge.config import Config
from knapspec_edge.latency.store import Store
from knapspec_edge.records import Plan
from knapspec_edge.search.candidates import candidate_plans, cuts
from knapspec_edge.search.outlook import count_skipped, describe, outlook, wilson_interval
from knapspec_edge.search.planner import Decision, at_context, decide, measurement_key, room_tokens
from knapspec_edge.search.throughput import expected_tokens, expected_tokens_geometric


class TestWilson:
    def test_known_values(self) -> None:
        # Wilson (1927), as in every table of it
        assert wilson_interval(5, 10) == pytest.approx((0.2366, 0.7634), abs=1e-4)
        assert wilson_interval(10, 10) == pytest.approx((0.7225, 1.0), abs=1e-4)
        assert wilson_interval(0, 10) == pytest.approx((0.0, 0.2775), abs=1e-4)
        assert wilson_interval(0, 0) == (0.0, 1.0)

    @given(st.integers(1, 500), st.floats(0.0, 1.0))
    def test_it_holds_the_share_and_stays_within_bounds(self, total: int, share: float) -> None:
        low, high = wilson_interval(share * total, total)
        assert 0.0 <= low <= share * total / total <= high <= 1.0

    def test_it_covers_the_truth_about_as_often_as_it_says(self) -> None:
        dice = random.Random(3)
        covered = 0
        for _ in range(2000):
            agreed = sum(dice.random() < 0.85 for _ in range(48))
            low, high = wilson_interval(agreed, 48)
            covered += low <= 0.85 <= high
        assert 0.92 <= covered / 2000 <= 0.98


class TestItems:
    def test_costs_counts_and_modes(self) -> None:
        found = sample_outlook()
        assert [i.sublayer.index for i in found.items] == list(range(16))
        first, second = found.items[0], found.items[1]
        assert (first.agreed, first.total, first.mode) == (3, 48, "full")
        assert second.cost_ms == pytest.approx(0.25, rel=0.02)
        assert second.share == pytest.approx(second.cost_ms / found.step_ms)
        assert second.interval == wilson_interval(47, 48)
        assert found.draft is not None
        skipped = tuple(i.sublayer.index for i in found.items if i.mode == "skip")
        assert skipped == found.draft.plan.skipped

    def test_interpolated_ones_have_no_count(self) -> None:
        unprobed = [i.sublayer.index for i in sample_outlook().items if i.agreed is None]
        assert unprobed == [3, 14]

    def test_parts_add_up_to_the_step(self) -> None:
        found = sample_outlook()
        parts = sum(i.cost_ms for i in found.items) + found.head_ms + found.rest_ms
        assert parts == pytest.approx(found.step_ms)


class TestCurve:
    def test_every_saving_of_the_knapsack_is_there(self) -> None:
        sublayers, profile = alternating(8)
        measured = measured_of(profile, sublayers)
        expected = cuts(measured.costs, measured.fidelity, CONTEXT, sublayers)
        curve = outlook(
            decision_of([finalist(16, [4], 40, 48)], measured, sublayers), sublayers, {}
        ).curve
        assert [p.plan for p in curve] == [c.plan for c in expected]
        units = [c.saving_units for c in expected]
        assert units == sorted(set(units))
        assert set(candidate_plans(measured.costs, measured.fidelity, CONTEXT, sublayers)) <= {
            c.plan for c in expected
        }

    def test_a_point_by_hand(self) -> None:
        found = sample_outlook()
        point = next(p for p in found.curve if len(p.plan.skipped) == 5)
        alpha, saved = 1.0, 0.0
        for i in point.plan.skipped:
            item = found.items[i]
            alpha *= item.expected
            saved += item.cost_ms
        assert point.alpha == pytest.approx(alpha)
        assert point.saved_share == pytest.approx(saved / found.step_ms)
        assert point.skipped == count_skipped(point.plan, found.sublayers)
        # t_verify(b) = 1 + 0.25 (b - 1) in the sample's profile
        ratios = {
            g: expected_tokens_geometric(alpha, g) / (g * (1 - point.saved_share) + 1 + 0.25 * g)
            for g in range(1, 9)
        }
        assert point.draft_tokens == max(ratios, key=lambda g: ratios[g])
        assert point.ratio == pytest.approx(max(ratios.values()), rel=0.02)

    def test_what_saves_more_agrees_less(self) -> None:
        curve = sample_outlook().curve
        savings, alphas = [p.saved_share for p in curve], [p.alpha for p in curve]
        assert savings == sorted(savings)
        assert alphas == sorted(alphas, reverse=True)

    @pytest.mark.parametrize("parts", [1, 5, 12, 1000])
    def test_the_front_is_short_and_holds_the_best_prediction(self, parts: int) -> None:
        found = sample_outlook(80)
        front = found.front(parts)
        assert 1 <= len(front) <= parts
        savings = [p.saved_share for p in front]
        assert savings == sorted(savings)
        best = max(found.curve, key=lambda p: p.ratio)
        assert best in front

    def test_no_curve_where_nothing_may_be_left_out(self) -> None:
        found = sample_outlook(curve=())
        assert found.front(12) == []

    def test_what_saves_nothing_is_not_on_the_front(self) -> None:
        """A draft costs at least a step where head and rest of a step were measured as larger."""
        point = sample_outlook().curve[0]
        curve = tuple(replace(point, saved_share=share) for share in (-0.2, 0.0, 0.3))
        assert sample_outlook(curve=curve).front(12) == [curve[2]]
        assert sample_outlook(curve=curve[:2]).front(12) == []


class TestJudged:
    def test_figures_of_a_timed_plan(self) -> None:
        found = sample_outlook()
        best = found.best
        assert best is not None
        assert best.timed
        assert (best.agreed, best.total) == (100, 112)
        assert best.agreement == pytest.approx(100 / 112)
        assert best.draft_cost == pytest.approx(0.35)
        assert best.round_cost * best.ratio == pytest.approx(best.tokens_per_round)
        gamma = best.draft.max_tokens
        assert len(best.acceptance) == gamma
        assert best.tokens_per_round == pytest.approx(expected_tokens(best.acceptance), rel=1e-9)
        assert best.geometric_ratio == pytest.approx(
            expected_tokens_geometric(best.agreement, gamma)
            / (gamma * best.draft_cost + best.verify_cost)
        )

    def test_best_first_and_all_of_them(self) -> None:
        judged = sample_outlook().judged
        assert len(judged) == 3
        assert [j.timed for j in judged] == [True, True, False]
        assert judged[0].ratio > judged[1].ratio


class TestWhy:
    def test_on_names_round_and_runner_up(self) -> None:
        found = sample_outlook()
        best, second = found.judged[:2]
        assert found.state == "on"
        assert f"yields {best.tokens_per_round:.2f} tokens" in found.why
        assert f"costs {best.round_cost:.2f} plain steps, as timed in real rounds" in found.why
        assert f"{best.ratio:.2f}x" in found.why
        assert found.runner_up == (
            f"{describe(second)}: {second.ratio:.2f}x, {best.ratio - second.ratio:.2f} less"
        )

    def test_plain_decoding_is_the_runner_up_where_no_other_draft_gains(self) -> None:
        sublayers, profile = alternating(8)
        measured = measured_of(profile, sublayers)
        timing = {"draft_step_ms": 0.3 * measured.step_ms, "verify_ms": 1.2 * measured.step_ms}
        finalists = [
            finalist(16, range(2, 15), 104, plain_step_ms=measured.step_ms, **timing),
            finalist(16, [4], 20, 48),
        ]
        found = outlook(decision_of(finalists, measured, sublayers), sublayers, {})
        assert found.state == "on"
        assert found.runner_up.startswith("plain decoding: 1.00x")

    def test_off_because_no_length_can_pay(self) -> None:
        found = block_outlook()
        best = found.best
        assert best is not None
        assert found.state == "off"
        assert best.agreement <= best.draft_cost + best.verify_slope
        assert f"α = {best.agreement:.2f}" in found.why
        assert f"c = {best.draft_cost:.2f}" in found.why
        assert f"s = {best.verify_slope:.2f}" in found.why
        assert "α <= c + s" in found.why
        assert f"{best.ratio:.2f}x, {1 - best.ratio:.2f} less" in found.runner_up

    def test_off_because_the_gain_is_less_than_asked_for(self) -> None:
        found = sample_outlook(pays=False)
        assert found.state == "off"
        assert 1.0 < found.judged[0].ratio < 1.05
        assert "less than the 1.05x asked for" in found.why
        assert "not enough of a gain" in found.runner_up

    def test_a_disturbed_measurement_says_so_and_nothing_else(self) -> None:
        sublayers, profile = alternating(4)
        measured = measured_of(profile, sublayers)
        # the machine took three times as long when rounds were timed
        busy = {"draft_step_ms": 1.0, "verify_ms": 9.0, "plain_step_ms": 3.0 * measured.step_ms}
        decision = decision_of([finalist(8, [2, 4], 110, **busy)], measured, sublayers)
        assert decision.disturbed
        found = outlook(decision, sublayers, {})
        assert found.disturbed
        assert found.why.startswith("the machine was too busy to measure")

    def test_without_a_draft(self) -> None:
        sublayers, profile = alternating(4)
        found = outlook(decision_of([], measured_of(profile, sublayers), sublayers), sublayers, {})
        assert (found.state, found.draft, found.judged) == ("off", None, ())
        assert found.why.startswith("no sublayer can be left out")
        assert {i.mode for i in found.items} == {"full"}

    def test_nothing_measured_is_an_error(self) -> None:
        with pytest.raises(ValueError, match="nothing was measured"):
            outlook(Decision("off", "off: no"), (), {})


def test_json_is_plain_and_complete() -> None:
    found = sample_outlook()
    data = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert data["state"] == "on"
    assert len(data["items"]) == 16
    assert data["items"][3]["agreed"] is None
    assert data["items"][1] == {
        "index": 1, "layer": 0, "kind": "mlp", "mode": "full", "agreed": 47, "total": 48,
        "cost_ms": pytest.approx(0.25, rel=0.02), "share": pytest.approx(0.04, rel=0.1),
        "agreement": 47 / 48, "expected": found.items[1].expected,
        "interval": list(wilson_interval(47, 48)),
    }  # fmt: skip
    assert len(data["curve"]) == len(found.curve)
    assert {"skipped", "alpha", "ratio", "draft_tokens"} <= set(data["curve"][0])
    assert data["plan"]["skipped"] == list(range(2, 15))
    assert data["judged"][0]["skipped"] == data["plan"]["skipped"]
    assert len(data["judged"][0]["acceptance"]) == data["plan"]["draft_max_tokens"]
    assert data["measurement"]["settings"]["threads"] == 4
    assert data["notes"] == ["a note of the measurement"]


class TestAtContext:
    def test_what_was_asked_for_is_not_shortened(self) -> None:
        config = at_context(Config(), 6000)
        assert config.measure_context_tokens == config.measure_min_context_tokens == 6000
        assert config.measure_limit_tokens >= 6000
        assert config.measure_budget_seconds > Config().measure_budget_seconds
        assert at_context(Config(), 64).measure_limit_tokens == Config().measure_limit_tokens
        assert at_context(Config(), 64, 7.0).measure_budget_seconds == 7.0

    def test_a_slow_model_is_measured_there_all_the_same(self) -> None:
        model = ToyModel(end_tokens=frozenset(), default_harm=0.01)
        slow = ToyCosts(fixed_ms=40.0, head_ms=20.0, attention_ms=20.0, mlp_ms=20.0)
        backend = FakeBackend(model, n_layer=4, n_ctx=512, costs=slow)
        tokens = [1 + i % 20 for i in range(300)]
        config = at_context(Config(), 300, 15.0)
        decision = decide(backend, "toy", tokens, config, clock=backend.clock)
        assert decision.measured is not None
        assert decision.measured.context_tokens == 300

    def test_each_context_is_kept_by_itself_and_found_again(self) -> None:
        store = Store()
        tokens = [1 + (7 * i * i) % 22 for i in range(200)]
        found = []
        for n in (60, 200, 60, 200):
            model = ToyModel(end_tokens=frozenset(), default_harm=0.01)
            backend = FakeBackend(model, n_layer=2, n_ctx=512)
            config = at_context(Config(), n, 3.0)
            decision = decide(backend, "toy", tokens[:n], config, store, clock=backend.clock)
            assert decision.measured is not None
            found.append((decision.measured.context_tokens, decision.from_cache))
        assert found == [(60, False), (200, False), (60, True), (200, True)]

    def test_the_usual_measurement_keeps_its_key(self) -> None:
        backend = FakeBackend(n_ctx=512)
        keys = [
            measurement_key(backend, "toy", [1] * 60, config)
            for config in (Config(), at_context(Config(), 60))
        ]
        assert keys[0] != keys[1]

    def test_room(self) -> None:
        config = Config()
        assert room_tokens(100, config) > 100 + config.measure_window_tokens
        more = room_tokens(100, config, fresh=True) - room_tokens(100, config)
        assert more == config.plan_fresh_tokens


def test_a_decision_on_the_toy_model_can_be_looked_at() -> None:
    costs = ToyCosts(fixed_ms=0.2, head_ms=0.3, attention_ms=1.0, mlp_ms=1.0, per_token=0.02)
    model = ToyModel(end_tokens=frozenset(), default_harm=0.01)
    backend = FakeBackend(model, n_layer=6, n_ctx=1024, costs=costs)
    tokens = [1 + (7 * i * i) % 22 for i in range(300)]
    config = at_context(Config(), 300)
    decision = decide(backend, "toy", tokens, config, clock=backend.clock)
    found = outlook(decision, backend.sublayers, backend.settings, config)
    assert found.state == "on"
    assert found.context_tokens == 300
    assert found.best is not None
    assert found.draft == found.best.draft
    assert found.best.draft.plan == decision.alternatives[0].draft.plan
    step_ms = costs.step_ms(backend.sublayers, 300, None)
    assert found.step_ms == pytest.approx(step_ms, rel=0.05)
    draft_ms = costs.step_ms(backend.sublayers, 300, found.draft.plan)
    assert found.best.draft_cost == pytest.approx(draft_ms / step_ms, rel=0.05)
    assert not math.isnan(found.best.ratio)
    empty = replace(found, judged=())
    assert empty.best is None
    assert count_skipped(Plan.full(12), backend.sublayers) == {"attention": 0, "mlp": 0}
