"""The stop threshold that adapts itself, of Draft & Verify (arXiv 2309.08168).

A draft ends below the threshold. After each round, m is the mean of the shares of drafted tokens
that were accepted, the older ones fading; below the target share the threshold t is raised by a
small step, else it is lowered, unless the draft had its full length; the changed value enters with
a small weight:

    m <- memory * m + (1 - memory) * accepted / drafted
    t <- (1 - weight) * t + weight * (t + step, t - step or t)
"""

from __future__ import annotations

from ..config import Config
from ..records import RoundTimes


class ThresholdController:
    """One per session: what it learned holds for later answers, too."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self.threshold = config.controller_start
        self.matched: float | None = None  # m; None before the first draft

    def observe(self, times: RoundTimes, max_tokens: int) -> float:
        """The threshold after a round, whose draft could have `max_tokens` tokens."""
        config = self._config
        if not times.drafted:
            return self.threshold
        share = times.accepted / times.drafted
        if self.matched is None:
            self.matched = share
        self.matched += (1.0 - config.controller_memory) * (share - self.matched)
        changed = self.threshold
        if self.matched < config.controller_target:
            changed += config.controller_step
        elif times.drafted < max_tokens:
            changed -= config.controller_step
        weight = config.controller_weight
        moved = (1.0 - weight) * self.threshold + weight * changed
        self.threshold = min(1.0, max(0.0, moved))
        return self.threshold
