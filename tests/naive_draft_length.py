"""The value of drafting, token by token, written for obviousness."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from knapspec_edge.search.draft_length import Calibration


@dataclass
class ValueTwin:
    """What ValueRule computes."""

    calibration: Calibration
    draft_ms: float
    verify_ms: Sequence[float]
    rate: float
    least: int = 0

    def expected(self, confidences: Sequence[float], more: int = 0) -> float:
        """Drafted tokens that will be accepted, if so many more of mean acceptance follow."""
        chances = [self.calibration.acceptance(c) for c in confidences]
        chances += [self.calibration.mean()] * more
        return sum(math.prod(chances[: j + 1]) for j in range(len(chances)))

    def worth(self, confidences: Sequence[float], j: int) -> float:
        """Of verifying the first j, now that all are drafted."""
        return self.expected(confidences[:j]) - self.rate * self.verify_ms[j]

    def worth_of_more(self, confidences: Sequence[float], more: int) -> float:
        """Of drafting so many more and verifying all."""
        time_ms = more * self.draft_ms + self.verify_ms[len(confidences) + more]
        return self.expected(confidences, more) - self.rate * time_ms

    def best_now(self, confidences: Sequence[float]) -> float:
        return max(self.worth(confidences, j) for j in range(self.least, len(confidences) + 1))

    def gain(self, confidences: Sequence[float]) -> float:
        """Of going on, at best; going on pays where it is above 0."""
        most = len(self.verify_ms) - 1 - len(confidences)
        if most < 1:
            return -math.inf
        if len(confidences) < self.least:
            return math.inf
        return max(self.worth_of_more(confidences, m) for m in range(1, most + 1)) - self.best_now(
            confidences
        )
