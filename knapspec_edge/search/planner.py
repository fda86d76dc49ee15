"""Decides whether to speculate, with which plan and how far: measured, not hoped.

Single skips give candidates (exact knapsack), their joint agreement on the target's own tokens and
the measured costs rank them, and the best ones are timed in real rounds before one is declared on.
"No speculation" is a candidate that wins ties.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..backend import Backend
from ..config import DEFAULTS, Config
from ..decode.rollback import rewind
from ..errors import ContextError, Interrupted, KnapspecError
from ..latency import kept
from ..latency.costs import Costs
from ..latency.drift import NO_CORRECTION, Correction
from ..latency.fidelity import (
    Fidelity,
    Text,
    measure_fidelity,
    probed_indices,
    shorten,
    target_text,
)
from ..latency.profile import LatencyProfile
from ..latency.profiler import Progress, measure_latency
from ..latency.rounds import RoundTiming, measure_round
from ..latency.store import INVALID, Store
from ..latency.timing import Clock
from ..records import FULL, GREEDY, SKIP, Draft, Mode, Plan, SubLayer
from .acceptance import Judgement, judge
from .knapsack import Option, solve
from .plan_file import parse_mode
from .throughput import Replay, expected_tokens_geometric, loss, replay, tokens_per_ms

# Grows when a stored measurement means something else than before.
_MEASUREMENT = 2
# Rounds timed per finalist, where the model is fast enough.
_ROUND_REPEATS = 7
# Shares of the progress bar at which latency, fidelity and judging end; then come real rounds.
_LATENCY_SHARE, _FIDELITY_SHARE, _JUDGE_SHARE = 0.4, 0.75, 0.9
# Levels of effort as shares of the configured window. Slow models go down the list.
_WINDOW_SHARES = (1.0, 0.8, 0.65, 0.5, 0.35)
_MIN_WINDOW_TOKENS = 12


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
class Measured:
    """What a decision rests on. Costs are looked up at the end of the text's prompt."""

    costs: Costs
    text: Text
    fidelity: Fidelity

    @property
    def context_tokens(self) -> int:
        return len(self.text.prompt)

    @property
    def step_ms(self) -> float:
        return self.costs.step_ms(self.context_tokens)

    @property
    def notes(self) -> tuple[str, ...]:
        return self.costs.profile.notes + self.fidelity.notes


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
    store = store if store is not None else Store(enabled=False)
    key = measurement_key(backend, model_key, calibration_tokens, config)
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
    stored = store.load(key) if latency is not None else None
    if stored is not None and latency is not None:
        try:
            if stored["latency_at"] == latency.measured_at:
                text, fidelity, finalists = _from_json(stored, len(backend.sublayers))
                measured = Measured(Costs(latency), text, fidelity)
                if not (retry and _disturbance(measured, finalists, config)):
                    return choose(measured, finalists, backend.sublayers, config, from_cache=True)
                latency = None
        except INVALID:
            store.ignore(key)

    def keep(profile: LatencyProfile) -> None:
        # at once: it need not be repeated if what comes next is interrupted
        kept.save_latency(store, latency_key, profile)

    try:
        measured, finalists = _measure_all(
            backend, latency, keep, calibration_tokens, config, progress, clock
        )
    except Interrupted:
        raise
    except KnapspecError as error:
        return Decision("off", f"off: the measurement failed: {error}")
    profile = measured.costs.profile
    content = {"latency_at": profile.measured_at, **_to_json(measured, finalists)}
    store.save(key, content)
    # the text is the same in every setting of a model: counted again it is no further evidence
    fidelity_key = kept.fidelity_key(backend, model_key)
    kept.add_fidelity(store, fidelity_key, backend, measured.fidelity, only_first=True)
    return choose(measured, finalists, backend.sublayers, config)


def measurement_key(
    backend: Backend,
    model_key: str | Mapping[str, Any],
    calibration_tokens: Sequence[int],
    config: Config = DEFAULTS,
) -> dict[str, Any]:
    """What a stored measurement depends on."""
    # The size of the context only matters where it cuts the measurement short.
    most = config.measure_context_tokens + config.measure_window_tokens + 1
    text = ",".join(str(t) for t in calibration_tokens)
    return {
        **kept.latency_key(backend, model_key),
        "decision": _MEASUREMENT,
        "context": min(backend.n_ctx, most),
        "verify": min(backend.max_verify_tokens, config.measure_verify_max),
        "calibration": hashlib.sha256(text.encode()).hexdigest()[:16],
    }


def candidate_plans(
    costs: Costs,
    fidelity: Fidelity,
    context_tokens: int,
    sublayers: tuple[SubLayer, ...],
    config: Config = DEFAULTS,
) -> list[Plan]:
    """The shortlist: plans worth measuring jointly, from the cheapest cut to the deepest.

    For every saving the knapsack gives the plan whose single agreements multiply to the most. The
    range of savings is divided into parts and each sends the plan with the best predicted
    throughput, because the product of singles is a rough guide over long distances. Shallow parts
    are finer (their borders are 1, 4, 9, ... of the square of their number): that is where most
    models have their best plan.
    """
    weights, _ = costs.integer_weights(context_tokens, largest_error=config.plan_rounding_error)
    modes: list[tuple[Mode, ...]] = []
    items: list[tuple[Option, ...]] = []
    for item in fidelity.agreements(sublayers):
        # Where noise hid all costs, one unit each: a deeper plan is at least not slower.
        units = 1 if costs.blind else int(weights[item.index])
        if units >= 1 and item.agreement >= config.plan_floor_agreement:
            modes.append((FULL, SKIP))
            items.append((Option(0, 0.0), Option(units, loss(item.agreement, item.total))))
        else:
            modes.append((FULL,))
            items.append((Option(0, 0.0),))
    solutions = [s for s in solve(items) if s.saving_units > 0]
    if not solutions:
        return []
    verify_ms = verification_ms(costs, context_tokens, config)
    deepest = solutions[-1].saving_units
    best: dict[int, tuple[float, Plan]] = {}
    for solution in solutions:
        plan = Plan(tuple(m[k] for m, k in zip(modes, solution.options, strict=True)))
        draft_ms = costs.draft_ms(plan, context_tokens)
        rate = geometric_rate(draft_ms, math.exp(-solution.loss), verify_ms)
        part = math.isqrt(config.plan_shortlist**2 * (solution.saving_units - 1) // deepest)
        if part not in best or rate > best[part][0]:
            best[part] = (rate, plan)
    return [plan for _, (_, plan) in sorted(best.items())]


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
        filter(None, (_best_length(measured, f, config, correction) for f in finalists)),
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


def verification_ms(
    costs: Costs, context_tokens: int, config: Config = DEFAULTS
) -> dict[int, float]:
    """Time of verifying a draft, by each length γ that may be chosen."""
    return {gamma: costs.verify_ms(context_tokens, gamma + 1) for gamma in _lengths(costs, config)}


def geometric_rate(draft_ms: float, alpha: float, verify_ms: Mapping[int, float]) -> float:
    """Tokens per ms with the best γ of those whose verification `verify_ms` holds; 0 without."""
    rates = (
        tokens_per_ms(expected_tokens_geometric(alpha, gamma), gamma, draft_ms, verify)
        for gamma, verify in verify_ms.items()
    )
    return max(rates, default=0.0)


def _lengths(costs: Costs, config: Config) -> range:
    return range(1, min(config.draft_max_tokens, costs.max_width - 1) + 1)


def _best_length(
    measured: Measured,
    finalist: Finalist,
    config: Config,
    correction: Correction = NO_CORRECTION,
) -> Alternative | None:
    """The γ with the best predicted speed for one plan; of equal ones the shortest."""
    costs, context = measured.costs, measured.context_tokens
    judgement, timing = finalist.judgement, finalist.timing
    plan = judgement.plan
    step_ms, draft_ms, verify_scale = measured.step_ms, costs.draft_ms(plan, context), 1.0
    if timing is not None:
        step_ms, draft_ms = timing.plain_step_ms, timing.draft_step_ms
        # The curve keeps its shape; its height is that of the pass in a real round.
        verify_scale = timing.verify_ms / costs.verify_ms(context, timing.draft_tokens + 1)
    step_ms *= correction.step
    draft_ms *= correction.draft
    verify_scale *= correction.verify

    def verify_ms(tokens: int) -> float:
        # Several tokens never cost less than one; a measurement that says so was disturbed.
        return max(step_ms, verify_scale * costs.verify_ms(context, tokens))

    best: tuple[int, Replay] | None = None
    # Every length is replayed from the same places, or a lucky place would favour one of them.
    lengths = [g for g in _lengths(costs, config) if 2 * g <= len(judgement.agree) + 1]
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


@dataclass(frozen=True)
class Effort:
    """How much is judged. `probe_stride` k means every k-th sublayer of a kind."""

    window_tokens: int
    probe_stride: int

    def expected_ms(self, step_ms: float, token_ms: float, n_items: int, config: Config) -> float:
        """Rough cost of it all if a pass of b tokens takes step_ms + (b - 1) * token_ms."""
        blocks = -(-self.window_tokens // config.measure_block_tokens)
        window_pass = blocks * step_ms + self.window_tokens * token_ms
        judge_blocks = -(-self.window_tokens // config.plan_judge_block_tokens)
        judge_pass = judge_blocks * step_ms + self.window_tokens * token_ms
        probes = -(-n_items // self.probe_stride)
        drafted = config.draft_max_tokens
        finals = 3 * config.plan_finalists * (2 * drafted * step_ms + drafted * token_ms)
        return (
            self.window_tokens * step_ms
            + (probes + 2) * window_pass
            + config.plan_shortlist * judge_pass
            + finals
        )


def choose_effort(
    step_ms: float, token_ms: float, n_items: int, budget_ms: float, config: Config
) -> Effort:
    """The most thorough effort that fits the budget; the least one if none does."""
    windows = [
        max(_MIN_WINDOW_TOKENS, round(share * config.measure_window_tokens))
        for share in _WINDOW_SHARES
    ]
    most_stride = max(1, n_items // config.measure_min_probes)
    options = [Effort(window, 1) for window in windows]
    options += [Effort(windows[-1], k) for k in range(2, most_stride + 1)]
    # The shortest window comes last of all: what it says about an item is coarse.
    options.append(Effort(_MIN_WINDOW_TOKENS, most_stride))
    for effort in options:
        if effort.expected_ms(step_ms, token_ms, n_items, config) <= budget_ms:
            return effort
    return options[-1]


def _measure_all(
    backend: Backend,
    latency: LatencyProfile | None,
    keep: Callable[[LatencyProfile], None],
    calibration_tokens: Sequence[int],
    config: Config,
    progress: Progress | None,
    clock: Clock,
) -> tuple[Measured, list[Finalist]]:
    """Latency unless it is known, fidelity, joint agreement of the shortlist, and real rounds with
    the best of it. The cache is empty before and after."""
    if len(calibration_tokens) < 2:
        raise ValueError("the measurement needs at least 2 calibration tokens")
    if backend.n_past:
        raise ValueError("the measurement needs an empty cache")
    started = clock()
    budget_ms = 1000.0 * config.measure_budget_seconds
    shown = 0.0

    def report(share: float) -> None:
        nonlocal shown
        shown = max(shown, min(share, 1.0))
        if progress is not None:
            progress(shown)

    def spent_ms() -> float:
        return 1000.0 * (clock() - started)

    def report_time(most: float) -> Callable[[], None]:
        """Progress by the clock, not beyond the end of the present phase."""
        return lambda: report(min(most, spent_ms() / budget_ms))

    if latency is None:
        latency = measure_latency(
            backend,
            budget_seconds=_LATENCY_SHARE * config.measure_budget_seconds,
            tokens=calibration_tokens,
            limit_tokens=min(backend.n_ctx, config.measure_limit_tokens),
            max_width=config.measure_verify_max,
            config=config,
            progress=lambda share: report(_LATENCY_SHARE * share),
            clock=clock,
        )
        keep(latency)
    else:
        budget_ms *= 1.0 - _LATENCY_SHARE
    costs = Costs(latency)
    try:
        prompt, window_room = _prompt(backend, costs, calibration_tokens, budget_ms, config)
        step_ms = costs.step_ms(len(prompt))
        effort = choose_effort(
            step_ms,
            _token_ms(costs, len(prompt)),
            len(backend.sublayers),
            budget_ms - spent_ms(),
            config,
        )
        text = target_text(
            backend,
            prompt,
            min(effort.window_tokens, window_room),
            report_time(_FIDELITY_SHARE),
        )

        def late() -> bool:
            # the estimate was wrong or the machine got busy: time to make do
            return spent_ms() > config.measure_overrun * budget_ms

        stride = effort.probe_stride
        if late():
            stride = max(stride, len(backend.sublayers) // config.measure_min_probes)
        fidelity = measure_fidelity(
            backend,
            text,
            probed_indices(backend.sublayers, stride),
            config.measure_block_tokens,
            report=report_time(_FIDELITY_SHARE),
            enough=late,
        )
        notes = (*_shortened(text, calibration_tokens, step_ms, config), *fidelity.notes)
        measured = Measured(costs, text, replace(fidelity, notes=notes))
        finalists = _finalists(
            backend, measured, config, clock, report, hurry=spent_ms() > budget_ms
        )
    finally:
        rewind(backend, 0)
    report(1.0)
    return measured, finalists


def _shortened(text: Text, tokens: Sequence[int], step_ms: float, config: Config) -> Iterator[str]:
    """What the model's speed, or the size of its context, took from the text."""
    if len(text.prompt) < min(config.measure_context_tokens, len(tokens)):
        yield f"measured at a context of {len(text.prompt)} tokens"
    if len(text.window) < config.measure_window_tokens:
        yield f"shortened to {len(text.window)} tokens: one step takes {step_ms:.0f} ms"


def _token_ms(costs: Costs, context_tokens: int) -> float:
    """Cost of a further token in a pass."""
    width = costs.max_width
    if width < 2:
        return costs.step_ms(context_tokens)
    wide = costs.verify_ms(context_tokens, width) - costs.step_ms(context_tokens)
    return wide / (width - 1)


def _prompt(
    backend: Backend, costs: Costs, tokens: Sequence[int], budget_ms: float, config: Config
) -> tuple[list[int], int]:
    """As much of the calibration prompt as the model's speed and the context allow, and how many
    tokens of the target's own fit behind it."""
    room = backend.n_ctx - _MIN_WINDOW_TOKENS - 2
    if room < 4:
        raise ContextError(
            f"measuring takes a context of {_MIN_WINDOW_TOKENS + 6} tokens, this one has "
            f"{backend.n_ctx}; raise --ctx"
        )
    longest = min(config.measure_context_tokens, len(tokens), room)
    shortest = min(config.measure_min_context_tokens, longest)
    affordable = int(0.15 * budget_ms / max(1e-6, _token_ms(costs, shortest)))
    prompt = shorten(tokens, max(shortest, min(longest, affordable)))
    return prompt, backend.n_ctx - len(prompt) - 1


def _finalists(
    backend: Backend,
    measured: Measured,
    config: Config,
    clock: Clock,
    report: Callable[[float], None],
    *,
    hurry: bool,
) -> list[Finalist]:
    """Judge the shortlist, time the best of it. The cache is left at the end of the prompt."""
    plans = candidate_plans(
        measured.costs, measured.fidelity, measured.context_tokens, backend.sublayers, config
    )
    n_finalists = config.plan_finalists
    if hurry:
        # Out of time: neither the shallowest nor the deepest, and only one is timed.
        plans = plans[1:4] or plans
        n_finalists = 1
    window = measured.text.window
    passes = max(1, len(plans) * -(-len(window) // config.plan_judge_block_tokens))
    done = 0

    def judged_one() -> None:
        nonlocal done
        done += 1
        span = _JUDGE_SHARE - _FIDELITY_SHARE
        report(_FIDELITY_SHARE + min(1.0, done / passes) * span)

    report(_FIDELITY_SHARE)
    # the prompt is in the cache
    judgements = judge(backend, window, plans, config.plan_judge_block_tokens, judged_one)
    finalists = [Finalist(j) for j in judgements]
    timed = _by_speed(measured, finalists, config)[:n_finalists]
    for n, (row, gamma) in enumerate(timed):
        timing = measure_round(
            backend,
            window,
            judgements[row].plan,
            gamma,
            _round_repeats(measured, gamma, config),
            clock=clock,
        )
        finalists[row] = Finalist(judgements[row], timing)
        report(_JUDGE_SHARE + (n + 1) / len(timed) * (1.0 - _JUDGE_SHARE))
    rows = [row for row, _ in timed]
    again = _judge_afresh(backend, measured, [judgements[row].plan for row in rows], config)
    for row, judgement in zip(rows, again, strict=False):
        finalists[row] = Finalist(judgement, finalists[row].timing)
    return finalists


def _judge_afresh(
    backend: Backend, measured: Measured, plans: Sequence[Plan], config: Config
) -> list[Judgement]:
    """Agreement of the finalists on the target's tokens after the window.

    They were chosen for how well they do on the window, so what they do there flatters them. Empty
    where time or context leave no room for this. The cache is left at the end of the prompt.
    """
    start, window = backend.n_past, list(measured.text.window)
    affordable = int(100.0 * config.measure_budget_seconds / measured.step_ms)
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


def _round_repeats(measured: Measured, gamma: int, config: Config) -> int:
    """How often rounds are timed: often enough for a median, within a tenth of the budget."""
    # two rounds of about two steps and a draft each, and some plain steps
    steps = 2 * (gamma + 2) + 4
    affordable = int(100.0 * config.measure_budget_seconds / (steps * measured.step_ms))
    return max(2, min(_ROUND_REPEATS, affordable))


def _by_speed(
    measured: Measured, finalists: Sequence[Finalist], config: Config
) -> list[tuple[int, int]]:
    """(row, γ) of the finalists that have a length, fastest first."""
    found = [(row, _best_length(measured, f, config)) for row, f in enumerate(finalists)]
    ranked = [(row, a) for row, a in found if a is not None]
    ranked.sort(key=lambda pair: pair[1].predicted_ratio, reverse=True)
    return [(row, a.draft.max_tokens) for row, a in ranked]


def _to_json(measured: Measured, finalists: Sequence[Finalist]) -> dict[str, Any]:
    return {
        "prompt": list(measured.text.prompt),
        "window": list(measured.text.window),
        "fidelity": measured.fidelity.to_json(),
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


def _from_json(data: dict[str, Any], n_sublayers: int) -> tuple[Text, Fidelity, list[Finalist]]:
    text = Text(tuple(int(t) for t in data["prompt"]), tuple(int(t) for t in data["window"]))
    fidelity = Fidelity.from_json(data["fidelity"], n_sublayers)
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
    return text, fidelity, finalists
