"""The planner while decoding: exact, cheap, and on exactly where it pays; on a virtual clock."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import naive
import pytest
from fake_vocabulary import FakeVocabulary
from fakes import Costs, FakeBackend, ToyModel, interrupted
from hypothesis import given, settings
from hypothesis import strategies as st
from stats_identity import check_stats

from knapspec_edge.config import DEFAULTS, Config
from knapspec_edge.decode.policy import Policy
from knapspec_edge.decode.session import Session
from knapspec_edge.engine import Answer, Engine, Settings
from knapspec_edge.errors import ContextError, Interrupted, NativeError
from knapspec_edge.latency.drift import DriftTracker
from knapspec_edge.latency.store import Store
from knapspec_edge.records import GREEDY, Draft, Plan, RoundTimes, Sampling, Stats
from knapspec_edge.search import plan_file, planner
from knapspec_edge.search.online import OnlinePlanner
from knapspec_edge.search.plan_book import PlanBook
from knapspec_edge.search.planner import Decision

N_LAYER = 6
N = 2 * N_LAYER
N_CTX = 4096
CALIBRATION = [1 + (7 * i * i) % 22 for i in range(600)]
PROMPT = CALIBRATION[:20]
MEASURING = Config(dp_measure_share=0.0)
# Verifying a token more costs a tenth of a step: it pays where drafts are right.
COSTS = Costs(fixed_ms=0.2, head_ms=0.3, attention_ms=1.0, mlp_ms=1.0, per_token=0.1)
# A pass over b tokens costs nearly b steps, so that it cannot.
DEAR = replace(COSTS, per_token=0.9)
# Chance that a sublayer left out changes a pick. POOR: one alone does little harm, several do much.
GOOD, POOR, BAD = 0.01, 0.25, 0.5


@dataclass
class TurningModel(ToyModel):
    """Skipped sublayers do so much harm from these positions on."""

    turns: list[tuple[int, float]] = field(default_factory=list)

    def logits(self, tokens: Sequence[int], plan: Plan | None) -> Any:
        for position, harm in self.turns:
            if len(tokens) >= position:
                self.default_harm = harm
        return super().logits(tokens, plan)


def toy(costs: Costs = COSTS, harm: float = GOOD, **options: Any) -> FakeBackend:
    model = TurningModel(end_tokens=frozenset(), default_harm=harm)
    return FakeBackend(model, n_layer=N_LAYER, costs=replace(costs), **{"n_ctx": N_CTX, **options})


@lru_cache
def decided(costs: tuple[float, ...], harm: float, attention_harm: float) -> Decision:
    backend = toy(Costs(*costs), harm)
    backend.model.harm = dict.fromkeys(range(0, N, 2), attention_harm)
    return planner.decide(backend, "toy", CALIBRATION, MEASURING, None, clock=backend.clock)


class Bench:
    """A toy that was measured, its planner, and a session to use both."""

    def __init__(
        self,
        costs: Costs = COSTS,
        *,
        harm: float = GOOD,
        attention_harm: float | None = None,
        turns: Sequence[tuple[int, float]] = (),
        forced: bool = False,
        config: Config = DEFAULTS,
        **options: Any,
    ) -> None:
        """`harm` while measuring, `turns` of the text that follows; attention's own throughout."""
        own = harm if attention_harm is None else attention_harm
        self.decision = decided(astuple(costs), harm, own)
        self.backend = toy(costs, harm, **options)
        self.model.turns = list(turns)
        if attention_harm is not None:
            self.model.harm = dict.fromkeys(range(0, N, 2), attention_harm)
        measured = self.decision.measured
        assert measured is not None
        self.drift = DriftTracker(measured.costs, config)
        off = Store(enabled=False)
        self.book = planner.open_book(self.backend, self.decision, off, {}, config)
        self.planner = OnlinePlanner(
            self.backend,
            self.book,
            self.drift,
            forced=forced,
            config=config,
            clock=self.backend.clock,
        )
        self.session = Session(self.backend, clock=self.backend.clock)
        # (context, sublayers left out or None) where it changed
        self.history: list[tuple[int, int | None]] = []
        self.rounds: list[RoundTimes] = []

    @property
    def model(self) -> TurningModel:
        assert isinstance(self.backend.model, TurningModel)
        return self.backend.model

    def _watch(self, stats: Stats) -> Callable[[RoundTimes], None]:
        def watch(times: RoundTimes) -> None:
            self.rounds.append(times)
            active = self.planner.active
            now = None if active is None else len(active.plan.skipped)
            if not self.history or self.history[-1][1] != now:
                self.history.append((times.context_tokens, now))

        return watch

    def answer(
        self, n: int, prompt: Sequence[int] = PROMPT, sampling: Sampling = GREEDY
    ) -> tuple[list[int], Stats]:
        """After checking that the text is the plain one and everything is in order."""
        generation = self.session.generate(
            prompt, sampling=sampling, max_tokens=n, policy=self.planner, watch=self._watch
        )
        tokens = []
        for event in generation:
            tokens.append(event.token)
            check_stats(generation.stats)
        self.backend.check_ledger()
        limit = min(n, self.backend.n_ctx - len(prompt))
        assert tokens == naive.plain(self.model, prompt, limit, sampling)[0]
        assert self.session.ids == self.backend.tokens == tuple([*prompt, *tokens][:-1])
        return tokens, generation.stats

    def steps(self) -> list[tuple[tuple[int, int | None], tuple[int, int | None]]]:
        """Neighbours in the history."""
        return list(zip(self.history, self.history[1:], strict=False))

    def plain_ms(self, n: int) -> float:
        """What plain decoding of that answer takes."""
        return sum(self.step_ms(len(PROMPT) + i) for i in range(n - 1))

    def step_ms(self, context: int) -> float:
        return self.backend.costs.step_ms(self.backend.sublayers, context, None)

    def on_at(self, context: int) -> bool:
        """Whether a plan was in use there."""
        found = [now for at, now in self.history if at <= context]
        return bool(found) and found[-1] is not None

    def check_share(self, passes: int = 1) -> None:
        """No more than the stated share was spent, and what the latest passes were short of."""
        allowed = self.planner.plan_ms - DEFAULTS.plan_share * self.planner.decode_ms
        one_ms = self.step_ms(N_CTX) * (1.0 + self.backend.costs.per_token * 47)
        assert allowed <= passes * one_ms


class Whim:
    """Decides by dice, and measures beside the text now and then."""

    def __init__(self, backend: FakeBackend, seed: int) -> None:
        self._backend = backend
        self._dice = random.Random(seed)
        self.drafted: list[int] = []  # tokens, in the latest round
        self.checked: Counter[str] = Counter()
        self.stopped: str | None = None

    def begin(self, sampling: Sampling, prompt: Sequence[int]) -> None:
        self._sampling = sampling

    def _plan(self) -> Plan:
        return Plan.skipping(N, [i for i in range(N) if self._dice.random() < 0.3])

    def spare(self, emitted: Sequence[int], position: int) -> None:
        assert position == self._backend.n_past
        n = min(len(emitted) - 1, self._dice.randrange(6))
        if n > 0:
            block = (position - n, list(emitted[-n - 1 : -1]))
            self._backend.evaluate_beside([block], self._plan(), self._sampling)
            self.checked["beside"] += 1

    def draft(self, context_tokens: int) -> Draft | None:
        self.drafted.clear()
        assert context_tokens == self._backend.n_past
        chosen = Draft(self._plan(), self._dice.randrange(10), 0.0)
        return chosen if self._dice.random() < 0.8 else None

    def go_on(self, confidences: Sequence[float]) -> bool:
        return self._dice.random() < 0.85

    def keep(self, confidences: Sequence[float]) -> int:
        assert len(self.drafted) == len(confidences)
        kept = self._dice.randint(0, len(confidences))
        self.checked["kept none" if not kept else "kept"] += 1
        return kept

    def observe(self, times: RoundTimes) -> None:
        pass


class Spied(FakeBackend):
    """Tells a Whim what was drafted."""

    whim: Whim

    def decode(self, token: int, sampling: Sampling, plan: Plan | None = None) -> Any:
        pick = super().decode(token, sampling, plan)
        if plan is not None:
            self.whim.drafted.append(pick.token)
        return pick


samplings = st.one_of(
    st.just(GREEDY),
    st.builds(Sampling, temperature=st.sampled_from([0.4, 1.0]), seed=st.integers(0, 5)),
)
# Everything happens within a short answer: buckets, looks, judging, giving up.
HASTY = Config(
    bucket_first_tokens=16,
    plan_interval_rounds=5,
    plan_share=0.6,
    plan_min_window_tokens=4,
    plan_trust_places=6,
    plan_confidence=1.0,
    plan_fading_tokens=8,
    guard_plain_rounds=1,
    guard_interval_rounds=6,
)


class TestExactness:
    coverage: Counter[str] = Counter()

    @settings(max_examples=60)
    @given(
        harms=st.lists(st.sampled_from([0.0, GOOD, 0.1, BAD]), min_size=4, max_size=4),
        costs=st.sampled_from([COSTS, DEAR, *(replace(COSTS, per_token=p) for p in (0.01, 0.3))]),
        seed=st.integers(0, 10**6),
        sampling=samplings,
        forced=st.booleans(),
        beside=st.sampled_from([0, 5, 32]),
        n_ctx=st.integers(40, 260),
    )
    def test_the_text_does_not_depend_on_the_planner(
        self, harms, costs, seed, sampling, forced, beside, n_ctx
    ) -> None:
        bench = Bench(
            costs,
            turns=[(60 * i, harm) for i, harm in enumerate(harms)],
            forced=forced,
            config=HASTY,
            n_ctx=n_ctx,
            beside_tokens=beside,
        )
        bench.model.seed = seed
        text, stats = bench.answer(120, sampling=sampling)
        again = [*PROMPT, *text][: n_ctx - 5]
        bench.answer(90, prompt=again, sampling=sampling)
        seen = self.coverage
        seen["judged"] += bench.planner.n_judged
        seen["changed"] += max(0, bench.planner.n_changes - 1)
        seen["gave up"] += any(before and not now for (_, before), (_, now) in bench.steps())
        for times in bench.rounds:
            seen["tail dropped"] += 0 < times.width - 1 < times.drafted
            seen["rejected"] += times.accepted < times.width - 1
            seen["plain"] += times.drafted == 0
            if forced:
                assert times.width > 1 or times.drafted == 0, "what is forced is verified"
                seen["forced"] += times.drafted > 0

    @settings(max_examples=60)
    @given(
        seed=st.integers(0, 10**6),
        sampling=samplings,
        harm=st.sampled_from([0.02, 0.1, 0.3]),
        n_ctx=st.integers(30, 120),
    )
    def test_the_text_does_not_depend_on_any_policy(self, seed, sampling, harm, n_ctx) -> None:
        """And what it is told about drafted tokens is what the text says about them."""
        model = ToyModel(seed=seed, default_harm=harm, end_tokens=frozenset())
        backend = Spied(model, n_layer=N_LAYER, n_ctx=n_ctx, costs=COSTS)
        policy = backend.whim = Whim(backend, seed)
        expected, _ = naive.plain(model, PROMPT, n_ctx - len(PROMPT), sampling)
        text = [*PROMPT, *expected]

        def check(times: RoundTimes) -> None:
            follows = text[times.context_tokens + 1 :]
            same = [d == t for d, t in zip(policy.drafted, follows, strict=False)]
            assert times.drafted == len(policy.drafted)
            assert times.right == tuple(same[: times.accepted + 1])
            assert times.accepted <= times.width - 1 <= times.drafted
            assert times.tokens == times.accepted + 1

        session = Session(backend, clock=backend.clock)
        used: Policy = policy
        generation = session.generate(
            PROMPT, sampling=sampling, policy=used, watch=lambda stats: check
        )
        tokens = []
        for event in generation:
            tokens.append(event.token)
            check_stats(generation.stats)
        backend.check_ledger()
        assert tokens == expected
        self.coverage.update(policy.checked)

    def test_all_of_that_really_happened(self) -> None:
        if not self.coverage:
            pytest.skip("the property test was deselected")
        for case in (
            "judged", "changed", "gave up", "tail dropped", "rejected", "plain", "forced",
            "beside", "kept none", "kept",
        ):  # fmt: skip
            assert self.coverage[case] > 0, case


class TestOnAndOff:
    def test_on_from_the_start_where_it_was_decided_so(self) -> None:
        bench = Bench(turns=[(0, GOOD)])
        assert bench.decision.state == "on"
        _, stats = bench.answer(1500)
        assert bench.planner.n_changes == 1
        assert stats.predicted_ms < 0.8 * bench.plain_ms(1500)
        bench.check_share()

    @pytest.mark.parametrize("per_token", [0.02, 0.1])
    def test_what_begins_to_pay_is_found_and_used(self, per_token: float) -> None:
        bench = Bench(
            replace(COSTS, per_token=per_token), harm=POOR, turns=[(0, BAD), (1000, GOOD)]
        )
        assert bench.decision.state == "off"
        _, stats = bench.answer(3000)
        (_, before), (began, now) = bench.history[:2]
        assert before is None
        assert now is not None
        assert 1000 < began < 1600
        assert len(bench.history) == 2 or per_token < 0.05, "and nothing else was changed"
        assert stats.latest_draft is not None
        assert stats.predicted_ms < 0.95 * bench.plain_ms(3000)
        bench.check_share()

    @pytest.mark.parametrize("seed", range(4))
    def test_text_that_turns_bad_ends_it_and_costs_little(self, seed: int) -> None:
        bench = Bench(turns=[(0, GOOD), (500, BAD)])
        bench.model.seed = seed
        _, stats = bench.answer(500)
        before_ms = stats.predicted_ms
        assert bench.on_at(500)
        bench = Bench(turns=[(0, GOOD), (500, BAD)])
        bench.model.seed = seed
        _, stats = bench.answer(3000)
        assert not bench.on_at(600)
        assert stats.speculation_stopped is not None or bench.on_at(3000)
        after_ms = stats.predicted_ms - before_ms
        plain_ms = bench.plain_ms(3000) - bench.plain_ms(500)
        # a gain that was banked, the allowance, and one round beyond it
        allowed = (2 * DEFAULTS.guard_loss_steps + 10) * bench.step_ms(1000)
        assert after_ms <= 1.02 * plain_ms + allowed

    @pytest.mark.parametrize("seed", range(4))
    def test_where_predictions_fail_from_the_start_little_is_lost(self, seed: int) -> None:
        bench = Bench(turns=[(0, BAD)])
        bench.model.seed = seed
        _, stats = bench.answer(2000)
        assert bench.decision.state == "on"
        allowed = (DEFAULTS.guard_loss_steps + 20) * bench.step_ms(500)
        assert stats.predicted_ms <= 1.02 * bench.plain_ms(2000) + allowed
        assert bench.planner.n_changes <= 4
        bench.check_share()

    def test_it_comes_back_when_the_text_gets_better_again(self) -> None:
        bench = Bench(turns=[(0, GOOD), (800, BAD), (1300, GOOD)])
        bench.answer(3500)
        assert bench.on_at(799)
        assert not bench.on_at(1300)
        assert bench.on_at(3400)
        bench.check_share()

    @pytest.mark.parametrize("harm", [0.03, 0.06, 0.09, 0.12, 0.2])
    def test_no_flapping_where_it_hardly_matters(self, harm: float) -> None:
        bench = Bench(turns=[(0, harm)])
        _, stats = bench.answer(3000)
        assert bench.planner.n_changes <= 8
        allowed = (2 * DEFAULTS.guard_loss_steps + 10) * bench.step_ms(1000)
        assert stats.predicted_ms <= 1.02 * bench.plain_ms(3000) + allowed

    def test_text_that_keeps_changing_costs_little(self) -> None:
        bench = Bench(turns=[(100 * i, (GOOD, BAD)[i % 2]) for i in range(31)])
        _, stats = bench.answer(3000)
        allowed = 4 * DEFAULTS.guard_loss_steps * bench.step_ms(1000)
        assert stats.predicted_ms <= 1.02 * bench.plain_ms(3000) + allowed
        assert bench.planner.n_changes <= 16

    def test_in_a_conversation_in_which_it_never_pays_later_answers_are_free(self) -> None:
        bench = Bench(turns=[(0, BAD)])
        drafted = []
        for turn in range(4):
            prompt = [*PROMPT, 1 + turn]
            drafted.append(bench.answer(150, prompt=prompt)[1].draft_n)
        assert drafted[0] > 0
        assert sum(drafted[1:]) <= drafted[0]
        assert drafted[-1] == 0

    def test_forced_never_stops_and_always_drafts(self) -> None:
        bench = Bench(DEAR, turns=[(0, BAD)], forced=True)
        _, stats = bench.answer(600)
        assert stats.speculation_stopped is None
        # all but the last round, which a limit may leave nothing to draft
        assert all(times.drafted >= 1 and times.width >= 2 for times in bench.rounds[:-1])

    def test_forced_is_not_limited_by_what_was_lost_in_other_sessions(self) -> None:
        bench = Bench(turns=[(0, BAD)], forced=True)
        for _ in range(2):
            bench.rounds.clear()
            bench.answer(200)
            assert all(times.drafted >= 1 for times in bench.rounds[:-1])


class TestCostOfPlanning:
    def test_where_nothing_can_pay_nothing_is_spent(self) -> None:
        bench = Bench(DEAR, turns=[(0, GOOD)])
        _, stats = bench.answer(3000)
        assert bench.decision.state == "off"
        assert bench.backend.calls("beside") == []
        assert (stats.draft_n, stats.plan_ms, bench.planner.plan_ms) == (0, 0.0, 0.0)
        assert stats.predicted_ms == pytest.approx(bench.plain_ms(3000))

    @pytest.mark.parametrize(("n", "answers"), [(40, 30), (150, 8), (3000, 1)])
    @pytest.mark.parametrize("harm", [GOOD, 0.08, BAD])
    @pytest.mark.parametrize("forced", [False, True])
    def test_no_more_than_the_share(self, n: int, answers: int, harm: float, forced: bool) -> None:
        bench = Bench(turns=[(0, harm)], forced=forced)
        plan_ms = 0.0
        for i in range(answers):
            plan_ms += bench.answer(n, prompt=[*PROMPT, 1 + i % 20])[1].plan_ms
            bench.check_share()
        assert plan_ms == pytest.approx(bench.planner.plan_ms)

    @pytest.mark.parametrize(("n", "answers"), [(40, 40), (3000, 1)])
    def test_thinking_counts_too(
        self, n: int, answers: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """On a small model an estimate is no small part of a step."""
        bench = Bench(turns=[(0, 0.08)])
        estimate = PlanBook._estimate

        def slow(*args: Any) -> Any:
            bench.backend.now_ms += 6.0
            return estimate(*args)

        monkeypatch.setattr(PlanBook, "_estimate", slow)
        plan_ms = 0.0
        for i in range(answers):
            plan_ms += bench.answer(n, prompt=[*PROMPT, 1 + i % 20])[1].plan_ms
        looked_ms = 6.0 * 3 * DEFAULTS.plan_shortlist
        one_pass_ms = bench.step_ms(N_CTX) * 6
        entered = bench.book.bucket(n) + 1
        share_ms = DEFAULTS.plan_share * bench.planner.decode_ms
        assert bench.planner.plan_ms <= share_ms + one_pass_ms + (entered + 1) * looked_ms
        assert plan_ms <= bench.planner.plan_ms + 1e-6

    def test_no_round_waits_for_more_than_a_few_estimates(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Also where a bucket is entered, and all of its plans would have to be estimated."""
        bench = Bench(turns=[(0, 0.08)])
        estimate, made = PlanBook._estimate, 0

        def slow(*args: Any) -> Any:
            nonlocal made
            made += 1
            bench.backend.now_ms += 6.0
            return estimate(*args)

        monkeypatch.setattr(PlanBook, "_estimate", slow)
        spare, longest = OnlinePlanner.spare, 0.0

        def timed(self: OnlinePlanner, *args: Any) -> None:
            nonlocal longest
            before, saved_ms, calls = made, max(0.0, self._saved_ms), len(bench.backend.log)
            spare(self, *args)
            if len(bench.backend.log) == calls:  # judging nothing
                longest = max(longest, 6.0 * (made - before) - saved_ms)

        monkeypatch.setattr(OnlinePlanner, "spare", timed)
        bench.answer(1500)
        assert made > 12  # in the end all of them
        assert 6.0 <= longest <= 4 * 6.0

    def test_a_very_slow_model_is_judged_too(self) -> None:
        """One pass of the shortest window takes longer than the seconds that may be saved up."""
        slow = Costs(*(100 * x for x in (0.2, 0.3, 1.0, 0.2, 1.0)), per_token=0.1)
        bench = Bench(slow, harm=POOR, turns=[(0, BAD), (200, GOOD)])
        assert bench.step_ms(0) > 1000.0
        bench.answer(2500)
        assert bench.planner.n_judged > 0
        assert bench.on_at(2400)
        bench.check_share()

    def test_time_saved_for_long_is_no_reason_to_stop_looking(self) -> None:
        """Nothing could pay for so long that no more can be saved; then something could."""
        config = replace(DEFAULTS, plan_share_kept_seconds=0.2)
        bench = Bench(harm=GOOD, turns=[(0, GOOD)], config=config)
        bench.backend.costs.per_token = 0.9
        for _ in range(3):
            bench.answer(1000)
        assert bench.planner.active is None
        bench.backend.costs.per_token = 0.1
        judged = bench.planner.n_judged
        bench.answer(3000, prompt=[*PROMPT, 3])
        assert bench.planner.n_judged > judged
        assert bench.planner.active is not None

    def test_the_plan_in_use_is_not_judged_its_rounds_tell(self) -> None:
        bench = Bench(turns=[(0, GOOD)])
        bench.answer(1500)
        active = bench.planner.active
        assert active is not None
        assert active.plan not in bench.backend.calls("beside")
        known = bench.book.judgement(bench.book.bucket(1500), active.plan)
        assert known is not None
        assert len(known.agree) > 200


class TestReplanning:
    @pytest.mark.parametrize("forced", [False, True])
    def test_a_longer_context_changes_the_plan_where_costs_say_so(self, forced: bool) -> None:
        """Attention does more harm and costs next to nothing in the beginning, most in the end."""
        costs = replace(COSTS, attention_ms=0.1, attention_ms_per_1k=1.0, per_token=0.02)
        bench = Bench(costs, harm=0.02, attention_harm=0.06, turns=[(0, 0.02)], forced=forced)
        bench.answer(450)
        first = bench.planner.active
        assert first is not None
        assert first.plan.skipped == (1, 3, 5, 7, 9, 11), "the MLPs"
        bench.answer(3500, prompt=[*PROMPT, 4])
        last = bench.planner.active
        assert last is not None
        assert {0, 2, 4, 6, 8, 10} & set(last.plan.skipped), "attention too"
        began = [at for at, now in bench.history if now == len(last.plan.skipped)][-1]
        assert began > 512
        assert all(now is not None for _, now in bench.history)
        assert bench.planner.n_changes <= 6

    def test_acceptance_outside_its_band_is_looked_at_at_once(self) -> None:
        bench = Bench(turns=[(0, GOOD), (400, 0.15)], forced=True)
        bench.answer(380)
        active = bench.planner.active
        assert active is not None
        before = active.acceptance
        bench.answer(400, prompt=[*PROMPT, 5])
        after = bench.planner.active
        assert after is not None
        assert after.acceptance < before or after.plan != active.plan

    def test_dearer_verification_ends_it_and_its_end_brings_it_back(self) -> None:
        bench = Bench(turns=[(0, GOOD)])

        def load(call: str) -> None:
            n = bench.backend.n_past
            bench.backend.costs.per_token = 0.9 if 700 <= n < 1300 else 0.1

        bench.backend.on_call = load
        bench.answer(3500)
        assert bench.on_at(690)
        assert not bench.on_at(1200)
        assert bench.on_at(3400)
        assert bench.planner.n_changes <= 8

    def test_a_machine_that_is_slower_altogether_changes_nothing(self) -> None:
        bench = Bench(turns=[(0, GOOD)])
        bench.answer(300)
        bench.backend.costs = Costs(0.6, 0.9, 3.0, 0.6, 3.0, per_token=0.1)
        bench.answer(700, prompt=[*PROMPT, 4])
        assert bench.planner.n_changes == 1
        assert bench.planner.active is not None
        assert bench.drift.report() is not None

    def test_what_predictions_cannot_explain_is_held_against_them(self) -> None:
        """Drafts are right but slow, as no cost says; it is not tried again soon, but later."""
        bench = Bench(turns=[(0, GOOD)])
        decode = bench.backend.decode

        def slow(token: int, sampling: Sampling, plan: Plan | None = None) -> Any:
            bench.backend.now_ms += 0.0 if plan is None else 15.0
            return decode(token, sampling, plan)

        bench.backend.decode = slow  # type: ignore[method-assign]
        _, stats = bench.answer(500)
        assert stats.speculation_stopped is not None
        assert bench.planner.n_changes == 2
        assert len([t for t in bench.rounds if t.drafted]) < 30
        allowed = (DEFAULTS.guard_loss_steps + 20) * bench.step_ms(300)
        assert stats.predicted_ms <= 1.02 * bench.plain_ms(500) + allowed

    def test_another_temperature_is_calibrated_anew(self) -> None:
        bench = Bench(turns=[(0, GOOD)])
        bench.answer(300)
        greedy = bench.planner._rule
        bench.answer(50, sampling=Sampling(temperature=0.8, seed=1))
        warm = bench.planner._rule
        assert greedy is not None
        assert warm is not None
        assert warm.calibration is not greedy.calibration

    def test_rounds_do_not_change_what_the_book_has_told(self) -> None:
        """An estimate that is used again must be what it was."""
        bench = Bench(turns=[(0, GOOD)])
        bench.answer(30)
        active = bench.planner.active
        assert active is not None
        tried = list(active.calibration.tried)
        bench.answer(60, prompt=[*PROMPT, 2])
        assert active.calibration.tried == tried


class TestTrouble:
    def test_without_room_beside_the_text_rounds_have_to_tell(self) -> None:
        bench = Bench(turns=[(0, GOOD)], beside_tokens=0)
        _, stats = bench.answer(800)
        assert stats.predicted_ms < 0.8 * bench.plain_ms(800)
        bad = Bench(turns=[(0, BAD)], beside_tokens=0)
        _, stats = bad.answer(2000)
        allowed = (DEFAULTS.guard_loss_steps + 20) * bad.step_ms(500)
        assert stats.predicted_ms <= 1.02 * bad.plain_ms(2000) + allowed
        assert bad.planner.n_judged == 0

    def test_without_room_beside_the_text_another_answer_is_another_chance(self) -> None:
        bench = Bench(turns=[(0, BAD)], beside_tokens=0)
        assert bench.answer(300)[1].speculation_stopped is not None
        bench.model.turns = [(0, GOOD)]
        bench.answer(300, prompt=[*PROMPT, 3])
        _, stats = bench.answer(300, prompt=[*PROMPT, 4])
        assert stats.draft_n_accepted > 0
        assert bench.planner.active is not None

    @pytest.mark.parametrize(
        "error",
        [ContextError("no cells"), NativeError("no finite logit")],
        ids=["no cells", "a plan that breaks the model"],
    )
    def test_what_cannot_be_judged_is_not_judged_in_this_answer(self, error: Exception) -> None:
        bench = Bench(harm=POOR, turns=[(0, GOOD)])

        def full(call: str) -> None:
            if call == "beside":
                bench.backend.fail_at[bench.backend.n_computed] = error

        bench.backend.on_call = full
        bench.answer(1500)
        assert len(bench.backend.calls("beside")) == 1
        assert bench.planner.n_judged == 0
        bench.backend.on_call = None
        bench.answer(1500, prompt=[*PROMPT, 4])
        assert bench.planner.n_judged > 0

    @pytest.mark.parametrize("error", [interrupted(), KeyboardInterrupt()])
    def test_an_interrupt_while_judging_leaves_everything_right(self, error) -> None:
        bench = Bench(harm=POOR, turns=[(0, GOOD)])

        def stop(call: str) -> None:
            if call == "beside":
                bench.backend.fail_at[bench.backend.n_computed] = error
                bench.backend.on_call = None

        bench.backend.on_call = stop
        generation = bench.session.generate(PROMPT, max_tokens=1500, policy=bench.planner)
        tokens: list[int] = []
        with pytest.raises(type(error)):
            tokens.extend(event.token for event in generation)
        assert tokens == naive.plain(bench.model, PROMPT, len(tokens), GREEDY)[0]
        assert generation.stats.finish_reason == "interrupted"
        assert generation.stats.plan_ms > 0.0
        check_stats(generation.stats)
        bench.backend.check_ledger()
        assert bench.session.ids == bench.backend.tokens == tuple([*PROMPT, *tokens][:-1])
        assert isinstance(error, (Interrupted, KeyboardInterrupt))
        bench.answer(1500, prompt=[*PROMPT, *tokens])
        assert bench.planner.n_judged > 0


def new_engine(
    costs: Costs = COSTS,
    *,
    harm: float = GOOD,
    turns: Sequence[tuple[int, float]] = (),
    spec: str | Path = "auto",
    **options: Any,
) -> Engine:
    """Measured with `harm`; answers then go by `turns`. Its tokens are bytes of text."""
    backend = toy(costs, harm, **options)
    # plans alone: this toy's text repeats itself (test_lookup_first is about that)
    vocabulary: Any = FakeVocabulary()
    engine = Engine(vocabulary, backend, lookup=False, clock=backend.clock)
    engine.set_speculation(spec)
    engine.backend.model.turns = list(turns)  # type: ignore[attr-defined]
    return engine


def ask(engine: Engine, n: int, prompt: Sequence[int] = PROMPT) -> Answer:
    answer = engine.generate(prompt, Settings(max_tokens=n))
    for _ in answer:
        check_stats(answer.stats)
    backend = engine.backend
    assert isinstance(backend, FakeBackend)
    assert answer.token_ids == naive.plain(backend.model, prompt, n, GREEDY)[0]
    backend.check_ledger()
    return answer


def kept_files(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in (folder / "measurements").iterdir()}


class TestEngine:
    def test_auto_that_begins_to_pay_says_so(self) -> None:
        engine = new_engine(harm=POOR, turns=[(0, GOOD)])
        assert (engine.speculation.state, engine.speculation.policy) == ("off", "none")
        answer = ask(engine, 2000)
        said = answer.speculation
        assert (said.state, said.policy) == ("on", "knapspec")
        assert said.reason == "it began to pay in this answer"
        assert said.draft is not None
        assert said.draft == answer.stats.latest_draft
        assert said.draft.plan.skipped
        assert answer.stats.plan_ms > 0.0
        assert engine.speculation.state == "off", "what was decided was decided"

    def test_auto_that_gives_up_says_so(self) -> None:
        engine = new_engine(turns=[(0, BAD)])
        assert engine.speculation.state == "on"
        said = ask(engine, 300).speculation
        assert "x of plain decoding" in said.reason
        assert said.guarded
        # in the next answer it has nothing to give up
        later = ask(engine, 200, [*PROMPT, 3])
        assert later.stats.draft_n == 0

    def test_on_is_forced_round_by_round(self) -> None:
        engine = new_engine(DEAR, turns=[(0, BAD)], spec="on")
        assert engine.speculation.reason.startswith("forced; the planner says off")
        stats = ask(engine, 400).stats
        assert stats.speculation_stopped is None
        assert sum(stats.accepted_lengths.values()) >= stats.rounds - 1

    def test_a_plan_file_holds_for_all_rounds(self, tmp_path: Path) -> None:
        draft = Draft(Plan.skipping(N, [1, 4]), 3, 0.0)
        path = tmp_path / "plan.json"
        plan_file.save(path, draft, toy().sublayers, "")
        engine = new_engine(DEAR, turns=[(0, BAD)], spec=path)
        stats = ask(engine, 200).stats
        backend = engine.backend
        assert isinstance(backend, FakeBackend)
        assert set(backend.calls("decode")) - {None} == {draft.plan}
        assert backend.calls("beside") == []
        assert {len(v) for v in backend.calls("verify")} <= {2, 3, 4}
        assert sum(stats.accepted_lengths.values()) >= stats.rounds - 1
        assert stats.plan_ms == 0.0

    def test_speculation_may_change_in_a_conversation(self) -> None:
        engine = new_engine(turns=[(0, 0.05)])
        talk = list(PROMPT)
        for spec in ("auto", "on", "off", "on", "auto"):
            engine.set_speculation(spec)
            answer = ask(engine, 80, talk)
            assert (answer.stats.draft_n > 0) == (spec != "off")
            assert answer.stats.cached_tokens == (0 if talk == PROMPT else len(talk) - 2)
            talk += [*answer.token_ids, 5]

    @pytest.mark.parametrize(("spec", "guarded"), [("auto", True), ("on", False)])
    def test_what_was_asked_for_outlives_a_profile(self, spec: str, guarded: bool) -> None:
        """A plan that auto chose is still given up where it does not pay."""
        engine = new_engine(spec=spec)
        assert engine.speculation.state == "on"
        engine.profile(5.0)
        assert engine.speculation.state == "on"
        assert engine.speculation.guarded == guarded
        engine.backend.model.turns = [(0, BAD)]  # type: ignore[attr-defined]
        stopped = ask(engine, 300).stats.speculation_stopped
        assert (stopped is not None) == guarded

    def test_what_was_learned_is_there_the_next_time(self, user_cache: Path) -> None:
        engine = new_engine(turns=[(0, GOOD)])
        ask(engine, 700)
        policy = engine._policy
        assert isinstance(policy, OnlinePlanner)
        assert policy.active is not None
        plan = policy.active.plan
        engine.close()
        again = new_engine()
        assert again._book is not None
        assert engine._book is not None
        known = again._book.judgement(0, plan)
        assert known is not None
        assert len(known.agree) == len(engine._book.judgement(0, plan).agree) > 100
        assert again.take_warnings() == []

    def test_a_profile_keeps_what_was_learned(self) -> None:
        engine = new_engine(turns=[(0, GOOD)])
        ask(engine, 700)
        policy = engine._policy
        assert isinstance(policy, OnlinePlanner)
        assert policy.active is not None
        engine.profile(5.0)
        assert engine._book is not None
        known = engine._book.judgement(0, policy.active.plan)
        assert known is not None
        assert len(known.agree) > 100

    def test_nothing_is_written_where_nothing_was_learned(self, user_cache: Path) -> None:
        new_engine(DEAR).close()
        before = kept_files(user_cache)
        engine = new_engine(DEAR, turns=[(0, GOOD)])
        ask(engine, 300)
        ask(engine, 300)
        engine.close()
        assert kept_files(user_cache) == before

    def test_a_damaged_book_costs_one_warning(self, user_cache: Path) -> None:
        new_engine().close()
        (path,) = (
            p for p in (user_cache / "measurements").iterdir() if b"first_tokens" in p.read_bytes()
        )
        path.write_text(path.read_text().replace('"first_tokens"', '"last_tokens"'))
        engine = new_engine(turns=[(0, GOOD)])
        (warning,) = engine.take_warnings()
        assert str(path) in warning
        ask(engine, 700)
        engine.close()
        assert engine.take_warnings() == []
        assert new_engine().take_warnings() == [], "written anew"

    def test_an_interrupt_while_judging_ends_the_answer_in_order(self) -> None:
        engine = new_engine(harm=POOR, turns=[(0, GOOD)])
        backend = engine.backend
        assert isinstance(backend, FakeBackend)

        def stop(call: str) -> None:
            if call == "beside":
                backend.fail_at[backend.n_computed] = interrupted()
                backend.on_call = None

        backend.on_call = stop
        answer = engine.generate(PROMPT, Settings(max_tokens=1500))
        with pytest.raises(Interrupted):
            list(answer)
        assert answer.finish_reason == "interrupted"
        assert engine.session.ids == backend.tokens == tuple([*PROMPT, *answer.token_ids][:-1])
        ask(engine, 300, [*PROMPT, *answer.token_ids])
