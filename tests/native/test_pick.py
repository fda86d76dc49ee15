"""The native pick against an obvious twin in NumPy, and its distribution against exact values."""

from __future__ import annotations

import ctypes
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from knapspec_edge.native import bindings
from knapspec_edge.native.library import library_file, load

pytestmark = pytest.mark.skipif(library_file("llama") is None, reason="no patched library")

MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15


def pick(
    logits: np.ndarray,
    temperature: float = 0.0,
    min_p: float = 0.0,
    seed: int = 0,
    position: int = 0,
) -> tuple[int, int, float, float]:
    """(code, token, probability, margin)"""
    row = np.ascontiguousarray(logits, dtype=np.float32)
    token, probability, margin = ctypes.c_int32(-1), ctypes.c_float(), ctypes.c_float()
    code = load()._lib.knapspec_pick(
        row.ctypes.data_as(ctypes.POINTER(ctypes.c_float)),
        len(row),
        bindings.Sampling(temperature, min_p, seed),
        position,
        token,
        probability,
        margin,
    )
    return code, token.value, probability.value, margin.value


def mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def naive_pick(
    logits: np.ndarray, temperature: float, min_p: float, seed: int, position: int
) -> int:
    """Gumbel-max over the tokens that min-p leaves, with hashed noise."""
    key = mix(mix((seed + GOLDEN) & MASK) ^ ((GOLDEN * (position + 1)) & MASK))
    best, winner = -math.inf, -1
    top = np.float32(logits.max())
    floor = top + np.float32(math.log(min_p)) if min_p > 0 else -np.inf
    for i, logit in enumerate(logits.astype(np.float32)):
        if not logit >= floor:
            continue
        v = ((mix((key + GOLDEN * (i + 1)) & MASK) >> 11) + 0.5) * 2.0**-53  # 1 - u
        score = (float(logit) - float(top)) / np.float32(temperature) - math.log(-math.log1p(-v))
        if score > best:
            best, winner = score, i
    return winner


rows = st.integers(1, 200).flatmap(
    lambda n: st.lists(st.floats(-60, 60, width=32), min_size=n, max_size=n)
)


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
    values: list[float], temperature: float, seed: int, position: int
) -> None:
    logits = np.array(values, dtype=np.float32)
    _, token, probability, _ = pick(logits, temperature, 0.0, seed, position)
    assert token == naive_pick(logits, temperature, 0.0, seed, position)
    scaled = logits.astype(np.float64) / temperature
    exact = np.exp(scaled - scaled.max())
    assert probability == pytest.approx((exact / exact.sum())[token], rel=1e-3, abs=1e-12)


@given(rows, st.floats(0.015625, 1.0, width=32), st.integers(0, 1000))
@settings(max_examples=100, deadline=None)
def test_min_p_equals_the_twin(values: list[float], min_p: float, seed: int) -> None:
    logits = np.array(values, dtype=np.float32)
    _, token, _, _ = pick(logits, 1.0, min_p, seed, 3)
    assert token == naive_pick(logits, 1.0, min_p, seed, 3)
    assert math.exp(float(logits[token]) - float(logits.max())) >= min_p * (1 - 1e-5)


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
    with pytest.raises(LibraryError, match="pip install"):
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
