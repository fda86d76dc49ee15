"""Plan files: a draft plan as JSON, bound to the model it was made for."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..errors import PlanError, UsageError
from ..folders import read_at_most
from ..records import Draft, Kind, Plan, SubLayer, parse_mode

FORMAT = "knapspec-edge plan"
VERSION = 1
_MAX_BYTES = 16 << 20


def save(
    path: str | os.PathLike[str],
    draft: Draft,
    sublayers: Sequence[SubLayer],
    fingerprint: str,
    architecture: str = "",
) -> None:
    """Write a plan atomically. Raises UsageError if the file cannot be written."""
    if len(draft.plan.modes) != len(sublayers):
        raise ValueError("the plan has another number of sublayers than the model")
    data = {
        "format": FORMAT,
        "version": VERSION,
        "model": fingerprint,
        "architecture": architecture,
        "max_tokens": draft.max_tokens,
        "min_probability": draft.min_probability,
        "head_rows": draft.plan.head_rows,  # 0: all
        "sublayers": [
            {"layer": s.layer, "kind": s.kind.value, "mode": str(mode)}
            for s, mode in zip(sublayers, draft.plan.modes, strict=True)
        ],
    }
    target = Path(path)
    temporary: str | None = None
    try:
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=".new-", suffix=".json")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(data, file, indent=1)
            file.write("\n")
        os.replace(temporary, target)
    except OSError as error:
        if temporary is not None:
            with suppress(OSError):
                os.unlink(temporary)
        raise UsageError(f"cannot write the plan {target}: {error.strerror}") from error


def load(
    path: str | os.PathLike[str],
    sublayers: Sequence[SubLayer],
    fingerprint: str,
    architecture: str = "",
) -> Draft:
    """Read the plan made for exactly this model.

    Raises UsageError if the file cannot be read or is no plan, PlanError if it is one for another
    model, another number of layers, or another structure.
    """
    name = os.fspath(path)
    try:
        data = json.loads(read_at_most(path, _MAX_BYTES))
    except OSError as error:
        raise UsageError(f"cannot read the plan {name}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{name} is not a plan file: it is not JSON") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise UsageError(f'{name} is not a plan file: "format" is not "{FORMAT}"')
    if data.get("version") != VERSION:
        raise UsageError(
            f"{name} has plan version {data.get('version')}, this program reads {VERSION}; "
            "make the plan again"
        )
    try:
        return _draft(name, data, sublayers, fingerprint, architecture)
    except (KeyError, TypeError, ValueError) as error:
        reason = f"{error.args[0]} is missing" if isinstance(error, KeyError) else str(error)
        raise UsageError(f"{name} is a damaged plan file: {reason}") from error


def _draft(
    name: str,
    data: dict[str, Any],
    sublayers: Sequence[SubLayer],
    fingerprint: str,
    architecture: str,
) -> Draft:
    made_for = str(data.get("architecture", ""))
    if architecture and made_for and made_for != architecture:
        raise PlanError(
            f"{name} was made for a model of architecture {made_for}, this one is {architecture}"
        )
    entries = data["sublayers"]
    if not isinstance(entries, list):
        raise TypeError("sublayers is not a list")
    if len(entries) != len(sublayers):
        raise PlanError(
            f"{name} is for a model of {len(entries)} sublayers, this one has {len(sublayers)}"
        )
    modes = []
    for i, (entry, sublayer) in enumerate(zip(entries, sublayers, strict=True)):
        kind, layer = Kind(entry["kind"]), int(entry["layer"])
        if (kind, layer) != (sublayer.kind, sublayer.layer):
            raise PlanError(
                f"{name} has {kind.value} {layer} in place {i}, this model has {sublayer}"
            )
        modes.append(parse_mode(entry["mode"]))
    if data["model"] != fingerprint:
        raise PlanError(f"{name} was made for another model file; make a plan for this one")
    max_tokens, min_probability = data["max_tokens"], data["min_probability"]
    if isinstance(max_tokens, bool) or not isinstance(max_tokens, int) or max_tokens < 1:
        raise ValueError("max_tokens has to be a whole number of at least 1")
    if isinstance(min_probability, bool) or not isinstance(min_probability, (int, float)):
        raise TypeError("min_probability is not a number")
    if not 0.0 <= min_probability <= 1.0:
        raise ValueError("min_probability has to be in 0..1")
    head_rows = data.get("head_rows", 0)  # files of earlier versions have none
    if isinstance(head_rows, bool) or not isinstance(head_rows, int) or head_rows < 0:
        raise ValueError("head_rows has to be a whole number of at least 0")
    return Draft(Plan(tuple(modes), head_rows), max_tokens, float(min_probability))
