"""From repeated timings to predicted costs: statistics, classes, records, the fitted model."""

from __future__ import annotations

import itertools
import json
import math
import statistics
from dataclasses import replace

import numpy as np
import pytest
from clockwork import Truth, attention, mlp, profile_of
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from knapspec_edge.latency.classes import layer_classes
from knapspec_edge.latency.costs import CELLS_PER_STEP, Costs, cells_read
from knapspec_edge.latency.profile import LatencyProfile, plan_of
from knapspec_edge.latency.profiler import context_grid
from knapspec_edge.latency.regression import fit_line, non_negative_least_squares, t95
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
