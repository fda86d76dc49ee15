"""The inner loops of the search: plain functions on arrays, no records, no allocation policy.

They are separate so that a compiled version can take their place without touching a caller.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def fill(
    savings: NDArray[np.int64],
    losses: NDArray[np.float64],
    best: NDArray[np.float64],
    choice: NDArray[np.int16],
) -> None:
    """Forward pass of the multiple-choice knapsack.

    savings i64 [items, options] (-1: no such option), losses f64 [items, options];
    writes best f64 [items + 1, total + 1]: least loss of the first i items at an exact total saving
    (infinite: unreachable), and choice i16 [items, total + 1]: the option that reached it.
    Of equal losses the earlier option wins.
    """
    n_items, n_options = savings.shape
    width = best.shape[1]
    best[0, :] = np.inf
    best[0, 0] = 0.0
    for i in range(n_items):
        row = best[i + 1]
        row[:] = np.inf
        choice[i, :] = -1
        for option in range(n_options):
            saving = savings[i, option]
            if saving < 0 or saving >= width:
                continue
            reached = best[i, : width - saving] + losses[i, option]
            target = row[saving:]
            better = reached < target
            target[better] = reached[better]
            choice[i, saving:][better] = option


def backtrack(
    savings: NDArray[np.int64], choice: NDArray[np.int16], total: int, out: NDArray[np.int16]
) -> None:
    """The options behind one reachable total: out i16 [items]."""
    left = total
    for i in range(choice.shape[0] - 1, -1, -1):
        option = choice[i, left]
        out[i] = option
        left -= savings[i, option]
