"""knapspec-edge: a local decoder for GGUF models that drafts with the model's own sublayers.

    from knapspec_edge import Engine

    with Engine.open("model.gguf") as engine:
        for event in engine.chat([{"role": "user", "content": "Why is the sky blue?"}]):
            print(event.text, end="", flush=True)

Everything in `__all__` is public: the engine and its records, the settings of an answer, and the
errors, whose root is KnapspecError. docs/library.md in the repository shows it all in use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .engine import Answer as Answer
    from .engine import Engine as Engine
    from .engine import Speculation as Speculation
    from .engine import TextEvent as TextEvent
    from .errors import BusyError as BusyError
    from .errors import ClosedError as ClosedError
    from .errors import ContextError as ContextError
    from .errors import DownloadError as DownloadError
    from .errors import Interrupted as Interrupted
    from .errors import KnapspecError as KnapspecError
    from .errors import LibraryError as LibraryError
    from .errors import ModelError as ModelError
    from .errors import NativeError as NativeError
    from .errors import PlanError as PlanError
    from .errors import RollbackError as RollbackError
    from .errors import UsageError as UsageError
    from .records import Stats as Stats
    from .records import TokenEvent as TokenEvent
    from .sampling import Settings as Settings

    __version__: str

# Where each public name lives: importing them costs what the command line's start must not pay.
_HOMES = {
    "engine": ("Answer", "Engine", "Speculation", "TextEvent"),
    "errors": (
        "BusyError",
        "ClosedError",
        "ContextError",
        "DownloadError",
        "Interrupted",
        "KnapspecError",
        "LibraryError",
        "ModelError",
        "NativeError",
        "PlanError",
        "RollbackError",
        "UsageError",
    ),
    "records": ("Stats", "TokenEvent"),
    "sampling": ("Settings",),
}

__all__ = [
    "Answer",
    "BusyError",
    "ClosedError",
    "ContextError",
    "DownloadError",
    "Engine",
    "Interrupted",
    "KnapspecError",
    "LibraryError",
    "ModelError",
    "NativeError",
    "PlanError",
    "RollbackError",
    "Settings",
    "Speculation",
    "Stats",
    "TextEvent",
    "TokenEvent",
    "UsageError",
    "__version__",
]


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            from importlib import import_module

            return getattr(import_module(f".{home}", __name__), name)
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("knapspec-edge")
        except PackageNotFoundError:  # a checkout that was never installed
            return "0+unknown"
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
