"""One document into one record: summarized in one prompt if it fits, else in parts whose summaries
are combined until they fit.

Everything fits by measure: prompts are rendered with the model's template and counted, and room for
the answer is kept. Knows nothing of files and of other documents.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from ..engine import Answer, Engine, Speculation
from ..errors import ContextError, Interrupted, KnapspecError, ModelError
from ..text.documents import Document
from ..text.splitting import split
from .jsonl import Record
from .summarize_prompts import Final, Merge, Part, Request, Task, Whole, tokens_for
from .summary import form_notice

# Reports how far a document is: (share done in 0..1, what is being done).
Progress = Callable[[float, str], None]

# Of a record, in order.
_KEYS = (
    "input",
    "sha256",
    "kind",
    "summary",
    "error",
    "finish_reason",
    "model",
    "tokens",
    "timings",
    "speculation",
    "seed",
    "notes",
)

# What reasoning models write before the answer.
_REASONING = re.compile(r"\A\s*<think>.*?(?:</think>|\Z)", re.DOTALL)
# A prompt with less text than this is not worth asking.
_MIN_TEXT_TOKENS = 48
_MIN_SUMMARY_TOKENS = 16
_BETWEEN_TOKENS = 8  # more than what parts two summaries


@dataclass
class Tally:
    """Counters of all answers that one document took. Times are milliseconds."""

    answers: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    prompt_ms: float = 0.0
    predicted_ms: float = 0.0
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    plan_ms: float = 0.0
    draft_n: int = 0
    draft_n_accepted: int = 0
    proposed_n_accepted: int = 0
    speculation: Speculation | None = None  # of the latest answer, first of those that drafted
    notices: list[str] = field(default_factory=list)

    def add(self, answer: Answer) -> None:
        stats = answer.stats
        self.answers += 1
        for name in (
            "prompt_tokens",
            "completion_tokens",
            "cached_tokens",
            "prompt_ms",
            "predicted_ms",
            "draft_ms",
            "verify_ms",
            "plan_ms",
            "draft_n",
            "draft_n_accepted",
            "proposed_n_accepted",
        ):
            setattr(self, name, getattr(self, name) + getattr(stats, name))
        if self.speculation is None or stats.draft_n or self.speculation.state == "off":
            self.speculation = answer.speculation
        self.notices += [notice for notice in answer.notices if notice not in self.notices]


@dataclass(frozen=True)
class Room:
    """How the context is shared out, in tokens."""

    text: int  # of a part of a document, or of summaries that are combined
    part: int  # the longest summary of a part
    final: int  # the longest summary of a document


def room(engine: Engine, request: Request) -> Room:
    """Raises ContextError if the prompt's own text leaves too little room, ModelError where the
    model has no chat template."""
    # the parts of a text that has a million of them
    tasks = (Whole(""), Part("", 10**6, 10**6), Merge(""), Final(""))
    overhead = max(_n_tokens(engine, request, task) for task in tasks)
    free = engine.n_ctx - overhead
    final = request.max_tokens
    if request.settings.max_tokens is None:
        final = min(final, free // 3)  # a guess of ours has to make do with less
    # two summaries of parts have to fit into one prompt, or combining them would never end
    part = min(tokens_for(request.part_words(engine.config)), (free - final - _BETWEEN_TOKENS) // 3)
    text = free - max(final, part)
    if part < _MIN_SUMMARY_TOKENS or text < _MIN_TEXT_TOKENS:
        raise ContextError(
            f"instruction and template take {overhead} tokens and the summary up to "
            f"{request.max_tokens}: too little is left for text in the context of {engine.n_ctx}; "
            "raise --ctx, or shorten the instruction or the summary"
        )
    return Room(text, part, final)


def record(
    engine: Engine, document: Document, request: Request, *, progress: Progress | None = None
) -> Record:
    """Summarize a document. What goes wrong with it stands in the record's `error`, one line.

    Raises Interrupted and KeyboardInterrupt only.
    """
    started = time.perf_counter()
    # one seed for all prompts of a document, or the record could not say which
    seed = request.settings.sampling().seed
    request = replace(request, settings=replace(request.settings, seed=seed))
    work = _Summary(engine, document, request, progress or _silent)
    summary, error = None, None
    try:
        summary = work.run()
    except Interrupted:
        raise
    except KnapspecError as problem:
        error = " ".join(str(problem).split())
    tally, last = work.tally, work.last
    cut = None if last is None or error is not None else form_notice(last)
    speculation = tally.speculation or engine.speculation
    return {
        "input": document.name,
        "sha256": document.sha256,
        "kind": document.kind,
        "summary": summary,
        "error": error,
        "finish_reason": None if last is None else last.finish_reason,
        "model": engine.name,
        "tokens": {
            "document": work.n_tokens,
            "chunks": work.n_chunks,
            "depth": work.depth,
            "prompts": tally.answers,
            "prompt": tally.prompt_tokens,
            "completion": tally.completion_tokens,
            "cached": tally.cached_tokens,
            "context": engine.n_ctx,
        },
        "timings": {
            "total_ms": round(1000.0 * (time.perf_counter() - started), 3),
            "prompt_ms": round(tally.prompt_ms, 3),
            "predicted_ms": round(tally.predicted_ms, 3),
            "draft_ms": round(tally.draft_ms, 3),
            "verify_ms": round(tally.verify_ms, 3),
            "plan_ms": round(tally.plan_ms, 3),
        },
        "speculation": {
            "state": speculation.state,
            "reason": speculation.reason,
            "policy": speculation.policy,
            "bit_exact": speculation.bit_exact,
            "drafted": tally.draft_n,
            "accepted": tally.draft_n_accepted,
            "looked_up": tally.proposed_n_accepted,  # of the accepted
        },
        "seed": seed,
        "notes": [*document.notes, *tally.notices, *([cut] if cut else [])],
    }


def failure(name: str, error: str) -> Record:
    """The record of an input that could not even be read; it has the keys of every record."""
    known: Record = {key: None for key in _KEYS}
    return {**known, "input": name, "error": " ".join(error.split()), "notes": []}


class _Summary:
    """The work on one document."""

    def __init__(
        self, engine: Engine, document: Document, request: Request, progress: Progress
    ) -> None:
        self.tally = Tally()
        self.last: Answer | None = None
        self.n_tokens = 0  # of the document's text
        self.n_chunks = 0
        self.depth = 0  # levels of summaries below the final one
        self._engine = engine
        self._text = document.text
        self._request = request
        self._progress = progress
        self._room: Room | None = None

    def run(self) -> str:
        self._progress(0.0, "reading")
        engine = self._engine
        self._room = room(engine, self._request)
        self.n_tokens = self._count(self._text)
        whole = Whole(self._text)
        if self.n_tokens <= self._room.text and self._fits(whole, self._room.final):
            self.n_chunks = 1
            return self._ask(whole, self._room.final, "", (0.0, 1.0))
        chunks = self._chunks(self._room.text)
        self.n_chunks = len(chunks)
        summaries = []
        # the final summary takes about as long as a part's
        steps = len(chunks) + 1
        for i, chunk in enumerate(chunks):
            part = Part(chunk, i + 1, len(chunks))
            what = f"part {i + 1} of {len(chunks)}"
            within = (i / steps, (i + 1) / steps)
            summary = self._ask(part, self._room.part, what, within, optional=True)
            summaries.append(self._shorter(summary, chunk.strip()))
        return self._combine(self._given(summaries))

    def _given(self, summaries: Sequence[str]) -> list[str]:
        """Without empty ones, which a model may give of a part that says nothing."""
        given = [summary for summary in summaries if summary]
        if not given:
            raise ModelError(f"{self._engine.name} gave no summary of any part")
        return given

    def _combine(self, summaries: list[str]) -> str:
        """The final summary. Each turn leaves fewer texts, so that it ends."""
        assert self._room is not None
        self.depth = 1
        begin = self.n_chunks / (self.n_chunks + 1)
        while not self._fits(final := Final(_joined(summaries)), self._room.final):
            self.depth += 1
            groups = self._groups(summaries)
            if len(groups) == len(summaries):
                # by measure two always fit, but text may take more tokens than it was made of
                raise ContextError(
                    f"the context of {self._engine.n_ctx} tokens is too small to combine the "
                    "summaries of the parts; raise --ctx or ask for fewer words"
                )
            combined = []
            for i, group in enumerate(groups):
                text = _joined(group)
                if len(group) > 1:
                    what = f"combining, {i + 1} of {len(groups)}"
                    # how many levels there will be is not known
                    end = begin + 0.5 * (1.0 - begin) / len(groups)
                    summary = self._ask(
                        Merge(text), self._room.part, what, (begin, end), optional=True
                    )
                    begin = end
                    text = self._shorter(summary, text)
                combined.append(text)
            summaries = self._given(combined)
        return self._ask(final, self._room.final, "final summary", (begin, 1.0))

    def _shorter(self, summary: str, text: str) -> str:
        """What is combined in place of a text: never more than the text itself."""
        return summary if self._count(summary) < self._count(text) else text

    def _groups(self, summaries: Sequence[str]) -> list[list[str]]:
        """Neighbours that fit into one prompt together; about even, so that each counts alike."""
        assert self._room is not None
        limit = self._room.part

        def fits(group: Sequence[str]) -> bool:
            return len(group) == 1 or self._fits(Merge(_joined(group)), limit)

        groups: list[list[str]] = [[]]
        for summary in summaries:
            if groups[-1] and not fits([*groups[-1], summary]):
                groups.append([])
            groups[-1].append(summary)
        n = len(groups)
        borders = [i * len(summaries) // n for i in range(n + 1)]
        even = [list(summaries[a:b]) for a, b in zip(borders, borders[1:], strict=False)]
        return even if all(map(fits, even)) else groups

    # -- asking

    def _chunks(self, max_tokens: int) -> list[str]:
        """Parts that fit, as prompts; the tokenizer may merge otherwise within a prompt."""
        assert self._room is not None
        while True:
            chunks = split(self._text, self._engine.vocabulary, max_tokens)
            chunks = [chunk for chunk in chunks if chunk.strip()]
            n = len(chunks)
            excess = max(
                self._excess(Part(chunk, i + 1, n), self._room.part)
                for i, chunk in enumerate(chunks)
            )
            if excess <= 0:
                return chunks
            max_tokens -= excess
            if max_tokens < _MIN_TEXT_TOKENS // 2:
                raise ContextError(
                    f"the context of {self._engine.n_ctx} tokens is too small for this document; "
                    "raise --ctx"
                )

    def _ask(
        self,
        task: Task,
        max_tokens: int,
        what: str,
        within: tuple[float, float],
        *,
        optional: bool = False,
    ) -> str:
        """One answer, which takes the document from one share done to another (`within`). An empty
        one is an error unless it is `optional`."""
        begin, end = within

        def prompt_progress(stage: str, share: float | None) -> None:
            # reading takes about as long as writing
            self._progress(begin + 0.5 * (share or 0.0) * (end - begin), what)

        prompt_progress("prompt", 0.0)
        settings = replace(self._request.settings, max_tokens=max_tokens)
        if not task.is_final:
            # the form that was asked for is that of the final summary
            settings = replace(settings, grammar=None, json_schema=None)
        messages = self._request.messages(task)
        # only in here: Ctrl-C has to end what is computed in Python, such as a split, at once
        with self._engine.interruptible():
            answer = self._engine.chat(messages, settings, progress=prompt_progress)
            self.last = answer
            with answer:
                for n, _ in enumerate(answer, start=1):
                    written = min(1.0, n / max_tokens)
                    self._progress(begin + (0.5 + 0.5 * written) * (end - begin), what)
        self._engine.check_interrupted()
        self.tally.add(answer)
        text = _REASONING.sub("", answer.text).strip()
        if not text and not optional:
            cut = answer.finish_reason == "length"
            raise ModelError(
                f"{self._engine.name} gave no summary"
                + (f" within {max_tokens} tokens; raise --max-tokens" if cut else "")
            )
        return text

    def _fits(self, task: Task, answer_tokens: int) -> bool:
        return self._excess(task, answer_tokens) <= 0

    def _excess(self, task: Task, answer_tokens: int) -> int:
        """Tokens of prompt and answer beyond the context; at most 0 where they fit."""
        used = _n_tokens(self._engine, self._request, task)
        return used + answer_tokens - self._engine.n_ctx

    def _count(self, text: str) -> int:
        return len(self._engine.vocabulary.tokenize(text, parse_special=False))


def _n_tokens(engine: Engine, request: Request, task: Task) -> int:
    """Of the whole prompt, as the model gets it."""
    return len(engine.require_template().apply(request.messages(task)).tokens)


def _joined(summaries: Sequence[str]) -> str:
    return "\n\n".join(summaries)


def _silent(share: float, what: str) -> None:
    pass
