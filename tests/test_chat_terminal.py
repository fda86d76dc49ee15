"""Chat at a real (pseudo) terminal: Ctrl-C, Ctrl-D, line editing (cases 57, 59, 62)."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pexpect = pytest.importorskip("pexpect", reason="pseudo-terminals need a POSIX system")

HERE = Path(__file__).parent
WAIT_SECONDS = 15
PROMPT = "\n>"  # the space after it comes as a cursor movement
# What prompt_toolkit writes around the text: colours, cursor movements, modes.
ESCAPES = re.compile(r"\x1b(\[[0-9;?]*[a-zA-Z]|[=>]|\][^\x07]*\x07)")


class Chat:
    """One chat process; what it shows, without escape codes."""

    def __init__(self, *arguments: str, step_seconds: float = 0.0, ctx: int = 512) -> None:
        root = str(HERE.parent)
        path = os.pathsep.join(filter(None, (root, str(HERE), os.environ.get("PYTHONPATH"))))
        self.process = pexpect.spawn(
            sys.executable,
            [str(HERE / "scripted_cli.py"), *arguments],
            env={
                **os.environ,
                "PYTHONPATH": path,
                "PYTHONUTF8": "1",
                "TERM": "xterm",
                "PROMPT_TOOLKIT_NO_CPR": "1",
                "KNAPSPEC_EDGE_SPEC": "off",
                "KNAPSPEC_EDGE_HISTORY": "off",
                "SCRIPTED_STEP_SECONDS": str(step_seconds),
                "SCRIPTED_CTX": str(ctx),
            },
            encoding="utf-8",
            dimensions=(40, 120),
            timeout=WAIT_SECONDS,
        )
        self.process.delaybeforesend = None
        self.process.ptyproc.delayafterterminate = 1.0
        self._raw = ""
        self._seen = 0

    def _shown(self) -> str:
        return ESCAPES.sub("", self._raw).replace("\r", "")

    def wait_for(self, text: str) -> str:
        """Read until `text` was shown, after what was waited for before."""
        while True:
            shown = self._shown()
            at = shown.find(text, self._seen)
            if at >= 0:
                passage, self._seen = shown[self._seen : at], at + len(text)
                return passage
            try:
                self._raw += self.process.read_nonblocking(4096, timeout=WAIT_SECONDS)
            except (pexpect.TIMEOUT, pexpect.EOF) as error:
                raise AssertionError(f"{text!r} did not come; shown: {shown!r}") from error

    def say(self, line: str) -> None:
        self.wait_for(PROMPT)
        self.process.send(line + "\r")

    def end(self) -> int:
        """The exit code, once the process has ended."""
        try:
            while True:
                self._raw += self.process.read_nonblocking(4096, timeout=WAIT_SECONDS)
        except pexpect.EOF:
            pass
        self.process.close()
        assert "Traceback" not in self._shown()
        assert self.process.signalstatus is None
        return int(self.process.exitstatus)


@pytest.fixture
def chat() -> Iterator[type[Chat]]:
    started: list[Chat] = []

    class Tracked(Chat):
        def __init__(self, *arguments: str, step_seconds: float = 0.0, ctx: int = 512) -> None:
            super().__init__(*arguments, step_seconds=step_seconds, ctx=ctx)
            started.append(self)

    yield Tracked
    for one in started:
        one.process.close(force=True)


def test_turns_statistics_and_control_d(chat: type[Chat]) -> None:
    talk = chat("chat")
    talk.say("hello")
    talk.wait_for("You said: hello\n")
    talk.wait_for("speculation off: --spec off")
    talk.say("again")
    talk.wait_for("You said: again\n")
    talk.wait_for("cached")
    talk.wait_for(PROMPT)
    talk.process.sendcontrol("d")
    assert talk.end() == 0


def test_control_c_stops_the_answer_and_the_next_turn_is_right(chat: type[Chat]) -> None:
    talk = chat("chat", step_seconds=0.05)
    talk.say("a rather long question that takes a while to repeat")
    talk.wait_for("You said: ")
    talk.process.sendintr()
    said = talk.wait_for("stopped")
    assert "repeat" not in said
    talk.say("hello")
    talk.wait_for("You said: hello\n")
    talk.say("/exit")
    assert talk.end() == 0


def test_control_c_while_the_prompt_is_read(chat: type[Chat]) -> None:
    talk = chat("chat", step_seconds=0.3)
    talk.say("qwerty " * 14)  # a token per letter, eight to a slice
    talk.wait_for("reading the prompt")
    talk.process.sendintr()
    assert "You said" not in talk.wait_for("stopped")
    talk.wait_for(PROMPT)
    talk.process.sendcontrol("d")
    assert talk.end() == 0


def test_control_c_at_an_empty_prompt_exits_130(chat: type[Chat]) -> None:
    talk = chat("chat")
    talk.wait_for(PROMPT)
    talk.process.sendintr()
    assert talk.end() == 130


def test_control_c_takes_back_a_typed_line_first(chat: type[Chat]) -> None:
    talk = chat("chat")
    talk.wait_for(PROMPT)
    talk.process.send("half a line")
    talk.wait_for("half a line")
    talk.process.sendintr()
    talk.say("hello")
    talk.wait_for("You said: hello\n")
    talk.wait_for(PROMPT)
    talk.process.sendintr()
    assert talk.end() == 130


def test_control_c_right_after_enter_takes_the_line_back(chat: type[Chat]) -> None:
    talk = chat("chat")
    talk.wait_for(PROMPT)
    talk.process.send("hello\r\x03")
    talk.say("again")
    talk.wait_for("You said: again\n")
    talk.say("/exit")
    assert talk.end() == 0


def test_control_c_twice_while_answering_exits_130(chat: type[Chat]) -> None:
    talk = chat("chat", step_seconds=0.05)
    talk.say("a rather long question")
    talk.wait_for("You said: ")
    talk.process.sendintr()
    talk.wait_for("stopped")
    talk.wait_for(PROMPT)
    talk.process.sendintr()
    assert talk.end() == 130


def test_message_of_several_lines(chat: type[Chat]) -> None:
    talk = chat("chat")
    talk.wait_for(PROMPT)
    talk.process.send("one\x1b\rtwo")
    talk.wait_for("two")
    talk.process.send("\r")
    talk.wait_for("You said: one\ntwo\n")
    talk.say("/exit")
    assert talk.end() == 0


def test_full_context_is_explained_and_clear_helps(chat: type[Chat]) -> None:
    talk = chat("chat", ctx=150)
    talk.say("hello")
    talk.wait_for("You said: hello\n")
    talk.say("x" * 140)
    talk.wait_for("error: the conversation is full")
    talk.say("/clear")
    talk.wait_for("the conversation is empty")
    talk.say("hello")
    talk.wait_for("You said: hello\n")
    talk.say("/exit")
    assert talk.end() == 0


def test_bad_command_is_one_line(chat: type[Chat]) -> None:
    talk = chat("chat")
    talk.say("/nonsense")
    talk.wait_for("error: there is no command /nonsense")
    talk.say("/exit")
    assert talk.end() == 0


def test_control_c_ends_run_with_130_and_keeps_the_text(chat: type[Chat]) -> None:
    run = chat("run", "a rather long question that takes a while", step_seconds=0.05)
    run.wait_for("You said: ")
    run.process.sendintr()
    assert run.end() == 130


def test_terminated_process_leaves_no_traceback(chat: type[Chat]) -> None:
    talk = chat("chat")
    talk.wait_for(PROMPT)
    talk.process.kill(signal.SIGHUP)
    talk.process.expect(pexpect.EOF)
    assert "Traceback" not in talk._shown()
