"""A pre-flight of a GGUF file: says in one line what is wrong before native code touches the file.

Reads the header only. The vocabulary is stepped over, never materialised, and no tensor data is
read except the blocks that `fingerprint` samples. It does not decide whether an architecture is
supported: that is the library's word.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import stat
import struct
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NoReturn

from .errors import ModelError
from .folders import expanded

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

GGUF_VERSION_MAX = 3
LAYERS_MAX = 512  # LLAMA_MAX_LAYERS

# ggml type id -> (name, weights per block, bytes per block), as in ggml.h of the pinned llama.cpp.
# Not taken from the gguf package: that lags behind the pin and costs 60 ms to import.
GGML_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 36),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
    42: ("Q2_0", 64, 18),
}

# llama_ftype -> the name people know the file by.
FILE_TYPES: dict[int, str] = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K",
    11: "Q3_K_S", 12: "Q3_K_M", 13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S",
    17: "Q5_K_M", 18: "Q6_K", 19: "IQ2_XXS", 20: "IQ2_XS", 21: "Q2_K_S", 22: "IQ3_XS",
    23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL", 26: "IQ3_S", 27: "IQ3_M", 28: "IQ2_S", 29: "IQ2_M",
    30: "IQ4_XS", 31: "IQ1_M", 32: "BF16", 36: "TQ1_0", 37: "TQ2_0", 38: "MXFP4_MOE", 39: "NVFP4",
    40: "Q1_0", 41: "Q2_0",
}  # fmt: skip

# First four bytes of the formats before GGUF (llama.cpp's magics, little-endian in files).
_OLD_FORMATS = {
    b"lmgg": "ggml",
    b"fmgg": "ggmf",
    b"tjgg": "ggjt",
    b"algg": "ggla (an old LoRA adapter)",
}
_SESSION_MAGICS = (b"nsgg", b"qsgg")

# GGUF value types: id -> struct code of the scalars; strings and arrays apart.
_SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9

_SPLIT_NAME = re.compile(r"^(?P<prefix>.*)-(?P<no>\d{5})-of-(?P<count>\d{5})\.gguf$", re.DOTALL)
_KEY_BYTES_MAX = 1 << 16
_CHUNK_BYTES = 1 << 20  # of the vocabulary held in memory at once

FINGERPRINT_BLOCKS = 256  # spread evenly over a file: reaches every sublayer of ordinary shapes
FINGERPRINT_BLOCK_BYTES = 4096


@dataclass(frozen=True)
class GgufInfo:
    """What the header of a GGUF file says. For split files: of the whole set."""

    path: Path  # the file to load: for split files, the first one
    version: int
    architecture: str
    name: str | None
    n_layers: int
    context_length: int  # tokens the model was trained for; 0 where the file does not say
    embedding_length: int
    n_vocab: int
    n_experts: int
    file_type: str  # "Q4_K_M"; the type holding most bytes where the file does not say
    n_tensors: int
    n_params: int
    tied_embeddings: bool  # no output tensor: the head is the token embedding
    has_chat_template: bool
    data_offset: int  # bytes; of the first file
    size_bytes: int  # of all files
    paths: tuple[Path, ...]  # all files, in order
    # the scalar values, as text
    metadata: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)

    @property
    def n_splits(self) -> int:
        return len(self.paths)


@dataclass(frozen=True)
class Tensor:
    """Where the weights of a tensor lie."""

    path: Path  # of a split model, the part that holds it
    shape: tuple[int, ...]  # as in the file: the length of a row first
    kind: int  # enum ggml_type
    type_name: str  # "Q4_K"; "type N" where it is unknown
    offset_bytes: int  # from the beginning of the file
    n_bytes: int


@dataclass
class _Header:
    """One file's header, as far as anybody here needs it."""

    version: int = 0
    values: dict[str, int | float | bool | str] = field(default_factory=dict)
    lengths: dict[str, int] = field(default_factory=dict)  # of the arrays, which are not read
    tensors: dict[str, Tensor] = field(default_factory=dict)  # offsets count from data_offset
    type_bytes: dict[str, int] = field(default_factory=dict)  # bytes per tensor type
    n_tensors: int = 0
    n_params: int = 0
    data_offset: int = 0
    size_bytes: int = 0

    def text(self, key: str) -> str | None:
        value = self.values.get(key)
        return value if isinstance(value, str) else None

    def number(self, key: str) -> int:
        value = self.values.get(key)
        return value if isinstance(value, int) else 0


class _PastEnd(Exception):
    """The header asks for more bytes than the file has."""


class _Damaged(Exception):
    """The header contradicts itself; the text says how."""


class _Reader:
    """Sequential reads with the position and the end of the file at hand."""

    def __init__(self, stream: BinaryIO, size_bytes: int, order: str) -> None:
        self.stream = stream
        self.size_bytes = size_bytes
        self.order = order
        self.position = stream.tell()
        self._structs = {c: struct.Struct(order + c) for c in "BbHhIif?Qqd"}

    @property
    def left(self) -> int:
        return self.size_bytes - self.position

    def take(self, n_bytes: int) -> bytes:
        if n_bytes > self.left:
            raise _PastEnd
        data = self.stream.read(n_bytes)
        self.position += n_bytes
        if len(data) != n_bytes:  # it shrank while we read
            raise _PastEnd
        return data

    def skip(self, n_bytes: int) -> None:
        if n_bytes > self.left:
            raise _PastEnd
        self.position += n_bytes
        self.stream.seek(self.position)

    def number(self, code: str) -> int | float | bool:
        s = self._structs[code]
        value: int | float | bool = s.unpack(self.take(s.size))[0]
        return value

    def integer(self, code: str) -> int:
        return int(self.number(code))

    def string(self, n_bytes_max: int | None = None) -> str:
        n_bytes = self.integer("Q")
        if n_bytes > self.left:
            raise _PastEnd
        if n_bytes_max is not None and n_bytes > n_bytes_max:
            raise _Damaged(f"a name of {n_bytes} bytes")
        return self.take(n_bytes).decode("utf-8", "replace")

    def skip_strings(self, n_strings: int) -> None:
        """Step over strings: each a 64-bit length, then that many bytes."""
        if n_strings * 8 > self.left:
            raise _PastEnd
        while n_strings:
            start = self.position
            chunk = self.take(min(_CHUNK_BYTES, self.left))
            n_bytes, n_done = walk_strings(chunk, n_strings, self.order)
            self.position = start
            self.stream.seek(start)
            if n_done:
                self.skip(n_bytes)
                n_strings -= n_done
            else:  # one string longer than a chunk
                self.skip(self.integer("Q"))
                n_strings -= 1


def walk_strings(chunk: bytes, n_strings: int, order: str = "<") -> tuple[int, int]:
    """Step over up to n_strings whole length-prefixed strings at the start of `chunk`.

    Returns (bytes stepped over, strings stepped over).

    One step per string costs 60 ms for a vocabulary of 262,000, so steps are taken many at a time:
    wherever seven zero bytes follow a byte, a string of up to 255 bytes *may* begin, and a run of
    such places each of which ends exactly where the next begins *is* the chain of lengths. What
    does not fit that (long strings, strings with zero bytes) is stepped over singly.
    """
    if order != "<" or n_strings < 1024:
        return _walk_singly(chunk, 0, 0, n_strings, order)

    import numpy as np

    data: NDArray[np.uint8] = np.frombuffer(chunk, dtype=np.uint8)
    if data.size < 16:
        return _walk_singly(chunk, 0, 0, n_strings, order)
    zero2 = (data[:-1] | data[1:]) == 0  # bool [n-1]: this byte and the next are zero
    zero4 = zero2[:-2] & zero2[2:]
    zero7 = zero4[:-3] & zero4[3:]  # bool [n-6]
    starts = np.flatnonzero(zero7[1:])  # i64: places followed by seven zero bytes
    ends = starts + 8 + data[starts]
    # the last one never counts as joined, so every run ends at one of these
    breaks = np.append(np.flatnonzero(starts[1:] != ends[:-1]), max(0, starts.size - 1))

    position = done = 0
    while done < n_strings:
        at = int(np.searchsorted(starts, position))
        if at < starts.size and starts[at] == position:
            run = int(breaks[np.searchsorted(breaks, at)]) - at  # strings joined to their successor
            run = min(run, n_strings - done)
            position = int(starts[at + run])
            done += run
        before = done
        position, done = _walk_singly(chunk, position, done, min(n_strings, done + 64), order)
        if done == before:
            break
    return position, done


def _walk_singly(
    chunk: bytes, position: int, done: int, n_strings: int, order: str
) -> tuple[int, int]:
    length_at = struct.Struct(order + "Q").unpack_from
    end = len(chunk)
    while done < n_strings and position + 8 <= end:
        after = position + 8 + length_at(chunk, position)[0]
        if after > end:
            break
        position = after
        done += 1
    return position, done


def inspect(path: str | os.PathLike[str]) -> GgufInfo:
    """Read the header of a model file, of every part if it is split.

    Raises ModelError, with one line that says what to do, for anything that cannot be loaded as a
    model: see the functions below.
    """
    given = expanded(path)
    first = _read_header(given)
    _refuse_other_contents(given, first)
    paths = _split_paths(given, first)
    headers = [first]
    for number, part in enumerate(paths[1:], start=1):
        header = _read_header(part)
        count = first.number("split.count")
        if header.number("split.no") != number or header.number("split.count") != count:
            raise ModelError(
                f"{show(part)} is not part {number + 1} of {count} of this model: "
                "the parts come from different sets; download them again"
            )
        headers.append(header)

    architecture = first.text("general.architecture")
    n_tensors = sum(h.n_tensors for h in headers)
    if architecture is None:
        raise ModelError(f"{show(given)} names no architecture: it is not a language model")
    if n_tensors == 0:
        what = "it holds a vocabulary only" if _has_vocabulary(first) else "it holds metadata only"
        raise ModelError(f"no weights in this file: {show(given)} ({what}); use the full model")
    expected = first.number("split.tensors.count")
    if len(paths) > 1 and expected and expected != n_tensors:
        raise ModelError(
            f"{show(given)} and its parts hold {n_tensors} tensors where {expected} are expected: "
            "the parts come from different sets; download them again"
        )

    n_layers = first.values.get(f"{architecture}.block_count")
    if n_layers is not None and not (isinstance(n_layers, int) and 0 < n_layers <= LAYERS_MAX):
        # llama.cpp ends the process over it
        raise ModelError(
            f"{show(given)} is damaged or too large: {n_layers} layers where llama.cpp takes "
            f"1 to {LAYERS_MAX}; download it again"
        )

    names: set[str] = set()
    for header in headers:
        names |= header.tensors.keys()
    return GgufInfo(
        path=given,
        version=first.version,
        architecture=architecture,
        name=first.text("general.name"),
        n_layers=first.number(f"{architecture}.block_count"),
        context_length=first.number(f"{architecture}.context_length"),
        embedding_length=first.number(f"{architecture}.embedding_length"),
        n_vocab=first.lengths.get("tokenizer.ggml.tokens", 0)
        or first.number(f"{architecture}.vocab_size"),
        n_experts=first.number(f"{architecture}.expert_count"),
        file_type=_file_type(headers),
        n_tensors=n_tensors,
        n_params=sum(h.n_params for h in headers),
        tied_embeddings="token_embd.weight" in names and "output.weight" not in names,
        has_chat_template="tokenizer.chat_template" in first.values,
        data_offset=first.data_offset,
        size_bytes=sum(h.size_bytes for h in headers),
        paths=tuple(paths),
        metadata={key: _as_text(value) for key, value in first.values.items()},
    )


def _as_text(value: int | float | bool | str) -> str:
    """As llama.cpp writes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def find_tensor(info: GgufInfo, name: str) -> Tensor | None:
    """Where a tensor of a model lies, or None. Raises ModelError as `inspect` does."""
    for path in info.paths:
        header = _read_header(path)
        tensor = header.tensors.get(name)
        if tensor is not None:
            return replace(tensor, offset_bytes=header.data_offset + tensor.offset_bytes)
    return None


def fingerprint(model: str | os.PathLike[str] | GgufInfo) -> str:
    """A short identity of a model's contents, for cache keys: 32 hexadecimal digits.

    Covers size, header and FINGERPRINT_BLOCKS blocks spread over each file, not every byte; copies
    and renamed files agree. Raises ModelError as `inspect` does.
    """
    info = model if isinstance(model, GgufInfo) else inspect(model)
    digest = hashlib.blake2b(b"knapspec-edge fingerprint 1", digest_size=16)
    for path in info.paths:
        try:
            with open(path, "rb") as stream:
                size_bytes = os.fstat(stream.fileno()).st_size
                header_bytes = min(info.data_offset if path == info.paths[0] else 0, size_bytes)
                digest.update(struct.pack("<QQ", size_bytes, header_bytes))
                left = header_bytes
                while left and (chunk := stream.read(min(left, _CHUNK_BYTES))):
                    digest.update(chunk)
                    left -= len(chunk)
                span = max(0, size_bytes - header_bytes - FINGERPRINT_BLOCK_BYTES)
                for i in range(FINGERPRINT_BLOCKS):
                    stream.seek(header_bytes + span * i // (FINGERPRINT_BLOCKS - 1))
                    digest.update(stream.read(FINGERPRINT_BLOCK_BYTES))
        except OSError as error:
            _raise_os_error(path, error)
    return digest.hexdigest()


def show(path: str | os.PathLike[str]) -> str:
    """A path for a one-line message: quoted if it holds anything but printable characters."""
    text = os.fspath(path)
    return text if text and text.isprintable() else ascii(text)


def _read_header(path: Path) -> _Header:
    """Raises ModelError for files that are absent, unreadable, not GGUF, damaged or cut short."""
    try:
        status = os.stat(path)
        if stat.S_ISDIR(status.st_mode):
            _refuse_directory(path)
        if not stat.S_ISREG(status.st_mode):
            raise ModelError(f"{show(path)} is not a regular file; give the path of a .gguf file")
        if status.st_size == 0:
            raise ModelError(f"{show(path)} is empty (0 bytes); download it again")
        with open(path, "rb") as stream:
            order = _check_magic(path, stream, status.st_size)
            return _parse(path, stream, status.st_size, order)
    except OSError as error:
        _raise_os_error(path, error)
    except ValueError as error:  # a zero byte in the path
        raise ModelError(f"{show(path)} is not a valid path ({error})") from None


def _raise_os_error(path: Path, error: OSError) -> NoReturn:
    if isinstance(error, FileNotFoundError):
        if os.path.islink(path):
            raise ModelError(
                f"{show(path)} is a link to a file that does not exist: {show(os.readlink(path))}"
            ) from None
        raise ModelError(f"model file not found: {show(path)}{_nearby(path)}") from None
    if isinstance(error, PermissionError):
        raise ModelError(
            f"no permission to read {show(path)}; check the file and its folders"
        ) from None
    if isinstance(error, NotADirectoryError):
        raise ModelError(
            f"model file not found: {show(path)} (a part of this path is a file, not a folder)"
        ) from None
    if error.errno == errno.ENAMETOOLONG:
        raise ModelError("model file not found: the path is too long to be one") from None
    raise ModelError(f"cannot read {show(path)}: {error.strerror or error}") from None


def _nearby(path: Path) -> str:
    """A hint at the file that was probably meant."""
    try:
        if not path.parent.is_dir():
            return f" (there is no folder {show(path.parent)})"
        names = sorted(p.name for p in path.parent.glob("*.gguf"))
    except (OSError, ValueError):
        return ""
    close = get_close_matches(path.name, names, n=1, cutoff=0.6)
    return f"; did you mean {show(path.parent / close[0])}?" if close else ""


def _refuse_directory(path: Path) -> NoReturn:
    names = sorted(p.name for p in path.glob("*.gguf"))
    if names:
        hint = f"give a file in it, such as {show(path / names[0])}"
    elif (path / "config.json").exists():
        hint = "it looks like a Hugging Face checkpoint: convert it to GGUF first"
    else:
        hint = "it holds no .gguf file"
    raise ModelError(f"{show(path)} is a directory: {hint}")


def _check_magic(path: Path, stream: BinaryIO, size_bytes: int) -> str:
    """Leaves the stream after the version. Returns the byte order as a struct prefix."""
    start = stream.read(512)
    magic = start[:4]
    if magic != b"GGUF":
        raise ModelError(f"{show(path)} {_what_else(start, size_bytes)}")
    if len(start) < 8:
        raise ModelError(f"{show(path)} is incomplete: only {size_bytes} bytes; download it again")
    version = struct.unpack_from("<I", start, 4)[0]
    order = "<"
    if version and version & 0xFFFF == 0:
        order, version = ">", struct.unpack_from(">I", start, 4)[0]
    here = "<" if sys.byteorder == "little" else ">"
    if order != here:
        words = {"<": "little", ">": "big"}
        raise ModelError(
            f"{show(path)} is a {words[order]}-endian file and this machine is {words[here]}-endian"
            f" (byte order differs): get the {words[here]}-endian file or run"
            f" `gguf-convert-endian FILE {words[here]}` on a copy"
        )
    if version == 0:
        raise ModelError(f"{show(path)} is damaged (GGUF version 0); download it again")
    if version == 1:
        raise ModelError(
            f"{show(path)} is GGUF version 1, which llama.cpp no longer reads: "
            "get a newer file of the model or convert it again"
        )
    if version > GGUF_VERSION_MAX:
        raise ModelError(
            f"{show(path)} is GGUF version {version}, newer than this program reads "
            f"({GGUF_VERSION_MAX}): update knapspec-edge"
        )
    stream.seek(8)
    return order


def _what_else(start: bytes, size_bytes: int) -> str:
    """What a file without GGUF's magic is; starts in mid-sentence, after the path."""
    seen = f"first bytes: {_quote(start)}"
    text = start.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if start[:4] in _OLD_FORMATS:
        return (
            f"is in the old {_OLD_FORMATS[start[:4]]} format from before GGUF: "
            "convert it to GGUF with a llama.cpp of that time, or get a GGUF file of the model"
        )
    if start[:4] in _SESSION_MAGICS:
        return "is a saved llama.cpp session, not a model"
    if text.startswith((b"<!doctype", b"<html", b"<head", b"<?xml", b"<body", b"<!--")):
        return (
            f"is not a GGUF file but a web page ({seen}): the download probably failed; "
            "download the file itself again, not the page about it"
        )
    if text.startswith(b"version https://git-lfs"):
        size = re.search(rb"size (\d+)", start)
        of = f" of a file of {int(size[1]):,} bytes" if size else ""
        return f"is a Git LFS pointer{of}, not the file itself: run `git lfs pull` or download it"
    if b"annex/objects/" in text[:64] or b"annex/objects/" in start[:300]:
        return "is a git-annex pointer, not the file itself: run `git annex get` on it"
    if start[:2] == b"PK":
        return f"is not a GGUF file but a zip archive or PyTorch checkpoint ({seen}): {_CONVERT}"
    if start[8:10] == b'{"' or start[8:9] == b"{":
        return f"is not a GGUF file but a safetensors checkpoint ({seen}): {_CONVERT}"
    if start[:2] == b"\x1f\x8b" or start[:4] in (b"\x28\xb5\x2f\xfd", b"\xfd7zX", b"7z\xbc\xaf"):
        return f"is not a GGUF file but a compressed one ({seen}): unpack it first"
    if not start.strip(b"\0"):
        return (
            f"is not a GGUF file: it starts with {len(start)} zero bytes, as an unfinished "
            "download does; download it again"
        )
    if size_bytes < 1 << 20 and _is_text(start):
        return f"is not a GGUF file but text ({seen}): the download probably failed; try it again"
    return f"is not a GGUF file ({seen}): give a .gguf file; if this one was downloaded, try again"


_CONVERT = "convert it to GGUF first"


def _is_text(data: bytes) -> bool:
    try:
        return all(c.isprintable() or c.isspace() for c in data.decode("utf-8"))
    except UnicodeDecodeError:
        return False


def _quote(data: bytes, n_bytes: int = 32) -> str:
    """The first bytes, printable; other bytes as escapes."""
    return repr(data[:n_bytes])[1:]


def _parse(path: Path, stream: BinaryIO, size_bytes: int, order: str) -> _Header:
    """Key-value pairs and tensor list, then the bounds of the tensor data (gguf.cpp's rules)."""
    reader = _Reader(stream, size_bytes, order)
    reader.position = 8
    stream.seek(4)
    header = _Header(size_bytes=size_bytes)
    header.version = struct.unpack(order + "I", stream.read(4))[0]
    try:
        n_tensors, n_pairs = reader.integer("q"), reader.integer("q")
        # a pair takes 13 bytes at least, a tensor 32: an absurd count is found before the loop
        if n_tensors < 0 or n_pairs < 0:
            raise _Damaged(f"{n_tensors} tensors, {n_pairs} metadata entries")
        if n_pairs * 13 + n_tensors * 32 > reader.left:
            raise _PastEnd
        for _ in range(n_pairs):
            _read_pair(reader, header)
        end_bytes = _read_tensors(reader, header, n_tensors, path)
    except _PastEnd:
        raise ModelError(
            f"{show(path)} is incomplete or damaged: its header runs past the end of the file "
            f"({size_bytes:,} bytes); download it again"
        ) from None
    except _Damaged as damage:
        raise ModelError(f"{show(path)} is damaged ({damage}); download it again") from None
    if n_tensors and end_bytes > size_bytes:
        raise ModelError(
            f"{show(path)} is incomplete: {size_bytes:,} of {end_bytes:,} bytes; download it again"
        )
    return header


def _read_pair(reader: _Reader, header: _Header) -> None:
    key = reader.string(_KEY_BYTES_MAX)
    if not key:
        raise _Damaged("a metadata entry without a name")
    if key in header.values or key in header.lengths:
        raise _Damaged(f"metadata entry {ascii(key)} twice")
    kind = reader.integer("I")
    if kind in _SCALARS:
        header.values[key] = reader.number(_SCALARS[kind])
    elif kind == _STRING:
        header.values[key] = reader.string()
    elif kind == _ARRAY:
        kind, n_items = reader.integer("I"), reader.integer("Q")
        header.lengths[key] = n_items
        if kind == _STRING:
            reader.skip_strings(n_items)
        elif kind in _SCALARS:
            reader.skip(n_items * struct.calcsize("<" + _SCALARS[kind]))
        else:
            raise _Damaged(f"metadata entry {ascii(key)} is an array of unknown type {kind}")
    else:
        raise _Damaged(f"metadata entry {ascii(key)} is of unknown type {kind}")


def _read_tensors(reader: _Reader, header: _Header, n_tensors: int, path: Path) -> int:
    """Returns the size in bytes that the file must have at least."""
    alignment = header.values.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
        raise _Damaged(f"alignment {alignment}")
    header.n_tensors = n_tensors
    end = last_byte = 0
    sizes_known = True
    for _ in range(n_tensors):
        name = reader.string(_KEY_BYTES_MAX)
        n_dims = reader.integer("I")
        if n_dims > 4:
            raise _Damaged(f"tensor {ascii(name)} has {n_dims} dimensions")
        shape = [reader.integer("q") for _ in range(n_dims)]
        kind, offset = reader.integer("I"), reader.integer("Q")
        if name in header.tensors:
            raise _Damaged(f"tensor {ascii(name)} twice")
        if any(n < 0 for n in shape):
            raise _Damaged(f"tensor {ascii(name)} has shape {shape}")
        n_weights = 1
        for n in shape:
            n_weights *= n
        header.n_params += n_weights
        # Tensors lie one after the other, so an unknown type (the library will refuse it) costs
        # only the check of the tensor after it.
        if sizes_known and offset != end:
            raise _Damaged(f"tensor {ascii(name)} is not where it should be")
        type_name, block, block_bytes = GGML_TYPES.get(kind, (f"type {kind}", 1, 0))
        sizes_known = kind in GGML_TYPES
        row = shape[0] if shape else 1
        if row % block:
            raise _Damaged(f"tensor {ascii(name)}: rows of {row} do not fit {type_name} blocks")
        n_bytes = n_weights // block * block_bytes
        header.tensors[name] = Tensor(path, tuple(shape), kind, type_name, offset, n_bytes)
        header.type_bytes[type_name] = header.type_bytes.get(type_name, 0) + n_bytes
        end = _padded(offset + n_bytes, alignment)
        last_byte = offset + n_bytes
    header.data_offset = _padded(reader.position, alignment)
    return header.data_offset + last_byte if n_tensors else reader.position


def _padded(n_bytes: int, alignment: int) -> int:
    return (n_bytes + alignment - 1) // alignment * alignment


def _refuse_other_contents(path: Path, header: _Header) -> None:
    """GGUF files that hold something else than a language model."""
    kind = header.text("general.type")
    architecture = header.text("general.architecture")
    if kind == "mmproj" or architecture in ("clip", "mmproj"):
        raise ModelError(
            f"{show(path)} is a multimodal projector (mmproj), not a language model: "
            "give the text model that it belongs to"
        )
    if kind == "adapter":
        what = header.text("adapter.type") or ""
        label = "LoRA adapter" if what == "lora" else f"{what} adapter".strip()
        raise ModelError(
            f"{show(path)} is a {label}, not a model: merge it into its base model"
            f"{f' ({architecture})' if architecture else ''} and give the merged file"
        )
    if kind == "imatrix" or architecture == "imatrix":
        raise ModelError(f"{show(path)} is an importance matrix for quantizing, not a model")
    if architecture == "controlvector" or kind == "controlvector":
        raise ModelError(f"{show(path)} is a control vector, not a model")


def _split_paths(path: Path, header: _Header) -> Sequence[Path]:
    """All files of a split model, checked to exist; just the given one where it is not split."""
    count, number = header.number("split.count"), header.number("split.no")
    if count <= 1:
        return [path]
    named = _SPLIT_NAME.match(path.name)
    fits = named and int(named["no"]) == number + 1 and int(named["count"]) == count
    if not named or not fits:
        raise ModelError(
            f"{show(path)} is part {number + 1} of {count} of a split model but has been renamed: "
            f"its name must end in -{number + 1:05d}-of-{count:05d}.gguf"
        )
    paths = [path.with_name(f"{named['prefix']}-{i:05d}-of-{count:05d}.gguf")
             for i in range(1, count + 1)]  # fmt: skip
    missing = [p for p in paths if not p.exists()]
    if number != 0:
        first = paths[0]
        lost = " (which is missing here: download it, too)" if first in missing else ""
        raise ModelError(
            f"{show(path)} is part {number + 1} of {count}; give the first part: "
            f"{show(first)}{lost}"
        )
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelError(
            f"a part of the model is missing: {show(missing[0])}{more}; "
            "download it into the same folder"
        )
    return paths


def _has_vocabulary(header: _Header) -> bool:
    return bool(header.lengths.get("tokenizer.ggml.tokens"))


def _file_type(headers: list[_Header]) -> str:
    declared = headers[0].values.get("general.file_type")
    if isinstance(declared, int) and declared in FILE_TYPES:
        return FILE_TYPES[declared]
    totals: dict[str, int] = {}
    for header in headers:
        for name, n_bytes in header.type_bytes.items():
            totals[name] = totals.get(name, 0) + n_bytes
    return max(totals, key=lambda name: totals[name])
