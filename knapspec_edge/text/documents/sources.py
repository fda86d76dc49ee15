"""From what was named on a command line to single inputs; nothing is decoded here."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Source:
    """One input. `name` is what people call it: the path as given, below a folder as given."""

    name: str
    path: Path | None  # None: standard input


@dataclass(frozen=True)
class Found:
    """`problems`: (name, one line) of what was named and is not there; each is a failed input.
    `notes`: lines about what folders held and was left out; no failures."""

    sources: tuple[Source, ...]
    problems: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]


def find(paths: Sequence[str | os.PathLike[str]]) -> Found:
    """The inputs behind files, folders (recursively), glob patterns and "-" (standard input).

    In the order given, sorted within a folder or pattern, each file once.
    """
    raise NotImplementedError
