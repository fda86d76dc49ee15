"""The slash commands of a chat: what they are called, take and say."""

from __future__ import annotations

import dataclasses
import os
import shlex
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config import OVERFLOWS
from ..errors import UsageError
from ..folders import expanded
from ..records import Sampling
from ..sampling import OFF, PRESETS, VALUES, differences, parse_bias
from ..text.documents import find, read
from ..text.grammar import read_grammar, read_schema
from . import conversation_file
from .conversation import Conversation
from .summary import counted, statistics_table

_OTHER_NAMES = (
    "preset", "logit-bias", "grammar", "json-schema", "seed", "max-tokens", "stop", "spec",
    "overflow", "think",
)  # fmt: skip
# as on the command line
SETTING_NAMES = (*(value.name for value in reversed(VALUES.values())), *_OTHER_NAMES)
# commands that take the name of a file
FILE_COMMANDS = ("/load", "/read", "/save")
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
/regen           answer the last question again
/edit            change the last question, and have it answered anew;
                 /edit TEXT takes TEXT in its place
/system          show the system prompt;  /system TEXT sets it, /system off
                 removes it, for the whole conversation
/read FILE       put a document in front of the next message;  /read shows what
                 was read, /read off takes it back
/set             show the settings;  /set NAME VALUE changes one:
{_NAME_LINES}
                 the names are those of the command line; off switches one off
/set preset NAME sets all numbers of the sampler: {", ".join(PRESETS)}
/stats           statistics of the last answer
/save FILE       save the conversation as JSON
/load FILE       go on with a saved one
/exit            leave (so does Ctrl-D)
Ctrl-C stops an answer; what was said so far stays in the conversation.
Alt-Enter starts a new line, Ctrl-R searches what was typed before, Ctrl-X
Ctrl-E opens an editor. A message that starts with / is written with //."""


@dataclass(frozen=True)
class CommandResult:
    """What a slash command has to say, and what is to happen next."""

    text: str = ""
    leave: bool = False  # the conversation ends
    again: bool = False  # the last question is answered anew,
    question: str | None = None  # with this text in its place,
    opened: bool = False  # which is opened at the prompt before


class Commands:
    """The slash commands of one conversation."""

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation
        self._saved_as: Path | None = conversation.file
        self._commands: dict[str, Callable[[str], CommandResult]] = {
            "/help": self._help,
            "/clear": self._clear,
            "/regen": self._regen,
            "/edit": self._edit,
            "/system": self._system,
            "/read": self._read,
            "/set": self._set,
            "/stats": self._stats,
            "/save": self._save,
            "/load": self._load,
            "/exit": self._exit,
            "/quit": self._exit,
        }

    @property
    def names(self) -> list[str]:
        return list(self._commands)

    def run(self, line: str) -> CommandResult | str:
        """Run a slash command; a line that is none comes back as the text to say.

        Raises KnapspecError, one line, and then nothing has changed.
        """
        if line.startswith("//"):
            return line[1:]
        if not line.startswith("/"):
            return line
        name, *rest = line.strip().split(None, 1)
        run = self._commands.get(name)
        if run is None:
            raise UsageError(
                f"there is no command {name}; /help lists them, and // writes a message that "
                "starts with /"
            )
        return run("".join(rest).strip())

    def _help(self, rest: str) -> CommandResult:
        return CommandResult(HELP)

    def _exit(self, rest: str) -> CommandResult:
        return CommandResult(leave=True)

    def _clear(self, rest: str) -> CommandResult:
        file = self._conversation.file
        self._conversation.clear()
        if file is None:
            return CommandResult("the conversation is empty")
        return CommandResult(
            f"the conversation is empty; {file} keeps the one before and is not written any more"
        )

    def _stats(self, rest: str) -> CommandResult:
        if self._conversation.last is None:
            return CommandResult("nothing has been answered yet")
        return CommandResult(_table(statistics_table(self._conversation.last)))

    # -- the last turn

    def _regen(self, rest: str) -> CommandResult:
        self._conversation.last_turn()
        return CommandResult(again=True)

    def _edit(self, rest: str) -> CommandResult:
        turn = self._conversation.last_turn()
        if rest:
            return CommandResult(again=True, question=rest)
        return CommandResult(again=True, question=turn.question, opened=True)

    # -- what goes along with the messages

    def _system(self, rest: str) -> CommandResult:
        conversation = self._conversation
        if not rest:
            return CommandResult(conversation.system or "there is no system prompt")
        text = None if rest.lower() in ("off", "none") else rest
        if text == conversation.system:
            return CommandResult("the system prompt is that already")
        notices = conversation.set_system(text)
        done = "the system prompt is removed" if text is None else "the system prompt is set"
        n = len(conversation.turns)
        if n:
            tokens = conversation.count(conversation.turns)
            done += (
                f"; it holds for the whole conversation: what was said ({counted(n, 'turn')}, "
                f"{tokens:,} tokens) stays and is read again with the next message"
            )
        return CommandResult("\n".join((done, *notices)))

    def _read(self, rest: str) -> CommandResult:
        conversation = self._conversation
        if not rest:
            rows = [(d.name, f"{d.n_tokens:,} tokens") for d in conversation.documents]
            return CommandResult(_table(rows) if rows else "nothing was read for the next message")
        if rest.lower() == "off":
            conversation.detach()
            return CommandResult("nothing goes in front of the next message")
        found = find([str(_path("/read", rest))])
        if found.problems:
            raise UsageError(found.problems[0][1])
        if len(found.sources) != 1 or found.sources[0].path is None:
            raise UsageError(f"/read takes one file at a time; {rest} stands for others")
        document = read(found.sources[0])
        attached, n_tokens = conversation.attach(found.sources[0].path.name, document.text)
        n_ctx = conversation.engine.n_ctx
        line = (
            f"{attached.name}: {attached.n_tokens:,} tokens, {attached.n_tokens / n_ctx:.0%} of "
            f"the context of {n_ctx:,}; goes in front of your next message, "
            f"{n_ctx - n_tokens:,} tokens are left for it and the answer"
        )
        return CommandResult("\n".join((line, *(f"note: {note}" for note in document.notes))))

    # -- files

    def _save(self, rest: str) -> CommandResult:
        path = _path("/save", rest) if rest else self._saved_as
        if path is None:
            raise UsageError("/save: give the name of a file, as in /save talk.json")
        self._conversation.save(path)
        self._saved_as = path
        return CommandResult(f"saved the conversation as {path}")

    def _load(self, rest: str) -> CommandResult:
        if not rest:
            raise UsageError("/load: give the name of a file, as in /load talk.json")
        conversation = self._conversation
        path = _path("/load", rest)
        n_before = len(conversation.turns)
        notices = conversation.restore(conversation_file.load(path))
        lines = [loaded_line(path, conversation)]
        if n_before:
            lines.append(f"it takes the place of the {counted(n_before, 'turn')} before")
        if conversation.file is not None and conversation.file != path:
            lines.append(f"{conversation.file} is not written any more")
            conversation.file = None
        self._saved_as = path
        return CommandResult("\n".join((*lines, *notices)))

    # -- settings

    def _set(self, rest: str) -> CommandResult:
        conversation = self._conversation
        arguments = _arguments("/set", rest)
        if not arguments:
            return CommandResult(_table(self._setting_rows(conversation.settings.sampling())))
        if len(arguments) < 2:
            raise UsageError(f"/set {arguments[0]}: give a value, as in /set temp 0.7")
        name, values = arguments[0].lower().replace("_", "-"), arguments[1:]
        name = "temp" if name == "temperature" else name
        if name not in SETTING_NAMES:
            raise UsageError(f"there is no setting {name}; give {_listed(SETTING_NAMES)}")
        if name not in ("stop", "logit-bias") and len(values) > 1:
            raise UsageError(f"/set {name} takes one value")
        if name == "spec":
            state = conversation.engine.set_speculation(values[0], progress=conversation.progress)
            return CommandResult(f"speculation {state}")
        notices: list[str] = []
        if name == "overflow":
            if values[0] not in OVERFLOWS:
                raise UsageError(f"/set overflow: give {' or '.join(OVERFLOWS)}")
            conversation.overflow = values[0]
        else:
            changed = dataclasses.replace(conversation.settings, **_changes(name, values))
            # what is out of range, or not for this model, is said now and changes nothing
            conversation.check_settings(changed)
            conversation.settings = changed
            notices = conversation.once(changed.notices())
        rows = self._setting_rows(conversation.settings.sampling())
        return CommandResult("\n".join((_table(rows), *notices)))

    def _setting_rows(self, sampling: Sampling) -> list[tuple[str, str]]:
        conversation = self._conversation
        now = conversation.settings
        spec = conversation.engine.speculation
        rows = [("preset", now.preset), *differences(sampling)]
        if now.grammar is not None:
            rows.append(("grammar", _excerpt(now.grammar)))
        if now.json_schema is not None:
            rows.append(("json-schema", _excerpt(str(now.json_schema))))
        if now.think is not None:
            rows.append(("think", "on" if now.think else "off"))
        return [
            *rows,
            ("seed", "random" if now.seed in (None, -1) else str(now.seed)),
            ("max-tokens", "none" if now.max_tokens is None else str(now.max_tokens)),
            ("stop", " ".join(shlex.quote(s) for s in now.stop) or "none"),
            ("spec", str(spec)),
            ("system", _excerpt(conversation.system or "none")),
            ("overflow", conversation.overflow),
            ("context", f"{conversation.engine.n_ctx} tokens"),
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
    if name == "think":
        return {"think": _switch(name, value)}
    if name == "stop":
        return {"stop": () if off or values == ["-1"] else tuple(values)}
    field = {"seed": "seed", "max-tokens": "max_tokens"}[name]
    return {field: None if off or value == "-1" else _whole(name, value)}


def loaded_line(path: Path, conversation: Conversation) -> str:
    """What was loaded, for people."""
    parts = [f"loaded {counted(len(conversation.turns), 'turn')} from {path}"]
    if conversation.turns:
        parts.append(f"the last question: {_excerpt(conversation.turns[-1].question)}")
    if conversation.system:
        parts.append(f"system prompt: {_excerpt(conversation.system)}")
    return "; ".join(parts)


def _path(command: str, rest: str) -> Path:
    """A file's name as people type it: as it is, within quotation marks, or with the blanks that a
    terminal escapes where a file is dropped on it."""
    name = rest
    if len(name) > 1 and name[0] == name[-1] and name[0] in "\"'":
        name = name[1:-1]
    elif os.sep == "/" and "\\" in name and not os.path.lexists(os.path.expanduser(name)):
        name = " ".join(_arguments(command, name))
    return expanded(name)


def _switch(name: str, value: str) -> bool | None:
    words = {"on": True, "off": False, "auto": None}
    if value.lower() not in words:
        raise UsageError(f"/set {name}: give {_listed(tuple(words))}")
    return words[value.lower()]


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
