"""What is known about the draft plans of one model in one setting, by bucket of context length.

Costs come from the profile, acceptance from judged text. From both follows what a plan would be
worth now; nothing here computes with the model.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..config import DEFAULTS, Config
from ..latency.costs import Costs
from ..latency.drift import NO_CORRECTION, Correction
from ..latency.fidelity import Fidelity, Losses
from ..latency.rounds import RoundTiming
from ..latency.store import MAX_COUNT
from ..records import FULL, Mode, Plan, SubLayer, parse_mode
from .acceptance import Judgement
from .buckets import bucket_of, context_of
from .candidates import candidate_plans
from .draft_length import Calibration, ValueRule
from .throughput import Replay, Window
from .valuation import Prices, expected_rate, geometric_rate, verification_curve

# Standard normal quantile of the bounds of an acceptance.
_QUANTILE = 1.64
# Kept at most: those of all plans of several buckets, so that a text that goes back and forth
# across a border does not have them computed each time.
_MOST_ESTIMATES = 1000
_HEAD = "head"  # among the modes of a plan that is kept: its rows


@dataclass(frozen=True)
class Estimate:
    """What one plan would be worth at one context."""

    plan: Plan
    context_tokens: int
    prices: Prices
    rate: float  # tokens per ms, with the draft length chosen by value
    ratio: float  # of that to plain decoding
    acceptance: float  # of a place, all before it accepted
    places: int  # judged, at the nearest bucket where it was; 0: from single sublayers only
    replay: Replay | None  # None: nothing judged
    calibration: Calibration

    def optimistic(self, weight: float = 1.0) -> float:
        """The ratio if acceptance were at its upper bound, each judged place counting `weight`."""
        alpha, places = self.acceptance, weight * self.places
        upper = upper_bound(alpha * places, places) if self.places else 0.5 + 0.5 * alpha
        # how much more that would yield, by the geometric model
        lift = geometric_rate(self.prices, upper) / geometric_rate(self.prices, alpha)
        return self.ratio * max(1.0, lift)

    def rule(self, calibration: Calibration, *, forced: bool) -> ValueRule:
        """How far to draft with this plan. Forced: time is worth what this plan yields, and at
        least one token is drafted; else at least what plain decoding yields."""
        rate = self.rate if forced else max(self.rate, 1.0 / self.prices.step_ms)
        verify_ms = self.prices.verify_ms
        return ValueRule(calibration, self.prices.draft_ms, verify_ms, rate, least=int(forced))


def upper_bound(agreed: float, total: float) -> float:
    """Wilson's upper bound of a share, for `_QUANTILE` standard errors."""
    if total <= 0.0:
        return 1.0
    z2 = _QUANTILE**2
    p = min(1.0, agreed / total)
    root = math.sqrt(p * (1.0 - p) / total + z2 / (4.0 * total**2))
    return min(1.0, (p + z2 / (2.0 * total) + _QUANTILE * root) / (1.0 + z2 / total))


class PlanBook:
    """Judgements by bucket and plan, and what follows from them. Not thread-safe."""

    def __init__(
        self,
        costs: Costs,
        fidelity: Fidelity,
        sublayers: tuple[SubLayer, ...],
        n_ctx: int,
        config: Config = DEFAULTS,
    ) -> None:
        self.costs = costs
        self.fidelity = fidelity
        self._losses = Losses(fidelity, sublayers, config)
        self.sublayers = sublayers
        self.n_ctx = n_ctx
        self.config = config
        self.changed = False  # since it was read or written
        self._judged: dict[int, dict[Plan, Judgement]] = {}
        self._shortlists: dict[int, tuple[Plan, ...]] = {}
        # logs of measured over predicted times of real rounds
        self._draft_logs: list[float] = []
        self._verify_logs: list[float] = []
        self._versions: dict[Plan, int] = {}  # of what is known about each
        self._learned: set[tuple[int, Plan]] = set()  # what was added or forgotten here
        self._estimates: dict[tuple[object, ...], Estimate] = {}
        self._latest: dict[tuple[int, Plan], Estimate] = {}

    # -- what was learned --------------------------------------------------------------------------

    def bucket(self, context_tokens: int) -> int:
        return bucket_of(context_tokens, self.config.bucket_first_tokens)

    def context(self, bucket: int) -> int:
        return context_of(bucket, self.config.bucket_first_tokens, self.n_ctx)

    def add(self, bucket: int, judgement: Judgement) -> None:
        """What a plan did on some text at a context of this bucket."""
        plans = self._judged.setdefault(bucket, {})
        known = plans.get(judgement.plan)
        if known is not None:
            judgement = known.plus(judgement, self.config.plan_kept_places)
        plans[judgement.plan] = judgement
        self._touch(bucket, judgement.plan)

    def forget(self, bucket: int, plan: Plan, places: int) -> None:
        """The text has changed: keep only the latest windows of what is known about a plan, as few
        as hold so many places, and one in any case."""
        known = self._judged.get(bucket, {}).get(plan)
        if known is not None:
            windows = list(known.windows)
            while len(windows) > 1 and sum(len(w.agree) for w in windows[1:]) >= places:
                windows.pop(0)
            self._judged[bucket][plan] = Judgement(plan, tuple(windows))
            self._touch(bucket, plan)

    def add_timing(self, plan: Plan, context_tokens: int, timing: RoundTiming) -> None:
        """Real rounds: the cost model keeps its shape and takes their height."""
        draft_ms = self.costs.draft_ms(plan, context_tokens) / self.costs.step_ms(context_tokens)
        width = timing.draft_tokens + 1
        verify_ms = self.costs.verify_ms(context_tokens, width) / self.costs.step_ms(context_tokens)
        plain_ms = timing.plain_step_ms
        if min(draft_ms, verify_ms, plain_ms, timing.draft_step_ms, timing.verify_ms) > 0.0:
            self._draft_logs.append(math.log(timing.draft_step_ms / plain_ms / draft_ms))
            self._verify_logs.append(math.log(timing.verify_ms / plain_ms / verify_ms))
            self._estimates.clear()

    def _touch(self, bucket: int, plan: Plan) -> None:
        self.changed = True
        self._learned.add((bucket, plan))
        self._versions[plan] = self._versions.get(plan, 0) + 1

    def judgement(self, bucket: int, plan: Plan) -> Judgement | None:
        return self._judged.get(bucket, {}).get(plan)

    def plans(self, bucket: int) -> tuple[Plan, ...]:
        """The candidates of a bucket: the knapsack's, solved when first asked for, and what was
        judged, of the nearest buckets first and at most twice as many as a shortlist holds."""
        self._solve(bucket)
        near = sorted(self._judged, key=lambda b: (abs(b - bucket), b))
        judged = dict.fromkeys(p for b in near for p in self._judged[b] if self._wanted(p))
        known = list(judged)[: 2 * self.config.plan_shortlist]
        solved = filter(self._wanted, self._shortlists[bucket])
        return tuple(dict.fromkeys((*known, *solved)))

    def _wanted(self, plan: Plan) -> bool:
        """Whether its windows are among those that are asked for now."""
        allowed = self.config.window_tokens
        return all(plan.modes[i].window_tokens in allowed for i in plan.windowed)

    def solve_ahead(self) -> None:
        """Find the candidates of all buckets, so that entering one takes no time."""
        for bucket in range(self.bucket(self.n_ctx) + 1):
            self._solve(bucket)

    def _solve(self, bucket: int) -> None:
        if bucket not in self._shortlists:
            context = self.context(bucket)
            self._shortlists[bucket] = tuple(
                candidate_plans(self.costs, self.fidelity, context, self.sublayers, self.config)
            )
            self.changed = True

    def _may_use(self, plan: Plan) -> bool:
        """What was kept may have a head that is not to be shortened now."""
        return not plan.head_rows or (
            self.config.short_head and plan.head_rows in self.costs.short_heads
        )

    def propose(self, bucket: int, plans: Iterable[Plan]) -> None:
        """Candidates of another generator, or those that were solved for earlier."""
        known = self._shortlists.get(bucket, ())
        self._shortlists[bucket] = tuple(dict.fromkeys((*known, *plans)))

    @property
    def most_head_rows(self) -> int:
        """Of the candidates' short heads the longest one; 0 without any."""
        known = (*self._judged.values(), *self._shortlists.values())
        return max((plan.head_rows for plans in known for plan in plans), default=0)

    def _nearest(self, bucket: int, plan: Plan) -> int | None:
        known = [b for b, plans in self._judged.items() if plan in plans]
        return min(known, key=lambda b: (abs(b - bucket), b), default=None)

    # -- what follows ------------------------------------------------------------------------------

    def prices(
        self, plan: Plan, context_tokens: int, correction: Correction = NO_CORRECTION
    ) -> Prices:
        """Costs of the model, scaled by real rounds, then by the machine's drift."""
        curve = self.verification_ms(context_tokens, correction)
        draft_scale = correction.draft * _typical(self._draft_logs)
        draft_ms = draft_scale * self.costs.draft_ms(plan, context_tokens)
        return Prices(curve[0], draft_ms, curve)

    def verification_ms(
        self, context_tokens: int, correction: Correction = NO_CORRECTION
    ) -> tuple[float, ...]:
        """Prices.verify_ms, which no plan changes."""
        step_ms = correction.step * self.costs.step_ms(context_tokens)
        scale = correction.verify * _typical(self._verify_logs)
        return verification_curve(self.costs, context_tokens, step_ms, scale, self.config)

    def estimate(
        self,
        plan: Plan,
        bucket: int,
        context_tokens: int | None = None,
        correction: Correction = NO_CORRECTION,
    ) -> Estimate | None:
        """What the plan is worth at a context (None: the one that stands for the bucket).

        Judged text of the bucket decides; else that of the nearest bucket where the plan was
        judged; else the product of single sublayers. None where nothing can be drafted.
        """
        key = self._estimate_key(plan, bucket, context_tokens, correction)
        if key not in self._estimates:
            found = self._estimate(*key[1:])
            if found is None:
                return None
            if len(self._estimates) > _MOST_ESTIMATES:
                self._estimates.clear()
            self._estimates[key] = found
            self._latest[bucket, plan] = found
        return self._estimates[key]

    def latest_estimate(self, plan: Plan, bucket: int) -> Estimate | None:
        """The one that was made last for this bucket, at whatever context and prices; None where
        none was made. Takes no time."""
        return self._latest.get((bucket, plan))

    def has_estimate(
        self,
        plan: Plan,
        bucket: int,
        context_tokens: int | None = None,
        correction: Correction = NO_CORRECTION,
    ) -> bool:
        """Whether `estimate` takes no time."""
        key = self._estimate_key(plan, bucket, context_tokens, correction)
        return key in self._estimates

    def _estimate_key(
        self, plan: Plan, bucket: int, context_tokens: int | None, correction: Correction
    ) -> tuple[int, Plan, int, int, Correction]:
        """All that an estimate follows from."""
        context = self.context(bucket) if context_tokens is None else context_tokens
        return self._versions.get(plan, 0), plan, bucket, context, correction

    def _estimate(
        self, plan: Plan, bucket: int, context: int, correction: Correction
    ) -> Estimate | None:
        prices = self.prices(plan, context, correction)
        if len(prices.verify_ms) < 2:
            return None
        plain = 1.0 / prices.step_ms
        near = self._nearest(bucket, plan)
        judgement = None if near is None else self._judged[near][plan]
        if judgement is None:
            alpha = self.single_agreement(plan)
            calibration = Calibration(self.config.calibration_memory_tokens)
            rate = geometric_rate(prices, alpha)
            return Estimate(plan, context, prices, rate, rate / plain, alpha, 0, None, calibration)
        agree = judgement.agree
        alpha = sum(agree) / len(agree)
        calibration = judgement.calibration(self.config.calibration_memory_tokens)
        result, rate = expected_rate(judgement, prices, self.config.calibration_memory_tokens)
        return Estimate(
            plan, context, prices, rate, rate / plain, alpha, len(agree), result, calibration
        )

    def single_agreement(self, plan: Plan) -> float:
        """Product of what was measured for each sublayer it changes, and for its head."""
        return self._losses.agreement(plan)

    # -- on disk -----------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """Judgements and shortlists by bucket; costs and fidelity are kept elsewhere."""
        buckets = sorted({*self._judged, *self._shortlists})
        return {
            # shortlists follow from these costs, judgements from the model alone
            "latency_at": self.costs.profile.measured_at,
            "first_tokens": self.config.bucket_first_tokens,
            "buckets": [
                {
                    "bucket": b,
                    "shortlist": (
                        [_modes(p) for p in self._shortlists[b]] if b in self._shortlists else None
                    ),
                    "judged": [
                        {
                            "skipped": _modes(j.plan),
                            "windows": [
                                {
                                    "agree": "".join("01"[a] for a in w.agree),
                                    "probability": [round(p, 3) for p in w.probability],
                                }
                                for w in j.windows
                            ],
                        }
                        for j in self._judged.get(b, {}).values()
                    ],
                }
                for b in buckets
            ],
        }

    def read(self, data: Mapping[str, Any]) -> None:
        """Add what was kept, except about what was learned here. Raises one of store.INVALID for
        anything else, adding nothing."""
        if data["first_tokens"] != self.config.bucket_first_tokens:
            return  # other ranges: judged afresh
        n = len(self.sublayers)
        judged: dict[int, dict[Plan, Judgement]] = {}
        shortlists: dict[int, tuple[Plan, ...]] = {}
        for entry in data["buckets"]:
            b = int(entry["bucket"])
            if not 0 <= b < 64:
                raise ValueError("a bucket is impossible")
            shortlist = entry["shortlist"]
            known = data["latency_at"] == self.costs.profile.measured_at
            if known and shortlist is not None:
                plans = (_plan(n, plan) for plan in shortlist)
                shortlists[b] = tuple(plan for plan in plans if self._may_use(plan))
            for item in entry["judged"]:
                plan = _plan(n, item["skipped"])
                windows = tuple(_window(w) for w in item["windows"])
                if not windows:
                    raise ValueError("a judged plan without text")
                if self._may_use(plan):
                    judged.setdefault(b, {})[plan] = Judgement(plan, windows)
        self._shortlists = {**shortlists, **self._shortlists}
        for b, found in judged.items():
            new = {p: j for p, j in found.items() if (b, p) not in self._learned}
            self._judged.setdefault(b, {}).update(new)
        self._estimates.clear()


def _modes(plan: Plan) -> list[int] | dict[str, list[int]]:
    """What is skipped; with windows, sublayers by their mode, and with a short head its rows."""
    if not plan.windowed and not plan.head_rows:
        return list(plan.skipped)
    found: dict[str, list[int]] = {}
    for i, mode in enumerate(plan.modes):
        if mode != FULL:
            found.setdefault(str(mode), []).append(i)
    if plan.head_rows:
        found[_HEAD] = [plan.head_rows]
    return found


def _plan(n: int, data: Sequence[Any] | Mapping[str, Sequence[Any]]) -> Plan:
    """The inverse of `_modes`. Raises ValueError, TypeError."""
    if not isinstance(data, Mapping):
        return Plan.skipping(n, [int(i) for i in data])
    modes: list[Mode] = [FULL] * n
    head_rows = 0
    for name, indices in data.items():
        if name == _HEAD:
            (head_rows,) = (int(rows) for rows in indices)
            if not 0 < head_rows <= MAX_COUNT:
                raise ValueError("a head is impossible")
            continue
        for i in Plan.skipping(n, [int(i) for i in indices]).skipped:
            if modes[i] != FULL:
                raise ValueError("a sublayer has two modes")
            modes[i] = parse_mode(name)
    return Plan(tuple(modes), head_rows)


def _window(data: Mapping[str, Any]) -> Window:
    agree = tuple({"0": False, "1": True}[c] for c in data["agree"])
    probability = tuple(float(p) for p in data["probability"])
    if not agree or len(agree) != len(probability) or not all(0 <= p <= 1 for p in probability):
        raise ValueError("a judged window is impossible")
    return Window(agree, probability)


def _typical(logs: Sequence[float]) -> float:
    return math.exp(statistics.median(logs)) if logs else 1.0
