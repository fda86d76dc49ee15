"""Write a GGUF file in which chosen sublayers do next to nothing, so that the best plan is known.

    python scripts/plant_model.py --plant attention:3,5-9 mlp:4 --type Q8_0 -o planted.gguf
    python scripts/plant_model.py --insert 30 --type F16 -o deep.gguf
    python scripts/plant_model.py --model other.gguf --insert 8 --plant mlp:7 -o both.gguf

--plant scales what ends a sublayer (its output projection with the bias; where a norm follows that,
the norm) by --factor. --insert puts copies of layers, scaled in the same way, between the original
ones: the text stays that of the source, and a draft that leaves them out agrees with it. Tokenizer
and chat template are those of the source, so the file chats as it does.

Weights are brought to 32 bits, scaled, and quantized by llama.cpp's own quantizer. Beside FILE.gguf
lies FILE.planted.json, which names the planted sublayers by their place in execution order. Run it
with the project's Python; needs the patched library.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from knapspec_edge import gguf_check, models, native  # noqa: E402
from knapspec_edge.errors import (  # noqa: E402
    DownloadError,
    KnapspecError,
    ModelError,
    UsageError,
)
from knapspec_edge.models import storage  # noqa: E402
from knapspec_edge.quantize import CONVERSIONS  # noqa: E402
from knapspec_edge.records import Kind, SubLayer  # noqa: E402

FORMAT = "knapspec-edge planted model"
VERSION = 1
FACTOR = 1e-4
# Below this share of the norm that the scaled weights should have, their type could not hold them.
LOST_SHARE = 0.5

# Architectures whose layers are alike whatever their number is: no window or rotation that only
# some layers have, nothing that is computed from how many there are.
UNIFORM = ("gemma", "internlm2", "llama", "qwen2", "qwen3")

# What a sublayer ends with, behind blk.<layer>.; the experts' and the shared expert's too
_OUTPUTS = {
    Kind.ATTENTION: re.compile(r"attn_output\.(weight|bias)"),
    Kind.MLP: re.compile(r"ffn_down(_exps|_shexp|_chexps)?\.(weight|bias)"),
}
_NORMS = {Kind.ATTENTION: "post_attention_norm.weight", Kind.MLP: "post_ffw_norm.weight"}
_BLOCK = re.compile(r"blk\.(\d+)\.(.+)")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")

Item = tuple[int, Kind]  # layer of the source, kind


@dataclass(frozen=True)
class Layer:
    """A layer of the written file."""

    source: int  # the layer of the source that it is, or is a copy of
    inserted: bool = False


@dataclass(frozen=True)
class Planted:
    """One planted sublayer of the written file."""

    index: int  # in execution order
    layer: int
    kind: str
    source_layer: int
    inserted: bool


@dataclass(frozen=True)
class Record:
    """What the file beside a planted model says."""

    model: str  # file name
    source: str  # file name
    type: str
    factor: float
    n_layers: int
    n_sublayers: int
    inserted_layers: tuple[int, ...]
    planted: tuple[Planted, ...]

    @property
    def indices(self) -> tuple[int, ...]:
        """Planted sublayers in execution order: what the right plan leaves out."""
        return tuple(p.index for p in self.planted)


# ---------------------------------------------------------------------------------------------
# What is planted


def parse_items(texts: Sequence[str]) -> list[Item]:
    """Sublayers of "attention:3,5-9 mlp:4", without repetitions, in execution order.

    Raises UsageError for anything else.
    """
    found: set[Item] = set()
    for text in texts:
        kind, colon, numbers = text.partition(":")
        if kind not in [k.value for k in _OUTPUTS] or not colon:
            raise UsageError(f"--plant {ascii(text)}: write attention:LAYERS or mlp:LAYERS")
        for part in numbers.split(","):
            match = _RANGE.fullmatch(part)
            if match is None:
                raise UsageError(f"--plant {ascii(text)}: layers are numbers as in 3,5-9")
            first, last = int(match[1]), int(match[2] or match[1])
            if last < first or last > gguf_check.LAYERS_MAX:
                raise UsageError(f"--plant {ascii(text)}: there are no layers {part}")
            found.update((layer, Kind(kind)) for layer in range(first, last + 1))
    return sorted(found, key=lambda item: (item[0], item[1].value))


def layout(n_layers: int, n_inserted: int) -> list[Layer]:
    """The layers of the written file: copies stand evenly spread between the original ones, each
    behind the layer that it is a copy of. Raises UsageError where there is no place for them."""
    if n_inserted and n_layers < 2:
        raise UsageError(f"--insert needs a model of 2 layers or more, this one has {n_layers}")
    if n_layers + n_inserted > gguf_check.LAYERS_MAX:
        most = gguf_check.LAYERS_MAX - n_layers
        raise UsageError(f"--insert {n_inserted}: llama.cpp has room for {most} more layers")
    gaps = n_layers - 1
    copies = [0] * n_layers
    for i in range(n_inserted):
        copies[(2 * i + 1) * gaps // (2 * n_inserted)] += 1
    return [
        layer
        for number in range(n_layers)
        for layer in (Layer(number), *[Layer(number, True)] * copies[number])
    ]


def planted_sublayers(
    sublayers: Sequence[SubLayer], layers: Sequence[Layer], items: Iterable[Item]
) -> list[Planted]:
    """What is planted in a file of these layers. `sublayers` are those of the source.

    Raises UsageError for an item that the source does not have, or that cannot be planted.
    """
    chosen = set(items)
    known = {(s.layer, s.kind) for s in sublayers}
    for missing, kind in sorted(chosen - known, key=lambda item: item[0]):
        raise UsageError(
            f"--plant {kind.value}:{missing}: this model has no {kind.value} {missing}"
        )
    found, index = [], 0
    for number, layer in enumerate(layers):
        for s in sublayers:
            if s.layer != layer.source:
                continue
            if layer.inserted or (s.layer, s.kind) in chosen:
                if s.kind not in _OUTPUTS:
                    raise UsageError(f"a sublayer of kind {s.kind.value} cannot be planted")
                found.append(Planted(index, number, s.kind.value, layer.source, layer.inserted))
            index += 1
    return found


def ends(names: Iterable[str], item: Item) -> list[str]:
    """Tensors of the source that end a sublayer: scaled, they scale all that it adds.

    A norm behind the output projection would undo what is done to that, so its weight counts there.
    Raises UsageError where none are known.
    """
    layer, kind = item
    own = {match[2]: name for name in names if (match := _BLOCK.fullmatch(name))
           and int(match[1]) == layer}  # fmt: skip
    # some architectures call the norm in front of the MLP by one of these names
    if all(norm in own for norm in _NORMS.values()):
        return [own[_NORMS[kind]]]
    found = [name for part, name in own.items() if _OUTPUTS[kind].fullmatch(part)]
    if not any(name.endswith(".weight") for name in found):
        raise UsageError(f"the output projection of {kind.value} {layer} is not known")
    return found


# ---------------------------------------------------------------------------------------------
# The file


def _values(
    reader: gguf.GGUFReader, architecture: str, layers: Sequence[Layer], n_layers: int, name: str
) -> Iterator[tuple[str, Any, Any, Any]]:
    """(key, value, type, type of elements) of the written file's metadata."""
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == gguf.Keys.General.ARCHITECTURE:
            continue
        if field.name.startswith("split."):  # of a set of files; this is one
            continue
        value, kind = field.contents(), field.types[0]
        is_array = kind == gguf.GGUFValueType.ARRAY
        if is_array and not value:  # the gguf package does not write empty arrays
            continue
        element = field.types[-1] if is_array else None
        if field.name == f"{architecture}.block_count":
            value = len(layers)
        elif is_array and field.name.startswith(f"{architecture}.") and len(value) == n_layers:
            value = [value[layer.source] for layer in layers]
        elif field.name == gguf.Keys.General.NAME:
            value = name
        elif field.name == gguf.Keys.General.FILE_TYPE:
            value = int(gguf.LlamaFileType.ALL_F32)
        yield field.name, value, kind, element


def _float32(tensor: gguf.ReaderTensor) -> NDArray[Any]:
    """Weights f32 in the order rows, columns; whole numbers as they are.

    Raises UsageError for a type that the gguf package cannot read.
    """
    kind = tensor.tensor_type
    if kind.name in ("I8", "I16", "I32", "I64", "F64"):
        return np.asarray(tensor.data)
    try:
        weights = gguf.quants.dequantize(tensor.data, kind)
    except NotImplementedError:
        raise UsageError(f"{tensor.name} is of type {kind.name}, which is not read here") from None
    return np.ascontiguousarray(weights, dtype=np.float32)


def write_float32(
    reader: gguf.GGUFReader,
    target: Path,
    architecture: str,
    layers: Sequence[Layer],
    scaled: dict[tuple[bool, str], float],
    name: str,
) -> None:
    """Write the source with these layers in 32 bits.

    `scaled` gives a factor for (whether the layer is inserted, tensor of the source). Raises
    UsageError for tensors that cannot be read, OSError.
    """
    blocks: dict[int, list[tuple[str, gguf.ReaderTensor]]] = {}
    written: list[tuple[str, gguf.ReaderTensor, float]] = []
    for tensor in reader.tensors:
        match = _BLOCK.fullmatch(tensor.name)
        if match is None:
            written.append((tensor.name, tensor, 1.0))
        else:
            blocks.setdefault(int(match[1]), []).append((match[2], tensor))
    for number, layer in enumerate(layers):
        for part, tensor in blocks[layer.source]:
            factor = scaled.get((layer.inserted, tensor.name), 1.0)
            written.append((f"blk.{number}.{part}", tensor, factor))
    writer = gguf.GGUFWriter(target, architecture)
    try:
        n_layers = len(blocks)
        for key, value, kind, element in _values(reader, architecture, layers, n_layers, name):
            writer.add_key_value(key, value, kind, sub_type=element)
        for label, tensor, _ in written:
            shape = [int(n) for n in reversed(tensor.shape)]
            kept = _float32_type(tensor)
            dtype = np.dtype(np.float32) if kept is None else tensor.data.dtype
            writer.add_tensor_info(label, shape, dtype, math.prod(shape) * dtype.itemsize)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for _, tensor, factor in written:
            weights = _float32(tensor)
            if factor != 1.0:
                weights = weights * np.float32(factor)
            writer.write_tensor_data(weights)
    finally:
        writer.close()


def _float32_type(tensor: gguf.ReaderTensor) -> str | None:
    """The name of a type of whole numbers, which stays; None for weights."""
    name = str(tensor.tensor_type.name)
    return name if name in ("I8", "I16", "I32", "I64", "F64") else None


def plant(
    source: Path,
    target: Path,
    items: Sequence[Item],
    n_inserted: int,
    file_type: str,
    factor: float = FACTOR,
) -> tuple[Record, list[str]]:
    """Write the planted model and the record beside it, each whole or not at all.

    Returns the record, and the planted tensors that the type rounded to nothing. Raises UsageError
    for a request that cannot be met, ModelError for a file that cannot be read, NativeError if the
    quantizer fails, DownloadError without room on the disk, OSError.
    """
    if not items and not n_inserted:
        raise UsageError("nothing to plant: give --plant, --insert or both")
    if not 0.0 <= factor < 1.0:
        raise UsageError(f"--factor must be in 0..1 and below 1, not {factor:g}")
    if n_inserted < 0:
        raise UsageError(f"--insert must be at least 0, not {n_inserted}")
    info = gguf_check.inspect(source)
    if info.n_splits > 1:
        raise UsageError(f"{source.name} is split into {info.n_splits} files: merge them first")
    if target.exists() and source.exists() and os.path.samefile(source, target):
        raise UsageError(f"-o {target} is the source itself: choose another name")
    if n_inserted and info.architecture not in UNIFORM:
        raise UsageError(
            f"--insert: layers of architecture {info.architecture} may depend on their number; "
            f"only {', '.join(UNIFORM)} are known not to"
        )
    layers = layout(info.n_layers, n_inserted)
    sublayers = read_sublayers(info.path)
    planted = planted_sublayers(sublayers, layers, items)
    try:
        reader = gguf.GGUFReader(info.path)
    except (ValueError, OSError) as error:
        raise ModelError(f"{source.name} cannot be read: {error}") from None
    names = [tensor.name for tensor in reader.tensors]
    scaled = {
        (p.inserted, name): factor
        for p in planted
        for name in ends(names, (p.source_layer, Kind(p.kind)))
    }
    n_weights = info.n_params * len(layers) / info.n_layers
    times = 1 if file_type == "F32" else 2
    storage.require_space(target.parent, int(4.1 * n_weights * times), target.name)
    record = Record(
        target.name,
        source.name,
        file_type,
        factor,
        len(layers),
        sum(sum(s.layer == layer.source for s in sublayers) for layer in layers),
        tuple(i for i, layer in enumerate(layers) if layer.inserted),
        tuple(planted),
    )
    title = f"{info.name or source.stem} with {len(planted)} planted sublayers"
    with storage.atomic_path(target) as temporary:
        if file_type == "F32":
            write_float32(reader, temporary, info.architecture, layers, scaled, title)
        else:
            from knapspec_edge.native.quantize import quantize_file

            whole = temporary.with_suffix(".f32")
            try:
                write_float32(reader, whole, info.architecture, layers, scaled, title)
                quantize_file(whole, temporary, file_type)
            finally:
                with contextlib.suppress(OSError):
                    whole.unlink()
        lost = [] if factor == 0.0 else _lost(temporary, reader, record, names)
    write_record(record, target)
    return record, lost


def read_sublayers(path: Path) -> tuple[SubLayer, ...]:
    """What the library finds in a model. Raises UsageError where it finds nothing."""
    with (
        native.open_model(path, gpu_layers=0) as model,
        native.open_context(model, ctx_tokens=64, max_verify_tokens=1) as context,
    ):
        if not context.sublayers:
            raise UsageError(f"{path.name}: {context.refusal or 'no sublayers were found'}")
        return context.sublayers


def _lost(
    written: Path, source: gguf.GGUFReader, record: Record, names: Sequence[str]
) -> list[str]:
    """Planted tensors of which the written type kept little: so small a scale underflows in it."""
    before = {tensor.name: tensor for tensor in source.tensors}
    after = {tensor.name: tensor for tensor in gguf.GGUFReader(written).tensors}
    found = []
    for p in record.planted:
        for name in ends(names, (p.source_layer, Kind(p.kind))):
            label = f"blk.{p.layer}.{_BLOCK.fullmatch(name)[2]}"  # type: ignore[index]
            whole = float(np.linalg.norm(_float32(before[name]).astype(np.float64)))
            kept = float(np.linalg.norm(_float32(after[label]).astype(np.float64)))
            if kept < LOST_SHARE * record.factor * whole:
                found.append(label)
    return found


# ---------------------------------------------------------------------------------------------
# The record


def record_path(model: Path) -> Path:
    """Where the record of a planted model lies."""
    return model.with_name(f"{model.stem}.planted.json")


def write_record(record: Record, model: Path) -> None:
    data = {
        "format": FORMAT,
        "version": VERSION,
        "model": record.model,
        "source": record.source,
        "type": record.type,
        "factor": record.factor,
        "n_layers": record.n_layers,
        "n_sublayers": record.n_sublayers,
        "inserted_layers": list(record.inserted_layers),
        "planted": [vars(p) for p in record.planted],
    }
    with storage.atomic_path(record_path(model)) as temporary:
        temporary.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def read_record(model: Path) -> Record:
    """The record beside a planted model. Raises ModelError without one that can be read."""
    path = record_path(model)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["format"] != FORMAT or data["version"] != VERSION:
            raise ValueError("another format")
        return Record(
            str(data["model"]),
            str(data["source"]),
            str(data["type"]),
            float(data["factor"]),
            int(data["n_layers"]),
            int(data["n_sublayers"]),
            tuple(int(n) for n in data["inserted_layers"]),
            tuple(Planted(**entry) for entry in data["planted"]),
        )
    except OSError as error:
        raise ModelError(
            f"{model.name} has no record of what is planted in it ({path.name}: {error.strerror}); "
            "make it with scripts/plant_model.py"
        ) from None
    except (KeyError, TypeError, ValueError):
        raise ModelError(f"{path} is damaged: make the model again") from None


# ---------------------------------------------------------------------------------------------
# The program


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("-o", "--output", type=Path, required=True, metavar="FILE", help="ends in .gguf")
    add("--model", default="demo", help="a path, or a name of the manifest (default: demo)")
    add(
        "--plant",
        nargs="+",
        default=[],
        metavar="KIND:LAYERS",
        help="sublayers of the source to scale, such as attention:3,5-9 mlp:4",
    )
    add("--insert", type=int, default=0, metavar="N", help="layers to insert (default: none)")
    add("--type", choices=CONVERSIONS, default="F16", help="default: %(default)s")
    add(
        "--factor",
        type=float,
        default=FACTOR,
        help="of the planted weights; 0 leaves nothing of them (default: %(default)s)",
    )
    return parser


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    target: Path = options.output
    try:
        if target.suffix != ".gguf":
            raise UsageError(f"-o {target}: the name has to end in .gguf")
        if not target.parent.is_dir():
            raise UsageError(f"-o {target}: there is no folder {target.parent}")
        items = parse_items(options.plant)
        record, lost = plant(
            models.obtain(options.model),
            target,
            items,
            options.insert,
            options.type,
            options.factor,
        )
    except DownloadError as error:
        print(f"error: {str(error).split('; ')[0]}", file=sys.stderr)
        return error.exit_code
    except KnapspecError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"error: cannot write {target}: {error.strerror}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("error: interrupted; nothing was kept", file=sys.stderr)
        return 130
    if lost:
        print(
            f"warning: {options.type} holds little of {len(lost)} planted tensors (the first is "
            f"{lost[0]}), which then do nothing at all: a larger --factor keeps them",
            file=sys.stderr,
        )
    print(target)
    print(record_path(target))
    return 0


if __name__ == "__main__":
    sys.exit(main())
