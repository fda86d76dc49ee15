"""The `models` command: rows and results, no printing.

`get` reports through `progress` and asks about a licence through `confirm`; the caller owns the
terminal.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from .. import models
from ..models import Model, Progress, Removed


def list_rows() -> list[dict[str, Any]]:
    """One JSON-ready row per model of the manifest, in its order.

    `bytes` is the file's size, `download_bytes` about what fetching it transfers, `path` where it
    is or would be.
    """
    return [
        {
            "name": model.name,
            "aliases": list(model.aliases),
            "role": model.role,
            "title": model.title,
            "quantization": model.quantization,
            "bytes": model.bytes,
            "download_bytes": model.wheel_bytes,
            "licence": model.licence.spdx,
            "licence_url": model.licence.url,
            "licence_confirm": model.licence.confirm,
            "installed": models.installed(model),
            "path": str(models.stored_path(model)),
            "notes": model.notes,
        }
        for model in models.catalogue()
    ]


def get(
    name: str | None = None,
    *,
    accept_licence: bool = False,
    confirm: Callable[[Model], bool] | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Path:
    """Fetch a model (without a name: the demo model) and return its path. See `models.get`."""
    return models.get(
        name or models.default_model().name,
        accept_licence=accept_licence,
        confirm=confirm,
        progress=progress,
    )


def path(name: str | None = None) -> Path:
    """The path of a fetched model; raises models.NotFetched if it is not there."""
    model = models.find(name) if name else models.default_model()
    if not models.installed(model):
        raise models.NotFetched(model)
    return models.stored_path(model)


def rm(name: str) -> Removed:
    """Remove a model and its conversions from the cache. See `models.remove`."""
    return models.remove(name)
