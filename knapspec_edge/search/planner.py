"""Decides whether to speculate, with which plan and how far: measured, not hoped.

Single skips give candidates (exact knapsack), their joint agreement on the target's own tokens and
the measured costs rank them, and the best ones are timed in real rounds before one is declared on.
"No speculation" is a candidate that wins ties.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..backend import Backend
from ..config import DEFAULTS, Config
from ..decode.rollback import rewind
from ..errors import Interrupted, KnapspecError
from ..latency.measure import (
    GREEDY,
    Clock,
    Profile,
    Progress,
    RoundTiming,
    measure,
    measure_round,
)
from ..latency.model import LatencyModel
from ..latency.store import Store
from ..records import FULL, SKIP, Draft, Mode, Plan, SubLayer
from .acceptance import Judgement, judge
from .knapsack import Option, solve
from .plan_file import parse_mode
from .throughput import Replay, expected_tokens_geometric, loss, replay, tokens_per_ms

# Grows when a stored measurement means something else than before.
_MEASUREMENT = 1
# Rounds timed per finalist, where the model is fast enough.
_ROUND_REPEATS = 7
# Shares of the progress bar: profile, judging, real rounds.
_PROFILE_SHARE, _JUDGE_SHARE = 0.75, 0.9


@dataclass(frozen=True)
class Alternative:
    """One candidate with its figures. Costs are in plain steps at the measured context."""

    draft: Draft
    agreement: float  # of the picks on the window, each place by itself
    draft_cost: float  # one draft step
    verify_cost: float  # the pass over draft.max_tokens + 1 tokens
    tokens_per_round: float
    drafted_per_round: float  # below draft.max_tokens where drafts stop early
    predicted_ratio: float  # speed relative to plain decoding
    timed: bool  # costs come from real rounds, not from the model


@dataclass(frozen=True)
class Decision:
    """What auto does, and what `--spec on` would do."""

    state: str  # "on" or "off"
    reason: str  # one line with the numbers
    draft: Draft | None = None  # the best draft found, also when off; None if there is none
    predicted_ratio: float | None = None  # of that draft
    baseline_per_second: float | None = None  # plain decoding as measured
    alternatives: tuple[Alternative, ...] = ()  # best first
    profile: Profile | None = None
    from_cache: bool = False  # nothing was measured now


@dataclass(frozen=True)
class Finalist:
    """A judged plan, with its timing in real rounds if it got that far."""

    judgement: Judgement
    timing: RoundTiming | None = None


def decide(
    backend: Backend,
    model_key: str | Mapping[str, Any],
    calibration_tokens: Sequence[int],
    config: Config = DEFAULTS,
    store: Store | None = None,
    progress: Progress | None = None,
    *,
    clock: Clock = time.perf_counter,
) -> Decision:
    """Measure the model once (or take the stored measurement) and decide.

    `model_key` identifies the model file and the library; the backend's settings, which times
    depend on, are added. The cache has to be empty and is empty afterwards. A failure of the
    measurement is a reason to be off, never an error; Interrupted passes through, as does
    KeyboardInterrupt.
    """
    if backend.refusal is not None:
        return Decision("off", f"off: {backend.refusal}")
    if not backend.sublayers:
        return Decision("off", "off: no sublayers were found in this model")
    if backend.max_verify_tokens < 2:
        return Decision("off", "off: this context verifies one token at a time")
    key = measurement_key(backend, model_key, calibration_tokens, config)
    stored = store.load(key) if store is not None else None
    if stored is not None:
        try:
            profile, finalists = _from_json(stored, len(backend.sublayers))
            age_seconds = time.time() - float(stored["measured_at"])
        except (KeyError, TypeError, ValueError, AttributeError):
            pass  # written by another version: measure again
        else:
            expired = not 0.0 <= age_seconds <= config.measure_retry_seconds
            if not (expired and _too_noisy(profile, config)):
                return choose(profile, finalists, backend.sublayers, config, from_cache=True)
    try:
        profile, finalists = _measure_all(backend, calibration_tokens, config, progress, clock)
    except Interrupted:
        raise
    except KnapspecError as error:
        return Decision("off", f"off: the measurement failed: {error}")
    if store is not None:
        store.save(key, {"measured_at": time.time(), **_to_json(profile, finalists)})
    return choose(profile, finalists, backend.sublayers, config)


def measurement_key(
    backend: Backend,
    model_key: str | Mapping[str, Any],
    calibration_tokens: Sequence[int],
    config: Config = DEFAULTS,
) -> dict[str, Any]:
    """What a stored measurement depends on."""
    # The size of the context only matters where it cuts the measurement short.
    most = config.measure_context_tokens + config.measure_window_tokens + 1
    settings = dict(getattr(backend, "settings", {}))
    settings.pop("ctx_tokens", None)
    text = ",".join(str(t) for t in calibration_tokens)
    return {
        "measurement": _MEASUREMENT,
        "model": model_key if isinstance(model_key, str) else dict(model_key),
        "settings": settings,
        "sublayers": len(backend.sublayers),
        "context": min(backend.n_ctx, most),
        "verify": min(backend.max_verify_tokens, config.measure_verify_max),
        "calibration": hashlib.sha256(text.encode()).hexdigest()[:16],
    }


def candidate_plans(
    profile: Profile, sublayers: tuple[SubLayer, ...], config: Config = DEFAULTS
) -> list[Plan]:
    """The shortlist: plans worth measuring jointly, from the cheapest cut to the deepest.

    For every saving the knapsack gives the plan whose single agreements multiply to the most. The
    range of savings is divided into parts and each sends the plan with the best predicted
    throughput, because the product of singles is a rough guide over long distances. Shallow parts
    are finer (their borders are 1, 4, 9, ... of the square of their number): that is where most
    models have their best plan.
    """
    model = LatencyModel(profile, sublayers)
    # at least a microsecond, so that a clock that stands still divides nothing by zero
    unit_ms = max(0.001, model.step_ms / config.plan_latency_units)
    samples = len(profile.window)
    modes: list[tuple[Mode, ...]] = []
    items: list[tuple[Option, ...]] = []
    for item in profile.items:
        # Where noise hid all costs, one unit each: a deeper plan is at least not slower.
        units = 1 if profile.blind else round(model.saving_ms(item.index) / unit_ms)
        if units >= 1 and item.agreement >= config.plan_floor_agreement:
            modes.append((FULL, SKIP))
            items.append((Option(0, 0.0), Option(units, loss(item.agreement, samples))))
        else:
            modes.append((FULL,))
            items.append((Option(0, 0.0),))
    solutions = [s for s in solve(items) if s.saving_units > 0]
    if not solutions:
        return []
    deepest = solutions[-1].saving_units
    best: dict[int, tuple[float, Plan]] = {}
    for solution in solutions:
        plan = Plan(tuple(m[k] for m, k in zip(modes, solution.options, strict=True)))
        rate = _geometric_rate(model, plan, math.exp(-solution.loss), config)
        part = math.isqrt(config.plan_shortlist**2 * (solution.saving_units - 1) // deepest)
        if part not in best or rate > best[part][0]:
            best[part] = (rate, plan)
    return [plan for _, (_, plan) in sorted(best.items())]


def choose(
    profile: Profile,
    finalists: Sequence[Finalist],
    sublayers: tuple[SubLayer, ...],
    config: Config = DEFAULTS,
    *,
    from_cache: bool = False,
) -> Decision:
    """The decision that follows from a measurement. Computes only."""
    ranked = sorted(
        filter(None, (_best_length(profile, f, sublayers, config) for f in finalists)),
        key=lambda a: (a.timed, a.predicted_ratio),
        reverse=True,
    )
    baseline = 1000.0 / profile.step.median_ms if profile.step.median_ms > 0.0 else None
    if not ranked:
        worst = max((i.agreement for i in profile.items), default=0.0)
        return Decision(
            "off",
            "off: no sublayer can be left out: the most harmless single skip keeps only "
            f"{worst:.2f} of the picks",
            baseline_per_second=baseline,
            profile=profile,
            from_cache=from_cache,
        )
    best = ranked[0]
    noisy = _too_noisy(profile, config)
    on = not noisy and best.timed and best.predicted_ratio >= 1.0 + config.plan_margin
    if noisy:
        step = profile.step
        reason = (
            f"off: the machine was too busy to measure (a step took {step.low_ms:.1f} to "
            f"{step.high_ms:.1f} ms); it will be measured again later"
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
        profile,
        from_cache,
    )


def _reason(best: Alternative, on: bool, n_sublayers: int, config: Config) -> str:
    verified = best.draft.max_tokens + 1
    figures = (
        f"costs {best.draft_cost:.2f} of a step and agrees {best.agreement:.2f}, "
        f"verifying {verified} tokens costs {best.verify_cost:.1f} steps: "
        f"predicted {best.predicted_ratio:.2f}x of plain decoding"
    )
    if on:
        skipped = len(best.draft.plan.skipped)
        return f"on: a draft without {skipped} of {n_sublayers} sublayers {figures}"
    if best.predicted_ratio > 1.0:
        return f"off: the best draft {figures}, less than the {1.0 + config.plan_margin:.2f}x asked"
    return f"off: the best draft {figures}"


def _too_noisy(profile: Profile, config: Config) -> bool:
    """A measurement that says more about what else ran than about the model."""
    return profile.blind or profile.spread > config.measure_max_spread


def _geometric_rate(model: LatencyModel, plan: Plan, alpha: float, config: Config) -> float:
    draft_ms = model.draft_ms(plan)
    return max(
        tokens_per_ms(
            expected_tokens_geometric(alpha, gamma), gamma, draft_ms, model.verify_ms(gamma + 1)
        )
        for gamma in _lengths(model, config)
    )


def _lengths(model: LatencyModel, config: Config) -> range:
    return range(1, min(config.draft_max_tokens, model.max_verify_tokens - 1) + 1)


def _best_length(
    profile: Profile, finalist: Finalist, sublayers: tuple[SubLayer, ...], config: Config
) -> Alternative | None:
    """The γ with the best predicted speed for one plan; of equal ones the shortest."""
    model = LatencyModel(profile, sublayers)
    judgement, timing = finalist.judgement, finalist.timing
    plan = judgement.plan
    step_ms, draft_ms, verify_scale = model.step_ms, model.draft_ms(plan), 1.0
    if timing is not None:
        step_ms, draft_ms = timing.plain_step_ms, timing.draft_step_ms
        # The curve keeps its shape; its height is that of the pass in a real round.
        verify_scale = timing.verify_ms / model.verify_ms(timing.draft_tokens + 1)

    def verify_ms(tokens: int) -> float:
        # Several tokens never cost less than one; a measurement that says so was disturbed.
        return max(step_ms, verify_scale * model.verify_ms(tokens))

    best: tuple[int, Replay] | None = None
    # Every length is replayed from the same places, or a lucky place would favour one of them.
    lengths = [g for g in _lengths(model, config) if 2 * g <= len(judgement.agree) + 1]
    starts = len(judgement.agree) - max(lengths, default=0) + 1
    for gamma in lengths:
        result = replay(
            judgement.agree,
            judgement.probability,
            gamma,
            config.draft_min_probability,
            draft_ms,
            verify_ms,
            starts,
        )
        if result is not None and (best is None or result.ms_per_token < best[1].ms_per_token):
            best = (gamma, result)
    if best is None:
        return None
    gamma, result = best
    return Alternative(
        Draft(plan, gamma, config.draft_min_probability),
        judgement.agreement,
        draft_ms / step_ms,
        verify_ms(gamma + 1) / step_ms,
        result.tokens_per_round,
        result.drafted_per_round,
        step_ms / result.ms_per_token,
        timing is not None,
    )


def _measure_all(
    backend: Backend,
    calibration_tokens: Sequence[int],
    config: Config,
    progress: Progress | None,
    clock: Clock,
) -> tuple[Profile, list[Finalist]]:
    """Profile, judge the shortlist, time the best of it. The cache is empty before and after."""
    report = progress or (lambda _: None)
    try:
        profile = measure(
            backend,
            calibration_tokens,
            config,
            progress=lambda share: report(_PROFILE_SHARE * share),
            clock=clock,
            keep_prompt=True,
        )
        plans = candidate_plans(profile, backend.sublayers, config)
        n_finalists = config.plan_finalists
        if profile.elapsed_ms > profile.budget_ms:
            # Out of time: neither the shallowest nor the deepest, and only one is timed.
            plans = plans[1:4] or plans
            n_finalists = 1
        done = 0
        passes = max(1, len(plans) * -(-len(profile.window) // config.plan_judge_block_tokens))

        def judged_one() -> None:
            nonlocal done
            done += 1
            share = min(1.0, done / passes)
            report(_PROFILE_SHARE + share * (_JUDGE_SHARE - _PROFILE_SHARE))

        judgements = judge(
            backend, profile.window, plans, config.plan_judge_block_tokens, judged_one
        )
        finalists = [Finalist(j) for j in judgements]
        order = _by_speed(profile, finalists, backend.sublayers, config)
        timed = order[:n_finalists]
        for n, (row, gamma) in enumerate(timed):
            timing = measure_round(
                backend,
                profile.window,
                judgements[row].plan,
                gamma,
                _round_repeats(profile, gamma),
                clock=clock,
            )
            finalists[row] = Finalist(judgements[row], timing)
            report(_JUDGE_SHARE + (n + 1) / len(timed) * (1.0 - _JUDGE_SHARE))
        rows = [row for row, _ in timed]
        again = _judge_afresh(backend, profile, [judgements[row].plan for row in rows], config)
        for row, judgement in zip(rows, again, strict=False):
            finalists[row] = Finalist(judgement, finalists[row].timing)
    finally:
        rewind(backend, 0)
    report(1.0)
    return profile, finalists


def _judge_afresh(
    backend: Backend, profile: Profile, plans: Sequence[Plan], config: Config
) -> list[Judgement]:
    """Agreement of the finalists on the target's tokens after the window.

    They were chosen for how well they do on the window, so what they do there flatters them. Empty
    where time or context leave no room for this. The cache is left at the end of the prompt.
    """
    start, window = backend.n_past, list(profile.window)
    affordable = int(0.1 * profile.budget_ms / max(0.001, profile.step.median_ms))
    n = min(config.plan_fresh_tokens, affordable, backend.n_ctx - start - len(window) - 1)
    if not plans or n < 2 * config.plan_judge_block_tokens:
        return []
    fresh = [backend.prefill(window, GREEDY).token]
    after = backend.n_past
    while len(fresh) < n:
        fresh.append(backend.decode(fresh[-1], GREEDY).token)
    rewind(backend, after)
    judged = judge(backend, fresh, plans, config.plan_judge_block_tokens)
    rewind(backend, start)
    return judged


def _round_repeats(profile: Profile, gamma: int) -> int:
    """How often rounds are timed: often enough for a median, within a tenth of the budget."""
    # two rounds of about two steps and a draft each, and some plain steps
    steps = 2 * (gamma + 2) + 4
    affordable = int(0.1 * profile.budget_ms / max(0.001, steps * profile.step.median_ms))
    return max(2, min(_ROUND_REPEATS, affordable))


def _by_speed(
    profile: Profile,
    finalists: Sequence[Finalist],
    sublayers: tuple[SubLayer, ...],
    config: Config,
) -> list[tuple[int, int]]:
    """(row, γ) of the finalists that have a length, fastest first."""
    found = [(row, _best_length(profile, f, sublayers, config)) for row, f in enumerate(finalists)]
    ranked = [(row, a) for row, a in found if a is not None]
    ranked.sort(key=lambda pair: pair[1].predicted_ratio, reverse=True)
    return [(row, a.draft.max_tokens) for row, a in ranked]


def _to_json(profile: Profile, finalists: Sequence[Finalist]) -> dict[str, Any]:
    return {
        "profile": profile.to_json(),
        "finalists": [
            {
                "modes": [str(m) for m in f.judgement.plan.modes],
                "agree": [int(a) for a in f.judgement.agree],
                "probability": list(f.judgement.probability),
                "timing": None if f.timing is None else vars(f.timing),
            }
            for f in finalists
        ],
    }


def _from_json(data: dict[str, Any], n_sublayers: int) -> tuple[Profile, list[Finalist]]:
    profile = Profile.from_json(data["profile"])
    finalists = []
    for entry in data["finalists"]:
        plan = Plan(tuple(parse_mode(m) for m in entry["modes"]))
        if len(plan.modes) != n_sublayers or len(entry["agree"]) != len(entry["probability"]):
            raise ValueError("a stored plan does not fit")
        judgement = Judgement(
            plan,
            tuple(bool(a) for a in entry["agree"]),
            tuple(float(p) for p in entry["probability"]),
        )
        timing = entry["timing"]
        finalists.append(Finalist(judgement, None if timing is None else RoundTiming(**timing)))
    return profile, finalists
