"""Rewriting a GGUF file in another type with llama.cpp's own quantizer.

The quantizer cannot be interrupted, reports failures on standard error and aborts the process on
some of them, so it runs in a process of its own: `python -m knapspec_edge.native.quantize`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from ..errors import LibraryError, NativeError

# llama_ftype of the types offered for conversion (llama.h).
FILE_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q4_K_M": 15, "BF16": 32}

_NO_LIBRARY = 3  # exit status of the child where the libraries cannot be loaded


def quantize_file(
    source: Path, target: Path, file_type: str, *, threads: int | None = None
) -> None:
    """Write `source` to `target` in a type of FILE_TYPES; an existing target is overwritten.

    A quantized source is dequantized first, so the result carries both rounding errors. `threads`
    None is the number of CPUs. Raises ValueError for an unknown type, LibraryError where the
    libraries are missing, NativeError with the quantizer's last word if it fails.
    """
    if file_type not in FILE_TYPES:
        raise ValueError(f"cannot convert to {file_type}: choose one of {', '.join(FILE_TYPES)}")
    # the child must find this very package, installed or not
    package_folder = str(Path(__file__).parents[2])
    paths = os.pathsep.join(filter(None, [package_folder, os.environ.get("PYTHONPATH")]))
    # fmt: off
    command = [
        sys.executable, "-m", __name__, os.fspath(source), os.fspath(target), file_type,
        str(threads or 0),
    ]
    # fmt: on
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": paths, "KNAPSPEC_EDGE_NATIVE_LOG": "error"},
        check=False,
    )
    lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
    if done.returncode == _NO_LIBRARY:
        raise LibraryError(lines[-1])
    if done.returncode != 0:
        reason = next((x for x in reversed(lines) if "fail" in x or "error" in x.lower()), None)
        raise NativeError(
            f"converting {source.name} to {file_type} failed: "
            f"{(reason or (lines or ['the quantizer stopped without a word'])[-1]).strip()}"
        )


def _main(source: str, target: str, file_type: str, threads: str) -> int:
    from .library import load

    try:
        llama_cpp = load()
    except LibraryError as error:
        print(error, file=sys.stderr)
        return _NO_LIBRARY
    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype = FILE_TYPES[file_type]
    parameters.nthread = int(threads) or os.cpu_count() or 1
    parameters.allow_requantize = True
    status: int = llama_cpp.llama_model_quantize(
        os.fsencode(source), os.fsencode(target), parameters
    )
    return 1 if status else 0


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
