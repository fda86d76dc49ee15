"""The planner while decoding: which plan at this context, whether at all, and when to look again.

Learns from every round what it costs nothing to learn (whether drafted tokens were right, by how
sure the draft was; times), and spends a stated share of the decode time on judging other plans
beside the text, on the tokens that were verified last, and on thinking. A plan is changed when the
context enters another bucket, when acceptance leaves the band that was expected, when judged text
says so, or when the machine has changed; never for a gain within the hysteresis. It measures beside
the text only: the text cannot depend on it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from ..backend import Backend
from ..config import DEFAULTS, Config
from ..decode.guard import SpeedGuard
from ..decode.loop import Clock
from ..errors import ContextError, NativeError
from ..latency.drift import DriftTracker
from ..records import GREEDY, Draft, Plan, RoundTimes, Sampling
from .acceptance import Judgement, judge_beside
from .draft_length import Calibration, ValueRule
from .plan_book import Estimate, PlanBook
from .throughput import Window

# A first guess at what judging costs per token, in plain steps.
_JUDGE_STEPS = 0.5
# How far a factor of drift may move before estimates are made anew.
_DRIFT_STEP = 0.1
# Logarithm of the factor by which contexts differ that have estimates of their own.
_CONTEXT_STEP = math.log(1.25)
# Rounds after which half of what was held against predictions is forgiven.
_FORGIVE_ROUNDS = 512


class OnlinePlanner:
    """Implements decode.policy.Policy. One per session; `forced`: speculation never ends."""

    def __init__(
        self,
        backend: Backend,
        book: PlanBook,
        drift: DriftTracker,
        *,
        forced: bool = False,
        config: Config = DEFAULTS,
        clock: Clock = time.perf_counter,
    ) -> None:
        self._backend = backend
        self._book = book
        self._drift = drift
        self._forced = forced
        self._config = config
        self._clock = clock
        self._guard = None if forced else SpeedGuard(config)
        self._sampling = GREEDY
        self._bucket: int | None = None
        self._context_tokens = 0
        self._active: Estimate | None = None
        self._rule: ValueRule | None = None
        # time that may be spent on judging, and what was spent
        self._saved_ms = 0.0
        self._needed_ms = 0.0
        self._judge_token_ms: float | None = None
        self._look_ms = 0.0  # what the latest look took
        self.decode_ms = 0.0
        self.plan_ms = 0.0
        self.n_judged = 0
        self.n_changes = 0
        self._tokens = 0  # decoded in this session
        self._rounds = 0
        # tokens decoded when a plan was last seen at work, beside the text or in rounds
        self._seen_at: dict[Plan, int] = {}
        # plans judged since the guard last ended speculation; None: it never did. From then on
        # nothing else is believed about a text
        self._proven: set[Plan] | None = None
        # emitted tokens of this answer up to which a plan was judged
        self._judged_to: dict[Plan, int] = {}
        self._proposed_to = 0  # position behind the latest token that a proposal got right
        self._can_judge = True
        self._judge_after = 0  # decoded tokens, before which nothing new can be expected
        # (right, confidence) of tokens drafted with the plan in use that the book does not hold yet
        self._drafted: list[tuple[bool, float]] = []
        self._look_due = False
        self._left_over = False  # estimates that there was no time for
        self._looked_at = 0  # rounds
        self._correction = drift.correction()
        # by bucket where the guard ended speculation: measured over predicted speed, and the round
        self._handicaps: dict[int, tuple[float, int]] = {}
        self._ended: str | None = None

    def prepare(self, context_tokens: int) -> None:
        """Estimate all plans for contexts up to this one, so that the first answer need not."""
        for bucket in range(self._book.bucket(context_tokens) + 1):
            for plan in self._book.plans(bucket):
                self._book.estimate(plan, bucket, None, self._correction)

    # -- decode.policy.Policy ----------------------------------------------------------------------

    @property
    def stopped(self) -> str | None:
        return self._ended

    def outlook(self) -> tuple[float, float] | None:
        """(tokens per ms, tokens per round) to expect of the plan in use in the next round; None
        where that is a plain step."""
        active = self._active
        if active is None or (self._guard is not None and not self._guard.may_speculate()):
            return None
        per_round = 2.0 if active.replay is None else active.replay.tokens_per_round
        return active.rate, per_round

    def verification_ms(self, context_tokens: int) -> tuple[float, ...]:
        """[j]: verifying j drafted tokens at this context, j = 0 being a plain step, in ms."""
        return self._book.verification_ms(context_tokens, self._correction)

    @property
    def active(self) -> Estimate | None:
        """The plan in use; None: plain decoding."""
        return self._active

    def begin(self, sampling: Sampling, prompt: Sequence[int]) -> None:
        if sampling.law != self._sampling.law:
            # how sure a draft is means something else at another temperature
            self._drafted.clear()
            self._rule = None
            self._bucket = None
        self._sampling = sampling
        self._judged_to.clear()
        self._proposed_to = 0
        self._can_judge = self._backend.max_beside_tokens > 0
        self._judge_after = 0
        if not self._can_judge:
            # nothing can prove itself beside the text: the next one may find out in rounds
            self._proven = None
        if self._ended is not None:
            self._ended = None
            self._look_due = True
        if self._guard is not None:
            self._guard.begin()

    def spare(self, emitted: Sequence[int], position: int) -> None:
        started = self._clock()
        try:
            self._context_tokens = position
            bucket = self._book.bucket(position)
            if bucket != self._bucket:
                self._learn()
                self._bucket = bucket
                self._look()
            elif self._look_due and self._saved_ms >= self._look_ms:
                self._look()
            if self._may_judge(emitted):
                self._judge(emitted, position)
        finally:
            self._spend(started)

    def draft(self, context_tokens: int) -> Draft | None:
        if self._active is None or self._rule is None:
            return None
        if self._guard is not None and not self._guard.may_speculate():
            return None
        return Draft(self._active.plan, self._rule.most, 0.0)

    def go_on(self, confidences: Sequence[float]) -> bool:
        return self._rule is not None and self._rule.go_on(confidences)

    def keep(self, confidences: Sequence[float]) -> int:
        return len(confidences) if self._rule is None else self._rule.keep(confidences)

    def observe(self, times: RoundTimes) -> None:
        config = self._config
        self.decode_ms += times.elapsed_ms
        # what was saved for one pass is never too much, however slow the model
        most_ms = max(1000.0 * config.plan_share_kept_seconds, self._needed_ms)
        self._saved_ms = min(self._saved_ms + config.plan_share * times.elapsed_ms, most_ms)
        self._rounds += 1
        self._tokens += times.tokens
        active, rule = self._active, self._rule
        self._drift.observe(times, None if active is None or times.proposed else active.plan)
        if times.proposed:
            # tells nothing about plans: they draft where nobody proposes
            if times.accepted:
                self._proposed_to = times.context_tokens + times.tokens
        elif active is not None and rule is not None:
            if self._guard is not None:
                speculated = times.drafted > 0
                self._guard.observe(times.elapsed_ms, times.tokens, speculated=speculated)
            rule.calibration.observe_round(times.confidences, times.right)
            self._drafted.extend(zip(times.right, times.confidences, strict=False))
            if self._guard is not None and self._guard.stopped is not None:
                started = self._clock()
                self._give_up(self._guard.stopped)
                self._spend(started)
        if self._rounds - self._looked_at >= config.plan_interval_rounds or self._left_band():
            self._look_due = True

    def settle(self) -> None:
        """Write what rounds have shown into the book, such as before it is kept."""
        self._learn()

    # -- deciding ----------------------------------------------------------------------------------

    def _spend(self, started: float) -> None:
        spent_ms = 1000.0 * (self._clock() - started)
        self.plan_ms += spent_ms
        self._saved_ms -= spent_ms

    def _left_band(self) -> bool:
        """Whether acceptance is elsewhere than was expected of this plan, beyond chance.

        The band is that of a binomial share, as wide as `plan_confidence` standard errors; the
        expectation has an error of its own, from the places it was judged on.
        """
        active, n = self._active, len(self._drafted)
        if active is None or n < self._config.plan_min_window_tokens:
            return False
        p = min(0.98, max(0.02, active.acceptance))
        error = math.sqrt(p * (1.0 - p) * (1.0 / n + 1.0 / max(1, active.places)))
        share = sum(right for right, _ in self._drafted) / n
        return abs(share - p) > self._config.plan_confidence * error

    def _learn(self) -> None:
        """Write what rounds have shown of the plan in use into the book. Where it left its band,
        little of what was known before counts."""
        config = self._config
        if self._active is None or self._bucket is None:
            return
        if len(self._drafted) < config.plan_min_window_tokens:
            return
        left = self._left_band()
        self._write(self._active.plan, self._bucket)
        if left:
            self._book.forget(self._bucket, self._active.plan, config.plan_trust_places)

    def _write(self, plan: Plan, bucket: int) -> None:
        right, confidences = zip(*self._drafted, strict=True)
        self._drafted.clear()
        self._book.add(bucket, Judgement(plan, (Window(right, confidences),)))
        self._seen_at[plan] = self._tokens

    def _estimated_at(self) -> int | None:
        """The context that estimates are made for; None: the one that stands for the bucket."""
        if self._active is None and not self._forced:
            # the whole bucket is off or none of it: nothing new is looked up while nothing changes
            return None
        # in steps, so that estimates can be used again: a look that finds nothing new costs nothing
        steps = round(math.log(max(1, self._context_tokens)) / _CONTEXT_STEP)
        return max(1, min(round(math.exp(steps * _CONTEXT_STEP)), self._book.n_ctx - 1))

    def _estimate(self, plan: Plan) -> Estimate | None:
        assert self._bucket is not None
        return self._book.estimate(plan, self._bucket, self._estimated_at(), self._correction)

    def _estimates(self) -> list[Estimate]:
        """Of all candidates. As many are made anew as there is time saved for, one at least; the
        others stand as they were last estimated, or are left out, until the next look."""
        assert self._bucket is not None
        book, bucket = self._book, self._bucket
        started, made = self._clock(), 0
        self._left_over = False
        found = []
        for plan in book.plans(bucket):
            if not book.has_estimate(plan, bucket, self._estimated_at(), self._correction):
                if made and 1000.0 * (self._clock() - started) > max(0.0, self._saved_ms):
                    self._left_over = True
                    found.append(book.latest_estimate(plan, bucket))
                    continue
                made += 1
            found.append(self._estimate(plan))
        return [e for e in found if e is not None]

    def _look(self) -> None:
        """Decide anew from what is known now."""
        started = self._clock()
        idle = not self._drafted
        self._learn()
        self._refresh_correction()
        chosen = self._choose()
        if chosen is None or self._active is None or chosen.plan != self._active.plan:
            self._use(chosen)
        else:
            # the same plan, at today's prices; where nothing is drafted with it any more, what it
            # was last seen to do is no better founded than what it did before that
            known = None if self._rule is None or idle else self._rule.calibration
            self._use(chosen, known)
        self._look_due = self._left_over
        self._looked_at = self._rounds
        self._needed_ms = self._judge_cost_ms(self._config.plan_min_window_tokens)
        self._look_ms = 1000.0 * (self._clock() - started)

    def _worth(self, estimate: Estimate) -> float:
        """Predicted ratio, with what real rounds have held against predictions."""
        assert self._bucket is not None
        held, since = self._handicaps.get(self._bucket, (1.0, 0))
        forgiven = (self._rounds - since) / _FORGIVE_ROUNDS
        return float(estimate.ratio * held ** (0.5**forgiven))

    def _trusted(self, estimate: Estimate) -> bool:
        """Whether it rests on enough text: what the first decision rests on is, by its rules, until
        that turned out to be wrong."""
        plan, enough = estimate.plan, estimate.places >= self._config.plan_trust_places
        if self._proven is not None:
            return enough and plan in self._proven
        return enough or (estimate.places > 0 and plan not in self._seen_at)

    def _choose(self) -> Estimate | None:
        """The best plan whose estimate can be relied on, or None for plain decoding."""
        config = self._config
        estimates = self._estimates()
        trusted = [e for e in estimates if self._trusted(e)]
        if self._forced and not trusted:
            trusted = [e for e in estimates if e.places] or estimates
        best = max(trusted, key=self._worth, default=None)
        active = None if self._active is None else self._estimate(self._active.plan)
        if active is not None and (
            best is None
            or self._worth(best) <= (1.0 + config.plan_hysteresis) * self._worth(active)
        ):
            best = active
        if best is None or self._forced:
            return best
        asked = 1.0 if active is not None else 1.0 + config.plan_margin
        return best if self._worth(best) >= asked else None

    def _use(self, chosen: Estimate | None, calibration: Calibration | None = None) -> None:
        """`calibration`: what recent rounds taught about the plan, where it was in use already."""
        before = None if self._active is None else self._active.plan
        after = None if chosen is None else chosen.plan
        if before != after:
            self.n_changes += 1
            self._drafted.clear()
            if self._guard is not None and before is None:
                self._guard.begin()
        self._active = chosen
        self._rule = None
        if chosen is not None:
            self._ended = None
            known = calibration or chosen.calibration.copy()
            self._rule = chosen.rule(known, forced=self._forced)

    def _give_up(self, reason: str) -> None:
        """The guard measured a loss. What drafted tokens came to explains it, or predictions for
        this bucket were too good by so much."""
        assert self._active is not None
        assert self._bucket is not None
        assert self._guard is not None
        plan, measured = self._active.plan, self._guard.measured_ratio
        # of the latest rounds, those that were a loss
        del self._drafted[: -self._config.plan_min_window_tokens]
        if self._drafted:
            self._write(plan, self._bucket)
            self._book.forget(self._bucket, plan, 0)
        self._proven = set()
        self._refresh_correction()
        expected = self._estimate(plan)
        if measured is not None and expected is not None:
            held = min(1.0, measured / max(0.01, expected.ratio))
            self._handicaps[self._bucket] = (held, self._rounds)
        self._use(None)
        self._ended = reason

    def _refresh_correction(self) -> None:
        now, then = self._drift.correction(), self._correction
        pairs = ((now.step, then.step), (now.draft, then.draft), (now.verify, then.verify))
        if any(abs(math.log(a / b)) > _DRIFT_STEP for a, b in pairs):
            self._correction = now

    # -- judging -----------------------------------------------------------------------------------

    def _judge_cost_ms(self, tokens: int) -> float:
        per_token = self._judge_token_ms
        if per_token is None:
            per_token = _JUDGE_STEPS * self._book.costs.step_ms(max(1, self._context_tokens))
        return tokens * per_token

    def _may_judge(self, emitted: Sequence[int]) -> bool:
        return (
            self._can_judge
            and self._saved_ms >= self._needed_ms
            and self._tokens >= self._judge_after
            and len(emitted) > self._config.plan_min_window_tokens
        )

    def _judge(self, emitted: Sequence[int], position: int) -> None:
        """Judge the most promising plan on the latest tokens, if there is one and time for it."""
        config = self._config
        assert self._bucket is not None
        # a plan is worth what it does where nothing is proposed
        own = position - self._proposed_to
        if own < config.plan_min_window_tokens:
            self._judge_after = self._tokens + config.plan_min_window_tokens - own
            return
        chosen = self._promising(len(emitted))
        if chosen is None:
            # nothing could pay: look again when the text has gone on
            self._judge_after = self._tokens + config.plan_interval_rounds
            return
        plan, fresh = chosen
        most = min(self._backend.max_beside_tokens, config.measure_window_tokens)
        affordable = int(self._saved_ms / max(1e-9, self._judge_cost_ms(1)))
        width = min(fresh, most, affordable, len(emitted) - 1, own)
        if width < min(most, config.plan_min_window_tokens):
            self._needed_ms = self._judge_cost_ms(config.plan_min_window_tokens)
            return
        started = self._clock()
        try:
            judgement = judge_beside(
                self._backend,
                position - width,
                emitted[-(width + 1) :],
                plan,
                config.plan_judge_block_tokens,
                self._sampling,
            )
        except (ContextError, NativeError):
            # No cells, a window that moved on, or a plan whose logits are no numbers. The text does
            # not need it: not in this answer.
            self._can_judge = False
            return
        self._judge_token_ms = 1000.0 * (self._clock() - started) / width
        self._judged_to[plan] = len(emitted)
        self.n_judged += 1
        self._book.add(self._bucket, judgement)
        if self._proven is not None and plan not in self._proven:
            self._proven.add(plan)
            self._book.forget(self._bucket, plan, 0)
        elif self._tokens - self._seen_at.get(plan, 0) > config.plan_fading_tokens:
            self._book.forget(self._bucket, plan, config.plan_trust_places)
        self._seen_at[plan] = self._tokens
        self._look()

    def _promising(self, n_emitted: int) -> tuple[Plan, int] | None:
        """The plan that could be worth most, and how many tokens it was not judged on yet.

        Only where its optimistic estimate beats what is done now: what cannot pay is not looked at,
        and what was judged often enough has little room left above its estimate, until the text has
        gone on for a while.
        """
        config = self._config
        active = self._active
        now, margin = (
            (1.0, config.plan_margin)
            if active is None
            else (self._worth(active), config.plan_hysteresis)
        )
        best: tuple[float, Plan, int] | None = None
        for estimate in self._estimates():
            plan = estimate.plan
            fresh = n_emitted - 1 - self._judged_to.get(plan, 0)
            if fresh < config.plan_min_window_tokens:
                continue
            if active is not None and plan == active.plan and self._drafted:
                continue  # its rounds say it for nothing
            age = self._tokens - self._seen_at.get(plan, 0)
            optimistic = estimate.optimistic(0.5 ** (age / config.plan_fading_tokens))
            value = optimistic / max(1e-9, estimate.ratio) * self._worth(estimate)
            if value > now * (1.0 + margin) and (best is None or value > best[0]):
                best = (value, plan, fresh)
        return None if best is None else (best[1], best[2])
