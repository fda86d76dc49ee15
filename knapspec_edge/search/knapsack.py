"""The exact multiple-choice knapsack over integer latency units.

Every item (a sublayer, the head) takes exactly one of its options (its modes); an option saves so
many units and costs so much loss. One pass gives the least loss for every total saving, and the
options behind each. Unlike the paper's recurrence, whose value is not additive and which is a beam
search with one survivor per budget, this finds the true optimum of its (additive) objective.

Equal losses: where several choices reach a saving at the same least loss, the last item takes its
first option that is among them, then the item before it, and so on. Losses are summed in the order
of the items, in 64-bit floating point, so that every implementation sees the same ties.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from . import kernels

# Back-pointers take a byte per item and unit. Beyond this, the unit was chosen too fine.
_MAX_BYTES = 1 << 31


@dataclass(frozen=True)
class Option:
    """One way to run an item: saves `saving_units` (>= 0) at a loss (>= 0; infinite: forbidden)."""

    saving_units: int
    loss: float


@dataclass(frozen=True)
class Solution:
    """The least loss for one exact total saving, and the option of each item that gives it."""

    saving_units: int
    loss: float
    options: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Sweep:
    """The best choice for many savings at once, by growing saving; row r belongs together."""

    saving_units: NDArray[np.int64]  # i64 [k]
    losses: NDArray[np.float64]  # f64 [k]
    options: NDArray[np.int16]  # i16 [k, items]

    def __len__(self) -> int:
        return len(self.saving_units)

    def within(self, saving_units: int) -> int | None:
        """Row of the least loss among those that save at least so much; None where none does.

        Of equal losses the one that saves most.
        """
        start = int(np.searchsorted(self.saving_units, saving_units))
        if start == len(self):
            return None
        rest = self.losses[start:]
        return len(self) - 1 - int(np.argmin(rest[::-1]))


def sweep(
    saving_units: ArrayLike,
    losses: ArrayLike,
    *,
    front: bool = False,
    most_units: int | None = None,
    load: bool = True,
) -> Sweep:
    """Best choice for every reachable total saving, back-tracked all at once.

    `saving_units` i64 [items, options] (>= 0) and `losses` f64 [items, options] (>= 0). An infinite
    loss forbids an option; items with fewer options than others are padded with such, whose saving
    does not matter. `front` keeps the rows that no other row beats in both saving and loss (of
    equal losses, the largest saving). Totals above `most_units` are left out. `load` as in
    kernels.kernels.

    O(items x options x total saving) time, O(items x total saving) memory, where savings that share
    a divisor count by it. Raises ValueError for arrays of other shapes, more than 127 options, a
    negative saving, a loss that is negative or no number, and for so many units that memory would
    not do.
    """
    units, cost = _checked(saving_units, losses)
    n_items = len(units)
    allowed = np.isfinite(cost)
    units = np.where(allowed, units, 0)
    divisor = int(np.gcd.reduce(units, axis=None, initial=0)) or 1
    units //= divisor
    limit = sum(int(u) for u in units.max(axis=1, initial=0))
    if most_units is not None:
        limit = min(limit, max(0, most_units) // divisor)
    if n_items * (limit + 1) > _MAX_BYTES:
        raise ValueError(f"{n_items} items of {limit} units in all take too much memory")
    run = kernels.kernels(load=load)
    choice = np.empty((n_items, limit + 1), dtype=np.int8)
    rows = np.empty((2, limit + 1), dtype=np.float64)
    least = rows[run.fill(units, cost, limit, choice, rows)]
    reached = np.flatnonzero(np.isfinite(least))
    if front and len(reached):
        values = least[reached]
        beyond = np.minimum.accumulate(values[::-1])[::-1]  # the least loss from here on
        keep = np.append(values[:-1] < beyond[1:], True)
        reached = reached[keep]
    options = np.empty((n_items, len(reached)), dtype=np.int16)
    run.backtrack(units.astype(np.uint32), choice, reached.astype(np.uint32), options)
    return Sweep(reached.astype(np.int64) * divisor, least[reached], options.T)


def _checked(
    saving_units: ArrayLike, losses: ArrayLike
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Copies i64 and f64 [items, options]. Raises ValueError for what `sweep` refuses."""
    units = np.array(saving_units)
    cost = np.array(losses, dtype=np.float64, order="C")
    if units.size and units.dtype.kind not in "iu":
        raise ValueError("savings have to be whole units")
    if units.ndim != 2 or units.shape != cost.shape:
        raise ValueError(
            f"savings {units.shape} and losses {cost.shape} have to be [items, options]"
        )
    n_items, n_options = units.shape
    if n_items and not 1 <= n_options <= kernels.MAX_OPTIONS:
        raise ValueError(f"an item has 1 to {kernels.MAX_OPTIONS} options, not {n_options}")
    units = np.ascontiguousarray(units, dtype=np.int64)
    if not (cost >= 0.0).all() or (units[np.isfinite(cost)] < 0).any():
        raise ValueError("savings and losses have to be 0 or more")
    return units, cost


def solve(items: Sequence[Sequence[Option]], *, load: bool = True) -> list[Solution]:
    """`sweep` for items of `Option`s: best choice for every reachable saving, by growing saving.

    Building the tuples takes far longer than solving; `sweep` is for those who want only a few.
    Raises ValueError for an item without options, and for what `sweep` refuses.
    """
    if any(not item for item in items):
        raise ValueError("an item without options cannot be chosen")
    n_options = max((len(item) for item in items), default=1)
    units = np.zeros((len(items), n_options), dtype=np.int64)
    losses = np.full((len(items), n_options), np.inf)
    for i, item in enumerate(items):
        for k, option in enumerate(item):
            units[i, k] = option.saving_units
            losses[i, k] = option.loss
    found = sweep(units, losses, load=load)
    return [
        Solution(saving, loss, tuple(options))
        for saving, loss, options in zip(
            found.saving_units.tolist(), found.losses.tolist(), found.options.tolist(), strict=True
        )
    ]
