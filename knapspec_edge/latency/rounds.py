"""Times draft-verify rounds as the decoding loop runs them, with plain steps in between."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from ..backend import Backend
from ..decode.rollback import rewind
from ..records import GREEDY, Plan
from .timing import Clock

_ROUND_PLAIN_STEPS = 4  # plain steps between timed rounds; the first one is not kept


@dataclass(frozen=True)
class RoundTiming:
    """A round as the loop runs it, and plain steps at the same place, interleaved.

    Raises ValueError for what no clock shows.
    """

    draft_tokens: int
    draft_step_ms: float  # one drafted token, switching graphs and cutting the cache included
    verify_ms: float  # the pass over draft_tokens + 1
    plain_step_ms: float

    def __post_init__(self) -> None:
        times = (self.draft_step_ms, self.verify_ms, self.plain_step_ms)
        if self.draft_tokens < 1 or not all(0.0 < ms < math.inf for ms in times):
            raise ValueError("a round takes at least one drafted token, and time")


def measure_round(
    backend: Backend,
    window: Sequence[int],
    plan: Plan,
    draft_tokens: int,
    repeats: int,
    *,
    clock: Clock = time.perf_counter,
) -> RoundTiming:
    """Time real rounds of `draft_tokens` drafted tokens behind what is in the cache.

    What a token costs does not depend on which it is, so the window's tokens are fed. The window
    has to hold draft_tokens + 1 tokens. The cache is left where it was.
    """
    start = backend.n_past
    inputs = list(window[: draft_tokens + 1])
    draft_ms, verify_ms, plain_ms = [], [], []

    def rounds(times: int, keep: bool) -> None:
        for _ in range(times):
            t0 = clock()
            for token in inputs[:draft_tokens]:
                backend.decode(token, GREEDY, plan)
            rewind(backend, start)
            t1 = clock()
            backend.verify(inputs, GREEDY)
            rewind(backend, start)
            t2 = clock()
            if keep:
                draft_ms.append(1000.0 * (t1 - t0) / draft_tokens)
                verify_ms.append(1000.0 * (t2 - t1))

    def plain(keep: bool) -> None:
        # what a token costs does not depend on which it is
        for i in range(min(_ROUND_PLAIN_STEPS, backend.n_ctx - start)):
            t0 = clock()
            backend.decode(window[i % len(window)], GREEDY)
            # the first step after a round may change the graph; plain decoding never does
            if keep and i > 0:
                plain_ms.append(1000.0 * (clock() - t0))
        rewind(backend, start)

    try:
        for repeat in range(repeats + 1):
            # Two in a row: the second follows a verification, as nearly every round does.
            rounds(1, keep=False)
            rounds(1, keep=repeat > 0)
            plain(keep=repeat > 0)
    finally:
        rewind(backend, min(start, backend.n_past))
    return RoundTiming(
        draft_tokens,
        statistics.median(draft_ms),
        statistics.median(verify_ms),
        statistics.median(plain_ms),
    )
