"""The first measurement of a model on a machine: seconds, not minutes.

Everything is a difference of whole passes, so it means the same on every backend and needs no hooks
in the library: a step with and without each kind of sublayer, passes of 1..9 tokens, and how often
the pick survives when one single sublayer is left out. Repetitions are interleaved, the first of
each is not counted, medians are kept with their spread.

A slow model gets less: first a shorter window and fewer repetitions, then only every k-th sublayer
is probed and the others are interpolated. The record says so. Nothing here decides anything.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..backend import Backend
from ..config import DEFAULTS, Config
from ..decode.rollback import rewind
from ..errors import ContextError
from ..records import Plan, Sampling

Clock = Callable[[], float]
# Share of the work that is done, 0..1.
Progress = Callable[[float], None]

GREEDY = Sampling()

# The beginning of a prompt (begin token, chat header) survives shortening, and so does its end.
_KEPT_HEAD_TOKENS = 8
_ROUND_PLAIN_STEPS = 4  # plain steps between timed rounds; the first one is not kept
_STEP_TOKENS = 3  # consecutive steps per sample; the first one pays for the change of graph
# Levels of effort as shares of the configured (window, repetitions). Slow models go down the list.
_LEVELS = ((1.0, 1.0), (0.8, 0.8), (0.65, 0.6), (0.5, 0.4), (0.35, 0.4), (0.25, 0.2))
_MIN_WINDOW_TOKENS = 12


@dataclass(frozen=True)
class Timing:
    """Median and quartiles of repeated measurements, in milliseconds."""

    median_ms: float
    low_ms: float
    high_ms: float
    samples: int

    @classmethod
    def of(cls, samples_ms: Sequence[float]) -> Timing:
        ordered = sorted(samples_ms)
        low, high = ordered[0], ordered[-1]
        if len(ordered) >= 4:
            low, _, high = statistics.quantiles(ordered, n=4, method="inclusive")
        return cls(statistics.median(ordered), low, high, len(ordered))


@dataclass(frozen=True)
class KindCost:
    """What the sublayers of one kind cost, from steps without half and without all of them."""

    count: int
    all_skipped: Timing
    half_skipped: Timing
    item_ms: float  # of one sublayer at the measured context, >= 0


@dataclass(frozen=True)
class ItemAgreement:
    """Share of the target's picks that survive leaving out one sublayer."""

    index: int
    agreement: float
    probed: bool  # False: interpolated between probed neighbours of its kind


@dataclass(frozen=True)
class Effort:
    """How much is measured. `probe_stride` k means every k-th sublayer of a kind."""

    window_tokens: int
    repeats: int
    probe_stride: int
    verify_sizes: tuple[int, ...]

    def expected_ms(self, step_ms: float, token_ms: float, n_items: int, config: Config) -> float:
        """Rough cost of it all if a pass of b tokens takes step_ms + b * token_ms."""
        blocks = -(-self.window_tokens // config.measure_block_tokens)
        window_pass = blocks * step_ms + self.window_tokens * token_ms
        judge_blocks = -(-self.window_tokens // config.plan_judge_block_tokens)
        judge_pass = judge_blocks * step_ms + self.window_tokens * token_ms
        probes = -(-n_items // self.probe_stride)
        rounds = (self.repeats + 1) * (
            5 * _STEP_TOKENS * step_ms + sum(step_ms + b * token_ms for b in self.verify_sizes)
        )
        finals = (
            config.plan_finalists
            * (self.repeats + 1)
            * (2 * config.draft_max_tokens * step_ms + config.draft_max_tokens * token_ms)
        )
        return (
            self.window_tokens * step_ms
            + rounds
            + (probes + 2) * window_pass
            + config.plan_shortlist * judge_pass
            + finals
        )


def choose_effort(
    step_ms: float, token_ms: float, n_items: int, budget_ms: float, verify_max: int, config: Config
) -> Effort:
    """The most thorough effort that fits the budget; the least one if none does."""
    every = tuple(range(1, verify_max + 1))
    few = tuple(b for b in every if b in (1, 2, 3, 5) or b == verify_max)
    levels = [
        (
            max(_MIN_WINDOW_TOKENS, round(share * config.measure_window_tokens)),
            max(1, round(repeat_share * config.measure_repeats)),
        )
        for share, repeat_share in _LEVELS
    ]
    options = [Effort(window, repeats, 1, every) for window, repeats in levels]
    most_stride = max(1, n_items // config.measure_min_probes)
    # The shortest window comes last of all: what it says about an item is coarse.
    window, repeats = levels[-2]
    options[-1:] = [Effort(window, repeats, k, few) for k in range(2, most_stride + 1)]
    window, repeats = levels[-1]
    options.append(Effort(window, repeats, most_stride, few))
    for effort in options:
        if effort.expected_ms(step_ms, token_ms, n_items, config) <= budget_ms:
            return effort
    return options[-1]


@dataclass(frozen=True)
class Profile:
    """One measurement. Times are at `context_tokens`; `window` are the target's own tokens."""

    context_tokens: int
    step: Timing
    kinds: dict[str, KindCost]
    verify: dict[int, Timing]  # tokens in one pass -> its time
    items: tuple[ItemAgreement, ...]
    prompt: tuple[int, ...]
    window: tuple[int, ...]  # inputs; the target's greedy token after input i is window[i + 1]
    # share of the window in which a pass of several tokens picks what single steps picked
    batch_agreement: float
    elapsed_ms: float
    budget_ms: float
    notes: tuple[str, ...] = field(default=())

    @property
    def spread(self) -> float:
        """Quartile distance of the full step relative to its median."""
        step = self.step
        return (step.high_ms - step.low_ms) / step.median_ms if step.median_ms > 0.0 else 0.0

    @property
    def blind(self) -> bool:
        """Whether no sublayer was seen to cost anything: then noise hid all there is."""
        return all(cost.item_ms == 0.0 for cost in self.kinds.values())

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Profile:
        """The inverse of to_json. Raises KeyError, TypeError or ValueError for anything else."""
        kinds = {
            kind: KindCost(
                int(cost["count"]),
                Timing(**cost["all_skipped"]),
                Timing(**cost["half_skipped"]),
                float(cost["item_ms"]),
            )
            for kind, cost in data["kinds"].items()
        }
        return cls(
            context_tokens=int(data["context_tokens"]),
            step=Timing(**data["step"]),
            kinds=kinds,
            verify={int(b): Timing(**t) for b, t in data["verify"].items()},
            items=tuple(ItemAgreement(**item) for item in data["items"]),
            prompt=tuple(int(t) for t in data["prompt"]),
            window=tuple(int(t) for t in data["window"]),
            batch_agreement=float(data["batch_agreement"]),
            elapsed_ms=float(data["elapsed_ms"]),
            budget_ms=float(data["budget_ms"]),
            notes=tuple(str(note) for note in data["notes"]),
        )


def measure(
    backend: Backend,
    calibration_tokens: Sequence[int],
    config: Config = DEFAULTS,
    *,
    progress: Progress | None = None,
    clock: Clock = time.perf_counter,
    keep_prompt: bool = False,
) -> Profile:
    """Measure a model whose cache is empty; the cache is empty again afterwards, come what may.

    With `keep_prompt` it holds the prompt (`Profile.prompt`) after success, for measuring on.
    Raises ContextError if the context has no room for the smallest measurement, ValueError if the
    cache is not empty or there is nothing to measure, Interrupted and NativeError from the backend.
    """
    if backend.n_past:
        raise ValueError("the measurement needs an empty cache")
    if not backend.sublayers:
        raise ValueError("this model has no sublayers to measure")
    smallest = _MIN_WINDOW_TOKENS + 6
    if len(calibration_tokens) < 2:
        raise ValueError("the measurement needs at least 2 calibration tokens")
    if backend.n_ctx < smallest:
        raise ContextError(
            f"measuring takes a context of {smallest} tokens, this one has {backend.n_ctx}; "
            "raise --ctx"
        )
    done = False
    try:
        measurement = _Measurement(backend, config, progress or (lambda _: None), clock)
        profile = measurement.run(calibration_tokens)
        done = True
        return profile
    finally:
        if not (done and keep_prompt):
            rewind(backend, 0)


class _Measurement:
    """The phases in order; each leaves the cache at the end of the prompt."""

    def __init__(self, backend: Backend, config: Config, progress: Progress, clock: Clock) -> None:
        self.backend = backend
        self.config = config
        self.clock = clock
        self.notes: list[str] = []
        self._progress = progress
        self._started = clock()
        self._expected_ms = 1000.0 * config.measure_budget_seconds

    def run(self, calibration_tokens: Sequence[int]) -> Profile:
        backend, config = self.backend, self.config
        budget_ms = 1000.0 * config.measure_budget_seconds
        prompt, first, step_ms, token_ms = self._prepare(calibration_tokens, budget_ms)
        context = len(prompt)
        verify_max = min(
            config.measure_verify_max, backend.max_verify_tokens, backend.n_ctx - context - 1
        )
        effort = choose_effort(
            step_ms, token_ms, len(backend.sublayers), budget_ms - self._elapsed_ms(), verify_max,
            config,
        )  # fmt: skip
        self._expected_ms = self._elapsed_ms() + effort.expected_ms(
            step_ms, token_ms, len(backend.sublayers), config
        )
        window = self._window(first, min(effort.window_tokens, backend.n_ctx - context - 1))
        if len(window) < config.measure_window_tokens or effort.repeats < config.measure_repeats:
            self.notes.append(
                f"shortened to {len(window)} tokens and {effort.repeats} repetitions: one step "
                f"takes {step_ms:.0f} ms"
            )
        step, kinds = self._steps(window, effort.repeats)
        verify = self._verifications(window, effort)
        items, batch_agreement = self._items(window, effort.probe_stride)
        return Profile(
            context_tokens=context,
            step=step,
            kinds=kinds,
            verify=verify,
            items=items,
            prompt=tuple(prompt),
            window=tuple(window),
            batch_agreement=batch_agreement,
            elapsed_ms=self._elapsed_ms(),
            budget_ms=budget_ms,
            notes=tuple(self.notes),
        )

    def _prepare(
        self, tokens: Sequence[int], budget_ms: float
    ) -> tuple[list[int], int, float, float]:
        """Prefill as much of the prompt as its speed allows.

        Returns the prompt used, the pick after it, ms of a step, and ms per further token.
        """
        backend, config = self.backend, self.config
        room = backend.n_ctx - _MIN_WINDOW_TOKENS - 2
        longest = min(config.measure_context_tokens, len(tokens), room)
        shortest = min(config.measure_min_context_tokens, longest)
        trial = list(tokens[: max(1, shortest // 2)])
        backend.prefill(trial, GREEDY)  # loads the weights into memory and is not counted
        rewind(backend, 0)
        passes_ms = self._time(partial(backend.prefill, trial, GREEDY))
        steps_ms = [self._time(partial(backend.decode, trial[-1], GREEDY)) for _ in range(3)]
        step_ms = min(steps_ms)
        token_ms = max(0.0, passes_ms - step_ms) / len(trial)
        rewind(backend, 0)
        affordable = longest
        if token_ms > 0.0:
            affordable = int(0.15 * budget_ms / token_ms)
        length = max(shortest, min(longest, affordable))
        prompt = shorten(tokens, length)
        if length < min(config.measure_context_tokens, len(tokens)):
            self.notes.append(f"measured at a context of {length} tokens")
        pick = backend.prefill(prompt, GREEDY)
        self._report()
        return prompt, pick.token, step_ms, token_ms

    def _window(self, first: int, n_tokens: int) -> list[int]:
        """The target's own greedy tokens after the prompt, through an end token if need be."""
        start = self.backend.n_past
        window = [first]
        while len(window) < n_tokens:
            window.append(self.backend.decode(window[-1], GREEDY).token)
            self._report()
        rewind(self.backend, start)
        return window

    def _steps(self, window: Sequence[int], repeats: int) -> tuple[Timing, dict[str, KindCost]]:
        """Time of single steps with nothing, half, and all of each kind left out."""
        backend = self.backend
        start, n = backend.n_past, len(backend.sublayers)
        members: dict[str, list[int]] = {}
        for i, sublayer in enumerate(backend.sublayers):
            members.setdefault(sublayer.kind.value, []).append(i)
        variants: dict[tuple[str, str], Plan | None] = {("", "full"): None}
        for kind, indices in members.items():
            variants[kind, "all"] = Plan.skipping(n, indices)
            variants[kind, "half"] = Plan.skipping(n, indices[1::2] or indices)
        samples: dict[tuple[str, str], list[float]] = {name: [] for name in variants}
        # of each repetition the faster step: what else the machine does only ever adds time
        fastest: dict[tuple[str, str], list[float]] = {name: [] for name in variants}
        for repeat in range(repeats + 1):
            for name, plan in variants.items():
                times = [
                    self._time(partial(backend.decode, token, GREEDY, plan))
                    for token in window[:_STEP_TOKENS]
                ][1:]
                rewind(backend, start)
                self._report()
                if repeat > 0:
                    samples[name] += times
                    fastest[name].append(min(times))
            if repeat > 0 and self._late():
                break

        def saved_ms(name: tuple[str, str]) -> float:
            # Paired within a repetition, so that a slow drift of the machine cancels out.
            pairs = zip(fastest["", "full"], fastest[name], strict=True)
            return statistics.median(full - left for full, left in pairs)

        kinds = {}
        for kind, indices in members.items():
            halves = len(indices[1::2] or indices)
            # Least squares through the full step: saved = items left out * item_ms.
            points = (
                (len(indices), saved_ms((kind, "all"))),
                (halves, saved_ms((kind, "half"))),
            )
            item_ms = sum(k * saved for k, saved in points) / sum(k * k for k, _ in points)
            kinds[kind] = KindCost(
                len(indices),
                Timing.of(samples[kind, "all"]),
                Timing.of(samples[kind, "half"]),
                max(0.0, item_ms),
            )
        return Timing.of(samples["", "full"]), kinds

    def _verifications(self, window: Sequence[int], effort: Effort) -> dict[int, Timing]:
        """Time of one pass of the full model over b tokens, for each b."""
        backend, start = self.backend, self.backend.n_past
        sizes = [b for b in effort.verify_sizes if b <= len(window)]
        samples: dict[int, list[float]] = {b: [] for b in sizes}
        for repeat in range(effort.repeats + 1):
            for b in sizes:
                ms = self._time(partial(backend.verify, list(window[:b]), GREEDY))
                rewind(backend, start)
                if repeat > 0:
                    samples[b].append(ms)
                self._report()
            if repeat > 0 and self._late():
                break
        return {b: Timing.of(times) for b, times in samples.items()}

    def _items(self, window: Sequence[int], stride: int) -> tuple[tuple[ItemAgreement, ...], float]:
        """Agreement of each single skip with the full model on the window."""
        backend = self.backend
        n = len(backend.sublayers)
        if self._late():
            stride = max(stride, n // self.config.measure_min_probes)
        chosen = _probed(backend, stride)
        if len(chosen) < n:
            self.notes.append(f"{len(chosen)} of {n} sublayers probed, the others interpolated")
        plans: list[Plan | None] = [None, *(Plan.skipping(n, [i]) for i in chosen)]
        first, picks, _ = evaluate_plans(
            backend,
            window,
            plans,
            self.config.measure_block_tokens,
            report=self._report,
            enough=self._late,
        )
        if first:
            self.notes.append(f"items judged on {len(window) - first} tokens: out of time")
        target = picks[0, first:]
        agreement = (picks[1:, first:] == target).mean(axis=1)
        items = _interpolated(backend, dict(zip(chosen, agreement.tolist(), strict=True)))
        own = np.array(window[first + 1 :], dtype=np.int32)  # i32 [window - first - 1]
        batch_agreement = float((target[:-1] == own).mean()) if own.size else 1.0
        return items, batch_agreement

    def _time(self, call: Callable[[], object]) -> float:
        start = self.clock()
        call()
        return 1000.0 * (self.clock() - start)

    def _elapsed_ms(self) -> float:
        return 1000.0 * (self.clock() - self._started)

    def _late(self) -> bool:
        """Whether the estimate was wrong or the machine got busy, and it is time to make do."""
        allowed_ms = 1000.0 * self.config.measure_budget_seconds * self.config.measure_overrun
        return self._elapsed_ms() > allowed_ms

    def _report(self) -> None:
        # The plan of work is an estimate, so the bar waits just short of the end.
        self._progress(min(0.99, self._elapsed_ms() / max(1.0, self._expected_ms)))


def shorten(tokens: Sequence[int], length: int) -> list[int]:
    """Cut the middle out of a prompt, so that its header and its end remain."""
    if length >= len(tokens):
        return list(tokens)
    head = min(_KEPT_HEAD_TOKENS, length // 2)
    return [*tokens[:head], *tokens[len(tokens) - (length - head) :]]


def evaluate_plans(
    backend: Backend,
    window: Sequence[int],
    plans: Sequence[Plan | None],
    block_tokens: int,
    *,
    report: Callable[[], None] = lambda: None,
    enough: Callable[[], bool] = lambda: False,
) -> tuple[int, NDArray[np.int32], NDArray[np.float32]]:
    """Greedy picks i32 [plans, window] and their probabilities f32 [plans, window].

    The window is walked from its end in blocks, and every block of a plan is computed behind keys
    of the full model, as a draft is; going backwards, nothing has to be restored in between. The
    cache is left where it was. `enough` is asked after each block and may end it: only columns from
    the first returned value on are computed.
    """
    start = backend.n_past
    most = max(1, min(block_tokens, backend.max_verify_tokens))
    blocks = -(-len(window) // most)
    block = -(-len(window) // blocks)  # of about equal length, so that any one of them says much
    picks = np.zeros((len(plans), len(window)), dtype=np.int32)
    probabilities = np.zeros((len(plans), len(window)), dtype=np.float32)
    starts = range(0, len(window), block)
    try:
        for i in starts[:-1]:
            backend.evaluate(list(window[i : i + block]), None)
        for i in reversed(starts):
            inputs = list(window[i : i + block])
            for row, plan in enumerate(plans):
                rewind(backend, start + i)
                picks[row, i : i + len(inputs)], probabilities[row, i : i + len(inputs)] = (
                    backend.evaluate(inputs, plan)
                )
                report()
            if enough():
                break
    finally:
        rewind(backend, min(start, backend.n_past))
    return i, picks, probabilities


def _probed(backend: Backend, stride: int) -> list[int]:
    """Every k-th sublayer of each kind, and always its first and last two: they differ most."""
    by_kind: dict[str, list[int]] = {}
    for i, sublayer in enumerate(backend.sublayers):
        by_kind.setdefault(sublayer.kind.value, []).append(i)
    chosen: set[int] = set()
    for indices in by_kind.values():
        chosen.update(indices[::stride])
        if stride > 1:
            chosen.update([*indices[:2], *indices[-2:]])
    return sorted(chosen)


def _interpolated(backend: Backend, probed: dict[int, float]) -> tuple[ItemAgreement, ...]:
    """Linear interpolation over the layers, within each kind."""
    items = []
    for i, sublayer in enumerate(backend.sublayers):
        if i in probed:
            items.append(ItemAgreement(i, probed[i], True))
            continue
        known = [j for j in probed if backend.sublayers[j].kind is sublayer.kind]
        value = float(np.interp(i, known, [probed[j] for j in known]))
        items.append(ItemAgreement(i, value, False))
    return tuple(items)


@dataclass(frozen=True)
class RoundTiming:
    """A round as the loop runs it, and plain steps at the same place, interleaved."""

    draft_tokens: int
    draft_step_ms: float  # one drafted token, switching graphs and cutting the cache included
    verify_ms: float  # the pass over draft_tokens + 1
    plain_step_ms: float


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
