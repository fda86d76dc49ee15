"""knapspec-edge: a local decoder for GGUF models that drafts with the model's own sublayers.

``from knapspec_edge import Engine`` is the library's entrance.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .engine import Engine as Engine

__all__ = ["Engine", "__version__"]


def __getattr__(name: str) -> Any:
    # Both cost imports that the command line's start-up must not pay.
    if name == "Engine":
        from .engine import Engine

        return Engine
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("knapspec-edge")
        except PackageNotFoundError:  # a checkout that was never installed
            return "0+unknown"
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
