"""Where this program keeps what it can make again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_root() -> Path:
    """The user's cache folder of this program; KNAPSPEC_EDGE_CACHE overrides it."""
    override = os.environ.get("KNAPSPEC_EDGE_CACHE")
    if override:
        return Path(override).expanduser().absolute()
    import platformdirs

    return Path(platformdirs.user_cache_dir("knapspec-edge", appauthor=False))
