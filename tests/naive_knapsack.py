"""The multiple-choice knapsack once more, in plain Python, written to be obviously right.

Only the standard library, and nothing of the package.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

Item = Sequence[tuple[int, float]]  # (saving, loss) per option; an infinite loss forbids it


def exhaustive(items: Sequence[Item]) -> dict[int, float]:
    """Least loss of every reachable total saving, by trying every combination of options."""
    best: dict[int, float] = {}
    for combination in itertools.product(*items):
        saving, loss = 0, 0.0
        for option_saving, option_loss in combination:
            saving += option_saving
            loss += option_loss
        if loss < best.get(saving, math.inf):
            best[saving] = loss
    return best


def recurrence(items: Sequence[Item]) -> dict[int, tuple[float, tuple[int, ...]]]:
    """(least loss, options) of every reachable total saving, with the documented tie rule.

    Bellman's recurrence over dictionaries: best of the first i items at each exact saving. An
    option replaces an earlier one only if it is strictly better.
    """
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for item in items:
        following: dict[int, tuple[float, tuple[int, ...]]] = {}
        for k, (option_saving, option_loss) in enumerate(item):
            for saving, (loss, options) in best.items():
                total = loss + option_loss
                known = following.get(saving + option_saving, (math.inf, ()))
                if total < known[0]:
                    following[saving + option_saving] = (total, (*options, k))
        best = following
    return best


def front(best: dict[int, float]) -> list[int]:
    """Savings that no other saving beats: none is at least as large with at most the loss."""
    return sorted(
        saving
        for saving, loss in best.items()
        if not any(s > saving and x <= loss for s, x in best.items())
    )
