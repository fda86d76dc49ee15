"""Prompt lookup: the end of the text is looked for earlier in the text, and what followed it there
is proposed.

As in "Prompt Lookup Decoding" (Saxena, 2023), in prompt and answer, the longest n-gram first. There
the earliest place counts, here the latest; and a match of a single token is none.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..decode.policy import Guess, Policy
from ..records import Draft, RoundTimes, Sampling
from .masked import check_cut
from .setting import Setting


def create(setting: Setting) -> Policy:
    """Raises PlanError for a model whose cache cannot be cut back to what was accepted."""
    check_cut("lookup", setting)
    config = setting.config
    return PromptLookup(config.lookup_min_ngram, config.lookup_max_ngram, config.lookup_max_draft)


class NgramIndex:
    """Where each n-gram of a growing text was last followed by something."""

    def __init__(self, shortest: int, longest: int) -> None:
        if not 1 <= shortest <= longest:
            raise ValueError("n-grams have one token or more, and a shortest and a longest length")
        self._lengths = range(longest, shortest - 1, -1)
        self.text: list[int] = []
        self._behind: dict[tuple[int, ...], int] = {}  # n-gram -> place of what followed it last

    def extend(self, tokens: Sequence[int]) -> None:
        text = self.text
        for token in tokens:
            end = len(text)
            for n in self._lengths:
                if n <= end:
                    self._behind[tuple(text[end - n :])] = end
            text.append(token)

    def continuation(self, most: int) -> list[int]:
        """What followed the longest n-gram that ends the text, at its latest earlier place; up to
        `most` tokens, none without a match."""
        text = self.text
        for n in self._lengths:
            place = self._behind.get(tuple(text[-n:])) if n <= len(text) else None
            if place is not None:
                return text[place : place + most]
        return []


class Proposing:
    """What policies have in common whose drafts are proposals: no plan, and all is verified.

    Implements decode.policy.Policy and, in what derives from it, Proposer.
    """

    stopped: str | None = None

    def begin(self, sampling: Sampling, prompt: Sequence[int]) -> None:
        pass

    def spare(self, emitted: Sequence[int], position: int) -> None:
        pass

    def draft(self, context_tokens: int) -> Draft | None:
        return None

    def go_on(self, confidences: Sequence[float]) -> bool:
        return False

    def keep(self, confidences: Sequence[float]) -> int:
        return len(confidences)

    def observe(self, times: RoundTimes) -> None:
        pass


class PromptLookup(Proposing):
    """One per session."""

    def __init__(self, shortest: int, longest: int, max_tokens: int) -> None:
        self._lengths = (shortest, longest)
        self._max_tokens = max_tokens
        self._index = NgramIndex(shortest, longest)
        self._n_prompt = 0

    def begin(self, sampling: Sampling, prompt: Sequence[int]) -> None:
        self._index = NgramIndex(*self._lengths)
        self._index.extend(prompt)
        self._n_prompt = len(prompt)

    def propose(self, emitted: Sequence[int], most: int) -> list[Guess]:
        self._index.extend(emitted[len(self._index.text) - self._n_prompt :])
        # a lookup has no doubts
        return [Guess(t, 1.0) for t in self._index.continuation(min(most, self._max_tokens))]
