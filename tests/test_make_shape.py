"""scripts/make_shape.py: dimensions, types, blocks and messages; llama.cpp's word is in native/."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray
from scripted_tools import load

make_shape = load("make_shape")
SHAPES = make_shape.SHAPES


def run(*arguments: str) -> int:
    return int(make_shape.main(list(arguments)))


@pytest.mark.parametrize(
    ("name", "low", "high"), [("1b", 1.23e9, 1.24e9), ("8b", 8.0e9, 8.1e9), ("moe", 3.5e9, 3.9e9)]
)
def test_named_shapes_have_as_many_weights_as_their_models(name, low, high):
    count = sum(int(np.prod(dims)) for _, dims in make_shape.tensors(SHAPES[name]))
    assert low < count < high


def test_types_are_mixed_by_layer_and_part():
    shape = SHAPES["8b"]

    def types(part: str, file_type: str) -> list[str]:
        names = [f"blk.{i}.{part}.weight" for i in range(shape.layers)]
        return [make_shape.tensor_type(name, shape, file_type) for name in names]

    # llama.cpp's published Q4_K_M of Llama 3.1 8B: Q6_K in 16 of 32 layers
    assert types("attn_v", "Q4_K_M").count("Q6_K") == 16
    assert types("ffn_down", "Q4_K_M") == types("attn_v", "Q4_K_M")
    assert set(types("ffn_up", "Q4_K_M")) == {"Q4_K"}
    assert types("ffn_down", "IQ2_XXS") == ["Q2_K"] * 4 + ["IQ2_XXS"] * 28
    assert set(types("attn_norm", "Q4_0")) == {"F32"}


@pytest.mark.parametrize(
    ("tied", "head", "embedding"), [(True, None, "Q6_K"), (False, "Q6_K", "Q4_0")]
)
def test_a_tied_embedding_has_the_type_of_a_head(tied, head, embedding):
    shape = replace(SHAPES["tiny"], tied=tied)
    found = {n: make_shape.tensor_type(n, shape, "Q4_0") for n, _ in make_shape.tensors(shape)}
    assert found["token_embd.weight"] == embedding
    assert found.get("output.weight") == head


def bytes_of(tensor: Any, folder: Path) -> NDArray[np.uint8]:
    """What a tensor writes, u8 [nbytes]."""
    with open(folder / "tensor", "wb") as stream:
        tensor.tofile(stream)
    data = np.fromfile(folder / "tensor", dtype=np.uint8)
    assert data.nbytes == tensor.nbytes
    return data


@pytest.mark.parametrize("type_name", make_shape.BLOCK_TYPES)
def test_random_blocks_are_centred_and_spread_as_asked(type_name, tmp_path):
    tensor = make_shape.RandomTensor("t", (1024, 1024), type_name, np.random.default_rng(1))
    rows = bytes_of(tensor, tmp_path).reshape(1024, -1)
    weights = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[type_name])
    assert weights.shape == (1024, 1024)
    assert np.isfinite(weights).all()
    assert np.std(weights) == pytest.approx(1 / 32, rel=0.05)
    assert abs(np.mean(weights)) < 0.15 / 32  # Q4_0 reaches from -8 to 7


@pytest.mark.parametrize(("type_name", "dtype"), [("F16", np.float16), ("F32", np.float32)])
def test_random_floats_are_finite_and_of_the_asked_size(type_name, dtype, tmp_path):
    tensor = make_shape.RandomTensor("t", (256, 1024), type_name, np.random.default_rng(1))
    weights = bytes_of(tensor, tmp_path).view(dtype).astype(np.float64)
    assert np.isfinite(weights).all()
    # the exponent is a whole number, so the size is right to a factor of the square root of two
    assert 0.7 / 32 < np.std(weights) < 1.42 / 32
    assert abs(np.mean(weights)) < 0.01 / 32


def test_slices_are_written_without_gap_and_differ(tmp_path, monkeypatch):
    monkeypatch.setattr(make_shape, "SLICE_BYTES", 1000)
    tensor = make_shape.RandomTensor("t", (64, 256), "Q8_0", np.random.default_rng(1))
    blocks = bytes_of(tensor, tmp_path).reshape(-1, 34)
    assert len({block.tobytes() for block in blocks}) == len(blocks) == 64 * 8


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--heads", "5"], "multiple of --kv-heads"),
        (["--layers", "0"], "--layers"),
        (["--experts", "4"], "--experts-used"),
        (["--vocabulary", "100"], "--vocabulary"),
        (["--type", "Q4_K_M", "--width", "128"], "multiple of 256"),
        (["--head-width", "63"], "odd"),
        (["--seed", "-1"], "--seed"),
    ],
)
def test_bad_requests_get_one_line(arguments, words, tmp_path, capsys):
    target = tmp_path / "x.gguf"
    assert run("tiny", "-o", str(target), *arguments) == 2
    shown = capsys.readouterr()
    assert words in shown.err
    assert shown.err.count("\n") == 1
    assert shown.out == ""
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there_gets_one_line(tmp_path, capsys):
    assert run("tiny", "-o", str(tmp_path / "missing" / "x.gguf")) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_a_full_disk_is_noticed_before_anything_is_written(tmp_path, monkeypatch, capsys):
    usage = make_shape.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(make_shape.shutil, "disk_usage", lambda _: usage._replace(free=1000))
    assert run("tiny", "-o", str(tmp_path / "x.gguf")) == 2
    assert "make room" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_file_says_what_it_is(tmp_path, capsys):
    target = tmp_path / "x.gguf"
    assert run("tiny", "-o", str(target), "--type", "Q8_0", "--layers", "3") == 0
    assert capsys.readouterr().out.strip() == str(target)
    reader = gguf.GGUFReader(target)
    for key in ("general.name", "general.description"):
        assert "random weights, for timing" in reader.fields[key].contents().lower()
    assert reader.fields["llama.block_count"].contents() == 3
    assert [t.name for t in reader.tensors] == [
        name for name, _ in make_shape.tensors(replace(SHAPES["tiny"], layers=3))
    ]


def test_the_same_seed_gives_the_same_file(tmp_path, capsys):
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        assert run("tiny", "-o", str(tmp_path / name), "--seed", seed) == 0
    a, b, c = ((tmp_path / name).read_bytes() for name in "abc")
    assert a == b
    assert a != c
