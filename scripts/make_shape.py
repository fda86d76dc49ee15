"""Write a GGUF file with the shape of a known model and random weights, for timing only.

    python scripts/make_shape.py 1b --type Q8_0 -o shape-1b-q8_0.gguf
    python scripts/make_shape.py 8b --type Q4_K_M -o shape-8b-q4_k_m.gguf
    python scripts/make_shape.py moe --type Q4_K_M --layers 8 --experts 64 -o shape-moe.gguf

What a pass costs depends on shapes and types, not on what the weights are. The text of such a model
is noise, and its file says so. Types are mixed as llama.cpp's quantizer mixes them (with an
importance matrix for the IQ types, as such files are made). Memory stays below that of one tensor's
slice, whatever the size of the file.
"""

from __future__ import annotations

import argparse
import math
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import IO, Any

import gguf
import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from knapspec_edge.errors import KnapspecError, UsageError  # noqa: E402
from knapspec_edge.models import storage  # noqa: E402

SLICE_BYTES = 1 << 23  # of a tensor held in memory at once
RMS_EPSILON = 1e-5
ROPE_BASE = 500_000.0
# <unk>, <s>, </s> and a token per byte: what a SentencePiece vocabulary has to hold
_FIXED_TOKENS = 3 + 256
_SPREAD_BLOCKS = 4096  # on which the spread of a block type's weights is determined


@dataclass(frozen=True)
class Shape:
    """Dimensions of a Llama-like decoder; with experts, of a Qwen3-MoE-like one."""

    layers: int
    width: int
    ffn: int  # width of the MLP, or of one expert
    heads: int
    kv_heads: int
    head_width: int
    vocabulary: int
    tied: bool  # the head is the token embedding
    experts: int = 0
    experts_used: int = 0
    context: int = 131_072  # tokens the file says the model was trained for

    @property
    def architecture(self) -> str:
        return "qwen3moe" if self.experts else "llama"

    def check(self) -> None:
        """Raises UsageError for dimensions that no model can have."""
        for field in fields(self):
            value = getattr(self, field.name)
            if value < 0 or (value == 0 and not field.name.startswith(("experts", "tied"))):
                raise UsageError(f"--{field.name.replace('_', '-')} must be at least 1")
        if self.heads % self.kv_heads:
            raise UsageError(
                f"--heads {self.heads} is not a multiple of --kv-heads {self.kv_heads}"
            )
        if self.head_width % 2:
            raise UsageError(
                f"--head-width {self.head_width} is odd, which rotary positions forbid"
            )
        if self.vocabulary <= _FIXED_TOKENS:
            raise UsageError(f"--vocabulary must be above {_FIXED_TOKENS}")
        if bool(self.experts) != bool(self.experts_used) or self.experts_used > self.experts:
            raise UsageError("--experts-used must be in 1..experts, and 0 without experts")


_LLAMA_VOCABULARY, _QWEN_VOCABULARY = 128_256, 151_936
_QWEN_CONTEXT = 40_960
# From the config.json that each model is published with.
SHAPES = {
    # Llama 3.2 1B and 3B, Llama 3.1 8B and 70B
    "1b": Shape(16, 2048, 8192, 32, 8, 64, _LLAMA_VOCABULARY, True),
    "3b": Shape(28, 3072, 8192, 24, 8, 128, _LLAMA_VOCABULARY, True),
    "8b": Shape(32, 4096, 14_336, 32, 8, 128, _LLAMA_VOCABULARY, False),
    "70b": Shape(80, 8192, 28_672, 64, 8, 128, _LLAMA_VOCABULARY, False),
    # Qwen3, without its norms of queries and keys (256 weights a layer)
    "qwen3-0.6b": Shape(28, 1024, 3072, 16, 8, 128, _QWEN_VOCABULARY, True, context=_QWEN_CONTEXT),
    "qwen3-1.7b": Shape(28, 2048, 6144, 16, 8, 128, _QWEN_VOCABULARY, True, context=_QWEN_CONTEXT),
    "qwen3-4b": Shape(36, 2560, 9728, 32, 8, 128, _QWEN_VOCABULARY, True, context=_QWEN_CONTEXT),
    "qwen3-8b": Shape(36, 4096, 12_288, 32, 8, 128, _QWEN_VOCABULARY, False, context=_QWEN_CONTEXT),
    "qwen3-14b": Shape(
        40, 5120, 17_408, 40, 8, 128, _QWEN_VOCABULARY, False, context=_QWEN_CONTEXT
    ),
    "qwen3-32b": Shape(
        64, 5120, 25_600, 64, 8, 128, _QWEN_VOCABULARY, False, context=_QWEN_CONTEXT
    ),
    # 3.6 billion weights, 0.8 of them used for a token
    "moe": Shape(16, 2048, 1024, 32, 8, 64, 128_256, True, experts=32, experts_used=4),
    # the smallest that every type fits
    "tiny": Shape(2, 256, 256, 4, 2, 64, 512, False, context=2048),
}


@dataclass(frozen=True)
class BlockType:
    """Where a block of a ggml type keeps what scales its weights.

    A weight is `scale * q` for some integer q, plus the offset where there is one. Every other
    byte of a block may hold anything.
    """

    scale_byte: int
    offset_byte: int | None = None
    offset_per_scale: float = 0.0  # offset that centres uniformly random weights on zero


BLOCK_TYPES = {
    "Q4_0": BlockType(0),
    "Q4_1": BlockType(0, 2, -7.5),  # scale * (0..15) + offset
    "Q8_0": BlockType(0),
    "Q2_K": BlockType(80, 82, 1.5),  # scale * (0..15) * (0..3) - offset * (0..15)
    "Q4_K": BlockType(0, 2, 7.5),  # scale * (0..63) * (0..15) - offset * (0..63)
    "Q5_K": BlockType(0, 2, 15.5),
    "Q6_K": BlockType(208),
    "IQ2_XXS": BlockType(0),
    "IQ2_S": BlockType(0),
    "IQ3_XXS": BlockType(0),
    "IQ3_S": BlockType(0),
    "IQ4_XS": BlockType(0),
}
# file type -> its principal tensor type
FILE_TYPES = {
    "F16": "F16",
    "Q8_0": "Q8_0",
    "Q4_0": "Q4_0",
    "Q4_1": "Q4_1",
    "Q4_K_M": "Q4_K",
    "IQ4_XS": "IQ4_XS",
    "IQ3_XXS": "IQ3_XXS",
    "IQ2_XXS": "IQ2_XXS",
}


def tensors(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and dimensions ([experts,] rows, columns) of every tensor, in file order."""
    width, queries = shape.width, shape.heads * shape.head_width
    keys = shape.kv_heads * shape.head_width
    yield "token_embd.weight", (shape.vocabulary, width)
    for i in range(shape.layers):
        yield f"blk.{i}.attn_norm.weight", (width,)
        yield f"blk.{i}.attn_q.weight", (queries, width)
        yield f"blk.{i}.attn_k.weight", (keys, width)
        yield f"blk.{i}.attn_v.weight", (keys, width)
        yield f"blk.{i}.attn_output.weight", (width, queries)
        yield f"blk.{i}.ffn_norm.weight", (width,)
        if not shape.experts:
            yield f"blk.{i}.ffn_gate.weight", (shape.ffn, width)
            yield f"blk.{i}.ffn_up.weight", (shape.ffn, width)
            yield f"blk.{i}.ffn_down.weight", (width, shape.ffn)
            continue
        yield f"blk.{i}.attn_q_norm.weight", (shape.head_width,)
        yield f"blk.{i}.attn_k_norm.weight", (shape.head_width,)
        yield f"blk.{i}.ffn_gate_inp.weight", (shape.experts, width)
        yield f"blk.{i}.ffn_gate_exps.weight", (shape.experts, shape.ffn, width)
        yield f"blk.{i}.ffn_up_exps.weight", (shape.experts, shape.ffn, width)
        yield f"blk.{i}.ffn_down_exps.weight", (shape.experts, width, shape.ffn)
    yield "output_norm.weight", (width,)
    if not shape.tied:
        yield "output.weight", (shape.vocabulary, width)


def tensor_type(name: str, shape: Shape, file_type: str) -> str:
    """The ggml type of a tensor, as `llama_tensor_get_type` of llama.cpp chooses it."""
    parts = name.split(".")
    part, layer = parts[-2], int(parts[1]) if parts[0] == "blk" else 0
    if part.endswith("_norm") or part == "ffn_gate_inp":
        return "F32"
    principal = FILE_TYPES[file_type]
    if file_type == "F16":
        return principal
    few_bits = file_type in ("IQ2_XXS", "IQ3_XXS")
    if part == "output" or (part == "token_embd" and shape.tied):
        return "Q5_K" if few_bits else "Q8_0" if file_type == "Q8_0" else "Q6_K"
    if part == "token_embd":
        return {"IQ2_XXS": "Q2_K", "IQ3_XXS": "IQ3_S"}.get(file_type, principal)

    shared = shape.heads // shape.kv_heads >= 4  # as many queries per key
    eighth = shape.layers // 8
    more_bits = (
        layer < eighth or layer >= 7 * shape.layers // 8 or (layer - eighth) % 3 == 2
    )  # `use_more_bits`
    if part in ("attn_v", "attn_k") and shape.experts == 8:
        return "Q4_K" if file_type == "IQ2_XXS" else "Q8_0"
    if part == "attn_v":
        if file_type == "IQ2_XXS":
            return "Q4_K" if shared or shape.experts >= 4 else "Q2_K"
        if file_type == "Q4_K_M" and more_bits:
            return "Q6_K"
        kind = principal
        if shared:
            kind = {"IQ3_XXS": "Q4_K", "IQ4_XS": "Q5_K"}.get(file_type, principal)
        is_70b = not shape.experts and shape.layers == 80 and shape.heads != shape.kv_heads
        return "Q5_K" if is_70b and kind == "Q4_K" else kind  # LLM_TYPE_70B
    elif part in ("attn_q", "attn_k") and file_type == "IQ3_XXS":
        return "IQ2_S"
    elif part == "attn_output":
        if shape.experts == 8:
            few_bits = few_bits or file_type in ("Q4_K_M", "IQ4_XS")
            return "Q5_K" if few_bits else principal
        return "IQ3_S" if file_type == "IQ3_XXS" else principal
    elif part.startswith("ffn_down"):
        if file_type == "Q4_K_M" and more_bits:
            return "Q6_K"
        if file_type == "IQ2_XXS" and layer < eighth:
            return "Q2_K"
    return principal


def _random_bytes(rng: np.random.Generator, n: int) -> NDArray[np.uint8]:
    words = rng.integers(np.iinfo(np.uint64).max, size=-(-n // 8), dtype=np.uint64, endpoint=True)
    return words.view(np.uint8)[:n]


def _random_blocks(
    rng: np.random.Generator, type_name: str, count: int, scale: float
) -> NDArray[np.uint8]:
    """`count` random blocks of a type of BLOCK_TYPES, u8 [count, bytes per block]."""
    block = BLOCK_TYPES[type_name]
    size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_name]][1]
    blocks = _random_bytes(rng, count * size).reshape(count, size)

    def put(byte: int, number: float) -> None:
        blocks[:, byte : byte + 2] = np.frombuffer(np.float16(number).tobytes(), dtype=np.uint8)

    put(block.scale_byte, scale)
    if block.offset_byte is not None:
        put(block.offset_byte, scale * block.offset_per_scale)
    return blocks


@cache
def unit_spread(type_name: str) -> float:
    """Standard deviation of the weights of random blocks whose scale is 1."""
    blocks = _random_blocks(np.random.default_rng(0), type_name, _SPREAD_BLOCKS, 1.0)
    weights = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[type_name])
    return float(np.std(weights))


class RandomTensor:
    """Random weights of a given standard deviation, made slice by slice while they are written.

    Has what GGUFWriter.write_tensor_data asks of an array: `nbytes` and `tofile`. Norms are ones.
    """

    def __init__(
        self, name: str, dims: tuple[int, ...], type_name: str, rng: np.random.Generator
    ) -> None:
        """Raises UsageError where the rows are not whole blocks."""
        self.name = name
        self.dims = dims  # as in `tensors`
        self.type_name = type_name
        self._rng = rng
        per_block, self._block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_name]]
        if dims[-1] % per_block:
            raise UsageError(
                f"{name} would have rows of {dims[-1]} weights, and {type_name} needs a multiple "
                f"of {per_block}: choose another shape or --type"
            )
        self._n_blocks = math.prod(dims) // per_block
        self.nbytes = self._n_blocks * self._block_bytes

    def tofile(self, stream: IO[bytes]) -> None:
        """Write the tensor's bytes to a binary stream."""
        step = max(1, SLICE_BYTES // self._block_bytes)
        for start in range(0, self._n_blocks, step):
            self._slice(min(step, self._n_blocks - start)).tofile(stream)

    def _slice(self, count: int) -> NDArray[Any]:
        if len(self.dims) == 1:
            return np.ones(count, dtype=np.float32)
        spread = 1.0 / math.sqrt(self.dims[-1])  # keeps activations at their size
        if self.type_name in BLOCK_TYPES:
            scale = spread / unit_spread(self.type_name)
            return _random_blocks(self._rng, self.type_name, count, scale)
        # random sign and mantissa under one exponent: fast, and never infinite or denormal
        exponent = round(math.log2(spread / 1.53))
        if self.type_name == "F16":
            half = _random_bytes(self._rng, 2 * count).view(np.uint16)
            values: NDArray[Any] = (half & 0x83FF) | np.uint16((exponent + 15) << 10)
            return values
        single = _random_bytes(self._rng, 4 * count).view(np.uint32)
        values = (single & 0x807F_FFFF) | np.uint32((exponent + 127) << 23)
        return values


def write_shape(shape: Shape, file_type: str, target: Path, *, name: str, seed: int = 0) -> None:
    """Write the file whole or not at all. `name` is what it calls itself.

    Raises UsageError for a shape that cannot be, or not in this type; OSError where the file cannot
    be written.
    """
    shape.check()
    rng = np.random.Generator(np.random.SFC64(seed))
    made = [
        RandomTensor(tensor, dims, tensor_type(tensor, shape, file_type), rng)
        for tensor, dims in tensors(shape)
    ]
    needed_bytes = sum(tensor.nbytes for tensor in made)
    free_bytes = shutil.disk_usage(target.parent).free
    if free_bytes < needed_bytes:
        raise UsageError(
            f"{target} takes {storage.megabytes(needed_bytes)} and {storage.megabytes(free_bytes)} "
            "are free: make room, or choose another folder"
        )
    with storage.atomic_path(target) as temporary:
        writer = gguf.GGUFWriter(temporary, shape.architecture)
        try:
            _add_metadata(writer, shape, file_type, name)
            for tensor in made:
                kind = gguf.GGMLQuantizationType[tensor.type_name]
                # the writer takes `dims` as they are where the dtype is not u8
                writer.add_tensor_info(
                    tensor.name, tensor.dims, np.dtype(np.float32), tensor.nbytes, raw_dtype=kind
                )
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for tensor in made:
                writer.write_tensor_data(tensor)  # type: ignore[arg-type]  # enough of an array
        finally:
            writer.close()


def _add_metadata(writer: gguf.GGUFWriter, shape: Shape, file_type: str, name: str) -> None:
    writer.add_name(f"{name} {file_type} (random weights, for timing)")
    writer.add_description("Random weights, for timing only: what this model writes is noise.")
    writer.add_file_type(getattr(gguf.LlamaFileType, f"MOSTLY_{file_type}"))
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_block_count(shape.layers)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.width)
    writer.add_feed_forward_length(shape.ffn * max(1, shape.experts_used))
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_width)
    writer.add_value_length(shape.head_width)
    writer.add_rope_dimension_count(shape.head_width)
    writer.add_rope_freq_base(ROPE_BASE)
    writer.add_layer_norm_rms_eps(RMS_EPSILON)
    writer.add_vocab_size(shape.vocabulary)
    if shape.experts:
        writer.add_expert_count(shape.experts)
        writer.add_expert_used_count(shape.experts_used)
        writer.add_expert_feed_forward_length(shape.ffn)
    # Any text can be tokenized (as bytes), so commands that need a prompt work as well.
    types, plain = gguf.TokenType, shape.vocabulary - _FIXED_TOKENS
    writer.add_tokenizer_model("llama")
    writer.add_token_list(
        ["<unk>", "<s>", "</s>"]
        + [f"<0x{byte:02X}>" for byte in range(256)]
        + [f"<token {i}>" for i in range(plain)]
    )
    writer.add_token_scores([0.0] * shape.vocabulary)
    writer.add_token_types(
        [types.UNKNOWN, types.CONTROL, types.CONTROL] + [types.BYTE] * 256 + [types.NORMAL] * plain
    )
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", choices=SHAPES, help="the other options change parts of it")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE")
    parser.add_argument("--type", choices=FILE_TYPES, default="Q4_0", help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    for field in fields(Shape):
        option = f"--{field.name.replace('_', '-')}"
        if field.name == "tied":
            parser.add_argument(
                option,
                action=argparse.BooleanOptionalAction,
                default=None,
                help="whether the head is the token embedding",
            )
        else:
            parser.add_argument(option, type=int, metavar="N")
    return parser


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    named = SHAPES[options.shape]
    changes = {
        field.name: value
        for field in fields(Shape)
        if (value := getattr(options, field.name)) is not None
    }
    shape = replace(named, **changes)
    name = options.shape if shape == named else f"{options.shape}, changed"
    try:
        if options.seed < 0:
            raise UsageError("--seed must not be negative")
        write_shape(shape, options.type, options.output, name=name, seed=options.seed)
    except KnapspecError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"error: cannot write {options.output}: {error.strerror}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("error: interrupted; nothing was kept", file=sys.stderr)
        return 130
    print(options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
