"""The native pick against an obvious twin in NumPy, and its distribution against exact values."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import naive_sampling
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from knapspec_edge.native import bindings
from knapspec_edge.native.library import library_file, load
from knapspec_edge.records import Sampling

from .picking import native_pick

pytestmark = pytest.mark.skipif(library_file("llama") is None, reason="no patched library")

MASK = 2**64 - 1


def pick(
    logits: np.ndarray,
    temperature: float = 0.0,
    min_p: float = 0.0,
    seed: int = 0,
    position: int = 0,
) -> tuple[int, int, float, float]:
    """The same with the settings that most tests here need."""
    return native_pick(logits, Sampling(temperature, min_p, seed), position)


rows = st.integers(1, 200).flatmap(
    lambda n: st.lists(st.floats(-60, 60, width=32), min_size=n, max_size=n)
)


class Doubts:
    """How often rounding decided, so that a pick proves nothing. Has to stay rare."""

    def __init__(self) -> None:
        self.tried = self.skipped = 0

    def compare(
        self,
        logits: np.ndarray,
        sampling: Sampling,
        position: int = 0,
        history: Sequence[int] = (),
    ) -> None:
        """Native against naive: code, token, probability, margin."""
        code, token, probability, margin = native_pick(logits, sampling, position, history)
        try:
            expected = naive_sampling.outcomes(logits, sampling, position, history)
        except naive_sampling.BadLogitsError:
            assert code == bindings.BAD_LOGITS
            return
        assert code == 0
        self.tried += 1
        if naive_sampling.doubtful(expected, sampling):
            self.skipped += 1
            assert token in {p.token for p in expected} or expected[0].margin < 2e-5
            return
        assert token == expected[0].token
        assert any(
            probability == pytest.approx(p.probability, rel=1e-3, abs=1e-12) for p in expected
        )
        # weights below exp(-87) count for nothing
        assert any(
            margin == pytest.approx(p.margin, rel=1e-3, abs=1e-4) or min(margin, p.margin) > 80
            for p in expected
        )


@pytest.fixture(scope="module")
def doubts():
    counted = Doubts()
    yield counted
    assert counted.skipped <= 0.02 * counted.tried + 5, vars(counted)


@given(rows)
@settings(max_examples=200, deadline=None)
def test_greedy_is_the_first_argmax(values: list[float]) -> None:
    logits = np.array(values, dtype=np.float32)
    code, token, probability, margin = pick(logits)
    assert code == 0
    assert token == int(np.argmax(logits))
    wide = logits.astype(np.float64)
    assert probability == pytest.approx(1 / np.exp(wide - wide.max()).sum(), rel=1e-5)
    if len(values) > 1:
        top = np.sort(logits)[-2:]
        assert margin == top[1] - top[0]
    else:
        assert margin == math.inf


@given(rows, st.floats(0.0625, 5.0, width=32), st.integers(0, MASK), st.integers(0, 10**6))
@settings(max_examples=200, deadline=None)
def test_sampling_equals_the_twin(
    doubts: Doubts, values: list[float], temperature: float, seed: int, position: int
) -> None:
    doubts.compare(np.array(values, np.float32), Sampling(temperature, seed=seed), position)


@given(rows, st.floats(0.015625, 1.0, width=32), st.integers(0, 1000))
@settings(max_examples=100, deadline=None)
def test_min_p_equals_the_twin(
    doubts: Doubts, values: list[float], min_p: float, seed: int
) -> None:
    logits = np.array(values, dtype=np.float32)
    doubts.compare(logits, Sampling(1.0, min_p, seed), 3)
    _, token, _, _ = pick(logits, 1.0, min_p, seed, 3)
    assert math.exp(float(logits[token]) - float(logits.max())) >= min_p * (1 - 1e-5)


# A language model's row: a few likely tokens and a long tail. A flat row: every place is a tie. A
# coarse row: many ties among different logits.
SPREADS = {"peaked": 6.0, "wide": 2.0, "coarse": 3.0, "flat": 0.0}


def row_of(shape: str, n_vocab: int, seed: int, holes: float = 0.0) -> np.ndarray:
    """f32 [n_vocab]; `holes` is the share of minus infinity and not-a-number."""
    random = np.random.default_rng(seed)
    row = random.gumbel(0.0, SPREADS[shape], n_vocab).astype(np.float32)
    if shape == "coarse":
        row = np.round(row)
    # the first entry stays, so that there is a finite one
    gone = random.random(n_vocab) < holes
    gone[0] = False
    row[gone] = random.choice(np.array([-np.inf, np.nan], np.float32), int(gone.sum()))
    return row


def singles(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(float(np.float32(low)), float(np.float32(high)), width=32)


temperatures = st.one_of(st.just(0.0), singles(0.1, 3.0))
filters = {
    "top_k": st.integers(1, 60),
    "top_p": st.one_of(singles(0.01, 0.999), st.sampled_from([0.0, -1.0, 0.5])),
    "typical_p": st.one_of(singles(0.01, 0.999), st.sampled_from([0.0, -1.0, 0.5])),
    "min_p": st.one_of(singles(0.001, 1.0), st.just(1.0)),
}
penalties = st.fixed_dictionaries(
    {
        "repeat_penalty": singles(0.5, 2.0),
        "presence_penalty": singles(-2.0, 2.0),
        "frequency_penalty": singles(-2.0, 2.0),
        "penalty_last_n": st.sampled_from([-1, 0, 1, 3, 64]),
    }
)
some_row = st.builds(
    row_of,
    st.sampled_from(sorted(SPREADS)),
    st.sampled_from([1, 2, 15, 16, 17, 200, 5000]),
    st.integers(0, 10**6),
    st.sampled_from([0.0, 0.0, 0.3, 0.95]),
)


@pytest.mark.parametrize("name", sorted(filters))
@given(data=st.data(), row=some_row, temperature=temperatures, first=st.booleans())
@settings(max_examples=150, deadline=None)
def test_each_filter_equals_the_twin(
    doubts: Doubts, name: str, data: st.DataObject, row: np.ndarray, temperature: float, first: bool
) -> None:
    value = data.draw(filters[name])
    doubts.compare(
        row, Sampling(temperature, temperature_first=first, **{name: value}), data.draw(positions)
    )


positions = st.integers(0, 10**6)


@st.composite
def histories(draw: st.DrawFn, n_vocab: int) -> list[int]:
    """Short and long texts that repeat themselves."""
    own = draw(st.lists(st.integers(0, n_vocab - 1), min_size=1, max_size=8))
    return draw(st.lists(st.sampled_from(own), max_size=100))


@st.composite
def biases(draw: st.DrawFn, n_vocab: int) -> tuple[tuple[int, float], ...]:
    """Of distinct tokens; not on all of them, and minus infinity among them."""
    values = st.one_of(singles(-8.0, 8.0), st.just(-math.inf))
    found = draw(st.dictionaries(st.integers(0, n_vocab - 1), values, max_size=5))
    return tuple(found.items())


@given(data=st.data(), row=some_row, temperature=temperatures, settings=penalties)
@settings(max_examples=200, deadline=None)
def test_penalties_equal_the_twin(
    doubts: Doubts, data: st.DataObject, row: np.ndarray, temperature: float, settings: dict
) -> None:
    history = data.draw(histories(len(row)))
    doubts.compare(row, Sampling(temperature, **settings), data.draw(positions), history)


@given(data=st.data(), row=some_row, temperature=temperatures)
@settings(max_examples=100, deadline=None)
def test_a_bias_equals_the_twin(
    doubts: Doubts, data: st.DataObject, row: np.ndarray, temperature: float
) -> None:
    bias = data.draw(biases(len(row)))
    doubts.compare(row, Sampling(temperature, logit_bias=bias), data.draw(positions))


@given(
    data=st.data(),
    row=some_row,
    temperature=temperatures,
    first=st.booleans(),
    chosen=st.fixed_dictionaries({}, optional=filters),
    settings=penalties,
    seed=st.integers(0, MASK),
)
@settings(max_examples=300, deadline=None)
def test_all_together_equal_the_twin(
    doubts: Doubts,
    data: st.DataObject,
    row: np.ndarray,
    temperature: float,
    first: bool,
    chosen: dict,
    settings: dict,
    seed: int,
) -> None:
    sampling = Sampling(
        temperature,
        seed=seed,
        temperature_first=first,
        logit_bias=data.draw(biases(len(row))),
        **chosen,
        **settings,
    )
    doubts.compare(row, sampling, data.draw(positions), data.draw(histories(len(row))))


@pytest.mark.parametrize("shape", sorted(SPREADS))
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(0.8),
        Sampling(0.8, top_k=40, top_p=0.95, min_p=0.05),
        Sampling(0.7, top_k=50, top_p=0.95, temperature_first=True),
        Sampling(1.0, top_p=0.9),
        Sampling(1.0, top_k=100_000, top_p=0.5),
        Sampling(1.0, typical_p=0.9),
        Sampling(0.0, typical_p=0.5),
        Sampling(1.2, min_p=0.02, temperature_first=True),
        Sampling(1.0, repeat_penalty=1.3, presence_penalty=0.5, penalty_last_n=-1),
    ],
    ids=str,
)
def test_a_large_vocabulary_equals_the_twin(doubts: Doubts, shape: str, sampling: Sampling) -> None:
    row = row_of(shape, 262_144, 1, holes=0.01)
    history = [int(np.nanargmax(row)), *range(1000)]
    for position in range(3):
        doubts.compare(row, sampling, position, history)


def test_a_history_longer_than_the_window_counts_only_its_end() -> None:
    row = np.array([2.0, 1.0, 0.0, -1.0], dtype=np.float32)
    settings = {"repeat_penalty": 3.0, "presence_penalty": 1.0, "frequency_penalty": 0.5}
    for last_n, expected in ((0, 0), (1, 0), (2, 0), (3, 1), (4, 1), (-1, 1)):
        sampling = Sampling(penalty_last_n=last_n, **settings)
        assert native_pick(row, sampling, 9, [0, 0, 3, 3])[1] == expected, last_n
        # what lies beyond the window changes nothing
        assert native_pick(row, sampling, 9, [3, 2, 3, 0, 0, 3, 3])[1] == (
            expected if last_n >= 0 else 1
        )


def test_the_distribution_is_the_softmax() -> None:
    """Chi-square over independent positions; 11 degrees of freedom, 31.3 is the 0.1 % point."""
    logits = np.array([2.0, 1.5, 0, -1, 0.3, 1.0, -2, 0.5, 1.9, -0.5, 0.1, 0.7], dtype=np.float32)
    n = 20_000
    for temperature, seed in ((1.0, 1), (0.7, 2), (1.5, 3)):
        counts = Counter(pick(logits, temperature, 0.0, seed, i)[1] for i in range(n))
        weights = np.exp(logits.astype(np.float64) / temperature)
        expected = n * weights / weights.sum()
        chi_square = sum((counts[i] - e) ** 2 / e for i, e in enumerate(expected))
        assert chi_square < 31.3


def test_positions_and_seeds_are_independent() -> None:
    flat = np.zeros(64, dtype=np.float32)
    by_position = [pick(flat, 1.0, 0.0, 7, i)[1] for i in range(4000)]
    by_seed = [pick(flat, 1.0, 0.0, s, 7)[1] for s in range(4000)]
    for drawn in (by_position, by_seed):
        chi_square = sum((Counter(drawn)[i] - 62.5) ** 2 / 62.5 for i in range(64))
        assert chi_square < 103.4  # 0.1 % point of 63 degrees of freedom
        pairs = Counter(a == b for a, b in zip(drawn, drawn[1:], strict=False))
        assert pairs[True] < 120  # 62.5 expected


def test_a_shared_noise_makes_similar_rows_agree() -> None:
    """The point of hashed noise: draft and target pick alike far more often than by chance."""
    random = np.random.default_rng(0)
    agree = chance = 0.0
    for i in range(500):
        target = random.normal(0, 2, 300).astype(np.float32)
        draft = (target + random.normal(0, 0.3, 300)).astype(np.float32)
        agree += pick(target, 1.0, 0.0, 5, i)[1] == pick(draft, 1.0, 0.0, 5, i)[1]
        p, q = (np.exp(x - x.max()) for x in (target, draft))
        chance += float((p / p.sum()) @ (q / q.sum()))
    assert agree > 0.7 * 500
    assert chance < 0.1 * 500


@pytest.mark.parametrize("bad", [[math.nan] * 5, [-math.inf] * 40, [math.inf, 1.0]])
def test_rows_without_a_finite_best_are_reported(bad: list[float]) -> None:
    assert pick(np.array(bad, dtype=np.float32))[0] == bindings.BAD_LOGITS


def test_single_nans_are_passed_over() -> None:
    logits = np.zeros(100, dtype=np.float32)
    logits[[3, 50, 99]] = math.nan
    logits[70] = 1.0
    code, token, probability, _ = pick(logits)
    assert (code, token) == (0, 70)
    assert probability == pytest.approx(math.e / (math.e + 96), rel=1e-5)
    assert pick(logits, 1.0, 0.0, 3, 9)[1] not in (3, 50, 99)


def test_the_library_says_so_when_it_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from knapspec_edge.errors import LibraryError
    from knapspec_edge.native import library

    monkeypatch.setenv(library.OVERRIDE, str(tmp_path))
    with pytest.raises(LibraryError, match=f"correct {library.OVERRIDE}"):
        load.__wrapped__()


@pytest.mark.parametrize("temperature", [1e-45, 1e-40, 1.2e-38, 1e-30, 1e-6])
def test_the_smallest_temperatures_are_greedy(temperature: float) -> None:
    """Also where 1/T is not finite in single precision."""
    logits = np.array([0.5, 3.0, -np.inf, 2.9, -40.0], dtype=np.float32)
    for position in range(20):
        code, token, probability, margin = pick(logits, temperature, position=position)
        assert (code, token, probability) == (0, 1, 1.0)
        assert margin > 0


@pytest.mark.parametrize("min_p", [1.0, 1.5, math.inf])
def test_min_p_never_drops_the_most_probable_token(min_p: float) -> None:
    logits = np.array([0.5, 3.0, 2.9], dtype=np.float32)
    for position in range(20):
        code, token, probability, _ = pick(logits, 1.0, min_p, position=position)
        assert (code, token, probability) == (0, 1, 1.0)
