"""The `chat` command: a conversation with history, and its slash commands.

Knows neither keyboard nor screen. The KV cache is reused between turns by the session below, which
keeps whatever prefix the next prompt shares with the last one.
"""

from __future__ import annotations

import dataclasses
import shlex
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..engine import Answer, Engine, Progress, Settings, TextEvent
from ..errors import ContextError, UsageError
from ..records import Sampling
from ..sampling import OFF, PRESETS, VALUES, differences, parse_bias
from ..text.grammar import read_grammar, read_schema
from ..text.templates import Message
from .summary import form_notice, statistics_table

_OTHER_NAMES = (
    "preset", "logit-bias", "grammar", "json-schema", "seed", "max-tokens", "stop", "spec",
)  # fmt: skip
# as on the command line
SETTING_NAMES = (*(value.name for value in reversed(VALUES.values())), *_OTHER_NAMES)
_FIELDS = {value.name: name for name, value in VALUES.items()}

_NAME_LINES = textwrap.fill(
    ", ".join(SETTING_NAMES),
    80,
    initial_indent=" " * 17,
    subsequent_indent=" " * 17,
    break_on_hyphens=False,
)
HELP = f"""\
/help            this list
/clear           forget the conversation (the system prompt stays)
/set             show the settings;  /set NAME VALUE changes one:
{_NAME_LINES}
                 the names are those of the command line; off switches one off
/set preset NAME sets all numbers of the sampler: {", ".join(PRESETS)}
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
        if (cut := form_notice(self.last)) is not None:
            found.append(cut)
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
        return run(_arguments(name, rest))

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
            return CommandResult(_table(self._setting_rows(self.settings.sampling())))
        if len(arguments) < 2:
            raise UsageError(f"/set {arguments[0]}: give a value, as in /set temp 0.7")
        name, values = arguments[0].lower().replace("_", "-"), arguments[1:]
        name = "temp" if name == "temperature" else name
        if name not in SETTING_NAMES:
            raise UsageError(f"there is no setting {name}; give {_listed(SETTING_NAMES)}")
        if name not in ("stop", "logit-bias") and len(values) > 1:
            raise UsageError(f"/set {name} takes one value")
        if name == "spec":
            state = self.engine.set_speculation(values[0], progress=self._progress)
            return CommandResult(f"speculation {state.state}: {state.reason}")
        changed = dataclasses.replace(self.settings, **_changes(name, values))
        # what is out of range, or not for this model, is said now and changes nothing
        sampling = changed.sampling()
        self.engine.backend.check_sampling(sampling)
        self.settings = changed
        notices = [n for n in changed.notices() if n not in self._told]
        self._told.update(notices)
        return CommandResult("\n".join((_table(self._setting_rows(sampling)), *notices)))

    def _setting_rows(self, sampling: Sampling) -> list[tuple[str, str]]:
        now = self.settings
        spec = self.engine.speculation
        rows = [("preset", now.preset), *differences(sampling)]
        if now.grammar is not None:
            rows.append(("grammar", _excerpt(now.grammar)))
        if now.json_schema is not None:
            rows.append(("json-schema", _excerpt(str(now.json_schema))))
        return [
            *rows,
            ("seed", "random" if now.seed in (None, -1) else str(now.seed)),
            ("max-tokens", "none" if now.max_tokens is None else str(now.max_tokens)),
            ("stop", " ".join(shlex.quote(s) for s in now.stop) or "none"),
            ("spec", f"{spec.state}: {spec.reason}"),
            ("system", self._system or "none"),
            ("context", f"{self.engine.n_ctx} tokens"),
        ]


def _arguments(name: str, rest: str) -> list[str]:
    """The words behind a command; a JSON schema is one, quotation marks and all."""
    setting, _, value = rest.strip().partition(" ")
    if setting == "json-schema" and value.lstrip()[:1] == "{":
        return [setting, value.strip()]
    try:
        return shlex.split(rest)
    except ValueError:
        raise UsageError(f"{name}: a quotation mark is missing") from None


def _changes(name: str, values: list[str]) -> dict[str, Any]:
    """The fields of Settings that `/set NAME VALUE...` changes."""
    value = values[0]
    off = value.lower() in ("none", "off")
    if name in _FIELDS:
        read = _whole if VALUES[_FIELDS[name]].whole else _number
        return {_FIELDS[name]: OFF[_FIELDS[name]] if off else read(name, value)}
    if name == "preset":
        return {"preset": value, **dict.fromkeys(VALUES), "temperature_first": None}
    if name == "logit-bias":
        return {"logit_bias": None if off else dict(map(parse_bias, values))}
    if name == "grammar":  # in place of a schema: only one of them can hold
        return {"grammar": None if off else read_grammar(value), "json_schema": None}
    if name == "json-schema":
        return {"json_schema": None if off else read_schema(value), "grammar": None}
    if name == "stop":
        return {"stop": () if off or values == ["-1"] else tuple(values)}
    field = {"seed": "seed", "max-tokens": "max_tokens"}[name]
    return {field: None if off or value == "-1" else _whole(name, value)}


def _excerpt(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 60 else f"{line[:57]}..."


def _listed(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"


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
