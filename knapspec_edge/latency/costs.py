"""Predicts the time of any pass from a latency profile.

A draft step is the measured plain step minus what was measured for each sublayer it leaves out
(design D4: t_draft(S, n) = t_fixed + sum t_attn(n) + sum t_mlp + t_head); a verification pass is a
curve in its width, measured at a few contexts. All times in milliseconds, contexts in tokens.

Where a cost is a straight line in the context length it is fitted as one. llama.cpp reads a cache
in steps of CELLS_PER_STEP cells, so a cost may follow the tokens, the cells, or both: both are
regressors. A sliding window reads no more than its own cache holds. What no line fits is
interpolated between the measured contexts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..records import SKIP, Mode, ModeKind, Plan
from .classes import LayerClass
from .profile import LatencyProfile, Sample, plan_of
from .regression import Line, fit_line, non_negative_least_squares

# llama_kv_cache::get_n_kv rounds the cells that a pass reads up to a multiple of this.
CELLS_PER_STEP = 256
# Relative standard deviation of a single sample, where there are too few to tell.
SAMPLE_PRIOR = 0.03
# A fitted time is a line unless the line misses a measured context by more than this share of the
# step there, all sublayers of the class together.
LINE_TOLERANCE = 0.02
# Plain steps at two contexts that differ less than this tell nothing about growth.
_SPAN = 1.1
# No measurement is trusted beyond this, so that a lucky agreement of few samples decides nothing.
_LEAST_ERROR = 0.004

Curve = Callable[[float], float]


def cells_read(context_tokens: float, width: int = 1) -> float:
    """Cells that a pass of `width` tokens behind so many cached tokens reads, without a window."""
    return CELLS_PER_STEP * math.ceil((context_tokens + width) / CELLS_PER_STEP)


@dataclass(frozen=True)
class ClassCost:
    """What one sublayer of a class costs in a step of one token."""

    layer_class: LayerClass
    # line in the context length; the slope is per token of context
    line: Line
    is_line: bool  # False: interpolated between `points`
    points: tuple[tuple[int, float, float], ...]  # (context, ms, standard error)


class Costs:
    """The fitted model. Raises ValueError for a profile without a plain step."""

    def __init__(self, profile: LatencyProfile) -> None:
        steps = profile.steps()
        if not steps:
            raise ValueError("the profile has no plain step")
        self.profile = profile
        self.classes = profile.classes
        self._class_of = {i: c for c, cls in enumerate(profile.classes) for i in cls.members}
        self._contexts = np.array([s.context_tokens for s in steps], dtype=np.float64)
        self._windows = sorted(
            {c.n_cells for c in self.classes if 0 < c.n_cells < profile.limit_tokens}
        )
        self._fit_step(steps)
        self._fit_classes()
        self._fit_head()
        self._fit_short_heads()
        self._fit_verification()
        self._fit_wide_classes()

    # -- predictions -------------------------------------------------------------------------------

    def step_ms(self, context_tokens: float) -> float:
        """A plain step: the full model over one token, pick included."""
        return self._step(context_tokens)

    def saving_ms(self, sublayer: int, context_tokens: float, mode: Mode = SKIP) -> float:
        """What this mode of a sublayer, leaving it out by default, saves of a step; >= 0.

        A window that was not measured, or that holds all the context, saves nothing.
        """
        cls = self._class_of[sublayer]
        if mode.kind is ModeKind.FULL:
            return 0.0
        full_ms = self._curves[cls](context_tokens)
        if mode.kind is ModeKind.SKIP:
            return full_ms
        points = self._windowed.get((cls, mode))
        if points is None or context_tokens <= mode.sink_tokens + mode.window_tokens:
            return 0.0
        contexts, times = zip(*points, strict=True)
        return max(0.0, full_ms - float(np.interp(context_tokens, contexts, times)))

    @property
    def window_modes(self) -> list[Mode]:
        """The windows that were measured, the widest first."""
        found = {mode for _, mode in self._windowed}
        return sorted(found, key=lambda m: (-m.window_tokens, m.sink_tokens))

    def window_points(self, sublayer: int, mode: Mode) -> list[tuple[int, float]]:
        """(context, ms of this sublayer under this window), as fitted to what was measured."""
        return list(self._windowed.get((self._class_of[sublayer], mode), ()))

    def windows(self, sublayer: int, context_tokens: float) -> list[Mode]:
        """The windows that save something here, the widest first."""
        return [m for m in self.window_modes if self.saving_ms(sublayer, context_tokens, m) > 0.0]

    def draft_ms(self, plan: Plan, context_tokens: float) -> float:
        """One draft step. Never below the part of a step that belongs to no sublayer."""
        step_ms = self.step_ms(context_tokens)
        per_class = [curve(context_tokens) for curve in self._curves]
        counts: dict[tuple[int, Mode], int] = {}
        saved = 0.0
        for i, mode in enumerate(plan.modes):
            if mode.kind is ModeKind.SKIP:
                saved += per_class[self._class_of[i]]
            elif mode.kind is ModeKind.WINDOW:
                key = (self._class_of[i], mode)
                counts[key] = counts.get(key, 0) + 1
        for (cls, mode), n in counts.items():
            saved += n * self.saving_ms(self.classes[cls].members[0], context_tokens, mode)
        step_ms -= self.head_saving_ms(plan.head_rows)
        return max(0.0, step_ms - self._spent(per_class), step_ms - saved)

    def verify_ms(self, context_tokens: float, width: int) -> float:
        """A pass of the full model over `width` tokens, a pick for each. Never below a step.

        Between measured widths linear. Raises ValueError beyond the widest one.
        """
        if not 1 <= width <= self.max_width:
            raise ValueError(f"a pass of {width} tokens was not measured")
        step_ms = self.step_ms(context_tokens)
        if width == 1:
            return step_ms
        # where the pass ends, as the cells it reads are counted there
        at = self._step(context_tokens + width - 1)
        widths = self._widths
        times = [step_ms, *(self._verification[b](at) for b in widths[1:])]
        return max(step_ms, float(np.interp(width, widths, times)))

    def ms(self, sublayer: int, context_tokens: float, width: int = 1) -> float:
        """One sublayer's share of a pass over `width` tokens behind `context_tokens` tokens.

        At widths that were not timed without sublayers, it grows as the whole pass does.
        Raises ValueError beyond the widest pass.
        """
        alone = self.saving_ms(sublayer, context_tokens)
        if width == 1:
            return alone
        growth = self.verify_ms(context_tokens, width) / self.step_ms(context_tokens)
        wide = self._wide.get(self.classes[self._class_of[sublayer]].kind.value)
        if wide is None:
            return alone * growth
        # growth of this kind against that of the whole pass, by width and context
        widths = [1, *sorted(wide)]
        relative = [1.0]
        for b in widths[1:]:
            contexts, growths = wide[b]
            relative.append(float(np.interp(context_tokens, contexts, growths)))
        return alone * growth * float(np.interp(width, widths, relative))

    def head_ms(self) -> float:
        """Final norm, head and pick, in a step of one token; 0 where it was not measured."""
        return self._head_ms

    @property
    def short_heads(self) -> tuple[int, ...]:
        """Rows of the short heads that were measured, ascending."""
        return tuple(sorted(self._short_heads))

    def head_saving_ms(self, n_rows: int) -> float:
        """What multiplying so many rows of the head saves of a step; >= 0. Between measured ones
        linear, beyond them as the nearest; 0 rows stand for the whole head."""
        known = self.short_heads
        if not n_rows or not known:
            return 0.0
        return float(np.interp(n_rows, known, [self._short_heads[n] for n in known]))

    def fixed_ms(self, context_tokens: float) -> float:
        """What is neither a sublayer nor the head: embedding, masks, launching the graph."""
        return max(0.0, self.rest_ms(context_tokens))

    def rest_ms(self, context_tokens: float) -> float:
        """What a step takes beyond all sublayers and the head, each taken by itself.

        Negative where the parts cost less in company than leaving one of them out saves: on
        processors whose cache holds a good part of the weights from step to step, less work also
        means that more of it is found there.
        """
        per_class = [curve(context_tokens) for curve in self._curves]
        return self.step_ms(context_tokens) - self._spent(per_class) - self._head_ms

    def share(self, kinds: Iterable[str], context_tokens: float) -> float:
        """Share of a plain step that is spent in sublayers of these kinds, 0..1."""
        wanted = set(kinds)
        spent = sum(
            len(cls.members) * curve(context_tokens)
            for cls, curve in zip(self.classes, self._curves, strict=True)
            if cls.kind.value in wanted
        )
        return min(1.0, spent / self.step_ms(context_tokens))

    def integer_weights(
        self, context_tokens: float, *, largest_error: float = 0.02, most_units: int = 20_000
    ) -> tuple[NDArray[np.int64], float]:
        """Cost of each sublayer at a context in whole units (i64 [sublayers]), and ms per unit.

        The unit makes the rounding error of the cheapest class `largest_error` of its cost at most,
        where the paper rounds to whole multiples of the cheaper sublayer. Classes that cost less
        than a hundredth of the mean do not decide about it, nor may all sublayers together exceed
        `most_units`.
        """
        costs = np.array([self.saving_ms(i, context_tokens) for i in range(len(self._class_of))])
        total = float(costs.sum())
        if total <= 0.0:
            return np.zeros(len(costs), dtype=np.int64), 1.0
        cheapest = float(costs[costs >= 0.01 * total / len(costs)].min())
        unit_ms = max(2.0 * largest_error * cheapest, total / most_units)
        return np.rint(costs / unit_ms).astype(np.int64), unit_ms

    @property
    def max_width(self) -> int:
        """The widest pass that was measured; nothing is predicted beyond."""
        return self._widths[-1]

    @property
    def blind(self) -> bool:
        """Whether no sublayer was seen to cost anything: then noise hid all there is."""
        return all(curve(c) <= 0.0 for curve in self._curves for c in self._contexts)

    def crossing_tokens(self) -> float | None:
        """Context length from which an average attention costs more than an average MLP.

        Beyond the measured contexts the lines are continued, up to a million tokens; None where
        they do not meet there, or one of the kinds does not exist.
        """

        def mean_ms(kind: str, context: float) -> float:
            own = [
                (len(c.members), curve(context))
                for c, curve in zip(self.classes, self._curves, strict=True)
                if c.kind.value == kind
            ]
            return sum(n * ms for n, ms in own) / sum(n for n, _ in own) if own else math.nan

        def ahead(context: float) -> float:
            return mean_ms("attention", context) - mean_ms("mlp", context)

        low, high = 0.0, 1e6
        if math.isnan(ahead(low)) or ahead(high) <= 0.0:
            return None
        if ahead(low) >= 0.0:
            return 0.0
        while high - low > 1.0:
            middle = 0.5 * (low + high)
            low, high = (low, middle) if ahead(middle) > 0.0 else (middle, high)
        return high

    def fit_errors(self) -> list[tuple[Sample, float]]:
        """(sample, predicted / measured - 1) of every draft step in the profile."""
        found = []
        for sample in self.profile.samples:
            if sample.width == 1 and sample.head and sample.timing.median_ms > 0.0:
                n = self.profile.n_sublayers
                plan = plan_of(sample, n) or Plan.full(n)
                predicted = self.draft_ms(plan, sample.context_tokens)
                found.append((sample, predicted / sample.timing.median_ms - 1.0))
        return found

    # -- fitting -----------------------------------------------------------------------------------

    def _features(self, contexts: Iterable[float], windows: Iterable[int]) -> NDArray[np.float64]:
        """f64 [contexts, 3 + windows]: constant, tokens, cells, cells within each window."""
        caps = list(windows)
        return np.array(
            [[1.0, c, cells_read(c), *(min(cells_read(c), w) for w in caps)] for c in contexts]
        )

    def _fit_step(self, steps: list[Sample]) -> None:
        times = np.array([s.timing.median_ms for s in steps])
        sigmas = times * np.array([_error(s) for s in steps])
        rows = self._features(self._contexts, self._windows)
        coefficients, _ = non_negative_least_squares(rows, times, sigmas)
        residuals = times - rows @ coefficients

        def step(context: float) -> float:
            smooth = float(self._features([context], self._windows)[0] @ coefficients)
            return max(1e-6, smooth + float(np.interp(context, self._contexts, residuals)))

        self._step: Curve = step

    def _fit_classes(self) -> None:
        """Cost of each class at each context, then along the contexts."""
        n_classes = len(self.classes)
        points: list[list[tuple[int, float, float]]] = [[] for _ in range(n_classes)]
        # ms of one sublayer of a class under a window, by context
        self._windowed: dict[tuple[int, Mode], list[tuple[int, float]]] = {}
        for context in self._contexts:
            samples = [
                s
                for s in self.profile.samples
                if s.context_tokens == context and s.width == 1 and s.head and not s.head_rows
            ]
            windows = sorted(
                {(self._class_of[i], s.window) for s in samples for i in s.windowed if s.window},
                key=lambda pair: (pair[0], str(pair[1])),
            )
            counts = np.array([self._counts(s, windows) for s in samples], dtype=np.float64)
            times = np.array([s.timing.median_ms for s in samples])
            sigmas = np.maximum(1e-9, times * np.array([_error(s) for s in samples]))
            rows = np.column_stack([np.ones(len(samples)), counts])
            costs, errors = non_negative_least_squares(rows, times, sigmas)
            for c in range(n_classes):
                # a class that no sample leaves out cannot be told from what is fixed
                if np.ptp(counts[:, c]) > 0.0:
                    points[c].append((int(context), float(costs[1 + c]), float(errors[1 + c])))
            for k, pair in enumerate(windows, start=1 + n_classes):
                if pair[1] is not None:
                    self._windowed.setdefault((pair[0], pair[1]), []).append(
                        (int(context), float(costs[k]))
                    )
        self.class_costs: list[ClassCost] = []
        self._curves: list[Curve] = []
        for cls, own in zip(self.classes, points, strict=True):
            cost, curve = self._fit_class(cls, own)
            self.class_costs.append(cost)
            self._curves.append(curve)

    def _counts(self, sample: Sample, windows: Sequence[tuple[int, Mode | None]]) -> list[int]:
        """How many sublayers of each class ran in full, then how many under each window."""
        other = {*sample.skipped, *sample.windowed}
        full = [sum(i not in other for i in cls.members) for cls in self.classes]
        return full + [
            sum(self._class_of[i] == cls for i in sample.windowed) if sample.window == mode else 0
            for cls, mode in windows
        ]

    def _fit_class(
        self, cls: LayerClass, points: list[tuple[int, float, float]]
    ) -> tuple[ClassCost, Curve]:
        if not points:
            flat = fit_line(np.zeros(1), np.zeros(1), np.ones(1))
            return ClassCost(cls, flat, True, ()), lambda _: 0.0
        x = np.array([p[0] for p in points], dtype=np.float64)
        costs = np.array([p[1] for p in points])
        errors = np.maximum(1e-9, np.array([p[2] for p in points]))
        line = fit_line(x, costs, errors)
        if cls.cell_bytes:
            windows = [cls.n_cells] if cls.n_cells in self._windows else []
            rows = self._features(x, windows)
            coefficients, _ = non_negative_least_squares(rows, costs, errors)
        else:
            # nothing in it depends on the context, unless the measurement insists
            rows = np.ones((len(x), 1))
            if line.rises:
                rows = np.column_stack([rows, x])
            windows = []
            coefficients, _ = non_negative_least_squares(rows, costs, errors)
        residuals = costs - rows @ coefficients
        steps = np.array([self._step(c) for c in x])
        # a miss within the noise of its point says nothing about the shape
        misses = np.maximum(0.0, np.abs(residuals) - 2.0 * errors) * len(cls.members) / steps
        is_line = bool(misses.max() <= LINE_TOLERANCE) and not windows
        kept = residuals if misses.max() > LINE_TOLERANCE else np.zeros(len(x))

        def curve(context: float) -> float:
            if cls.cell_bytes:
                smooth = float(self._features([context], windows)[0] @ coefficients)
            else:
                smooth = float(np.array([1.0, context])[: len(coefficients)] @ coefficients)
            return max(0.0, smooth + float(np.interp(context, x, kept)))

        return ClassCost(cls, line, is_line, tuple(points)), curve

    def _spent(self, per_class: list[float]) -> float:
        """Time of all sublayers, from that of one of each class."""
        return sum(len(cls.members) * ms for cls, ms in zip(self.classes, per_class, strict=True))

    def _fit_head(self) -> None:
        """Full steps with and without logits; the latter also leave out the last MLP, whose rows
        nothing needs."""
        found = []
        for sample in self.profile.samples:
            if sample.head or not sample.is_full or sample.width != 1:
                continue
            context = sample.context_tokens
            last = max(self._class_of)
            difference = self.step_ms(context) - sample.timing.median_ms
            if self.classes[self._class_of[last]].kind.value == "mlp":
                difference -= self.saving_ms(last, context)
            found.append(difference)
        self._head_ms = max(0.0, float(np.median(found))) if found else 0.0

    def _fit_short_heads(self) -> None:
        """A head costs the same at every context; a shorter one no more."""
        found: dict[int, list[float]] = {}
        for s in self.profile.samples:
            if s.head_rows and s.head and not s.skipped and s.width == 1:
                saved = self.step_ms(s.context_tokens) - s.timing.median_ms
                found.setdefault(s.head_rows, []).append(saved)
        self._short_heads: dict[int, float] = {}
        most = 0.0
        for n_rows in sorted(found, reverse=True):
            most = max(most, float(np.median(found[n_rows])))
            self._short_heads[n_rows] = most

    def _fit_verification(self) -> None:
        """For each width a curve over the time of a plain step.

        Time of a wide pass and of a step are both (nearly) linear in the same mix of tokens and
        cells, so the one is linear in the other, staircase and all.
        """
        anchors: dict[int, list[tuple[float, float]]] = {}
        for s in self.profile.samples:
            if s.width > 1 and s.head and s.is_full:
                at = self._step(s.context_tokens + s.width - 1)
                anchors.setdefault(s.width, []).append((at, s.timing.median_ms))
        whole = {b: _curve_through(found) for b, found in anchors.items() if _spans(found)}
        self._verification: dict[int, Curve] = {}
        for width, found in anchors.items():
            self._verification[width] = whole.get(width) or self._like_nearest(width, found, whole)
        self._widths = [1, *sorted(anchors)]

    @staticmethod
    def _like_nearest(
        width: int, anchors: list[tuple[float, float]], whole: dict[int, Curve]
    ) -> Curve:
        """A width that was timed at short contexts only, or at one: what its further tokens cost
        grows along the contexts as with the nearest width that was timed all along."""
        if not whole:
            return _curve_through(anchors)
        near = whole[min(whole, key=lambda b: abs(math.log(b / width)))]
        shares = [(ms - at) / (near(at) - at) for at, ms in anchors if near(at) > at]
        share = float(np.median(shares)) if shares else 0.0
        return lambda x: x + share * (near(x) - x)

    def _fit_wide_classes(self) -> None:
        """Growth of each kind with the width, against the growth of the whole pass."""
        found: dict[str, dict[int, dict[int, float]]] = {}
        for s in self.profile.samples:
            if s.width == 1 or s.is_full or not s.head or s.width not in self._verification:
                continue
            left_out = {self._class_of[i] for i in s.skipped}
            kinds = {self.classes[c].kind.value for c in left_out}
            if len(kinds) != 1:
                continue
            whole = self.verify_ms(s.context_tokens, s.width)
            saved = max(0.0, whole - s.timing.median_ms)
            alone = sum(self.saving_ms(i, s.context_tokens) for i in s.skipped)
            growth = whole / self.step_ms(s.context_tokens)
            if alone > 0.0:
                by_width = found.setdefault(kinds.pop(), {}).setdefault(s.width, {})
                by_width[s.context_tokens] = saved / alone / growth
        self._wide = {
            kind: {b: (sorted(at), [at[c] for c in sorted(at)]) for b, at in by_width.items()}
            for kind, by_width in found.items()
        }


def _error(sample: Sample) -> float:
    """Relative standard error of a sample's time."""
    return max(_LEAST_ERROR, sample.timing.relative_error(SAMPLE_PRIOR))


def _spans(points: list[tuple[float, float]]) -> bool:
    """Whether the points lie far enough apart to tell how a pass grows with the context."""
    x = [p[0] for p in points]
    return max(x) > _SPAN * min(x)


def _curve_through(points: list[tuple[float, float]]) -> Curve:
    """Linear between the points, continued beyond them with the slope of the outermost two; never
    falling beyond the last one."""
    ordered = sorted(points)
    x = np.array([p[0] for p in ordered])
    y = np.array([p[1] for p in ordered])
    if not _spans(ordered):
        # A step that costs the same at every context: so does the pass, in proportion.
        ratio = float(np.mean(y / x))
        return lambda at: ratio * at

    def slope(i: int, j: int) -> float:
        return float((y[j] - y[i]) / (x[j] - x[i])) if x[j] > x[i] else 0.0

    first, last = slope(0, 1), max(0.0, slope(-2, -1))

    def curve(at: float) -> float:
        if at < x[0]:
            return max(0.0, float(y[0]) - first * (float(x[0]) - at))
        if at > x[-1]:
            return float(y[-1]) + last * (at - float(x[-1]))
        return float(np.interp(at, x, y))

    return curve
