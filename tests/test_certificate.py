"""The certificate: sound on thousands of random and adversarial states, and as tight as it says."""

from __future__ import annotations

import math
import tracemalloc

import naive_certificate as naive
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from knapspec_edge.search import certificate
from knapspec_edge.search.certificate import (
    DenseHead,
    certified,
    cosines,
    requirement,
    total_variation_bound,
)


def head_of(rng: np.random.Generator, n: int, d: int, *, bias: bool = False) -> DenseHead:
    weight = rng.normal(size=(n, d)).astype(np.float32)
    # rows of many lengths, and some that are nearly alike
    weight *= rng.lognormal(sigma=0.5, size=(n, 1)).astype(np.float32)
    for j in range(0, n - 1, 5):
        weight[j + 1] = weight[j] + 1e-3 * weight[j + 1]
    own = rng.normal(size=n).astype(np.float32) if bias else None
    return DenseHead(weight, own)


def states_of(rng: np.random.Generator, r: int, head: DenseHead) -> NDArray[np.float32]:
    """Random ones, and ones that clearly mean some token, as those of a model do."""
    states = rng.normal(size=(r, head.n_embd)).astype(np.float32)
    meant = head.weight[rng.integers(0, head.n_vocab, size=r)]
    states += rng.uniform(0, 3, size=(r, 1)).astype(np.float32) * meant
    return np.asarray(states * rng.lognormal(sigma=2, size=(r, 1)), dtype=np.float32)


def tokens_of(states: NDArray[np.float32], head: DenseHead) -> NDArray[np.int64]:
    logits = states.astype(np.float64) @ head.weight.T.astype(np.float64)
    if head.bias is not None:
        logits = logits + head.bias
    return np.asarray(logits.argmax(axis=1))


def disturbed(
    rng: np.random.Generator, states: NDArray[np.float32], scale: NDArray[np.float64]
) -> NDArray[np.float32]:
    """States off by about `scale` f64 [r] (sine of the angle), of other lengths."""
    noise = rng.normal(size=states.shape)
    noise *= (np.linalg.norm(states, axis=1) / np.linalg.norm(noise, axis=1))[:, None]
    moved = states + scale[:, None] * noise
    return np.asarray(moved * rng.lognormal(size=(len(states), 1)), dtype=np.float32)


def at_the_border(
    states: NDArray[np.float32], head: DenseHead, factor: float
) -> NDArray[np.float32]:
    """The worst case: states turned towards their nearest competitor, by `factor` times the angle
    at which it draws level."""
    weight = head.weight.astype(np.float64)
    turned = np.empty(states.shape)
    for p, state in enumerate(states.astype(np.float64)):
        unit = state / np.linalg.norm(state)
        winner = int(np.argmax(weight @ unit))
        apart = weight[winner] - weight
        sizes = np.linalg.norm(apart, axis=1)
        with np.errstate(invalid="ignore", divide="ignore"):
            sines = np.where(sizes > 0, apart @ unit / sizes, np.inf)
        nearest = int(np.argmin(np.where(np.arange(len(weight)) == winner, np.inf, sines)))
        away = apart[nearest] / sizes[nearest]
        across = away - (away @ unit) * unit
        across /= np.linalg.norm(across)
        angle = factor * math.asin(min(1.0, sines[nearest]))
        turned[p] = math.cos(angle) * unit - math.sin(angle) * across
    return turned.astype(np.float32)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("n", "d"), [(2, 1), (3, 2), (7, 3), (40, 16), (500, 32), (20000, 8)])
def test_certified_means_the_same_token(n: int, d: int, bias: bool) -> None:
    rng = np.random.default_rng(n + d)
    head = head_of(rng, n, d, bias=bias)
    r = 400
    states = states_of(rng, r, head)
    needed = requirement(states, head)
    assert (needed.token == tokens_of(states, head)).all()
    sure = {"loose": 0, "tight": 0}
    for exponent in (-0.3, -1, -2, -3, -5):
        drafts = disturbed(rng, states, 10.0**exponent * rng.random(r))
        cosine = cosines(states, drafts, head)
        same = tokens_of(drafts, head) == needed.token
        loose, tight = certified(cosine, needed.loose), certified(cosine, needed.tight)
        assert same[tight].all()
        assert tight[loose].all()
        sure["loose"] += int(loose.sum())
        sure["tight"] += int(tight.sum())
        if exponent == -5 and not bias:
            assert tight.mean() > 0.5  # it does certify something
    assert sure["tight"] >= sure["loose"] > 0


@pytest.mark.parametrize(("n", "d"), [(3, 2), (40, 16), (500, 32)])
def test_as_tight_as_can_be(n: int, d: int) -> None:
    """Just inside the requirement everything is certified, just outside the token changes."""
    rng = np.random.default_rng(d)
    head = head_of(rng, n, d)
    states = states_of(rng, 300, head)
    needed = requirement(states, head)
    wide = needed.tight < 1.0 - 1e-6  # further in, 32-bit states cannot be told apart
    assert wide.sum() > 100
    inside = at_the_border(states, head, 0.99)
    outside = at_the_border(states, head, 1.01)
    assert (tokens_of(inside, head) == needed.token)[wide].all()
    assert certified(cosines(states, inside, head), needed.tight)[wide].all()
    assert (tokens_of(outside, head) != needed.token)[wide].all()
    assert not certified(cosines(states, outside, head), needed.tight)[wide].any()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("n", "d"), [(1, 4), (2, 1), (5, 3), (60, 12), (300, 5)])
def test_equals_the_naive_twin(n: int, d: int, bias: bool) -> None:
    rng = np.random.default_rng(100 * n + d)
    head = head_of(rng, n, d, bias=bias)
    states = states_of(rng, 12, head)
    needed = requirement(states, head)
    drafts = disturbed(rng, states, np.full(12, 0.1))
    cosine = cosines(states, drafts, head)
    weight = head.weight.tolist()
    own = None if head.bias is None else head.bias.tolist()
    for p in range(len(states)):
        state = states[p].tolist()
        token, margin, loose, tight = naive.required(state, weight, own)
        assert needed.token[p] == token
        assert needed.margin[p] == pytest.approx(margin, rel=1e-9)
        assert needed.loose[p] == pytest.approx(loose, abs=1e-12)
        assert needed.tight[p] == pytest.approx(tight, abs=1e-12)
        assert cosine[p] == pytest.approx(naive.cosine(state, drafts[p].tolist(), bias), abs=1e-12)


def test_the_chunks_of_a_large_vocabulary_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(3)
    head = head_of(rng, 1000, 24)
    states = states_of(rng, 20, head)
    whole = requirement(states, head)
    monkeypatch.setattr(certificate, "_CHUNK_ROWS", 77)
    monkeypatch.setattr(certificate, "_FIRST_ROWS", 1)
    parts = requirement(states, head)
    assert (whole.token == parts.token).all()
    for name in ("margin", "loose", "tight"):
        assert getattr(whole, name) == pytest.approx(getattr(parts, name), rel=1e-12)


def test_the_head_is_not_copied() -> None:
    rng = np.random.default_rng(4)
    weight = rng.normal(size=(60_000, 128)).astype(np.float32)
    states = rng.normal(size=(4, 128)).astype(np.float32)
    tracemalloc.start()
    requirement(states, DenseHead(weight))
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 0.6 * weight.nbytes


def test_ties_guarantee_nothing() -> None:
    weight = np.array([[1, 0], [0, 1], [-1, 0]], dtype=np.float32)
    states = np.array([[1, 1], [2, 1], [0, 0], [1, 0]], dtype=np.float32)
    needed = requirement(states, DenseHead(weight))
    assert needed.token.tolist() == [0, 0, 0, 0]
    assert needed.margin.tolist() == [0.0, 1.0, 0.0, 1.0]
    cosine = cosines(states, states, DenseHead(weight))
    assert certified(cosine, needed.tight).tolist() == [False, True, False, True]
    assert certified(cosine, needed.loose).tolist() == [False, True, False, True]
    # at the border itself, where the draft ties: not certified
    assert needed.tight[3] == pytest.approx(math.sqrt(0.5))
    assert not certified(np.array([math.sqrt(0.5)]), needed.tight[3:]).any()


def test_equal_rows_tie_for_every_state() -> None:
    rng = np.random.default_rng(5)
    weight = rng.normal(size=(70, 33)).astype(np.float32)
    weight = np.concatenate([weight, weight])
    states = rng.normal(size=(50, 33)).astype(np.float32)
    needed = requirement(states, DenseHead(weight))
    assert (needed.token < 70).all()
    assert (needed.tight == 1.0).all()
    assert (needed.loose == 1.0).all()
    assert not certified(cosines(states, states, DenseHead(weight)), needed.tight).any()


def test_one_token_is_always_the_same() -> None:
    head = DenseHead(np.ones((1, 3), dtype=np.float32))
    states = np.array([[1, 2, 3], [-1, 0, 0]], dtype=np.float32)
    needed = requirement(states, head)
    assert certified(cosines(states, -states, head), needed.tight).all()


def test_a_length_decides_only_with_a_bias() -> None:
    weight = np.array([[1.0], [0.0]], dtype=np.float32)
    states = np.array([[2.0]], dtype=np.float32)
    drafts = np.array([[0.5]], dtype=np.float32)
    plain = DenseHead(weight)
    assert certified(cosines(states, drafts, plain), requirement(states, plain).tight).all()
    # x against 1: the draft's 0.5 loses although it points the same way
    biased = DenseHead(weight, np.array([0.0, 1.0], dtype=np.float32))
    assert not certified(cosines(states, drafts, biased), requirement(states, biased).tight).any()


def test_states_are_those_after_the_gain() -> None:
    """The cosine before the norm's gain can promise what does not hold."""
    gain = np.array([1.0, 100.0])
    weight = np.array([[1.0, 0.0], [0.0, 1.0]], dtype=np.float32)
    before, draft_before = np.array([1.0, 0.0]), np.array([1.0, 0.02])
    head = DenseHead(weight)

    def rows(state: NDArray[np.float64]) -> NDArray[np.float32]:
        return np.asarray(state[None], dtype=np.float32)

    naively = requirement(rows(before), head)
    assert certified(cosines(rows(before), rows(draft_before), head), naively.tight).all()
    after, draft_after = rows(gain * before), rows(gain * draft_before)
    assert tokens_of(after, head) != tokens_of(draft_after, head)
    assert not certified(cosines(after, draft_after, head), requirement(after, head).tight).any()
    # or with the gain in the rows, for states before it (an RMS is a positive factor)
    scaled = DenseHead(np.asarray(weight * gain, dtype=np.float32))
    needed = requirement(rows(before), scaled)
    assert not certified(cosines(rows(before), rows(draft_before), scaled), needed.tight).any()


def test_nonsense_is_refused() -> None:
    head = DenseHead(np.ones((4, 3), dtype=np.float32))
    good = np.ones((2, 3), dtype=np.float32)
    for states in (good[0], good[:, :2], good.astype(np.float64)):
        with pytest.raises(ValueError, match=r"f32 \[positions, 3\]"):
            requirement(states, head)
    with pytest.raises(ValueError, match="not finite"):
        requirement(good * np.float32(np.inf), head)
    with pytest.raises(ValueError, match="not finite"):
        requirement(good, DenseHead(np.full((4, 3), np.nan, dtype=np.float32)))
    with pytest.raises(ValueError, match="do not match"):
        cosines(good, good[:1], head)
    with pytest.raises(ValueError, match=r"f32 \[vocabulary, dimension\]"):
        DenseHead(np.ones((4, 3)))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="bias"):
        DenseHead(np.ones((4, 3), dtype=np.float32), np.ones(3, dtype=np.float32))
    assert len(requirement(np.empty((0, 3), dtype=np.float32), head).token) == 0


logit_rows = st.integers(1, 8).flatmap(
    lambda n: st.tuples(
        *[st.lists(st.floats(-20, 20, width=32), min_size=n, max_size=n) for _ in range(2)]
    )
)


class TestSampling:
    @given(rows=logit_rows, temperature=st.floats(0.1, 4.0))
    def test_bounds_the_total_variation(
        self, rows: tuple[list[float], list[float]], temperature: float
    ) -> None:
        one, other = (np.array([row], dtype=np.float32) for row in rows)
        bound = total_variation_bound(one, other, temperature)
        actual = naive.total_variation(
            naive.softmax(rows[0], temperature), naive.softmax(rows[1], temperature)
        )
        assert actual <= bound[0] + 1e-12

    def test_is_reached(self) -> None:
        """Two tokens that change places: p = (1 + tanh) / 2."""
        for z in (0.1, 1.0, 3.0):
            one, other = np.array([[z, -z]], np.float32), np.array([[-z, z]], np.float32)
            bound = total_variation_bound(one, other)
            actual = naive.total_variation(naive.softmax([z, -z], 1.0), naive.softmax([-z, z], 1.0))
            assert bound[0] == pytest.approx(actual, rel=1e-6)

    def test_what_both_forbid_does_not_count(self) -> None:
        one = np.array([[1.0, -np.inf, 0.0], [-np.inf, 0.0, 1.0]], dtype=np.float32)
        other = np.array([[1.0, -np.inf, 0.0], [0.0, 0.0, 1.0]], dtype=np.float32)
        assert total_variation_bound(one, other).tolist() == [0.0, 1.0]

    def test_nonsense_is_refused(self) -> None:
        row = np.zeros((1, 2), dtype=np.float32)
        with pytest.raises(ValueError, match="temperature"):
            total_variation_bound(row, row, 0.0)
        with pytest.raises(ValueError, match="do not match"):
            total_variation_bound(row, row[:, :1])
