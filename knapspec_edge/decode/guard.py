"""Gives speculation up in the middle of an answer when it turns out to be a loss (auto only).

A prediction from a short window can be wrong for this text or this context length. Plain steps cost
nothing extra (they emit a token each), so a few of them give the speed that speculation has to beat
here and now, and the running loss against it decides.
"""

from __future__ import annotations

import statistics
from collections import deque

from ..config import DEFAULTS, Config


class SpeedGuard:
    """One per session; the loop asks `may_speculate` before and calls `observe` after each round.

    An answer loses about `guard_loss_steps` plain steps at most. If it did, the next answer of the
    session may lose half of that, and so on, so that a conversation in which speculation never pays
    does not pay the full trial again and again; an answer that went well restores the allowance.
    """

    def __init__(self, config: Config = DEFAULTS) -> None:
        self._config = config
        self._plain_ms: deque[float] = deque(maxlen=config.guard_kept_steps)
        self._round_ms: deque[float] = deque(maxlen=config.guard_kept_steps)
        self._allowance_steps = config.guard_loss_steps
        self._spec_rounds = 0
        # Why speculation was given up in this answer: one line, or None.
        self.stopped: str | None = None
        self.begin()

    def begin(self) -> None:
        """A new answer begins."""
        if self.stopped is not None:
            self._allowance_steps /= 2
        elif self._spec_rounds > 0:
            self._allowance_steps = self._config.guard_loss_steps
        self.stopped = None
        self._loss_steps = 0.0
        self._spec_ms = 0.0
        self._spec_tokens = 0
        self._spec_rounds = 0
        self._plain_due = self._config.guard_plain_rounds
        # The first plain step and the first round of an answer may build graphs.
        self._skip_plain = self._skip_spec = True

    @property
    def measured_ratio(self) -> float | None:
        """Speed of this answer's speculation against its plain steps; None where nothing was."""
        if not self._plain_ms or not self._spec_rounds:
            return None
        return statistics.median(self._plain_ms) * self._spec_tokens / self._spec_ms

    def may_speculate(self) -> bool:
        """Whether the next round may draft."""
        return self.stopped is None and self._plain_due <= 0

    def observe(self, elapsed_ms: float, tokens: int, *, speculated: bool) -> None:
        """Account for one round that took `elapsed_ms` and verified `tokens` tokens."""
        config = self._config
        if not speculated:
            # A step that a limit made plain is as good a sample as one that was asked for.
            if self._skip_plain:
                self._skip_plain = False
            else:
                self._plain_ms.append(elapsed_ms)
                self._plain_due -= 1
            return
        if self._skip_spec:
            self._skip_spec = False
            self._round_ms.append(elapsed_ms)
            return
        step_ms = statistics.median(self._plain_ms)
        if step_ms <= 0.0:
            return
        self._spec_ms += elapsed_ms
        self._spec_tokens += tokens
        self._spec_rounds += 1
        # A stall of the machine is no property of the plan.
        self._round_ms.append(elapsed_ms)
        usual_ms = min(elapsed_ms, config.guard_stall * statistics.median(self._round_ms))
        loss = usual_ms / step_ms - tokens * (1.0 + config.guard_slack)
        # Gains are banked only up to what a whole answer may lose, else a change of the text would
        # be noticed too late.
        self._loss_steps = max(-config.guard_loss_steps, self._loss_steps + loss)
        if self._loss_steps > self._allowance_steps:
            self.stopped = (
                f"speculation stopped after {self._spec_rounds} rounds: it ran at "
                f"{step_ms * self._spec_tokens / self._spec_ms:.2f}x of plain decoding here"
            )
        elif self._spec_rounds % config.guard_interval_rounds == 0:
            # The context has grown: measure what plain decoding costs by now.
            self._plain_ms.clear()
            self._plain_due = config.guard_plain_rounds
            self._skip_plain = True
