"""A machine whose costs are known exactly: the truth that fitted latencies are compared with.

`Truth` says what any pass takes; `Clockwork` is a backend on it with a virtual clock, without text,
keys or any other content, so that thousands of passes take no time. `profile_of` writes down what a
profiler would have seen.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from knapspec_edge.latency.classes import layer_classes
from knapspec_edge.latency.costs import cells_read
from knapspec_edge.latency.profile import LatencyProfile, Sample
from knapspec_edge.latency.timing import Timing
from knapspec_edge.records import Kind, Pick, Plan, Sampling, SubLayer, Traits

Noise = Callable[[float, float], float]  # (ms of a pass, seconds by the clock) -> ms


@dataclass(frozen=True)
class Work:
    """What one sublayer costs in a step, in milliseconds."""

    kind: Kind
    constant_ms: float
    per_token_ms: float = 0.0  # of context
    per_cell_ms: float = 0.0  # of cache that the pass reads
    window_cells: int = 0  # its cache holds no more
    per_further_token: float = 0.1  # in a pass of several, of the cost of the first
    weight_bytes: int = 1000
    can_window: bool = False

    def ms(self, context_tokens: float, width: int = 1, most_tokens: float = math.inf) -> float:
        """`most_tokens`: what a window of the plan lets it read."""
        end = context_tokens + width - 1
        cells = min(cells_read(end), most_tokens)
        tokens = min(end, most_tokens)
        if self.window_cells:
            cells = min(cells, self.window_cells)
        once = self.constant_ms + self.per_token_ms * tokens + self.per_cell_ms * cells
        return once * (1.0 + self.per_further_token * (width - 1))

    def traits(self, n_ctx: int) -> Traits:
        signature = hash((self.kind, self.window_cells, self.weight_bytes)) & 0xFFFFFFFF
        if not (self.per_token_ms or self.per_cell_ms):
            return Traits(signature, self.weight_bytes)
        cells = self.window_cells or n_ctx
        return Traits(
            signature, self.weight_bytes, cell_bytes=64, n_cells=cells, can_window=self.can_window
        )


def attention(constant_ms: float = 0.5, per_token_ms: float = 1e-4, **options: Any) -> Work:
    return Work(Kind.ATTENTION, constant_ms, per_token_ms, **options)


def mlp(constant_ms: float = 0.8, **options: Any) -> Work:
    return Work(Kind.MLP, constant_ms, **options)


@dataclass(frozen=True)
class Truth:
    """A model: its sublayers in execution order and what is none of them."""

    works: tuple[Work, ...]
    fixed_ms: float = 0.4
    head_ms: float = 1.5
    head_per_further_token: float = 0.5

    @classmethod
    def alternating(cls, n_layer: int, *works: Work, **options: Any) -> Truth:
        """`works` over and over, for two sublayers per layer."""
        return cls(tuple(works[i % len(works)] for i in range(2 * n_layer)), **options)

    @property
    def n(self) -> int:
        return len(self.works)

    @property
    def sublayers(self) -> tuple[SubLayer, ...]:
        return tuple(SubLayer(i, i // 2, w.kind) for i, w in enumerate(self.works))

    def traits(self, n_ctx: int) -> tuple[Traits, ...]:
        return tuple(w.traits(n_ctx) for w in self.works)

    def ms(
        self,
        context: float,
        width: int = 1,
        skipped: Iterable[int] = (),
        head: bool = True,
        plan: Plan | None = None,
    ) -> float:
        """A pass of `width` tokens behind `context` tokens; `plan`: for its windows alone."""
        most = [math.inf] * self.n
        for i in () if plan is None else plan.windowed:
            most[i] = plan.modes[i].sink_tokens + plan.modes[i].window_tokens
        left_out = set(skipped)
        if not head and self.works[-1].kind is Kind.MLP:
            left_out.add(self.n - 1)  # nobody needs its rows
        total = self.fixed_ms
        if head:
            total += self.head_ms * (1.0 + self.head_per_further_token * (width - 1))
        return total + sum(
            w.ms(context, width, most[i]) for i, w in enumerate(self.works) if i not in left_out
        )

    def random_plans(self, count: int, seed: int) -> list[tuple[int, ...]]:
        """Sets of skipped sublayers, from few to most."""
        dice = random.Random(seed)
        sizes = [1 + k * (self.n - 1) // max(1, count) for k in range(count)]
        return [tuple(sorted(dice.sample(range(self.n), size))) for size in sizes]


def profile_of(
    truth: Truth,
    contexts: Sequence[int],
    *,
    n_ctx: int = 1 << 20,
    widths: Sequence[int] = (2, 3, 4, 6, 8, 16),
    kind_widths: Sequence[int] = (8,),
    noise: float = 0.0,
    repeats: int = 5,
    seed: int = 0,
    max_per_kind: int = 6,
) -> LatencyProfile:
    """What a profiler sees of a truth: every time exact but for a relative normal noise."""
    dice = np.random.default_rng(seed)
    classes = layer_classes(truth.sublayers, truth.traits(n_ctx), max_per_kind)
    plans = [(), *(p for c in classes for p in (c.members, c.members[1::2]))]
    plans += truth.random_plans(3, seed)
    plans = [p for p in dict.fromkeys(plans) if len(p) < truth.n]
    samples: list[Sample] = []

    def see(context: int, width: int, skipped: tuple[int, ...], head: bool) -> None:
        exact = truth.ms(context, width, skipped, head)
        times = exact * (1.0 + noise * dice.standard_normal(repeats))
        samples.append(Sample(context, width, skipped, head, Timing.of(times.tolist())))

    for context in contexts:
        for skipped in plans if plans[0] == () else [(), *plans]:
            see(context, 1, skipped, True)
        for width in widths:
            see(context, width, (), True)
        if context in (contexts[0], contexts[-1]):
            see(context, 1, (), False)
            for kind in dict.fromkeys(w.kind for w in truth.works):
                members = tuple(i for i, w in enumerate(truth.works) if w.kind is kind)
                for width in kind_widths:
                    if len(members) < truth.n:
                        see(context, width, members, True)
    return LatencyProfile(
        truth.n,
        classes,
        contexts[-1],
        tuple(samples),
        {"threads": 2},
        budget_seconds=30.0,
        elapsed_seconds=29.0,
        measured_at=1e9,
        notes=("a note",),
        asked_tokens=contexts[-1],
        asked_width=max(widths, default=1),
    )


@dataclass
class Clockwork:
    """Implements knapspec_edge.backend.Backend, as far as timing needs it."""

    truth: Truth
    n_ctx: int = 4096
    max_verify_tokens: int = 32
    noise: Noise = lambda ms, _: ms
    build_ms: float = 0.0  # the first pass of a graph takes longer
    kept_graphs: int = 6
    n_vocab: int = 100
    refusal: str | None = None
    cut_refusal: str | None = None
    settings: dict[str, Any] = field(default_factory=lambda: {"threads": 2})
    now_ms: float = 0.0
    n_past: int = 0
    passes: list[tuple[int, int, tuple[int, ...], bool]] = field(default_factory=list)
    _graphs: list[tuple[Any, ...]] = field(default_factory=list)

    @property
    def sublayers(self) -> tuple[SubLayer, ...]:
        return self.truth.sublayers

    @property
    def head_sizes(self) -> tuple[int, ...]:
        return ()

    @property
    def traits(self) -> tuple[Traits, ...]:
        return self.truth.traits(self.n_ctx)

    def clock(self) -> float:
        """Seconds of virtual time."""
        return self.now_ms / 1000.0

    def _pass(self, width: int, plan: Plan | None, head: bool = True) -> None:
        assert self.n_past + width <= self.n_ctx
        skipped = plan.skipped if plan is not None else ()
        ms = self.noise(self.truth.ms(self.n_past, width, skipped, head, plan), self.clock())
        modes = None if plan is None else plan.modes
        graph = (width, modes, head, cells_read(self.n_past, width))
        if graph in self._graphs:
            self._graphs.remove(graph)
        else:
            ms += self.build_ms
        self._graphs = [graph, *self._graphs[: self.kept_graphs - 1]]
        self.passes.append((self.n_past, width, skipped, head))
        self.now_ms += ms
        self.n_past += width

    def decode(self, token: int, sampling: Sampling, plan: Plan | None = None) -> Pick:
        assert 0 <= token < self.n_vocab
        self._pass(1, plan)
        return Pick(1, 1.0, 1.0)

    def verify(self, tokens: Sequence[int], sampling: Sampling) -> list[Pick]:
        assert 1 <= len(tokens) <= self.max_verify_tokens
        self._pass(len(tokens), None)
        return [Pick(1, 1.0, 1.0)] * len(tokens)

    def evaluate(
        self, tokens: Sequence[int], plan: Plan | None = None
    ) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        self._pass(len(tokens), plan)
        return np.ones(len(tokens), dtype=np.int32), np.ones(len(tokens), dtype=np.float32)

    def append(self, tokens: Sequence[int], plan: Plan | None = None) -> None:
        self._pass(len(tokens), plan, head=False)

    def prefill(self, tokens: Sequence[int], sampling: Sampling, progress: Any = None) -> Pick:
        self._pass(len(tokens), None)
        return Pick(1, 1.0, 1.0)

    def fill(self, n_tokens: int) -> None:
        assert self.n_past <= n_tokens <= self.n_ctx
        self.n_past = n_tokens

    def truncate(self, n_tokens: int) -> None:
        assert 0 <= n_tokens <= self.n_past
        self.n_past = n_tokens

    def is_end(self, token: int) -> bool:
        return False

    def set_threads(self, threads: int, threads_batch: int | None = None) -> None:
        self.settings["threads"] = threads

    def logits(self, row: int = -1) -> NDArray[np.float32]:
        raise AssertionError("nothing here computes logits")
