"""The same two functions as in `loops`, as operations on whole rows: for where Numba is missing.

Sums are formed in the same order, so results are equal to the last bit.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def fill(
    savings: NDArray[np.int64],
    losses: NDArray[np.float64],
    limit: int,
    choice: NDArray[np.int8],
    rows: NDArray[np.float64],
) -> int:
    """See loops.fill."""
    n_items = len(savings)
    rows[0, 0] = 0.0
    reach = 0
    for i in range(n_items):
        usable = np.flatnonzero(losses[i] < np.inf)
        most = int(savings[i, usable].max(initial=0))
        next_reach = min(limit, reach + most)
        before = rows[i % 2, : reach + 1]
        after = rows[(i + 1) % 2, : next_reach + 1]
        after[:] = np.inf
        for k in usable:
            saving = int(savings[i, k])
            n = min(reach, next_reach - saving) + 1
            if n < 1:
                continue
            reached = before[:n] + losses[i, k]
            target = after[saving : saving + n]
            better = reached < target
            np.copyto(target, reached, where=better)
            np.copyto(choice[i, saving : saving + n], np.int8(k), where=better)
        reach = next_reach
    rows[n_items % 2, reach + 1 :] = np.inf
    return n_items % 2


def backtrack(
    savings: NDArray[np.uint32],
    choice: NDArray[np.int8],
    left: NDArray[np.uint32],
    options: NDArray[np.int16],
) -> None:
    """See loops.backtrack."""
    for i in range(len(savings) - 1, -1, -1):
        options[i] = choice[i, left]
        left -= savings[i, options[i]]
