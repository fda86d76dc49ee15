"""The pre-flight of GGUF files: each way a file can be wrong gets its own line."""

from __future__ import annotations

import builtins
import os
import random
import shutil
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from knapspec_edge import gguf_check
from knapspec_edge.errors import ModelError
from knapspec_edge.gguf_check import fingerprint, inspect, walk_strings

LITTLE_ONLY = pytest.mark.skipif(sys.byteorder != "little", reason="the host is big-endian")


def write_model(
    path: Path,
    *,
    output: bool = True,
    template: bool = False,
    vocabulary: list[str] | None = None,
    tensors: bool = True,
    endian: gguf.GGUFEndian = gguf.GGUFEndian.LITTLE,
    architecture: str = "llama",
    extra: Callable[[gguf.GGUFWriter], Any] | None = None,
    seed: int = 0,
) -> Path:
    """A tiny but well-formed GGUF file; nobody can generate with it."""
    writer = gguf.GGUFWriter(path, architecture, endianess=endian)
    writer.add_name("tiny")
    writer.add_block_count(2)
    writer.add_context_length(512)
    writer.add_embedding_length(32)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(vocabulary or ["a", "b", "é", "", "long" * 100])
    writer.add_token_types([1] * len(vocabulary or "abcde"))
    if template:
        writer.add_chat_template("{{ messages }}")
    if extra is not None:
        extra(writer)
    if tensors:
        generator = np.random.default_rng(seed)
        names = ["token_embd.weight", "blk.0.attn_q.weight", "blk.1.ffn_up.weight"]
        for name in names + (["output.weight"] if output else []):
            writer.add_tensor(name, generator.standard_normal((4, 32)).astype(np.float32))
        packed = np.zeros((4, 18), dtype=np.uint8)  # Q4_0 [4, 32]: one block of 18 bytes per row
        writer.add_tensor("q.weight", packed, raw_dtype=gguf.GGMLQuantizationType.Q4_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model.gguf")


def complaint(path: Path | str) -> str:
    """The message for this file: always exactly one line."""
    with pytest.raises(ModelError) as caught:
        inspect(path)
    message = str(caught.value)
    assert "\n" not in message
    assert message == message.strip() != ""
    return message


# ---- what a good file says


def test_header_of_a_good_file(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", template=True)
    info = inspect(path)
    reader = gguf.GGUFReader(path)
    assert info.path == path
    assert info.paths == (path,)
    assert info.n_splits == 1
    assert (info.architecture, info.name, info.version) == ("llama", "tiny", 3)
    assert (info.n_layers, info.context_length, info.embedding_length) == (2, 512, 32)
    assert info.n_vocab == 5
    assert info.n_tensors == len(reader.tensors) == 5
    assert info.n_params == sum(int(t.n_elements) for t in reader.tensors)
    assert info.data_offset == reader.data_offset
    assert info.size_bytes == path.stat().st_size
    assert info.has_chat_template
    assert not info.tied_embeddings
    assert info.file_type == "F32"  # not declared: the type that holds most bytes


def test_declared_file_type_wins(tmp_path: Path) -> None:
    path = write_model(
        tmp_path / "m.gguf", extra=lambda w: w.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_K_M)
    )
    assert inspect(path).file_type == "Q4_K_M"


def test_tied_embeddings_are_seen(tmp_path: Path) -> None:
    assert inspect(write_model(tmp_path / "m.gguf", output=False)).tied_embeddings


def test_alignment_other_than_the_default(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", extra=lambda w: w.add_custom_alignment(256))
    assert inspect(path).data_offset == gguf.GGUFReader(path).data_offset
    assert inspect(path).data_offset % 256 == 0


def test_type_table_agrees_with_the_gguf_package() -> None:
    known = {int(t): (t.name, *size) for t, size in gguf.GGML_QUANT_SIZES.items()}
    shared = known.keys() & gguf_check.GGML_TYPES.keys()
    # Q8_1 never lies in a file; the gguf package still has its size from before 2024
    shared -= {int(gguf.GGMLQuantizationType.Q8_1)}
    assert len(shared) > 25
    assert {k: gguf_check.GGML_TYPES[k] for k in shared} == {k: known[k] for k in shared}
    assert known.keys() <= gguf_check.GGML_TYPES.keys()


def test_file_types_agree_with_the_gguf_package() -> None:
    names = {
        int(t): t.name.removeprefix("MOSTLY_").removeprefix("ALL_") for t in gguf.LlamaFileType
    }
    names.pop(int(gguf.LlamaFileType.GUESSED))
    assert {k: gguf_check.FILE_TYPES.get(k) for k in names} == names


def test_a_type_newer_than_the_table_is_left_to_the_library(tmp_path: Path, model: Path) -> None:
    data = bytearray(model.read_bytes())
    at = data.index(b"blk.0.attn_q.weight") + len("blk.0.attn_q.weight") + 4 + 16
    assert struct.unpack_from("<I", data, at) == (0,)
    struct.pack_into("<I", data, at, 99)
    newer = tmp_path / "newer.gguf"
    newer.write_bytes(data)
    assert inspect(newer).n_tensors == 5


# ---- stepping over vocabularies


def pack_strings(strings: list[bytes]) -> bytes:
    return b"".join(struct.pack("<Q", len(s)) + s for s in strings)


def naive_walk(data: bytes, n_strings: int) -> tuple[int, int]:
    position = done = 0
    while done < n_strings and position + 8 <= len(data):
        length = int.from_bytes(data[position : position + 8], "little")
        if position + 8 + length > len(data):
            break
        position += 8 + length
        done += 1
    return position, done


@pytest.mark.parametrize(
    "strings",
    [
        [b"x"] * 5000,
        [b""] * 5000,
        [b"\0" * 9] * 3000,
        [bytes([i % 256]) * (i % 300) for i in range(6000)],
        [b"a", b"\0", b"", b"\x01\0\0\0\0\0\0\0"] * 1500,
        [b"w" * 255, b"w" * 256, b"w" * 70000] * 400,
    ],
    ids=["plain", "empty", "zeros", "mixed", "lookalikes", "long"],
)
def test_walk_agrees_with_one_step_at_a_time(strings: list[bytes]) -> None:
    data = pack_strings(strings)
    for n in (len(strings), len(strings) - 1, 1024):
        assert walk_strings(data, n) == naive_walk(data, n)
    for cut in (len(data) - 1, len(data) // 2, 17):
        assert walk_strings(data[:cut], len(strings)) == naive_walk(data[:cut], len(strings))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.binary(max_size=12), min_size=1024, max_size=1100), st.data())
def test_walk_on_random_strings(strings: list[bytes], data: st.DataObject) -> None:
    packed = pack_strings(strings)
    cut = data.draw(st.integers(0, len(packed)))
    for piece in (packed, packed[:cut], packed[cut:]):
        assert walk_strings(piece, len(strings)) == naive_walk(piece, len(strings))


def test_vocabulary_larger_than_a_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_check, "_CHUNK_BYTES", 1 << 12)
    generator = random.Random(1)
    tokens = ["x" * generator.randrange(1, 40) for _ in range(5000)]
    tokens[2500] = "y" * 50_000  # longer than a chunk
    path = write_model(tmp_path / "m.gguf", vocabulary=tokens)
    info = inspect(path)
    assert info.n_vocab == 5000
    assert info.data_offset == gguf.GGUFReader(path).data_offset


# ---- paths


def test_missing_file(tmp_path: Path, model: Path) -> None:
    text = complaint(tmp_path / "modle.gguf")
    assert "model file not found" in text
    assert f"did you mean {model}?" in text
    assert "there is no folder" in complaint(tmp_path / "nowhere" / "m.gguf")
    assert "a file, not a folder" in complaint(model / "m.gguf")


def test_odd_paths(tmp_path: Path) -> None:
    assert "too long" in complaint(tmp_path / ("x" * 5000))
    assert "not a valid path" in complaint("a\0b.gguf")
    assert r"two\nlines.gguf" in complaint(tmp_path / "two\nlines.gguf")
    link = tmp_path / "link.gguf"
    link.symlink_to(tmp_path / "gone.gguf")
    assert "link to a file that does not exist" in complaint(link)
    loop = tmp_path / "loop.gguf"
    loop.symlink_to(loop)
    assert str(loop) in complaint(loop)


def test_directory(tmp_path: Path, model: Path) -> None:
    assert f"is a directory: give a file in it, such as {model}" in complaint(tmp_path)
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "holds no .gguf file" in complaint(empty)
    (empty / "config.json").write_text("{}")
    assert "Hugging Face checkpoint" in complaint(empty)


def test_empty_file(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.touch()
    assert "is empty (0 bytes)" in complaint(path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_a_pipe_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "m.gguf")
    assert "not a regular file" in complaint(tmp_path / "m.gguf")


def test_no_permission(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if hasattr(os, "geteuid") and os.geteuid() == 0:  # nothing is forbidden to root

        def refuse(*_: object, **__: object) -> None:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(builtins, "open", refuse)
    else:
        model.chmod(0)
    text = complaint(model)
    assert f"no permission to read {model}" in text


# ---- files that are something else


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"<!DOCTYPE html>\n<html><head>", ["not a GGUF file but a web page", "<!DOCTYPE html>"]),
        (b"\n  <HTML lang='en'>", ["web page", "download probably failed"]),
        (b"\xef\xbb\xbf<?xml version='1.0'?>", ["web page"]),
        (b"Entry not found", ["but text", "Entry not found", "download probably failed"]),
        (b'{"error": "Access denied"}', ["but text", "Access denied"]),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 4920734272\n",
            ["Git LFS pointer", "4,920,734,272 bytes", "git lfs pull"],
        ),
        (b"/annex/objects/SHA256E-s1--00.gguf\n", ["git-annex pointer", "git annex get"]),
        (struct.pack("<I", 0x67676D6C) + b"\1" * 99, ["old ggml format", "convert"]),
        (struct.pack("<I", 0x67676D66) + b"\1" * 99, ["old ggmf format", "convert"]),
        (struct.pack("<I", 0x67676A74) + b"\1" * 99, ["old ggjt format", "convert"]),
        (struct.pack("<I", 0x67676C61) + b"\1" * 99, ["old ggla", "LoRA"]),
        (struct.pack("<I", 0x6767736E) + b"\1" * 99, ["saved llama.cpp session"]),
        (b"PK\x03\x04" + b"\1" * 99, ["PyTorch", "convert"]),
        (struct.pack("<Q", 40) + b'{"__metadata__":{}}', ["safetensors", "convert"]),
        (b"\x1f\x8b\x08\0" + b"\1" * 99, ["compressed", "unpack"]),
        (bytes(5000), ["zero bytes", "unfinished download"]),
        (b"\x7fELF" + bytes(range(99)), ["not a GGUF file", r"\x7fELF"]),
        (b"GG", ["not a GGUF file"]),
        (b"GGUF\3\0", ["incomplete", "6 bytes"]),
    ],
)  # fmt: skip
def test_not_gguf(tmp_path: Path, content: bytes, words: list[str]) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    text = complaint(path)
    assert str(path) in text
    for word in words:
        assert word in text


@LITTLE_ONLY
def test_big_endian_file(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", endian=gguf.GGUFEndian.BIG)
    text = complaint(path)
    assert "big-endian file and this machine is little-endian" in text
    assert "byte order" in text
    assert "gguf-convert-endian" in text


def test_big_endian_file_on_a_big_endian_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_model(
        tmp_path / "m.gguf", endian=gguf.GGUFEndian.BIG, vocabulary=["x"] * 3000, template=True
    )
    monkeypatch.setattr(gguf_check.sys, "byteorder", "big")
    info = inspect(path)
    assert (info.n_layers, info.n_vocab, info.n_tensors) == (2, 3000, 5)
    assert "little-endian file" in complaint(write_model(tmp_path / "little.gguf"))


@LITTLE_ONLY
@pytest.mark.parametrize(
    ("version", "words"),
    [(0, "damaged"), (1, "version 1"), (4, "newer than this program reads"), (77, "newer than")],
)
def test_versions(model: Path, version: int, words: str) -> None:
    data = bytearray(model.read_bytes())
    struct.pack_into("<I", data, 4, version)
    model.write_bytes(data)
    assert words in complaint(model)


@LITTLE_ONLY
def test_version_2_is_read(model: Path) -> None:
    data = bytearray(model.read_bytes())
    struct.pack_into("<I", data, 4, 2)
    model.write_bytes(data)
    assert inspect(model).version == 2


def test_vocabulary_only(tmp_path: Path) -> None:
    text = complaint(write_model(tmp_path / "vocab.gguf", tensors=False))
    assert "no weights in this file" in text
    assert "vocabulary only" in text


@pytest.mark.parametrize(
    ("architecture", "kind", "words"),
    [
        ("clip", "mmproj", ["multimodal projector", "text model"]),
        ("clip", "model", ["multimodal projector"]),
        ("llama", "adapter", ["LoRA adapter", "base model", "llama"]),
        ("imatrix", "imatrix", ["importance matrix"]),
        ("controlvector", "model", ["control vector"]),
    ],
)
def test_gguf_files_that_are_no_models(
    tmp_path: Path, architecture: str, kind: str, words: list[str]
) -> None:
    def extra(writer: gguf.GGUFWriter) -> None:
        writer.add_type(kind)
        if kind == "adapter":
            writer.add_string("adapter.type", "lora")

    text = complaint(write_model(tmp_path / "x.gguf", architecture=architecture, extra=extra))
    for word in words:
        assert word in text


# ---- damage


def test_truncated_tensor_data(model: Path) -> None:
    whole = model.stat().st_size
    # the last tensor is followed by padding: losing that alone is no loss
    info = inspect(model)
    needed = info.data_offset + 4 * 4 * 32 * 4 + 72
    assert needed <= whole
    os.truncate(model, needed)
    assert inspect(model).n_tensors == 5
    os.truncate(model, needed - 1)
    text = complaint(model)
    assert "is incomplete" in text
    assert f"{needed - 1:,} of {needed:,} bytes" in text
    assert "download it again" in text


def test_truncated_header(model: Path) -> None:
    os.truncate(model, inspect(model).data_offset // 2)
    text = complaint(model)
    assert "incomplete or damaged" in text
    assert "header runs past the end" in text


@settings(
    max_examples=300,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_any_truncation_is_a_model_error(model: Path, data: st.DataObject) -> None:
    whole = model.read_bytes()
    needed = inspect(model).data_offset + 4 * 4 * 32 * 4 + 72
    cut = model.with_name("cut.gguf")
    cut.write_bytes(whole[: data.draw(st.integers(0, needed - 1))])
    complaint(cut)


@settings(
    max_examples=500,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_any_damage_is_a_model_error_or_harmless(model: Path, data: st.DataObject) -> None:
    damaged = bytearray(model.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, inspect(model).data_offset))
        patch = data.draw(st.binary(min_size=1, max_size=8))
        damaged[at : at + len(patch)] = patch
    path = model.with_name("damaged.gguf")
    path.write_bytes(damaged)
    message = ""
    try:
        fingerprint(inspect(path))
    except ModelError as error:
        message = str(error)
    assert "\n" not in message


@LITTLE_ONLY
@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        (b"blk.1.ffn_up.weight", b"blk.0.attn_q.weight", "twice"),
        (b"llama.block_count", b"llama.block_coun\0", None),
        (b"general.name", b"general.nam\x80", None),
    ],
)
def test_contradictions(model: Path, key: bytes, value: bytes, words: str | None) -> None:
    data = model.read_bytes()
    assert data.count(key) == 1
    model.write_bytes(data.replace(key, value))
    if words is None:  # odd names harm nobody here
        assert inspect(model).n_tensors == 5
    else:
        assert words in complaint(model)


@LITTLE_ONLY
@pytest.mark.parametrize("n_layers", [0, 513, 4_000_000_000])
def test_numbers_of_layers_that_would_end_the_process(tmp_path: Path, n_layers: int) -> None:
    path = write_model(
        tmp_path / "m.gguf",
        architecture="mamba",
        extra=lambda writer: writer.add_uint32("llama.block_count", n_layers),
    )
    path.write_bytes(path.read_bytes().replace(b"mamba.block_count", b"xxxxx.block_count"))
    path.write_bytes(path.read_bytes().replace(b"llama.block_count", b"mamba.block_count"))
    assert f"{n_layers} layers where llama.cpp takes 1 to 512" in complaint(path)


def test_tensors_that_overlap(model: Path) -> None:
    data = bytearray(model.read_bytes())
    at = data.index(b"blk.1.ffn_up.weight") + len("blk.1.ffn_up.weight") + 4 + 16 + 4
    assert struct.unpack_from("<Q", data, at) == (1024,)
    struct.pack_into("<Q", data, at, 512)
    model.write_bytes(data)
    assert "'blk.1.ffn_up.weight' is not where it should be" in complaint(model)


@LITTLE_ONLY
def test_absurd_counts_are_found_at_once(model: Path) -> None:
    for offset, value in ((8, 2**60), (16, 2**60), (8, -1), (16, -1)):
        data = bytearray(model.read_bytes())
        struct.pack_into("<q", data, offset, value)
        broken = model.with_name("broken.gguf")
        broken.write_bytes(data)
        assert "damaged" in complaint(broken)


@LITTLE_ONLY
def test_bad_alignment(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", extra=lambda w: w.add_uint32("general.alignmenX", 3))
    data = path.read_bytes()
    path.write_bytes(data.replace(b"general.alignmenX", b"general.alignment"))
    assert "alignment 3" in complaint(path)


# ---- split models


def write_split(folder: Path, count: int = 3, prefix: str = "big", seed: int = 0) -> list[Path]:
    """A model in `count` files, as gguf-split lays them out; the first has the metadata."""
    paths = []
    for number in range(count):
        path = folder / f"{prefix}-{number + 1:05d}-of-{count:05d}.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        if number == 0:
            writer.add_block_count(2)
            writer.add_context_length(64)
            writer.add_token_list(["a", "b"])
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", count)
        writer.add_int32("split.tensors.count", count)
        name = "token_embd.weight" if number == 0 else f"blk.{number}.w"
        values = np.random.default_rng(seed + number).standard_normal((2, 32))
        writer.add_tensor(name, values.astype(np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        paths.append(path)
    return paths


def test_split_model(tmp_path: Path) -> None:
    paths = write_split(tmp_path)
    info = inspect(paths[0])
    assert info.paths == tuple(paths)
    assert info.n_splits == 3
    assert info.n_tensors == 3
    assert info.n_params == 3 * 64
    assert info.size_bytes == sum(p.stat().st_size for p in paths)
    assert info.tied_embeddings


def test_second_split_given(tmp_path: Path) -> None:
    paths = write_split(tmp_path)
    text = complaint(paths[1])
    assert "part 2 of 3" in text
    assert f"give the first part: {paths[0]}" in text
    paths[0].unlink()
    assert "missing here" in complaint(paths[1])


def test_split_missing(tmp_path: Path) -> None:
    paths = write_split(tmp_path, count=4)
    paths[2].unlink()
    text = complaint(paths[0])
    assert f"a part of the model is missing: {paths[2]};" in text
    paths[3].unlink()
    assert f"{paths[2]} and 1 more" in complaint(paths[0])


def test_split_cut_short_or_renamed_or_foreign(tmp_path: Path) -> None:
    paths = write_split(tmp_path)
    whole = paths[2].read_bytes()
    paths[2].write_bytes(whole[:-200])
    text = complaint(paths[0])
    assert str(paths[2]) in text
    assert "incomplete" in text
    shutil.copy(paths[1], paths[2])
    assert "is not part 3 of 3" in complaint(paths[0])
    renamed = tmp_path / "renamed.gguf"
    paths[0].rename(renamed)
    text = complaint(renamed)
    assert "renamed" in text
    assert "-00001-of-00003.gguf" in text


# ---- fingerprint


def test_fingerprint_follows_contents_not_names(tmp_path: Path, model: Path) -> None:
    mark = fingerprint(model)
    assert len(mark) == 32
    assert int(mark, 16) >= 0
    assert fingerprint(inspect(model)) == mark
    copy = tmp_path / "sub" / "other-name.gguf"
    copy.parent.mkdir()
    shutil.copy(model, copy)
    assert fingerprint(copy) == mark
    assert fingerprint(write_model(tmp_path / "seed.gguf", seed=1)) != mark
    with_template = write_model(tmp_path / "template.gguf", template=True)
    assert fingerprint(with_template) != mark


def test_fingerprint_sees_every_tensor_of_a_small_file(model: Path) -> None:
    mark = fingerprint(model)
    data = bytearray(model.read_bytes())
    for offset in range(inspect(model).data_offset, len(data) - 64, 512):
        changed = bytearray(data)
        changed[offset] ^= 1
        path = model.with_name("changed.gguf")
        path.write_bytes(changed)
        assert fingerprint(path) != mark


def test_fingerprint_covers_all_splits(tmp_path: Path) -> None:
    paths = write_split(tmp_path)
    mark = fingerprint(paths[0])
    data = bytearray(paths[2].read_bytes())
    data[-40] ^= 1
    paths[2].write_bytes(data)
    assert fingerprint(paths[0]) != mark


def test_fingerprint_of_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="model file not found"):
        fingerprint(tmp_path / "gone.gguf")
