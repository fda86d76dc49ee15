"""Where this program keeps things of its own, and where users write what they want."""

from __future__ import annotations

import errno
import os
from pathlib import Path


def expanded(path: str | os.PathLike[str]) -> Path:
    """With ~ as the user's folder. Unlike Path.expanduser, what names nobody stays as it is, and is
    then a path that does not exist."""
    return Path(os.path.expanduser(path))


def read_at_most(path: str | os.PathLike[str], n_bytes: int) -> bytes:
    """All of a file, or of a pipe or device, whose size is known only once it was read.

    Raises OSError, also where that is more than `n_bytes`.
    """
    with open(path, "rb") as file:
        data = file.read(n_bytes + 1)
    if len(data) > n_bytes:
        raise OSError(errno.EFBIG, f"it has more than {n_bytes >> 20} MiB, the most that is read")
    return data


def cache_root() -> Path:
    """What can be made again: the user's cache folder of this program, or KNAPSPEC_EDGE_CACHE."""
    override = os.environ.get("KNAPSPEC_EDGE_CACHE")
    if override:
        return expanded(override).absolute()
    import platformdirs

    return Path(platformdirs.user_cache_dir("knapspec-edge", appauthor=False))


def state_root() -> Path:
    """What is remembered from one run to the next: the user's state folder of this program."""
    import platformdirs

    return Path(platformdirs.user_state_dir("knapspec-edge", appauthor=False))


def config_file() -> Path | None:
    """The user's configuration file, whether there is one or not. KNAPSPEC_EDGE_CONFIG names
    another one; where that is empty, None: there is none."""
    override = os.environ.get("KNAPSPEC_EDGE_CONFIG")
    if override is not None:
        return expanded(override).absolute() if override else None
    import platformdirs

    return Path(platformdirs.user_config_dir("knapspec-edge", appauthor=False)) / "config.toml"
