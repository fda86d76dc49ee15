"""The `chat` command: a conversation with history, and its slash commands.

Knows neither keyboard nor screen. The KV cache is reused between turns by the session below, which
keeps whatever prefix the next prompt shares with the last one.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ..engine import Answer, Engine, Progress, Settings, TextEvent
from ..errors import ContextError, UsageError
from ..text.templates import Message
from .summary import statistics_table

HELP = """\
/help            this list
/clear           forget the conversation (the system prompt stays)
/set             show the settings;  /set NAME VALUE changes one:
                 temp, min-p, seed, max-tokens, stop, spec
/stats           statistics of the last answer
/exit            leave (so does Ctrl-D)
Ctrl-C stops an answer; what was said so far stays in the conversation.
Alt-Enter starts a new line. A message that starts with / is written with //."""


@dataclass(frozen=True)
class CommandResult:
    """What a slash command has to say, and whether the conversation ends."""

    text: str = ""
    leave: bool = False


class Conversation:
    """Messages so far, and the settings of the answers to come.

    A turn enters the history when its answer has ended or was stopped with some text; a turn that
    failed leaves the history as it was.
    """

    def __init__(
        self,
        engine: Engine,
        settings: Settings | None = None,
        *,
        system: str | None = None,
        progress: Progress | None = None,
    ) -> None:
        engine.require_template()
        self.engine = engine
        self.settings = settings or Settings()
        self.last: Answer | None = None
        self._progress = progress
        self._history: list[Message] = []
        self._system = system
        self._told: set[str] = set()  # notices are given once
        self._commands: dict[str, Callable[[list[str]], CommandResult]] = {
            "/help": self._help,
            "/clear": self._clear,
            "/set": self._set,
            "/stats": self._stats,
            "/exit": self._exit,
            "/quit": self._exit,
        }

    @property
    def messages(self) -> list[Message]:
        """The conversation as it would be sent, a copy."""
        system = [{"role": "system", "content": self._system}] if self._system else []
        return [*system, *(dict(message) for message in self._history)]

    @property
    def command_names(self) -> list[str]:
        return list(self._commands)

    # -- talking

    def say(self, text: str) -> Iterator[TextEvent]:
        """Ask, and yield the events of the answer; `last` is the answer meanwhile.

        Raises ContextError with what to do where the conversation no longer fits, and Interrupted
        after an answer was stopped, with its text kept.
        """
        question: Message = {"role": "user", "content": text}
        try:
            answer = self.engine.chat(
                [*self.messages, question], self.settings, progress=self._progress
            )
        except ContextError as error:
            if not self._history:
                raise
            raise ContextError(
                f"the conversation is full: {error}, or /clear to start afresh"
            ) from None
        self.last = answer
        try:
            yield from answer
        finally:
            # An end, a stop, an error, or the reader leaving: what was said stays.
            answer.close()
            if answer.text or answer.finish_reason in ("stop", "length"):
                self._history += [question, {"role": "assistant", "content": answer.text}]

    def notices(self) -> list[str]:
        """What the user should be told after the latest answer, each thing once."""
        if self.last is None:
            return []
        found = [n for n in self.last.notices if n not in self._told]
        self._told.update(found)
        if self.last.context_full:
            found.append(
                f"the context of {self.last.n_ctx} tokens is full and the answer was cut; /clear "
                "starts afresh, --ctx N makes room for more"
            )
        return found

    # -- commands

    def command(self, line: str) -> CommandResult | str:
        """Run a slash command; a line that is none comes back as the text to say."""
        if line.startswith("//"):
            return line[1:]
        if not line.startswith("/"):
            return line
        name, _, rest = line.strip().partition(" ")
        run = self._commands.get(name)
        if run is None:
            raise UsageError(
                f"there is no command {name}; /help lists them, and // writes a message that "
                "starts with /"
            )
        try:
            arguments = shlex.split(rest)
        except ValueError:
            raise UsageError(f"{name}: a quotation mark is missing") from None
        return run(arguments)

    def _help(self, arguments: list[str]) -> CommandResult:
        return CommandResult(HELP)

    def _exit(self, arguments: list[str]) -> CommandResult:
        return CommandResult(leave=True)

    def _clear(self, arguments: list[str]) -> CommandResult:
        self._history.clear()
        self.last = None
        return CommandResult("the conversation is empty")

    def _stats(self, arguments: list[str]) -> CommandResult:
        if self.last is None:
            return CommandResult("nothing has been answered yet")
        return CommandResult(_table(statistics_table(self.last)))

    def _set(self, arguments: list[str]) -> CommandResult:
        if not arguments:
            return CommandResult(_table(self._setting_rows()))
        if len(arguments) < 2:
            raise UsageError(f"/set {arguments[0]}: give a value, as in /set temp 0.7")
        name, values = arguments[0].lower(), arguments[1:]
        if name != "stop" and len(values) > 1:
            raise UsageError(f"/set {name} takes one value")
        value = values[0]
        none = value.lower() in ("none", "off", "-1")
        if name == "spec":
            state = self.engine.set_speculation(value, progress=self._progress)
            return CommandResult(f"speculation {state.state}: {state.reason}")
        if name in ("temp", "temperature"):
            changed = dataclasses.replace(self.settings, temperature=_number(name, value))
        elif name in ("min-p", "min_p"):
            changed = dataclasses.replace(self.settings, min_p=_number(name, value))
        elif name == "seed":
            changed = dataclasses.replace(self.settings, seed=None if none else _whole(name, value))
        elif name in ("max-tokens", "max_tokens"):
            changed = dataclasses.replace(
                self.settings, max_tokens=None if none else _whole(name, value)
            )
        elif name == "stop":
            changed = dataclasses.replace(self.settings, stop=() if none else tuple(values))
        else:
            raise UsageError(
                f"there is no setting {name}; give temp, min-p, seed, max-tokens, stop or spec"
            )
        changed.sampling()  # checks the ranges
        self.settings = changed
        return CommandResult(_table(self._setting_rows()))

    def _setting_rows(self) -> list[tuple[str, str]]:
        now = self.settings
        spec = self.engine.speculation
        return [
            ("temp", f"{now.temperature:g}"),
            ("min-p", f"{now.min_p:g}"),
            ("seed", "random" if now.seed in (None, -1) else str(now.seed)),
            ("max-tokens", "none" if now.max_tokens is None else str(now.max_tokens)),
            ("stop", " ".join(shlex.quote(s) for s in now.stop) or "none"),
            ("spec", f"{spec.state}: {spec.reason}"),
            ("system", self._system or "none"),
            ("context", f"{self.engine.n_ctx} tokens"),
        ]


def _table(rows: list[tuple[str, str]]) -> str:
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def _number(name: str, value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise UsageError(f"/set {name}: {value!r} is not a number") from None


def _whole(name: str, value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise UsageError(f"/set {name}: {value!r} is not a whole number") from None
