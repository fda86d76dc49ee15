"""Conversions of fetched models to other types, kept in the user's cache.

Tests and benchmarks compare the same model in several types; none of these files is downloaded.
"""

from __future__ import annotations

import hashlib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from .errors import Interrupted, UsageError
from .gguf_check import inspect
from .models import Model, find, obtain, storage

CONVERSIONS = ("F32", "F16", "Q8_0", "Q4_0", "Q4_K_M")

# Bytes per weight, rounded up, for the check of the disk space only.
_BYTES_PER_WEIGHT = {"F32": 4.1, "F16": 2.1, "Q8_0": 1.2, "Q4_0": 0.8, "Q4_K_M": 0.9}


def converted_path(model: Model, file_type: str) -> Path:
    """Where a conversion is kept. The name holds a key of the source and of the quantizer."""
    try:
        quantizer = version("llama-cpp-python")  # pins the llama.cpp whose quantizer is used
    except PackageNotFoundError:
        quantizer = "unknown"
    key = hashlib.sha256(f"{model.sha256} {quantizer}".encode()).hexdigest()[:8]
    return storage.converted_folder() / f"{model.name}-{file_type}-{key}.gguf"


def converted(name: str, file_type: str) -> Path:
    """The model of the manifest in another type of CONVERSIONS; made on first use.

    The model is fetched if need be. Types below 32 bits are made from the F32 conversion, so all of
    them hold the same weights but for their own rounding. Raises UsageError for an unknown type,
    what `models.obtain` raises, NativeError if the quantizer fails, DownloadError if the cache
    cannot be written, and Interrupted on Ctrl-C; never leaves half a file under the final name.
    """
    wanted = file_type.upper()
    if wanted not in CONVERSIONS:
        raise UsageError(
            f"cannot convert to {ascii(file_type)}: choose one of {', '.join(CONVERSIONS)}"
        )
    model = find(name)
    target = converted_path(model, wanted)
    if target.is_file():
        return target
    source = obtain(model.name) if wanted == "F32" else converted(model.name, "F32")
    storage.make_folder(target.parent)
    try:
        with storage.locked(target):
            if target.is_file():  # made by whoever held the lock
                return target
            storage.remove_leftovers(target)
            needed_bytes = int(inspect(source).n_params * _BYTES_PER_WEIGHT[wanted])
            storage.require_space(target.parent, needed_bytes, target.name)
            with storage.atomic_path(target) as temporary:
                from .native.quantize import quantize_file

                quantize_file(source, temporary, wanted)
    except KeyboardInterrupt:
        raise Interrupted(f"converting {model.name} was interrupted; nothing was kept") from None
    except OSError as error:
        raise storage.storage_error(error, target.parent) from None
    return target
