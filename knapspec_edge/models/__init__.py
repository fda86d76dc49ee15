"""Models by name: what the manifest offers, fetching them, finding them in the user's cache.

Data and events only; nothing here prints or asks.
"""

from __future__ import annotations

from .fetch import LicenceRequired, Progress, get
from .locate import (
    NotFetched,
    Removed,
    installed,
    looks_like_path,
    obtain,
    remove,
    resolve,
    stored_path,
)
from .manifest import Licence, Model, Part, catalogue, default_model, find
from .storage import models_folder

__all__ = [
    "Licence",
    "LicenceRequired",
    "Model",
    "NotFetched",
    "Part",
    "Progress",
    "Removed",
    "catalogue",
    "default_model",
    "find",
    "get",
    "installed",
    "looks_like_path",
    "models_folder",
    "obtain",
    "remove",
    "resolve",
    "stored_path",
]
