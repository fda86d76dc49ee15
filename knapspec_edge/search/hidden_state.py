"""The paper's search over hidden states: which sublayers can go while the stream stays the same.

g[i, j] holds the states of a window of verified tokens after the first i sublayers, when sublayers
that cost j units have been skipped. Each is the better of two: the state with j executed through
sublayer i, or the state with j minus its weight passed on unchanged; better means the higher cosine
to the target's own states at the same depth. So it is a beam search with one survivor per saving,
not a knapsack: the best prefix need not lead to the best final state. Cosine only steers; what a
plan is worth is how often it picks what the target picks on the window.

All branches of a depth run in one call of the backend, the target being one of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..backend import Backend
from ..config import DEFAULTS, Config
from ..latency.costs import Costs
from ..latency.timing import Clock
from ..records import Plan, SubLayer
from .acceptance import Judgement
from .throughput import Window

# Below it a state has no direction.
_TINY = float(np.finfo(np.float32).tiny)


@dataclass(frozen=True)
class Reference:
    """Verified tokens that the search looks at: those from position `start` on."""

    start: int
    inputs: tuple[int, ...]
    picks: tuple[int, ...]  # what the target picked after each of them

    def __post_init__(self) -> None:
        if not self.inputs or len(self.inputs) != len(self.picks):
            raise ValueError("a window has at least one token, and one pick per token")
        if self.start < 0:
            raise ValueError("a window starts at a position of the text")


def latest_reference(text: Sequence[int], n_past: int, n_tokens: int) -> Reference:
    """The last `n_tokens` tokens of the cache (fewer if it holds fewer).

    `text` holds the n_past tokens of the cache and the pick after them. Raises ValueError for an
    empty cache.
    """
    if len(text) <= n_past:
        raise ValueError("the pick after the last token is missing")
    start = max(0, n_past - n_tokens)
    return Reference(start, tuple(text[start:n_past]), tuple(text[start + 1 : n_past + 1]))


@dataclass(frozen=True)
class Settings:
    """How far the search goes. `paper` is the method as published, `bounded` what fits a laptop."""

    window_tokens: int
    min_cosine: float  # mean over the window; states below are dropped
    budget_share: float  # of the total weight, that may be skipped at most
    max_branches: int | None  # alive at once, the target included; None: no limit

    def __post_init__(self) -> None:
        if self.window_tokens < 1:
            raise ValueError("the window needs at least one token")
        if not -1.0 <= self.min_cosine <= 1.0 or not 0.0 <= self.budget_share <= 1.0:
            raise ValueError("a cosine lies in -1..1 and a share in 0..1")
        if self.max_branches is not None and self.max_branches < 2:
            raise ValueError("a search needs room for the target and one branch")

    @classmethod
    def bounded(cls, config: Config = DEFAULTS) -> Settings:
        return cls(
            config.dp_window_tokens,
            config.dp_min_cosine,
            config.dp_budget_share,
            config.dp_max_branches,
        )

    @classmethod
    def paper(cls, config: Config = DEFAULTS) -> Settings:
        return cls(
            config.dp_paper_window_tokens, config.dp_min_cosine, config.dp_budget_share, None
        )


def paper_weights(costs_ms: Sequence[float], cap: int | None = None) -> NDArray[np.int64]:
    """Costs of the sublayers as whole multiples of the cheapest, i64 [sublayers], `cap` at most.

    Sublayers that were not seen to cost anything weigh nothing, and are never skipped. Raises
    ValueError for a cost that is no number.
    """
    costs = np.asarray(costs_ms, dtype=np.float64)
    if not np.isfinite(costs).all():
        raise ValueError("a sublayer's cost is not a number")
    seen = costs > 0.0
    weights = np.zeros(len(costs), dtype=np.int64)
    if seen.any():
        weights[seen] = np.rint(costs[seen] / costs[seen].min()).astype(np.int64)
    return weights if cap is None else np.minimum(weights, cap)


def weights_at(
    costs: Costs, context_tokens: int, n_sublayers: int, config: Config = DEFAULTS
) -> NDArray[np.int64]:
    """The weights of the published method for a model at one context, i64 [sublayers]."""
    savings_ms = [costs.saving_ms(i, context_tokens) for i in range(n_sublayers)]
    return paper_weights(savings_ms, config.dp_paper_weight_cap)


@dataclass(frozen=True)
class Survivor:
    """One plan of the last row."""

    judgement: Judgement
    skipped_units: int
    cosine: float  # to the target's final states, mean over the window

    @property
    def plan(self) -> Plan:
        return self.judgement.plan


@dataclass(frozen=True)
class SearchCost:
    """What a search took."""

    ms: float
    calls: int  # of the backend
    evaluations: int  # sublayers x tokens
    head_rows: int  # tokens that went through the head
    peak_branches: int  # in one call, the target included
    n_sublayers: int

    @property
    def forward_tokens(self) -> float:
        """Tokens of full passes that evaluate as many sublayers."""
        return self.evaluations / self.n_sublayers


@dataclass(frozen=True)
class Found:
    """Plans by growing saving, and their cost. The full network is not among them."""

    survivors: tuple[Survivor, ...]
    cost: SearchCost


def search(
    backend: Backend,
    reference: Reference,
    weights: Sequence[int] | NDArray[np.int64],
    settings: Settings,
    *,
    movable: Collection[int] | None = None,
    report: Callable[[], None] = lambda: None,
    clock: Clock = time.perf_counter,
) -> Found:
    """Run the search on a window of the text in the cache, which is left as it was.

    `weights` are the costs of the sublayers in whole units; what weighs nothing is never skipped.
    `movable` are the sublayers that may be (None: all but those of the first and the last layer).
    `report` is called before each depth and may raise to stop. Raises PlanError where the backend
    cannot run branches, ContextError where there is no room for them, Interrupted, ValueError for
    weights or sublayers that do not fit.
    """
    began = clock()
    sublayers = backend.sublayers
    units = np.asarray(weights, dtype=np.int64)
    if len(units) != len(sublayers) or (units < 0).any():
        raise ValueError(f"{len(sublayers)} weights of 0 or more are needed, not {len(units)}")
    limit = int(settings.budget_share * int(units.sum()))
    free = movable_indices(sublayers) if movable is None else frozenset(movable)
    first = _first_layer_end(sublayers)
    outside = sorted(i for i in free if not first < i < len(sublayers))
    if outside:
        raise ValueError(f"sublayer {outside[0]} is in the first layer or does not exist")
    table = _Table(len(sublayers), limit, len(reference.inputs), settings)
    calls = evaluations = 0
    peak = 1
    expected = settings.max_branches or len(sublayers)
    with backend.branches(reference.start, reference.inputs, expected) as branches:
        report()
        states = branches.embed(first)[np.newaxis]  # f32 [1 + alive, tokens, hidden], target first
        calls += 1
        evaluations += (first + 1) * states.shape[1]
        for i in range(first + 1, len(sublayers)):
            report()
            calls += 1
            evaluations += states.shape[0] * states.shape[1]
            peak = max(peak, states.shape[0])
            executed = branches.apply(i, states)
            states = table.step(i, states, executed, int(units[i]) if i in free else 0)
        survivors: tuple[Survivor, ...] = ()
        rows = 0
        if len(table.units):
            report()
            picks, probabilities = branches.head(states[1:])
            calls += 1
            rows = picks.size
            survivors = _judged(table, units, reference, picks, probabilities)
    cost = SearchCost(
        1000.0 * (clock() - began), calls, evaluations, rows, peak, max(1, len(sublayers))
    )
    return Found(survivors, cost)


def movable_indices(sublayers: Sequence[SubLayer]) -> frozenset[int]:
    """Sublayers that may be skipped: those of neither the first nor the last layer."""
    ends = {sublayers[0].layer, sublayers[-1].layer} if sublayers else set()
    return frozenset(s.index for s in sublayers if s.layer not in ends)


def _first_layer_end(sublayers: Sequence[SubLayer]) -> int:
    end = 0
    while end + 1 < len(sublayers) and sublayers[end + 1].layer == sublayers[0].layer:
        end += 1
    return end


def _judged(
    table: _Table,
    units: NDArray[np.int64],
    reference: Reference,
    picks: NDArray[np.int32],
    probabilities: NDArray[np.float32],
) -> tuple[Survivor, ...]:
    agree = picks == np.array(reference.picks, dtype=np.int32)  # bool [survivors, tokens]
    n = len(units)
    return tuple(
        Survivor(
            Judgement(
                Plan.skipping(n, table.skipped_by(saving, units)),
                (
                    Window(
                        tuple(agree[row].tolist()),
                        tuple(round(float(p), 4) for p in probabilities[row]),
                    ),
                ),
            ),
            saving,
            float(table.cosines[row]),
        )
        for row, saving in enumerate(table.units.tolist())
    )


class _Table:
    """The rows of g, of which only the latest is kept, and the way back through all of them."""

    def __init__(self, n_sublayers: int, limit: int, n_tokens: int, settings: Settings) -> None:
        self._limit = limit
        self._settings = settings
        # skipped[i, j]: the state with saving j after sublayer i did without it
        self._skipped = np.zeros((n_sublayers, limit + 1), dtype=np.bool_)
        self.units = np.empty(0, dtype=np.int64)  # savings alive, growing; the target has 0
        self.cosines = np.empty(0, dtype=np.float32)  # of the alive, mean over the window

    def step(
        self,
        i: int,
        before: NDArray[np.float32],
        executed: NDArray[np.float32],
        weight: int,
    ) -> NDArray[np.float32]:
        """The states after sublayer i, of the target and those alive.

        `before` and `executed` are the states without and with it, f32 [1 + alive, tokens, hidden],
        in the order of `units` behind the target. Weight 0: it is always executed.
        """
        target = executed[0]
        savings, scores = self.units, mean_cosine(executed[1:], target)
        origin = np.arange(1, len(executed))
        skips = np.zeros(len(savings), dtype=np.bool_)
        if weight:
            possible = np.concatenate([[0], self.units]) + weight
            from_ = np.flatnonzero(possible <= self._limit)
            savings = np.concatenate([savings, possible[from_]])
            scores = np.concatenate([scores, mean_cosine(before[from_], target)])
            origin = np.concatenate([origin, from_])
            skips = np.concatenate([skips, np.ones(len(from_), dtype=np.bool_)])
            # of each saving the best; executing wins a tie
            order = np.lexsort((skips, -scores, savings))
            ordered = savings[order]
            best = np.ones(len(order), dtype=np.bool_)
            best[1:] = ordered[1:] != ordered[:-1]
            chosen = order[best]
        else:
            chosen = np.arange(len(savings))
        chosen = chosen[scores[chosen] >= self._settings.min_cosine]
        most = self._settings.max_branches
        if most is not None and len(chosen) > most - 1:
            chosen = chosen[spread(savings[chosen], scores[chosen], most - 1)]
        self.units, self.cosines = savings[chosen], scores[chosen]
        origin, skips = origin[chosen], skips[chosen]
        self._skipped[i, self.units[skips]] = True
        states = np.empty((1 + len(chosen), *target.shape), dtype=np.float32)
        states[0] = target
        states[1:][~skips] = executed[origin[~skips]]
        states[1:][skips] = before[origin[skips]]
        return states

    def skipped_by(self, saving: int, units: NDArray[np.int64]) -> list[int]:
        """The sublayers that the survivor with this saving does without."""
        skipped = []
        for i in range(len(units) - 1, -1, -1):
            if self._skipped[i, saving]:
                skipped.append(i)
                saving -= int(units[i])
        return skipped


def mean_cosine(states: NDArray[np.float32], target: NDArray[np.float32]) -> NDArray[np.float32]:
    """Mean over the tokens of the cosine of states [branches, tokens, hidden] with the target's
    [tokens, hidden]: f32 [branches]. 0 for a state of zeros."""
    dots = np.einsum("bth,th->bt", states, target)
    norms = np.sqrt(np.einsum("bth,bth->bt", states, states))
    own = np.sqrt(np.einsum("th,th->t", target, target))
    result: NDArray[np.float32] = (dots / np.maximum(norms * own, _TINY)).mean(axis=1)
    return result


def spread(savings: NDArray[np.int64], scores: NDArray[np.float32], most: int) -> NDArray[np.intp]:
    """Indices of `most` branches, growing: the best of each of as many equal ranges of savings,
    and in place of empty ranges the best of the others.

    Best by score alone, those that skip least would push out all others.
    """
    low, high = int(savings[0]), int(savings[-1])
    ranges = (savings - low) * most // (high - low + 1)
    order = np.lexsort((savings, -scores))
    _, firsts = np.unique(ranges[order], return_index=True)
    leaders = order[firsts]
    others = order[~np.isin(order, leaders)]
    return np.sort(np.concatenate([leaders, others[: most - len(leaders)]]))
