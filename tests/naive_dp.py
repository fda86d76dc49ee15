"""The search over hidden states, written for obviousness: each branch runs alone, from its tokens.

`run(skipped)` evaluates one network from the first sublayer on, one sequence, no branches, and
returns the residual stream f32 [sublayers, tokens, hidden] after each of its sublayers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence

import numpy as np

Skipped = frozenset[int]
Run = Callable[[Skipped], np.ndarray]


def mean_cosine(a: np.ndarray, b: np.ndarray) -> float:
    total = 0.0
    for row_a, row_b in zip(a.astype(np.float64), b.astype(np.float64), strict=True):
        norm = math.sqrt(float(row_a @ row_a)) * math.sqrt(float(row_b @ row_b))
        total += float(row_a @ row_b) / norm if norm > 0.0 else 0.0
    return total / len(a)


def spread(row: dict[int, tuple[Skipped, float]], most: int) -> dict[int, tuple[Skipped, float]]:
    """Keep the best of each of `most` equal ranges of savings, then the best of the others."""
    low, high = min(row), max(row)
    by_score = sorted(row, key=lambda saving: (-row[saving][1], saving))
    kept: list[int] = []
    for part in range(most):
        inside = [s for s in by_score if (s - low) * most // (high - low + 1) == part]
        kept += inside[:1]
    kept += [s for s in by_score if s not in kept][: most - len(kept)]
    return {saving: row[saving] for saving in sorted(kept)}


def search(
    run: Run,
    first: int,
    weights: Sequence[int],
    movable: Collection[int],
    *,
    min_cosine: float,
    budget_share: float,
    max_branches: int | None,
) -> dict[int, tuple[Skipped, float]]:
    """Saving -> (what is skipped, mean cosine of the final states). The full network is left out.

    `first` is the first sublayer behind the first layer.
    """
    memo: dict[Skipped, np.ndarray] = {}

    def states(skipped: Skipped, depth: int) -> np.ndarray:
        if skipped not in memo:
            memo[skipped] = run(skipped)
        return memo[skipped][depth]

    limit = int(budget_share * sum(weights))
    row: dict[int, tuple[Skipped, float]] = {0: (frozenset(), 1.0)}
    for i in range(first, len(weights)):
        target = states(frozenset(), i)
        found: dict[int, tuple[Skipped, float]] = {}
        for saving, (skipped, _) in row.items():
            found[saving] = (skipped, mean_cosine(states(skipped, i), target))
        if i in movable and weights[i] > 0:
            for saving, (skipped, _) in row.items():
                without = skipped | {i}
                score = mean_cosine(states(without, i), target)
                more = saving + weights[i]
                if more <= limit and (more not in found or score > found[more][1]):
                    found[more] = (without, score)
        del found[0]
        found = {s: found[s] for s in sorted(found) if found[s][1] >= min_cosine}
        if max_branches is not None and len(found) > max_branches - 1:
            found = spread(found, max_branches - 1)
        row = {0: (frozenset(), 1.0), **found}
    del row[0]
    return row
