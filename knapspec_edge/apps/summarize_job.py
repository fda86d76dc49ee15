"""Many documents into one record each: what is done already, what is left, and how far it is.

Reads documents one by one and takes records in any order. Who makes the records, in this process or
elsewhere, is not known here.
"""

from __future__ import annotations

import codecs
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..config import DEFAULTS, Config
from ..engine import Engine
from ..errors import DocumentError
from ..gguf_check import GgufInfo
from ..models.storage import sha256_of
from ..text.documents import Document, Found, Source, read
from ..text.templates import template_identity
from . import summarize
from .jsonl import Record, RecordFile
from .memory import tokens_that_fit
from .summarize_prompts import Request, tokens_for

FIRST_KEY = "input"  # of every record

# Documents to records, in any order, each as soon as it is there. It may ask for several documents
# before it gives the first record.
Work = Callable[[Iterator[Document]], Iterator[Record]]

_BYTES_PER_TOKEN = 3  # of text, at least in most languages
_PROMPT_TOKENS = 256  # template and instruction of ours
_CTX_STEP_TOKENS = 256


class Output(Protocol):
    """Where records go; on the disk when `append` returns, where there is one."""

    def append(self, record: Record) -> None: ...


@dataclass(frozen=True)
class Step:
    """How far the job is."""

    n_done: int  # documents finished now, failed ones included
    n_total: int  # documents to be done now
    share: float  # of all their bytes, 0..1
    elapsed_seconds: float
    name: str  # the document in work
    detail: str  # what is being done with it

    @property
    def per_minute(self) -> float | None:
        """Documents; None before the first is done."""
        if not self.n_done or self.elapsed_seconds <= 0.0:
            return None
        return 60.0 * self.n_done / self.elapsed_seconds


@dataclass
class Outcome:
    """What became of a job; complete also after an interruption."""

    n_done: int = 0
    n_failed: int = 0
    n_skipped: int = 0  # finished before
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    prompt_ms: float = 0.0
    predicted_ms: float = 0.0
    plan_ms: float = 0.0
    drafted: int = 0
    accepted: int = 0
    elapsed_seconds: float = 0.0
    speculation: Mapping[str, Any] | None = None  # of the latest record

    def add(self, record: Record) -> None:
        if record["error"] is None:
            self.n_done += 1
        else:
            self.n_failed += 1
        tokens, timings = record.get("tokens") or {}, record.get("timings") or {}
        self.prompt_tokens += tokens.get("prompt", 0)
        self.cached_tokens += tokens.get("cached", 0)
        self.completion_tokens += tokens.get("completion", 0)
        self.prompt_ms += timings.get("prompt_ms", 0.0)
        self.predicted_ms += timings.get("predicted_ms", 0.0)
        self.plan_ms += timings.get("plan_ms", 0.0)
        if speculation := record.get("speculation"):
            self.speculation = speculation
            self.drafted += speculation["drafted"]
            self.accepted += speculation["accepted"]


def job_settings(
    request: Request,
    fingerprint: str,
    *,
    template: str | None = None,
    encoding: str | None = None,
) -> dict[str, Any]:
    """What a record has to agree with to count as done: everything that decides about the text.

    `template` and `encoding` are those that were asked for. Raises UsageError for a template that
    is none.
    """
    found = {"model": fingerprint, **request.identity()}
    if template is not None:
        found["template"] = template_identity(template)
    if encoding is not None:
        found["encoding"] = codecs.lookup(encoding).name
    return found


class Job:
    """The documents of one call.

    A document is done if the file holds a record of its name, contents and settings without an
    error. Failed ones are tried again. `tidy` leaves one record per input and settings, the latest;
    a failure only as long as nothing newer is known of the input.
    """

    def __init__(
        self,
        found: Found,
        settings: Mapping[str, Any],
        output: Output,
        *,
        encoding: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`output`: a RecordFile is also asked what is done already. `encoding`: of text, None to
        find out."""
        self.outcome = Outcome()
        self.n_other_settings = 0  # good records of these inputs that were made otherwise
        self._settings = json.loads(json.dumps(dict(settings)))
        self._output = output
        self._encoding = encoding
        self._clock = clock
        self._started = 0.0
        self._problems = found.problems
        # of the good records with our settings
        self._done: dict[str, str] = {}
        self._early: dict[str, Document | DocumentError] = {}
        self._sizes: dict[str, int] = {}
        self._finished_bytes = 0
        self._total_bytes = 0  # of what is left
        ours = _digest(self._settings)
        named = {source.name for source in found.sources}
        others: set[str] = set()
        if isinstance(output, RecordFile):
            for record in output:
                _, digest = _entry(record)
                if digest == ours:
                    self._done[record[FIRST_KEY]] = record.get("sha256") or ""
                elif digest is not None and record[FIRST_KEY] in named:
                    others.add(record[FIRST_KEY])
        self.n_other_settings = len(others - self._done.keys())
        pending = []
        for source in found.sources:
            if self._is_done(source):
                self.outcome.n_skipped += 1
            else:
                pending.append(source)
        self.pending: tuple[Source, ...] = tuple(pending)

    @property
    def n_problems(self) -> int:
        return len(self._problems)

    @property
    def longest_bytes(self) -> int:
        """Of the documents that are left. Pipes are read for it."""
        for source in self.pending:
            if _is_stream(source):
                self._read_early(source)
        return max((self._size(source) for source in self.pending), default=0)

    def run(
        self,
        work: Work,
        on_record: Callable[[Record], None] | None = None,
    ) -> Outcome:
        """Do what is left. Raises OutputError, Interrupted, KeyboardInterrupt; what was finished
        until then is in the output, and `outcome` says how much that is."""
        self._started = self._clock()
        self._total_bytes = sum(self._size(source) for source in self.pending)
        on_record = on_record or (lambda record: None)
        try:
            for name, problem in self._problems:
                self._finish(summarize.failure(name, problem), on_record)
            if self.pending:
                for record in work(self._documents(on_record)):
                    self._finish(record, on_record)
        finally:
            self.outcome.elapsed_seconds = self._clock() - self._started
        return self.outcome

    def tidy(self) -> bool:
        """Drop records that newer ones stand for; False if that was not possible."""
        if not isinstance(self._output, RecordFile):
            return True
        # from the file: an interruption may have come between a record and any note of it
        index = [_entry(record) for record in self._output]
        wanted = kept(index)
        return len(wanted) == len(index) or self._output.keep(lambda number: number in wanted)

    def step(self, name: str, share: float, detail: str) -> Step:
        """How far the job is while a document is done to a share (0..1)."""
        total = self._total_bytes
        finished = self._finished_bytes + share * self._sizes.get(name, 0)
        return Step(
            n_done=self.outcome.n_done + self.outcome.n_failed - self.n_problems,
            n_total=len(self.pending),
            share=min(1.0, finished / total) if total else 0.0,
            elapsed_seconds=self._clock() - self._started,
            name=name,
            detail=detail,
        )

    # -- documents

    def _documents(self, on_record: Callable[[Record], None]) -> Iterator[Document]:
        for source in self.pending:
            early = self._early.pop(source.name, None)
            try:
                if isinstance(early, DocumentError):
                    raise early
                document = early or read(source, encoding=self._encoding)
            except DocumentError as error:
                self._finish(summarize.failure(source.name, str(error)), on_record)
                continue
            if self._done.get(source.name) == document.sha256:
                self.outcome.n_skipped += 1  # what standard input brought is known by now
                self._finished_bytes += self._size(source)
                continue
            yield document

    def _read_early(self, source: Source) -> None:
        if source.name in self._early:
            return
        try:
            document = read(source, encoding=self._encoding)
        except DocumentError as error:
            self._early[source.name] = error  # said when its turn comes
        else:
            self._early[source.name] = document
            self._sizes[source.name] = document.n_bytes

    def _is_done(self, source: Source) -> bool:
        known = self._done.get(source.name)
        if known is None or _is_stream(source):
            return False
        try:
            return source.path is not None and sha256_of(source.path) == known
        except OSError:
            return False  # reading it will say why

    def _size(self, source: Source) -> int:
        if source.name not in self._sizes:
            try:
                size = 0 if source.path is None else source.path.stat().st_size
            except OSError:
                size = 0
            self._sizes[source.name] = size
        return self._sizes[source.name]

    # -- records

    def _finish(self, record: Record, on_record: Callable[[Record], None]) -> None:
        record = {**record, "settings": self._settings}
        self._output.append(record)
        self.outcome.add(record)
        self._finished_bytes += self._sizes.get(record[FIRST_KEY], 0)
        on_record(record)


def _entry(record: Record) -> tuple[str, str | None]:
    """What tells a record from others: its input, and the settings, None for a failure."""
    good = record.get("error") is None and isinstance(record.get("summary"), str)
    return record[FIRST_KEY], _digest(record.get("settings")) if good else None


def _is_stream(source: Source) -> bool:
    """Whether it can be read only once, such as a pipe."""
    return source.path is None or not source.path.is_file()


def _digest(settings: Any) -> str:
    return json.dumps(settings, sort_keys=True)


def kept(index: Sequence[tuple[str, str | None]]) -> set[int]:
    """Which records of a file stay, by number: (input, settings; None for a failure) each."""
    wanted: set[int] = set()
    newer: set[tuple[str, str | None]] = set()
    newer_names: set[str] = set()
    for number in range(len(index) - 1, -1, -1):
        name, digest = index[number]
        if (name not in newer_names) if digest is None else ((name, digest) not in newer):
            wanted.add(number)
        newer.add((name, digest))
        newer_names.add(name)
    return wanted


def local_work(engine: Engine, request: Request, job: Job, on_step: Callable[[Step], None]) -> Work:
    """Makes the records here, one document after the other."""

    def work(documents: Iterator[Document]) -> Iterator[Record]:
        for document in documents:
            name = document.name

            def progress(share: float, detail: str, name: str = name) -> None:
                on_step(job.step(name, share, detail))

            yield summarize.record(engine, document, request, progress=progress)

    return work


def choose_context(
    longest_bytes: int,
    request: Request,
    info: GgufInfo,
    *,
    kv_type: str = "f16",
    gpu_layers: int | None = None,
    config: Config = DEFAULTS,
) -> int:
    """Context size, in tokens, that the longest document needs: as far as the model was trained,
    there is memory, and longer prompts are worth it. What does not fit is split."""
    said = len((request.instruction or "").encode()) + len((request.system or "").encode())
    around = _PROMPT_TOKENS + said // _BYTES_PER_TOKEN + request.max_tokens
    wanted = longest_bytes // _BYTES_PER_TOKEN + around
    limit = config.summarize_ctx_tokens
    if info.context_length:
        limit = min(limit, info.context_length)
    fits = tokens_that_fit(
        info.metadata,
        info.architecture,
        "f16" if kv_type == "auto" else kv_type,
        on_gpu=gpu_layers != 0,
        weight_bytes=info.size_bytes,
        config=config,
    )
    if fits:
        limit = min(limit, max(fits, 2 * around))
    rounded = -(-wanted // _CTX_STEP_TOKENS) * _CTX_STEP_TOKENS
    return max(1, min(limit, max(rounded, 2 * _CTX_STEP_TOKENS, 2 * around)))


def expected_tokens(ctx_tokens: int, longest_bytes: int, request: Request) -> int:
    """About how long prompts will get, to plan by."""
    whole = longest_bytes // _BYTES_PER_TOKEN + _PROMPT_TOKENS + tokens_for(request.n_words)
    return min(ctx_tokens, whole)
