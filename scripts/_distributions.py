"""What a row of logits makes probable under given settings, and how often two draws agree.

Bias, penalties and filters as records.Sampling describes them, in NumPy: for programs that judge
the native sampling. What comes behind the adjusted row is in double precision. Knows no grammars.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from knapspec_edge.records import Sampling  # noqa: E402


def adjusted(
    logits: NDArray[np.float32], sampling: Sampling, history: Sequence[int] = ()
) -> NDArray[np.float32]:
    """The row f32 [n_vocab] after bias and penalties, given the text before the position."""
    row = np.array(logits, dtype=np.float32)
    for token, bias in sampling.logit_bias:
        row[token] += np.float32(bias)
    last = sampling.penalty_last_n
    window = list(history) if last < 0 else list(history)[-last:] if last else []
    repeat = np.float32(sampling.repeat_penalty)
    for token, count in Counter(window).items():
        row[token] = row[token] * repeat if row[token] <= 0.0 else row[token] / repeat
        frequency = np.float32(count) * np.float32(sampling.frequency_penalty)
        row[token] -= frequency + np.float32(sampling.presence_penalty)
    return row


def _softmax(values: NDArray[np.float64]) -> NDArray[np.float64]:
    weights = np.exp(values - values.max())
    return weights / weights.sum()


def candidates(row: NDArray[np.float32], sampling: Sampling) -> NDArray[np.intp]:
    """Tokens that the filters leave of an adjusted row; the most probable first where there is a
    filter, else by id."""
    tokens = np.flatnonzero(row > -np.inf)
    if not any(
        (sampling.top_k > 0, sampling.typical_p < 1.0, sampling.top_p < 1.0, sampling.min_p > 0.0)
    ):
        return tokens
    if 0 < sampling.top_k < len(tokens):
        # what is below the k-th need not be sorted
        least = np.partition(row[tokens], len(tokens) - sampling.top_k)[-sampling.top_k]
        tokens = tokens[row[tokens] >= least]
    tokens = tokens[np.argsort(-row[tokens], kind="stable")]
    if sampling.top_k > 0:
        tokens = tokens[: sampling.top_k]
    first = sampling.temperature_first and sampling.temperature > 0.0
    scale = float(np.float32(sampling.temperature)) if first else 1.0
    values = row.astype(np.float64) / scale
    if sampling.typical_p < 1.0:
        p = _softmax(values[tokens])
        with np.errstate(divide="ignore"):
            surprise = -np.log(p)
        entropy = float((p[p > 0.0] * surprise[p > 0.0]).sum())
        order = np.argsort(np.abs(surprise - entropy), kind="stable")
        n = int(np.searchsorted(np.cumsum(p[order]), sampling.typical_p, side="right")) + 1
        tokens = tokens[np.sort(order[:n])]
    if sampling.top_p < 1.0:
        sums = np.cumsum(_softmax(values[tokens]))
        tokens = tokens[: int(np.searchsorted(sums, sampling.top_p, side="left")) + 1]
    if sampling.min_p > 0.0:
        least_value = values[tokens[0]] + math.log(min(sampling.min_p, 1.0))
        tokens = tokens[(values[tokens] >= least_value) | (tokens == tokens[0])]
    return tokens


def distribution(
    logits: NDArray[np.float32], sampling: Sampling, history: Sequence[int] = ()
) -> NDArray[np.float64]:
    """Probability f64 [n_vocab] of each token to be picked, over all seeds."""
    row = adjusted(logits, sampling, history)
    shares = np.zeros(len(row))
    left = candidates(row, sampling)
    if sampling.temperature <= 0.0:
        shares[left[np.argmax(row[left])]] = 1.0
        return shares
    shares[left] = _softmax(row[left].astype(np.float64) / float(np.float32(sampling.temperature)))
    return shares


class Agreement(NamedTuple):
    """Chance that a token drawn from q equals one drawn from p, 0..1."""

    gumbel: float  # both by Gumbel-max with the same noise
    maximal: float  # as often as any coupling allows: rejection sampling
    independent: float  # each with noise of its own: sample and match


def agreement(p: NDArray[np.float64], q: NDArray[np.float64]) -> Agreement:
    """Of two distributions f64 [n_vocab].

    With shared noise both take j where j comes first in both races: with chance
    1 / Σ_i max(p_i/p_j, q_i/q_j). Whoever has p_i/q_i at least that of j counts with p, all others
    with q, so sums over tokens sorted by that ratio are enough.
    """
    either = (p > 0.0) | (q > 0.0)
    p, q = p[either], q[either]
    with np.errstate(divide="ignore"):
        ratio = p / q
    order = np.argsort(-ratio)
    p, q = p[order], q[order]
    # tokens up to j count with p, those behind it with q; of equal ratios either way is the same
    above = np.cumsum(p)
    below = np.maximum(0.0, q.sum() - np.cumsum(q))
    both = (p > 0.0) & (q > 0.0)
    times = above[both] / p[both] + below[both] / q[both]
    return Agreement(
        float((1.0 / times).sum()), float(np.minimum(p, q).sum()), float((p * q).sum())
    )
