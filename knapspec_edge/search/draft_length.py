"""How far to draft in a round, and how much of the draft to verify: by value, not by a threshold.

With S_j the chance that the first j drafted tokens are all accepted, verifying j of them yields
1 + S_1 + ... + S_j tokens in verify_ms(j). Time has a price: the tokens per millisecond that
decoding makes anyway. So a draft goes on while some longer one is worth more than what is there,

    max over m >= 1 of  sum_{i<=m} S_{k+i} - rate * (m * draft_ms + verify_ms(k + m))
    >  max over j <= k of  sum_{i<=j} S_i - rate * verify_ms(j)   (all from the same k tokens on),

and of a finished draft the best prefix is verified (optimal stopping with the long-run rate as its
price; Draft & Verify and AdaEDL use thresholds instead). The whole curve is looked at, because
passes of one more token may cost nothing and the next one a lot.

The loop asks a rule token by token (`go_on`, `keep`); replays ask for many rounds at once
(`lengths`), with the same answers.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

# Upper ends of the bins of confidence. Most drafted tokens are sure, so bins are finer there.
CONFIDENCE_BINS = (0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.96, 0.99)
# One number or many.
_Numbers = TypeVar("_Numbers", float, NDArray[np.float64])
# How much the prior counts, in tokens per bin.
_PRIOR_TOKENS = 4.0


def _prior(confidence: _Numbers) -> _Numbers:
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

    @classmethod
    def of(
        cls, confidences: Sequence[float], accepted: Sequence[bool], memory_tokens: float
    ) -> Calibration:
        """After so many tokens, the latest of which is the last."""
        n = len(confidences)
        weights = (1.0 - 1.0 / memory_tokens) ** np.arange(n - 1.0, -1.0, -1.0)  # f64 [n]
        bins = _bins(np.asarray(confidences, dtype=np.float64))
        size = len(CONFIDENCE_BINS) + 1
        right = weights * np.asarray(accepted, dtype=np.float64)
        return cls(
            memory_tokens,
            np.bincount(bins, right, minlength=size).tolist(),
            np.bincount(bins, weights, minlength=size).tolist(),
        )

    def observe(self, confidence: float, accepted: bool) -> None:
        """One drafted token that the target looked at."""
        fade = 1.0 - 1.0 / self.memory_tokens
        for b in range(len(self.tried)):
            self.tried[b] *= fade
            self.right[b] *= fade
        b = bisect_right(CONFIDENCE_BINS, confidence)
        self.tried[b] += 1.0
        self.right[b] += accepted

    def observe_round(self, confidences: Sequence[float], right: Sequence[bool]) -> None:
        """The drafted tokens of a round of which it is known whether they were right: what comes
        after the first wrong one tells nothing."""
        for confidence, accepted in zip(confidences, right, strict=False):
            self.observe(confidence, accepted)

    def copy(self) -> Calibration:
        return Calibration(self.memory_tokens, list(self.right), list(self.tried))

    def acceptance(self, confidence: float) -> float:
        """Chance in 0..1 that a token drafted with this confidence is accepted."""
        b = bisect_right(CONFIDENCE_BINS, confidence)
        right = self.right[b] + _PRIOR_TOKENS * _prior(confidence)
        return right / (self.tried[b] + _PRIOR_TOKENS)

    def acceptances(self, confidences: NDArray[np.float64]) -> NDArray[np.float64]:
        """The same for many, in their shape."""
        bins = _bins(confidences)
        right = np.array(self.right)[bins] + _PRIOR_TOKENS * _prior(confidences)
        found: NDArray[np.float64] = right / (np.array(self.tried)[bins] + _PRIOR_TOKENS)
        return found

    def mean(self) -> float:
        """Chance that the next token is accepted, before its confidence is known."""
        right = sum(self.right) + _PRIOR_TOKENS * 0.7
        return right / (sum(self.tried) + _PRIOR_TOKENS)


def _bins(confidences: NDArray[np.float64]) -> NDArray[np.int64]:
    return np.searchsorted(CONFIDENCE_BINS, confidences, side="right").astype(np.int64)


def best_prefix(
    survival: Sequence[float], prices: Sequence[float], least: int = 0
) -> tuple[float, int]:
    """(value, tokens to verify) of the best prefix of a draft, of at least `least` tokens; of equal
    ones the longest. `survival[j - 1]`: the chance that the first j tokens are right, `prices[j]`:
    what verifying j tokens costs, in tokens."""
    gained = 0.0
    best = (-prices[0], 0) if least == 0 else (float("-inf"), 0)
    for j, (alive, price) in enumerate(zip(survival, prices[1:], strict=False), start=1):
        gained += alive
        value = gained - price
        if j >= least and value >= best[0]:
            best = (value, j)
    return best


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
        return best_prefix(survival, self._prices, self._least)

    def _survival(self, confidences: Sequence[float]) -> list[float]:
        alive, found = 1.0, []
        for confidence in confidences:
            alive *= self.calibration.acceptance(confidence)
            found.append(alive)
        return found

    def _ahead(self) -> list[float]:
        """[m - 1]: what m more tokens are expected to gain, if all before them are accepted."""
        mean = self.calibration.mean()
        return list(accumulate(mean**m for m in range(1, self.most + 1)))

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
        gained = sum(survival)
        return any(
            gained + alive * ahead - m * self._draft_price - self._prices[k + m] > value
            for m, ahead in enumerate(self._ahead()[: self.most - k], start=1)
        )

    def keep(self, confidences: Sequence[float]) -> int:
        """How many of the drafted tokens to verify, 0..len(confidences)."""
        return self._best_prefix(self._survival(confidences))[1]

    def lengths(
        self, confidences: NDArray[np.float64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(drafted, verified), i64 [rounds], of rounds whose tokens would have these confidences,
        f64 [rounds, tokens]: at most as many tokens as there are."""
        confidences = confidences[:, : self.most]
        n, m = confidences.shape
        alive = np.ones((n, m + 1))
        np.cumprod(self.calibration.acceptances(confidences), axis=1, out=alive[:, 1:])
        gained = np.zeros((n, m + 1))
        np.cumsum(alive[:, 1:], axis=1, out=gained[:, 1:])
        prices, ahead = np.array(self._prices), np.array(self._ahead())
        values = gained - prices[: m + 1]
        values[:, : self._least] = -np.inf
        best = np.maximum.accumulate(values, axis=1)
        drafted = np.full(n, m, dtype=np.int64)
        for k in reversed(range(self._least, m)):
            more = np.arange(1, self.most - k + 1)
            worth = (
                gained[:, k, None]
                + alive[:, k, None] * ahead[: len(more)]
                - more * self._draft_price
                - prices[k + 1 :]
            )
            drafted[~(worth > best[:, k, None]).any(axis=1)] = k
        values[np.arange(m + 1) > drafted[:, None]] = -np.inf
        verified = m - np.argmax(values[:, ::-1], axis=1)  # of equal ones the longest
        return drafted, np.where(m < self._least, 0, verified).astype(np.int64)


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

    def lengths(
        self, confidences: NDArray[np.float64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """As ValueRule.lengths; all that is drafted is verified."""
        confidences = confidences[:, : self.most]
        n, m = confidences.shape
        doubtful = np.ones((n, m + 1), dtype=bool)
        doubtful[:, :m] = confidences < self.min_probability
        drafted = np.minimum(m, np.argmax(doubtful, axis=1) + 1).astype(np.int64)
        return drafted, drafted
