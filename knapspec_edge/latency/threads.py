"""Finds the numbers of threads that decode fastest: for one token, and for several at once.

They are tried on the context itself, in turn, because they can be changed per call.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..backend import Backend
from ..config import DEFAULTS, THREADS_MAX, Config
from ..decode.rollback import rewind
from ..records import Sampling
from .timing import Timing

Clock = Callable[[], float]
GREEDY = Sampling()

_PASS_TOKENS = 5
_CONTEXT_TOKENS = 128
_ROUNDS = 4


@dataclass(frozen=True)
class ThreadTimes:
    """Best times of one number of threads."""

    threads: int
    step_ms: float  # one token
    pass_ms: float  # several tokens in one pass


def thread_candidates(default: int, usable: int) -> list[int]:
    """Numbers worth trying, the default first: fewer where memory is the limit or other programs
    need a core, all logical CPUs where cores have two threads."""
    numbers = (default, default - 1, default // 2, min(usable, THREADS_MAX))
    return list(dict.fromkeys(n for n in numbers if n >= 1))


def measure_threads(
    backend: Backend,
    candidates: Sequence[int],
    *,
    budget_seconds: float,
    clock: Clock = time.perf_counter,
) -> list[ThreadTimes]:
    """Time a step and a pass with each number of threads, in turn, behind an empty cache.

    Medians over a few rounds, fewer where the budget ends before; then also candidates are left
    out, the first one never. The cache is empty afterwards; the threads are those tried last.
    """
    started = clock()
    context = min(_CONTEXT_TOKENS, max(1, backend.n_ctx // 2))
    width = max(1, min(_PASS_TOKENS, backend.max_verify_tokens, backend.n_ctx - context))
    tokens = [i % backend.n_vocab for i in range(1, width + 1)]
    steps: dict[int, list[float]] = {n: [] for n in candidates}
    passes: dict[int, list[float]] = {n: [] for n in candidates}

    def timed(call: Callable[[], object]) -> float:
        begun = clock()
        call()
        rewind(backend, context)
        return 1000.0 * (clock() - begun)

    try:
        backend.fill(context)
        for _ in range(_ROUNDS):
            for n in candidates:
                late = clock() - started > budget_seconds
                if late and steps[candidates[0]]:
                    break
                backend.set_threads(n)
                # the first of each pays for waking the threads and for the graph
                for kept in (False, True):
                    step = timed(lambda: backend.decode(tokens[0], GREEDY))
                    wide = timed(lambda: backend.verify(tokens, GREEDY))
                    if kept:
                        steps[n].append(step)
                        passes[n].append(wide)
            if clock() - started > budget_seconds:
                break
    finally:
        rewind(backend, 0)
    return [
        ThreadTimes(n, Timing.of(steps[n]).median_ms, Timing.of(passes[n]).median_ms)
        for n in candidates
        if steps[n]
    ]


def best_threads(times: Sequence[ThreadTimes], config: Config = DEFAULTS) -> tuple[int, int]:
    """(threads for one token, threads for several): the first candidate unless another is faster
    by more than `settings_margin`."""
    first = times[0]
    alone = min(times, key=lambda t: t.step_ms)
    several = min(times, key=lambda t: t.pass_ms)
    margin = 1.0 + config.settings_margin
    return (
        alone.threads if first.step_ms > margin * alone.step_ms else first.threads,
        several.threads if first.pass_ms > margin * several.pass_ms else first.threads,
    )
