"""Threads, paired comparison, the choice of settings, and drift against the profile."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fakes import Costs as ToyCosts
from fakes import FakeBackend, ToyModel
from scripted import ScriptedModel

from knapspec_edge import gguf_check, native
from knapspec_edge.config import Config
from knapspec_edge.engine import Engine
from knapspec_edge.errors import UsageError
from knapspec_edge.latency import kept
from knapspec_edge.latency.costs import Costs
from knapspec_edge.latency.drift import Correction, DriftTracker
from knapspec_edge.latency.fidelity import Fidelity, ItemCount
from knapspec_edge.latency.paired import paired_steps
from knapspec_edge.latency.profiler import measure_latency
from knapspec_edge.latency.store import INVALID, Store
from knapspec_edge.latency.threads import (
    ThreadTimes,
    best_threads,
    measure_threads,
    thread_candidates,
)
from knapspec_edge.records import Draft, Plan, RoundTimes
from knapspec_edge.search import planner
from knapspec_edge.search.settings import (
    Candidate,
    candidate,
    choose,
    from_json,
    normalised,
    settings_key,
    to_json,
)

CONFIG = Config()
TOY = ToyCosts(fixed_ms=1, head_ms=2, attention_ms=0.5, mlp_ms=0.7, per_token=0.3)


def toy(costs: ToyCosts = TOY, **options: Any) -> FakeBackend:
    model = ToyModel(end_tokens=frozenset(), default_harm=0.02)
    return FakeBackend(model, n_layer=6, n_ctx=1024, costs=costs, **options)


def fitted(costs: ToyCosts = TOY) -> Costs:
    backend = toy(costs)
    return Costs(measure_latency(backend, budget_seconds=10.0, clock=backend.clock))


class TestThreads:
    def test_the_default_comes_first_and_nothing_twice(self) -> None:
        assert thread_candidates(8, 16) == [8, 7, 4, 16]
        assert thread_candidates(2, 2) == [2, 1]
        assert thread_candidates(1, 1) == [1]
        assert thread_candidates(1, 4) == [1, 4]
        assert thread_candidates(512, 768) == [512, 511, 256], "more than llama.cpp takes"

    def test_each_number_is_timed_by_what_it_costs(self) -> None:
        """Four threads halve a pass of several tokens and slow a single step down."""
        backend = toy()
        factor = {1: (1.0, 1.0), 4: (1.5, 0.5)}
        threads = [1]

        def slower(call: str) -> None:
            step = TOY.step_ms(backend.sublayers, backend.n_past, None)
            alone, several = factor[threads[0]]
            backend.now_ms += (alone - 1.0) * step if call == "decode" else 0.0
            backend.now_ms += (several - 1.0) * step * 2.2 if call == "verify" else 0.0

        original = backend.set_threads

        def set_threads(n: int, batch: int | None = None) -> None:
            threads[0] = n
            original(n, batch)

        backend.set_threads = set_threads  # type: ignore[method-assign]
        backend.on_call = slower
        times = measure_threads(backend, [1, 4], budget_seconds=9.0, clock=backend.clock)
        step = TOY.step_ms(backend.sublayers, 129, None)
        assert [t.threads for t in times] == [1, 4]
        assert times[0].step_ms == pytest.approx(step, rel=0.01)
        assert times[1].step_ms == pytest.approx(1.5 * step, rel=0.01)
        assert times[1].pass_ms == pytest.approx(0.5 * times[0].pass_ms, rel=0.01)
        assert best_threads(times) == (1, 4)
        assert backend.tokens == ()

    def test_a_gain_within_the_margin_changes_nothing(self) -> None:
        close = [ThreadTimes(8, 10.0, 30.0), ThreadTimes(4, 9.8, 29.5)]
        assert best_threads(close) == (8, 8)
        assert best_threads([ThreadTimes(8, 10.0, 30.0), ThreadTimes(4, 9.0, 33.0)]) == (4, 8)

    def test_tiny_contexts(self) -> None:
        backend = FakeBackend(ToyModel(end_tokens=frozenset()), n_ctx=2)
        times = measure_threads(backend, [1, 2], budget_seconds=9.0, clock=backend.clock)
        assert len(times) == 2

    def test_a_spent_budget_leaves_candidates_out_but_never_the_first(self) -> None:
        backend = toy()
        times = measure_threads(backend, [4, 3, 2], budget_seconds=0.0, clock=backend.clock)
        assert [t.threads for t in times] == [4]
        assert best_threads(times) == (4, 4)


class TestPaired:
    def test_drift_of_the_machine_cancels_out(self) -> None:
        fast = toy()
        slow = toy(ToyCosts(fixed_ms=2, head_ms=4, attention_ms=1.0, mlp_ms=1.4,
                            attention_ms_per_1k=0.4))  # fmt: skip
        # one clock for both, and a machine that gets ever slower
        now = itertools.count()

        def clock() -> float:
            next(now)
            return (fast.now_ms + slow.now_ms) / 1000.0

        def drift(backend: FakeBackend) -> None:
            def on_call(_: str) -> None:
                backend.now_ms += 1e-4 * (fast.now_ms + slow.now_ms)

            backend.on_call = on_call

        drift(fast)
        drift(slow)
        ratios = paired_steps([fast, slow], [100, 800], budget_seconds=100.0, clock=clock)
        assert set(ratios) == {100, 800}
        for first, second in ratios.values():
            assert first == 1.0
            assert second == pytest.approx(2.0, rel=0.05)
        assert fast.tokens == slow.tokens == ()

    def test_the_first_context_is_always_measured(self) -> None:
        backends = [toy(), toy()]
        clock = backends[0].clock
        assert set(paired_steps(backends, [50, 900], budget_seconds=0.0, clock=clock)) == {50}


def setting(flash: str, plain: tuple[float, ...], spec: tuple[float, ...], kv: str = "f16"):
    return Candidate(flash, kv, 2, 2, (128, 1024, 8192), plain, spec)


class TestChoice:
    ON = setting("on", (5.0, 7.0, 22.0), (6.0, 10.0, 40.0))
    OFF = setting("off", (5.5, 7.4, 20.0), (5.0, 6.0, 15.0))
    Q8 = setting("on", (4.0, 5.0, 10.0), (4.0, 5.0, 10.0), kv="q8_0")

    def test_by_context_and_purpose(self) -> None:
        both = [self.ON, self.OFF]
        assert choose(both, 128, "plain") is self.ON
        assert choose(both, 8192, "plain") is self.OFF
        assert choose(both, 1024, "plain") is self.ON
        assert choose(both, 1024, "speculation") is self.OFF
        # between measured contexts linear: 14.5 against 13.7
        assert choose(both, 4608, "plain") is self.OFF

    def test_what_was_asked_for_holds(self) -> None:
        all_of_them = [self.ON, self.OFF, self.Q8]
        assert choose(all_of_them, 1024, "plain", kv_type="f16") is self.ON
        assert choose(all_of_them, 1024, "plain") is self.Q8
        assert choose(all_of_them, 8192, "plain", flash_attn="on", kv_type="f16") is self.ON
        assert choose(all_of_them, 128, "plain", flash_attn="off", kv_type="q8_0") is None
        assert choose([], 128, "plain") is None

    def test_the_first_stays_unless_it_is_worth_a_change(self) -> None:
        close = setting("off", (4.9, 6.9, 21.5), (9.0, 9.0, 9.0))
        assert choose([self.ON, close], 1024, "plain") is self.ON
        assert choose([self.ON, close], 1024, "plain", config=Config(settings_margin=0.0)) is close

    def test_speculation_never_counts_for_more_than_plain_decoding(self) -> None:
        assert self.ON.ms(1024, "speculation") == 7.0
        assert self.ON.speculation_at(1024) == 10.0
        assert self.OFF.ms(1024, "speculation") == 6.0

    def test_candidates_are_scaled_to_the_paired_ratios(self) -> None:
        # measured while the machine was half as fast; in turn it is 10 % faster than ON everywhere
        disturbed = setting("off", (10.0, 14.0, 44.0), (12.0, 20.0, 80.0))
        first, second = normalised([self.ON, disturbed], {128: [1.0, 0.9], 8192: [1.0, 0.9]})
        assert first is self.ON
        assert second.plain_ms == pytest.approx((4.5, 6.3, 19.8))
        assert second.speculation_ms == pytest.approx((5.4, 9.0, 36.0))
        assert normalised([self.ON, disturbed], {}) == [self.ON, disturbed]

    def test_json_and_nonsense(self) -> None:
        both = (self.ON, self.OFF)
        assert from_json(to_json(both)) == both
        for wrong in (
            {},
            {"candidates": [{}]},
            {"candidates": [{**to_json(both)["candidates"][0], "plain_ms": [1.0]}]},
            *(
                {"candidates": [{**to_json(both)["candidates"][0], **wrong}]}
                for wrong in (
                    {"threads": 0},
                    {"threads": 513},
                    {"threads_batch": math.inf},
                    {"flash_attn": "maybe"},
                    {"plain_ms": [1.0, math.nan, 2.0]},
                    {"speculation_ms": [1.0, 0.0, 2.0]},
                    {"contexts": [128, 64, 8192]},
                )
            ),
        ):
            with pytest.raises(INVALID):
                from_json(wrong)

    def test_predictions_come_from_costs_and_counts(self) -> None:
        backend = toy(ToyCosts(0.2, 0.3, 1.0, 0.2, 1.0, 0.02))
        costs = Costs(measure_latency(backend, budget_seconds=10.0, clock=backend.clock))
        counts = tuple(ItemCount(i, "skip", 256, 99 if i > 1 else 20, 100) for i in range(12))
        settings = {"flash_attn": "on", "kv_type": "f16", "threads": 2, "threads_batch": 2}
        found = candidate(settings, costs, Fidelity(counts, runs=1), backend.sublayers)
        assert found.contexts == costs.profile.contexts
        for context, plain, spec in zip(
            found.contexts, found.plain_ms, found.speculation_ms, strict=True
        ):
            assert plain == pytest.approx(backend.costs.step_ms(backend.sublayers, context, None),
                                          rel=0.01)  # fmt: skip
            assert spec < plain  # verification is nearly free
        nothing = candidate(settings, costs, Fidelity(), backend.sublayers)
        assert nothing.speculation_ms == nothing.plain_ms


class TestLoader:
    """Engine.open takes the settings that the profile found best."""

    @pytest.fixture
    def asked(self, monkeypatch: pytest.MonkeyPatch, user_cache: Path) -> dict[str, Any]:
        from fake_vocabulary import FakeVocabulary

        class Opened(FakeVocabulary):
            n_ctx_train = 8192

            def __enter__(self) -> Opened:
                return self

            def __exit__(self, *_: object) -> None:
                pass

        class Context(FakeBackend):
            def __enter__(self) -> Context:
                return self

            def __exit__(self, *_: object) -> None:
                pass

        vocabulary = Opened()
        seen: dict[str, Any] = {}

        def open_context(model: object, *, ctx_tokens: int, **settings: object) -> Context:
            seen.clear()
            seen.update(settings)
            return Context(ScriptedModel(vocabulary=vocabulary), n_layer=1, n_ctx=ctx_tokens)

        info = SimpleNamespace(path=Path("m.gguf"), name="M", context_length=8192,
                               architecture="toy")  # fmt: skip
        monkeypatch.setattr(gguf_check, "inspect", lambda path: info)
        monkeypatch.setattr(gguf_check, "fingerprint", lambda info: "f" * 32)
        monkeypatch.setattr(native, "open_model", lambda path, **_: vocabulary)
        monkeypatch.setattr(native, "open_context", open_context)
        monkeypatch.setattr(native, "machine_key", lambda: {"library": "d"})
        monkeypatch.setattr(native, "describe_device", lambda backend: "CPU")
        return seen

    def keep(self, *candidates: Candidate) -> None:
        key = settings_key({"model": "f" * 32, "library": "d"}, None, None)
        Store().save(key, to_json(candidates))

    def open(self, **options: Any) -> Engine:
        return Engine.open("m.gguf", spec="off", **options)

    def test_nothing_known(self, asked: dict[str, Any]) -> None:
        with self.open() as engine:
            assert asked["flash_attn"] == "auto"
            assert asked["kv_type"] == "f16"
            assert asked["threads"] is None
            assert engine.settings_reason is None
        with self.open(kv_type="auto"):
            assert asked["kv_type"] == "f16"

    def test_the_best_for_the_expected_context(self, asked: dict[str, Any]) -> None:
        off = Candidate("off", "f16", 3, 4, (128, 8192), (5.5, 20.0), (9.0, 9.0))
        on = Candidate("on", "f16", 2, 2, (128, 8192), (5.0, 25.0), (9.0, 9.0))
        self.keep(on, off)
        with self.open(expected_tokens=128) as engine:
            assert (asked["flash_attn"], asked["threads"], asked["threads_batch"]) == ("on", 2, 2)
            assert engine.settings_reason is not None
        with self.open(expected_tokens=8000, ctx=8192):
            assert (asked["flash_attn"], asked["threads"], asked["threads_batch"]) == ("off", 3, 4)
        # a context cannot get longer than it is
        with self.open(expected_tokens=8000, ctx=200):
            assert asked["flash_attn"] == "on"
        with Engine.open("m.gguf", spec="off", gpu_layers=3):
            assert asked["flash_attn"] == "auto", "measured with other layers on the GPU"

    @pytest.mark.parametrize(
        "change",
        [
            {"threads": 10**12},
            {"threads_batch": 0},
            {"threads": float("inf")},
            {"contexts": [128, 1024, 10**19]},
            {"contexts": [1024, 128, 8192]},
            {"plain_ms": [5.0, float("inf"), 22.0]},
            {"speculation_ms": [5.0, -1.0, 22.0]},
            {"plain_ms": [float("nan"), 7.0, 22.0]},
            {"flash_attn": "perhaps"},
        ],
    )
    def test_an_impossible_setting_is_ignored_with_a_warning(
        self, asked: dict[str, Any], change: dict[str, Any]
    ) -> None:
        record = to_json([TestChoice.ON])
        record["candidates"][0].update(change)
        Store().save(settings_key({"model": "f" * 32, "library": "d"}, None, None), record)
        with self.open() as engine:
            assert (asked["flash_attn"], asked["threads"]) == ("auto", None)
            assert "no valid measurement; measuring again" in engine.take_warnings()[0]

    def test_a_profile_of_an_open_model(self, asked: dict[str, Any]) -> None:
        with self.open(ctx=256) as engine:
            answer = engine.generate([1, 2, 3])
            next(answer)
            found = engine.profile(budget_seconds=0.2)
            assert list(answer) == []
            assert engine.backend.n_past == 0
            assert found.asked_tokens == 256
            key = kept.latency_key(engine.backend, {"model": "f" * 32, "library": "d"})
            assert kept.load_latency(Store(), key, engine.backend) == found
            for budget in (0.0, -1.0, math.nan, math.inf):
                with pytest.raises(UsageError, match="has to be more than 0 and finite"):
                    engine.profile(budget)

    def test_auto_that_does_not_speculate_decodes_in_the_best_setting_for_that(
        self, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        on = Candidate("on", "f16", 2, 2, (128,), (5.0,), (9.0,))
        off = Candidate("off", "f16", 2, 3, (128,), (6.0,), (4.0,))
        self.keep(on, off)
        decided: list[str] = []

        def decide(backend: object, *_: object, **__: object) -> planner.Decision:
            decided.append(str(asked["flash_attn"]))
            return planner.Decision(state, f"{state}: says the test", draft)

        monkeypatch.setattr(planner, "decide", decide)
        state, draft = "off", None
        with Engine.open("m.gguf") as engine:
            assert (asked["flash_attn"], asked["threads_batch"]) == ("on", 2)
            assert engine.speculation.state == "off"
        assert decided == ["off", "on"]
        decided.clear()
        state, draft = "on", Draft(Plan.full(2), 3, 0.7)
        with Engine.open("m.gguf") as engine:
            assert (asked["flash_attn"], asked["threads_batch"]) == ("off", 3)
            assert engine.speculation.state == "on"
        assert decided == ["off"]

    def test_options_override(self, asked: dict[str, Any]) -> None:
        self.keep(TestChoice.ON, TestChoice.OFF, TestChoice.Q8)
        with self.open(flash_attn="off", threads=7):
            assert (asked["flash_attn"], asked["threads"], asked["threads_batch"]) == ("off", 7, 7)
        with self.open():
            assert asked["kv_type"] == "f16", "another type changes the text: only when asked for"
        with self.open(kv_type="auto"):
            assert asked["kv_type"] == "q8_0"
        with self.open(kv_type="f32"):
            assert (asked["kv_type"], asked["flash_attn"]) == ("f32", "auto")
        with self.open(flash_attn="off") as engine:
            assert asked["threads"] == TestChoice.OFF.threads, "threads were left to the profile"
            assert engine.settings_reason == "2 threads: the best measured"

    def test_what_was_measured_with_a_number_of_threads_is_for_those_who_ask_for_it(
        self, asked: dict[str, Any]
    ) -> None:
        key = settings_key({"model": "f" * 32, "library": "d"}, None, 1)
        pinned = Candidate("off", "f16", 1, 1, (128,), (9.0,), (9.0,))
        Store().save(key, to_json([pinned]))
        with self.open():
            assert (asked["flash_attn"], asked["threads"]) == ("auto", None)
        with self.open(threads=1):
            assert (asked["flash_attn"], asked["threads"]) == ("off", 1)
        self.keep(Candidate("on", "f16", 2, 2, (128,), (5.0,), (5.0,)))
        with self.open(threads=1):
            assert (asked["flash_attn"], asked["threads"]) == ("off", 1)
        with self.open(threads=3):
            assert (asked["flash_attn"], asked["threads"]) == ("on", 3)

    def test_a_damaged_record_is_ignored_with_a_warning(self, asked: dict[str, Any]) -> None:
        Store().save(
            settings_key({"model": "f" * 32, "library": "d"}, None, None), {"candidates": 3}
        )
        with self.open() as engine:
            assert asked["flash_attn"] == "auto"
            (warning,) = engine.take_warnings()
            assert "holds no valid measurement" in warning


class TestDrift:
    PLAN = Plan.skipping(12, [1, 3, 5])

    def rounds(self, tracker: DriftTracker, step: float, draft: float, verify: float, n: int = 20):
        costs = tracker._costs
        for context in range(100, 100 + n):
            tracker.observe(RoundTimes(context, 0, 0.0, step * costs.step_ms(context)), None)
            drafted = 3 * draft * costs.draft_ms(self.PLAN, context + 1)
            tracker.observe(
                RoundTimes(context, 3, drafted, verify * costs.verify_ms(context, 4)), self.PLAN
            )

    def test_a_machine_that_keeps_to_its_profile(self) -> None:
        tracker = DriftTracker(fitted())
        self.rounds(tracker, 1.0, 1.0, 1.0)
        assert tracker.report() is None
        found = tracker.correction()
        assert (found.step, found.draft, found.verify) == pytest.approx((1.0, 1.0, 1.0), rel=2e-3)

    def test_each_kind_is_corrected_by_what_was_seen(self) -> None:
        tracker = DriftTracker(fitted())
        self.rounds(tracker, 1.1, 0.9, 1.5)
        found = tracker.correction()
        assert (found.step, found.draft, found.verify) == pytest.approx((1.1, 0.9, 1.5), rel=2e-3)
        report = tracker.report()
        assert report is not None
        assert "verifying takes 1.50x" in report

    def test_faster_than_measured_is_drift_too(self) -> None:
        tracker = DriftTracker(fitted())
        self.rounds(tracker, 0.5, 0.5, 0.5)
        assert "0.50x" in (tracker.report() or "")

    def test_plain_steps_speak_for_all_where_nothing_else_was_seen(self) -> None:
        tracker = DriftTracker(fitted())
        costs = tracker._costs
        for context in range(100, 130):
            tracker.observe(RoundTimes(context, 0, 0.0, 2.0 * costs.step_ms(context)), None)
        found = tracker.correction()
        assert (found.step, found.draft, found.verify) == pytest.approx((2.0, 2.0, 2.0), rel=2e-3)

    def test_few_rounds_and_stalls_say_nothing(self) -> None:
        tracker = DriftTracker(fitted())
        self.rounds(tracker, 3.0, 3.0, 3.0, n=CONFIG.drift_min_rounds - 1)
        assert tracker.correction() == Correction()
        tracker = DriftTracker(fitted())
        self.rounds(tracker, 1.0, 1.0, 1.0, n=40)
        self.rounds(tracker, 9.0, 9.0, 9.0, n=10)
        assert tracker.report() is None

    def test_passes_wider_than_the_profile_are_left_out(self) -> None:
        tracker = DriftTracker(fitted())
        tracker.observe(RoundTimes(100, 99, 1.0, 1e6), self.PLAN)
        assert tracker.observed == 0

    def test_contexts_beyond_the_profile_are_left_out(self) -> None:
        """A cost that was extrapolated may be wrong; the machine need not be."""
        tracker = DriftTracker(fitted())
        longest = tracker._costs.profile.limit_tokens
        tracker.observe(RoundTimes(longest + 1, 0, 0.0, 1e6), None)
        assert tracker.observed == 0
        tracker.observe(RoundTimes(longest, 0, 0.0, 1e6), None)
        assert tracker.observed == 1

    def test_old_drafts_do_not_count_against_new_plain_steps(self) -> None:
        """Load slowed everything while drafting; it is gone since nothing is drafted any more."""
        tracker = DriftTracker(fitted())
        self.rounds(tracker, 2.0, 2.0, 2.0)
        costs = tracker._costs
        for _ in range(CONFIG.drift_memory_rounds):
            tracker.observe(RoundTimes(100, 0, 0.0, costs.step_ms(100)), None)
        found = tracker.correction()
        assert (found.step, found.draft, found.verify) == pytest.approx((1.0, 1.0, 1.0), rel=2e-3)

    def test_it_turns_a_decision(self) -> None:
        """Verification has become dear since the profile: what was on is off, and says why."""
        backend = toy(ToyCosts(0.2, 0.3, 1.0, 0.0, 1.0, 0.02))
        calibration = [1 + (7 * i * i) % 22 for i in range(300)]
        decision = planner.decide(backend, "toy", calibration, clock=backend.clock)
        assert decision.state == "on"
        assert decision.measured is not None
        same = planner.choose(decision.measured, decision.finalists, backend.sublayers)
        assert same.state == "on"
        assert same.predicted_ratio == decision.predicted_ratio
        corrected = planner.choose(
            decision.measured,
            decision.finalists,
            backend.sublayers,
            correction=Correction(step=1.0, draft=1.0, verify=8.0),
        )
        assert corrected.state == "off"
        slower = planner.choose(
            decision.measured,
            decision.finalists,
            backend.sublayers,
            correction=Correction(step=2.0, draft=2.0, verify=2.0),
        )
        assert slower.predicted_ratio == pytest.approx(decision.predicted_ratio)
        assert slower.baseline_per_second == pytest.approx(decision.baseline_per_second / 2)

    def test_the_loop_reports_every_round(self) -> None:
        from knapspec_edge.decode.session import Session

        backend = toy()
        session = Session(backend, clock=backend.clock)
        seen: list[RoundTimes] = []
        draft = Draft(self.PLAN, 3, 0.0)
        generation = session.generate(
            [1, 2, 3], draft=draft, max_tokens=30, watch=lambda stats: seen.append
        )
        tokens = list(generation)
        stats = generation.stats
        assert len(tokens) == 30
        assert len(seen) == stats.rounds
        assert sum(t.drafted for t in seen) == stats.draft_n
        assert sum(t.draft_ms for t in seen) == pytest.approx(stats.draft_ms)
        assert sum(t.verify_ms for t in seen) == pytest.approx(stats.verify_ms)
        assert seen[0].context_tokens == 3
        assert [t.context_tokens for t in seen] == sorted(t.context_tokens for t in seen)
