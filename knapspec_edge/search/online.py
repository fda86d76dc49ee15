"""The planner while decoding: which plan at this context, whether at all, and when to look again.

Learns from every round what it costs nothing to learn (acceptance by place and confidence, times),
and spends a stated share of the decode time on judging plans beside the text, on the tokens that
were verified last. A plan is changed when the context enters another bucket, when acceptance leaves
the band that was expected, when judged text says so, or when the machine has changed; never for a
gain within the hysteresis. It measures beside the text only: the text cannot depend on it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from ..backend import Backend
from ..config import DEFAULTS, Config
from ..decode.guard import SpeedGuard
from ..decode.loop import Clock
from ..errors import ContextError
from ..latency.drift import DriftTracker
from ..records import GREEDY, Draft, Plan, RoundTimes, Sampling
from .acceptance import judge_beside
from .draft_length import Calibration, ValueRule
from .plan_book import Estimate, PlanBook

# A first guess at what judging costs per token, in plain steps.
_JUDGE_STEPS = 0.5
# How far a factor of drift may move before estimates are made anew.
_DRIFT_STEP = 0.1
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
        # acceptance by confidence, per plan: the latest text decides
        self._calibrations: dict[Plan, Calibration] = {}
        # time that may be spent on judging, and what was spent
        self._saved_ms = 0.0
        self._needed_ms = 0.0
        self._judge_token_ms: float | None = None
        self.decode_ms = 0.0
        self.plan_ms = 0.0
        self.n_judged = 0
        self.n_changes = 0
        # emitted tokens of this answer up to which a plan was judged
        self._judged_to: dict[Plan, int] = {}
        self._can_judge = True
        self._rounds = 0
        self._rounds_since_look = 0
        self._tried = self._right = 0  # with the plan in use, since it came into use
        self._correction = drift.correction()
        # measured over predicted speed of speculation, where the guard ended it
        self._handicap: dict[int, float] = {}
        self._handicap_at = 0
        self._ended: str | None = None

    # -- decode.policy.Policy ----------------------------------------------------------------------

    @property
    def stopped(self) -> str | None:
        return self._ended

    @property
    def active(self) -> Estimate | None:
        """The plan in use; None: plain decoding."""
        return self._active

    def begin(self, sampling: Sampling) -> None:
        if (sampling.temperature, sampling.min_p) != (
            self._sampling.temperature,
            self._sampling.min_p,
        ):
            # how sure a draft is means something else at another temperature
            self._calibrations.clear()
        self._sampling = sampling
        self._judged_to.clear()
        self._can_judge = self._backend.max_beside_tokens > 0
        self._ended = None
        self._bucket = None
        if self._guard is not None:
            self._guard.begin()

    def spare(self, emitted: Sequence[int], position: int) -> None:
        if self._saved_ms < self._needed_ms or not self._can_judge:
            return
        if len(emitted) <= self._config.plan_min_window_tokens or self._bucket is None:
            return
        started = self._clock()
        try:
            self._judge(emitted, position)
        finally:
            spent_ms = 1000.0 * (self._clock() - started)
            self.plan_ms += spent_ms
            self._saved_ms -= spent_ms

    def draft(self, context_tokens: int) -> Draft | None:
        bucket = self._book.bucket(context_tokens)
        self._context_tokens = context_tokens
        if bucket != self._bucket:
            self._bucket = bucket
            self._look(entered=True)
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
        self._saved_ms = min(
            self._saved_ms + config.plan_share * times.elapsed_ms,
            1000.0 * config.plan_share_kept_seconds,
        )
        self._rounds += 1
        active = self._active
        self._drift.observe(times, None if active is None else active.plan)
        if self._guard is not None and active is not None:
            speculated = times.drafted > 0
            self._guard.observe(times.elapsed_ms, times.tokens, speculated=speculated)
        if active is None:
            return
        verified = times.drafted if times.verified is None else times.verified
        if verified:
            self._calibrations[active.plan].observe_round(
                times.confidences[:verified], times.accepted
            )
            self._tried += min(times.accepted + 1, verified)
            self._right += times.accepted
        if times.drafted:
            self._rounds_since_look += 1
        if self._guard is not None and self._guard.stopped is not None:
            self._give_up(self._guard.stopped)
        elif self._rounds_since_look >= config.plan_interval_rounds or self._left_band():
            self._look()

    # -- deciding ----------------------------------------------------------------------------------

    def _left_band(self) -> bool:
        """Whether acceptance is elsewhere than was expected of this plan, beyond chance.

        The band is that of a binomial share, as wide as `plan_confidence` standard errors; the
        expectation has an error of its own, from the places it was judged on.
        """
        active, n = self._active, self._tried
        if active is None or n < self._config.plan_min_window_tokens:
            return False
        p = min(0.98, max(0.02, active.acceptance))
        error = math.sqrt(p * (1.0 - p) * (1.0 / n + 1.0 / max(1, active.places)))
        return abs(self._right / n - p) > self._config.plan_confidence * error

    def _estimates(self) -> list[Estimate]:
        assert self._bucket is not None
        book, bucket = self._book, self._bucket
        context = self._context_tokens
        # of a context's order, so that estimates can be used again
        context = max(1, round(context / 128)) * 128
        found = (
            book.estimate(plan, bucket, min(context, book.n_ctx - 1), self._correction)
            for plan in book.plans(bucket)
        )
        return [e for e in found if e is not None]

    def _look(self, *, entered: bool = False) -> None:
        """Decide anew from what is known now."""
        started = self._clock()
        self._refresh_correction()
        if self._left_band() and self._active is not None and self._bucket is not None:
            # what was judged earlier says little about this text
            self._book.forget(self._bucket, self._active.plan, self._config.plan_trust_places)
        best = max(self._estimates(), key=self._worth, default=None)
        chosen = self._choose(best)
        if chosen is None or self._active is None or chosen.plan != self._active.plan:
            self._use(chosen)
        else:
            # the same plan, at today's prices
            self._use(chosen, same=True)
        self._rounds_since_look = 0
        spent_ms = 1000.0 * (self._clock() - started)
        self.plan_ms += spent_ms
        self._saved_ms -= spent_ms
        self._needed_ms = self._judge_cost_ms(self._config.plan_min_window_tokens)

    def _worth(self, estimate: Estimate) -> float:
        """Predicted ratio, with what real rounds have held against predictions."""
        assert self._bucket is not None
        held = self._handicap.get(self._bucket, 1.0)
        forgiven = (self._rounds - self._handicap_at) / _FORGIVE_ROUNDS
        return float(estimate.ratio * held ** (0.5**forgiven))

    def _choose(self, best: Estimate | None) -> Estimate | None:
        config = self._config
        if best is None:
            return None
        active = None
        if self._active is not None and self._bucket is not None:
            active = self._book.estimate(
                self._active.plan, self._bucket, best.context_tokens, self._correction
            )
        if self._forced or active is not None:
            floor = 0.0 if self._forced else 1.0
            if active is not None:
                change = self._worth(best) > (1.0 + config.plan_hysteresis) * self._worth(active)
                best = best if change else active
            return best if self._worth(best) >= floor else None
        trusted = best.places >= config.plan_trust_places or best.replay is not None
        on = trusted and self._worth(best) >= 1.0 + config.plan_margin
        return best if on else None

    def _use(self, chosen: Estimate | None, *, same: bool = False) -> None:
        if not same:
            self.n_changes += (chosen is None) != (self._active is None) or (
                chosen is not None and self._active is not None
            )
            self._tried = self._right = 0
            if self._guard is not None and chosen is not None and self._active is None:
                self._guard.begin()
        self._active = chosen
        self._rule = None
        if chosen is not None:
            self._ended = None
            calibration = self._calibrations.setdefault(chosen.plan, chosen.calibration)
            self._rule = chosen.rule(calibration, forced=self._forced)

    def _give_up(self, reason: str) -> None:
        """The guard measured a loss: predictions for this bucket were too good by so much."""
        assert self._active is not None
        assert self._bucket is not None
        assert self._guard is not None
        measured = self._guard.measured_ratio
        if measured is not None:
            self._handicap[self._bucket] = min(1.0, measured / max(0.01, self._active.ratio))
            self._handicap_at = self._rounds
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

    def _judge(self, emitted: Sequence[int], position: int) -> None:
        """Judge the most promising plan on the latest tokens, if there is one and time for it."""
        config = self._config
        assert self._bucket is not None
        chosen = self._promising(len(emitted))
        if chosen is None:
            # nothing could pay: look again when the text has gone on
            self._needed_ms = self._saved_ms + self._judge_cost_ms(config.plan_min_window_tokens)
            return
        plan, fresh = chosen
        most = min(self._backend.max_beside_tokens, config.measure_window_tokens)
        affordable = int(self._saved_ms / max(1e-9, self._judge_cost_ms(1)))
        width = min(fresh, most, affordable, len(emitted) - 1)
        if width < config.plan_min_window_tokens:
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
        except ContextError:
            self._can_judge = False  # no cells, or a window that moved on: not in this answer
            return
        self._judge_token_ms = 1000.0 * (self._clock() - started) / width
        self._judged_to[plan] = len(emitted)
        self.n_judged += 1
        self._book.add(self._bucket, judgement)
        self._look()

    def _promising(self, n_emitted: int) -> tuple[Plan, int] | None:
        """The plan that could be worth most, and how many tokens it was not judged on yet.

        Only where its optimistic estimate beats what is done now: what cannot pay is not looked at,
        and what was judged often enough has little room left above its estimate.
        """
        now = 1.0 if self._active is None else self._worth(self._active)
        asked = now * (1.0 + (self._config.plan_margin if self._active is None else 0.0))
        best: tuple[float, Plan, int] | None = None
        for estimate in self._estimates():
            fresh = n_emitted - 1 - self._judged_to.get(estimate.plan, 0)
            if fresh < self._config.plan_min_window_tokens:
                continue
            if self._active is not None and estimate.plan == self._active.plan:
                continue  # its rounds say it for nothing
            lift = estimate.optimistic / max(1e-9, estimate.ratio)
            value = lift * self._worth(estimate)
            if value > asked and (best is None or value > best[0]):
                best = (value, estimate.plan, fresh)
        return None if best is None else (best[1], best[2])
