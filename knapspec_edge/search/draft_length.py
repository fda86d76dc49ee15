"""How far to draft in a round, and how much of the draft to verify: by value, not by a threshold.

With S_j the chance that the first j drafted tokens are all accepted, verifying j of them yields
1 + S_1 + ... + S_j tokens in verify_ms(j). Time has a price: the tokens per millisecond that
decoding makes anyway. So a draft goes on while some longer one is worth more than what is there,

    max over m >= 1 of  sum_{i<=m} S_{k+i} - rate * (m * draft_ms + verify_ms(k + m))
    >  max over j <= k of  sum_{i<=j} S_i - rate * verify_ms(j)   (all from the same k tokens on),

and of a finished draft the best prefix is verified (optimal stopping with the long-run rate as its
price; Draft & Verify and AdaEDL use thresholds instead). The whole curve is looked at, because
passes of one more token may cost nothing and the next one a lot.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

# Upper ends of the bins of confidence. Most drafted tokens are sure, so bins are finer there.
CONFIDENCE_BINS = (0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.96, 0.99)
# How much the prior counts, in tokens per bin.
_PRIOR_TOKENS = 4.0


def _prior(confidence: float) -> float:
    """A draft is right about as often as it is sure, and less often than it is very sure."""
    return 0.15 + 0.75 * confidence


@dataclass
class Calibration:
    """Acceptance of drafted tokens by the draft's own confidence, all before them accepted.

    Counts fade, so that the latest `memory_tokens` or so decide.
    """

    memory_tokens: float = 512.0
    right: list[float] = field(default_factory=lambda: [0.0] * (len(CONFIDENCE_BINS) + 1))
    tried: list[float] = field(default_factory=lambda: [0.0] * (len(CONFIDENCE_BINS) + 1))

    def observe(self, confidence: float, accepted: bool) -> None:
        """One drafted token that the target looked at."""
        fade = 1.0 - 1.0 / self.memory_tokens
        for b in range(len(self.tried)):
            self.tried[b] *= fade
            self.right[b] *= fade
        b = bisect_right(CONFIDENCE_BINS, confidence)
        self.tried[b] += 1.0
        self.right[b] += accepted

    def observe_round(self, confidences: Sequence[float], accepted: int) -> None:
        """A round in which the first `accepted` of the drafted tokens were accepted; what comes
        after the first wrong one tells nothing."""
        for i, confidence in enumerate(confidences[: accepted + 1]):
            self.observe(confidence, i < accepted)

    def acceptance(self, confidence: float) -> float:
        """Chance in 0..1 that a token drafted with this confidence is accepted."""
        b = bisect_right(CONFIDENCE_BINS, confidence)
        right = self.right[b] + _PRIOR_TOKENS * _prior(confidence)
        return right / (self.tried[b] + _PRIOR_TOKENS)

    def mean(self) -> float:
        """Chance that the next token is accepted, before its confidence is known."""
        right = sum(self.right) + _PRIOR_TOKENS * 0.7
        return right / (sum(self.tried) + _PRIOR_TOKENS)


class ValueRule:
    """The rule for one plan at one context. `verify_ms[j]`: verifying j drafted tokens (0: a plain
    step), `rate`: tokens per ms that time is worth. `least`: tokens drafted and verified in any
    case."""

    def __init__(
        self,
        calibration: Calibration,
        draft_ms: float,
        verify_ms: Sequence[float],
        rate: float,
        *,
        least: int = 0,
    ) -> None:
        if len(verify_ms) < 2 or least >= len(verify_ms):
            raise ValueError("a rule needs the cost of verifying at least one drafted token")
        self.calibration = calibration
        self.most = len(verify_ms) - 1
        self._draft_price = rate * draft_ms
        self._prices = [rate * ms for ms in verify_ms]
        self._least = least

    def _best_prefix(self, survival: Sequence[float]) -> tuple[float, int]:
        """(value, tokens to verify) of the best prefix; of equal ones the longest."""
        gained = 0.0
        best = (-self._prices[0], 0) if self._least == 0 else (float("-inf"), 0)
        for j, alive in enumerate(survival[: self.most], start=1):
            gained += alive
            value = gained - self._prices[j]
            if j >= self._least and value >= best[0]:
                best = (value, j)
        return best

    def _survival(self, confidences: Sequence[float]) -> list[float]:
        alive, found = 1.0, []
        for confidence in confidences:
            alive *= self.calibration.acceptance(confidence)
            found.append(alive)
        return found

    def go_on(self, confidences: Sequence[float]) -> bool:
        """Whether to draft another token after those with these confidences."""
        k = len(confidences)
        if k < self._least:
            return True
        if k >= self.most:
            return False
        survival = self._survival(confidences)
        value, _ = self._best_prefix(survival)
        alive = survival[-1] if survival else 1.0
        gained, mean = sum(survival), self.calibration.mean()
        for m in range(1, self.most - k + 1):
            alive *= mean
            gained += alive
            if gained - m * self._draft_price - self._prices[k + m] > value:
                return True
        return False

    def keep(self, confidences: Sequence[float]) -> int:
        """How many of the drafted tokens to verify, 0..len(confidences)."""
        return self._best_prefix(self._survival(confidences))[1]

    def length(self, confidences: Sequence[float]) -> tuple[int, int]:
        """(drafted, verified) of a round whose tokens would have these confidences."""
        drafted = 0
        while drafted < len(confidences) and self.go_on(confidences[:drafted]):
            drafted += 1
        return drafted, self.keep(confidences[:drafted])


@dataclass(frozen=True)
class FixedRule:
    """The paper's: up to `most` tokens, stopping after one less sure than a threshold, which is
    still verified."""

    most: int
    min_probability: float

    def go_on(self, confidences: Sequence[float]) -> bool:
        if len(confidences) >= self.most:
            return False
        return not confidences or confidences[-1] >= self.min_probability

    def keep(self, confidences: Sequence[float]) -> int:
        return len(confidences)

    def length(self, confidences: Sequence[float]) -> tuple[int, int]:
        drafted = 0
        while drafted < len(confidences) and self.go_on(confidences[:drafted]):
            drafted += 1
        return drafted, drafted
