"""Summaries by the workers of a Dask cluster: who has which document, and what if one is lost.

Dask carries documents and records and notices workers that come and go. Which of them gets the next
document is decided here: Dask counts threads, of which a worker may offer many, and not the one
model that each process opens.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import queue
import re
import secrets
import signal
import threading
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any
from urllib.parse import urlsplit

from ..closing import Closing
from ..config import DEFAULTS, SPECS, Config
from ..errors import ClusterError, KnapspecError, UsageError
from ..models.locate import looks_like_path
from ..text.documents import Document
from . import summarize, summarize_worker
from .jsonl import Record
from .report import counted
from .summarize_job import Job, Step, Work
from .summarize_prompts import Request
from .summarize_worker import Order

Warn = Callable[[str], None]

_LOCAL = re.compile(r"local:([0-9]+)")
_MAX_LOCAL = 64
# Options of Engine.open that may name a file, and their values that do not.
_FILE_OPTIONS = {"spec": SPECS, "template": ()}
_MAX_FILE_BYTES = 1 << 24
# What speaks on standard error while a connection is lost, in tracebacks.
_LOUD = ("distributed", "tornado.application", "asyncio")
# Ctrl-C reaches every process of a terminal; local workers are ended by the one that began them.
_IGNORE_INTERRUPTS = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)"


def order(
    model: str,
    request: Request,
    options: Mapping[str, Any],
    *,
    accept_licence: bool = False,
) -> Order:
    """What is asked of workers. `options`: of Engine.open; the files among them are read here.

    Raises UsageError for a file that cannot be read.
    """
    files = {}
    for name, words in _FILE_OPTIONS.items():
        value = options.get(name)
        if value is not None and value not in words and os.path.isfile(value):
            files[name] = _contents(os.fspath(value))
    if looks_like_path(model) or os.path.isfile(model):
        model = os.path.abspath(os.path.expanduser(model))
    return Order(
        token=secrets.token_hex(8),
        versions=summarize_worker.versions(),
        model=model,
        request=request,
        accept_licence=accept_licence,
        options=dict(options),
        files=files,
    )


def _contents(path: str) -> bytes:
    try:
        with open(path, "rb") as stream:
            data = stream.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from None
    if len(data) > _MAX_FILE_BYTES:
        raise UsageError(f"{path} is too long for a plan or a template")
    return data


def local_workers(address: str) -> int | None:
    """N of `local:N`, None for the address of a scheduler. Raises UsageError."""
    match = _LOCAL.fullmatch(address)
    if match is None:
        if not address.strip() or address.startswith("local:"):
            raise UsageError(f"--dask {address}: give a scheduler's host:port, or local:N")
        return None
    n = int(match[1])
    if not 1 <= n <= _MAX_LOCAL:
        raise UsageError(f"--dask {address}: give 1 to {_MAX_LOCAL} local workers")
    return n


def share_threads(job_order: Order, n_workers: int) -> Order:
    """Workers of one machine share its cores, unless a number was asked for."""
    if job_order.options.get("threads") is not None:
        return job_order
    from ..native.threads import default_threads

    threads = max(1, default_threads() // n_workers)
    return replace(job_order, options={**job_order.options, "threads": threads})


@dataclass
class _Piece:
    """A document on its way to a record."""

    document: Document
    n_lost: int = 0  # workers that went away while they had it


@dataclass
class _Event:
    """What Dask reports: a worker has opened the model (`piece` None) or is done with a document;
    or it failed."""

    future: Any
    address: str
    piece: _Piece | None


@dataclass
class _Workers:
    """What is known of the workers, by address."""

    preparing: dict[str, Any] = field(default_factory=dict)  # the future that opens the model
    idle: dict[str, None] = field(default_factory=dict)  # in the order in which they became so
    busy: dict[str, tuple[Any, _Piece]] = field(default_factory=dict)  # future, document
    refused: dict[str, None] = field(default_factory=dict)  # cannot be used

    @property
    def n_ready(self) -> int:
        return len(self.idle) + len(self.busy)

    @property
    def addresses(self) -> set[str]:
        return {*self.preparing, *self.idle, *self.busy, *self.refused}


class _GoneError(Exception):
    """There is no result, nor an error: the worker was lost."""


class Cluster(Closing):
    """A connection to a scheduler, or some workers of its own, and one job on it."""

    def __init__(
        self,
        address: str,
        job_order: Order,
        *,
        warn: Warn,
        config: Config = DEFAULTS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Connect. Raises UsageError, ClusterError: one line, within seconds."""
        n_local = local_workers(address)
        try:
            import distributed
        except ImportError:
            raise UsageError(
                "--dask takes one more library: pip install 'knapspec-edge[dask]'"
            ) from None
        self._address = address
        self._order = job_order if n_local is None else share_threads(job_order, n_local)
        self._warn = warn
        self._config = config
        self._clock = clock
        self._workers = _Workers()
        self._events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self._waiting: deque[_Piece] = deque()  # lost with their worker
        self._no_document_left = False
        self._deaths: Counter[str] = Counter()  # by host: workers lost while they opened the model
        self._looked = -float("inf")
        self._lonely_since: float | None = None  # without any worker
        with ExitStack() as resources:
            resources.enter_context(_quiet(distributed))
            self._client = _connect(distributed, address, n_local, config, resources)
            self._resources = resources.pop_all()

    def close(self) -> None:
        """End what runs on the workers and free their models."""
        workers = self._workers
        for future in workers.preparing.values():
            _release(future)
        for future, _ in workers.busy.values():
            _release(future)
        if self._is_connected:
            payload = pickle.dumps((summarize_worker.stop, (self._order.token,)))
            _within(
                self._config.dask_connect_seconds,
                lambda: self._client.run(_remote_call(), payload, on_error="ignore"),
            )
        self._resources.close()

    # -- before the work

    def examine(self, on_wait: Callable[[], None] = lambda: None) -> str:
        """The fingerprint of the model, on which all workers that are there agree.

        Those that cannot do the job are left out with a warning. Raises ClusterError if none is
        left, or none comes; `on_wait` is called now and then until one does.
        """
        deadline = self._clock() + self._config.dask_wait_seconds
        while not (present := self._present()):
            if self._clock() > deadline:
                raise ClusterError(
                    f"the scheduler at {self._address} has no workers: start some with "
                    f"`dask worker {self._address} --nthreads 1 --memory-limit 0`"
                )
            on_wait()
            time.sleep(self._config.dask_poll_seconds)
        found = self._ask(summarize_worker.examine, present)
        if len(set(found.values())) > 1:
            one, *others = sorted(found)
            other = next(address for address in others if found[address] != found[one])
            raise ClusterError(
                f"workers {one} and {other} have different files at {self._order.model}, and the "
                "summaries would depend on who made them"
            )
        fingerprint: str = next(iter(found.values()))
        self._order = replace(self._order, fingerprint=fingerprint)
        return fingerprint

    def choose_context(self, longest_bytes: int) -> int:
        """Context size, in tokens, that every worker has room for. Raises ClusterError."""
        usable = [a for a in self._present() if a not in self._workers.refused]
        sizes: dict[str, int] = self._ask(summarize_worker.context, usable, longest_bytes)
        return min(sizes.values())

    def _ask(
        self, function: Callable[..., Any], addresses: Sequence[str], *arguments: Any
    ) -> dict[str, Any]:
        """Answers by address; workers that have none are refused. Raises ClusterError if there is
        no answer at all."""
        done: queue.SimpleQueue[str] = queue.SimpleQueue()
        futures = {}
        for address in addresses:
            futures[address] = self._submit(function, address, *arguments)
            futures[address].add_done_callback(lambda _, address=address: done.put(address))
        answers: dict[str, Any] = {}
        problems: dict[str, str] = {}
        while futures:
            with suppress(queue.Empty):
                address = done.get(timeout=self._config.dask_poll_seconds)
                future = futures.pop(address, None)
                if future is not None:
                    with suppress(_GoneError):
                        answer = _result(future)
                        if isinstance(answer, Exception):
                            problems[address] = _reason(answer)
                        else:
                            answers[address] = answer
                continue
            for address in futures.keys() - set(self._present()):
                _release(futures.pop(address))
        if not answers:
            if not problems:
                raise ClusterError(f"all workers of {self._address} were lost")
            address = min(problems)
            others = len(problems) - 1
            raise ClusterError(
                f"worker {address}: {problems[address]}"
                + (f" (and {counted(others, 'other worker')} cannot do it either)" * bool(others))
            )
        for address in sorted(problems):
            self._refuse(address, problems[address])
        return answers

    # -- the work

    def work(self, job: Job, options: Mapping[str, Any], on_step: Callable[[Step], None]) -> Work:
        """Has the workers make the records, one document at a time each.

        `options`: more of Engine.open's, such as the context size. The work raises ClusterError if
        the scheduler is lost, or all workers are for longer than it takes to start one again.
        """
        self._order = replace(self._order, options={**self._order.options, **options})

        def work(documents: Iterator[Document]) -> Iterator[Record]:
            while True:
                self._look()
                while self._workers.idle and (piece := self._next(documents)) is not None:
                    if piece.n_lost > self._config.dask_losses:
                        yield self._failure(
                            piece, f"{counted(piece.n_lost, 'worker')} were lost over it"
                        )
                    else:
                        self._give(piece)
                if self._no_document_left and not self._waiting and not self._workers.busy:
                    return
                self._check_alive()
                on_step(self._step(job))
                yield from self._happened()

        return work

    def _next(self, documents: Iterator[Document]) -> _Piece | None:
        if self._waiting:
            return self._waiting.popleft()
        document = None if self._no_document_left else next(documents, None)
        self._no_document_left = document is None
        return None if document is None else _Piece(document)

    def _give(self, piece: _Piece) -> None:
        """Send a document to the worker that has waited longest."""
        address = next(iter(self._workers.idle))
        del self._workers.idle[address]
        future = self._submit(summarize_worker.record, address, piece.document)
        self._workers.busy[address] = (future, piece)
        future.add_done_callback(lambda f: self._events.put(_Event(f, address, piece)))

    def _step(self, job: Job) -> Step:
        workers = self._workers
        name = next((piece.document.name for _, piece in workers.busy.values()), "")
        detail = counted(workers.n_ready, "worker")
        if workers.preparing:
            detail += f", {len(workers.preparing)} opening the model"
        return job.step(name, 0.0, detail)

    # -- workers come and go

    def _look(self) -> None:
        """Notice who came and who is gone."""
        now = self._clock()
        if now - self._looked < self._config.dask_poll_seconds:
            return
        self._looked = now
        present = self._present()
        for address in self._workers.addresses - set(present):
            self._lost(address)
        for address in present:
            if address not in self._workers.addresses:
                self._prepare(address)

    def _prepare(self, address: str) -> None:
        future = self._submit(summarize_worker.prepare, address)
        self._workers.preparing[address] = future
        future.add_done_callback(lambda f: self._events.put(_Event(f, address, None)))

    def _lost(self, address: str) -> None:
        """A worker is gone: its document goes to another one."""
        workers = self._workers
        workers.idle.pop(address, None)
        workers.refused.pop(address, None)
        if (future := workers.preparing.pop(address, None)) is not None:
            _release(future)
            self._deaths[_host(address)] += 1
        if (busy := workers.busy.pop(address, None)) is not None:
            future, piece = busy
            _release(future)
            piece.n_lost += 1
            self._waiting.append(piece)
            self._warn(
                f"worker {address} was lost while it had {piece.document.name}, which is begun "
                "again"
            )

    def _refuse(self, address: str, reason: str) -> None:
        self._workers.refused[address] = None
        self._warn(f"worker {address} is not used: {reason}")

    def _check_alive(self) -> None:
        """Raises ClusterError if nobody is there to go on."""
        workers = self._workers
        if workers.n_ready or workers.preparing:
            self._lonely_since = None
            return
        if self._lonely_since is None:
            self._lonely_since = self._clock()
        host = next((h for h, n in self._deaths.items() if n > self._config.dask_losses), None)
        if host is not None:
            raise ClusterError(
                f"workers at {host} end while they open the model, maybe for want of memory "
                "(`dask worker --memory-limit 0` lets them have what there is)"
            )
        if self._clock() - self._lonely_since > self._config.dask_wait_seconds:
            raise ClusterError(
                f"no worker of {self._address} is left; the same command goes on from what is "
                "finished"
            )

    # -- what Dask reports

    def _happened(self) -> Iterator[Record]:
        """Wait a moment for events; the records among them."""
        try:
            event = self._events.get(timeout=self._config.dask_poll_seconds)
        except queue.Empty:
            return
        while True:
            if event.piece is None:
                self._opened(event)
            elif (record := self._done(event, event.piece)) is not None:
                yield record
            try:
                event = self._events.get_nowait()
            except queue.Empty:
                return

    def _opened(self, event: _Event) -> None:
        address = event.address
        if self._workers.preparing.get(address) is not event.future:
            return  # it was lost before
        try:
            answer = _result(event.future)
        except _GoneError:
            self._check_connection()
            self._lost(address)
            return
        del self._workers.preparing[address]
        if isinstance(answer, Exception):
            self._refuse(address, _reason(answer))
            return
        for warning in answer:
            self._warn(f"worker {address}: {warning}")
        self._deaths.pop(_host(address), None)
        self._workers.idle[address] = None

    def _done(self, event: _Event, piece: _Piece) -> Record | None:
        address = event.address
        if self._workers.busy.get(address, (None,))[0] is not event.future:
            return None  # it was lost before
        try:
            answer = _result(event.future)
        except _GoneError:
            self._check_connection()
            self._lost(address)
            return None
        del self._workers.busy[address]
        if isinstance(answer, KnapspecError):  # it began anew and cannot open the model any more
            self._waiting.append(piece)
            self._refuse(address, _reason(answer))
            return None
        self._workers.idle[address] = None
        if isinstance(answer, Exception):
            return self._failure(piece, f"worker {address} failed: {_reason(answer)}")
        return {**answer, "worker": address}

    def _failure(self, piece: _Piece, error: str) -> Record:
        document = piece.document
        known = {"sha256": document.sha256, "kind": document.kind}
        return {**summarize.failure(document.name, error), **known}

    # -- Dask

    def _submit(self, function: Callable[..., Any], address: str, *arguments: Any) -> Any:
        """Have one worker call a function of `summarize_worker`."""
        return self._client.submit(
            _remote_call(),
            pickle.dumps((function, (self._order, *arguments))),
            key=f"knapspec-edge-{function.__name__}-{secrets.token_hex(8)}",
            workers=[address],
            allow_other_workers=False,
            pure=False,
        )

    @property
    def _is_connected(self) -> bool:
        return bool(self._client.status == "running")

    def _check_connection(self) -> None:
        if not self._is_connected:
            raise ClusterError(
                f"the connection to the scheduler at {self._address} was lost; the same command "
                "goes on from what is finished"
            )

    def _present(self) -> list[str]:
        """Addresses of all workers. Raises ClusterError."""
        self._check_connection()
        try:
            return list(self._client.nthreads())
        except Exception:
            self._check_connection()
            raise ClusterError(
                f"the scheduler at {self._address} does not answer any more; the same command goes "
                "on from what is finished"
            ) from None


def _remote_call() -> Callable[[bytes], bytes]:
    """What Dask passes on: it names nothing of ours, so that the scheduler, which need not have
    this package, can read it, and so can a worker that lacks it."""

    def call(payload: bytes) -> bytes:
        import pickle

        function, arguments = pickle.loads(payload)
        from knapspec_edge.errors import KnapspecError

        try:
            answer = function(*arguments)
        except KnapspecError as error:
            # some of them are made of more than their line, which pickle does not know
            answer = KnapspecError(str(error))
        return pickle.dumps(answer)

    return call


def _result(future: Any) -> Any:
    """What a call returned, or its exception. Raises _GoneError if there is neither."""
    try:
        if future.status == "error":
            return future.exception()
        if future.status == "finished":
            return pickle.loads(future.result(timeout=DEFAULTS.dask_connect_seconds))
    except (Exception, asyncio.CancelledError):  # it left with its result
        pass
    finally:
        _release(future)
    raise _GoneError


def _release(future: Any) -> None:
    """Let Dask forget the call; it does not begin any more."""
    with suppress(Exception):
        future.release()


def _reason(error: Exception) -> str:
    """One line for people."""
    text = " ".join(str(error).split())
    if isinstance(error, KnapspecError):
        return text
    if isinstance(error, (ImportError, AttributeError)):
        return (
            f"knapspec-edge is missing there, or is of another version ({text}): "
            "pip install 'knapspec-edge[dask]'"
        )
    return f"{type(error).__name__}: {text}"


def _host(address: str) -> str:
    return urlsplit(address).hostname or address


def _connect(
    distributed: Any, address: str, n_local: int | None, config: Config, resources: ExitStack
) -> Any:
    import dask

    if n_local is not None:
        try:
            with _interrupts_held():  # what is half started cannot be closed
                cluster = distributed.LocalCluster(
                    n_workers=n_local,
                    threads_per_worker=1,
                    dashboard_address="127.0.0.1:0",  # the usual port may be another cluster's
                    memory_limit=0,  # the pages of the model's file would count
                    silence_logs=logging.CRITICAL,
                    preload=[_IGNORE_INTERRUPTS],
                )
                resources.callback(cluster.close)
        except (OSError, RuntimeError) as error:
            raise ClusterError(f"local workers cannot be started: {_reason(error)}") from None
        client = distributed.Client(cluster, set_as_default=False)
    else:
        seconds = config.dask_connect_seconds
        resources.enter_context(
            dask.config.set({"distributed.comm.timeouts.connect": f"{seconds} s"})
        )
        _require_scheduler(distributed, address, seconds)
        client = distributed.Client(address, timeout=seconds, set_as_default=False)
    resources.callback(client.close, timeout=config.dask_connect_seconds)
    return client


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """A Ctrl-C in here takes effect at the end; a second one at once."""
    usual = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(usual):
        yield
        return
    pressed = False

    def hold(_signal: int, _frame: FrameType | None) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
    if pressed:
        raise KeyboardInterrupt


def _require_scheduler(distributed: Any, address: str, seconds: float) -> None:
    """Raises ClusterError. A client that cannot connect is not tried: it could not be closed."""

    async def identity() -> Any:
        async with distributed.rpc(address, timeout=seconds) as there:
            return await asyncio.wait_for(there.identity(), seconds)

    try:
        kind = asyncio.run(identity())["type"]
    except Exception as error:
        text = " ".join(str(error).split()) or type(error).__name__
        raise ClusterError(
            f"no Dask scheduler answers at {address} ({text}): start one with `dask scheduler`"
        ) from None
    if kind != "Scheduler":
        raise ClusterError(f"what answers at {address} is no Dask scheduler, but a {kind.lower()}")


@contextmanager
def _quiet(distributed: Any) -> Iterator[None]:
    """Without what Dask says on standard error; what matters of it is said here."""
    loggers = [logging.getLogger(name) for name in _LOUD]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=distributed.versions.VersionMismatchWarning)
        warnings.filterwarnings("ignore", message="Sending large graph")
        for logger in loggers:
            logger.setLevel(logging.CRITICAL + 1)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


def _within(seconds: float, action: Callable[[], Any]) -> None:
    """Do it, but wait no longer than this, whatever comes of it."""

    def run() -> None:
        with suppress(Exception):
            action()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
