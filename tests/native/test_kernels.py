"""The CPU kernels of the overlay: the switch, and what they compute."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from knapspec_edge.native import open_context, open_model

from .products import Cpu, Weights
from .test_real_model import model_file

SWITCH = """
from knapspec_edge.native import library
lib = library.load()._lib
states = [lib.knapspec_get_kernels()]
for wanted in (False, True):
    lib.knapspec_set_kernels(wanted)
    states.append(lib.knapspec_get_kernels())
print(states)
"""


@pytest.mark.parametrize(("setting", "first"), [(None, True), ("0", False), ("1", True)])
def test_the_switch_and_its_variable(
    patched_library: Path, setting: str | None, first: bool
) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "KNAPSPEC_EDGE_KERNELS"}
    if setting is not None:
        environment["KNAPSPEC_EDGE_KERNELS"] = setting
    done = subprocess.run(
        [sys.executable, "-c", SWITCH], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split("\n")[0] == str([first, False, True])


# types that kernels cover, with the buffer types that lay them out so that they do
COVERED = {
    "Q8_0": ("plain", "AMX"),
    "Q4_0": ("plain", "AMX"),
    "Q4_1": ("plain", "AMX"),
    "Q5_0": ("plain",),
    "Q5_1": ("plain",),
    "IQ4_NL": ("plain",),
    "Q4_K": ("plain", "AMX"),
    "Q5_K": ("plain", "AMX"),
    "Q6_K": ("plain", "AMX"),
    "F16": ("plain", "AMX"),
    "BF16": ("plain",),
}
SUPER_BLOCKS = ("Q4_K", "Q5_K", "Q6_K")
MAX_COLUMNS = 16


@pytest.fixture(scope="module")
def cpu(patched_library: Path) -> Iterator[Cpu]:
    cpu = Cpu()
    yield cpu
    cpu.close()


@pytest.fixture(scope="module")
def simd(cpu: Cpu) -> None:
    """Skip where this CPU's kernels are upstream's."""
    blocks = cpu.quantize("Q8_0", np.ones((32, 32)))
    weights = Weights(cpu, "Q8_0", blocks, 32, "plain")
    covers = cpu.call("knapspec_cpu_covers", ctypes.c_bool, [ctypes.c_void_p])(weights.tensor)
    weights.close()
    if not covers:
        pytest.skip("no kernels of ours for this instruction set")


CASES = [(name, buffer) for name, buffers in COVERED.items() for buffer in buffers]


@pytest.fixture(params=CASES, ids=["-".join(case) for case in CASES])
def case(request: pytest.FixtureRequest, cpu: Cpu, simd: None) -> tuple[str, str]:
    name, buffer = request.param
    if buffer not in cpu.buffer_types:
        pytest.skip(f"no {buffer} on this CPU")
    return name, buffer


def shapes(name: str, buffer: str) -> list[tuple[int, int]]:
    """(rows, K): odd tails where a layout allows them, several chunks for several threads."""
    if buffer == "AMX":
        return [(32, 256), (96, 768), (1056, 256)]
    if name in SUPER_BLOCKS:
        return [(16, 768), (17, 256), (31, 768), (1050, 256)]
    if name in ("F16", "BF16"):
        return [(16, 1), (17, 37), (100, 5), (1050, 576)]
    return [(16, 576), (17, 32), (31, 96), (1050, 576)]


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@contextmanager
def placed(cpu: Cpu, name: str, buffer: str, values: np.ndarray) -> Iterator[Weights]:
    weights = Weights(cpu, name, cpu.quantize(name, values), values.shape[1], buffer)
    yield weights
    weights.close()


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return np.array_equal(
        np.ascontiguousarray(a).view(np.uint32), np.ascontiguousarray(b).view(np.uint32)
    )


def rounded_activations(cpu: Cpu, name: str, x: np.ndarray) -> np.ndarray:
    """What the kernels multiply with: x in the blocks that upstream rounds it to, in float64."""
    if name in ("F16", "BF16"):
        return x.astype(np.float64)
    if name in SUPER_BLOCKS:
        # Q8_K: 256 values share the scale that makes the largest one -127
        parts = x.reshape(len(x), -1, 256)
        at = np.abs(parts).argmax(axis=-1)
        largest = np.take_along_axis(parts, at[..., None], axis=-1)
        scale = np.divide(largest, -127, where=largest != 0, out=np.ones_like(largest))
        q = np.minimum(np.rint(parts / scale), 127)
        return (q * scale.astype(np.float64)).reshape(x.shape)
    parts = x.reshape(len(x), -1, 32)
    scale = np.abs(parts).max(axis=-1, keepdims=True) / np.float32(127)
    q = np.rint(np.divide(parts, scale, where=scale != 0, out=np.zeros_like(parts)))
    return (q * scale.astype(np.float16).astype(np.float64)).reshape(x.shape)


def twin(cpu: Cpu, name: str, values: np.ndarray, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The product in float64, and the sum of the magnitudes that were added."""
    blocks = cpu.quantize(name, values)
    w = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[name]).astype(np.float64)
    x = rounded_activations(cpu, name, x)
    return x @ w.T, np.abs(x) @ np.abs(w).T


def test_a_row_does_not_depend_on_its_batch(cpu: Cpu, case: tuple[str, str]) -> None:
    name, buffer = case
    for rows, k in shapes(name, buffer):
        x = normal(rows + k, MAX_COLUMNS, k)
        with placed(cpu, name, buffer, normal(k, rows, k)) as weights, cpu.kernels(True):
            alone = np.stack([cpu.product(weights, x[i : i + 1])[0] for i in range(MAX_COLUMNS)])
            for n in range(2, MAX_COLUMNS + 1):
                for start in {0, (MAX_COLUMNS - n) // 2, MAX_COLUMNS - n}:
                    part = slice(start, start + n)
                    assert same_bits(cpu.product(weights, x[part]), alone[part]), (rows, k, n)


def test_results_are_those_of_the_twin(cpu: Cpu, case: tuple[str, str]) -> None:
    name, buffer = case
    for rows, k in shapes(name, buffer):
        values, x = normal(k + 1, rows, k), normal(rows + 2, 5, k)
        expected, magnitude = twin(cpu, name, values, x)
        with placed(cpu, name, buffer, values) as weights, cpu.kernels(True):
            result = cpu.product(weights, x)
        # Q4_1 takes its sums of activations in 16 bits; a value on the border of two steps may
        # round either way, once in very many
        bound = {"Q4_1": 1e-3, "Q5_1": 1e-3, "F16": 2e-6, "BF16": 2e-6}.get(name, 5e-6)
        off = np.abs(result - expected) / magnitude
        assert np.quantile(off, 0.99) < bound, (rows, k, off.max())
        assert off.max() < 1e-3, (rows, k)


def test_results_are_close_to_upstream(cpu: Cpu, case: tuple[str, str]) -> None:
    name, buffer = case
    for rows, k in shapes(name, buffer):
        values = normal(k + 1, rows, k)
        with placed(cpu, name, buffer, values) as weights:
            for n in (1, 3, 8, 13):
                x = normal(rows + n, n, k)
                magnitude = twin(cpu, name, values, x)[1]
                with cpu.kernels(True):
                    ours = cpu.product(weights, x)
                with cpu.kernels(False):
                    theirs = cpu.product(weights, x)
                # sums in another order; on 16-bit weights upstream rounds the activations too
                bound = {"F16": 2**-11, "BF16": 2**-8}.get(name, 3e-6)
                assert np.max(np.abs(ours - theirs) / magnitude) < bound, (rows, k, n)


def test_more_columns_are_upstreams_or_as_invariant(cpu: Cpu, case: tuple[str, str]) -> None:
    name, buffer = case
    x = normal(4, 100, 768)
    upstreams = buffer == "AMX" or name in ("F16", "BF16")
    with placed(cpu, name, buffer, normal(3, 64, 768)) as weights:
        with cpu.kernels(True):
            few = cpu.product(weights, x[:MAX_COLUMNS])
            ours = {n: cpu.product(weights, x[:n]) for n in (17, 32, 33, 100)}
        with cpu.kernels(False):
            theirs = {n: cpu.product(weights, x[:n]) for n in ours}
    for n in ours:
        # prompts: where upstream's kernels are faster they compute, else the bits stay the same
        from_few = same_bits(ours[n][:MAX_COLUMNS], few)
        assert same_bits(ours[n], theirs[n]) if upstreams else from_few or name in SUPER_BLOCKS
    if not upstreams:
        assert same_bits(ours[32][:MAX_COLUMNS], few)


@pytest.mark.parametrize("name", ["Q4_0", "Q4_K", "IQ4_NL"])
def test_weights_stay_plain_where_that_is_faster(cpu: Cpu, simd: None, name: str) -> None:
    if "CPU_REPACK" not in cpu.buffer_types:
        pytest.skip("no packed rows on this CPU")
    weights = Weights(cpu, name, None, 256, "CPU_REPACK", rows=64)
    supported = cpu.supports(weights)
    weights.close()
    assert not supported


@pytest.mark.parametrize("name", ["F32", "Q3_K"])
def test_other_types_are_computed_by_upstream(cpu: Cpu, name: str) -> None:
    values = normal(3, 64, 256)
    with placed(cpu, name, "plain", values) as weights:
        covers = cpu.call("knapspec_cpu_covers", ctypes.c_bool, [ctypes.c_void_p])
        assert not covers(weights.tensor)
        for n in (1, 4, 9):
            x = normal(n, n, 256)
            with cpu.kernels(True):
                ours = cpu.product(weights, x)
            with cpu.kernels(False):
                theirs = cpu.product(weights, x)
            assert same_bits(ours, theirs)


def test_the_reference_is_upstreams(cpu: Cpu, case: tuple[str, str]) -> None:
    name, _ = case
    x = normal(4, 3, 768)
    with placed(cpu, name, "plain", normal(3, 64, 768)) as weights, cpu.reference():
        with cpu.kernels(True):
            ours = cpu.product(weights, x)
        with cpu.kernels(False):
            theirs = cpu.product(weights, x)
    assert same_bits(ours, theirs)


def test_no_columns_are_no_product(cpu: Cpu, case: tuple[str, str]) -> None:
    """A prompt's slices but the last ask for no logits, so the head has nothing to multiply."""
    name, buffer = case
    with placed(cpu, name, buffer, normal(3, 64, 768)) as weights, cpu.kernels(True):
        assert cpu.product(weights, normal(4, 0, 768)).shape == (0, 64)


def test_strides_planes_and_threads_change_nothing(cpu: Cpu, case: tuple[str, str]) -> None:
    name, buffer = case
    x = normal(4, 12, 768)
    with placed(cpu, name, buffer, normal(3, 160, 768)) as weights, cpu.kernels(True):
        expected = cpu.product(weights, x)
        if buffer == "plain":  # upstream's AMX wants contiguous columns
            assert same_bits(cpu.product(weights, x, gap=64), expected)
        planes = cpu.product(weights, x.reshape(3, 4, 768))
        assert same_bits(planes.reshape(12, 160), expected)
    blocks = cpu.quantize(name, normal(3, 160, 768))
    for n_threads in (1, 3, 7):
        other = Cpu(n_threads)
        weights = Weights(other, name, blocks, 768, buffer)
        with other.kernels(True):
            assert same_bits(other.product(weights, x), expected)
        weights.close()
        other.close()


# what is not ours: (weights, x, further arguments), shapes from the outermost dimension inwards
DECLINED: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "several matrices": ((1, 3, 32, 256), (1, 3, 4, 256), {}),
    "matrices shared by planes": ((2, 2, 32, 256), (4, 6, 3, 256), {}),
    "a batch of matrices": ((2, 1, 32, 256), (2, 1, 4, 256), {}),
    "fewer rows than a register": ((1, 1, 7, 256), (1, 1, 4, 256), {}),
    "one row": ((1, 1, 1, 512), (1, 1, 1, 512), {}),
    "part of the rows": ((1, 1, 80, 256), (1, 1, 4, 256), {"rows": slice(17, 60)}),
    "part of the columns": ((1, 1, 48, 512), (1, 1, 4, 512), {"k": 256}),
    "permuted": ((1, 3, 32, 256), (1, 6, 5, 256), {"swapped": True}),
}


@pytest.mark.parametrize("what", DECLINED)
@pytest.mark.parametrize("name", COVERED)
def test_what_is_not_ours_is_upstreams(cpu: Cpu, simd: None, name: str, what: str) -> None:
    shape, x_shape, more = DECLINED[what]
    values, x = normal(5, *shape), normal(6, *x_shape)
    with cpu.kernels(True):
        ours = cpu.any_product(name, values, x, **more)
    with cpu.kernels(False):
        theirs = cpu.any_product(name, values, x, **more)
    # rows of 16-bit floats need no neighbours to fill a register
    served = name in ("F16", "BF16") and shape[2] < 16
    assert served or same_bits(ours, theirs)
    # and what is compared is the product
    rows, k = more.get("rows", slice(None)), more.get("k")
    a, b = x_shape[0] // shape[0], x_shape[1] // shape[1]
    w = np.repeat(np.repeat(values[:, :, rows, :k], a, axis=0), b, axis=1).astype(np.float64)
    expected = np.einsum("abrk,abck->abcr", w, x[..., :k])
    magnitude = np.einsum("abrk,abck->abcr", np.abs(w), np.abs(x[..., :k]))
    assert np.max(np.abs(ours - expected) / magnitude) < 0.1, "the error of 4 bits at most"


@pytest.mark.parametrize("name", ["F16", "BF16"])
def test_activations_of_16_bits_are_upstreams(cpu: Cpu, simd: None, name: str) -> None:
    values, x = normal(5, 1, 1, 48, 64), normal(6, 1, 1, 4, 64)
    with cpu.kernels(True):
        ours = cpu.any_product(name, values, x, x_type=name)
    with cpu.kernels(False):
        theirs = cpu.any_product(name, values, x, x_type=name)
    assert same_bits(ours, theirs)
    assert np.allclose(ours[0, 0], x[0, 0] @ values[0, 0].T, atol=0.2)


@pytest.mark.parametrize("name", COVERED)
def test_one_matrix_serves_planes_of_any_shape(cpu: Cpu, simd: None, name: str) -> None:
    """Of two dimensions, with gaps between their columns: each column as it is alone."""
    values, x = normal(5, 1, 1, 40, 512), normal(6, 2, 3, 2, 512)
    columns = x.reshape(1, 1, 12, 512)
    with cpu.kernels(True):
        flat = cpu.any_product(name, values, columns)
        assert same_bits(cpu.any_product(name, values, x).reshape(12, 40), flat[0, 0])
        swapped = cpu.any_product(name, values, x, swapped=True)
    with cpu.kernels(False):
        theirs = cpu.any_product(name, values, x, swapped=True)
    # permuted weights are not ours, even where that leaves them as they lie
    assert same_bits(swapped, theirs)


EXTREMES = {
    "zeros": lambda x: 0 * x,
    "huge": lambda x: x * np.float32(1e30),
    "tiny": lambda x: x * np.float32(1e-38),
    "infinity": lambda x: np.where(np.arange(x.shape[1]) == 40, np.float32(np.inf), x),
    "nan": lambda x: np.where(np.arange(x.shape[1]) == 300, np.float32(np.nan), x),
    "one outlier": lambda x: np.where(np.arange(x.shape[1]) == 7, np.float32(3e4), x),
}


@pytest.mark.parametrize("extreme", EXTREMES)
def test_extreme_activations(cpu: Cpu, case: tuple[str, str], extreme: str) -> None:
    name, buffer = case
    x = EXTREMES[extreme](normal(4, 3, 768)).astype(np.float32)
    with placed(cpu, name, buffer, normal(3, 64, 768)) as weights:
        with cpu.kernels(True):
            ours = cpu.product(weights, x)
            alone = np.stack([cpu.product(weights, x[i : i + 1])[0] for i in range(3)])
        with cpu.kernels(False):
            theirs = cpu.product(weights, x)
    assert np.array_equal(np.isnan(ours), np.isnan(alone))
    assert same_bits(np.nan_to_num(ours), np.nan_to_num(alone))
    if name in ("F16", "BF16"):
        # upstream rounds activations to 16 bits on some paths, where they overflow
        return
    assert np.array_equal(np.isfinite(ours), np.isfinite(theirs))
    if extreme == "nan":
        # upstream's rounding makes a NaN the byte -128, which some of its products cannot negate
        return
    finite = np.isfinite(theirs)
    scale = np.abs(theirs[finite]).max(initial=0) or 1
    assert np.abs(ours[finite] - theirs[finite]).max(initial=0) <= 1e-5 * scale


def test_the_weights_that_are_not_covered_are_named(tiny_models: Path, simd: None) -> None:
    with (
        open_model(tiny_models / "llama-dense.gguf") as model,
        open_context(model, ctx_tokens=64) as context,
    ):
        names = context.varying_weights()
    # F32 throughout: upstream's products, whose bits have to stay
    assert "blk.0.attn_q.weight" in names
    assert "output.weight" in names
    assert names == sorted(set(names))
    assert not any("norm" in name for name in names)


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("file_type", ["Q8_0", "Q4_1", "F16"])
def test_all_weights_of_the_demo_model_are_covered(simd: None, file_type: str) -> None:
    with (
        open_model(model_file(file_type)) as model,
        open_context(model, ctx_tokens=64) as context,
    ):
        assert context.varying_weights() == []
