"""The chat at the keyboard: reading lines, showing answers, Ctrl-C and Ctrl-D."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from .apps.chat import FILE_COMMANDS, SETTING_NAMES, Commands
from .apps.conversation import Conversation
from .apps.summary import statistics_line
from .engine import TextEvent
from .errors import Interrupted, KnapspecError, UsageError
from .folders import expanded, state_root
from .terminal import Terminal, is_terminal
from .text.thoughts import ThoughtSplitter

EXIT_DONE = 0
EXIT_INTERRUPTED = 130

# Given the text to begin with; raises EOFError at the end, KeyboardInterrupt on Ctrl-C.
ReadLine = Callable[[str], str]


def converse(
    conversation: Conversation, terminal: Terminal, read_line: ReadLine, *, interactive: bool
) -> int:
    """Read, answer, repeat; the exit code.

    Interactive: an error costs its turn only. Otherwise it ends the conversation (it is raised), so
    that a script sees it.
    """
    commands = Commands(conversation)
    begun = ""  # what the next line begins with
    edits = False  # it takes the place of the last question
    while True:
        try:
            line = read_line(begun)
        except EOFError:
            return EXIT_DONE
        except KeyboardInterrupt:
            if not edits:
                return EXIT_INTERRUPTED
            line = ""
        editing, begun, edits = edits, "", False
        if not line.strip():
            continue
        try:
            said = line if editing else commands.run(line)
            if isinstance(said, str):
                events = conversation.again(said) if editing else conversation.say(said)
                _turn(conversation, terminal, events)
            elif said.leave:
                return EXIT_DONE
            elif said.opened and interactive:
                begun, edits = said.question or "", True
            elif said.opened:
                raise UsageError("/edit: give the text of the question, as in /edit Why?")
            elif said.again:
                _turn(conversation, terminal, conversation.again(said.question))
            else:
                terminal.reply(said.text)
                for warning in conversation.engine.take_warnings():
                    terminal.warning(warning)
        except _Leave:
            terminal.end_line()
            return EXIT_INTERRUPTED
        except (Interrupted, KeyboardInterrupt):
            # Text that was shown is in the history; without any, the question is not, either.
            terminal.end_line()
            if not interactive:
                return EXIT_INTERRUPTED
            terminal.clear_echo()
            terminal.notice(conversation.stopped())
        except KnapspecError as error:
            terminal.end_line()
            if not interactive:
                raise
            terminal.error(str(error))
        finally:
            terminal.clear_progress()


class _Leave(Exception):
    """Ctrl-C was pressed again before the first was noticed."""


@contextmanager
def _second_press_leaves(conversation: Conversation) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        # a backend that notices presses by itself raises Interrupted for the first
        if hasattr(conversation.engine.backend, "interruptible"):
            raise _Leave from None
        raise


def _turn(
    conversation: Conversation, terminal: Terminal, events: Generator[TextEvent, None, None]
) -> None:
    terminal.progress("prompt", None)
    splitter = None
    try:
        with conversation.engine.interruptible(), _second_press_leaves(conversation):
            for event in events:
                if splitter is None:
                    splitter = ThoughtSplitter(
                        conversation.last.opening if conversation.last else ""
                    )
                for text, is_thought in splitter.push(event.text):
                    terminal.answer(text, thought=is_thought)
        terminal.end_line()
    finally:
        # a press may come while a piece is shown: what was said enters the history first
        events.close()
        conversation.keep()
    for notice in conversation.notices():
        terminal.notice(notice)
    if conversation.last is not None:
        terminal.notice(statistics_line(conversation.last))


def line_reader(
    terminal: Terminal, conversation: Conversation, history: Path | None
) -> tuple[ReadLine, bool]:
    """How to read lines here, and whether somebody sits at the keyboard; `history`: where to keep
    what is typed."""
    if not is_terminal(sys.stdin) or not (terminal.err_is_terminal or terminal.out_is_terminal):
        return _plain_lines(sys.stdin), False
    from . import keyboard

    # The prompt sign is no model text, so it goes to standard error if that is the screen.
    screen = terminal.err if terminal.err_is_terminal else terminal.out
    completer = keyboard.CommandCompleter(
        Commands(conversation).names, SETTING_NAMES, FILE_COMMANDS
    )
    read, problem = keyboard.line_reader(screen, completer, history)
    if problem is not None:
        terminal.warning(problem)
    return read, True


def history_file(option: str | None) -> Path | None:
    """Where --history has what is typed kept; None: nowhere."""
    if option is None:
        return state_root() / "chat-history"
    return None if option.lower() in ("", "off", "none") else expanded(option)


def _plain_lines(stream: IO[str] | None) -> ReadLine:
    lines = iter(_decoded(getattr(stream, "buffer", None), stream))

    def read(begun: str = "") -> str:
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    return read


def _decoded(raw: IO[bytes] | None, stream: IO[str] | None) -> Iterator[str]:
    """Lines as UTF-8 whatever the locale says, one at a time; none where the stream is closed."""
    if stream is None:
        return
    if raw is None:
        yield from (line.rstrip("\r\n") for line in stream)
        return
    while True:
        try:
            data = raw.readline()
        except OSError as error:  # a folder, a broken device
            raise UsageError(f"cannot read standard input: {error.strerror or error}") from None
        if not data:
            return
        try:
            yield data.decode("utf-8").removeprefix("\ufeff").rstrip("\r\n")
        except UnicodeDecodeError:
            raise UsageError("standard input is not UTF-8 text") from None
