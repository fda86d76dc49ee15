"""The patched llama.cpp: where it lies, what it offers, and the Backend built on it.

Importing this package loads nothing native; it only says where the libraries are, which has to be
known before llama-cpp-python is imported anywhere in the process.
"""

from __future__ import annotations

from collections.abc import Callable
from os import PathLike
from typing import TYPE_CHECKING, Any

from .library import library_digest, library_info, point_to_library

if TYPE_CHECKING:
    from .context import LlamaBackend
    from .model import Model

point_to_library()

__all__ = [
    "describe_device",
    "library_digest",
    "library_info",
    "machine_key",
    "open_context",
    "open_model",
    "prompt_lookup",
]


def open_model(
    path: str | PathLike[str],
    *,
    gpu_layers: int | None = None,
    progress: Callable[[float], bool] | None = None,
) -> Model:
    """Load the weights of a GGUF file.

    `gpu_layers` None offloads what fits, 0 nothing. `progress(fraction)` is called while loading;
    returning False cancels. Raises LibraryError, ModelError, Interrupted (cancelled).
    """
    from .model import Model

    return Model(path, gpu_layers=gpu_layers, progress=progress)


def machine_key() -> dict[str, Any]:
    """What times depend on beside model and settings, JSON-ready: the native code, its devices, and
    the logical CPUs that this process may use. Loads the library; raises LibraryError."""
    from .library import devices
    from .threads import usable_threads

    return {
        "library": library_digest(),
        "devices": [f"{d['name']}: {d['description']}" for d in devices()],
        "cpus": usable_threads(),
    }


def open_context(model: Model, **settings: Any) -> LlamaBackend:
    """A context for one sequence of `model`; see LlamaBackend for the settings."""
    from .context import LlamaBackend

    return LlamaBackend(model, **settings)


def prompt_lookup(max_ngram: int, max_tokens: int) -> Callable[..., Any]:
    """llama-cpp-python's LlamaPromptLookupDecoding: from the text, i32 [tokens], to an array of the
    tokens it proposes. Loads the library; raises LibraryError."""
    from .library import load

    load()
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    found: Callable[..., Any] = LlamaPromptLookupDecoding(max_ngram, max_tokens)
    return found


def describe_device(backend: LlamaBackend) -> str:
    """Where the layers of an open context lie, in a few words."""
    from . import devices

    return devices.describe(devices.placement(backend))
