"""From repeated timings to predicted costs: statistics, classes, records, the fitted model."""

from __future__ import annotations

import itertools
import json
import math
import statistics
from dataclasses import dataclass, replace

import numpy as np
import pytest
from clockwork import Truth, Work, attention, mlp, profile_of
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from knapspec_edge.latency.classes import layer_classes
from knapspec_edge.latency.costs import CELLS_PER_STEP, Costs, cells_read
from knapspec_edge.latency.profile import LatencyProfile, plan_of
from knapspec_edge.latency.profiler import context_grid
from knapspec_edge.latency.regression import (
    fit_line,
    levels_without_drift,
    non_negative_least_squares,
    t95,
)
from knapspec_edge.latency.timing import Timing, without_outliers
from knapspec_edge.records import Kind, Plan, SubLayer, Traits

GRID = context_grid(8192, 34)
UNSEEN = (200, 300, 1000, 1030, 3000, 5000, 8000)  # contexts between those of the grid


def off_by(predicted: float, exact: float) -> float:
    return abs(predicted / exact - 1.0)


class TestTiming:
    def test_of_few_and_many(self) -> None:
        assert Timing.of([3.0]) == Timing(3.0, 3.0, 3.0, 1)
        assert Timing.of([4.0, 2.0, 3.0]) == Timing(3.0, 2.0, 4.0, 3)
        assert Timing.of([5.0, 1.0, 2.0, 3.0, 4.0]) == Timing(3.0, 2.0, 4.0, 5)
        with pytest.raises(statistics.StatisticsError):
            Timing.of([])

    def test_the_outlier_rule_by_hand(self) -> None:
        # median 12.5; deviations .5 .5 1.5 1.5 2.5 27.5, their median 1.5;
        # limit 12.5 + 5 * 1.4826 * 1.5 = 23.62
        assert without_outliers([14, 11, 40, 10, 13, 12]) == [10, 11, 12, 13, 14]
        assert without_outliers([14, 11, 23.6, 10, 13, 12]) == [10, 11, 12, 13, 14, 23.6]
        # of four nothing is dropped, and never what is too fast
        assert without_outliers([1.0, 1.0, 1.0, 90.0]) == [1.0, 1.0, 1.0, 90.0]
        assert without_outliers([10.0, 10.0, 0.1, 10.0, 10.0]) == [0.1, 10.0, 10.0, 10.0, 10.0]
        # samples that do not differ: 5 * 1 % above is still one of them
        assert without_outliers([10.0] * 4 + [10.5]) == [10.0] * 4 + [10.5]
        assert without_outliers([10.0] * 4 + [10.51]) == [10.0] * 4

    def test_what_is_dropped_is_counted(self) -> None:
        assert Timing.of([10.0] * 6 + [30.0, 99.0]) == Timing(10.0, 10.0, 10.0, 6, 2)

    @given(st.lists(st.floats(0.001, 1e4), min_size=1, max_size=20))
    def test_a_summary_lies_within_its_samples(self, samples: list[float]) -> None:
        timing = Timing.of(samples)
        assert timing.samples + timing.dropped == len(samples)
        assert timing.dropped <= len(samples) // 2
        low, high = min(samples), max(samples)
        # quartiles are interpolated: their last digit is not exact
        assert low * (1 - 1e-9) <= timing.low_ms <= timing.median_ms * (1 + 1e-9)
        assert timing.median_ms <= timing.high_ms * (1 + 1e-9)
        assert timing.high_ms <= high * (1 + 1e-9)
        assert timing.relative_spread >= -1e-9

    def test_relative_error_by_hand(self) -> None:
        # one sample: nothing but the prior, and 1.2533 for a median
        assert Timing.of([5.0]).relative_error(0.03) == pytest.approx(1.2533 * 0.03)
        # four equal ones: the prior counts as three, the spread seen (0) as three; over sqrt(4)
        four = Timing(5.0, 5.0, 5.0, 4)
        assert four.relative_error(0.03) == pytest.approx(1.2533 * 0.03 / math.sqrt(2) / 2)
        # many: the quartile distance of a normal distribution is sigma / 0.7413
        many = Timing(10.0, 9.9, 10.1, 10_000)
        assert many.relative_error(0.03) == pytest.approx(1.2533 * 0.7413 * 0.02 / 100, rel=1e-3)
        assert Timing(0.0, 0.0, 0.0, 3).relative_error(0.03) == 0.03

    def test_relative_error_is_that_of_a_median(self) -> None:
        """Against the scatter of the medians of many such runs."""
        dice = np.random.default_rng(5)
        runs = 10.0 * (1.0 + 0.04 * dice.standard_normal((600, 25)))
        timings = [Timing.of(run.tolist()) for run in runs]
        scatter = float(np.std([t.median_ms for t in timings])) / 10.0
        claimed = statistics.mean(t.relative_error(0.03) for t in timings)
        assert claimed == pytest.approx(scatter, rel=0.15)


def least_squares_over_all_sets(
    rows: NDArray[np.float64], values: NDArray[np.float64]
) -> tuple[float, NDArray[np.float64]]:
    """The least sum of squares with x >= 0, by trying which unknowns are zero."""
    k = rows.shape[1]
    best, best_x = float(values @ values), np.zeros(k)
    for size in range(1, k + 1):
        for free in itertools.combinations(range(k), size):
            x = np.zeros(k)
            x[list(free)] = np.linalg.lstsq(rows[:, free], values, rcond=None)[0]
            if np.all(x >= 0.0):
                error = float(np.sum((rows @ x - values) ** 2))
                if error < best:
                    best, best_x = error, x
    return best, best_x


@st.composite
def problems(draw: st.DrawFn) -> tuple[NDArray[np.float64], ...]:
    n, k = draw(st.integers(1, 12)), draw(st.integers(1, 5))
    # counts of sublayers and times look like this; equal columns and zero columns are among them
    number = st.one_of(
        st.integers(-4, 12).map(float), st.floats(-50, 50).map(lambda v: round(v, 2))
    )
    rows = np.array(draw(st.lists(number, min_size=n * k, max_size=n * k))).reshape(n, k)
    values = np.array(draw(st.lists(number, min_size=n, max_size=n)))
    sigmas = np.array(draw(st.lists(st.floats(0.1, 10), min_size=n, max_size=n)))
    return rows, values, sigmas


class TestRegression:
    @settings(max_examples=300)
    @given(problems())
    def test_equals_brute_force_over_all_active_sets(
        self, problem: tuple[NDArray[np.float64], ...]
    ) -> None:
        rows, values, sigmas = problem
        x, errors = non_negative_least_squares(rows, values, sigmas)
        assert np.all(x >= 0.0)
        assert np.all(errors >= 0.0)
        assert np.all(np.isfinite(errors))
        a, b = rows / sigmas[:, None], values / sigmas
        best, _ = least_squares_over_all_sets(a, b)
        found = float(np.sum((a @ x - b) ** 2))
        assert found <= best + 1e-6 * float(b @ b) + 1e-9

    def test_standard_errors_are_the_scatter_of_many_runs(self) -> None:
        """The design of a real fit: a constant, and how many of each class ran."""
        counts = [(8, 8), (0, 8), (4, 8), (8, 0), (8, 4), (7, 6), (5, 6), (4, 4), (2, 7), (6, 1)]
        rows = np.array([(1.0, *c) for c in counts] * 3)
        truth = np.array([1.5, 0.4, 0.7])
        dice = np.random.default_rng(3)
        exact = rows @ truth
        sigmas = 0.02 * exact
        found, claimed = [], []
        for _ in range(500):
            noisy = exact + sigmas * dice.standard_normal(len(exact))
            x, errors = non_negative_least_squares(rows, noisy, sigmas)
            found.append(x)
            claimed.append(errors)
        assert np.mean(found, axis=0) == pytest.approx(truth, rel=0.01)
        assert np.mean(claimed, axis=0) == pytest.approx(np.std(found, axis=0), rel=0.2)

    def test_errors_grow_where_the_residuals_are_larger_than_the_sigmas_say(self) -> None:
        rows = np.array([(1.0, float(i)) for i in range(30)])
        dice = np.random.default_rng(4)
        values = rows @ np.array([3.0, 0.5]) + 0.4 * dice.standard_normal(30)
        _, believed = non_negative_least_squares(rows, values, np.full(30, 0.4))
        _, doubted = non_negative_least_squares(rows, values, np.full(30, 0.01))
        assert doubted == pytest.approx(believed, rel=0.4)

    def test_an_unknown_at_its_bound_still_has_an_error(self) -> None:
        rows = np.array([(1.0, 0.0), (1.0, 1.0), (1.0, 2.0), (1.0, 3.0)])
        x, errors = non_negative_least_squares(rows, np.array([4.0, 3.9, 3.8, 3.7]), np.ones(4))
        assert x == pytest.approx([3.85, 0.0])
        # (A^T A)^-1 of both columns by hand: the slope's variance is 4 / (4 * 14 - 36)
        assert errors[1] == pytest.approx(math.sqrt(4 / 20))

    def test_scales_do_not_matter(self) -> None:
        """Contexts run to 10^5 and costs per token down to 10^-6 ms."""
        contexts = np.array([128.0, 1000.0, 8000.0, 130_000.0])
        rows = np.column_stack([np.ones(4), contexts])
        x, _ = non_negative_least_squares(rows, rows @ np.array([0.3, 2e-7]), np.full(4, 1e-3))
        assert x == pytest.approx([0.3, 2e-7], rel=1e-6)

    def test_a_line_is_numpys(self) -> None:
        dice = np.random.default_rng(1)
        for n in (3, 5, 20):
            x = np.sort(dice.uniform(0, 1000, n))
            sigmas = dice.uniform(0.1, 2.0, n)
            values = 3.0 + 0.02 * x + sigmas * dice.standard_normal(n)
            line = fit_line(x, values, sigmas)
            slope, intercept = np.polyfit(x, values, 1, w=1.0 / sigmas)
            assert (line.slope, line.intercept) == (pytest.approx(slope), pytest.approx(intercept))
            assert line.points == n
            residuals = values - intercept - slope * x
            assert line.largest_residual == pytest.approx(np.abs(residuals).max())
            _, covariance = np.polyfit(x, values, 1, w=1.0 / sigmas, cov="unscaled")
            chi2 = float(np.sum((residuals / sigmas) ** 2)) / (n - 2)
            scale = t95(n - 2) * math.sqrt(max(1.0, chi2))
            assert line.slope_half_width == pytest.approx(scale * math.sqrt(covariance[0, 0]))
            assert line.intercept_half_width == pytest.approx(scale * math.sqrt(covariance[1, 1]))

    @pytest.mark.parametrize("n", [4, 6, 12])
    def test_the_interval_covers_the_truth_as_often_as_it_says(self, n: int) -> None:
        """The sigmas given are far too small, so the residuals decide."""
        dice = np.random.default_rng(n)
        x = np.geomspace(128, 8192, n)
        hits = 0
        for _ in range(300):
            values = 1.0 + 1e-4 * x + 0.1 * dice.standard_normal(n)
            line = fit_line(x, values, np.full(n, 0.005))
            hits += abs(line.slope - 1e-4) <= line.slope_half_width
            hits += abs(line.intercept - 1.0) <= line.intercept_half_width
        assert 0.88 <= hits / 600 <= 0.99

    def test_no_interval_without_a_degree_of_freedom(self) -> None:
        flat = fit_line(np.array([5.0]), np.array([2.0]), np.ones(1))
        assert (flat.intercept, flat.slope, flat.points) == (2.0, 0.0, 1)
        assert flat.slope_half_width == flat.intercept_half_width == math.inf
        assert not flat.rises
        two = fit_line(np.array([1.0, 3.0]), np.array([2.0, 6.0]), np.ones(2))
        assert (two.intercept, two.slope) == (pytest.approx(0.0), pytest.approx(2.0))
        assert not two.rises
        same = fit_line(np.array([4.0, 4.0, 4.0]), np.array([1.0, 2.0, 3.0]), np.ones(3))
        assert (same.intercept, same.slope, same.largest_residual) == (2.0, 0.0, 1.0)

    def test_rises_only_beyond_doubt(self) -> None:
        x = np.array([1.0, 2.0, 3.0, 4.0, 5.0])
        assert fit_line(x, 2.0 * x, np.full(5, 0.1)).rises
        assert not fit_line(x, -2.0 * x, np.full(5, 0.1)).rises
        assert not fit_line(x, np.array([1.0, 1.2, 0.9, 1.1, 1.0]), np.full(5, 0.1)).rises

    def test_levels_without_a_drift_of_all(self) -> None:
        """Four contexts in turn, on a machine that slows down and recovers by a fifth."""
        seconds = np.arange(32.0)
        groups = np.array([0, 1, 2, 3] * 8)
        truth = np.log([10.0, 11.0, 14.0, 20.0])
        drift = 0.2 * np.sin(2.0 * np.pi * seconds / 16.0)
        dice = np.random.default_rng(2)
        values = truth[groups] + drift + 0.01 * dice.standard_normal(32)
        levels = levels_without_drift(seconds, groups, values)
        assert levels - levels[0] == pytest.approx(truth - truth[0], abs=0.015)
        # without drift as good as means
        calm = truth[groups] + 0.02 * dice.standard_normal(32)
        means = [calm[groups == g].mean() for g in range(4)]
        assert levels_without_drift(seconds, groups, calm) == pytest.approx(means, abs=0.01)

    def test_levels_of_few_measurements(self) -> None:
        one = levels_without_drift(np.array([3.0]), np.array([0]), np.array([7.0]))
        assert one.tolist() == [7.0]
        each = levels_without_drift(np.arange(3.0), np.array([2, 0, 1]), np.array([5.0, 6.0, 7.0]))
        assert each.tolist() == [6.0, 7.0, 5.0]
        same = levels_without_drift(np.zeros(4), np.array([0, 1, 0, 1]), np.array([1.0, 2, 1, 2]))
        assert same == pytest.approx([1.0, 2.0])
        at_once = levels_without_drift(
            np.zeros(4), np.array([0, 1, 0, 1]), np.array([1.0, 2, 3, 4])
        )
        assert at_once == pytest.approx([2.0, 3.0])

    def test_quantiles(self) -> None:
        assert t95(0) == math.inf
        assert (t95(1), t95(2), t95(10), t95(30), t95(31)) == (12.71, 4.30, 2.23, 2.04, 1.96)


def sublayers(*kinds: Kind) -> tuple[SubLayer, ...]:
    return tuple(SubLayer(i, i // 2, kind) for i, kind in enumerate(kinds))


class TestClasses:
    PAIRS = sublayers(*[Kind.ATTENTION, Kind.MLP] * 4)

    def test_without_traits_the_kind_decides(self) -> None:
        classes = layer_classes(self.PAIRS, (), 6)
        assert [(c.name, c.members) for c in classes] == [
            ("attention", (0, 2, 4, 6)),
            ("mlp", (1, 3, 5, 7)),
        ]

    def test_parallel_blocks(self) -> None:
        (block,) = layer_classes(sublayers(*[Kind.BLOCK] * 3), [Traits(7, 30)] * 3, 6)
        assert (block.name, block.kind, block.members) == ("block", Kind.BLOCK, (0, 1, 2))
        assert block.weight_bytes == 30

    def test_mixed_quantization_splits_a_kind(self) -> None:
        """As Q4_K_M: some of the MLPs have wider weights."""
        traits = [Traits(1, 100, 64, 4096), Traits(2, 200)] * 4
        for i in (1, 7):
            traits[i] = Traits(3, 300)
        classes = layer_classes(self.PAIRS, traits, 6)
        assert [(c.name, c.members, c.weight_bytes) for c in classes] == [
            ("attention", (0, 2, 4, 6), 100),
            ("mlp A", (1, 7), 300),
            ("mlp B", (3, 5), 200),
        ]
        assert (classes[0].cell_bytes, classes[0].n_cells) == (64, 4096)

    def test_windows_split_attention(self) -> None:
        traits = [Traits(1, 100, 64, 768), Traits(2, 200)] * 4
        traits[6] = Traits(9, 100, 64, 32768)
        classes = layer_classes(self.PAIRS, traits, 6)
        assert [(c.name, c.members, c.n_cells) for c in classes] == [
            ("attention A", (0, 2, 4), 768),
            ("mlp", (1, 3, 5, 7), 0),
            ("attention B", (6,), 32768),
        ]

    def test_experts_and_devices_are_told(self) -> None:
        traits = [Traits(1, 100, device="CUDA0")] * 4 + [Traits(4, 100, device="CPU")] * 4
        traits[1] = Traits(5, 900, n_experts=32, n_experts_used=4, device="CPU")
        classes = layer_classes(self.PAIRS, traits, 6)
        experts = next(c for c in classes if c.n_experts)
        assert (experts.members, experts.n_experts, experts.n_experts_used) == ((1,), 32, 4)
        assert [c.device for c in classes] == ["CUDA0", "CPU", "CUDA0", "CPU", "CPU"]

    def test_the_nearest_are_merged_beyond_the_limit(self) -> None:
        kinds = sublayers(*[Kind.MLP] * 5)
        traits = [Traits(i, size) for i, size in enumerate((100, 900, 110, 500, 480))]
        classes = layer_classes(kinds, traits, 3)
        assert [c.members for c in classes] == [(0, 2), (1,), (3, 4)]
        assert [c.weight_bytes for c in classes] == [105, 900, 490]
        assert [c.members for c in layer_classes(kinds, traits, 1)] == [(0, 1, 2, 3, 4)]
        assert [c.members for c in layer_classes(kinds, traits, 0)] == [(0, 1, 2, 3, 4)]

    def test_of_equal_cache_and_place_first(self) -> None:
        """A sliding window is not merged with a full cache while anything else can be."""
        kinds = sublayers(*[Kind.ATTENTION] * 3)
        traits = [Traits(1, 100, 64, 512), Traits(2, 101, 64, 9999), Traits(3, 900, 64, 512)]
        assert [c.members for c in layer_classes(kinds, traits, 2)] == [(0, 2), (1,)]

    @given(
        st.lists(
            st.tuples(st.sampled_from(list(Kind)), st.integers(0, 9), st.integers(0, 1000)),
            min_size=1,
            max_size=40,
        ),
        st.integers(1, 4),
    )
    def test_every_sublayer_is_in_one_class(
        self, items: list[tuple[Kind, int, int]], most: int
    ) -> None:
        found = sublayers(*(kind for kind, _, _ in items))
        classes = layer_classes(found, [Traits(s, size) for _, s, size in items], most)
        assert sorted(i for c in classes for i in c.members) == list(range(len(items)))
        assert all(list(c.members) == sorted(c.members) for c in classes)
        assert all(found[i].kind is c.kind for c in classes for i in c.members)
        assert len({c.name for c in classes}) == len(classes)
        for kind in Kind:
            assert sum(c.kind is kind for c in classes) <= most
        firsts = [c.members[0] for c in classes]
        assert firsts == sorted(firsts)

    def test_traits_for_another_number_of_sublayers_are_a_fault(self) -> None:
        with pytest.raises(ValueError, match="zip"):
            layer_classes(self.PAIRS, [Traits(1, 1)], 6)


class TestProfileRecord:
    def test_it_survives_json(self) -> None:
        truth = Truth.alternating(6, attention(window_cells=512), mlp(weight_bytes=7))
        profile = profile_of(truth, GRID, noise=0.02)
        again = LatencyProfile.from_json(json.loads(json.dumps(profile.to_json())))
        assert again == profile
        assert again.notes == ("a note",)

    def test_what_it_holds(self) -> None:
        truth = Truth.alternating(3, attention(), mlp())
        profile = profile_of(truth, [128, 500, 1000], widths=(4, 2))
        assert profile.contexts == (128, 500, 1000)
        assert profile.widths == (1, 2, 4)
        assert [s.timing.median_ms for s in profile.steps()] == pytest.approx(
            [truth.ms(c) for c in (128, 500, 1000)]
        )
        assert profile.spread == 0.0
        plans = [plan_of(s, 6) for s in profile.samples]
        assert plans[0] is None
        assert Plan.skipping(6, [0, 2, 4]) in plans

    def test_the_spread_is_the_median_over_the_contexts(self) -> None:
        profile = profile_of(Truth.alternating(2, attention(), mlp()), [128, 256, 512])
        spreads = iter((0.1, 0.9, 0.3))

        def spread_out(sample):  # type: ignore[no-untyped-def]
            if sample.width > 1 or sample.skipped or not sample.head:
                return sample
            high_ms = (1.0 + next(spreads)) * sample.timing.low_ms
            return replace(sample, timing=replace(sample.timing, high_ms=high_ms))

        wide = replace(profile, samples=tuple(map(spread_out, profile.samples)))
        assert wide.spread == pytest.approx(0.3)

    @pytest.mark.parametrize(
        "change",
        [
            {"n_sublayers": 5},
            {"n_sublayers": None},
            {"classes": []},
            {"classes": 3},
            {"samples": []},
            {"samples": [{"context_tokens": 1}]},
            {"limit_tokens": "many"},
            {"settings": 4},
            {"notes": None},
            {"measured_at": None},
        ],
    )
    def test_anything_else_is_refused(self, change: dict[str, object]) -> None:
        good = profile_of(Truth.alternating(3, attention(), mlp()), [128, 500]).to_json()
        with pytest.raises((KeyError, TypeError, ValueError)):
            LatencyProfile.from_json({**good, **change})
        for name in good:
            if name not in change:
                continue
            with pytest.raises(KeyError):
                LatencyProfile.from_json({k: v for k, v in good.items() if k != name})

    @pytest.mark.parametrize("value", [math.nan, -1.0, math.inf, "fast", None, 0.0])
    def test_a_time_that_is_none_is_refused(self, value: object) -> None:
        data = profile_of(Truth.alternating(3, attention(), mlp()), [128, 500]).to_json()
        data["samples"][0]["timing"]["median_ms"] = value
        with pytest.raises((KeyError, TypeError, ValueError)):
            LatencyProfile.from_json(json.loads(json.dumps(data)))

    @pytest.mark.parametrize(
        ("name", "value"),
        [("width", 0), ("width", -3), ("context_tokens", -1), ("skipped", "40"), ("skipped", "-1")],
    )
    def test_a_pass_that_cannot_be_is_refused(self, name: str, value: object) -> None:
        data = profile_of(Truth.alternating(3, attention(), mlp()), [128, 500]).to_json()
        data["samples"][1][name] = value
        with pytest.raises((KeyError, TypeError, ValueError)):
            LatencyProfile.from_json(data)

    def test_a_large_one_is_a_small_file(self) -> None:
        truth = Truth.alternating(
            32, *(w for k in range(6) for w in (attention(weight_bytes=k), mlp(weight_bytes=k)))
        )
        contexts = [128 * 2**k - (k % 2) for k in range(10)]
        profile = profile_of(truth, contexts, widths=[*range(2, 17), 24, 32], noise=0.03)
        assert (profile.n_sublayers, len(profile.contexts)) == (64, 10)
        assert len(profile.samples) > 400
        assert len(json.dumps(profile.to_json())) < 200_000


class TestCosts:
    """Fitted on what a profiler would see of a known truth; asked at contexts it did not see."""

    LINEAR = Truth.alternating(8, attention(0.5, 2e-4), mlp(0.8))

    def test_a_linear_truth_is_found(self) -> None:
        costs = Costs(profile_of(self.LINEAR, GRID))
        for context in (*GRID, *UNSEEN):
            assert costs.step_ms(context) == pytest.approx(self.LINEAR.ms(context), rel=1e-3)
            assert costs.saving_ms(0, context) == pytest.approx(0.5 + 2e-4 * context, rel=1e-2)
            assert costs.saving_ms(1, context) == pytest.approx(0.8, rel=1e-3)
        attention_cost, mlp_cost = costs.class_costs
        assert attention_cost.layer_class.name == "attention"
        assert attention_cost.is_line
        assert attention_cost.line.slope == pytest.approx(2e-4, rel=0.02)
        assert attention_cost.line.intercept == pytest.approx(0.5, rel=0.02)
        assert attention_cost.line.rises
        assert [p[0] for p in attention_cost.points] == GRID
        assert mlp_cost.is_line
        assert not mlp_cost.line.rises
        assert mlp_cost.line.intercept == pytest.approx(0.8, rel=1e-3)

    def test_the_confidence_interval_holds_the_truth(self) -> None:
        """Over 60 noisy profiles about as often as it says."""
        inside = 0
        for seed in range(60):
            costs = Costs(profile_of(self.LINEAR, GRID, noise=0.02, seed=seed, widths=()))
            line = costs.class_costs[0].line
            inside += abs(line.slope - 2e-4) <= line.slope_half_width
        assert inside >= 52

    @pytest.mark.parametrize(("per_token", "per_cell"), [(0.0, 4e-4), (2e-4, 2e-4), (4e-4, 0.0)])
    def test_cells_and_tokens_are_told_apart(self, per_token: float, per_cell: float) -> None:
        """A pass reads cells in steps: the cost of a cache may jump where a step begins."""
        truth = Truth.alternating(8, attention(0.3, per_token, per_cell_ms=per_cell), mlp(0.8))
        costs = Costs(profile_of(truth, GRID))
        for edge in range(CELLS_PER_STEP, 8192, CELLS_PER_STEP):
            for context in (edge - 2, edge - 1, edge, edge + 3):
                exact = truth.works[0].ms(context)
                assert costs.saving_ms(0, context) == pytest.approx(exact, rel=0.02)
                assert costs.step_ms(context) == pytest.approx(truth.ms(context), rel=0.01)

    def test_cells_read(self) -> None:
        assert [cells_read(c) for c in (0, 254, 255, 256, 511, 512)] == [
            256,
            256,
            256,
            512,
            512,
            768,
        ]
        assert cells_read(250, 6) == 256
        assert cells_read(250, 7) == 512

    def test_a_sliding_window_saturates(self) -> None:
        truth = Truth(
            tuple(
                w
                for i in range(6)
                for w in (
                    attention(0.2, 0.0, per_cell_ms=5e-4, window_cells=(1024, 0)[i == 5]),
                    mlp(),
                )
            )
        )
        costs = Costs(profile_of(truth, GRID))
        for context in (*GRID, *UNSEEN):
            for i in (0, 10):
                exact = truth.works[i].ms(context)
                assert costs.saving_ms(i, context) == pytest.approx(exact, rel=0.03)
        assert costs.saving_ms(0, 20_000) == pytest.approx(0.2 + 5e-4 * 1024, rel=0.03)
        exact = truth.works[10].ms(20_000)
        assert costs.saving_ms(10, 20_000) == pytest.approx(exact, rel=0.03)
        assert not costs.class_costs[0].is_line
        assert costs.class_costs[0].layer_class.n_cells == 1024
        assert off_by(costs.step_ms(20_000), truth.ms(20_000)) < 0.02

    def test_what_no_line_fits_is_interpolated(self) -> None:
        """A cache that outgrows the processor's: from 1024 tokens on each costs four times more."""

        @dataclass(frozen=True)
        class Kinked(Work):
            def ms(
                self, context_tokens: float, width: int = 1, most_tokens: float = math.inf
            ) -> float:
                beyond = max(0.0, context_tokens - 1024.0)
                return (
                    super().ms(context_tokens, width, most_tokens)
                    + 3.0 * self.per_token_ms * beyond
                )

        truth = Truth.alternating(8, Kinked(Kind.ATTENTION, 0.5, 4e-4), mlp())
        grid = [128, 255, 512, 1024, 2048, 4096, 8158]
        costs = Costs(profile_of(truth, grid))
        assert not costs.class_costs[0].is_line
        assert costs.class_costs[1].is_line
        for context in grid:
            exact = truth.works[0].ms(context)
            assert costs.saving_ms(0, context) == pytest.approx(exact, rel=0.01)
        # the kink lies on a measured context, so between them all is straight, but for cells
        for context in UNSEEN:
            assert off_by(costs.saving_ms(0, context), truth.works[0].ms(context)) < 0.06
            plan = Plan.skipping(16, [0, 2, 5])
            assert off_by(costs.draft_ms(plan, context), truth.ms(context, 1, [0, 2, 5])) < 0.05

    @pytest.mark.parametrize(("noise", "tolerance"), [(0.0, 1e-3), (0.02, 0.02), (0.05, 0.04)])
    def test_plans_that_are_not_in_the_fit(self, noise: float, tolerance: float) -> None:
        works = [attention(0.5, 2e-4), mlp(0.8), attention(0.5, 2e-4), mlp(1.4, weight_bytes=1750)]
        truth = Truth.alternating(12, *works)
        costs = Costs(profile_of(truth, GRID, noise=noise))
        misses = []
        for skipped in truth.random_plans(25, seed=99):
            plan = Plan.skipping(24, list(skipped))
            for context in (150, 900, 4000, 8000):
                predicted = costs.draft_ms(plan, context)
                misses.append(off_by(predicted, truth.ms(context, 1, skipped)))
        assert statistics.median(misses) < tolerance
        assert max(misses) < 6 * tolerance

    def test_nothing_and_everything_left_out(self) -> None:
        costs = Costs(profile_of(self.LINEAR, GRID))
        assert costs.draft_ms(Plan.full(16), 500) == costs.step_ms(500)
        nothing = costs.draft_ms(Plan.skipping(16, list(range(16))), 500)
        assert nothing == pytest.approx(self.LINEAR.fixed_ms + self.LINEAR.head_ms, rel=0.01)

    def test_verification_between_contexts_and_widths(self) -> None:
        """Linear in tokens and cells, staircase and all, and in the width."""
        truth = Truth.alternating(8, attention(0.4, 1e-4, per_cell_ms=2e-4), mlp(0.8))
        costs = Costs(profile_of(truth, GRID, widths=(2, 4, 8, 16)))
        assert costs.max_width == 16
        for context in (*GRID, *UNSEEN, 509, 511, 513, 1020, 1279):
            assert costs.verify_ms(context, 1) == costs.step_ms(context)
            for width in (2, 4, 8, 16):
                assert off_by(costs.verify_ms(context, width), truth.ms(context, width)) < 0.01
            for width in (3, 6, 11):
                assert off_by(costs.verify_ms(context, width), truth.ms(context, width)) < 0.02

    def test_beyond_the_last_context(self) -> None:
        costs = Costs(profile_of(self.LINEAR, GRID, widths=(2, 4, 8, 16)))
        for context in (10_000, 16_000, 32_000):
            assert off_by(costs.step_ms(context), self.LINEAR.ms(context)) < 0.02
            for width in (2, 8, 16):
                exact = self.LINEAR.ms(context, width)
                assert off_by(costs.verify_ms(context, width), exact) < 0.03

    def test_a_sublayer_in_a_wide_pass(self) -> None:
        """Attention grows more slowly with the width than MLPs do."""
        truth = Truth.alternating(
            8, attention(1.0, 2e-4, per_further_token=0.05), mlp(1.0, per_further_token=0.3)
        )
        costs = Costs(profile_of(truth, GRID, widths=(2, 4, 8, 16), kind_widths=(4, 8, 16)))
        for context in (GRID[0], GRID[-1]):
            for i in (0, 1):
                assert costs.ms(i, context) == costs.saving_ms(i, context)
                for width in (4, 8, 16):
                    exact = truth.works[i].ms(context, width)
                    assert off_by(costs.ms(i, context, width), exact) < 0.2
        # so the shares of a pass follow
        assert costs.ms(1, 128, 16) / costs.ms(1, 128) > 2 * costs.ms(0, 128, 16) / costs.ms(0, 128)

    def test_without_wide_passes_of_a_kind_it_grows_as_the_whole_does(self) -> None:
        costs = Costs(profile_of(self.LINEAR, GRID, kind_widths=()))
        growth = costs.verify_ms(700, 8) / costs.step_ms(700)
        assert costs.ms(3, 700, 8) == pytest.approx(growth * costs.saving_ms(3, 700))

    def test_head_and_fixed(self) -> None:
        costs = Costs(profile_of(self.LINEAR, GRID))
        assert costs.head_ms() == pytest.approx(1.5, rel=0.02)
        for context in UNSEEN:
            assert costs.fixed_ms(context) == pytest.approx(0.4, abs=0.06)
        shares = costs.share(["attention"], 1000) + costs.share(["mlp"], 1000)
        rest = (costs.head_ms() + costs.fixed_ms(1000)) / costs.step_ms(1000)
        assert shares + rest == pytest.approx(1.0, rel=1e-6)
        assert costs.share(["attention", "mlp"], 1000) == pytest.approx(shares)
        assert costs.share([], 1000) == 0.0
        profile = profile_of(self.LINEAR, GRID)
        headless = tuple(s for s in profile.samples if s.head)
        assert Costs(replace(profile, samples=headless)).head_ms() == 0.0

    def test_the_head_of_a_model_that_ends_with_attention(self) -> None:
        """Without logits only a last MLP is left out with the head."""
        truth = Truth.alternating(6, mlp(0.8), attention(0.5, 1e-4))
        assert Costs(profile_of(truth, GRID)).head_ms() == pytest.approx(1.5, rel=0.02)

    def test_where_attention_overtakes(self) -> None:
        # 0.5 + 2e-4 n = 0.8 at n = 1500
        crossing = Costs(profile_of(self.LINEAR, GRID)).crossing_tokens()
        assert crossing == pytest.approx(1500, rel=0.03)
        # beyond what was measured the lines go on: 0.2 + 2e-5 n = 0.8 at n = 30,000
        far = Truth.alternating(8, attention(0.2, 2e-5), mlp(0.8))
        assert Costs(profile_of(far, GRID)).crossing_tokens() == pytest.approx(30_000, rel=0.05)
        always = Truth.alternating(8, attention(1.0, 2e-5), mlp(0.8))
        assert Costs(profile_of(always, GRID)).crossing_tokens() == 0.0
        never = Truth.alternating(8, attention(0.1, 1e-9), mlp(0.8))
        assert Costs(profile_of(never, GRID)).crossing_tokens() is None
        blocks = Truth(tuple(replace(w, kind=Kind.BLOCK) for w in self.LINEAR.works))
        assert Costs(profile_of(blocks, GRID)).crossing_tokens() is None

    @pytest.mark.parametrize("largest_error", [0.01, 0.02, 0.1])
    def test_integer_weights_keep_their_promise(self, largest_error: float) -> None:
        works = [attention(0.31, 2e-4), mlp(0.8), attention(0.31, 2e-4), mlp(2.7, weight_bytes=9)]
        costs = Costs(profile_of(Truth.alternating(8, *works), GRID))
        for context in (128, 2000, 8000):
            exact = np.array([costs.saving_ms(i, context) for i in range(16)])
            weights, unit_ms = costs.integer_weights(context, largest_error=largest_error)
            assert weights.dtype == np.int64
            assert np.abs(weights * unit_ms - exact).max() <= unit_ms / 2 * (1 + 1e-9)
            assert np.abs(weights * unit_ms / exact - 1.0).max() <= largest_error * (1 + 1e-9)
            # and no finer than that takes
            assert unit_ms == pytest.approx(2.0 * largest_error * exact.min())

    def test_integer_weights_have_a_limit(self) -> None:
        costs = Costs(profile_of(self.LINEAR, GRID))
        weights, unit_ms = costs.integer_weights(1000, largest_error=1e-6, most_units=500)
        assert weights.sum() <= 500 + 16 / 2
        exact = np.array([costs.saving_ms(i, 1000) for i in range(16)])
        assert weights * unit_ms == pytest.approx(exact, abs=unit_ms / 2 * (1 + 1e-9))

    def test_a_class_that_costs_next_to_nothing_does_not_set_the_unit(self) -> None:
        works = [attention(1.0, 0.0, weight_bytes=5), mlp(1.0), attention(1e-4, 0.0), mlp(1.0)]
        costs = Costs(profile_of(Truth.alternating(8, *works), GRID))
        weights, unit_ms = costs.integer_weights(500)
        assert unit_ms == pytest.approx(0.04, rel=0.01)
        assert weights[2] == 0
        assert weights[1] == 25

    def test_where_nothing_costs_anything(self) -> None:
        idle = Truth.alternating(4, attention(0.0, 0.0, per_cell_ms=0.0), mlp(0.0))
        costs = Costs(profile_of(idle, GRID))
        weights, unit_ms = costs.integer_weights(500)
        assert (weights.tolist(), unit_ms) == ([0] * 8, 1.0)
        assert costs.blind
        assert not Costs(profile_of(self.LINEAR, GRID)).blind

    def test_one_context_only(self) -> None:
        costs = Costs(profile_of(self.LINEAR, [512]))
        assert costs.step_ms(512) == pytest.approx(self.LINEAR.ms(512))
        assert costs.saving_ms(0, 512) == pytest.approx(0.6024, rel=0.02)
        assert costs.saving_ms(1, 512) == pytest.approx(0.8, rel=0.02)
        assert off_by(costs.verify_ms(512, 8), self.LINEAR.ms(512, 8)) < 0.01
        # elsewhere nothing is known; it is no nonsense at least
        for context in (0, 1, 100, 4000):
            assert costs.verify_ms(context, 8) >= costs.step_ms(context) > 0.0
            assert costs.draft_ms(Plan.skipping(16, [0, 1]), context) > 0.0

    def test_a_class_that_was_never_left_out_saves_nothing(self) -> None:
        profile = profile_of(self.LINEAR, GRID)
        mlps = set(profile.classes[1].members)
        samples = tuple(s for s in profile.samples if not mlps & set(s.skipped))
        costs = Costs(replace(profile, samples=samples))
        assert costs.saving_ms(1, 500) == 0.0
        assert costs.class_costs[1].points == ()
        # 0.5 + 2e-4 * 500, and what the step takes besides is as it was
        assert costs.saving_ms(0, 500) == pytest.approx(0.6, rel=0.01)
        step = self.LINEAR.ms(500)
        assert costs.draft_ms(Plan.skipping(16, [1, 3]), 500) == pytest.approx(step, rel=0.01)
        unknown = replace(profile, samples=tuple(s for s in profile.samples if not s.skipped))
        assert Costs(unknown).blind

    def test_a_class_left_out_at_some_contexts_only(self) -> None:
        profile = profile_of(self.LINEAR, GRID)
        known = set(GRID[:2])
        samples = tuple(s for s in profile.samples if not s.skipped or s.context_tokens in known)
        costs = Costs(replace(profile, samples=samples))
        assert costs.saving_ms(1, 8000) == pytest.approx(0.8, rel=0.02)
        assert costs.saving_ms(0, 200) == pytest.approx(0.54, rel=0.02)

    def test_what_cannot_be_said_is_a_value_error(self) -> None:
        profile = profile_of(self.LINEAR, GRID, widths=(2, 4))
        costs = Costs(profile)
        for width in (0, -1, 5):
            with pytest.raises(ValueError, match="was not measured"):
                costs.verify_ms(500, width)
            with pytest.raises(ValueError, match="was not measured"):
                costs.ms(0, 500, width)
        with pytest.raises(ValueError, match="no plain step"):
            Costs(replace(profile, samples=tuple(s for s in profile.samples if s.width > 1)))

    def test_several_tokens_are_never_believed_to_cost_less_than_one(self) -> None:
        profile = profile_of(self.LINEAR, GRID, widths=(2, 4, 9))
        samples = tuple(
            replace(s, timing=replace(s.timing, median_ms=s.timing.median_ms / 20))
            if s.width > 1
            else s
            for s in profile.samples
        )
        costs = Costs(replace(profile, samples=samples))
        for context in UNSEEN:
            assert costs.verify_ms(context, 4) == costs.step_ms(context)

    def test_fit_errors_are_those_of_draft_steps(self) -> None:
        profile = profile_of(self.LINEAR, GRID, noise=0.03)
        errors = Costs(profile).fit_errors()
        expected = [s for s in profile.samples if s.width == 1 and s.head]
        assert [s for s, _ in errors] == expected
        assert max(abs(e) for _, e in errors) < 0.1
        assert max(abs(e) for _, e in Costs(profile_of(self.LINEAR, GRID)).fit_errors()) < 1e-6

    @settings(max_examples=60)
    @given(st.data())
    def test_any_profile_gives_possible_costs(self, data: st.DataObject) -> None:
        """However odd what was measured: nothing negative, no pass below a step."""
        n = data.draw(st.integers(1, 6))
        kinds = data.draw(st.lists(st.sampled_from(list(Kind)), min_size=n, max_size=n))
        cells = st.sampled_from([(0, 0), (64, 300), (64, 2048), (64, 100_000)])
        traits = [Traits(data.draw(st.integers(0, 2)), 10, *data.draw(cells)) for _ in range(n)]
        classes = layer_classes(sublayers(*kinds), traits, 2)
        contexts = data.draw(st.lists(st.integers(0, 9000), min_size=1, max_size=5, unique=True))
        time_ms = st.floats(1e-3, 1e4)

        def sample(context: int, width: int, skipped: str, head: bool) -> dict[str, object]:
            t = data.draw(time_ms)
            timing = {"median_ms": t, "low_ms": t, "high_ms": t, "samples": 3, "dropped": 0}
            return {
                "context_tokens": context, "width": width, "skipped": skipped, "head": head,
                "timing": timing,
            }  # fmt: skip

        samples = [sample(c, 1, "0", True) for c in contexts]
        for _ in range(data.draw(st.integers(0, 15))):
            skipped = f"{data.draw(st.integers(0, 2**n - 1)):x}"
            width = data.draw(st.integers(1, 9))
            context = data.draw(st.sampled_from([*contexts, 77]))
            samples.append(sample(context, width, skipped, data.draw(st.booleans())))
        record = {
            **profile_of(self.LINEAR, [9]).to_json(),
            "n_sublayers": n,
            "limit_tokens": max(contexts),
            "samples": samples,
            "classes": [
                {**vars(c), "kind": c.kind.value, "members": list(c.members)} for c in classes
            ],
        }
        costs = Costs(LatencyProfile.from_json(json.loads(json.dumps(record))))
        for context in (0, 1, 255, 1000, 8191, 50_000):
            step = costs.step_ms(context)
            assert 0.0 < step < math.inf
            assert costs.fixed_ms(context) >= 0.0
            assert costs.head_ms() >= 0.0
            assert 0.0 <= costs.share([k.value for k in Kind], context) <= 1.0
            for i in range(n):
                assert 0.0 <= costs.saving_ms(i, context) < math.inf
                assert 0.0 <= costs.ms(i, context, costs.max_width) < math.inf
            for width in range(1, costs.max_width + 1):
                assert step <= costs.verify_ms(context, width) < math.inf
            plans = [Plan.skipping(n, list(range(k))) for k in range(n + 1)]
            drafts = [costs.draft_ms(plan, context) for plan in plans]
            # leaving out more never takes longer
            assert drafts == sorted(drafts, reverse=True)
            assert drafts[0] == step
            assert drafts[-1] >= 0.0
            weights, unit_ms = costs.integer_weights(context)
            assert unit_ms > 0.0
            assert weights.min() >= 0
