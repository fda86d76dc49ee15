"""Compares plain steps of several contexts in turn, so that the machine's drift hits all alike."""

from __future__ import annotations

import time
from collections.abc import Sequence

from ..backend import Backend
from ..decode.rollback import rewind
from ..records import GREEDY
from .timing import Clock, Timing

_ROUNDS = 7
_FEWEST_ROUNDS = 2
_PASSES = 3  # of which the first is not counted


def paired_steps(
    backends: Sequence[Backend],
    contexts: Sequence[int],
    *,
    budget_seconds: float,
    clock: Clock = time.perf_counter,
) -> dict[int, list[float]]:
    """Time of a plain step of each backend relative to the first one, by context: medians over
    rounds in which all take their turn.

    Contexts that the budget has no time for are left out, the first one never is. The caches are
    empty before and after.
    """
    started = clock()
    found: dict[int, list[float]] = {}
    try:
        for n, context in enumerate(contexts):
            ratios: list[list[float]] = [[] for _ in backends]
            deadline = started + budget_seconds * (n + 1) / len(contexts)
            for backend in backends:
                rewind(backend, 0)
                backend.fill(context)
            for number in range(_ROUNDS):
                # every other round backwards, so that nobody always goes first
                order = list(range(len(backends)))[:: 1 if number % 2 else -1]
                times = {i: _step_ms(backends[i], context, clock) for i in order}
                for i, ms in times.items():
                    ratios[i].append(ms / times[0])
                if clock() > deadline and number + 1 >= _FEWEST_ROUNDS:
                    break
            found[context] = [Timing.of(r).median_ms for r in ratios]
            if clock() > started + budget_seconds:
                break
    finally:
        for backend in backends:
            rewind(backend, 0)
    return found


def _step_ms(backend: Backend, context: int, clock: Clock) -> float:
    times = []
    for _ in range(_PASSES):
        begun = clock()
        backend.decode(0, GREEDY)
        times.append(1000.0 * (clock() - begun))
    rewind(backend, context)
    return min(times[1:])
