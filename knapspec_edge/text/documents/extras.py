"""What is said where the libraries of the extra "documents" are not installed."""

from __future__ import annotations

from ...errors import DocumentError


def missing(name: str, what: str) -> DocumentError:
    return DocumentError(
        f"{name}: reading {what} takes more libraries: pip install 'knapspec-edge[documents]'"
    )
