"""Measures what a decision rests on: latency, fidelity, joint agreement, rounds as they run.

As thorough as the model's speed allows within the budget.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ..backend import Backend
from ..config import Config
from ..decode.rollback import rewind
from ..errors import ContextError
from ..latency.costs import Costs
from ..latency.fidelity import (
    Fidelity,
    Text,
    count_heads,
    measure_fidelity,
    probed_indices,
    shorten,
    target_text,
)
from ..latency.profile import LatencyProfile
from ..latency.profiler import Progress, measure_latency
from ..latency.rounds import measure_round
from ..latency.timing import Clock
from ..latency.windows import windows_at
from ..records import GREEDY, Plan
from .acceptance import Judgement, judge
from .generators import KNAPSPEC, by_promise, propose
from .judged import Finalist, Measured, best_length

# Rounds timed per finalist, where the model is fast enough.
_ROUND_REPEATS = 7
# Shares of the progress bar at which latency, fidelity and judging end; then come real rounds.
_LATENCY_SHARE, _FIDELITY_SHARE, _JUDGE_SHARE = 0.4, 0.75, 0.9
# Levels of effort as shares of the configured window. Slow models go down the list.
_WINDOW_SHARES = (1.0, 0.8, 0.65, 0.5, 0.35)
_MIN_WINDOW_TOKENS = 12


def by_frequency(tokens: Sequence[int]) -> list[int]:
    """Each token once, the most frequent first; of equal ones the lower."""
    counts = Counter(tokens)
    return sorted(counts, key=lambda t: (-counts[t], t))


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
    # Rather few tokens for all sublayers than many for some: margins say much about few tokens, and
    # nothing about a neighbour.
    windows.append(_MIN_WINDOW_TOKENS)
    options = [Effort(window, 1) for window in windows]
    options += [Effort(_MIN_WINDOW_TOKENS, k) for k in range(2, most_stride + 1)]
    for effort in options:
        # What is never probed is hardly ever left out: worth half as much time again.
        whole = effort.probe_stride == 1 and effort.window_tokens == _MIN_WINDOW_TOKENS
        most_ms = config.measure_overrun * budget_ms if whole else budget_ms
        if effort.expected_ms(step_ms, token_ms, n_items, config) <= most_ms:
            return effort
    return options[-1]


def measure_all(
    backend: Backend,
    latency: LatencyProfile | None,
    known: Fidelity,
    keep: Callable[[LatencyProfile], None],
    calibration_tokens: Sequence[int],
    config: Config,
    progress: Progress | None,
    clock: Clock,
    policy: str = KNAPSPEC,
) -> tuple[Measured, list[Finalist], Fidelity]:
    """Latency unless it is known, fidelity of what is not in `known` near this context, joint
    agreement of the shortlist, and real rounds with the best of it; and the new counts alone.

    The cache is empty before and after.
    """
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

    backend.suggest_head(by_frequency(calibration_tokens))
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
        missing = [s for s in backend.sublayers if not known.covers(s.index, len(prompt))]
        windows = [
            (mode, able)
            for mode, able in windows_at(backend, len(prompt), config)
            if not all(known.covers(i, len(prompt), mode) for i in able)
        ]
        effort = choose_effort(
            step_ms,
            _token_ms(costs, len(prompt)),
            len(missing) + len(windows),
            budget_ms - spent_ms(),
            config,
        )
        heads = [n for n in backend.head_sizes if config.short_head and n in costs.short_heads]
        if heads:
            # before the text that it is judged on
            backend.prepare_head(heads[-1])
        text = target_text(
            backend,
            prompt,
            min(max(effort.window_tokens, config.plan_judge_tokens), window_room),
            report_time(_FIDELITY_SHARE),
        )

        def late() -> bool:
            # the estimate was wrong or the machine got busy: time to make do
            return spent_ms() > config.measure_overrun * budget_ms

        stride = effort.probe_stride
        if late():
            stride = max(stride, len(missing) // config.measure_min_probes)
        found = Fidelity()
        if missing or windows:
            found = measure_fidelity(
                backend,
                replace(text, window=text.window[: effort.window_tokens]),
                probed_indices(missing, stride),
                config.measure_block_tokens,
                windows=windows,
                report=report_time(_FIDELITY_SHARE),
                enough=late,
            )
        if heads:
            found = found.plus(count_heads(backend, text, heads))
        fidelity = known.plus(found)
        unprobed = sum(not item.probed for item in fidelity.agreements(backend.sublayers))
        notes = (
            *_shortened(text, effort.window_tokens, calibration_tokens, step_ms, config),
            *_interpolated(unprobed, len(backend.sublayers)),
            *fidelity.notes,
        )
        measured = Measured(costs, text, replace(fidelity, notes=notes))
        finalists = _finalists(
            backend, measured, config, clock, report, policy, hurry=spent_ms() > budget_ms
        )
    finally:
        rewind(backend, 0)
    report(1.0)
    return measured, finalists, found


def _shortened(
    text: Text, window_tokens: int, tokens: Sequence[int], step_ms: float, config: Config
) -> Iterator[str]:
    """What the model's speed, or the size of its context, took from the text."""
    if len(text.prompt) < min(config.measure_context_tokens, len(tokens)):
        yield f"measured at a context of {len(text.prompt)} tokens"
    if window_tokens < config.measure_window_tokens:
        yield f"shortened to {window_tokens} tokens: one step takes {step_ms:.0f} ms"


def _interpolated(unprobed: int, n: int) -> Iterator[str]:
    if unprobed:
        yield f"{n - unprobed} of {n} sublayers probed, the others interpolated"


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
    policy: str,
    *,
    hurry: bool,
) -> list[Finalist]:
    """Judge the shortlist, time the best of it. The cache is left at the end of the prompt."""
    share = 0.0 if hurry else config.dp_measure_share
    budget_ms = 1000.0 * share * config.measure_budget_seconds
    plans = propose(backend, measured, config, budget_ms, policy)
    n_finalists = config.plan_finalists
    if hurry:
        # Out of time: those that single sublayers promise most of, and only one is timed.
        plans = by_promise(measured, plans, backend.sublayers, config)[:3]
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
    fresh = _Fresh(backend, measured, config)
    timed: dict[int, float] = {}  # row -> predicted ratio
    for n in range(n_finalists if hurry else 2 * n_finalists):
        ranked = [r for r in _by_speed(measured, finalists, config) if r.row not in timed]
        # Beyond the usual number only what promises more than all that were timed.
        if not ranked or (n >= n_finalists and ranked[0].ratio <= max(timed.values())):
            break
        row, gamma, _ = ranked[0]
        timing = measure_round(
            backend,
            window,
            judgements[row].plan,
            gamma,
            _round_repeats(measured, gamma, config),
            clock=clock,
        )
        judgement = fresh.judge(judgements[row].plan) or judgements[row]
        finalists[row] = Finalist(judgement, timing)
        again = best_length(measured, finalists[row], config)
        timed[row] = 0.0 if again is None else again.predicted_ratio
        report(_JUDGE_SHARE + min(1.0, (n + 1) / n_finalists) * (1.0 - _JUDGE_SHARE))
    return finalists


class _Fresh:
    """Agreement of finalists on the target's tokens after the window.

    They were chosen for how well they do on the window, so what they do there flatters them. The
    cache is left at the end of the prompt.
    """

    def __init__(self, backend: Backend, measured: Measured, config: Config) -> None:
        self._backend = backend
        self._window = list(measured.text.window)
        self._block_tokens = config.plan_judge_block_tokens
        affordable = int(100.0 * config.measure_budget_seconds / measured.step_ms)
        room = backend.n_ctx - backend.n_past - len(self._window) - 1
        self._n = min(config.plan_fresh_tokens, affordable, room)
        self._tokens: list[int] = []

    def judge(self, plan: Plan) -> Judgement | None:
        """None where time or context leave no room for it."""
        if self._n < 2 * self._block_tokens:
            return None
        backend, start = self._backend, self._backend.n_past
        try:
            if self._tokens:
                # no new text: a short head keeps what it knows of when it got the tokens behind it
                for i in range(0, len(self._window), backend.max_verify_tokens):
                    backend.evaluate(self._window[i : i + backend.max_verify_tokens], None)
            else:
                self._tokens.append(backend.prefill(self._window, GREEDY).token)
                after = backend.n_past
                while len(self._tokens) < self._n:
                    self._tokens.append(backend.decode(self._tokens[-1], GREEDY).token)
                rewind(backend, after)
            return judge(backend, self._tokens, [plan], self._block_tokens)[0]
        finally:
            rewind(backend, min(start, backend.n_past))


def _round_repeats(measured: Measured, gamma: int, config: Config) -> int:
    """How often rounds are timed: often enough for a median, within a tenth of the budget."""
    # two rounds of about two steps and a draft each, and some plain steps
    steps = 2 * (gamma + 2) + 4
    affordable = int(100.0 * config.measure_budget_seconds / (steps * measured.step_ms))
    return max(2, min(_ROUND_REPEATS, affordable))


class _Ranked(NamedTuple):
    row: int
    gamma: int
    ratio: float


def _by_speed(measured: Measured, finalists: Sequence[Finalist], config: Config) -> list[_Ranked]:
    """The finalists that have a length, fastest first."""
    found = [(row, best_length(measured, f, config)) for row, f in enumerate(finalists)]
    ranked = [
        _Ranked(row, a.draft.max_tokens, a.predicted_ratio) for row, a in found if a is not None
    ]
    ranked.sort(key=lambda r: r.ratio, reverse=True)
    return ranked
