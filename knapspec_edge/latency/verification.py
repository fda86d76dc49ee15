"""The verification curve alone: what passes over several tokens cost, nothing left out.

For lookups, which need no plan: a fraction of a second where a whole profile takes many, and
possible for models whose sublayers are not recognised. latency.profiler measures everything else.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..backend import Backend
from ..config import DEFAULTS, Config
from ..decode.rollback import rewind
from ..errors import ContextError
from . import kept
from .costs import Costs
from .profile import LatencyProfile, Sample
from .profiler import MIN_CONTEXT_TOKENS
from .store import INVALID, Store
from .timing import Clock, Timing

# Grows when a stored curve means something else than before.
_VERSION = 1
_CONTEXTS = (128, 1024, 4096)  # as far as they fit
_WARM, _REPEATS = 1, 4


def verification_costs(
    backend: Backend,
    model_key: kept.ModelKey,
    tokens: Sequence[int],
    config: Config = DEFAULTS,
    store: Store | None = None,
    *,
    prepare: Callable[[], None] = lambda: None,
    progress: Callable[[float], None] | None = None,
    clock: Clock = time.perf_counter,
) -> Costs:
    """A cost model that knows plain steps and verification, from what is kept on disk, or measured
    now and kept.

    `prepare` is called before a measurement, which needs an empty cache; `tokens` are fed. Raises
    as measure_verification.
    """
    store = store if store is not None else Store(enabled=False)
    profile = kept.load_latency(store, kept.latency_key(backend, model_key), backend)
    if profile is not None and profile.covers(1, _widest(backend, config)):
        return Costs(profile)
    key = {**kept.latency_key(backend, model_key), "verification": _VERSION}
    content = store.load(key)
    if content is not None:
        try:
            return Costs(_read(content))
        except INVALID:
            store.ignore(key)
    prepare()
    profile = measure_verification(backend, tokens, config, progress=progress, clock=clock)
    store.save(key, {"profile": profile.to_json()})
    return Costs(profile)


def _widest(backend: Backend, config: Config) -> int:
    return min(backend.max_verify_tokens, 1 + max(config.lookup_lengths))


def _read(content: Mapping[str, Any]) -> LatencyProfile:
    profile = LatencyProfile.from_json(content["profile"])
    if profile.n_sublayers:
        raise ValueError("a curve has no sublayers")
    return profile


def measure_verification(
    backend: Backend,
    tokens: Sequence[int],
    config: Config = DEFAULTS,
    *,
    progress: Callable[[float], None] | None = None,
    clock: Clock = time.perf_counter,
) -> LatencyProfile:
    """Time plain steps and passes over 1 + config.lookup_lengths tokens behind a few contexts.

    Cells are marked as filled, nothing is computed for them. The shortest context is timed in any
    case, others within config.lookup_measure_seconds. The cache has to be empty, and is afterwards.
    Raises ContextError where the context has no room, what passes raise, Interrupted.
    """
    widest = _widest(backend, config)
    widths = [1, *(n + 1 for n in config.lookup_lengths if n < widest)]
    if backend.n_ctx < MIN_CONTEXT_TOKENS or widest < 2:
        raise ContextError(
            f"measuring takes a context of {MIN_CONTEXT_TOKENS} tokens, this one has "
            f"{backend.n_ctx}; raise --ctx"
        )
    most = backend.n_ctx - widest
    contexts = sorted({min(context, most) for context in _CONTEXTS})
    window = [tokens[i % len(tokens)] for i in range(widest)]
    started = clock()
    samples: list[Sample] = []
    took = 0.0
    try:
        for i, context in enumerate(contexts):
            begun = clock()
            # longer contexts take longer, too
            if i and begun - started + 1.5 * took > config.lookup_measure_seconds:
                break
            rewind(backend, 0)
            backend.fill(context)
            times_ms: dict[int, list[float]] = {width: [] for width in widths}
            for repeat in range(_WARM + _REPEATS):
                for width in widths:
                    t0 = clock()
                    backend.evaluate(window[:width])
                    if repeat >= _WARM:  # a graph is built in its first pass
                        times_ms[width].append(1000.0 * (clock() - t0))
                    rewind(backend, context)
                if progress is not None:
                    progress((i + (repeat + 1) / (_WARM + _REPEATS)) / len(contexts))
            samples += [
                Sample(context, width, (), True, Timing.of(ms)) for width, ms in times_ms.items()
            ]
            took = clock() - begun
    finally:
        rewind(backend, 0)
    return LatencyProfile(
        0,
        (),
        max(s.context_tokens for s in samples),
        tuple(samples),
        dict(getattr(backend, "settings", {})),
        budget_seconds=config.lookup_measure_seconds,
        elapsed_seconds=clock() - started,
        measured_at=time.time(),
        asked_tokens=backend.n_ctx,
        asked_width=widest,
    )
