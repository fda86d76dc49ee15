"""Measures what passes cost on this machine, at contexts from short to the limit.

Only whole passes are timed, with sublayers left out or not, so it means the same on every backend,
launch overhead included. Long contexts are reached by marking cells as filled; no prompt is
computed.

A noisy, drifting machine is met like this. A visit to a context begins and ends with plain steps
and times other passes in between, each relative to them; of the passes of one visit the fastest
counts, since other load only adds time; the first pass of a graph, which is built in it, never
does. A visit whose plain steps changed by more than `profile_visit_drift` is thrown away, and over
the visits the median is taken (timing.Timing states the outlier rule). The ratios are multiplied
with the usual plain step, not the fastest, at their context; visits to all contexts are
interleaved, so that what changed for all of them at once can be told from what a context costs
(regression.levels_without_drift). The time budget goes first to what a prediction cannot do
without, then to whatever reduces the expected error of predictions most per second.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..backend import Backend
from ..config import DEFAULTS, Config
from ..decode.rollback import rewind
from ..errors import ContextError, Interrupted
from ..records import GREEDY, Mode, Plan
from .classes import layer_classes
from .costs import CELLS_PER_STEP, SAMPLE_PRIOR, Costs
from .profile import LatencyProfile, Sample, plan_with
from .regression import levels_without_drift
from .timing import Clock, Timing, without_outliers
from .windows import windows_at

# Share of the work that is done, 0..1.
Progress = Callable[[float], None]

MIN_CONTEXT_TOKENS = 16  # smallest context that can be measured
INTERRUPTED = "the measurement was interrupted"  # a note

_NARROW = tuple(range(1, 17))
_WIDE = (24, 32)
# Short drafts decide; what lies between is interpolated. The most telling come first, in case that
# time runs out.
_CORE_WIDTHS = (4, 8, 2, 6, 3, 5)
_KIND_WIDTHS = (4, 8, 16)  # at which attention and MLP are told apart
_VERIFY_CONTEXTS = 4  # at which all widths are timed, at most
# Shares of the sublayers that random plans leave out; there is one plan of each at every context.
_MIXTURE_SHARES = (0.15, 0.3, 0.5)
# Expected relative error of a time that was not measured: without anything to go by, of a pass
# wider than any that was timed there, between neighbours.
_UNKNOWN = 0.5
_BEYOND = 0.2
_BETWEEN = 0.08
# A time seen fewer times than _SETTLED_SAMPLES, and further than this from what others suggest, is
# looked at again first.
_SURPRISE = 0.08
_SETTLED_SAMPLES = 3
# Expected error below which more repetitions are not worth anybody's time.
_GOOD_ERROR = 0.003
_PASSES_FAST, _PASSES_SLOW = 3, 1  # timed passes of one visit, for passes under and over a bound
_FAST_MS, _SLOW_MS = 40.0, 400.0
_MAX_VISIT_TASKS = 8
_ASSUMED_TOKEN_SHARE = 0.5  # cost of a further token in a pass, in steps, before it is known


@dataclass(eq=False)
class _Task:
    """One kind of pass at one context."""

    context: int
    width: int = 1
    skipped: tuple[int, ...] = ()
    windowed: tuple[int, ...] = ()
    window: Mode | None = None
    head: bool = True
    head_rows: int = 0  # of a short head
    importance: float = 1.0
    core: bool = False
    plan: Plan | None = None
    ratios: list[float] = field(default_factory=list)  # to a plain step, one per visit
    raw_ms: list[float] = field(default_factory=list)

    @property
    def is_step(self) -> bool:
        return self.width == 1 and self.head and self.plan is None


def context_grid(n_ctx: int, room: int, config: Config = DEFAULTS) -> list[int]:
    """Context lengths to measure at: geometric from `profile_min_context_tokens`, the last one as
    long as `room` further tokens allow.

    Every other one lies just below a multiple of CELLS_PER_STEP instead of on it: the cells that a
    pass reads come in such steps, and only so can their cost be told from that of the tokens.
    """
    most = n_ctx - room
    least = min(config.profile_min_context_tokens, max(1, most))
    grid = []
    size = least
    while size < most / 1.4:
        grid.append(size)
        size *= 2
    grid.append(most)
    return [
        c - room if n % 2 and c % CELLS_PER_STEP == 0 and c > 2 * room else c
        for n, c in enumerate(grid[:-1])
    ] + grid[-1:]


def measure_latency(
    backend: Backend,
    *,
    budget_seconds: float,
    tokens: Sequence[int] = (),
    limit_tokens: int | None = None,
    max_width: int | None = None,
    config: Config = DEFAULTS,
    progress: Progress | None = None,
    unfinished: Callable[[LatencyProfile], None] | None = None,
    clock: Clock = time.perf_counter,
) -> LatencyProfile:
    """Time passes of a model whose cache is empty; it is empty again afterwards, come what may.

    `tokens` are fed (text, so that experts are chosen as they will be); without them pseudo-random
    ids are. `limit_tokens` is the longest context to measure at (None: the backend's).
    `unfinished` takes what there is when an interrupt ends it, before that is raised again, unless
    not even a plain step was timed.
    Raises ContextError where the context has no room for the smallest measurement, ValueError if
    the cache is not empty or the model has no sublayers, Interrupted and NativeError from the
    backend.
    """
    if backend.n_past:
        raise ValueError("the measurement needs an empty cache")
    if not backend.sublayers:
        raise ValueError("this model has no sublayers to measure")
    widest = min(max_width or _WIDE[-1], backend.max_verify_tokens)
    n_ctx = min(backend.n_ctx, limit_tokens or backend.n_ctx)
    if n_ctx < MIN_CONTEXT_TOKENS:
        raise ContextError(
            f"measuring takes a context of {MIN_CONTEXT_TOKENS} tokens, this one has {n_ctx}; "
            "raise --ctx"
        )
    try:
        profiler = _Profiler(
            backend,
            min(widest, max(1, n_ctx // 4)),
            widest,
            n_ctx,
            budget_seconds,
            tokens,
            config,
            progress or (lambda _: None),
            clock,
        )
        try:
            return profiler.run()
        except (Interrupted, KeyboardInterrupt):
            found = profiler.unfinished()
            if unfinished is not None and found is not None:
                unfinished(found)
            raise
    finally:
        rewind(backend, 0)


class _Profiler:
    def __init__(
        self,
        backend: Backend,
        widest: int,
        asked_width: int,
        n_ctx: int,
        budget_seconds: float,
        tokens: Sequence[int],
        config: Config,
        progress: Progress,
        clock: Clock,
    ) -> None:
        self.backend = backend
        self.config = config
        self.clock = clock
        self.budget_seconds = budget_seconds
        self.widest = widest
        self.asked_width = asked_width
        self.n_ctx = n_ctx
        self._progress = progress
        self._started = self._since = clock()
        self._shown = 0.0
        self._notes: list[str] = []
        self._thrown_away = 0
        # Deterministic, so that two profiles of a machine differ by its noise only.
        self._random = random.Random(20)
        vocabulary = range(backend.n_vocab)
        self._tokens = list(tokens) or self._random.choices(vocabulary, k=64)
        while len(self._tokens) < 2 * widest + 8:
            self._tokens += self._tokens
        self.classes = layer_classes(
            backend.sublayers, backend.traits, config.profile_classes_per_kind
        )
        self._steps: dict[int, _Task] = {}
        self._references: dict[int, list[float]] = {}  # usual step of each visit, ms
        self._visits: list[tuple[float, int, float]] = []  # (seconds, context, usual step in ms)
        self._tasks: list[_Task] = []
        self._token_share = _ASSUMED_TOKEN_SHARE
        self._offset = 0  # of the tokens that are fed

    # -- what there is to measure ------------------------------------------------------------------

    def run(self) -> LatencyProfile:
        room = max(self.widest, _PASSES_FAST + 1) + 2
        grid = context_grid(self.n_ctx, room, self.config)
        self._grid = self._affordable(grid)
        self._plan_tasks(self._grid)
        while (visit := self._next_visit()) is not None:
            self._visit(*visit)
            self._report()
        self._close_notes()
        self._progress(1.0)
        return self._profile(self._notes)

    def unfinished(self) -> LatencyProfile | None:
        """What the visits so far make, without a claim to cover anything."""
        if not self._visits:
            return None
        profile = self._profile([*self._notes, INTERRUPTED])
        return replace(profile, limit_tokens=profile.contexts[-1], asked_tokens=0, asked_width=0)

    def _profile(self, notes: Sequence[str]) -> LatencyProfile:
        return LatencyProfile(
            n_sublayers=len(self.backend.sublayers),
            classes=self.classes,
            limit_tokens=self._grid[-1],
            samples=tuple(self._samples()),
            settings=dict(getattr(self.backend, "settings", {})),
            budget_seconds=self.budget_seconds,
            elapsed_seconds=self.clock() - self._started,
            measured_at=time.time(),
            notes=tuple(notes),
            asked_tokens=self.n_ctx,
            asked_width=self.asked_width,
        )

    def _affordable(self, grid: list[int]) -> list[int]:
        """Look at both ends once; shorten the grid where its end would eat the whole budget."""
        first_ms = self._glance(grid[0])
        if first_ms > _SLOW_MS:
            # It may have read the weights from a disk: loading, not measuring; or was disturbed.
            first_ms = min(first_ms, self._glance(grid[0]))
        self._since = self.clock()
        self._estimates = [(grid[0], first_ms)]
        left_ms = 1000.0 * (self.budget_seconds - self._elapsed())
        # a step at the other end takes no less
        if len(grid) > 1 and 2.0 * first_ms * self._core_steps() > 3.0 * left_ms:
            self._notes.append(
                f"a step takes {first_ms:.0f} ms, too long for the {self._seconds()} there are: "
                f"costs beyond {grid[0]} tokens are extrapolated"
            )
            return grid[:1]
        note = ""
        while len(grid) > 1:
            last_ms = self._glance(grid[-1])
            if last_ms > _SLOW_MS:
                last_ms = min(last_ms, self._glance(grid[-1]))  # disturbed, or really that slow
            self._estimates = [(grid[0], first_ms), (grid[-1], last_ms)]
            core_ms = sum(self._step_estimate(c) * self._core_steps() for c in {grid[0], grid[-1]})
            left_ms = 1000.0 * (self.budget_seconds - self._elapsed())
            if core_ms <= 1.5 * left_ms or len(grid) == 2 and core_ms <= 3.0 * left_ms:
                break
            # one note for all that is left out, with the shortest of them
            note = (
                f"a context of {grid[-1]} tokens takes {last_ms:.0f} ms a step, too long for the "
                f"{self._seconds()} there are: costs beyond {grid[-2]} tokens are extrapolated"
            )
            del grid[-1]
        if note:
            self._notes.append(note)
        return grid

    def _seconds(self) -> str:
        """The budget for people: often only a share of what was asked for."""
        return f"{self.budget_seconds:.{1 if self.budget_seconds < 10.0 else 0}f} s"

    def _glance(self, context: int) -> float:
        """One plain step at a context, in ms; also brings weights and cells into memory."""
        rewind(self.backend, 0)
        self.backend.fill(context)
        times = [self._time_decode(None, 0)]
        if times[0] < _SLOW_MS:
            times += [self._time_decode(None, 1), self._time_decode(None, 2)]
        rewind(self.backend, context)
        return min(times[1:] or times)

    def _core_steps(self) -> float:
        """Rough cost of what is measured first at an end of the grid, in its plain steps."""
        drafts = 2 * (2 + 1.5 * len(self.classes) + len(_MIXTURE_SHARES))
        widths = [b for b in _CORE_WIDTHS if b <= self.widest]
        return drafts + 2 * sum(1 + _ASSUMED_TOKEN_SHARE * (b - 1) for b in widths)

    def _step_estimate(self, context: int) -> float:
        """Expected time of a plain step, from what was seen of it so far, in ms."""
        known = [(c, min(refs)) for c, refs in sorted(self._references.items()) if refs]
        known = known if len(known) > 1 else self._estimates
        (c0, t0), (c1, t1) = known[0], known[-1]
        for (a, ta), (b, tb) in zip(known, known[1:], strict=False):
            if a <= context <= b:
                (c0, t0), (c1, t1) = (a, ta), (b, tb)
        if c1 == c0:
            return t0
        return max(0.2 * t0, t0 + (t1 - t0) * (context - c0) / (c1 - c0))

    def _plan_tasks(self, grid: list[int]) -> None:
        n = len(self.backend.sublayers)
        ends = {grid[0], grid[-1]}
        middle = {grid[len(grid) // 2]}
        stride = max(1, math.ceil((len(grid) - 1) / (_VERIFY_CONTEXTS - 1)))
        curves = set(grid[::-stride]) | ends
        mixtures = [
            tuple(sorted(self._random.sample(range(n), max(1, round(share * n)))))
            for share in _MIXTURE_SHARES
        ]
        for context in grid:
            core = context in ends | middle
            weight = 1.5 if context in ends else 1.0
            step = _Task(context, importance=2.0 * weight, core=True)
            self._steps[context] = step
            self._references[context] = []
            self._tasks.append(step)
            plans = self._class_plans() + mixtures
            for skipped in dict.fromkeys(plans):
                self._add(context, skipped=skipped, importance=weight, core=core)
            for members, mode in self._windows(context):
                # once for each, so that it can be offered at all
                core = context == grid[-1]
                self._add(context, windowed=members, window=mode, importance=weight, core=core)
            if context in ends:
                self._add(context, head=False, importance=0.5, core=context == grid[0])
                for n_rows in self._short_heads():
                    core = context == grid[0]
                    self._add(context, head_rows=n_rows, importance=weight, core=core)
            if context not in curves:
                continue
            for width in dict.fromkeys((*_CORE_WIDTHS, *_NARROW[1:], *_WIDE)):
                if width <= self.widest:
                    narrow = width <= 9
                    self._add(
                        context,
                        width=width,
                        importance=(1.0 if narrow else 0.15) * weight,
                        core=context in ends and width in _CORE_WIDTHS,
                    )
            if context in ends:
                for members in self._by_kind():
                    for width in _KIND_WIDTHS:
                        if width <= self.widest and len(members) < n:
                            self._add(context, width=width, skipped=members, importance=0.1)

    def _class_plans(self) -> list[tuple[int, ...]]:
        """All of a class, and every second of it, left out."""
        n = len(self.backend.sublayers)
        plans = []
        for cls in self.classes:
            half = cls.members[1::2]
            plans += [p for p in (cls.members, half) if 0 < len(p) < n]
        return plans

    def _short_heads(self) -> tuple[int, ...]:
        return self.backend.head_sizes if self.config.short_head else ()

    def _windows(self, context: int) -> list[tuple[tuple[int, ...], Mode]]:
        """Each class of attention under each window that leaves most of the context out."""
        return [
            (cls.members, mode)
            for mode, able in windows_at(self.backend, context, self.config)
            for cls in self.classes
            if set(cls.members) <= set(able)
        ]

    def _by_kind(self) -> list[tuple[int, ...]]:
        kinds: dict[str, list[int]] = {}
        for i, sublayer in enumerate(self.backend.sublayers):
            kinds.setdefault(sublayer.kind.value, []).append(i)
        return [tuple(members) for members in kinds.values()]

    def _add(self, context: int, **settings: Any) -> None:
        task = _Task(context, **settings)
        n = len(self.backend.sublayers)
        task.plan = plan_with(n, task.skipped, task.windowed, task.window, task.head_rows)
        self._tasks.append(task)

    # -- what comes next ---------------------------------------------------------------------------

    def _next_visit(self) -> tuple[int, list[_Task]] | None:
        """The context to visit and what to time there; None when time or tasks are used up."""
        left_ms = 1000.0 * (self.budget_seconds - self._elapsed())
        missing = [t for t in self._tasks if t.core and not t.ratios]
        if missing:
            # Even what is indispensable ends some time: later contexts are left out first.
            left_ms += 1000.0 * (self.config.profile_overrun - 1.0) * self.budget_seconds
            needed = self._indispensable(missing)
            if left_ms <= 0.0:
                # on a starved machine even that has an end, but for a step and a wider pass
                most_ms = 1000.0 * self.config.profile_overrun * self.budget_seconds
                if left_ms <= -most_ms:
                    needed = [t for t in needed if not t.skipped]
                if not needed:
                    return None
                missing = needed
            missing = [*needed, *(t for t in missing if t not in needed)]
            context = missing[0].context
            tasks = [t for t in missing if t.context == context][:_MAX_VISIT_TASKS]
            if left_ms > 0.0:
                tasks = tasks[: self._how_many(context, tasks, left_ms)]
                if not needed and self._visit_ms(context, tasks) > left_ms:
                    return None
            return context, tasks
        surprises = self._surprises()
        rated = [
            (self._gain(t, surprises.get(t, 0.0)), t)
            for t in self._tasks
            if not t.is_step or len(t.ratios) < 3
        ]
        rated = [(gain, t) for gain, t in rated if gain > 0.0]
        affordable = [r for r in rated if self._visit_ms(r[1].context, [r[1]]) <= left_ms]
        if not affordable:
            return None
        best = max(affordable, key=lambda r: r[0])
        context = best[1].context
        chosen: list[_Task] = []
        here = sorted((r for r in affordable if r[1].context == context), key=lambda r: -r[0])
        for gain, task in here[:_MAX_VISIT_TASKS]:
            fits = self._visit_ms(context, [*chosen, task]) <= left_ms
            if fits and gain >= 0.2 * best[0]:
                chosen.append(task)
        return context, chosen

    def _how_many(self, context: int, tasks: Sequence[_Task], most_ms: float) -> int:
        """How many of the tasks fit one visit of so many ms; at least one."""
        for n in range(2, len(tasks) + 1):
            if self._visit_ms(context, tasks[:n]) > most_ms:
                return n - 1
        return len(tasks)

    def _indispensable(self, missing: Sequence[_Task]) -> list[_Task]:
        """What a model cannot be fitted without: a step, one pass of several tokens, and each class
        left out somewhere. The pass comes early: without it nothing can be said about a draft."""
        seen = [t for t in self._tasks if t.ratios]
        covered = {i for t in seen if t.width == 1 for i in t.skipped}
        needed = []
        if not any(t.is_step for t in seen):
            needed += [t for t in missing if t.is_step][:1]
        if not any(t.width > 1 for t in seen):
            needed += [t for t in missing if t.width > 1][:1]
        for cls in self.classes:
            if not covered & set(cls.members):
                needed += [t for t in missing if t.skipped == cls.members][:1]
        return needed

    def _surprises(self) -> dict[_Task, float]:
        """Relative distance, by task, of times seen once or twice from what all others suggest.

        Either the machine was disturbed or the cost is odd; both are worth another look.
        """
        found: dict[_Task, float] = {}
        costs = Costs(self._profile([]))
        levels = self._levels()
        curves: dict[int, list[_Task]] = {}
        for task in self._tasks:
            if task.ratios and task.head and task.plan is None:
                curves.setdefault(task.context, []).append(task)
        for task in self._tasks:
            if not 0 < len(task.ratios) < _SETTLED_SAMPLES or not task.head:
                continue
            if task.width == 1:
                if task.plan is not None:
                    ms = levels[task.context] * min(task.ratios)
                    found[task] = abs(ms / costs.draft_ms(task.plan, task.context) - 1.0)
            elif task.plan is None:
                others = [t for t in curves[task.context] if t is not task]
                below = [t for t in others if t.width < task.width]
                above = [t for t in others if t.width > task.width]
                if below and above:
                    low = max(below, key=lambda t: t.width)
                    high = min(above, key=lambda t: t.width)
                    share = (task.width - low.width) / (high.width - low.width)
                    between = (1.0 - share) * min(low.ratios) + share * min(high.ratios)
                    found[task] = abs(min(task.ratios) / between - 1.0)
        return {task: d for task, d in found.items() if d > _SURPRISE}

    def _gain(self, task: _Task, surprise: float) -> float:
        """Expected reduction of the squared relative error of predictions, per ms of measuring."""
        single = 1.25 * SAMPLE_PRIOR
        if not task.ratios:
            before, after = self._prior(task) ** 2, single**2
        else:
            timing = Timing.of(task.ratios)
            before = max(timing.relative_error(SAMPLE_PRIOR), 0.5 * surprise) ** 2
            if before <= _GOOD_ERROR**2:
                return 0.0
            after = before * len(task.ratios) / (len(task.ratios) + 1)
        gain = task.importance * (before - after)
        return gain / max(1e-6, self._visit_ms(task.context, [task]))

    def _prior(self, task: _Task) -> float:
        """Expected relative error of a time that was not measured."""
        if task.core:
            return _UNKNOWN
        if task.width > 1 and not task.skipped:
            widest = max(
                (t.width for t in self._tasks if t.context == task.context and t.ratios), default=1
            )
            if task.width > widest:
                return _BEYOND
        return _BETWEEN

    def _task_ms(self, task: _Task) -> float:
        if task.raw_ms:
            return min(task.raw_ms)
        share = 1.0 - len(task.skipped) / (len(self.backend.sublayers) + 1)
        return self._step_estimate(task.context) * share * self._growth(task.width)

    def _growth(self, width: int) -> float:
        return 1.0 + self._token_share * (width - 1)

    def _visit_ms(self, context: int, tasks: Sequence[_Task]) -> float:
        step_ms = self._step_estimate(context)
        # plain steps before and after
        passes = [step_ms, step_ms, *(self._task_ms(t) for t in tasks if not t.is_step)]
        return sum(ms * (1 + _timed_passes(ms)) for ms in passes)

    # -- measuring ---------------------------------------------------------------------------------

    def _visit(self, context: int, tasks: Sequence[_Task]) -> None:
        # other text in every visit, so that no choice of experts speaks for all
        self._offset += 7
        if self.backend.n_past > context:
            rewind(self.backend, 0)
        self.backend.fill(context)
        usual: list[float] = []
        before = self._fastest(self._steps[context], usual)
        found: list[tuple[_Task, float]] = []
        for task in tasks:
            # the machine may have become slower than a moment ago
            if found and self._elapsed() > self.config.profile_overrun * self.budget_seconds:
                break
            if not task.is_step:
                found.append((task, self._fastest(task)))
                self._report()
        # one visit of plain steps only says all there is to say
        after = self._fastest(self._steps[context], usual) if found else before
        if max(before, after) > (1.0 + self.config.profile_visit_drift) * min(before, after):
            # Even a machine that never rests gives what it can, and in time.
            self._thrown_away += 1
            most = self.config.profile_max_thrown_away
            if self._thrown_away <= most and self._elapsed() < self.budget_seconds:
                return
        reference = math.sqrt(before * after)
        usual_ms = statistics.median(usual)
        self._references[context].append(usual_ms)
        self._visits.append((self._elapsed(), context, usual_ms))
        self._steps[context].ratios.append(1.0)
        self._steps[context].raw_ms.append(reference)
        for task, ms in found:
            task.ratios.append(ms / reference)
            task.raw_ms.append(ms)
            if task.width == 8 and not task.skipped:
                self._token_share = max(0.05, (ms / reference - 1.0) / 7.0)

    def _fastest(self, task: _Task, all_ms: list[float] | None = None) -> float:
        """The fastest of a few passes, the first of which is not counted; `all_ms` takes all that
        are. Back at the context."""
        context = task.context
        first = self._time(task, 0)
        count = _timed_passes(first)
        times = [self._time(task, 1 + i) for i in range(count)]
        rewind(self.backend, context)
        if all_ms is not None:
            all_ms += times
        return min(times)

    def _time(self, task: _Task, offset: int) -> float:
        backend = self.backend
        if task.width == 1 and task.head:
            return self._time_decode(task.plan, offset)
        rewind(backend, task.context)
        start = (self._offset + offset * task.width) % (len(self._tokens) - task.width)
        tokens = self._tokens[start : start + task.width]
        begun = self.clock()
        if not task.head:
            backend.append(tokens, task.plan)
        elif task.plan is None:
            backend.verify(tokens, GREEDY)
        else:
            backend.evaluate(tokens, task.plan)
        return 1000.0 * (self.clock() - begun)

    def _time_decode(self, plan: Plan | None, offset: int) -> float:
        token = self._tokens[(self._offset + offset) % len(self._tokens)]
        begun = self.clock()
        self.backend.decode(token, GREEDY, plan)
        return 1000.0 * (self.clock() - begun)

    # -- results -----------------------------------------------------------------------------------

    def _samples(self) -> list[Sample]:
        levels = self._levels()
        samples = []
        for task in self._tasks:
            if task.context not in levels or not task.ratios:
                continue
            step_ms = levels[task.context]
            if task.is_step:
                raw = self._references[task.context]
                scale = step_ms / Timing.of(raw).median_ms
                timing = Timing.of([scale * ms for ms in raw])
            else:
                timing = Timing.of([step_ms * ratio for ratio in task.ratios])
            samples.append(
                Sample(
                    task.context,
                    task.width,
                    task.skipped,
                    task.head,
                    timing,
                    task.windowed,
                    task.window,
                    task.head_rows,
                )
            )
        return samples

    def _levels(self) -> dict[int, float]:
        """The usual step at each context, in ms, had the machine run at one speed all the time."""
        kept = {c: set(without_outliers(refs)) for c, refs in self._references.items()}
        visits = [v for v in self._visits if v[2] in kept[v[1]]]
        contexts = sorted({context for _, context, _ in visits})
        levels = levels_without_drift(
            np.array([seconds for seconds, _, _ in visits]),
            np.array([contexts.index(context) for _, context, _ in visits], dtype=np.intp),
            np.log([ms for _, _, ms in visits]),
        )
        return dict(zip(contexts, np.exp(levels).tolist(), strict=True))

    def _close_notes(self) -> None:
        if self._thrown_away:
            self._notes.append(
                f"the machine was not at rest: {self._thrown_away} "
                f"{'visit was' if self._thrown_away == 1 else 'visits were'} thrown away or kept "
                "although its speed changed in the middle"
            )
        steps = [t for t in self._tasks if t.is_step and t.ratios]
        wide = [
            c
            for c, refs in self._references.items()
            if len(refs) > 2 and Timing.of(refs).relative_spread > self.config.profile_max_spread
        ]
        if wide:
            self._notes.append(
                "plain steps still vary by more than "
                f"{100 * self.config.profile_max_spread:.0f} % at contexts of "
                f"{', '.join(str(c) for c in sorted(wide))} tokens"
            )
        few = min((len(t.ratios) for t in steps), default=0)
        if few < 2:
            self._notes.append("time allowed one visit only to some contexts: no spread is known")

    def _elapsed(self) -> float:
        """Of the budget, in seconds."""
        return self.clock() - self._since

    def _report(self) -> None:
        share = self._elapsed() / max(1e-9, self.budget_seconds)
        self._shown = max(self._shown, min(0.99, share))
        self._progress(self._shown)


def _timed_passes(ms: float) -> int:
    """Passes to time in one visit, apart from the first: fewer where they are slow."""
    if ms <= _FAST_MS:
        return _PASSES_FAST
    return 2 if ms <= _SLOW_MS else _PASSES_SLOW
