"""The naive sampler against llama.cpp's own examples, and its draws against its enumeration."""

from __future__ import annotations

import math
from collections import Counter

import naive_sampling
import numpy as np
import pytest

from knapspec_edge.records import Sampling


def left(probabilities: list[float], sampling: Sampling) -> list[float]:
    """What the filters leave, as rounded probabilities of the full distribution."""
    row = np.log(np.array(probabilities)).astype(np.float32)
    return [probabilities[i] for i in naive_sampling.candidates(row, sampling)]


FOUR = [0.1, 0.2, 0.3, 0.4]


# The cases of tests/test-sampling.cpp in llama.cpp, where a threshold is not an exact boundary.
@pytest.mark.parametrize(
    ("probabilities", "sampling", "expected"),
    [
        (FOUR, Sampling(top_k=1), [0.4]),
        (FOUR, Sampling(top_k=3), [0.4, 0.3, 0.2]),
        (FOUR, Sampling(top_k=4), [0.4, 0.3, 0.2, 0.1]),
        (FOUR, Sampling(top_k=0), [0.4, 0.3, 0.2, 0.1]),
        (FOUR, Sampling(top_p=0.0), [0.4]),
        (FOUR, Sampling(top_p=0.69), [0.4, 0.3]),
        (FOUR, Sampling(top_p=0.8), [0.4, 0.3, 0.2]),
        (FOUR, Sampling(top_p=1.0), [0.4, 0.3, 0.2, 0.1]),
        (FOUR, Sampling(min_p=0.24), [0.4, 0.3, 0.2, 0.1]),
        (FOUR, Sampling(min_p=0.26), [0.4, 0.3, 0.2]),
        (FOUR, Sampling(min_p=0.49), [0.4, 0.3, 0.2]),
        (FOUR, Sampling(min_p=0.51), [0.4, 0.3]),
        (FOUR, Sampling(min_p=0.74), [0.4, 0.3]),
        (FOUR, Sampling(min_p=0.76), [0.4]),
        (FOUR, Sampling(min_p=1.05), [0.4]),
        ([0.97, 0.01, 0.01, 0.01], Sampling(typical_p=0.5), [0.97]),
        ([0.4, 0.2, 0.2, 0.2], Sampling(typical_p=0.5), [0.2, 0.2, 0.2]),
        # probabilities at temperature 2 are flatter, so a prefix of 0.69 is longer
        (FOUR, Sampling(2.0, top_p=0.69, temperature_first=True), [0.4, 0.3, 0.2]),
        (FOUR, Sampling(2.0, top_p=0.69), [0.4, 0.3]),
    ],
)
def test_filters_leave_what_llama_cpp_leaves(
    probabilities: list[float], sampling: Sampling, expected: list[float]
) -> None:
    assert left(probabilities, sampling) == expected


@pytest.mark.parametrize(
    ("history", "sampling", "expected"),
    [
        ([0], Sampling(repeat_penalty=50.0), [0, 0.25, 0.25, 0.25, 0.25]),
        ([0, 1, 2], Sampling(repeat_penalty=50.0), [0, 0, 0, 0.5, 0.5]),
        ([0, 1, 2, 0, 0], Sampling(repeat_penalty=50.0), [0, 0, 0, 0.5, 0.5]),
        (
            [0],
            Sampling(frequency_penalty=5.0, presence_penalty=5.0),
            [0.000011, 0.249997, 0.249997, 0.249997, 0.249997],
        ),
        (
            [0, 1, 2],
            Sampling(frequency_penalty=5.0, presence_penalty=5.0),
            [0.000023, 0.000023, 0.000023, 0.499966, 0.499966],
        ),
        (
            [0, 1, 2, 0, 0],
            Sampling(frequency_penalty=5.0, presence_penalty=5.0),
            [0.000000, 0.000023, 0.000023, 0.499977, 0.499977],
        ),
    ],
)
def test_penalties_do_what_llama_cpp_does(
    history: list[int], sampling: Sampling, expected: list[float]
) -> None:
    row = np.full(5, math.log(0.2), dtype=np.float32)
    found = naive_sampling.softmax(
        naive_sampling.adjusted(row, sampling, history).astype(np.float64)
    )
    assert found == pytest.approx(expected, abs=1e-3)


def test_the_window_ends_at_the_position() -> None:
    row = np.zeros(4, dtype=np.float32)
    sampling = Sampling(presence_penalty=1.0, frequency_penalty=0.25, penalty_last_n=3)
    assert list(naive_sampling.adjusted(row, sampling, [0, 1, 2, 2])) == [0, -1.25, -1.5, 0]


ROW = np.array([2.0, 1.5, 0, -1, 0.3, 1.0, -2, 0.5, 1.9, -0.5, 0.1, 0.7], dtype=np.float32)
ALLOWED = np.isin(np.arange(12), [1, 3, 4, 6, 7, 10])
HISTORY = [0, 8, 8, 1]
SETTINGS = [
    Sampling(0.8),
    Sampling(0.8, top_k=5),
    Sampling(1.2, typical_p=0.6),
    Sampling(0.7, top_p=0.8, temperature_first=True),
    Sampling(1.0, min_p=0.2, repeat_penalty=1.5, frequency_penalty=0.3),
    Sampling(1.5, top_k=8, typical_p=0.9, top_p=0.9, min_p=0.1, logit_bias=((4, 1.0),)),
]


@pytest.mark.parametrize("grammar", [False, True])
@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
def test_draws_follow_the_enumeration(sampling: Sampling, grammar: bool) -> None:
    """Above all after a rejection, where the second race goes on with the times of the first."""
    allowed = ALLOWED if grammar else None
    expected = naive_sampling.distribution(ROW, sampling, HISTORY, allowed)
    assert expected.sum() == pytest.approx(1.0)
    n = 4000
    drawn = [naive_sampling.pick(ROW, sampling, i, HISTORY, allowed) for i in range(n)]
    counts = Counter(p.token for p in drawn)
    assert naive_sampling.chi_square_excess(counts, expected) <= 0
    if grammar:
        assert any(p.rejected is not None for p in drawn)
        assert any(p.rejected is None for p in drawn)


def test_a_time_that_starts_anew_after_a_rejection_would_be_noticed() -> None:
    """The obvious mistake: the second run of the race with the same noise and nobody delayed."""
    sampling = Sampling(1.0, top_k=3)
    row = np.array([1.0, 0.9, 0.8, 0.7, 0.6, 0.5], dtype=np.float32)
    allowed = np.array([False, True, False, True, True, False])
    expected = naive_sampling.distribution(row, sampling, (), allowed)

    def wrong(position: int) -> int:
        first = naive_sampling.pick(row, sampling, position).token
        if allowed[first]:
            return first
        rest = np.where(allowed, row, np.float32(-np.inf))
        return naive_sampling.pick(rest, sampling, position).token

    right = Counter(
        naive_sampling.pick(row, sampling, i, allowed=allowed).token for i in range(4000)
    )
    assert naive_sampling.chi_square_excess(right, expected) <= 0
    mistaken = Counter(wrong(i) for i in range(4000))
    assert naive_sampling.chi_square_excess(mistaken, expected) > 0


def test_log_probabilities_are_the_models_own() -> None:
    logprob, top = naive_sampling.log_probabilities(ROW, 3, 4)
    p = naive_sampling.softmax(ROW.astype(np.float64))
    assert logprob == pytest.approx(math.log(p[3]))
    assert [token for token, _ in top] == [0, 8, 1, 5]
    assert [value for _, value in top] == pytest.approx([math.log(p[t]) for t in (0, 8, 1, 5)])


def test_rounding_at_a_threshold_is_noticed() -> None:
    row = np.zeros(4, dtype=np.float32)
    near = Sampling(1.0, top_p=0.5)
    doubts = [naive_sampling.outcomes(row, near, i) for i in range(200)]
    assert any(naive_sampling.doubtful(d, near) for d in doubts)
    clear = Sampling(1.0, top_p=0.6)
    sure = [naive_sampling.outcomes(row, clear, i) for i in range(200)]
    assert not any(naive_sampling.doubtful(d, clear) for d in sure)


def test_nothing_left_is_said() -> None:
    with pytest.raises(naive_sampling.BadLogitsError):
        naive_sampling.pick(np.array([np.nan, -np.inf], dtype=np.float32), Sampling())
    with pytest.raises(naive_sampling.DeadEndError):
        naive_sampling.pick(ROW, Sampling(), allowed=np.zeros(12, dtype=bool))
