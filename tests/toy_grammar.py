"""Grammars of the fake backend: a tiny language about token ids instead of GBNF.

Statements in any order, separated by semicolons:

    allow 3 5 7     the tokens of an answer; nothing else
    once 5          these may come one time at most
    end after 6     an end token comes behind 6 tokens, or earlier where nothing else is left

Without `end after` an answer never ends, and where `once` has used everything up nothing is allowed
at all. What comes behind an end token is no part of the answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from knapspec_edge.errors import UsageError
from knapspec_edge.records import Grammar


@dataclass(frozen=True)
class ToyGrammar:
    allow: frozenset[int]
    once: frozenset[int] = frozenset()
    end_after: int | None = None

    @classmethod
    def parse(cls, text: str, n_vocab: int) -> ToyGrammar:
        """Raises UsageError, one line."""
        found: dict[str, list[int]] = {}
        for statement in text.split(";"):
            words = statement.split()
            name = " ".join(word for word in words if not word.isdecimal())
            numbers = [int(word) for word in words if word.isdecimal()]
            known = name in ("allow", "once", "end after")
            if not known or name in found or not numbers:
                raise UsageError(f"the grammar cannot be read at {statement.strip()!r}")
            found[name] = numbers
        allow, once = found.get("allow", []), found.get("once", [])
        end = found.get("end after", [])
        if not allow or len(end) > 1 or max([*allow, *once]) >= n_vocab:
            raise UsageError(f"the grammar {text!r} does not fit this model")
        return cls(frozenset(allow), frozenset(once), end[0] if end else None)

    def allowed(
        self, answer: Sequence[int], ends: frozenset[int], n_vocab: int
    ) -> NDArray[np.bool_]:
        """bool [n_vocab]: what may come behind the tokens of an answer."""
        mask = np.zeros(n_vocab, dtype=np.bool_)
        if ends & set(answer):
            return ~mask
        if self.end_after is None or len(answer) < self.end_after:
            mask[[t for t in self.allow if t not in self.once or t not in answer]] = True
        if self.end_after is not None and not mask.any():
            mask[sorted(ends)] = True
        return mask

    def accepts(self, answer: Sequence[int], ends: frozenset[int]) -> bool:
        """Whether an answer, finished or not, keeps to it. Written apart from `allowed`."""
        spoken = list(answer)
        ended = bool(spoken) and spoken[-1] in ends
        if ended:
            spoken.pop()
        full = self.end_after is not None and len(spoken) >= self.end_after
        used_up = all(t in self.once and t in spoken for t in self.allow)
        return (
            all(t in self.allow for t in spoken)
            and all(spoken.count(t) <= 1 for t in self.once)
            and (self.end_after is None or len(spoken) <= self.end_after)
            and (not ended or (self.end_after is not None and (full or used_up)))
        )


def of(grammar: Grammar, n_vocab: int) -> ToyGrammar:
    return ToyGrammar.parse(grammar.text, n_vocab)
