"""Which windows of attention are worth looking at: how wide, where, and behind how many tokens."""

from __future__ import annotations

from ..backend import Backend
from ..config import Config
from ..records import Mode, ModeKind


def windows_at(
    backend: Backend, context_tokens: int, config: Config
) -> list[tuple[Mode, tuple[int, ...]]]:
    """Each window that leaves most of such a context out, and the sublayers that can have it.

    An attention that slides reads little enough as it is.
    """
    able = tuple(
        i
        for i, traits in enumerate(backend.traits)
        if traits.can_window and traits.n_cells >= backend.n_ctx
    )
    modes = [
        Mode(ModeKind.WINDOW, config.window_sink_tokens, n_tokens)
        for n_tokens in config.window_tokens
    ]
    return [
        (mode, able)
        for mode in modes
        if able
        and context_tokens >= config.window_least_context * (mode.sink_tokens + mode.window_tokens)
    ]
