"""The chat at the keyboard: reading lines, showing answers, Ctrl-C and Ctrl-D."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import IO, Any

from .apps.chat import CommandResult, Conversation
from .apps.summary import statistics_line
from .errors import Interrupted, KnapspecError, UsageError
from .terminal import Terminal, is_terminal

EXIT_DONE = 0
EXIT_INTERRUPTED = 130

ReadLine = Callable[[], str]  # raises EOFError at the end, KeyboardInterrupt on Ctrl-C


def converse(
    conversation: Conversation, terminal: Terminal, read_line: ReadLine, *, interactive: bool
) -> int:
    """Read, answer, repeat; the exit code.

    Interactive: an error costs its turn only. Otherwise it ends the conversation (it is raised), so
    that a script sees it.
    """
    while True:
        try:
            line = read_line()
        except EOFError:
            return EXIT_DONE
        except KeyboardInterrupt:
            return EXIT_INTERRUPTED
        if not line.strip():
            continue
        try:
            said = conversation.command(line)
            if isinstance(said, CommandResult):
                if said.leave:
                    return EXIT_DONE
                terminal.notice(said.text)
                for warning in conversation.engine.take_warnings():
                    terminal.warning(warning)
            else:
                _turn(conversation, terminal, said)
        except (Interrupted, KeyboardInterrupt):
            # Text that was shown is in the history; without any, the question is not, either.
            terminal.end_line()
            if not interactive:
                return EXIT_INTERRUPTED
            terminal.notice("stopped")
        except KnapspecError as error:
            terminal.end_line()
            if not interactive:
                raise
            terminal.error(str(error))
        finally:
            terminal.clear_progress()


def _turn(conversation: Conversation, terminal: Terminal, text: str) -> None:
    terminal.progress("prompt", None)
    with conversation.engine.interruptible():
        for event in conversation.say(text):
            terminal.text(event.text)
    terminal.end_line()
    for notice in conversation.notices():
        terminal.notice(notice)
    if conversation.last is not None:
        terminal.notice(statistics_line(conversation.last))


def line_reader(terminal: Terminal, commands: list[str]) -> tuple[ReadLine, bool]:
    """How to read lines here, and whether somebody sits at the keyboard."""
    if is_terminal(sys.stdin) and (terminal.err_is_terminal or terminal.out_is_terminal):
        # The prompt sign is no model text, so it goes to standard error if that is the screen.
        return _edited_lines(terminal.err if terminal.err_is_terminal else terminal.out, commands)
    return _plain_lines(sys.stdin), False


def _plain_lines(stream: IO[str] | None) -> ReadLine:
    lines = iter(_decoded(getattr(stream, "buffer", None), stream))

    def read() -> str:
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


def _edited_lines(screen: Any, commands: list[str]) -> tuple[ReadLine, bool]:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.input.typeahead import get_typeahead, store_typeahead
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
    from prompt_toolkit.keys import Keys
    from prompt_toolkit.output import create_output

    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    session: PromptSession[str] = PromptSession(
        output=create_output(stdout=screen),
        key_bindings=keys,
        completer=WordCompleter(commands, sentence=True),
        complete_while_typing=False,
    )

    def read() -> str:
        while True:
            try:
                line = session.prompt("> ", prompt_continuation="  ")
            except KeyboardInterrupt:
                # With something typed, Ctrl-C takes that back; at an empty prompt it leaves.
                if not session.default_buffer.text:
                    raise
                continue
            # A Ctrl-C right after Enter is meant for this line, not for the next prompt, which it
            # would end.
            ahead = get_typeahead(session.input)
            if any(press.key == Keys.ControlC for press in ahead):
                continue
            store_typeahead(session.input, ahead)
            return line

    return read, True
