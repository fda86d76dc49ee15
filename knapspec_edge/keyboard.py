"""Reading messages at the keyboard: editing, completion, and the history of what was typed.

Importing it takes a moment; it is imported only where somebody sits there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.input.typeahead import get_typeahead, store_typeahead
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.keys import Keys
from prompt_toolkit.output import create_output

_SIGN = "> "
_HISTORY_BYTES = 1 << 20  # beyond it the older half goes
_ENTRY_BYTES = 64 << 10  # a longer message is remembered while the chat lasts only
_LOCK_SECONDS = 2.0  # writing takes milliseconds


class KeptHistory(FileHistory):
    """What was typed, in a file that only its owner can read and that several chats share.

    A file that cannot be read or written is none: `problem` says why, and the chat goes on.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self.problem: str | None = None
        self._path = path
        self._lock = FileLock(path.with_name(f".{path.name}.lock"), timeout=_LOCK_SECONDS)
        try:
            if path.exists() and not path.is_file():  # /dev/null is not ours to change
                raise OSError("it is not a file")
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600))
            if os.name != "nt":
                path.chmod(0o600)
            self._shorten()
        except (OSError, ValueError) as error:
            self._give_up(error)

    def load_history_strings(self) -> Iterable[str]:
        try:
            return list(super().load_history_strings())
        except (OSError, ValueError):
            return []

    def store_string(self, string: str) -> None:
        lines = "".join(f"+{line}\n" for line in string.split("\n"))
        entry = f"\n# {datetime.now()}\n{lines}".encode("utf-8", "replace")
        if self.problem is not None or len(entry) > _ENTRY_BYTES:
            return
        try:
            # the lock, as a long entry may be written in pieces
            with self._lock, open(self._path, "ab", opener=_private) as file:
                file.write(entry)
        except (OSError, Timeout) as error:
            self._give_up(error)

    def _shorten(self) -> None:
        if self._path.stat().st_size <= _HISTORY_BYTES:
            return
        with self._lock, open(self._path, "rb+") as file:
            data = file.read()
            at = data.find(b"\n\n# ", len(data) // 2)
            if len(data) > _HISTORY_BYTES and at >= 0:
                file.seek(0)
                file.write(data[at + 1 :])
                file.truncate()

    def _give_up(self, error: Exception) -> None:
        reason = getattr(error, "strerror", None) or error
        self.problem = f"what you type is not remembered: cannot use {self._path}: {reason}"


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


class CommandCompleter(Completer):
    """Commands, the settings behind /set, and the files behind commands that take one."""

    def __init__(
        self, commands: Sequence[str], settings: Sequence[str], file_commands: Sequence[str]
    ) -> None:
        self._commands = commands
        self._settings = settings
        self._file_commands = file_commands
        self._paths = PathCompleter(expanduser=True)

    def get_completions(
        self, document: Document, complete_event: CompleteEvent
    ) -> Iterable[Completion]:
        text = document.text_before_cursor
        command, blank, rest = text.partition(" ")
        if not text.startswith("/") or "\n" in text:
            return
        if not blank:
            yield from _words(self._commands, command)
        elif command == "/set":
            yield from _words(self._settings, rest.lstrip())
        elif command in self._file_commands:
            rest = rest.lstrip()
            with suppress(OSError):
                yield from self._paths.get_completions(Document(rest, len(rest)), complete_event)


def _words(words: Sequence[str], begun: str) -> Iterable[Completion]:
    for word in words:
        if word.startswith(begun):
            yield Completion(word, start_position=-len(begun))


def line_reader(
    screen: Any, completer: Completer, history: Path | None
) -> tuple[Callable[[str], str], str | None]:
    """What reads a message, given the text to begin with, and what is wrong with the history.

    Raises EOFError at the end, KeyboardInterrupt for Ctrl-C at an empty prompt; with something
    typed, Ctrl-C takes that back. A paste of several lines is one message.
    """
    kept: History = InMemoryHistory() if history is None else KeptHistory(history)
    session: PromptSession[str] = PromptSession(
        output=create_output(stdout=screen),
        key_bindings=_keys(),
        completer=completer,
        complete_while_typing=False,
        history=kept,
        enable_open_in_editor=True,
        tempfile_suffix=".md",
    )

    def read(begun: str = "") -> str:
        while True:
            try:
                line = session.prompt(_SIGN, prompt_continuation="  ", default=begun)
            except KeyboardInterrupt:
                if not session.default_buffer.text:
                    raise
                begun = ""
                continue
            # A Ctrl-C right after Enter is meant for this line, not for the next prompt, which it
            # would end.
            ahead = get_typeahead(session.input)
            if any(press.key == Keys.ControlC for press in ahead):
                begun = ""
                continue
            store_typeahead(session.input, ahead)
            return line

    return read, getattr(kept, "problem", None)


def _keys() -> KeyBindings:
    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys
