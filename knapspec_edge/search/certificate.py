"""When does the cosine between two states alone guarantee the same greedy token? (Lemma 4.1)

Setting: logits are <w_j, x> for the rows w_j of the head and the state x at its input. The target's
state x predicts i* = argmax_j <w_j, x>; a draft's state x' points in almost the same direction. The
least cosine from which x' has to predict i* as well is known from x and the head alone:

* loose, as published: 1 - xi^2 / (2 |x|^2 max_j |w_i* - w_j|^2), where xi is the distance between
  the two largest logits. The lemma asks for |x'| = |x|; that is unnecessary, because multiplying x'
  by a positive number does not change its argmax.
* tight: max_j sqrt(1 - m_j^2 / |d_j|^2) for d_j = w_i* - w_j and m_j = <d_j, x> / |x|: the angle to
  the nearest plane on which some competitor j draws level. Never larger than the loose one.

Both are strict: at equality the argmax may be a tie, and a state that already is one guarantees
nothing. Logits that are scaled by a positive factor or capped by a growing function have the same
argmax.

States are those that the head multiplies, so after the final norm with its gain. The cosine of
states before it is another quantity: RMSNorm is a positive scaling, which does not matter, followed
by a product with its gain g, which does. Whoever has states before the norm takes g * w_j as rows.

A head with a bias b_j is the same thing in one more dimension: rows (w_j, b_j) and states (x, 1).
There the length of x' does matter; `cosines` and `requirement` treat it so.

What the certificate is worth: it tells that a draft is safe, hardly ever that it is not. Measured
agreement is many times larger (method: margins are small where dimensions are many).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

# Rows of the head that are multiplied at once: 20 MB at 640 dimensions.
_CHUNK_ROWS = 8192
# Competitors of a position that are looked at exactly at once: the nearest first, then ever more.
_FIRST_ROWS, _MOST_ROWS = 16, 2048
# Error of sums in 64 bits, relative: a cosine has to beat the requirement by this.
_SLACK = 1e-13


class Head(Protocol):
    """The output projection. Rows are asked for in chunks, so that they may lie in a file."""

    @property
    def n_vocab(self) -> int: ...

    @property
    def n_embd(self) -> int: ...

    @property
    def bias(self) -> NDArray[np.float32] | None:
        """f32 [n_vocab], or None."""
        ...

    def rows(self, start: int, stop: int) -> NDArray[np.float32]:
        """f32 [stop - start, n_embd]; not written to."""
        ...

    def take(self, indices: NDArray[np.intp]) -> NDArray[np.float32]:
        """The rows with these indices, f32 [len(indices), n_embd]."""
        ...


class DenseHead:
    """A head whose rows are an array in memory, which is not copied.

    Raises ValueError for a weight that is no f32 [n_vocab, n_embd], or a bias that is no f32
    [n_vocab].
    """

    def __init__(
        self, weight: NDArray[np.float32], bias: NDArray[np.float32] | None = None
    ) -> None:
        if weight.ndim != 2 or not weight.size or weight.dtype != np.float32:
            raise ValueError("a head is f32 [vocabulary, dimension]")
        if bias is not None and (bias.shape != weight.shape[:1] or bias.dtype != np.float32):
            raise ValueError("the bias of a head is f32 [vocabulary]")
        self.weight = weight
        self.bias = bias
        self.n_vocab, self.n_embd = weight.shape

    def rows(self, start: int, stop: int) -> NDArray[np.float32]:
        return self.weight[start:stop]

    def take(self, indices: NDArray[np.intp]) -> NDArray[np.float32]:
        return self.weight[indices]


@dataclass(frozen=True, eq=False)
class Requirement:
    """What a draft's state has to keep to, at each of r positions. See the module."""

    token: NDArray[np.int64]  # i64 [r]: i*, the first of the largest logits
    margin: NDArray[np.float64]  # f64 [r]: xi, 0 where the largest logit is a tie
    # f64 [r]: the same token for certain if the cosine is above this; 1 where nothing suffices,
    # -inf where there is no competitor
    loose: NDArray[np.float64]
    tight: NDArray[np.float64]


def requirement(states: NDArray[np.float32], head: Head) -> Requirement:
    """The least cosines that guarantee the target's token, for states f32 [r, n_embd].

    One multiplication of all states with the head gives the logits, and one of the predicted rows
    with it their distances, both in 32 bits; every competitor that could be the nearest in spite of
    the rounding is looked at again in 64. Memory: 2 x r x n_vocab x 4 bytes, and a chunk of the
    head at a time. Raises ValueError for states of another shape or
    dtype, and for numbers that are not finite.
    """
    _check(states, head)
    r, n_vocab = len(states), head.n_vocab
    exact_states = states.astype(np.float64)  # f64 [r, d]
    lengths = _lengths(exact_states, head.bias is not None)  # f64 [r]
    logits, norms = _multiply(states, head)
    # What a sum of d products in 32 bits can be wrong by, relative to the lengths of the factors.
    error = (head.n_embd + 3) * 2.0**-24

    token = np.zeros(r, dtype=np.int64)
    margin = np.zeros(r, dtype=np.float64)
    sine = np.zeros(r, dtype=np.float64)  # of the angle to the nearest plane
    for p in range(r):
        if lengths[p] > 0.0:
            token[p], margin[p] = _winner(
                exact_states[p], lengths[p], logits[p], norms, error, head
            )
    unique, row = np.unique(token, return_inverse=True)
    squares = _squared_distances(unique, norms, head)  # f32 [u, V]
    farthest = _farthest(unique, squares, head)[row]  # f64 [r]: max_j |w_i* - w_j|
    for p in range(r):
        if lengths[p] > 0.0:
            sine[p] = _nearest(
                exact_states[p],
                lengths[p],
                int(token[p]),
                logits[p],
                squares[row[p]],
                norms,
                error,
                head,
            )
    tight = np.sqrt(np.maximum(0.0, 1.0 - sine**2))
    with np.errstate(divide="ignore", invalid="ignore"):
        loose = 1.0 - 0.5 * (margin / (lengths * farthest)) ** 2
    undecided = ~(sine > 0.0)
    tight[undecided] = loose[undecided] = 1.0
    if n_vocab == 1:
        tight[:] = loose[:] = -np.inf
    # sqrt(1 - s^2) <= 1 - s^2 / 2: the maximum only takes care of rounding
    return Requirement(token, margin, np.maximum(loose, tight), tight)


def cosines(
    states: NDArray[np.float32], drafts: NDArray[np.float32], head: Head
) -> NDArray[np.float64]:
    """f64 [r]: the cosines to compare with a requirement, between states f32 [r, n_embd].

    NaN, which is above nothing, where a state is zero.
    """
    _check(states, head)
    _check(drafts, head)
    if states.shape != drafts.shape:
        raise ValueError(f"states {states.shape} and draft states {drafts.shape} do not match")
    one, other = states.astype(np.float64), drafts.astype(np.float64)
    extra = head.bias is not None
    products = np.einsum("rd,rd->r", one, other) + float(extra)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(products / (_lengths(one, extra) * _lengths(other, extra)))


def certified(cosine: NDArray[np.float64], required: NDArray[np.float64]) -> NDArray[np.bool_]:
    """bool [r]: where the cosine guarantees the token, see `Requirement`."""
    return np.asarray(cosine - _SLACK > required) & (required < 1.0)


def total_variation_bound(
    logits: NDArray[np.float32], drafts: NDArray[np.float32], temperature: float = 1.0
) -> NDArray[np.float64]:
    """f64 [r]: an upper bound of the total variation distance between the distributions that logits
    f32 [r, n_vocab] of target and draft mean at a temperature (> 0).

    TV <= tanh(D / 4), where D is the spread (largest minus smallest) of the difference of the
    logits; so rejection sampling accepts at least 1 - tanh(D / 4). Tokens that both forbid (minus
    infinity) do not count; one that only one of them forbids makes the bound 1. Unlike for greedy
    tokens, the length of the draft's state matters here. Raises ValueError for other temperatures
    and shapes.
    """
    if not temperature > 0.0:
        raise ValueError(f"a temperature above 0 is needed, not {temperature}")
    if logits.shape != drafts.shape or logits.ndim != 2 or not logits.shape[1]:
        raise ValueError(f"logits {logits.shape} and draft logits {drafts.shape} do not match")
    one, other = logits.astype(np.float64), drafts.astype(np.float64)
    both = np.isneginf(one) & np.isneginf(other)
    difference = np.where(both, 0.0, other) - np.where(both, 0.0, one)
    largest = np.where(both, -np.inf, difference).max(axis=1)
    smallest = np.where(both, np.inf, difference).min(axis=1)
    spread = np.where(both.all(axis=1), 0.0, largest - smallest)
    return np.asarray(np.tanh(spread / (4.0 * temperature)))


def _check(states: NDArray[np.float32], head: Head) -> None:
    if states.ndim != 2 or states.shape[1] != head.n_embd or states.dtype != np.float32:
        raise ValueError(f"states have to be f32 [positions, {head.n_embd}]")
    if not np.isfinite(states).all():
        raise ValueError("a state holds numbers that are not finite")


def _lengths(states: NDArray[np.float64], extra: bool) -> NDArray[np.float64]:
    """f64 [r]: lengths, of (x, 1) where there is an `extra` dimension."""
    return np.asarray(np.sqrt(np.einsum("rd,rd->r", states, states) + float(extra)))


def _multiply(
    states: NDArray[np.float32], head: Head
) -> tuple[NDArray[np.float32], NDArray[np.float64]]:
    """(logits f32 [r, V], lengths of the head's rows f64 [V], rounded up), bias included."""
    logits = np.empty((len(states), head.n_vocab), dtype=np.float32)
    squares = np.empty(head.n_vocab, dtype=np.float64)
    for start in range(0, head.n_vocab, _CHUNK_ROWS):
        rows = head.rows(start, min(head.n_vocab, start + _CHUNK_ROWS))
        stop = start + len(rows)
        np.matmul(states, rows.T, out=logits[:, start:stop])
        squares[start:stop] = np.einsum("vd,vd->v", rows, rows)
    if head.bias is not None:
        logits += head.bias
        squares += head.bias.astype(np.float64) ** 2
    if not (np.isfinite(logits).all() and np.isfinite(squares).all()):
        raise ValueError("a logit or a row of the head is not finite")
    return logits, np.sqrt(squares * (1.0 + 2.0**-23 * (head.n_embd + 3)))


def _winner(
    state: NDArray[np.float64],
    length: float,
    logits: NDArray[np.float32],
    norms: NDArray[np.float64],
    error: float,
    head: Head,
) -> tuple[int, float]:
    """The first of the largest logits, and by how much it is the largest (infinite without
    competitors): in 64 bits where 32 do not tell."""
    second = np.argpartition(logits, -2)[-2] if len(logits) > 1 else 0
    doubt = 2.0 * error * length * (norms[second] + norms)
    candidates = np.flatnonzero(logits >= logits[second] - doubt)
    rows = head.take(candidates).astype(np.float64)
    bias = np.zeros(len(rows)) if head.bias is None else head.bias[candidates].astype(np.float64)
    first = int(np.argmax(rows @ state + bias))
    # of differences, so that nearly equal rows are told apart
    gaps = (rows[first] - rows) @ state + (bias[first] - bias)
    others = np.delete(gaps, first)
    return int(candidates[first]), max(0.0, float(others.min(initial=np.inf)))


def _nearest(
    state: NDArray[np.float64],
    length: float,
    winner: int,
    logits: NDArray[np.float32],
    squares: NDArray[np.float32],
    norms: NDArray[np.float64],
    error: float,
    head: Head,
) -> float:
    """The sine of the angle between the state and the nearest plane on which a competitor draws
    level. Infinite without competitors; 0 for a tie."""
    # The sine is not less than this, whatever the rounding, so only few have to be known exactly.
    doubt = 2.0 * error * (norms[winner] + norms)  # of m_j
    distances = np.sqrt(squares + 4.0 * error * (norms[winner] + norms) ** 2)
    with np.errstate(divide="ignore", invalid="ignore"):
        least = ((float(logits[winner]) - logits) / length - doubt) / distances  # f64 [V]
    least = np.where(distances > 0.0, least, -np.inf)
    least[winner] = np.inf
    own = head.take(np.array([winner]))[0].astype(np.float64)
    sine = np.inf
    wanted = _FIRST_ROWS
    while True:
        candidates = np.flatnonzero(least < np.inf)
        if len(candidates) > wanted:
            candidates = np.argpartition(least, wanted)[:wanted]
        if not len(candidates) or least[candidates].min() > sine:
            return sine
        candidates = np.sort(candidates)
        differences = own - head.take(candidates)
        gaps = differences @ state
        exact = np.einsum("nd,nd->n", differences, differences)
        if head.bias is not None:
            apart = float(head.bias[winner]) - head.bias[candidates].astype(np.float64)
            gaps += apart
            exact += apart**2
        with np.errstate(divide="ignore", invalid="ignore"):
            sines = np.minimum(1.0, gaps / (np.sqrt(exact) * length))
        sines[~((gaps > 0.0) & (exact > 0.0))] = 0.0  # equal rows tie whatever the state
        sine = min(sine, float(sines.min()))
        least[candidates] = np.inf
        wanted = min(_MOST_ROWS, 4 * wanted)


def _squared_distances(
    tokens: NDArray[np.int64], norms: NDArray[np.float64], head: Head
) -> NDArray[np.float32]:
    """f32 [u, V]: |w_t - w_j|^2 of the rows of these tokens to all others, to 32 bits, 0 or more.

    Off by no more than 4 e (|w_t| + |w_j|)^2, where e is the relative error of a sum of products.
    """
    squares = np.empty((len(tokens), head.n_vocab), dtype=np.float32)
    own = head.take(tokens)  # f32 [u, d]
    for start in range(0, head.n_vocab, _CHUNK_ROWS):
        stop = min(head.n_vocab, start + _CHUNK_ROWS)
        products = (own @ head.rows(start, stop).T).astype(np.float64)  # f64 [u, chunk]
        if head.bias is not None:
            products += np.outer(head.bias[tokens].astype(np.float64), head.bias[start:stop])
        sums = norms[tokens, None] ** 2 + norms[start:stop] ** 2
        squares[:, start:stop] = np.maximum(0.0, sums - 2.0 * products)
    return squares


def _farthest(
    tokens: NDArray[np.int64], squares: NDArray[np.float32], head: Head
) -> NDArray[np.float64]:
    """f64 [u]: the largest of the distances that `_squared_distances` gives, exactly."""
    at = squares.argmax(axis=1)
    exact = head.take(tokens).astype(np.float64) - head.take(at)
    result = np.einsum("ud,ud->u", exact, exact)
    if head.bias is not None:
        result += (head.bias[tokens].astype(np.float64) - head.bias[at]) ** 2
    return np.asarray(np.sqrt(result))
