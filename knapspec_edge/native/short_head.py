"""The list of tokens whose rows of the head a draft may multiply alone, and what stands in it.

The list is ordered: a short head of n rows is its first n. In front come the tokens that end an
answer, then those that were suggested (frequent ones), then the vocabulary's in the order of their
ids: tokenizers number common pieces first. The last part of the smallest head is kept for tokens of
the text that are not in front of it; they change places with whatever stood there.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..config import DEFAULTS, Config
from ..errors import PlanError
from . import bindings
from .model import Model


def head_sizes(n_vocab: int, config: Config = DEFAULTS) -> tuple[int, ...]:
    """Rows of the short heads of a vocabulary, ascending: shares of it, in whole tiles of the
    product kernels. Empty where even the smallest would be hardly shorter."""
    step = config.head_rows_step
    sizes = {-(-int(n_vocab * share) // step) * step for share in config.head_shares}
    return tuple(sorted(n for n in sizes if 2 * step <= n <= 0.75 * n_vocab))


class ShortHead:
    """The list of one context. Rows are copied when it is made and when text brings new tokens."""

    def __init__(
        self,
        lib: ctypes.CDLL,
        context: Any,
        model: Model,
        sizes: Sequence[int],
        suggested: Sequence[int] = (),
        text_share: float = DEFAULTS.head_text_share,
    ) -> None:
        """Raises PlanError where llama.cpp refuses."""
        self._lib = lib
        self._context = context
        self.sizes = tuple(sizes)
        smallest, most = self.sizes[0], self.sizes[-1]
        lib.knapspec_clear_error()
        if lib.knapspec_head_reserve(context, most, os.fsencode(Path(model.path))):
            raise PlanError(bindings.last_error(lib) or "llama.cpp refused the short head")
        ordered = _order(model, suggested, most)
        self._tokens: NDArray[np.int32] = np.array(ordered, dtype=np.int32)  # by place
        self._places = np.full(model.n_vocab, -1, dtype=np.int32)  # by token; -1: not in the list
        self._places[self._tokens] = np.arange(most, dtype=np.int32)
        self._first = smallest - max(1, int(smallest * text_share))  # place of the text's tokens
        self._next = self._first
        # by token of the text's part: since which position of the text, and where it was before
        self._since: dict[int, tuple[int, int]] = {}
        self._set(np.arange(most, dtype=np.int32), self._tokens)

    def tokens(self, n_rows: int) -> NDArray[np.int32]:
        """i32 [n_rows]: those of a head of so many rows, in its order."""
        found: NDArray[np.int32] = self._tokens[:n_rows].copy()
        return found

    def note(self, tokens: Sequence[int], position: int) -> None:
        """Tokens that the text has from `position` on; those beyond the smallest head move in."""
        smallest = self.sizes[0]
        places = self._places[tokens if len(tokens) == 1 else np.asarray(tokens, dtype=np.int64)]
        far = np.flatnonzero((places < 0) | (places >= smallest))
        if not len(far):
            return
        new: dict[int, int] = {}
        for i in far.tolist():
            new.setdefault(tokens[i], position + i)
        # of more than fit only the latest
        room = smallest - self._first
        changed: dict[int, int] = {}  # place -> token
        for token, since in list(new.items())[-room:]:
            place, former = self._next, int(self._places[token])
            self._next = place + 1 if place + 1 < smallest else self._first
            displaced = int(self._tokens[place])
            self._since.pop(displaced, None)
            self._since[token] = (since, former)
            self._places[displaced] = former
            if former >= 0:
                self._tokens[former] = displaced
                changed[former] = displaced
            self._tokens[place] = token
            self._places[token] = place
            changed[place] = token
        self._set(
            np.fromiter(changed.keys(), dtype=np.int32, count=len(changed)),
            np.fromiter(changed.values(), dtype=np.int32, count=len(changed)),
        )

    def forget_from(self, position: int) -> None:
        """The text is given anew from here on: what came later is no news of it."""
        for token, (since, former) in self._since.items():
            if since >= position:
                self._since[token] = (-1, former)

    def lacked(self, tokens: Sequence[int], position: int, n_rows: int) -> NDArray[np.bool_]:
        """bool [tokens]: whether a head of so many rows had not got the token that the text has
        there, when it came to it. What stands at `position` is the first of `tokens`."""
        found = np.zeros(len(tokens), dtype=np.bool_)
        for i, token in enumerate(tokens):
            since, former = self._since.get(token, (-1, -1))
            known = 0 <= self._places[token] < n_rows and since < position + i
            found[i] = not (known or 0 <= former < n_rows)
        return found

    def _set(self, places: NDArray[np.int32], tokens: NDArray[np.int32]) -> None:
        pointer = ctypes.POINTER(ctypes.c_int32)
        self._lib.knapspec_clear_error()
        code = self._lib.knapspec_head_set(
            self._context,
            np.ascontiguousarray(places).ctypes.data_as(pointer),
            np.ascontiguousarray(tokens).ctypes.data_as(pointer),
            len(places),
        )
        if code:
            raise PlanError(bindings.last_error(self._lib) or "llama.cpp refused the rows")


def _order(model: Model, suggested: Sequence[int], n: int) -> list[int]:
    """The n tokens of the list, each once: ends, suggested ones, then low ids; tokens that no text
    has (bytes, control tokens, unused ones) come last."""
    n_vocab = model.n_vocab
    chosen = dict.fromkeys(model.end_tokens)
    chosen.update(dict.fromkeys(t for t in suggested if 0 <= t < n_vocab))
    chosen.update(dict.fromkeys(model.text_tokens(n)))
    if len(chosen) < n:
        chosen.update(dict.fromkeys(range(n_vocab)))
    return list(chosen)[:n]
