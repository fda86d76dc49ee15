"""Summaries in a process that serves somebody else's job: the model is opened once, documents come
in one by one.

Each function is called by name, on another machine maybe, and takes and gives plain records. Knows
nothing of how the calls get here and of where records go.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..config import DEFAULTS
from ..engine import Engine
from ..errors import Interrupted, KnapspecError, LibraryError, ModelError
from ..text.documents import Document
from . import summarize, summarize_job
from .jsonl import Record
from .summarize_prompts import Request

# Jobs remembered as stopped, for documents of theirs that arrive late.
_MAX_STOPPED = 1000


@dataclass(frozen=True)
class Order:
    """One job, as every worker gets it. `options` are those of Engine.open; those that name a file
    of the client's (a plan, a template) have its contents in `files`."""

    token: str  # names the job
    versions: Mapping[str, str]  # of the client
    model: str  # a name or path, as it is on the worker
    request: Request
    accept_licence: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)
    fingerprint: str | None = None  # of the model, once it is known


def versions() -> dict[str, str]:
    """What has to agree for a text to be the same whoever makes it."""
    from .. import __version__
    from ..native.library import build_info

    build = build_info()
    return {
        "knapspec-edge": __version__,
        "llama.cpp": str(build.get("upstream_commit", ""))[:9],
        "patches": str(build.get("patch_digest", ""))[:12],
    }


def examine(order: Order) -> str:
    """The fingerprint of the model here, which is not opened. Raises KnapspecError where this
    process cannot do the job."""
    _check_versions(order)
    from .. import gguf_check

    return gguf_check.fingerprint(gguf_check.inspect(_model_path(order)))


def context(order: Order, longest_bytes: int) -> int:
    """Context size, in tokens, that suits the job on this machine. Raises KnapspecError."""
    from .. import gguf_check

    return summarize_job.choose_context(
        longest_bytes,
        order.request,
        gguf_check.inspect(_model_path(order)),
        kv_type=order.options["kv_type"],
        gpu_layers=order.options["gpu_layers"],
    )


def prepare(order: Order) -> tuple[str, ...]:
    """Open the model. Returns what there is to be warned of.

    Raises KnapspecError, and Interrupted for a job that was stopped.
    """
    _check_versions(order)
    with _holder.engine(order) as engine:
        # what fits no document is said once, and not in a record of each
        summarize.room(engine, order.request)
        return tuple(dict.fromkeys(engine.take_warnings()))


def record(order: Order, document: Document) -> Record:
    """The record of one document. The calls of several threads take turns.

    Raises KnapspecError where the model cannot be opened, Interrupted for a job that was stopped.
    """
    with _holder.engine(order) as engine:
        return summarize.record(engine, document, order.request)


def stop(token: str) -> None:
    """End what runs for this job and free its model. Returns at once; safe from any thread."""
    _holder.stop(token)


def _model_path(order: Order) -> Path:
    from .. import models

    return models.obtain(order.model, accept_licence=order.accept_licence)


def _check_versions(order: Order) -> None:
    ours = versions()
    for name, theirs in order.versions.items():
        if ours.get(name) != theirs:
            raise LibraryError(
                f"{name} {ours.get(name) or 'is missing'} is installed there, {theirs} here: "
                "install the same version of knapspec-edge in both places"
            )


class _Holder:
    """The one open model of this process.

    Jobs come one after the other as a rule; two at a time take turns, each opening its model anew.
    An idle model is closed after a while: a client that was killed tells nobody.
    """

    def __init__(self) -> None:
        self._turn = threading.Lock()  # whoever holds it uses the engine
        self._state = threading.Lock()  # for the fields below
        self._engine: Engine | None = None
        self._token: str | None = None  # the job that it was opened for
        self._stopped: dict[str, None] = {}  # jobs, in the order in which they were stopped
        self._idle: threading.Timer | None = None

    @contextmanager
    def engine(self, order: Order) -> Iterator[Engine]:
        with self._turn:
            self._rest(False)
            try:
                self._check(order.token)
                if self._token != order.token:
                    self._free()
                    engine = _open(order)
                    with self._state:
                        self._engine, self._token = engine, order.token
                # it may have been stopped while the model was loaded
                self._check(order.token)
                assert self._engine is not None
                yield self._engine
            finally:
                if order.token in self._stopped:
                    self._free()
                else:
                    self._rest(True)

    def stop(self, token: str) -> None:
        with self._state:
            self._stopped[token] = None
            while len(self._stopped) > _MAX_STOPPED:
                self._stopped.pop(next(iter(self._stopped)))
            if self._token != token or self._engine is None:
                return
            interrupt = getattr(self._engine.backend, "interrupt", None)
            if interrupt is not None:
                interrupt()
        # whoever works with it frees it
        if self._turn.acquire(blocking=False):
            try:
                self._rest(False)
                self._free()
            finally:
                self._turn.release()

    def _check(self, token: str) -> None:
        if token in self._stopped:
            raise Interrupted("the job was stopped")

    def _free(self) -> None:
        """Close the model; only by whose turn it is."""
        with self._state:
            engine, self._engine, self._token = self._engine, None, None
        if engine is not None:
            with suppress(KnapspecError):
                engine.close()

    def _rest(self, idle: bool) -> None:
        """Begin or end the time without work, after which the model is closed."""
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None
        if idle and self._engine is not None:
            self._idle = threading.Timer(DEFAULTS.summarize_idle_seconds, self._retire)
            self._idle.daemon = True
            self._idle.start()

    def _retire(self) -> None:
        if self._turn.acquire(blocking=False):
            try:
                self._free()
            finally:
                self._turn.release()


def _open(order: Order) -> Engine:
    path = _model_path(order)
    if order.fingerprint is not None:
        from .. import gguf_check

        if gguf_check.fingerprint(gguf_check.inspect(path)) != order.fingerprint:
            raise ModelError(f"{path} is not the file that the other workers have")
    with tempfile.TemporaryDirectory(prefix="knapspec-edge-") as folder:
        options = dict(order.options)
        for name, contents in order.files.items():
            # the end of a name is what people know a file by
            file = Path(folder, name, os.path.basename(str(options[name])))
            file.parent.mkdir()
            file.write_bytes(contents)
            options[name] = os.fspath(file)
        return Engine.open(path, needs_template=True, **options)


_holder = _Holder()
