"""Flash attention for few query rows: against a twin in F64, against upstream's, row by row."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from .attention_op import F16, Q8_0, Attention, Operation, causal_mask, compute, naive

# Sums of F32 products of a few hundred terms; values are about 1.
TOLERANCE = 2e-5
INF = np.float32(np.inf)


@pytest.fixture(autouse=True, scope="module")
def _library(patched_library: Path) -> None:
    """Skips where there is none."""


def example(
    seed: int,
    *,
    tokens: int = 4,
    heads: int = 6,
    heads_kv: int = 2,
    width: int = 64,
    width_v: int | None = None,
    cells: int = 512,
    used: int | None = None,
    streams: int = 1,
    window: int = 0,
    **options: Any,
) -> Attention:
    """Random rows whose last token sees the first `used` cells."""
    random = np.random.default_rng(seed)

    def normal(*shape: int) -> Any:
        return random.standard_normal(shape, dtype=np.float32)

    mask = causal_mask(tokens, cells, (used or cells) - tokens, window)
    return Attention(
        q=normal(streams, tokens, heads, width),
        k=normal(streams, cells, heads_kv, width),
        v=normal(streams, cells, heads_kv, width_v or width),
        mask=np.repeat(mask, streams, axis=0),
        scale=1.5 * width**-0.5,
        **options,
    )


def assert_close(a: Attention, tolerance: float = TOLERANCE, **options: Any) -> None:
    np.testing.assert_allclose(compute(a, **options), naive(a), rtol=0, atol=tolerance)


def differs_from_upstream(a: Attention) -> bool:
    """Whether our kernel was there at all: upstream's rounds differently."""
    return not np.array_equal(compute(a), compute(a, kernels=False))


WIDTHS = [16, 48, 64, 80, 96, 112, 128, 192, 256]


@pytest.mark.parametrize(
    ("width", "kinds"),
    [
        (width, kinds)
        for width in WIDTHS
        for kinds in [(F16, F16), (Q8_0, Q8_0), (F16, Q8_0), (Q8_0, F16)]
        if kinds == (F16, F16) or width % 32 == 0  # blocks of 32
    ],
)
def test_widths_and_types(width: int, kinds: tuple[int, int]) -> None:
    a = example(width, width=width, used=400, type_k=kinds[0], type_v=kinds[1])
    assert_close(a)
    assert differs_from_upstream(a)


@pytest.mark.parametrize("seed", range(40))
def test_random_shapes(seed: int) -> None:
    random = np.random.default_rng(1000 + seed)
    heads_kv = int(random.integers(1, 6))
    cells = int(random.choice([1, 31, 64, 65, 127, 256, 257, 700, 2304]))
    tokens = int(random.choice([1, 2, 3, 5, 8, 15, 16, 17, 33, 70]))
    a = example(
        seed,
        tokens=tokens,
        heads=heads_kv * int(random.integers(1, 9)),
        heads_kv=heads_kv,
        width=int(random.choice([32, 64, 96, 128])),
        width_v=int(random.choice([32, 64, 96, 128])),
        cells=cells,
        used=int(random.integers(1, cells + 1)),  # the first tokens may see nothing
        streams=int(random.integers(1, 4)),
        window=int(random.choice([0, 0, 1, 50, 300])),
        type_k=int(random.choice([F16, Q8_0])),
        type_v=int(random.choice([F16, Q8_0])),
        max_bias=float(random.choice([0.0, 0.0, 8.0])),
        softcap=float(random.choice([0.0, 0.0, 5.0, 50.0])),
        spare_cells=int(random.integers(0, 3)),
        spare_heads=int(random.integers(0, 3)),
    )
    if random.random() < 0.5:
        a = replace(a, sinks=random.standard_normal(a.q.shape[2], dtype=np.float32) * 3)
    assert_close(a, threads=int(random.integers(1, 5)))


@pytest.mark.parametrize("cells", [1, 5, 64, 100, 333])
def test_without_a_mask(cells: int) -> None:
    a = replace(example(cells, cells=cells, tokens=1), mask=None)
    assert_close(a)


def test_biases_that_are_no_causal_mask() -> None:
    a = example(7, tokens=5, cells=300)
    assert a.mask is not None
    random = np.random.default_rng(8)
    bias = random.standard_normal(a.mask.shape).astype(np.float32) * 4
    bias[random.random(a.mask.shape) < 0.4] = -INF
    for max_bias in (0.0, 6.0):
        # 12 heads: odd powers for those beyond 8
        b = replace(example(9, tokens=5, cells=300, heads=12, max_bias=max_bias), mask=bias)
        assert_close(b)


@pytest.mark.parametrize(
    ("group", "window", "kind", "sinks"),
    [
        (3, 0, F16, False),
        (1, 0, F16, True),
        (4, 200, F16, True),
        (3, 200, Q8_0, False),
        (2, 0, Q8_0, True),
    ],
)
def test_every_row_has_its_own_bits_in_any_batch(
    group: int, window: int, kind: int, sinks: bool
) -> None:
    a = example(
        group, tokens=16, heads=2 * group, cells=1536, used=1030, window=window,
        type_k=kind, type_v=kind,
    )  # fmt: skip
    if sinks:
        a = replace(a, sinks=np.linspace(-2, 9, a.q.shape[2], dtype=np.float32))
    whole = compute(a)
    for tokens in (1, 2, 5, 8):
        for first in range(0, 16, tokens):
            part = slice(first, min(16, first + tokens))
            # the cache padded no further than these tokens need
            cells = -(-(1030 - 16 + part.stop) // 256) * 256
            alone = compute(a.rows(0, part, cells))
            np.testing.assert_array_equal(alone[0].view(np.int32), whole[0, part].view(np.int32))


@pytest.mark.parametrize("tokens", [17, 40, 100, 300])
@pytest.mark.parametrize(("group", "window", "kind"), [(3, 0, F16), (1, 100, Q8_0), (8, 0, F16)])
def test_a_row_of_a_prompt_has_the_bits_it_has_alone(
    tokens: int, group: int, window: int, kind: int
) -> None:
    a = example(
        tokens, tokens=tokens, heads=2 * group, cells=1024, used=900, window=window,
        type_k=kind, type_v=kind, sinks=np.linspace(-3, 3, 2 * group, dtype=np.float32),
    )  # fmt: skip
    whole = compute(a)
    np.testing.assert_allclose(whole, naive(a), rtol=0, atol=TOLERANCE)
    for first in (0, 7, tokens // 2, tokens - 1):
        part = slice(first, min(tokens, first + 3))
        alone = compute(a.rows(0, part, 1024), threads=1)
        np.testing.assert_array_equal(alone[0].view(np.int32), whole[0, part].view(np.int32))
    np.testing.assert_array_equal(compute(a, threads=3).view(np.int32), whole.view(np.int32))


@pytest.mark.parametrize("context", [3, 60, 64, 65, 129, 255, 257, 1000, 9000, 17000])
def test_no_padding_of_the_cache_changes_a_bit(context: int) -> None:
    cells = -(-context // 256) * 256
    a = example(context, tokens=2, heads=2, cells=cells + 1024, used=context)
    expected = compute(a)
    for shorter in (context, cells, cells + 256):
        found = compute(a.rows(0, slice(0, 2), shorter))
        np.testing.assert_array_equal(found.view(np.int32), expected.view(np.int32))
    np.testing.assert_allclose(expected, naive(a), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("context", [100, 1500, 6000])
@pytest.mark.parametrize("tokens", [1, 8])
def test_no_number_of_threads_changes_a_bit(context: int, tokens: int) -> None:
    a = example(context, tokens=tokens, heads=9, heads_kv=3, cells=6144, used=context)
    expected = compute(a, threads=1)
    for threads in (2, 3, 5, 8):
        np.testing.assert_array_equal(
            compute(a, threads=threads).view(np.int32), expected.view(np.int32)
        )


def test_sequences_side_by_side_have_the_bits_they_have_alone() -> None:
    # in one cache: each token sees the cells of its own sequence
    random = np.random.default_rng(3)
    owner = random.integers(0, 3, 768)
    owner[700:] = -1
    a = example(4, tokens=6, cells=768)
    mask = np.where(owner[None] == np.array([0, 1, 2, 0, 1, 2])[:, None], 0, -INF)[None]
    a = replace(a, mask=mask.astype(np.float32))
    assert_close(a)
    together = compute(a)
    for token in range(6):
        alone = compute(a.rows(0, slice(token, token + 1), 768))
        np.testing.assert_array_equal(alone[0].view(np.int32), together[0, [token]].view(np.int32))
    # in a cache each
    b = example(5, tokens=3, cells=512, used=300, streams=3)
    together = compute(b)
    for stream in range(3):
        alone = compute(b.rows(stream, slice(0, 3), 512))
        np.testing.assert_array_equal(alone.view(np.int32), together[[stream]].view(np.int32))


def test_rows_that_see_nothing() -> None:
    a = example(11, tokens=3, cells=256)
    assert a.mask is not None
    for hidden in ([0], [1], [0, 1, 2]):
        mask = a.mask.copy()
        mask[0, hidden] = -INF
        b = replace(a, mask=mask)
        found = compute(b)
        assert not found[0, hidden].any()
        np.testing.assert_allclose(found, naive(b), rtol=0, atol=TOLERANCE)
        with_sink = replace(b, sinks=np.ones(6, dtype=np.float32))
        np.testing.assert_allclose(compute(with_sink), naive(with_sink), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("bad", "kind"), [(np.nan, F16), (np.inf, F16), (-np.inf, F16), (np.nan, Q8_0), (np.inf, Q8_0)]
)
def test_hidden_cells_may_hold_anything(bad: float, kind: int) -> None:
    a = example(12, tokens=4, cells=512, used=290, type_k=kind, type_v=kind)
    expected = compute(a)
    k, v = a.k.copy(), a.v.copy()
    # cells that some token of the tile sees, cells behind all of them
    for cell in (289, 288, 300, 511):
        k[0, cell] = v[0, cell] = bad
    with np.errstate(invalid="ignore"):
        found = compute(replace(a, k=k, v=v))
    # token 0 and 1 see neither 288 nor 289
    np.testing.assert_array_equal(found[0, :2].view(np.int32), expected[0, :2].view(np.int32))
    assert not np.isfinite(found[0, 3]).all()


@pytest.mark.parametrize("where", ["q", "k", "v"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_no_number_is_none_afterwards_as_upstream(where: str, bad: float) -> None:
    a = example(13, tokens=2, cells=256, used=200)
    x = getattr(a, where).copy()
    x[0, 1, 0, 3] = bad
    a = replace(a, **{where: x})
    ours, upstream = compute(a), compute(a, kernels=False)
    # a row is bad or good as a whole: an infinite logit leaves upstream the values of its key
    if where == "v":
        np.testing.assert_array_equal(np.isfinite(ours), np.isfinite(upstream))
    elif np.isnan(bad):
        np.testing.assert_array_equal(np.isnan(ours), np.isnan(upstream))
    good = np.isfinite(upstream) & np.isfinite(ours)
    np.testing.assert_allclose(ours[good], upstream[good], rtol=0, atol=5e-2)


def test_extreme_logits() -> None:
    a = example(14, tokens=3, cells=512, used=400)
    for factor in (1e-30, 1e3, 1e6):
        b = replace(a, q=a.q * np.float32(factor))
        expected = naive(b)
        # at 1e6 the logits' own rounding decides among keys of nearly equal weight
        tolerance = TOLERANCE if factor < 1e5 else 0.5
        np.testing.assert_allclose(compute(b), expected, rtol=0, atol=max(tolerance, 2e-4))


def test_closer_to_the_truth_than_upstream() -> None:
    for kind in (F16, Q8_0):
        a = example(15, tokens=4, cells=4096, used=4000, type_k=kind, type_v=kind)
        truth = naive(a)
        ours = np.abs(compute(a) - truth).max()
        upstream = np.abs(compute(a, kernels=False) - truth).max()
        assert ours < upstream / 10
        # upstream sums values in F16, or multiplies by queries of 8 bits
        assert upstream < 2e-2


def test_what_is_left_to_upstream() -> None:
    odd = example(17, width=72, cells=256)
    assert not differs_from_upstream(odd)
    for a, reason in (
        (odd, "head width"),
        (example(17, width=640, cells=64), "head width"),
        (replace(odd, k=odd.k[..., :64], v=odd.v[..., :64], q=odd.q[..., :64]), None),
    ):
        operation = Operation(a)
        assert operation.declined() == reason
        operation.close()
    few = example(18, tokens=4, cells=256)
    np.testing.assert_array_equal(
        compute(few, reference=True), compute(few, reference=True, kernels=False)
    )
    assert differs_from_upstream(few)


def test_one_graph_computes_it_many_times() -> None:
    a = example(19, tokens=3, cells=256, used=100)
    once = compute(a)
    operation = Operation(a, repeat=5)
    try:
        for _ in range(3):
            operation.compute(threads=3)
            np.testing.assert_array_equal(operation.result().view(np.int32), once.view(np.int32))
    finally:
        operation.close()


def test_the_script_compares_both_kernels(patched_library: Path) -> None:
    script = Path(__file__).parents[2] / "scripts" / "check_attention.py"
    arguments = "--shape 4 2 32 --keys 64 --rows 1 3 --rounds 2 --pool 1 --errors --type q8_0"
    run = subprocess.run(
        [sys.executable, str(script), *arguments.split()],
        env={**os.environ, "KNAPSPEC_EDGE_LIBRARY": str(patched_library)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    rows = [line.strip("| ").split(" | ") for line in run.stdout.splitlines() if "|" in line][2:]
    assert [row[:2] for row in rows] == [["64", "1"], ["64", "3"]]
    assert all(float(row[-1]) < TOLERANCE for row in rows)
