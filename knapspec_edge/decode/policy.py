"""Who decides, round by round, whether to draft, under which plan, and how far.

The loop asks and reports; what it asks may learn, measure beside the text, and change its mind. A
plan never changes within a round.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from ..records import Draft, RoundTimes, Sampling
from .guard import SpeedGuard


class Policy(Protocol):
    """One per session; `begin` is called before each answer."""

    @property
    def stopped(self) -> str | None:
        """Why speculation was given up in this answer, one line, or None."""
        ...

    def begin(self, sampling: Sampling, prompt: Sequence[int]) -> None:
        """A new answer begins, to this whole prompt, whose tokens are picked like this.

        Before the prompt is computed; the time counts as the prompt's.
        """
        ...

    def spare(self, emitted: Sequence[int], position: int) -> None:
        """Before each round: time to think, and to measure beside the text, or not.

        `emitted` are this answer's tokens so far; the last of them belongs at `position`, which is
        where the cache ends.
        """
        ...

    def draft(self, context_tokens: int) -> Draft | None:
        """How the next round drafts at most; None: a plain step."""
        ...

    def go_on(self, confidences: Sequence[float]) -> bool:
        """Whether to draft another token after those with these probabilities."""
        ...

    def keep(self, confidences: Sequence[float]) -> int:
        """How many of the drafted tokens to verify, from the first on."""
        ...

    def observe(self, times: RoundTimes) -> None:
        """A round has ended."""
        ...


class Guess(NamedTuple):
    """A token that may be next."""

    token: int
    probability: float  # how sure whoever guessed is, in 0..1


@runtime_checkable
class Proposer(Protocol):
    """A policy that may also know the next tokens without running a part of the target."""

    def propose(self, emitted: Sequence[int], most: int) -> Sequence[Guess]:
        """Up to `most` (>= 1) tokens after the prompt and the `emitted` ones, for this round.

        Asked before `draft`. None at all: `draft` decides as ever. The time counts as drafting.
        The target verifies them like any draft, so what is proposed cannot change the text; tokens
        have to be in the target's vocabulary.
        """
        ...


class FixedPolicy:
    """The same plan in every round: up to max_tokens, stopping after a token less probable than
    min_probability, which is still verified (the paper's rule)."""

    def __init__(self, draft: Draft | None, guard: SpeedGuard | None = None) -> None:
        self._draft = draft if draft is not None and draft.max_tokens > 0 else None
        self._guard = guard

    @property
    def stopped(self) -> str | None:
        return None if self._guard is None else self._guard.stopped

    def begin(self, sampling: Sampling, prompt: Sequence[int]) -> None:
        if self._guard is not None:
            self._guard.begin()

    def spare(self, emitted: Sequence[int], position: int) -> None:
        pass

    def draft(self, context_tokens: int) -> Draft | None:
        if self._guard is not None and not self._guard.may_speculate():
            return None
        return self._draft

    def go_on(self, confidences: Sequence[float]) -> bool:
        assert self._draft is not None
        return not confidences or confidences[-1] >= self._draft.min_probability

    def keep(self, confidences: Sequence[float]) -> int:
        return len(confidences)

    def observe(self, times: RoundTimes) -> None:
        if self._guard is not None and self._draft is not None:
            speculated = times.drafted > 0
            self._guard.observe(times.elapsed_ms, times.tokens, speculated=speculated)
