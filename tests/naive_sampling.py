"""The law of a pick, written for obviousness: bias, penalties, filters, race, grammar.

A pick is a pure function of one row of logits, the text before the position, the settings and the
position. The row is adjusted in single precision, as llama.cpp does it; everything behind that is
computed in double precision, so a decision that hangs on rounding may fall differently elsewhere:
`doubtful` says where.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from knapspec_edge.records import Sampling

MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15


class BadLogitsError(ValueError):
    """The row has no finite best."""


class DeadEndError(ValueError):
    """The grammar allows no token of the row."""


@dataclass(frozen=True)
class Nudge:
    """Shifts of what filters compare, to see whether rounding decides."""

    top_p: float = 0.0
    typical_p: float = 0.0
    entropy: float = 0.0
    min_p: float = 0.0
    near_is_equal: bool = False  # of what is about as typical, the more probable comes first


EXACT = Nudge()


@dataclass(frozen=True)
class Picked:
    token: int
    probability: float  # among what the filters left, in the run that gave the token
    margin: float  # in that run; infinite where nothing else was left
    rejected: int | None = None  # the token that a grammar turned down before


# -- 1. the row ------------------------------------------------------------------------------------


def adjusted(
    logits: NDArray[np.float32], sampling: Sampling, history: Sequence[int] = ()
) -> NDArray[np.float32]:
    """The row f32 [n_vocab] after logit bias and penalties."""
    f32 = np.float32
    row = np.array(logits, dtype=f32)
    with np.errstate(invalid="ignore", over="ignore"):
        for token, bias in sampling.logit_bias:
            row[token] += f32(bias)
        n = sampling.penalty_last_n
        window = list(history) if n < 0 else list(history)[-n:] if n else []
        for token, count in Counter(window).items():
            if not 0 <= token < len(row):
                continue
            repeat = f32(sampling.repeat_penalty)
            row[token] = row[token] * repeat if row[token] <= 0 else row[token] / repeat
            row[token] -= f32(count) * f32(sampling.frequency_penalty) + f32(
                sampling.presence_penalty
            )
    return row


def best_of(row: NDArray[np.float32]) -> float:
    numbers = row[~np.isnan(row)]
    if not len(numbers) or not math.isfinite(numbers.max()):
        raise BadLogitsError
    return float(numbers.max())


# -- 2. the filters --------------------------------------------------------------------------------


def softmax(values: NDArray[np.float64]) -> NDArray[np.float64]:
    weights = np.exp(values - values.max())
    return weights / weights.sum()


def until(reached: NDArray[np.bool_]) -> int:
    """How many there are up to the first that is true, that one included; all if none is."""
    return int(np.argmax(reached)) + 1 if reached.any() else len(reached)


def candidates(
    row: NDArray[np.float32], sampling: Sampling, nudge: Nudge = EXACT
) -> NDArray[np.intp]:
    """Token ids that the filters leave of an adjusted row: higher logit first, then lower id.
    Minus infinity and not-a-number are no candidates."""
    tokens = np.flatnonzero(row > -np.inf)
    tokens = tokens[np.argsort(-row[tokens].astype(np.float64), kind="stable")]
    first = sampling.temperature_first and sampling.temperature > 0
    temperature = float(np.float32(sampling.temperature)) if first else 1.0

    def scaled() -> NDArray[np.float64]:
        return row[tokens].astype(np.float64) / temperature

    if sampling.top_k > 0:
        tokens = tokens[: sampling.top_k]
    if sampling.typical_p < 1:
        p = softmax(scaled())
        with np.errstate(divide="ignore"):
            surprise = -np.log(p)
        entropy = float((p[p > 0] * surprise[p > 0]).sum())
        distance = np.abs(surprise - (entropy + nudge.entropy))
        order = np.argsort(distance.round(5) if nudge.near_is_equal else distance, kind="stable")
        n = until(np.cumsum(p[order]) > sampling.typical_p + nudge.typical_p)
        tokens = tokens[np.sort(order[:n])]
    if sampling.top_p < 1:
        tokens = tokens[: until(np.cumsum(softmax(scaled())) >= sampling.top_p + nudge.top_p)]
    if sampling.min_p > 0:
        values = scaled()
        kept = values >= values[0] + math.log(min(sampling.min_p, 1.0)) + nudge.min_p
        kept[0] = True
        tokens = tokens[kept]
    return tokens


# -- 3. the race -----------------------------------------------------------------------------------


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def mix(z: int) -> int:
    """The finaliser of SplitMix64, of one number."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def exponentials(seed: int, position: int, tokens: NDArray[np.intp]) -> NDArray[np.float64]:
    """-log(u) of each token, u in (0, 1) a hash of (seed, position, token)."""
    key = mix(mix((seed + GOLDEN) & MASK) ^ ((GOLDEN * (position + 1)) & MASK))
    with np.errstate(over="ignore"):
        hashed = _mix(
            np.uint64(key) + np.uint64(GOLDEN) * (tokens.astype(np.uint64) + np.uint64(1))
        )
    one_minus_u = ((hashed >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    return -np.log1p(-one_minus_u)


def log_times(
    row: NDArray[np.float32], tokens: NDArray[np.intp], sampling: Sampling, position: int
) -> NDArray[np.float64]:
    """Logarithms of when each token arrives: at -log(u) / exp((logit - best of the row) / T)."""
    y = (row[tokens].astype(np.float64) - best_of(row)) / float(np.float32(sampling.temperature))
    return np.log(exponentials(sampling.seed, position, tokens)) - y


# -- 4. all of it ----------------------------------------------------------------------------------


def pick(
    logits: NDArray[np.float32],
    sampling: Sampling,
    position: int = 0,
    history: Sequence[int] = (),
    allowed: NDArray[np.bool_] | None = None,
    nudge: Nudge = EXACT,
) -> Picked:
    """The pick for `position`; `allowed` bool [n_vocab] is what a grammar would let pass there.

    Raises BadLogitsError, DeadEndError.
    """
    row = adjusted(logits, sampling, history)
    best_of(row)
    greedy = not sampling.temperature > 0
    left = candidates(row, sampling, nudge)
    times = np.zeros(0) if greedy else log_times(row, left, sampling, position)
    first = 0 if greedy else int(np.argmin(times))
    token, rejected = int(left[first]), None

    if allowed is not None and not allowed[token]:
        rejected, before = token, left
        row = np.where(allowed, row, np.float32(-np.inf))
        if not (row > -np.inf).any():
            raise DeadEndError
        left = candidates(row, sampling, nudge)
        if not greedy:
            # Whoever ran already has not arrived by the time the rejected winner did, and keeps
            # running; the others start then. Waiting times have no memory, so this is an
            # independent draw.
            start = times[first]
            times = log_times(adjusted(logits, sampling, history), left, sampling, position)
            new = ~np.isin(left, before)
            times[new] = np.logaddexp(start, times[new])
            first = int(np.argmin(times))
        token = int(left[first])

    if greedy:
        # of all filters only typical can change an argmax, so the others count for nothing there
        left = np.flatnonzero(row > -np.inf)
        if sampling.typical_p < 1:
            left = candidates(row, replace(sampling, top_p=1.0, min_p=0.0), nudge)
        ordered = np.sort(-row[left].astype(np.float64))
    else:
        ordered = np.sort(times)
    margin = float(ordered[1] - ordered[0]) if len(ordered) > 1 else math.inf
    temperature = 1.0 if greedy else float(np.float32(sampling.temperature))
    shares = softmax(row[left].astype(np.float64) / temperature)
    return Picked(token, float(shares[left == token][0]), margin, rejected)


# -- what it means ---------------------------------------------------------------------------------


def distribution(
    logits: NDArray[np.float32],
    sampling: Sampling,
    history: Sequence[int] = (),
    allowed: NDArray[np.bool_] | None = None,
) -> NDArray[np.float64]:
    """Probability f64 [n_vocab] of each token to be picked, over all seeds, by enumeration."""
    row = adjusted(logits, sampling, history)
    best_of(row)
    first = _shares(row, sampling)
    if allowed is None:
        return first
    passed = np.where(allowed, first, 0.0)
    rejected = first[~allowed].sum()
    if not rejected:
        return passed
    rest = np.where(allowed, row, np.float32(-np.inf))
    if not (rest > -np.inf).any():
        raise DeadEndError
    return passed + rejected * _shares(rest, sampling)


def _shares(row: NDArray[np.float32], sampling: Sampling) -> NDArray[np.float64]:
    left = candidates(row, sampling)
    shares = np.zeros(len(row))
    if sampling.temperature > 0:
        temperature = float(np.float32(sampling.temperature))
        shares[left] = softmax(row[left].astype(np.float64) / temperature)
    else:
        shares[left[0]] = 1.0
    return shares


def log_probabilities(
    logits: NDArray[np.float32], token: int, n_top: int
) -> tuple[float, tuple[tuple[int, float], ...]]:
    """Of `token`, and the n_top most probable (token, log-probability): the model's own."""
    values = np.where(np.isnan(logits), -np.inf, logits.astype(np.float64))
    best = values.max()
    log = values - best - math.log(np.exp(values - best).sum())
    order = np.argsort(-values, kind="stable")[:n_top]
    return float(log[token]), tuple((int(t), float(log[t])) for t in order)


# -- where rounding decides ------------------------------------------------------------------------


def nudges(sampling: Sampling, size: float = 2e-6) -> Iterator[Nudge]:
    """All ways to shift the comparisons of the filters that are on by a rounding error."""
    both = (-size, size)
    typical = sampling.typical_p < 1
    return (
        Nudge(*shifts)
        for shifts in itertools.product(
            both if sampling.top_p < 1 else (0.0,),
            both if typical else (0.0,),
            both if typical else (0.0,),
            # logits of 60 have an ulp of 4e-6; at 1 only the best is left, exactly
            (-1e-5, 1e-5) if 0 < sampling.min_p < 1 else (0.0,),
            (False, True) if typical else (False,),
        )
    )


def outcomes(
    logits: NDArray[np.float32],
    sampling: Sampling,
    position: int = 0,
    history: Sequence[int] = (),
    allowed: NDArray[np.bool_] | None = None,
) -> list[Picked]:
    """The exact pick first, then the picks with every comparison shifted by a rounding error."""
    shifted = (EXACT, *(nudge for nudge in nudges(sampling) if nudge != EXACT))
    return [pick(logits, sampling, position, history, allowed, nudge) for nudge in shifted]


def doubtful(picked: Sequence[Picked], sampling: Sampling) -> bool:
    """Whether a rounding error in a filter or in the race may change the token."""
    near = sampling.temperature > 0 and min(p.margin for p in picked) < 2e-5
    return near or len({p.token for p in picked}) > 1


# -- are draws what they should be? ----------------------------------------------------------------


def chi_square_limit(freedom: int, tail: float = 0.001) -> float:
    """What chi-square exceeds with chance `tail`, by Wilson and Hilferty; off by 1 % at most from
    three degrees of freedom on, to the safe side below."""
    z = NormalDist().inv_cdf(1.0 - tail)
    part = 2.0 / (9.0 * freedom)
    return freedom * (1.0 - part + z * math.sqrt(part)) ** 3


def chi_square_excess(counts: Mapping[int, int], expected: NDArray[np.float64]) -> float:
    """How far chi-square of drawn tokens exceeds its 0.1 % point; positive: not that distribution.

    Tokens expected less than 5 times are put together. A token that cannot come is infinitely far.
    """
    n = sum(counts.values())
    if any(expected[token] == 0.0 for token in counts):
        return math.inf
    often = [t for t in np.flatnonzero(expected) if n * expected[t] >= 5]
    cells = [(counts.get(int(t), 0), n * float(expected[t])) for t in often]
    rare = (n - sum(c for c, _ in cells), n - sum(e for _, e in cells))
    if rare[1] >= 5:
        cells.append(rare)
    elif rare[1] > 1e-9 * n or rare[0]:
        # too few for a cell of their own
        cells[-1] = (cells[-1][0] + rare[0], cells[-1][1] + rare[1])
    if len(cells) == 1:
        return 0.0
    statistic = sum((c - e) ** 2 / e for c, e in cells)
    return statistic - chi_square_limit(len(cells) - 1)
