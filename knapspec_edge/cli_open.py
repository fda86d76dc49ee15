"""From a command's options to an open model, with what the user is asked and told meanwhile."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from .config import DEFAULTS, without_windows
from .errors import KnapspecError, UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from .engine import Engine
    from .models import Model
    from .models import Progress as FetchProgress
    from .terminal import Terminal


def obtain(model: str | None, options: dict[str, Any], terminal: Terminal) -> Path:
    """The model's file, fetched if need be; without a MODEL the demo's."""
    from . import models as store

    return store.obtain(
        model or store.default_model().name,
        accept_licence=options["accept_licence"],
        confirm=confirm_licence(terminal),
        progress=fetch_progress(terminal),
    )


def open_model(
    model: str | None,
    options: dict[str, Any],
    terminal: Terminal,
    *,
    spec: str | None = None,
    needs_template: bool = False,
    expected_tokens: int | None = None,
) -> Engine:
    """Fetch the model if need be, open it, and say what there is to be warned of."""
    return open_file(
        obtain(model, options, terminal),
        options,
        terminal,
        spec=spec,
        needs_template=needs_template,
        expected_tokens=expected_tokens,
    )


def open_file(
    path: Path,
    options: dict[str, Any],
    terminal: Terminal,
    *,
    spec: str | None = None,
    needs_template: bool = False,
    expected_tokens: int | None = None,
) -> Engine:
    from .engine import Engine

    engine = Engine.open(
        path,
        **{**engine_options(options), "spec": spec or options["spec"]},
        needs_template=needs_template,
        expected_tokens=expected_tokens,
        progress=terminal.progress,
    )
    terminal.clear_progress()
    if options.get("think") is not None:
        try:
            engine.require_template().check_think(options["think"])
        except KnapspecError:
            engine.close()
            raise
    for warning in dict.fromkeys(engine.take_warnings()):  # said for each thing it could not keep
        terminal.warning(warning)
    return engine


def engine_options(options: dict[str, Any]) -> dict[str, Any]:
    """What of a command's options Engine.open takes. Raises UsageError."""
    if options.get("draft_model") is not None and options.get("policy") not in (
        None,
        "draft-model",
    ):
        raise UsageError("--draft-model goes with --policy draft-model")
    names = (
        "ctx", "threads", "gpu_layers", "kv_type", "flash_attn", "spec", "policy", "draft_model",
        "exact", "lookup", "template",
    )  # fmt: skip
    found = {name: options[name] for name in names if name in options}
    if options.get("windows") is False:
        found["config"] = without_windows(DEFAULTS)
    return found


def confirm_licence(terminal: Terminal) -> Callable[[Model], bool] | None:
    """How to ask about a licence; None where nobody can be asked."""
    from .terminal import is_terminal

    if not (is_terminal(sys.stdin) and terminal.err_is_terminal):
        return None

    def ask(model: Model) -> bool:
        terminal.clear_progress()
        click.echo(f"{model.name} is under the {model.licence.title}:\n", err=True)
        click.echo(f"{model.licence.terms}\n\n{model.licence.url}\n", err=True)
        return click.confirm("Do you accept it?", default=False, err=True)

    return ask


def fetch_progress(terminal: Terminal) -> Callable[[FetchProgress], None]:
    def report(step: FetchProgress) -> None:
        share = step.done_bytes / step.total_bytes if step.total_bytes else None
        terminal.progress(step.stage, share)

    return report
