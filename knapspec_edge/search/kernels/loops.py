"""The inner loops of the knapsack as plain functions on arrays, written for Numba to compile.

They run interpreted as well, slowly. Policy, allocation and checks are the callers'. Both functions
leave the state of the other alone, so each is compiled by itself.
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
    """Forward pass: the least loss of every exact total saving up to `limit`.

    savings i64 [items, options] (>= 0), losses f64 [items, options] (infinite: no such option);
    writes choice i8 [items, limit + 1] and rows f64 [2, limit + 1], whose contents do not matter
    before. Returns the row that holds the least losses in the end (infinite: unreachable).
    choice[i, s] is the option of item i behind a saving s of the items 0..i, and means nothing
    where s is unreachable.
    """
    n_items, n_options = savings.shape
    rows[0, 0] = 0.0
    reach = 0  # the largest saving of the items so far; nothing beyond it is ever looked at
    for i in range(n_items):
        most = 0
        for k in range(n_options):
            if losses[i, k] < np.inf and savings[i, k] > most:
                most = savings[i, k]
        next_reach = min(limit, reach + most)
        before = rows[i % 2, : reach + 1]
        after = rows[(i + 1) % 2, : next_reach + 1]
        chosen = choice[i, : next_reach + 1]
        first = True
        for k in range(n_options):
            loss = losses[i, k]
            saving = savings[i, k]
            if not loss < np.inf or saving > next_reach:
                continue
            n = min(reach, next_reach - saving) + 1
            target = after[saving : saving + n]
            marks = chosen[saving : saving + n]
            option = np.int8(k)
            if first:
                # no comparison with what is infinite anyway
                first = False
                after[:saving] = np.inf
                after[saving + n :] = np.inf
                chosen[:] = option
                for s in range(n):
                    target[s] = before[s] + loss
            else:
                # without branches, so that it becomes vector instructions
                for s in range(n):
                    reached = before[s] + loss
                    better = reached < target[s]
                    target[s] = reached if better else target[s]
                    marks[s] = option if better else marks[s]
        if first:
            after[:] = np.inf
        reach = next_reach
    rows[n_items % 2, reach + 1 :] = np.inf
    final: int = n_items % 2
    return final


def backtrack(
    savings: NDArray[np.uint32],
    choice: NDArray[np.int8],
    left: NDArray[np.uint32],
    options: NDArray[np.int16],
) -> None:
    """The options behind many reachable total savings at once.

    savings u32 [items, options] and choice as `fill` left it; left u32 [k] holds the totals and is
    used up (0 in the end); writes options i16 [items, k].
    """
    for i in range(savings.shape[0] - 1, -1, -1):
        # item by item, so that one row of choices stays in the processor's nearest cache
        chosen = choice[i]
        saving = savings[i]
        out = options[i]
        for j in range(left.size):
            option = np.uint8(chosen[left[j]])  # unsigned: no check for an index from the end
            out[j] = option
            left[j] -= saving[option]
