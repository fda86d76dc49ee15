"""Cutting the KV cache back. The only place that does it, and it checks the effect every time."""

from __future__ import annotations

from ..backend import Backend
from ..errors import RollbackError


def rewind(backend: Backend, n_tokens: int) -> None:
    """Leave exactly the first `n_tokens` tokens in the cache.

    Raises RollbackError if fewer are there or if the cut had no effect: going on would let later
    tokens attend to keys that do not belong to the text.
    """
    if backend.n_past > n_tokens:
        backend.truncate(n_tokens)
    if backend.n_past != n_tokens:
        raise RollbackError(
            f"the KV cache holds {backend.n_past} tokens where {n_tokens} were to remain; "
            "run with --spec off"
        )
