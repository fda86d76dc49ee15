"""The certificate once more, in plain Python, written to be obviously right."""

from __future__ import annotations

import math
from collections.abc import Sequence

Vector = Sequence[float]


def dot(a: Vector, b: Vector) -> float:
    return math.fsum(x * y for x, y in zip(a, b, strict=True))


def length(a: Vector) -> float:
    return math.sqrt(dot(a, a))


def argmax(values: Sequence[float]) -> int:
    return max(range(len(values)), key=lambda i: (values[i], -i))


def extended(
    state: Vector, rows: Sequence[Vector], bias: Vector | None
) -> tuple[list[float], list[list[float]]]:
    """A bias as one more dimension."""
    if bias is None:
        return list(state), [list(row) for row in rows]
    return [*state, 1.0], [[*row, b] for row, b in zip(rows, bias, strict=True)]


def required(
    state: Vector, rows: Sequence[Vector], bias: Vector | None = None
) -> tuple[int, float, float, float]:
    """(token, margin, loose, tight) as search.certificate.Requirement has them."""
    x, w = extended(state, rows, bias)
    logits = [dot(row, x) for row in w]
    token = argmax(logits)
    others = [j for j in range(len(w)) if j != token]
    if not others:
        return token, math.inf, -math.inf, -math.inf
    margin = min(logits[token] - logits[j] for j in others)
    if margin <= 0.0:
        return token, 0.0, 1.0, 1.0
    apart = {j: [a - b for a, b in zip(w[token], w[j], strict=True)] for j in others}
    widest = max(length(apart[j]) for j in others)
    loose = 1.0 - margin**2 / (2.0 * length(x) ** 2 * widest**2)
    tight = -1.0
    for j in others:
        sine = dot(apart[j], x) / length(x) / length(apart[j])
        tight = max(tight, math.sqrt(max(0.0, 1.0 - sine**2)))
    return token, margin, loose, tight


def cosine(a: Vector, b: Vector, bias: bool = False) -> float:
    one, other = [*a, *([1.0] if bias else [])], [*b, *([1.0] if bias else [])]
    return dot(one, other) / (length(one) * length(other))


def softmax(logits: Vector, temperature: float) -> list[float]:
    top = max(logits)
    weights = [math.exp((z - top) / temperature) for z in logits]
    return [w / math.fsum(weights) for w in weights]


def total_variation(p: Vector, q: Vector) -> float:
    return 0.5 * math.fsum(abs(a - b) for a, b in zip(p, q, strict=True))
