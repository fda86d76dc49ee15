"""One input into text: what kind it is, and what its reader gives."""

from __future__ import annotations

from dataclasses import dataclass

from .sources import Source


@dataclass(frozen=True)
class Document:
    """The text of one input; never blank."""

    name: str  # of its Source
    text: str  # line ends are \n; encodes as UTF-8
    sha256: str  # hexadecimal, of the bytes read (not of the text)
    n_bytes: int
    kind: str  # "text", "html", "pdf", "docx", "epub"
    notes: tuple[str, ...]  # such as "read as cp1252", "2 of 9 pages hold no text"


def read(source: Source) -> Document:
    """Raises DocumentError: one line that names the input and says what is wrong with it."""
    raise NotImplementedError
