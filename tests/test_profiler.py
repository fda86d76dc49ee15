"""Measuring: the latency profiler on a virtual clock, fidelity counts, rounds, what is kept."""

from __future__ import annotations

import itertools
import json
import math
import random
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import naive
import numpy as np
import pytest
from clockwork import Clockwork, Noise, Truth, attention, mlp
from fakes import Costs as ToyCosts
from fakes import FakeBackend, ToyModel, interrupted, sublayers_of
from hypothesis import given, settings
from hypothesis import strategies as st

from knapspec_edge.config import Config
from knapspec_edge.errors import ContextError, Interrupted, NativeError, RollbackError
from knapspec_edge.latency import kept
from knapspec_edge.latency.costs import CELLS_PER_STEP, Costs
from knapspec_edge.latency.fidelity import (
    Fidelity,
    ItemCount,
    evaluate_plans,
    measure_fidelity,
    probed_indices,
    shorten,
    target_text,
)
from knapspec_edge.latency.profile import LatencyProfile
from knapspec_edge.latency.profiler import context_grid, measure_latency
from knapspec_edge.latency.rounds import measure_round
from knapspec_edge.latency.store import Store
from knapspec_edge.records import Kind, Plan

CONFIG = Config()
CALIBRATION = [1 + (7 * i * i) % 22 for i in range(300)]
TRUTH = Truth.alternating(12, attention(0.5, 1e-4, per_cell_ms=1e-4), mlp(0.8))


def profile(machine: Clockwork, budget_seconds: float = 20.0, **options: object) -> LatencyProfile:
    return measure_latency(
        machine,
        budget_seconds=budget_seconds,
        clock=machine.clock,
        **options,  # type: ignore[arg-type]
    )


def slower(truth: Truth, factor: float) -> Truth:
    works = tuple(
        type(w)(
            w.kind,
            factor * w.constant_ms,
            factor * w.per_token_ms,
            factor * w.per_cell_ms,
            per_further_token=w.per_further_token,
        )
        for w in truth.works
    )
    return Truth(works, factor * truth.fixed_ms, factor * truth.head_ms)


def noisy(seed: int, spread: float = 0.05, stalls: float = 0.02, drift: float = 0.2) -> Noise:
    """Multiplicative noise, now and then a stall of three times as long, and a slow drift."""
    dice = random.Random(seed)

    def noise(ms: float, seconds: float) -> float:
        ms *= 1.0 + drift * math.sin(2.0 * math.pi * seconds / 15.0)
        ms *= max(0.5, 1.0 + spread * dice.gauss(0.0, 1.0))
        return 3.0 * ms if dice.random() < stalls else ms

    return noise


def misses(truth: Truth, costs: Costs, contexts: tuple[int, ...], seed: int = 5) -> list[float]:
    """Relative errors of the predicted time of 20 random plans at each context."""
    found = []
    for skipped in truth.random_plans(20, seed):
        plan = Plan.skipping(truth.n, list(skipped))
        for context in contexts:
            exact = truth.ms(context, 1, skipped)
            found.append(abs(costs.draft_ms(plan, context) / exact - 1.0))
    return found


class TestContextGrid:
    @settings(max_examples=400)
    @given(st.integers(16, 200_000), st.integers(3, 40))
    def test_from_short_to_the_limit(self, n_ctx: int, room: int) -> None:
        if n_ctx <= room + 1:
            return
        grid = context_grid(n_ctx, room)
        assert grid == sorted(set(grid))
        assert grid[0] >= 1
        assert len(grid) == 1 or grid[0] == CONFIG.profile_min_context_tokens
        assert grid[-1] == n_ctx - room
        assert len(grid) <= 3 + math.log2(max(1.0, n_ctx / CONFIG.profile_min_context_tokens))
        for a, b in itertools.pairwise(grid):
            # geometric, but for the place of the last one and what is taken off below a step
            assert b <= 3.5 * a
            assert b >= 1.2 * a
        for n, context in enumerate(grid[:-1]):
            if n % 2 and context > 2 * room:
                # just below a multiple: the widest pass still ends within the step
                assert context % CELLS_PER_STEP > CELLS_PER_STEP // 2
                assert (context + room) % CELLS_PER_STEP == 0

    def test_by_hand(self) -> None:
        assert context_grid(4096, 10) == [128, 246, 512, 1014, 2048, 4086]
        assert context_grid(100, 10) == [90]
        assert context_grid(32_768, 34)[-3:] == [8192, 16_350, 32_734]


class TestExact:
    """A machine without noise."""

    def test_costs_are_what_the_machine_takes(self) -> None:
        machine = Clockwork(TRUTH)
        found = profile(machine)
        assert found.limit_tokens == found.contexts[-1] == 4096 - 34
        for sample in found.samples:
            exact = TRUTH.ms(sample.context_tokens, sample.width, sample.skipped, sample.head)
            # three steps in a row stand for one: their context differs by a few tokens
            assert sample.timing.median_ms == pytest.approx(exact, rel=0.01)
        costs = Costs(found)
        for context in (*found.contexts, 200, 700, 1500, 3500):
            assert costs.step_ms(context) == pytest.approx(TRUTH.ms(context), rel=0.01)
            assert costs.saving_ms(1, context) == pytest.approx(0.8, rel=0.02)
            exact = TRUTH.works[0].ms(context)
            assert costs.saving_ms(0, context) == pytest.approx(exact, rel=0.03)
            for width in (2, 4, 8):
                exact = TRUTH.ms(context, width)
                assert costs.verify_ms(context, width) == pytest.approx(exact, rel=0.02)
        assert costs.head_ms() == pytest.approx(1.5, rel=0.03)
        assert max(misses(TRUTH, costs, (150, 1000, 4000))) < 0.02
        assert found.notes == ()

    def test_as_the_fake_backend_with_its_ledger_has_it(self) -> None:
        costs = ToyCosts(fixed_ms=1, head_ms=2, attention_ms=0.5, mlp_ms=0.7, per_token=0.3)
        backend = FakeBackend(n_layer=6, n_ctx=1024, costs=costs)
        found = Costs(measure_latency(backend, budget_seconds=8.0, clock=backend.clock))
        for context in (128, 300, 900):
            assert found.saving_ms(1, context) == pytest.approx(0.7, rel=1e-2)
            exact = 0.5 + 0.2 * context / 1000
            assert found.saving_ms(0, context) == pytest.approx(exact, rel=1e-2)
            step = costs.step_ms(backend.sublayers, context, None)
            assert found.verify_ms(context, 5) == pytest.approx(step * 2.2, rel=1e-2)
        assert found.head_ms() == pytest.approx(2.0, rel=0.01)
        assert found.fixed_ms(500) == pytest.approx(1.0, rel=0.02)
        assert backend.tokens == ()

    def test_the_first_pass_of_a_graph_does_not_count(self) -> None:
        built = profile(Clockwork(TRUTH, build_ms=25.0))
        for sample in built.samples:
            exact = TRUTH.ms(sample.context_tokens, sample.width, sample.skipped, sample.head)
            assert sample.timing.median_ms == pytest.approx(exact, rel=0.01)

    def test_every_width_and_every_class_at_leisure(self) -> None:
        works = [attention(), mlp(), attention(), mlp(1.6, weight_bytes=2000)]
        truth = Truth.alternating(6, *works)
        found = profile(Clockwork(truth), 600.0)
        assert found.widths == (*range(1, 17), 24, 32)
        assert [c.name for c in found.classes] == ["attention", "mlp A", "mlp B"]
        for cls in found.classes:
            left_out = [s for s in found.samples if s.skipped == cls.members]
            assert {s.context_tokens for s in left_out} == set(found.contexts)
        # at both ends also what attention and MLP are in wider passes
        kinds = {(s.context_tokens, s.width) for s in found.samples if s.skipped and s.width > 1}
        assert kinds == {
            (c, b) for c in (found.contexts[0], found.contexts[-1]) for b in (4, 8, 16)
        }
        assert sum(not s.head for s in found.samples) == 2

    def test_it_ends_when_all_is_known_well_enough(self) -> None:
        machine = Clockwork(TRUTH)
        found = profile(machine, 36_000.0)
        assert found.elapsed_seconds < 1000.0
        assert all(s.timing.relative_error(0.03) <= 0.012 for s in found.samples)

    def test_limits_are_kept(self) -> None:
        machine = Clockwork(TRUTH)
        found = profile(machine, limit_tokens=1000, max_width=5)
        assert found.limit_tokens <= 1000
        assert max(context + width for context, width, _, _ in machine.passes) <= 1000
        assert found.widths == (1, 2, 3, 4, 5)
        assert found.covers(1000, 5)
        assert not found.covers(1001, 5)
        assert not found.covers(1000, 6)

    @pytest.mark.parametrize("most", [1, 2, 3])
    def test_narrow_verification(self, most: int) -> None:
        machine = Clockwork(TRUTH, max_verify_tokens=most)
        found = profile(machine)
        assert found.widths == tuple(range(1, most + 1))
        assert Costs(found).max_width == most

    @pytest.mark.parametrize("n_ctx", [16, 17, 40, 129, 300])
    @pytest.mark.parametrize("most", [1, 2, 32])
    def test_tiny_contexts(self, n_ctx: int, most: int) -> None:
        truth = Truth.alternating(3, attention(), mlp())
        machine = Clockwork(truth, n_ctx=n_ctx, max_verify_tokens=most)
        found = profile(machine, 3.0)
        assert 1 <= found.contexts[0] <= found.limit_tokens < n_ctx
        costs = Costs(found)
        at = found.contexts[0]
        assert costs.step_ms(at) == pytest.approx(truth.ms(at), rel=0.01)
        assert costs.saving_ms(1, at) == pytest.approx(0.8, rel=0.05)
        assert costs.verify_ms(at, costs.max_width) >= costs.step_ms(at)
        assert machine.n_past == 0

    @pytest.mark.parametrize("n_ctx", [1, 8, 15])
    def test_a_context_that_is_too_small_is_refused(self, n_ctx: int) -> None:
        with pytest.raises(ContextError, match=f"16 tokens, this one has {n_ctx}; raise --ctx"):
            profile(Clockwork(TRUTH, n_ctx=n_ctx))
        with pytest.raises(ContextError, match="--ctx"):
            profile(Clockwork(TRUTH), limit_tokens=n_ctx)

    def test_one_layer(self) -> None:
        truth = Truth.alternating(1, attention(1.0, 2e-4), mlp(2.0))
        costs = Costs(profile(Clockwork(truth)))
        assert costs.saving_ms(0, 2000) == pytest.approx(1.4, rel=0.02)
        assert costs.saving_ms(1, 2000) == pytest.approx(2.0, rel=0.02)

    def test_one_sublayer(self) -> None:
        """Its cost cannot be told from the rest's, since something has to run."""
        truth = Truth((mlp(2.0),))
        found = profile(Clockwork(truth))
        assert Costs(found).step_ms(500) == pytest.approx(truth.ms(500), rel=0.01)

    def test_parallel_blocks(self) -> None:
        blocks = Truth(tuple(type(w)(Kind.BLOCK, 1.3, 2e-4) for w in TRUTH.works))
        found = profile(Clockwork(blocks))
        assert [c.name for c in found.classes] == ["block"]
        assert Costs(found).saving_ms(5, 1000) == pytest.approx(1.5, rel=0.02)

    def test_the_schedule_is_the_same_every_time(self) -> None:
        one, two = Clockwork(TRUTH), Clockwork(TRUTH)
        first, second = profile(one), profile(two)
        assert one.passes == two.passes
        assert first.samples == second.samples

    def test_progress_rises_to_the_end(self) -> None:
        seen: list[float] = []
        profile(Clockwork(TRUTH), progress=seen.append)
        assert seen == sorted(seen)
        assert (seen[0] < 0.1, seen[-1]) == (True, 1.0)
        assert len(seen) > 50
        assert max(b - a for a, b in itertools.pairwise(seen)) < 0.1

    def test_the_settings_are_written_down(self) -> None:
        machine = Clockwork(TRUTH, settings={"threads": 7})
        before = time.time()
        found = profile(machine, 5.0)
        assert found.settings == {"threads": 7}
        assert before <= found.measured_at <= time.time()
        assert found.budget_seconds == 5.0
        assert found.elapsed_seconds == pytest.approx(machine.clock())

    def test_text_is_fed_if_there_is_any(self) -> None:
        backend = FakeBackend(n_layer=2, n_ctx=64)
        measure_latency(backend, budget_seconds=0.2, tokens=[5, 6, 7], clock=backend.clock)
        fed = {t for call in ("verify", "append") for tokens in backend.calls(call) for t in tokens}
        assert fed <= {5, 6, 7}
        assert fed

    def test_misuse_is_refused(self) -> None:
        machine = Clockwork(TRUTH, n_past=3)
        with pytest.raises(ValueError, match="empty cache"):
            profile(machine)
        assert machine.n_past == 3
        with pytest.raises(ValueError, match="no sublayers"):
            profile(Clockwork(Truth(())))


class TestNoise:
    def test_predictions_on_a_noisy_drifting_machine(self) -> None:
        found: list[float] = []
        for seed in range(4):
            machine = Clockwork(TRUTH, noise=noisy(seed), build_ms=1.0)
            costs = Costs(profile(machine, 30.0))
            found += misses(TRUTH, costs, (150, 1000, 4000), seed)
        assert statistics.median(found) < 0.05
        # the worst are plans that leave out nearly everything, of which little remains
        assert sorted(found)[int(0.9 * len(found))] < 0.15

    @pytest.mark.parametrize("drift", [0.0, 0.2])
    def test_drift_and_noise_by_themselves(self, drift: float) -> None:
        for seed in range(3):
            noise = noisy(seed, 0.0 if drift else 0.05, 0.0 if drift else 0.02, drift)
            costs = Costs(profile(Clockwork(TRUTH, noise=noise), 30.0))
            assert statistics.median(misses(TRUTH, costs, (150, 1000, 4000), seed)) < 0.03

    def test_verification_on_a_noisy_machine(self) -> None:
        found = []
        for seed in range(3):
            costs = Costs(profile(Clockwork(TRUTH, noise=noisy(seed)), 30.0))
            found += [
                abs(costs.verify_ms(c, b) / TRUTH.ms(c, b) - 1.0)
                for c in (150, 1000, 4000)
                for b in (2, 3, 4, 6, 8)
            ]
        assert statistics.median(found) < 0.05

    def test_noise_shows_in_the_spread(self) -> None:
        calm = profile(Clockwork(TRUTH, noise=noisy(1, 0.0, 0.0, 0.0)))
        wild = profile(Clockwork(TRUTH, noise=noisy(1, 0.3, 0.1, 0.2)), 60.0)
        assert calm.spread < 1e-6
        assert wild.spread > 0.05

    def test_more_time_means_more_samples(self) -> None:
        totals = []
        for budget in (5.0, 15.0, 60.0):
            found = profile(Clockwork(TRUTH, noise=noisy(2)), budget)
            totals.append(sum(s.timing.samples for s in found.samples))
        assert totals[0] < totals[1] < totals[2]

    def test_more_time_means_a_smaller_error(self) -> None:
        def error(budget: float) -> float:
            found: list[float] = []
            for seed in range(4):
                noise = noisy(seed, 0.08, 0.05, 0.0)
                machine = Clockwork(TRUTH, noise=noise)
                found += misses(TRUTH, Costs(profile(machine, budget)), (150, 1000, 4000))
            return statistics.median(found)

        assert error(120.0) < error(8.0)

    def test_a_visit_in_which_the_machine_changed_is_thrown_away(self) -> None:
        """It runs at half speed from the 3rd to the 6th second, and again from the 9th on."""

        def throttled(ms: float, seconds: float) -> float:
            return 2.0 * ms if 3.0 < seconds < 6.0 or seconds > 9.0 else ms

        found = profile(Clockwork(TRUTH, noise=throttled), 15.0)
        assert any("not at rest" in note and "thrown away" in note for note in found.notes)
        for sample in found.samples:
            step = next(s for s in found.steps() if s.context_tokens == sample.context_tokens)
            exact = TRUTH.ms(sample.context_tokens, sample.width, sample.skipped, sample.head)
            exact /= TRUTH.ms(sample.context_tokens)
            # relative to a step nothing of it is left
            assert sample.timing.median_ms / step.timing.median_ms == pytest.approx(exact, rel=0.02)

    def test_a_machine_that_never_rests_is_measured_all_the_same(self) -> None:
        dice = random.Random(3)

        def restless(ms: float, _: float) -> float:
            return ms * dice.uniform(1.0, 4.0)

        machine = Clockwork(TRUTH, noise=restless)
        found = profile(machine, 10.0)
        assert any("not at rest" in note for note in found.notes)
        assert machine.clock() <= 1.1 * CONFIG.profile_overrun * 10.0
        assert Costs(found).step_ms(500) >= TRUTH.ms(500)


class TestBudget:
    @pytest.mark.parametrize("budget", [4.0, 10.0, 30.0, 100.0])
    @pytest.mark.parametrize("n_ctx", [512, 4096, 32_768])
    def test_it_is_kept(self, budget: float, n_ctx: int) -> None:
        machine = Clockwork(TRUTH, n_ctx=n_ctx)
        found = profile(machine, budget)
        # more than that only where what is indispensable takes it
        assert (
            machine.clock() <= (1.05 if budget >= 10.0 else 1.05 * CONFIG.profile_overrun) * budget
        )
        # and used, unless everything is known
        assert machine.clock() >= 0.5 * budget or min(s.timing.samples for s in found.samples) > 2

    @pytest.mark.parametrize("factor", [3.0, 10.0, 30.0, 100.0, 1000.0])
    def test_slow_models_are_measured_at_fewer_contexts(self, factor: float) -> None:
        truth = slower(TRUTH, factor)
        machine = Clockwork(truth)
        found = profile(machine, 10.0)
        step_seconds = truth.ms(128) / 1000.0
        # what it takes at least: every class left out once, one wide pass, steps around them, and a
        # second look at the first pass
        least = 21.5 * step_seconds
        assert machine.clock() <= max(1.05 * CONFIG.profile_overrun * 10.0, least)
        if factor >= 10.0:
            assert found.limit_tokens < 4096 - 34
            (note,) = (note for note in found.notes if "extrapolated" in note)
            assert f"costs beyond {found.limit_tokens} tokens are extrapolated" in note
        costs = Costs(found)
        if factor < 1000.0:  # there not even all classes are left out once
            assert costs.max_width > 1
            assert costs.saving_ms(0, 128) > 0.0
            assert costs.saving_ms(1, 128) == pytest.approx(0.8 * factor, rel=0.05)

    @pytest.mark.parametrize("after_seconds", [0.1, 0.5, 2.0, 6.0])
    def test_a_wrong_first_estimate(self, after_seconds: float) -> None:
        """Fast at first, then something else takes the machine for good."""

        def taken(ms: float, seconds: float) -> float:
            return ms + 300.0 if seconds > after_seconds else ms

        machine = Clockwork(TRUTH, noise=taken)
        found = profile(machine, 10.0)
        assert machine.clock() <= CONFIG.profile_overrun * 10.0 + 12 * 0.32
        assert Costs(found).step_ms(500) > 0.0

    def test_a_first_pass_that_reads_the_weights_from_a_disk(self) -> None:
        """It is no reason to leave out the longer contexts."""
        machine = Clockwork(TRUTH, noise=lambda ms, seconds: ms + (1000.0 if not seconds else 0.0))
        found = profile(machine, 8.0)
        assert len(found.contexts) > 1
        assert not any("extrapolated" in note for note in found.notes)

    def test_one_stall_of_many_seconds(self) -> None:
        stalled = [False]

        def stall(ms: float, seconds: float) -> float:
            if seconds > 2.0 and not stalled[0]:
                stalled[0] = True
                return ms + 60_000.0
            return ms

        machine = Clockwork(TRUTH, noise=stall)
        found = profile(machine, 10.0)
        assert machine.clock() < 63.0 + 5.0
        assert max(misses(TRUTH, Costs(found), (150, 1000))) < 0.3


class TestCacheIsEmptyAfterwards:
    def backend(self) -> FakeBackend:
        return FakeBackend(n_layer=1, n_ctx=96, max_verify_tokens=3)

    def measure(self, backend: FakeBackend) -> LatencyProfile:
        return measure_latency(backend, budget_seconds=0.3, clock=backend.clock)

    def test_after_success(self) -> None:
        backend = self.backend()
        self.measure(backend)
        assert backend.tokens == ()
        backend.check_ledger()
        # and nothing of the filled cells survives
        backend.prefill([3, 4, 5], naive.Sampling())
        backend.check_ledger()

    @pytest.mark.parametrize(
        "error", [interrupted(), KeyboardInterrupt(), NativeError("graph allocation failed")]
    )
    def test_after_a_failure_at_any_call(self, error: BaseException) -> None:
        counted = self.backend()
        self.measure(counted)
        assert counted.n_computed > 40
        for call in range(counted.n_computed):
            backend = self.backend()
            backend.fail_at[call] = error
            with pytest.raises(type(error)):
                self.measure(backend)
            assert backend.tokens == ()

    def test_a_cut_without_effect_is_an_error(self) -> None:
        backend = self.backend()
        backend.deaf_truncations = {3}
        with pytest.raises(RollbackError):
            self.measure(backend)


def fidelity(*counts: tuple[int, int, int, int], runs: int = 1) -> Fidelity:
    """From (index, context, agreed, total)."""
    return Fidelity(
        tuple(ItemCount(i, "skip", c, a, t) for i, c, a, t in counts), 9, 10, runs, ("a note",)
    )


class TestUnfinished:
    """What an interrupted measurement leaves."""

    def interrupted(self, after: int) -> LatencyProfile | None:
        machine = Clockwork(TRUTH, n_ctx=4096)
        left: list[LatencyProfile] = []
        visits = iter(range(after))

        def progress(share: float) -> None:
            if next(visits, None) is None:
                raise Interrupted("interrupted")

        with pytest.raises(Interrupted):
            profile(machine, progress=progress, unfinished=left.append)
        assert machine.n_past == 0
        return left[0] if left else None

    def test_what_was_timed_comes_back(self) -> None:
        found = self.interrupted(100)
        assert found is not None
        assert found.notes[-1] == "the measurement was interrupted"
        assert 0 < len(found.samples) < len(profile(Clockwork(TRUTH, n_ctx=4096)).samples)
        assert found.limit_tokens == found.contexts[-1]
        step = found.steps()[0]
        assert step.timing.median_ms == pytest.approx(
            Costs(profile(Clockwork(TRUTH, n_ctx=4096))).step_ms(step.context_tokens), rel=0.02
        )

    def test_it_covers_nothing(self) -> None:
        found = self.interrupted(100)
        assert found is not None
        assert not found.covers(1, 1)

    def test_without_a_step_there_is_nothing(self) -> None:
        assert self.interrupted(0) is None


class TestFidelity:
    SUBLAYERS = sublayers_of(3)  # attention 0 2 4, MLP 1 3 5

    def test_counts_of_runs_add_up(self) -> None:
        one = fidelity((0, 128, 40, 48), (1, 128, 10, 48))
        two = fidelity((0, 128, 20, 24), (0, 4096, 1, 24), runs=2)
        both = one.plus(two)
        assert both.counts == (
            ItemCount(0, "skip", 128, 60, 72),
            ItemCount(1, "skip", 128, 10, 48),
            ItemCount(0, "skip", 4096, 1, 24),
        )
        assert (both.batch_agreed, both.batch_total, both.runs) == (18, 20, 3)
        assert both.batch_agreement == 0.9
        assert both.contexts == (128, 4096)
        assert one.plus(Fidelity()).counts == one.counts
        assert Fidelity().plus(one) == one
        assert Fidelity().batch_agreement == 1.0
        other = Fidelity((ItemCount(0, "window:4+256", 128, 7, 8),))
        assert len(one.plus(other).counts) == 3

    def test_agreements_at_a_context_and_over_all(self) -> None:
        found = fidelity((0, 128, 48, 48), (0, 4096, 12, 48), (1, 128, 24, 48), (1, 4096, 48, 48))
        near = found.agreements(self.SUBLAYERS, 300)
        assert [near[0].agreement, near[1].agreement] == [1.0, 0.5]
        far = found.agreements(self.SUBLAYERS, 2000)
        assert [far[0].agreement, far[1].agreement] == [0.25, 1.0]
        # nearest in ratio: 724 is the geometric middle
        assert found.agreements(self.SUBLAYERS, 723)[0].agreement == 1.0
        assert found.agreements(self.SUBLAYERS, 726)[0].agreement == 0.25
        both = found.agreements(self.SUBLAYERS)
        assert (both[0].agreement, both[0].total) == (60 / 96, 96)

    def test_what_was_not_probed_lies_between_its_kin(self) -> None:
        found = fidelity((0, 9, 10, 10), (4, 9, 5, 10), (1, 9, 2, 20))
        items = found.agreements(self.SUBLAYERS)
        assert [i.index for i in items] == list(range(6))
        assert (items[2].agreement, items[2].probed, items[2].total) == (0.75, False, 10)
        assert [i.agreement for i in items[1::2]] == pytest.approx([0.1] * 3)
        assert [i.probed for i in items] == [True, True, False, False, True, False]
        none = fidelity((0, 9, 10, 10)).agreements(self.SUBLAYERS)
        assert [(i.agreement, i.total) for i in none[1::2]] == [(0.0, 0)] * 3
        assert [i.agreement for i in Fidelity().agreements(self.SUBLAYERS, 5)] == [0.0] * 6
        # a count of nothing says nothing
        assert fidelity((0, 9, 0, 0)).agreements(self.SUBLAYERS)[0].probed is False
        # other modes are another matter
        window = Fidelity((ItemCount(0, "window:4+256", 128, 8, 8),))
        assert window.agreements(self.SUBLAYERS)[0].total == 0

    def test_it_survives_json(self) -> None:
        found = fidelity((0, 128, 40, 48), (5, 4096, 0, 48), runs=3)
        again = Fidelity.from_json(json.loads(json.dumps(found.to_json())), 6)
        assert again == found

    @pytest.mark.parametrize(
        "change",
        [
            {"counts": [[6, "skip", 9, 1, 2]]},
            {"counts": [[-1, "skip", 9, 1, 2]]},
            {"counts": [[0, "skip", 9, 3, 2]]},
            {"counts": [[0, "skip", 9, -1, 2]]},
            {"counts": [[0, "skip", 9, 1]]},
            {"counts": 5},
            {"counts": [["x", "skip", 9, 1, 2]]},
            {"counts": [[0, "skip", -9, 1, 2]]},
            {"batch_agreed": 11},
            {"batch_agreed": -1},
            {"batch_total": None},
            {"runs": "often"},
            {"runs": -1},
            {"notes": 3},
        ],
    )
    def test_impossible_counts_are_refused(self, change: dict[str, object]) -> None:
        good = fidelity((0, 128, 40, 48)).to_json()
        with pytest.raises((KeyError, TypeError, ValueError)):
            Fidelity.from_json({**good, **change}, 6)

    def toy(self, harm: dict[int, float]) -> FakeBackend:
        model = ToyModel(end_tokens=frozenset(), default_harm=0.02, harm=harm)
        return FakeBackend(model, n_layer=3, n_ctx=512)

    @pytest.mark.parametrize("beside_tokens", [0, 8, 20, 32])
    def test_counts_equal_a_naive_count(self, beside_tokens: int) -> None:
        backend = self.toy({2: 0.5, 5: 0.9})
        backend.beside_tokens = beside_tokens
        text = target_text(backend, CALIBRATION[:60], 40)
        assert backend.tokens == tuple(CALIBRATION[:60])
        expected, _ = naive.plain(backend.model, list(text.prompt), 40, naive.Sampling())
        assert list(text.window) == expected
        found = measure_fidelity(backend, text, range(6), 8)
        assert backend.tokens == text.prompt
        backend.check_ledger()
        for count in found.counts:
            context, same = list(text.prompt), 0
            for token in text.window:
                context.append(token)
                plan = Plan.skipping(6, [count.index])
                ours = backend.model.pick(context, naive.Sampling(), plan).token
                same += ours == backend.model.pick(context, naive.Sampling(), None).token
            assert (count.agreed, count.total, count.context_tokens) == (same, 40, 60)
        assert (found.batch_agreed, found.batch_total, found.runs) == (39, 39, 1)
        assert found.notes == ()

    @pytest.mark.parametrize("beside_tokens", [0, 8])
    def test_enough_keeps_what_was_counted(self, beside_tokens: int) -> None:
        backend = self.toy({2: 0.5})
        backend.beside_tokens = beside_tokens
        text = target_text(backend, CALIBRATION[:30], 40)
        asked = [0]

        def enough() -> bool:
            asked[0] += 1
            return asked[0] == 2

        found = measure_fidelity(backend, text, [0, 2], 8, enough=enough)
        assert backend.tokens == text.prompt
        assert asked[0] == 2
        # two of five blocks of 8, from the end on
        assert [c.total for c in found.counts] == [16, 16]
        assert any("judged on 16 tokens: out of time" in note for note in found.notes)
        whole = measure_fidelity(backend, text, [0, 2], 8)
        assert all(a.agreed <= b.agreed for a, b in zip(found.counts, whole.counts, strict=True))

    def test_evaluating_plans_leaves_the_cache_alone(self) -> None:
        backend = self.toy({})
        backend.prefill([1, 2, 3], naive.Sampling())
        plans = [None, Plan.skipping(6, [4]), Plan.skipping(6, [0, 5])]
        first, picks, probabilities, _ = evaluate_plans(backend, [4, 5, 6, 7, 8], plans, 2)
        assert first == 0
        assert backend.tokens == (1, 2, 3)
        backend.check_ledger()
        for row, plan in enumerate(plans):
            for i in range(5):
                text = [1, 2, 3, 4, 5, 6, 7, 8][: 4 + i]
                pick = backend.model.pick(text, naive.Sampling(), plan)
                assert picks[row, i] == pick.token
                assert probabilities[row, i] == pytest.approx(pick.probability)

    @pytest.mark.parametrize(
        ("call", "beside_tokens"), [(0, 0), (3, 0), (7, 0), (20, 0), (0, 32), (3, 32), (7, 32)]
    )
    def test_an_interrupt_leaves_the_cache_where_it_was(
        self, call: int, beside_tokens: int
    ) -> None:
        backend = self.toy({})
        backend.beside_tokens = beside_tokens
        text = target_text(backend, CALIBRATION[:30], 24)
        backend.fail_at[backend.n_computed + call] = interrupted()
        with pytest.raises(Interrupted):
            measure_fidelity(backend, text, range(6), 8)
        assert backend.tokens == text.prompt

    def test_probes_cover_every_kind_and_its_ends(self) -> None:
        assert probed_indices(self.SUBLAYERS, 1) == list(range(6))
        many = sublayers_of(20)
        chosen = probed_indices(many, 5)
        assert {0, 1, 2, 3, 36, 37, 38, 39} <= set(chosen)
        assert chosen == sorted(set(chosen))
        assert len(chosen) < 20
        assert {i % 2 for i in chosen} == {0, 1}
        turns = [probed_indices(many, 5, run) for run in range(5)]
        assert turns[0] == chosen
        assert set().union(*turns) == set(range(40)), "five runs leave nothing out"
        assert probed_indices(many, 5, 7) == turns[2]

    def test_shortening_keeps_both_ends(self) -> None:
        tokens = list(range(100))
        assert shorten(tokens, 100) == tokens
        assert shorten(tokens, 32) == [*range(8), *range(76, 100)]
        assert shorten(tokens, 3) == [0, 98, 99]


class TestRounds:
    FAST = ToyCosts(fixed_ms=0.2, head_ms=0.3, attention_ms=1.0, mlp_ms=1.0, per_token=0.02)

    def test_times_of_a_round(self) -> None:
        backend = FakeBackend(n_layer=6, n_ctx=1024, costs=self.FAST)
        backend.prefill(CALIBRATION[:50], naive.Sampling())
        plan = Plan.skipping(12, [1, 2, 5])
        timing = measure_round(backend, CALIBRATION[:9], plan, 4, 3, clock=backend.clock)
        drafting = self.FAST.step_ms(backend.sublayers, 52, plan)
        assert timing.draft_tokens == 4
        assert timing.draft_step_ms == pytest.approx(drafting, rel=0.01)
        step = self.FAST.step_ms(backend.sublayers, 52, None)
        assert timing.plain_step_ms == pytest.approx(step, rel=0.01)
        assert timing.verify_ms == pytest.approx(step * 1.08, rel=0.01)
        assert backend.n_past == 50
        backend.check_ledger()

    def test_switching_graphs_counts_and_starting_does_not(self) -> None:
        """A draft that follows a verification pays for the change, as in nearly every round."""
        backend = FakeBackend(n_layer=6, n_ctx=1024, costs=self.FAST)
        backend.prefill(CALIBRATION[:50], naive.Sampling())
        last, calls = [""], [0]

        def switch(call: str) -> None:
            calls[0] += 1
            if call == "decode" and last[0] == "verify":
                backend.now_ms += 8.0
            if calls[0] == 1:
                backend.now_ms += 500.0
            last[0] = call

        backend.on_call = switch
        plan = Plan.skipping(12, [1, 2, 5])
        timing = measure_round(backend, CALIBRATION[:9], plan, 4, 3, clock=backend.clock)
        drafting = self.FAST.step_ms(backend.sublayers, 52, plan)
        assert timing.draft_step_ms == pytest.approx(drafting + 8.0 / 4, rel=0.01)

    def test_an_interrupt_leaves_the_cache_where_it_was(self) -> None:
        for call in range(20):
            backend = FakeBackend(n_layer=2, n_ctx=64)
            backend.prefill(CALIBRATION[:50], naive.Sampling())
            backend.fail_at[backend.n_computed + call] = interrupted()
            with pytest.raises(Interrupted):
                measure_round(backend, CALIBRATION[:9], Plan.skipping(4, [1]), 4, 3)
            assert backend.n_past == 50


class TestKept:
    def backend(self) -> FakeBackend:
        return FakeBackend(n_layer=3, n_ctx=256)

    def found(self) -> LatencyProfile:
        backend = self.backend()
        return measure_latency(backend, budget_seconds=1.0, clock=backend.clock)

    @pytest.mark.parametrize(
        ("change", "latency", "counts"),
        [
            ({"threads": 8}, True, False),
            ({"threads_batch": 4}, True, False),
            ({"devices": ["CUDA0"]}, True, False),
            ({"flash_attn": "on"}, True, False),
            ({"gpu_layers": 20}, True, False),
            ({"kv_type": "q8_0"}, True, True),
            ({"ctx_tokens": 8192}, False, False),
        ],
    )
    def test_which_settings_matter(
        self, change: dict[str, object], latency: bool, counts: bool
    ) -> None:
        one, two = self.backend(), self.backend()
        two.settings.update(change)
        assert (kept.latency_key(one, "m") != kept.latency_key(two, "m")) == latency
        assert (kept.fidelity_key(one, "m") != kept.fidelity_key(two, "m")) == counts

    def test_the_model_and_the_library(self) -> None:
        backend = self.backend()
        keys = [{"model": "a", "library": "x"}, {"model": "b", "library": "x"}]
        newer = {"model": "a", "library": "y"}
        for key in (kept.latency_key, kept.fidelity_key):
            assert key(backend, keys[0]) != key(backend, keys[1])
            assert key(backend, "a") != key(backend, "b")
            assert key(backend, "a") != key(FakeBackend(n_layer=4), "a")
        # times depend on the library; what a model says hardly does
        assert kept.latency_key(backend, keys[0]) != kept.latency_key(backend, newer)
        assert kept.fidelity_key(backend, keys[0]) == kept.fidelity_key(backend, newer)
        assert kept.latency_key(backend, "a") != kept.fidelity_key(backend, "a")

    def test_asking_for_a_key_changes_nothing(self) -> None:
        backend = self.backend()
        backend.settings["ctx_tokens"] = 256
        kept.latency_key(backend, "m")
        assert backend.settings["ctx_tokens"] == 256

    def test_a_profile_comes_back(self, tmp_path: Path) -> None:
        store, backend = Store(tmp_path), self.backend()
        key = kept.latency_key(backend, "m")
        assert kept.load_latency(store, key, backend) is None
        found = self.found()
        assert kept.save_latency(store, key, found)
        assert kept.load_latency(store, key, backend) == found

    def test_a_stale_profile_does_not(self, tmp_path: Path) -> None:
        warnings: list[str] = []
        store, backend = Store(tmp_path, warn=warnings.append), self.backend()
        key = kept.latency_key(backend, "m")
        kept.mark_stale(store, key, self.found(), "nothing there yet")
        assert list(tmp_path.iterdir()) == []
        found = self.found()
        kept.save_latency(store, key, found)
        kept.mark_stale(store, key, found, "rounds take 1.4 times as long")
        assert kept.load_latency(store, key, backend) is None
        content = store.load(key)
        assert content is not None
        assert content["stale"] == "rounds take 1.4 times as long"
        kept.save_latency(store, key, self.found())
        assert kept.load_latency(store, key, backend) is not None
        assert warnings == []

    def test_a_newer_profile_of_another_process_is_not_stale(self, tmp_path: Path) -> None:
        store, backend = Store(tmp_path), self.backend()
        key = kept.latency_key(backend, "m")
        old = self.found()
        newer = replace(old, measured_at=old.measured_at + 60.0)
        kept.save_latency(store, key, newer)
        kept.mark_stale(store, key, old, "rounds take 1.4 times as long")
        assert kept.load_latency(store, key, backend) == newer

    def test_an_infinite_number_or_a_word_for_one_is_damage(self, tmp_path: Path) -> None:
        warnings: list[str] = []
        store, backend = Store(tmp_path, warn=warnings.append), self.backend()
        key = kept.latency_key(backend, "m")
        content = {**self.found().to_json(), "limit_tokens": math.inf}
        store.save(key, {"profile": content})
        assert kept.load_latency(store, key, backend) is None
        content = self.found().to_json()
        content["classes"][0]["n_cells"] = "many"
        store.save(key, {"profile": content})
        assert kept.load_latency(store, key, backend) is None
        key = kept.fidelity_key(backend, "m")
        store.save(key, {**fidelity((0, 128, 40, 48)).to_json(), "runs": math.inf})
        assert kept.load_fidelity(store, key, backend) == Fidelity()
        assert len(warnings) == 3  # each file once, and once more when it was written anew

    @pytest.mark.parametrize("content", [{}, {"profile": None}, {"profile": [1]}, {"profile": {}}])
    def test_a_damaged_profile_is_one_warning(
        self, tmp_path: Path, content: dict[str, object]
    ) -> None:
        warnings: list[str] = []
        store, backend = Store(tmp_path, warn=warnings.append), self.backend()
        key = kept.latency_key(backend, "m")
        store.save(key, content)
        assert kept.load_latency(store, key, backend) is None
        assert len(warnings) == 1
        assert "no valid measurement; measuring again" in warnings[0]
        assert str(store.path(key)) in warnings[0]

    def test_a_file_that_is_looked_at_twice_is_one_warning(self, tmp_path: Path) -> None:
        warnings: list[str] = []
        store = Store(tmp_path, warn=warnings.append)
        keys = [{"a": 1}, {"a": 2}]
        for key in keys:
            store.path(key).write_text("no JSON")
            assert store.load(key) is None
            assert store.load(key) is None
        assert warnings == [f"{store.path(key)} is damaged; measuring again" for key in keys]

    def test_a_folder_below_a_file_holds_nothing_and_takes_nothing(self, tmp_path: Path) -> None:
        warnings: list[str] = []
        (tmp_path / "file").write_text("")
        store = Store(tmp_path / "file" / "cache", warn=warnings.append)
        assert store.load({"a": 1}) is None
        assert warnings == []
        assert not store.save({"a": 1}, {})
        assert not store.save({"a": 2}, {})
        assert len(warnings) == 1
        assert "cannot keep the measurement" in warnings[0]

    @pytest.mark.parametrize("tokens", [-1, 10**19, float("inf"), float("nan"), None, "many"])
    def test_impossible_contexts_are_one_warning(self, tmp_path: Path, tokens: object) -> None:
        warnings: list[str] = []
        store, backend = Store(tmp_path, warn=warnings.append), self.backend()
        key, counts = kept.latency_key(backend, "m"), kept.fidelity_key(backend, "m")
        content = self.found().to_json()
        content["samples"][0]["context_tokens"] = tokens
        store.save(key, {"profile": content})
        store.save(
            counts, {**fidelity((0, 1, 1, 1)).to_json(), "counts": [[0, "skip", tokens, 1, 1]]}
        )
        assert kept.load_latency(store, key, backend) is None
        assert kept.load_fidelity(store, counts, backend) == Fidelity()
        assert len(warnings) == 2

    def test_a_profile_of_another_depth_is_one_warning(self, tmp_path: Path) -> None:
        warnings: list[str] = []
        store = Store(tmp_path, warn=warnings.append)
        key = kept.latency_key(self.backend(), "m")
        kept.save_latency(store, key, self.found())
        assert kept.load_latency(store, key, FakeBackend(n_layer=4)) is None
        assert len(warnings) == 1

    def test_counts_are_added(self, tmp_path: Path) -> None:
        store, backend = Store(tmp_path), self.backend()
        key = kept.fidelity_key(backend, "m")
        assert kept.load_fidelity(store, key, backend) == Fidelity()
        one, two = fidelity((0, 128, 40, 48)), fidelity((0, 128, 3, 4), (5, 512, 1, 2))
        assert kept.add_fidelity(store, key, backend, one) == one
        both = kept.add_fidelity(store, key, backend, two)
        assert both == one.plus(two) == kept.load_fidelity(store, key, backend)
        assert kept.load_fidelity(store, key, backend) == both

    def test_counts_of_runs_that_end_together_are_all_kept(self, tmp_path: Path) -> None:
        backend = self.backend()
        key = kept.fidelity_key(backend, "m")

        def add(_: int) -> None:
            kept.add_fidelity(Store(tmp_path), key, backend, fidelity((0, 128, 1, 2)))

        with ThreadPoolExecutor(3) as pool:
            list(pool.map(add, range(12)))
        assert kept.load_fidelity(Store(tmp_path), key, backend).runs == 12

    @pytest.mark.parametrize(
        "content", [{}, {"counts": 3}, {**fidelity((0, 1, 1, 1)).to_json(), "counts": [[9] * 5]}]
    )
    def test_damaged_counts_are_one_warning(
        self, tmp_path: Path, content: dict[str, object]
    ) -> None:
        warnings: list[str] = []
        store, backend = Store(tmp_path, warn=warnings.append), self.backend()
        key = kept.fidelity_key(backend, "m")
        store.save(key, content)
        found = fidelity((0, 128, 40, 48))
        assert kept.add_fidelity(store, key, backend, found) == found
        assert len(warnings) == 1
        assert kept.load_fidelity(store, key, backend) == found

    def test_a_store_that_is_off_keeps_and_knows_nothing(self, tmp_path: Path) -> None:
        store, backend = Store(tmp_path, enabled=False), self.backend()
        key = kept.latency_key(backend, "m")
        assert not kept.save_latency(store, key, self.found())
        kept.mark_stale(store, key, self.found(), "no matter")
        assert kept.load_latency(store, key, backend) is None
        assert list(tmp_path.iterdir()) == []

    def test_a_stored_profile_is_a_small_file(self, tmp_path: Path) -> None:
        works = [w for k in range(6) for w in (attention(weight_bytes=k), mlp(weight_bytes=k))]
        machine = Clockwork(Truth.alternating(32, *works), n_ctx=65_536, noise=noisy(1))
        store = Store(tmp_path)
        found = profile(machine, 600.0)
        assert (found.n_sublayers, len(found.contexts)) == (64, 10)
        key = kept.latency_key(machine, "m")
        kept.save_latency(store, key, found)
        assert store.path(key).stat().st_size < 200_000
        loaded = kept.load_latency(store, key, machine)
        assert loaded == found
        again = Costs(loaded)
        plan = Plan.skipping(64, list(range(0, 64, 3)))
        assert again.draft_ms(plan, 9000) == Costs(found).draft_ms(plan, 9000)


def test_numbers_are_plain_in_json() -> None:
    """NumPy's own numbers would not be written."""
    machine = Clockwork(TRUTH, noise=lambda ms, _: float(np.float64(ms)))
    json.dumps(profile(machine, 4.0).to_json())


def test_a_starved_machine_still_tells_what_verifying_costs() -> None:
    """However little time there is: without a pass of several tokens no draft could be judged."""
    backend = TestFidelity().toy({})

    def starved(_: str) -> None:
        backend.now_ms += 60_000.0

    backend.on_call = starved
    found = measure_latency(backend, budget_seconds=1.0, clock=backend.clock)
    assert found.widths[-1] > 1
