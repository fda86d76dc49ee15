"""The inner loops of the search, compiled by Numba where that works and vectorised by NumPy where
it does not: the same results to the last bit, at different speed.

Importing this imports no Numba. The first use does, and compiles, or loads what an earlier process
compiled from the user's cache folder. No threading layer is involved (nothing runs in parallel), so
no second OpenMP runtime comes into the process beside llama.cpp's.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...folders import cache_root
from . import loops, vectorised

# Environment variable: 0 keeps Numba out.
SWITCH = "KNAPSPEC_EDGE_NUMBA"
# Options per item that the back-pointers of `fill` can tell apart.
MAX_OPTIONS = 127

# (function, signature): fill(savings, losses, limit, choice, rows) and
# backtrack(savings, choice, left, options)
_SIGNATURES = (
    (loops.fill, "int64(int64[:,::1], float64[:,::1], int64, int8[:,::1], float64[:,::1])"),
    (loops.backtrack, "void(uint32[:,::1], int8[:,::1], uint32[::1], int16[:,::1])"),
)


@dataclass(frozen=True)
class Implementation:
    """What the kernels run on, and why that is so in one line (empty where Numba works)."""

    name: str  # "numba" or "numpy"
    reason: str


@dataclass(frozen=True)
class Kernels:
    """The functions of one implementation; see `loops` for what they do."""

    implementation: Implementation
    fill: Callable[..., int]
    backtrack: Callable[..., None]


_lock = threading.Lock()
_loaded: Kernels | None = None


def backend() -> Implementation:
    """What the search runs on, found out by loading it: "numba", or "numpy" with the reason."""
    reason = disabled()
    if reason is not None:
        return interpreted(reason).implementation
    with _lock:
        return _load_once().implementation


def kernels(*, load: bool = True) -> Kernels:
    """The fastest kernels that can be had now. Any thread may call it, as often as it likes.

    The first call imports Numba and compiles, or loads from the cache folder. Without `load`, and
    while another thread is loading, it returns NumPy's: nobody waits in the middle of an answer.
    """
    reason = disabled()
    if reason is not None:
        return interpreted(reason)
    if _loaded is not None:
        return _loaded
    if not load or not _lock.acquire(blocking=False):
        return interpreted("numba is not loaded yet")
    try:
        return _load_once()
    finally:
        _lock.release()


def _load_once() -> Kernels:
    global _loaded
    if _loaded is None:
        _loaded = _load()
    return _loaded


def interpreted(reason: str) -> Kernels:
    """NumPy's kernels, for the given reason."""
    return Kernels(Implementation("numpy", reason), vectorised.fill, vectorised.backtrack)


def disabled() -> str | None:
    """Which environment variable keeps Numba out, or None."""
    value = os.environ.get(SWITCH, "").strip().lower()
    if value in ("0", "off", "false", "no"):
        return f"{SWITCH}={value}"
    value = os.environ.get("NUMBA_DISABLE_JIT", "").strip()
    if value not in ("", "0"):
        return f"NUMBA_DISABLE_JIT={value}"
    return None


def _load() -> Kernels:
    # Whatever a broken or unfitting Numba raises, NumPy does the same work.
    try:
        import numba
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == "numba"
        if missing:
            return interpreted("numba is not installed")
        return interpreted(f"numba cannot be imported: {_line(error)}")
    except Exception as error:
        return interpreted(f"numba cannot be imported: {_line(error)}")
    try:
        fill, backtrack = _compile(numba)
    except Exception as error:
        return interpreted(f"numba cannot compile: {_line(error)}")
    return Kernels(Implementation("numba", ""), fill, backtrack)


def _compile(numba: Any) -> list[Callable[..., Any]]:
    """Compiled, or from the cache. A cache that cannot be used costs time and nothing else."""
    if numba.config.CACHE_DIR:  # the user's NUMBA_CACHE_DIR
        try:
            return _compile_all(numba, cache=True)
        except Exception:
            return _compile_all(numba, cache=False)
    folder = cache_root() / "numba"
    if not _writable(folder):
        return _compile_all(numba, cache=False)
    with _cache_folder(numba, folder):
        try:
            return _compile_all(numba, cache=True)
        except Exception:
            # a damaged file, or no space left: once more from the beginning, then without
            shutil.rmtree(folder, ignore_errors=True)
            try:
                return _compile_all(numba, cache=True)
            except Exception:
                return _compile_all(numba, cache=False)


def _compile_all(numba: Any, *, cache: bool) -> list[Callable[..., Any]]:
    # not fastmath: infinite losses mean something
    return [numba.njit(signature, cache=cache)(function) for function, signature in _SIGNATURES]


@contextmanager
def _cache_folder(numba: Any, folder: Path) -> Iterator[None]:
    """What is compiled in here is kept in `folder`; the program around us keeps its own setting."""
    before = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = str(folder)
    try:
        yield
    finally:
        numba.config.CACHE_DIR = before


def _writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text or type(error).__name__
