"""Files that a command was asked to write: found out beforehand whether that is possible."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import UsageError


def check_writable(path: Path, what: str) -> None:
    """Whether a new file could take the place of `path`. Raises UsageError, one line, where not."""
    try:
        if path.is_dir():
            raise UsageError(f"cannot write {what} {path}: it is a folder")
        if path.exists() and not path.is_file():
            raise UsageError(f"cannot write {what} {path}: it is not a file")
        if path.exists() and not os.access(path, os.W_OK):
            raise UsageError(f"cannot write {what} {path}: the file is read-only")
        new = temporary(path)
        with open(new, "xb"):
            pass
        new.unlink()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"cannot write {what} {path}: {reason}") from None


def target(path: Path) -> Path:
    """Where a link leads: it is the file behind it that is replaced, not the link."""
    return Path(os.path.realpath(path))


def temporary(path: Path) -> Path:
    """A new name beside the file, to be moved into its place."""
    real = target(path)
    return real.with_name(f".{real.name}.{os.getpid()}.new")
