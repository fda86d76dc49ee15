"""How far to draft: the value rule against a naive twin, by hand, and against fixed rules."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_draft_length import ValueTwin

from knapspec_edge.search.draft_length import CONFIDENCE_BINS, Calibration, FixedRule, ValueRule
from knapspec_edge.search.throughput import Replay, Rule, Window, replay
from knapspec_edge.search.valuation import Prices, rate_by_value

# Two sides of a comparison that are nearer than this may round either way.
TIE = 1e-9

confidence = st.floats(0.0, 1.0)
observed = st.lists(st.tuples(confidence, st.booleans()), max_size=60)
verify_curves = st.lists(st.floats(0.0, 3.0), min_size=1, max_size=8).map(
    lambda extra: [1.0, *(1.0 + sum(extra[: i + 1]) for i in range(len(extra)))]
)


def calibrated(tokens: list[tuple[float, bool]]) -> Calibration:
    calibration = Calibration()
    for sure, accepted in tokens:
        calibration.observe(sure, accepted)
    return calibration


def certain(acceptance: float, tokens: int = 4000) -> Calibration:
    """So much was seen that acceptance is as given, whatever the confidence."""
    tried = [float(tokens)] * (len(CONFIDENCE_BINS) + 1)
    return Calibration(512.0, [acceptance * t for t in tried], tried)


def drafted_by(rule: ValueRule | FixedRule, confidences: list[float]) -> tuple[int, int]:
    """(drafted, verified) by asking token by token, as the loop does."""
    n = 0
    while n < len(confidences) and rule.go_on(confidences[:n]):
        n += 1
    return n, rule.keep(confidences[:n])


class TestValueRule:
    @settings(max_examples=300)
    @given(
        observed,
        st.floats(0.0, 1.5),
        verify_curves,
        st.floats(0.05, 3.0),
        st.lists(confidence, max_size=10),
        st.integers(0, 2),
    )
    def test_equals_the_naive_twin(
        self, tokens, draft_ms, verify_ms, rate, confidences, least
    ) -> None:
        least = min(least, len(verify_ms) - 1)
        calibration = calibrated(tokens)
        rule = ValueRule(calibration, draft_ms, verify_ms, rate, least=least)
        twin = ValueTwin(calibration, draft_ms, verify_ms, rate, least)
        for n in range(len(confidences) + 1):
            so_far = confidences[:n]
            if abs(gain := twin.gain(so_far)) > TIE:
                assert rule.go_on(so_far) == (gain > 0)
            if least <= n <= rule.most:
                kept = rule.keep(so_far)
                assert least <= kept <= n
                assert twin.worth(so_far, kept) >= twin.best_now(so_far) - TIE

    @settings(max_examples=200)
    @given(
        observed,
        st.floats(0.0, 1.0),
        verify_curves,
        st.floats(0.05, 3.0),
        st.lists(st.lists(confidence, min_size=5, max_size=5), min_size=1, max_size=8),
        st.integers(0, 2),
        st.integers(1, 5),
    )
    def test_many_rounds_at_once_are_the_same_rounds(
        self, tokens, draft_ms, verify_ms, rate, rows, least, m
    ) -> None:
        rows = [row[:m] for row in rows]
        least = min(least, len(verify_ms) - 1, m)
        rule = ValueRule(calibrated(tokens), draft_ms, verify_ms, rate, least=least)
        drafted, verified = rule.lengths(np.array(rows))
        assert list(zip(drafted.tolist(), verified.tolist(), strict=True)) == [
            drafted_by(rule, row) for row in rows
        ]

    @given(observed, verify_curves, st.floats(0.0, 5.0))
    def test_never_beyond_what_can_be_verified(self, tokens, verify_ms, rate) -> None:
        rule = ValueRule(calibrated(tokens), 0.0, verify_ms, rate)
        assert rule.most == len(verify_ms) - 1
        sure = [1.0] * 20
        assert not rule.go_on(sure[: rule.most])
        assert not rule.go_on(sure)
        assert drafted_by(rule, sure)[0] <= rule.most

    def test_so_many_in_any_case(self) -> None:
        """Forced speculation drafts and verifies, whatever it costs."""
        rule = ValueRule(certain(0.01), 5.0, [1.0, 50.0, 100.0], 1.0, least=1)
        assert drafted_by(rule, [0.0, 0.0]) == (1, 1)
        free = ValueRule(certain(0.01), 5.0, [1.0, 50.0, 100.0], 1.0)
        assert drafted_by(free, [0.0, 0.0]) == (0, 0)

    def test_a_pass_that_costs_no_more_is_filled(self) -> None:
        """On a staircase, as wide kernels make it, the next token alone decides nothing."""
        width_ms = [1.0, 1.5, 2.0, 2.5, 3.0, 3.0, 3.0, 3.0, 6.0]  # of passes over 1..9 tokens
        rule = ValueRule(certain(0.9), 0.05, width_ms, 1.0)
        assert drafted_by(rule, [0.95] * 20) == (7, 7)

    def test_a_step_up_is_climbed_where_the_stair_behind_it_pays(self) -> None:
        """The next token costs more than it yields; the seven behind it are free."""
        width_ms = [1.0, 2.2, 2.2, 2.2, 2.2, 2.2, 2.2, 2.2]
        rule = ValueRule(certain(0.9), 0.05, width_ms, 1.0)
        assert rule.go_on([])
        assert drafted_by(rule, [0.95] * 20) == (7, 7)
        assert not ValueRule(certain(0.9), 0.05, width_ms[:2], 1.0).go_on([])

    def test_a_dear_next_token_stops(self) -> None:
        rule = ValueRule(certain(0.95), 0.1, [1.0, 1.1, 1.2, 4.0, 4.1], 1.0)
        assert drafted_by(rule, [1.0] * 4) == (2, 2)

    def test_a_doubtful_tail_is_not_verified(self) -> None:
        tokens = [(0.97, True)] * 60 + [(0.1, False)] * 60
        rule = ValueRule(calibrated(tokens), 0.1, [1.0, 1.3, 1.6, 1.9], 1.0)
        assert rule.keep([0.97, 0.97, 0.1]) == 2
        assert rule.keep([0.1, 0.97, 0.97]) == 0, "nothing behind a wrong token is worth a pass"
        assert rule.keep([0.97] * 3) == 3

    def test_of_equal_prefixes_the_longest(self) -> None:
        """What costs nothing is verified: it teaches."""
        rule = ValueRule(certain(0.0), 0.0, [1.0, 1.0, 1.0, 1.5], 1.0)
        assert rule.keep([0.5] * 3) == 2

    def test_time_worth_more_means_shorter_drafts(self) -> None:
        curve = [1.0 + 0.15 * j for j in range(9)]
        lengths = [
            drafted_by(ValueRule(certain(0.8), 0.2, curve, rate), [0.9] * 8)[0]
            for rate in (0.3, 0.8, 1.2, 2.0, 4.0)
        ]
        assert lengths == sorted(lengths, reverse=True)
        assert lengths[0] > lengths[2] > lengths[-1] == 0

    def test_nonsense_is_refused(self) -> None:
        with pytest.raises(ValueError, match="at least one"):
            ValueRule(Calibration(), 1.0, [1.0], 1.0)
        with pytest.raises(ValueError, match="at least one"):
            ValueRule(Calibration(), 1.0, [1.0, 2.0], 1.0, least=2)


class TestFixedRule:
    @given(
        st.integers(1, 8),
        st.floats(0, 1),
        st.lists(st.lists(confidence, min_size=6, max_size=6), min_size=1, max_size=5),
    )
    def test_many_rounds_at_once_are_the_same_rounds(self, most, threshold, rows) -> None:
        rule = FixedRule(most, threshold)
        drafted, verified = rule.lengths(np.array(rows))
        assert list(zip(drafted.tolist(), verified.tolist(), strict=True)) == [
            drafted_by(rule, row) for row in rows
        ]

    def test_the_doubtful_token_is_still_verified(self) -> None:
        assert drafted_by(FixedRule(8, 0.7), [0.9, 0.8, 0.1, 0.9]) == (3, 3)


def text(seed: int, n: int = 1500, well: bool = True) -> Window:
    """Picks that are right as often as the draft is sure, or (not `well`) never mind how sure."""
    dice = random.Random(seed)
    sure = [min(1.0, dice.betavariate(2.0, 0.4)) for _ in range(n)]
    agree = [dice.random() < (p if well else 0.8) for p in sure]
    return Window(tuple(agree), tuple(sure))


CURVES = {
    "flat": [1.0] + [1.05] * 8,
    "linear": [1.0 + 0.12 * j for j in range(9)],
    "dear": [1.0 + 0.4 * j for j in range(9)],
    "stairs": [1.0, 1.6, 1.6, 1.6, 2.4, 2.4, 2.4, 2.4, 4.0],
}


class TestAgainstFixedRules:
    @pytest.mark.parametrize("curve", CURVES)
    @pytest.mark.parametrize("draft_ms", [0.05, 0.3, 0.6])
    @pytest.mark.parametrize("well", [True, False])
    def test_no_fixed_rule_is_faster(self, curve: str, draft_ms: float, well: bool) -> None:
        verify_ms, window = CURVES[curve], text(3, well=well)
        prices = Prices(1.0, draft_ms, tuple(verify_ms))
        calibration = Calibration.of(window.probability, window.agree, 1e6)
        by_value, rate = rate_by_value([window], prices, calibration)
        assert by_value is not None
        assert rate == pytest.approx(1.0 / by_value.ms_per_token)

        def of(rule: Rule) -> Replay:
            found = replay([window], rule, draft_ms, lambda b: verify_ms[b - 1], longest=8)
            assert found is not None
            return found

        fixed = min(
            of(FixedRule(gamma, threshold)).ms_per_token
            for gamma in range(1, 9)
            for threshold in (0.0, 0.3, 0.5, 0.7, 0.9, 0.97)
        )
        assert by_value.ms_per_token <= 1.02 * fixed

    def test_where_confidence_tells_much_it_is_faster(self) -> None:
        """Or the comparison above would pass with a rule that imitates one of them."""
        dice = random.Random(5)
        sure = [dice.choice([0.995, 0.3]) for _ in range(2000)]
        window = Window(tuple(dice.random() < p for p in sure), tuple(sure))
        verify_ms, draft_ms = CURVES["dear"], 0.1
        calibration = Calibration.of(window.probability, window.agree, 1e6)
        by_value, _ = rate_by_value([window], Prices(1.0, draft_ms, tuple(verify_ms)), calibration)
        best = min(
            replay([window], FixedRule(g, t), draft_ms, lambda b: verify_ms[b - 1], 8).ms_per_token
            for g in range(1, 9)
            for t in (0.0, 0.7)
        )
        assert by_value.ms_per_token < 0.97 * best


class TestCalibration:
    def test_without_observations_it_is_the_prior(self) -> None:
        new = Calibration()
        assert new.acceptance(0.0) == pytest.approx(0.15)
        assert new.acceptance(1.0) == pytest.approx(0.90)
        assert new.mean() == pytest.approx(0.7)

    def test_it_comes_to_what_was_observed_in_each_bin(self) -> None:
        dice = random.Random(1)
        calibration = Calibration(2000.0)
        for _ in range(6000):
            sure = dice.choice([0.1, 0.6, 0.995])
            calibration.observe(sure, dice.random() < {0.1: 0.4, 0.6: 0.5, 0.995: 0.97}[sure])
        assert calibration.acceptance(0.1) == pytest.approx(0.4, abs=0.05)
        assert calibration.acceptance(0.6) == pytest.approx(0.5, abs=0.05)
        assert calibration.acceptance(0.995) == pytest.approx(0.97, abs=0.02)
        assert calibration.mean() == pytest.approx((0.4 + 0.5 + 0.97) / 3, abs=0.04)

    def test_old_observations_fade(self) -> None:
        calibration = Calibration(memory_tokens=50.0)
        for _ in range(500):
            calibration.observe(0.9, True)
        assert calibration.acceptance(0.9) > 0.95
        for _ in range(150):
            calibration.observe(0.9, False)
        assert calibration.acceptance(0.9) < 0.15
        assert sum(calibration.tried) <= 50.0 + 1e-9

    def test_a_bin_that_is_not_seen_goes_back_to_the_prior(self) -> None:
        calibration = Calibration(memory_tokens=50.0)
        for _ in range(100):
            calibration.observe(0.3, True)
        for _ in range(500):
            calibration.observe(0.9, True)
        assert calibration.acceptance(0.3) == pytest.approx(Calibration().acceptance(0.3), abs=0.01)

    def test_what_comes_after_a_wrong_token_does_not_count(self) -> None:
        calibration = Calibration()
        calibration.observe_round([0.9, 0.9, 0.1, 0.1], [True, False])
        assert sum(calibration.tried) == pytest.approx(2.0, rel=0.01)
        assert calibration.acceptance(0.1) == Calibration().acceptance(0.1)

    @given(st.lists(st.tuples(confidence, st.booleans()), max_size=80), st.floats(2.0, 1000.0))
    def test_all_at_once_is_one_after_the_other(self, tokens, memory_tokens) -> None:
        one_by_one = Calibration(memory_tokens)
        for sure, accepted in tokens:
            one_by_one.observe(sure, accepted)
        at_once = Calibration.of([c for c, _ in tokens], [a for _, a in tokens], memory_tokens)
        assert at_once.tried == pytest.approx(one_by_one.tried)
        assert at_once.right == pytest.approx(one_by_one.right)

    @given(observed, st.lists(confidence, min_size=1, max_size=20))
    def test_of_many_confidences_as_of_each(self, tokens, confidences) -> None:
        calibration = calibrated(tokens)
        assert calibration.acceptances(np.array(confidences)).tolist() == [
            calibration.acceptance(c) for c in confidences
        ]

    def test_a_copy_learns_by_itself(self) -> None:
        calibration = calibrated([(0.9, True)] * 5)
        copy = calibration.copy()
        copy.observe(0.9, False)
        assert copy.acceptance(0.9) < calibration.acceptance(0.9)
        assert sum(calibration.tried) < 5
