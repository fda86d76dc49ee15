"""The exact multiple-choice knapsack over integer latency units.

Every item takes exactly one of its options; an option saves so many units and costs so much loss.
Unlike the paper's recurrence, whose value is not additive and which is a beam search with one
survivor per budget, this finds the true optimum of its (additive) objective for every saving.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from . import kernels


@dataclass(frozen=True)
class Option:
    """One way to run an item: saves `saving_units` (>= 0) at a loss (>= 0)."""

    saving_units: int
    loss: float


@dataclass(frozen=True)
class Solution:
    """The least loss for one exact total saving, and the option of each item that gives it."""

    saving_units: int
    loss: float
    options: tuple[int, ...]


def solve(items: Sequence[Sequence[Option]]) -> list[Solution]:
    """Best choice for every reachable total saving, by growing saving.

    O(items x options x total saving) time and memory. Raises ValueError for an item without
    options, or a negative saving or loss.
    """
    for item in items:
        if not item:
            raise ValueError("an item without options cannot be chosen")
        if any(o.saving_units < 0 or not o.loss >= 0.0 for o in item):
            raise ValueError("savings and losses have to be 0 or more")
    if not items:
        return [Solution(0, 0.0, ())]
    n_options = max(len(item) for item in items)
    savings = np.full((len(items), n_options), -1, dtype=np.int64)
    losses = np.zeros((len(items), n_options), dtype=np.float64)
    for i, item in enumerate(items):
        for k, option in enumerate(item):
            savings[i, k] = option.saving_units
            losses[i, k] = option.loss
    total = int(savings.max(axis=1).sum())
    best = np.empty((len(items) + 1, total + 1), dtype=np.float64)
    choice = np.empty((len(items), total + 1), dtype=np.int16)
    kernels.fill(savings, losses, best, choice)
    solutions = []
    for saving in np.flatnonzero(np.isfinite(best[-1])):
        options = np.empty(len(items), dtype=np.int16)
        kernels.backtrack(savings, choice, int(saving), options)
        solutions.append(
            Solution(int(saving), float(best[-1, saving]), tuple(int(k) for k in options))
        )
    return solutions
