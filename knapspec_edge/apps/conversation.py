"""A conversation with a model: its turns, and what of them still fits.

Knows neither keyboard nor screen, nor how commands are spelled. The KV cache is reused between
turns by the session below, which keeps whatever prefix the next prompt shares with the last one; so
asking again, editing and dropping turns need no more than the messages to be right.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..config import OVERFLOWS
from ..engine import Answer, Engine, Settings, TextEvent
from ..errors import ContextError, Interrupted, KnapspecError, UsageError
from ..text import thoughts
from ..text.templates import Message
from . import conversation_file
from .conversation_file import Saved
from .summary import form_notice

# Reports how far something slow is: stage, share done (None: unknown), and more about it in words.
Progress = Callable[[str, "float | None", str], None]


@dataclass(frozen=True)
class Document:
    """A text that was read into a message. `name` is what it is called there."""

    name: str
    text: str
    n_tokens: int


@dataclass(frozen=True)
class Turn:
    """A question and its answer, thoughts included."""

    question: str
    answer: str
    documents: tuple[Document, ...] = ()  # in front of the question

    @property
    def message(self) -> Message:
        """The question as it is sent."""
        parts = [f"{document.name}:\n\n{document.text.strip()}" for document in self.documents]
        return {"role": "user", "content": "\n\n".join([*parts, self.question])}

    @property
    def messages(self) -> list[Message]:
        return [self.message, {"role": "assistant", "content": self.answer}]


class Conversation:
    """Turns so far, and the settings of the answers to come.

    A turn enters the history when its answer has ended or was stopped with some text; a turn that
    failed leaves the history as it was. `overflow`: what happens where the context is full (of
    config.OVERFLOWS). `file`: where `keep` saves the conversation to; None: nowhere.
    """

    def __init__(
        self,
        engine: Engine,
        settings: Settings | None = None,
        *,
        system: str | None = None,
        overflow: str = OVERFLOWS[0],
        file: Path | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Raises ModelError for a model that cannot chat, UsageError for settings that its chat
        template has no place for."""
        template = engine.require_template()
        self.engine = engine
        self.settings = settings or Settings()
        self.overflow = overflow
        self.last: Answer | None = None
        self.file = file
        self._template = template
        self._on_progress = progress
        self._turns: list[Turn] = []
        self._dropped: list[Turn] = []  # for want of room; files have them still
        self._documents: list[Document] = []  # for the next message
        self._system = system or None
        self._told: set[str] = set()  # notices that are given once
        self._news: list[str] = []  # to be told after the answer
        self._changed = False  # since the file was written
        self.check_settings(self.settings)

    @property
    def messages(self) -> list[Message]:
        """The conversation as it would be sent, a copy."""
        return self._sent(self._turns)

    @property
    def turns(self) -> Sequence[Turn]:
        return tuple(self._turns)

    @property
    def documents(self) -> Sequence[Document]:
        """What was read for the next message."""
        return tuple(self._documents)

    @property
    def system(self) -> str | None:
        return self._system

    def progress(self, stage: str, share: float | None) -> None:
        """Passes on what the engine reports, with the tokens of a prompt counted."""
        if self._on_progress is None:
            return
        detail = ""
        if stage == "prompt" and share is not None and self.last is not None:
            total = self.last.stats.prompt_tokens - self.last.stats.cached_tokens
            detail = f"{round(share * total):,} of {total:,} tokens"
        self._on_progress(stage, share, detail)

    # -- talking

    def say(self, text: str) -> Generator[TextEvent, None, None]:
        """Ask, and yield the events of the answer; `last` is the answer meanwhile.

        Raises ContextError with what to do where the conversation no longer fits, and Interrupted
        after an answer was stopped, with its text kept.
        """
        yield from self._ask(self._turns, Turn(text, "", tuple(self._documents)))

    def again(self, question: str | None = None) -> Generator[TextEvent, None, None]:
        """Ask the last question again, or another one in its place, with what was read for it.

        The turn is replaced when the new answer has ended or was stopped with some text; after an
        error the old one stays. Raises as `say`, and UsageError where nothing was answered yet.
        """
        old = self.last_turn()
        asked = old if question is None else dataclasses.replace(old, question=question)
        yield from self._ask(self._turns[:-1], asked, replaced=old)
        if question is None and self._turns[-1].answer == old.answer:
            self._news.append(self._why_the_same())

    def last_turn(self) -> Turn:
        """Raises UsageError where nothing was answered yet."""
        if not self._turns:
            raise UsageError("nothing has been answered yet")
        return self._turns[-1]

    def _ask(
        self, kept: list[Turn], asked: Turn, *, replaced: Turn | None = None
    ) -> Iterator[TextEvent]:
        fresh_documents = replaced is None
        all_kept = kept
        kept, dropped = self._fitting(kept, asked)
        try:
            answer = self.engine.chat(
                [*self._sent(kept), asked.message], self.settings, progress=self.progress
            )
        except ContextError:
            raise self._full(kept, asked) from None
        self.last = answer
        failed = False
        try:
            yield from answer
        except Interrupted:
            raise
        except KnapspecError:
            failed = True
            raise
        finally:
            # An end, a stop, an error, or the reader leaving: what was said stays.
            answer.close()
            said = bool(answer.text) or answer.finish_reason in ("stop", "length")
            if said and not (failed and replaced is not None):
                text = thoughts.closed(answer.opening + answer.text)
                self._turns = [*kept, dataclasses.replace(asked, answer=text)]
                self._changed = True
                if fresh_documents:
                    self._documents.clear()
                if dropped:
                    self._dropped += all_kept[: len(all_kept) - len(kept)]
                    self._news.append(dropped)

    def stopped(self) -> str:
        """What to say after an answer was stopped."""
        if self.last is None or self.last.text:
            return "stopped"
        read = "; what was read stays for the next message" if self._documents else ""
        return f"stopped before an answer began; the question is not kept, Up brings it back{read}"

    def _why_the_same(self) -> str:
        if self.last is not None and self.last.sampling.temperature == 0.0:
            return "at temperature 0 the answer stays the same; /set temp 0.8 lets it vary"
        if self.settings.seed not in (None, -1):
            return (
                f"the seed {self.settings.seed} gives the same answer again; /set seed off frees it"
            )
        return "the answer came out the same"

    # -- the context

    def count(self, turns: Sequence[Turn], asked: Turn | None = None) -> int:
        """Tokens of a prompt with these turns, the question last."""
        messages = [*self._sent(turns), *([asked.message] if asked is not None else [])]
        if not messages:
            return 0
        return len(self._template.apply(messages, think=self.settings.think).tokens)

    def _sent(self, turns: Sequence[Turn]) -> list[Message]:
        system = [{"role": "system", "content": self._system}] if self._system else []
        return [*system, *(message for turn in turns for message in turn.messages)]

    def _fitting(self, kept: list[Turn], asked: Turn) -> tuple[list[Turn], str]:
        """The turns to send, and what to say about those that are left out."""
        if self.overflow == OVERFLOWS[0] or not kept:
            return kept, ""
        n_ctx, config = self.engine.n_ctx, self.engine.config
        longest = self.settings.max_tokens or n_ctx
        before = self.count(kept, asked)
        if before + min(longest, int(config.overflow_min_room_share * n_ctx)) < n_ctx:
            return kept, ""
        room = min(longest, int(config.overflow_room_share * n_ctx))
        n_dropped = bisect_left(
            range(len(kept)), True, key=lambda n: self.count(kept[n:], asked) + room < n_ctx
        )
        left = before - self.count(kept[n_dropped:], asked)
        what = "the oldest turn" if n_dropped == 1 else f"the {n_dropped} oldest turns"
        stays = "; the system prompt stays" if self._system else ""
        return kept[n_dropped:], (
            f"the conversation of {before:,} tokens left too little of the context of {n_ctx:,}: "
            f"dropped {what} ({left:,} tokens){stays}"
        )

    def _full(self, kept: list[Turn], asked: Turn) -> ContextError:
        """What to say where a prompt does not fit, whatever was dropped."""
        n, n_ctx = self.count(kept, asked), self.engine.n_ctx
        alone = self.count([], asked)
        files = ", /read off takes the files back" if asked.documents else ""
        if alone >= n_ctx:
            return ContextError(
                f"the message is too long: the prompt has {alone:,} tokens and leaves no room for "
                f"an answer in the context of {n_ctx:,}; shorten it, or --ctx N makes room for "
                f"more{files}"
            )
        return ContextError(
            f"the conversation is full: with this message it has {n:,} tokens and leaves no room "
            f"for an answer in the context of {n_ctx:,}; /clear starts afresh, --ctx N makes room "
            f"for more, /set overflow drop forgets the oldest turns{files}"
        )

    def notices(self) -> list[str]:
        """What the user should be told after the latest answer."""
        found, self._news = self._news, []
        if self.last is None:
            return found
        found += self.once(self.last.notices)
        if self.last.context_full:
            goes_on = (
                "the oldest turns make room for the next message"
                if self.overflow == OVERFLOWS[1] and len(self._turns) > 1
                else "/clear starts afresh, --ctx N makes room for more, /set overflow drop "
                "forgets the oldest turns"
            )
            stats = self.last.stats
            found.append(
                f"the context of {self.last.n_ctx:,} tokens is full and the answer was cut: the "
                f"conversation has {stats.prompt_tokens:,}, the answer "
                f"{stats.completion_tokens:,}; {goes_on}"
            )
        if (cut := form_notice(self.last)) is not None:
            found.append(cut)
        return found

    def once(self, notices: Sequence[str]) -> list[str]:
        """Those that were not given before."""
        new = [notice for notice in notices if notice not in self._told]
        self._told.update(new)
        return new

    # -- changing it

    def clear(self) -> None:
        """Forget the turns and what was read. A file that the conversation was kept in stays as it
        is and is not written any more."""
        self._turns, self._dropped, self._documents, self._news = [], [], [], []
        self.last = None
        self.file = None

    def set_system(self, text: str | None) -> tuple[str, ...]:
        """Another system prompt, for the whole conversation; what has to be said about it.

        Raises ContextError where the conversation does not fit with it, ModelError where the chat
        template takes none at all; then the one before stays.
        """
        before, self._system = self._system, text or None
        try:
            rendered = self._template.apply(
                [*self.messages, Turn("?", "").message], think=self.settings.think
            )
            self._require_room(len(rendered.tokens), "with this system prompt the conversation")
        except BaseException:  # Ctrl-C, too
            self._system = before
            raise
        self._changed = True
        return tuple(self.once(rendered.notices))

    def attach(self, name: str, text: str) -> tuple[Document, int]:
        """Put a text in front of the next message; it, and the tokens of the conversation with it.

        Raises ContextError, with both numbers, where it does not fit.
        """
        document = Document(
            name, text, len(self.engine.vocabulary.tokenize(text, parse_special=False))
        )
        together = [*self._documents, document]
        n_ctx = self.engine.n_ctx
        what = f"{name} has {document.n_tokens:,} tokens: with it the conversation"
        # alone too long: rendering could only take its time to say the same
        n = document.n_tokens
        if n < n_ctx:
            kept = [] if self.overflow == OVERFLOWS[1] else self._turns
            n = self.count(kept, Turn("", "", tuple(together)))
        self._require_room(n, what)
        self._documents = together
        return document, n

    def detach(self) -> None:
        """Take back what was read for the next message."""
        self._documents = []

    def _require_room(self, n_tokens: int, what: str) -> None:
        if n_tokens >= self.engine.n_ctx:
            raise ContextError(
                f"{what} has {n_tokens:,} tokens, which leaves no room for an answer in the "
                f"context of {self.engine.n_ctx:,}; --ctx N makes room for more"
            )

    def check_settings(self, settings: Settings) -> None:
        """Raises UsageError, one line, for what is out of range or not for this model."""
        self.engine.backend.check_sampling(settings.sampling())
        self._template.check_think(settings.think)

    # -- files

    def save(self, path: Path) -> None:
        """Write all of it, dropped turns included.

        Raises UsageError where something else is there, OutputError where it cannot be written.
        """
        conversation_file.save(
            path,
            Saved(
                tuple(m for turn in [*self._dropped, *self._turns] for m in turn.messages),
                self._system,
                self.settings,
                self.overflow,
                self.engine.name,
                self.engine.fingerprint(),
            ),
        )

    def keep(self) -> None:
        """Save it to its file, if it has one and something was said since. Raises as `save`."""
        if self.file is not None and self._changed:
            self.save(self.file)
            self._changed = False

    def restore(self, saved: Saved) -> list[str]:
        """Go on with a saved conversation in place of this one; what has to be said about it.

        Raises UsageError, ModelError or ContextError for what cannot be used with this model; then
        everything stays as it was.
        """
        self.check_settings(saved.settings)
        turns = [
            Turn(question, answer) for question, answer in conversation_file.turns(saved.messages)
        ]
        before = self._turns, self._system, self.settings
        self._turns, self._system, self.settings = turns, saved.system, saved.settings
        try:
            n_tokens = self.count(turns, Turn("?", ""))
        except BaseException:  # Ctrl-C, too
            self._turns, self._system, self.settings = before
            raise
        self._dropped, self._documents, self._news = [], [], []
        self.overflow = saved.overflow
        self.last = None
        found = []
        if saved.model_name and not self._is_by_this_model(saved):
            found.append(f"it was held with {saved.model_name}; now {self.engine.name} answers")
        if n_tokens >= self.engine.n_ctx and self.overflow == OVERFLOWS[0]:
            found.append(
                f"the conversation has {n_tokens:,} tokens and the context {self.engine.n_ctx:,}: "
                "--ctx N makes room for it, /set overflow drop forgets the oldest turns"
            )
        return found

    def _is_by_this_model(self, saved: Saved) -> bool:
        ours = self.engine.fingerprint()
        if ours and saved.fingerprint:
            return ours == saved.fingerprint
        return saved.model_name == self.engine.name
