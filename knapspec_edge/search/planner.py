"""Decides whether to speculate, with which plan and how far: measured, not hoped.

Candidates are judged jointly on the target's own tokens and the best ones are timed in real rounds
before one is declared on. "No speculation" is a candidate that wins ties.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from ..backend import Backend
from ..config import DEFAULTS, Config
from ..errors import Interrupted, KnapspecError
from ..latency import kept
from ..latency.costs import Costs
from ..latency.drift import NO_CORRECTION, Correction
from ..latency.fidelity import Fidelity, Text
from ..latency.profile import LatencyProfile
from ..latency.profiler import Progress
from ..latency.rounds import RoundTiming
from ..latency.store import INVALID, MAX_COUNT, Store
from ..latency.timing import Clock
from ..records import Draft, Plan, SubLayer, parse_mode
from .acceptance import Judgement
from .generators import KNAPSPEC
from .judged import Alternative, Finalist, Measured, best_length
from .measurement import by_frequency, measure_all
from .plan_book import PlanBook
from .throughput import Window

# Grows when a stored measurement means something else than before.
_MEASUREMENT = 4
_BOOK = 1


@dataclass(frozen=True)
class Decision:
    """What auto does, and what `--spec on` would do."""

    state: str  # "on" or "off"
    reason: str  # one line with the numbers
    draft: Draft | None = None  # the best draft found, also when off; None if there is none
    predicted_ratio: float | None = None  # of that draft
    baseline_per_second: float | None = None  # plain decoding as measured
    alternatives: tuple[Alternative, ...] = ()  # best first
    measured: Measured | None = None
    finalists: tuple[Finalist, ...] = ()  # what `alternatives` were computed from
    from_cache: bool = False  # nothing was measured now
    disturbed: bool = False  # the machine was too busy for the figures to be believed


def at_context(config: Config, context_tokens: int, budget_seconds: float | None = None) -> Config:
    """The configuration that decides for exactly this context instead of the usual one.

    Because it was asked for, a slow model's prompt is not shortened; the budget grows with it.
    """
    more = context_tokens / config.measure_budget_context_tokens
    return replace(
        config,
        measure_context_tokens=context_tokens,
        measure_min_context_tokens=context_tokens,
        measure_limit_tokens=max(config.measure_limit_tokens, context_tokens),
        measure_budget_seconds=budget_seconds or config.measure_budget_seconds * (1.0 + more),
    )


def room_tokens(context_tokens: int, config: Config = DEFAULTS, *, fresh: bool = False) -> int:
    """Size of the context that deciding for so many tokens takes; with `fresh` that which also
    lets finalists be judged on text of their own."""
    behind = config.measure_window_tokens + 2
    return context_tokens + behind + (config.plan_fresh_tokens if fresh else 0)


def decide(
    backend: Backend,
    model_key: str | Mapping[str, Any],
    calibration_tokens: Sequence[int],
    config: Config = DEFAULTS,
    store: Store | None = None,
    progress: Progress | None = None,
    *,
    policy: str = KNAPSPEC,
    clock: Clock = time.perf_counter,
) -> Decision:
    """Measure the model once (or take the stored measurement) and decide.

    `model_key` identifies the model file and the library; the backend's settings, which times
    depend on, are added. `policy`: what proposes plans (generators). The cache has to be empty and
    is empty afterwards. A failure of the measurement is a reason to be off, never an error;
    Interrupted passes through, as does KeyboardInterrupt.
    """
    if backend.refusal is not None:
        return Decision("off", f"off: {backend.refusal}")
    if not backend.sublayers:
        return Decision("off", "off: no sublayers were found in this model")
    if backend.max_verify_tokens < 2:
        return Decision("off", "off: this context verifies one token at a time")
    store = store if store is not None else Store(enabled=False)
    key = measurement_key(backend, model_key, calibration_tokens, config, policy)
    latency_key = kept.latency_key(backend, model_key)
    latency = kept.load_latency(store, latency_key, backend)
    if latency is not None and not latency.covers(
        min(backend.n_ctx, config.measure_limit_tokens),
        min(backend.max_verify_tokens, config.measure_verify_max),
    ):
        latency = None
    age_seconds = time.time() - latency.measured_at if latency is not None else 0.0
    retry = not 0.0 <= age_seconds <= config.measure_retry_seconds
    if latency is not None and latency.spread > config.measure_max_spread and retry:
        latency = None
    kept_one = None if latency is None else _load(store, key, latency, len(backend.sublayers))
    if kept_one is not None:
        measured, finalists = kept_one
        try:
            if not (retry and _disturbance(measured, finalists, config)):
                return choose(measured, finalists, backend.sublayers, config, from_cache=True)
            if measured.costs.blind:
                latency = None  # else the rounds are measured again, on the same profile
        except INVALID:
            store.ignore(key)

    def keep(profile: LatencyProfile) -> None:
        # at once: it need not be repeated if what comes next is interrupted
        kept.save_latency(store, latency_key, profile)

    fidelity_key = kept.fidelity_key(backend, model_key)
    known = kept.load_fidelity(store, fidelity_key, backend)
    try:
        measured, finalists, found = measure_all(
            backend, latency, known, keep, calibration_tokens, config, progress, clock, policy
        )
    except Interrupted:
        raise
    except KnapspecError as error:
        return Decision("off", f"off: the measurement failed: {error}")
    profile = measured.costs.profile
    content = {"latency_at": profile.measured_at, **_to_json(measured, finalists)}
    store.save(key, content)
    if found.counts:
        # only what was missing was counted: the text may be that of an earlier measurement
        kept.add_fidelity(store, fidelity_key, backend, found)
    return choose(measured, finalists, backend.sublayers, config)


def _load(
    store: Store, key: Mapping[str, Any], latency: LatencyProfile, n_sublayers: int
) -> tuple[Measured, list[Finalist]] | None:
    """The stored measurement that goes with this profile, or None."""
    stored = store.load(key)
    if stored is None:
        return None
    try:
        if stored["latency_at"] != latency.measured_at:
            return None
        text, fidelity, finalists = _from_json(stored, n_sublayers)
        return Measured(Costs(latency), text, fidelity), finalists
    except INVALID:
        store.ignore(key)
        return None


def kept_decision(
    backend: Backend,
    model_key: str | Mapping[str, Any],
    calibration_tokens: Sequence[int],
    config: Config = DEFAULTS,
    store: Store | None = None,
    policy: str = KNAPSPEC,
) -> Decision | None:
    """What was decided by the measurement that is kept, or None without one. Measures nothing."""
    store = store if store is not None else Store(enabled=False)
    latency = kept.load_latency(store, kept.latency_key(backend, model_key), backend)
    if latency is None:
        return None
    key = measurement_key(backend, model_key, calibration_tokens, config, policy)
    found = _load(store, key, latency, len(backend.sublayers))
    if found is None:
        return None
    try:
        return choose(*found, backend.sublayers, config, from_cache=True)
    except INVALID:
        store.ignore(key)
        return None


def measurement_key(
    backend: Backend,
    model_key: str | Mapping[str, Any],
    calibration_tokens: Sequence[int],
    config: Config = DEFAULTS,
    policy: str = KNAPSPEC,
) -> dict[str, Any]:
    """What a stored measurement depends on."""
    # The size of the context only matters where it cuts the measurement short.
    most = config.measure_context_tokens + config.measure_window_tokens + 1
    text = ",".join(str(t) for t in calibration_tokens)
    return {
        **kept.latency_key(backend, model_key),
        "decision": _MEASUREMENT,
        "policy": policy,
        "context": min(backend.n_ctx, most),
        "verify": min(backend.max_verify_tokens, config.measure_verify_max),
        "heads": list(backend.head_sizes) if config.short_head else [],
        "calibration": hashlib.sha256(text.encode()).hexdigest()[:16],
        "windows": list(config.window_tokens),
    }


def choose(
    measured: Measured,
    finalists: Sequence[Finalist],
    sublayers: tuple[SubLayer, ...],
    config: Config = DEFAULTS,
    *,
    from_cache: bool = False,
    correction: Correction = NO_CORRECTION,
) -> Decision:
    """The decision that follows from a measurement. Computes only.

    `correction`: how the times of recent rounds compare with what was measured.
    """
    ranked = sorted(
        filter(None, (best_length(measured, f, config, correction) for f in finalists)),
        key=lambda a: (a.timed, a.predicted_ratio),
        reverse=True,
    )
    baseline = 1000.0 / (correction.step * measured.step_ms)
    if measured.costs.max_width < 2:
        return Decision(
            "off",
            "off: one step takes so long that there was no time to measure a verification pass",
            baseline_per_second=baseline,
            measured=measured,
            from_cache=from_cache,
        )
    if not ranked:
        items = measured.fidelity.agreements(sublayers)
        worst = max((i.agreement for i in items), default=0.0)
        return Decision(
            "off",
            "off: no sublayer can be left out: the most harmless single skip keeps only "
            f"{worst:.2f} of the picks",
            baseline_per_second=baseline,
            measured=measured,
            from_cache=from_cache,
        )
    best = ranked[0]
    noise = _disturbance(measured, finalists, config)
    on = noise is None and best.timed and best.predicted_ratio >= 1.0 + config.plan_margin
    if not any(cost.points for cost in measured.costs.class_costs):
        reason = (
            "off: one step takes so long that there was no time to measure what sublayers cost; it "
            "will be tried again later"
        )
    elif noise is not None:
        low, high = (f"{ms:.1f}" for ms in noise)
        seen = f"a step took {low} to {high} ms" if low != high else "noise hid what its parts cost"
        reason = (
            f"off: the machine was too busy to measure ({seen}); it will be measured again later"
        )
    else:
        reason = _reason(best, on, len(sublayers), config)
    return Decision(
        "on" if on else "off",
        reason,
        best.draft,
        best.predicted_ratio,
        baseline,
        tuple(ranked),
        measured,
        tuple(finalists),
        from_cache,
        noise is not None,
    )


def _reason(best: Alternative, on: bool, n_sublayers: int, config: Config) -> str:
    verified = best.draft.max_tokens + 1
    figures = (
        f"costs {best.draft_cost:.2f} of a step and agrees {best.agreement:.2f}, "
        f"verifying {verified} tokens costs {best.verify_cost:.1f} steps: "
        f"predicted {best.predicted_ratio:.2f}x of plain decoding"
    )
    if on:
        plan = best.draft.plan
        changes = []
        if plan.skipped or not (plan.windowed or plan.head_rows):
            changes.append(f"without {len(plan.skipped)} of {n_sublayers} sublayers")
        if plan.windowed:
            changes.append(f"with {len(plan.windowed)} of {n_sublayers} sublayers windowed")
        if plan.head_rows:
            changes.append(f"with {plan.head_rows:,} rows of the head")
        return f"on: a draft {' and '.join(changes)} {figures}"
    if best.predicted_ratio > 1.0:
        return f"off: the best draft {figures}, less than the {1.0 + config.plan_margin:.2f}x asked"
    return f"off: the best draft {figures}"


def _disturbance(
    measured: Measured, finalists: Sequence[Finalist], config: Config
) -> tuple[float, float] | None:
    """Shortest and longest time of a plain step, in ms, of a measurement that says more about what
    else ran than about the model; None for any other."""
    profile = measured.costs.profile
    if measured.costs.blind or profile.spread > config.measure_max_spread:
        step = max(profile.steps(), key=lambda s: s.timing.relative_spread).timing
        return step.low_ms, step.high_ms
    for finalist in finalists:
        if finalist.timing is not None:
            # the profile was measured on another machine, so to speak, than the rounds
            low, high = sorted((measured.step_ms, finalist.timing.plain_step_ms))
            if high > (1.0 + config.measure_max_spread) * low:
                return low, high
    return None


def _to_json(measured: Measured, finalists: Sequence[Finalist]) -> dict[str, Any]:
    return {
        "prompt": list(measured.text.prompt),
        "window": list(measured.text.window),
        "fidelity": measured.fidelity.to_json(),
        "finalists": [
            {
                "modes": [str(m) for m in f.judgement.plan.modes],
                "head_rows": f.judgement.plan.head_rows,
                "windows": [
                    {"agree": [int(a) for a in w.agree], "probability": list(w.probability)}
                    for w in f.judgement.windows
                ],
                "timing": None if f.timing is None else vars(f.timing),
            }
            for f in finalists
        ],
    }


def _from_json(data: dict[str, Any], n_sublayers: int) -> tuple[Text, Fidelity, list[Finalist]]:
    text = Text(tuple(int(t) for t in data["prompt"]), tuple(int(t) for t in data["window"]))
    if not all(0 <= t < 2**31 for t in (*text.prompt, *text.window)):
        raise ValueError("a stored token is impossible")
    fidelity = Fidelity.from_json(data["fidelity"], n_sublayers)
    finalists = []
    for entry in data["finalists"]:
        plan = Plan(tuple(parse_mode(m) for m in entry["modes"]), int(entry["head_rows"]))
        windows = tuple(
            Window(tuple(bool(a) for a in w["agree"]), tuple(float(p) for p in w["probability"]))
            for w in entry["windows"]
        )
        if len(plan.modes) != n_sublayers or not windows or not 0 <= plan.head_rows <= MAX_COUNT:
            raise ValueError("a stored plan does not fit")
        if any(not w.agree or len(w.agree) != len(w.probability) for w in windows):
            raise ValueError("a stored window is not one")
        judgement = Judgement(plan, windows)
        timing = entry["timing"]
        finalists.append(Finalist(judgement, None if timing is None else RoundTiming(**timing)))
    return text, fidelity, finalists


def book_key(backend: Backend, model_key: kept.ModelKey) -> dict[str, Any]:
    """What is learned about plans while decoding holds for the model and the type of its keys and
    values; what they cost is asked of the profile each time."""
    return {**kept.fidelity_key(backend, model_key), "fidelity": None, "plans": _BOOK}


def open_book(
    backend: Backend,
    decision: Decision,
    store: Store,
    key: Mapping[str, Any],
    config: Config = DEFAULTS,
) -> PlanBook:
    """What the decision was made from, and what was learned about plans earlier."""
    measured = decision.measured
    if measured is None:
        raise ValueError("nothing was measured")
    book = PlanBook(measured.costs, measured.fidelity, backend.sublayers, backend.n_ctx, config)
    content = store.load(key)
    if content is not None:
        try:
            book.read(content)
        except INVALID:
            store.ignore(key)
    bucket = book.bucket(measured.context_tokens)
    for finalist in decision.finalists:
        plan = finalist.judgement.plan
        if book.judgement(bucket, plan) is None:
            book.add(bucket, finalist.judgement)
        if finalist.timing is not None:
            book.add_timing(plan, measured.context_tokens, finalist.timing)
    book.changed = False  # kept with the decision already
    book.solve_ahead()
    if book.most_head_rows:
        # before any text that drafts are judged on; what the model said is to be in it
        backend.suggest_head(by_frequency([*measured.text.window, *measured.text.prompt]))
        backend.prepare_head(book.most_head_rows)
    return book


def save_book(store: Store, key: Mapping[str, Any], book: PlanBook) -> None:
    """Write it down, with what other processes have learned about other plans meanwhile."""
    with store.updating():
        content = store.load(key)
        if content is not None:
            with suppress(*INVALID):
                book.read(content)
        store.save(key, book.to_json())
    book.changed = False
