"""The seam between the decoding loop and whatever computes: token ids, positions and arrays only.

`knapspec_edge.native` implements it on the patched llama.cpp; the tests implement it with a fake
that keeps a ledger of which (position, sublayer) holds keys. Nothing here knows about text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from .records import GREEDY, Pick, Plan, Sampling, SubLayer, Traits


class Branches(Protocol):
    """Candidate networks over one window of tokens, run sublayer by sublayer on given states.

    Every branch sees the same text before the window and, causally, its own window; branches see
    nothing of each other. States are f32 [branches, tokens, hidden]: what the residual stream holds
    between two sublayers. Nothing else lives on between two calls.
    """

    def embed(self, last: int) -> NDArray[np.float32]:
        """The target's states f32 [tokens, hidden] after its sublayers 0..last."""
        ...

    def apply(self, sublayer: int, states: NDArray[np.float32]) -> NDArray[np.float32]:
        """The states after one sublayer, of all branches in one call.

        Raises PlanError for a sublayer of the first layer, which has no such state before it.
        """
        ...

    def head(self, states: NDArray[np.float32]) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Final norm and head: (greedy tokens i32, probabilities f32), both [branches, tokens]."""
        ...


class Beside(NamedTuple):
    """Picks of one block beside the text, one per token."""

    tokens: NDArray[np.int32]  # i32 [n]; -1: none could be picked
    probabilities: NDArray[np.float32]  # f32 [n]
    # f32 [n]: logit of the expected token (else of the pick) minus that of the best other one
    margins: NDArray[np.float32]


class Backend(Protocol):
    """One sequence in one context. Positions 0..n_past-1 are in the KV cache."""

    @property
    def n_ctx(self) -> int:
        """Context size in tokens; positions 0..n_ctx-1 exist."""
        ...

    @property
    def n_vocab(self) -> int: ...

    @property
    def n_past(self) -> int:
        """Tokens in the KV cache."""
        ...

    @property
    def max_verify_tokens(self) -> int:
        """Largest number of tokens `verify` takes in one pass."""
        ...

    @property
    def sublayers(self) -> tuple[SubLayer, ...]:
        """Residual additions in execution order; empty where the model cannot be pruned."""
        ...

    @property
    def traits(self) -> tuple[Traits, ...]:
        """What each sublayer works on, in the order of `sublayers`."""
        ...

    @property
    def head_sizes(self) -> tuple[int, ...]:
        """Rows of the short heads that plans may have (Plan.head_rows), ascending; empty where the
        head cannot be shortened."""
        ...

    def suggest_head(self, tokens: Sequence[int]) -> None:
        """Tokens, the most frequent first, that short heads are to have; before one is used."""
        ...

    def prepare_head(self, n_rows: int) -> None:
        """Have the list of tokens for short heads of up to so many rows: what the text brings from
        now on comes into it. Raises PlanError where there can be none."""
        ...

    def lacked(
        self, tokens: Sequence[int], position: int, plan: Plan | None = None
    ) -> NDArray[np.bool_]:
        """bool [tokens]: which of the text's tokens from `position` on a short head had not got
        when the text came to them; none with a full head. Those that it lacked have moved in since,
        so that it picks them now."""
        ...

    @property
    def refusal(self) -> str | None:
        """Why drafting with a part of this model is impossible, or None."""
        ...

    @property
    def cut_refusal(self) -> str | None:
        """Why its cache cannot be cut back to accepted tokens, so that nothing at all can be
        proposed to it, or None. Where this is a reason, `refusal` is one."""
        ...

    def is_end(self, token: int) -> bool:
        """Whether this token ends a generation."""
        ...

    def check_sampling(self, sampling: Sampling) -> None:
        """Raise UsageError, one line, for what this model cannot be asked for: a grammar that
        cannot be read, a bias on a token that does not exist."""
        ...

    def prefill(
        self,
        tokens: Sequence[int],
        sampling: Sampling,
        progress: Callable[[int, int], None] | None = None,
    ) -> Pick:
        """Append tokens with the full model and pick the token after the last one. An answer
        begins behind them: from there on a grammar holds, for all picks that come later.

        `progress(done_tokens, total_tokens)` is called between slices.
        Raises ContextError if they do not fit, Interrupted after `interrupt()`.
        """
        ...

    def decode(self, token: int, sampling: Sampling, plan: Plan | None = None) -> Pick:
        """Append one token under a plan (None: the full model) and pick the next.

        Raises NoTokenError where there is none to pick, CompleteError where none is needed; the
        token is not appended then."""
        ...

    def verify(self, tokens: Sequence[int], sampling: Sampling) -> list[Pick]:
        """Append tokens with the full model in one pass; one pick per token.

        The first is always a token: NoTokenError where there is none to pick (no finite logit, or
        nothing that the grammar allows). Later ones stand behind tokens that may not come to be
        part of the text; there it is the pick -1.
        """
        ...

    def truncate(self, n_tokens: int) -> None:
        """Cut the cache back to its first n_tokens. Raises RollbackError if that had no effect."""
        ...

    def evaluate(
        self, tokens: Sequence[int], plan: Plan | None = None
    ) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Append tokens under a plan in one pass: greedy token and its probability per row.

        Returns (tokens i32 [n], probabilities f32 [n]). For judging plans; truncate afterwards.
        """
        ...

    def final_states(
        self, tokens: Sequence[int], plan: Plan | None = None
    ) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
        """Append tokens under a plan: what the head multiplies, and what is picked from it.

        Returns (states f32 [n, n_embd], after the final norm with its gain; greedy tokens i32 [n]).
        For certificates; truncate afterwards. Raises PlanError for a model that has a refusal.
        """
        ...

    @property
    def max_beside_tokens(self) -> int:
        """Most tokens that `evaluate_beside` takes in one pass; 0 where it is impossible."""
        ...

    def evaluate_beside(
        self,
        blocks: Sequence[tuple[int, Sequence[int]]],
        plan: Plan | None = None,
        sampling: Sampling = GREEDY,
        expected: Sequence[Sequence[int]] | None = None,
    ) -> list[Beside]:
        """What would be picked if the cache ended earlier, without touching it; one pass.

        A block (start, tokens) holds tokens at positions start.., behind the first `start` tokens
        of the cache under the plan; blocks see nothing of each other. `expected` names a token per
        place (greedy only), whose margin is returned in place of the pick's. Raises ContextError
        where no cells are left for it or a sliding window no longer holds what lies before a block,
        Interrupted.
        """
        ...

    def hidden_states(self, tokens: Sequence[int], plan: Plan | None = None) -> NDArray[np.float32]:
        """Append tokens under a plan; the residual stream f32 [sublayers, tokens, hidden] after
        each sublayer. A skipped one leaves it as it was.

        Raises PlanError where the sublayers are not recognised.
        """
        ...

    @property
    def branch_refusal(self) -> str | None:
        """Why `branches` is impossible with this model, or None."""
        ...

    def branches(
        self, start: int, tokens: Sequence[int], n_branches: int
    ) -> AbstractContextManager[Branches]:
        """Branches with a window of `tokens` behind the first `start` tokens of the cache.

        `n_branches` is how many there will usually be; more are computed in turns. In the context
        nothing else can be computed; after it, the cache is as it was, bit for bit. Raises
        PlanError with `branch_refusal`, ContextError where there are no cells for even one branch
        or a sliding window no longer holds what lies before the window, Interrupted.
        """
        ...

    def append(self, tokens: Sequence[int], plan: Plan | None = None) -> None:
        """Append tokens under a plan in one pass without computing logits. For timing."""
        ...

    def fill(self, n_tokens: int) -> None:
        """Grow the cache to n_tokens without computing anything: what the new cells hold is
        undefined.

        For timing passes at a long context; the cache has to be emptied before anything else is
        computed. Raises ContextError if there is no room.
        """
        ...

    def set_threads(self, threads: int, threads_batch: int | None = None) -> None:
        """CPU threads of passes over one token, and over several (None: as many)."""
        ...

    def logits(self, row: int = -1) -> NDArray[np.float32]:
        """Logits f32 [n_vocab] of one output row of the latest pass (a copy)."""
        ...
