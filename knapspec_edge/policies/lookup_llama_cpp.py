"""llama-cpp-python's own prompt lookup, LlamaPromptLookupDecoding, as drafter.

Its rule with its defaults: the last two tokens (else the last one), at their earliest place in
prompt and answer, and up to ten tokens that followed them there. Only the rule is upstream's;
drafting and verifying are this runtime's, as for all policies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import native
from ..config import Config
from ..decode.policy import Guess, Policy
from ..records import Sampling
from .lookup import Proposing
from .masked import check_cut
from .setting import Setting

# of the buffer that the text grows in
_SPARE_TOKENS = 1024


def create(setting: Setting) -> Policy:
    """Raises PlanError for a model whose cache cannot be cut back, LibraryError."""
    check_cut("lookup-llama-cpp", setting)
    return LlamaCppLookup(drafter(setting.config))


def drafter(config: Config) -> Callable[..., Any]:
    """Upstream's, from an i32 array of the text to an array of tokens. Raises LibraryError."""
    return native.prompt_lookup(config.llama_cpp_lookup_ngram, config.llama_cpp_lookup_draft)


class LlamaCppLookup(Proposing):
    """One per session. `find`: from the text, i32 [tokens], to the tokens proposed."""

    def __init__(self, find: Callable[[NDArray[np.intc]], NDArray[np.intc]]) -> None:
        self._find = find
        self._text = np.empty(0, dtype=np.intc)
        self._n_text = self._n_prompt = 0

    def begin(self, sampling: Sampling, prompt: Sequence[int]) -> None:
        self._n_text = 0
        self._n_prompt = len(prompt)
        self._append(prompt)

    def _append(self, tokens: Sequence[int]) -> None:
        end = self._n_text + len(tokens)
        if end > len(self._text):
            grown = np.empty(2 * end + _SPARE_TOKENS, dtype=np.intc)
            grown[: self._n_text] = self._text[: self._n_text]
            self._text = grown
        self._text[self._n_text : end] = tokens
        self._n_text = end

    def propose(self, emitted: Sequence[int], most: int) -> list[Guess]:
        self._append(emitted[self._n_text - self._n_prompt :])
        found = self._find(self._text[: self._n_text])
        return [Guess(int(token), 1.0) for token in found[:most]]
