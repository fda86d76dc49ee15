"""Where this program keeps things of its own."""

from __future__ import annotations

import os
from pathlib import Path


def cache_root() -> Path:
    """What can be made again: the user's cache folder of this program, or KNAPSPEC_EDGE_CACHE."""
    override = os.environ.get("KNAPSPEC_EDGE_CACHE")
    if override:
        return Path(override).expanduser().absolute()
    import platformdirs

    return Path(platformdirs.user_cache_dir("knapspec-edge", appauthor=False))


def state_root() -> Path:
    """What is remembered from one run to the next: the user's state folder of this program."""
    import platformdirs

    return Path(platformdirs.user_state_dir("knapspec-edge", appauthor=False))
