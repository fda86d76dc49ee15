"""Compares the times of real rounds with the profile: a machine that throttles or is shared does
not keep to what was measured."""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass

from ..config import DEFAULTS, Config
from ..records import Plan, RoundTimes
from .costs import Costs

# Contexts that share a prediction, in tokens; divides the steps in which a cache is read.
_STRIDE = 16
_KEPT_PREDICTIONS = 64


@dataclass(frozen=True)
class Correction:
    """Observed over predicted time, by kind of pass. 1.0 where nothing was observed."""

    step: float = 1.0
    draft: float = 1.0
    verify: float = 1.0


NO_CORRECTION = Correction()


class DriftTracker:
    """Medians of the latest `drift_kept_rounds` rounds of each kind.

    What is older than `drift_memory_rounds` rounds of any kind is forgotten: where speculation was
    given up, an old factor of drafts would be held against a new one of plain steps. Where only
    plain steps were seen, what slowed them is taken to slow everything.
    """

    def __init__(self, costs: Costs, config: Config = DEFAULTS) -> None:
        self._costs = costs
        self._config = config
        kinds = ("step", "draft", "verify")
        self._rounds = 0
        # predicted times by what they depend on; a prediction costs a visible share of a fast step
        self._predicted: dict[tuple[int, int, Plan | None], float] = {}
        # (round, log of observed over predicted)
        self._logs: dict[str, deque[tuple[int, float]]] = {
            kind: deque(maxlen=config.drift_kept_rounds) for kind in kinds
        }

    def observe(self, times: RoundTimes, plan: Plan | None) -> None:
        """One round. Beyond the widths and contexts that were measured, a difference would be the
        model's, not the machine's: nothing is counted there."""
        width = times.width
        longest = self._costs.profile.limit_tokens
        if width > self._costs.max_width or times.context_tokens > longest:
            return
        self._rounds += 1
        if width == 1:
            # right after a draft it may have to change the graph, which no plain step does
            if times.drafted == 0:
                self._add("step", times.verify_ms, self._predict(times.context_tokens))
        else:
            verify_ms = self._predict(times.context_tokens, width=width)
            self._add("verify", times.verify_ms, verify_ms)
        if plan is not None and times.drafted > 0:
            middle = times.context_tokens + times.drafted // 2
            draft_ms = self._predict(middle, plan=plan)
            self._add("draft", times.draft_ms / times.drafted, draft_ms)

    def _predict(self, context_tokens: int, *, width: int = 1, plan: Plan | None = None) -> float:
        """Time of a pass, the same for contexts that differ by less than `_STRIDE` tokens."""
        context = context_tokens - context_tokens % _STRIDE + _STRIDE // 2
        key = (context, width, plan)
        found = self._predicted.get(key)
        if found is None:
            if len(self._predicted) >= _KEPT_PREDICTIONS:
                self._predicted.clear()
            found = (
                self._costs.verify_ms(context, width)
                if plan is None
                else self._costs.draft_ms(plan, context)
            )
            self._predicted[key] = found
        return found

    def _add(self, kind: str, observed_ms: float, predicted_ms: float) -> None:
        if observed_ms > 0.0 and predicted_ms > 0.0:
            self._logs[kind].append((self._rounds, math.log(observed_ms / predicted_ms)))

    @property
    def observed(self) -> int:
        """Passes compared so far, as far as they are still counted."""
        return sum(len(logs) for logs in self._logs.values())

    def correction(self) -> Correction:
        """What to multiply predictions with. One factor for all kinds that were not seen."""
        oldest = self._rounds - self._config.drift_memory_rounds
        recent = {
            kind: [log for number, log in logs if number > oldest]
            for kind, logs in self._logs.items()
        }
        known = {
            kind: math.exp(statistics.median(logs))
            for kind, logs in recent.items()
            if len(logs) >= self._config.drift_min_rounds
        }
        if not known:
            return NO_CORRECTION
        others = known.get("step", statistics.median(known.values()))
        return Correction(**{kind: known.get(kind, others) for kind in self._logs})

    def report(self) -> str | None:
        """One line once the machine is out of bounds, else None.

        The bound is a factor of 1 + `drift_bound`, either way, in the median of the latest rounds
        of a kind.
        """
        correction = self.correction()
        factors = {
            "a plain step takes": correction.step,
            "drafting takes": correction.draft,
            "verifying takes": correction.verify,
        }
        name, factor = max(factors.items(), key=lambda f: abs(math.log(f[1])))
        if abs(math.log(factor)) <= math.log1p(self._config.drift_bound):
            return None
        return (
            f"{name} {factor:.2f}x the time that was measured on this machine (other load, "
            "throttling?)"
        )
