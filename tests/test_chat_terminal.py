"""Chat at a real (pseudo) terminal: Ctrl-C, Ctrl-D, editing, history (cases 57, 59, 62)."""

from __future__ import annotations

import os
import re
import signal
import stat
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from knapspec_edge.apps import conversation_file

pexpect = pytest.importorskip("pexpect", reason="pseudo-terminals need a POSIX system")

HERE = Path(__file__).parent
WAIT_SECONDS = 15
PROMPT = "\n>"  # the space after it comes as a cursor movement
# What prompt_toolkit writes around the text: colours, cursor movements, modes.
ESCAPES = re.compile(r"\x1b(\[[0-9;?]*[a-zA-Z]|[=>]|\][^\x07]*\x07)")


class Chat:
    """One chat process; what it shows, without escape codes."""

    def __init__(
        self,
        *arguments: str,
        step_seconds: float = 0.0,
        ctx: int = 512,
        environment: Mapping[str, str] | None = None,
        shell: str | None = None,
    ) -> None:
        root = str(HERE.parent)
        path = os.pathsep.join(filter(None, (root, str(HERE), os.environ.get("PYTHONPATH"))))
        command = [sys.executable, str(HERE / "scripted_cli.py"), *arguments]
        if shell is not None:
            command = ["sh", "-c", shell]
        self.process = pexpect.spawn(
            command[0],
            command[1:],
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
                **(environment or {}),
            },
            # a run of the tests under nohup hands on that it is ignored
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
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

    def _read(self) -> None:
        """What comes next. Patience counts in looks, not by the clock, which goes on where a
        starved machine runs neither this process nor the other."""
        for looks_left in reversed(range(WAIT_SECONDS)):
            try:
                self._raw += self.process.read_nonblocking(4096, timeout=1.0)
                return
            except pexpect.TIMEOUT:
                if not looks_left:
                    raise

    def wait_for(self, text: str) -> str:
        """Read until `text` was shown, after what was waited for before."""
        while True:
            shown = self._shown()
            at = shown.find(text, self._seen)
            if at >= 0:
                passage, self._seen = shown[self._seen : at], at + len(text)
                return passage
            try:
                self._read()
            except (pexpect.TIMEOUT, pexpect.EOF) as error:
                raise AssertionError(f"{text!r} did not come; shown: {shown!r}") from error

    def say(self, line: str) -> None:
        self.wait_for(PROMPT)
        self.process.send(line + "\r")

    def end(self) -> int:
        """The exit code, once the process has ended."""
        try:
            while True:
                self._read()
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
        def __init__(self, *arguments: str, **settings: Any) -> None:
            super().__init__(*arguments, **settings)
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


# -- writing messages

PASTE = "\x1b[200~{}\x1b[201~"


def test_a_paste_of_several_lines_is_one_message(chat: type[Chat]) -> None:
    talk = chat("chat")
    talk.wait_for(PROMPT)
    talk.process.send(PASTE.format("one\ntwo\r\nthree 日本 👋") + "\r")
    talk.wait_for("You said: one\ntwo\nthree 日本 👋\n")
    talk.say("/exit")
    assert talk.end() == 0


@pytest.mark.parametrize("line", ["word " * 10 + "\n", "x"])
def test_a_large_paste_arrives_whole(chat: type[Chat], line: str) -> None:
    text = line * (50_000 // len(line))
    talk = chat("chat", ctx=150)  # refused for its length, whose tokens are counted
    talk.wait_for(PROMPT)
    talk.process.send(PASTE.format(text + "end"))
    talk.wait_for("end")
    talk.process.send("\r")
    talk.wait_for("error: the message is too long: the prompt has")
    n_tokens = talk.wait_for(" tokens").strip().replace(",", "")
    assert int(n_tokens) > len(text) / 3
    talk.say("hello")
    talk.wait_for("You said: hello\n")
    talk.say("/exit")
    assert talk.end() == 0


def test_what_was_typed_is_found_again_also_by_the_next_chat(
    chat: type[Chat], tmp_path: Path
) -> None:
    file = tmp_path / "state" / "history"
    settings = {"environment": {"KNAPSPEC_EDGE_HISTORY": str(file)}}
    talk = chat("chat", **settings)
    talk.say("hello in the user")
    talk.wait_for("You said: hello in the user\n")
    talk.say("again")
    talk.wait_for("You said: again\n")
    talk.wait_for(PROMPT)
    talk.process.send("\x12hello")  # Ctrl-R
    talk.wait_for("hello in the user")
    talk.process.send("\r\r")  # takes it, sends it
    talk.wait_for("You said: hello in the user\n")
    talk.wait_for(PROMPT)
    talk.process.sendcontrol("d")
    assert talk.end() == 0
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    talk = chat("chat", **settings)
    talk.wait_for(PROMPT)
    talk.process.send("\x1b[A\x1b[A")  # twice up
    talk.wait_for("again")
    talk.process.send("\r")
    talk.wait_for("You said: again\n")
    talk.say("/exit")
    assert talk.end() == 0


def test_no_history_where_none_is_wanted(chat: type[Chat], tmp_path: Path) -> None:
    folders = {"XDG_STATE_HOME": str(tmp_path), "HOME": str(tmp_path)}
    talk = chat("chat", "--history", "off", environment=folders)
    talk.say("hello")
    talk.wait_for("You said: hello\n")
    talk.say("/exit")
    assert talk.end() == 0
    assert list(tmp_path.rglob("*history*")) == []


def test_a_history_that_cannot_be_kept_costs_nothing_else(chat: type[Chat], tmp_path: Path) -> None:
    talk = chat("chat", "--history", str(tmp_path))
    talk.wait_for("warning: what you type is not remembered")
    talk.say("hello")
    talk.wait_for("You said: hello\n")
    talk.say("/exit")
    assert talk.end() == 0


def test_a_message_from_an_editor(chat: type[Chat], tmp_path: Path) -> None:
    editor = tmp_path / "editor"
    editor.write_text('#!/bin/sh\necho "one\ntwo" > "$1"\n')
    editor.chmod(0o700)
    talk = chat("chat", environment={"VISUAL": str(editor)})
    talk.wait_for(PROMPT)
    talk.process.send("begun\x18\x05")  # Ctrl-X Ctrl-E
    talk.wait_for("two")
    talk.process.send("\r")
    talk.wait_for("You said: one\ntwo\n")
    talk.say("/exit")
    assert talk.end() == 0


def test_commands_settings_and_files_are_completed(chat: type[Chat], tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("in the letter", encoding="utf-8")
    talk = chat("chat")
    talk.wait_for(PROMPT)
    talk.process.send("/rea\t")
    talk.wait_for("/read")
    talk.process.send(f" {tmp_path}/let\t")
    talk.wait_for("/letter.txt")
    talk.process.send("\r")
    talk.wait_for("letter.txt: ")
    talk.wait_for(PROMPT)
    talk.process.send("/set overf\t")
    talk.wait_for("overflow")
    talk.process.send(" drop\r")
    talk.wait_for("overflow    drop")
    talk.say("What?")
    talk.wait_for("You said: letter.txt:\n\nin the letter\n\nWhat?\n")
    talk.say("/exit")
    assert talk.end() == 0


def test_the_last_question_is_edited_and_answered_anew(chat: type[Chat], tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    talk = chat("chat", "--save", str(file))
    talk.say("hello")
    talk.wait_for("You said: hello\n")
    talk.say("/edit")
    talk.wait_for("hello")
    talk.process.send(" in the\r")
    talk.wait_for("You said: hello in the\n")
    talk.say("/edit")
    talk.wait_for("hello in the")
    talk.process.sendintr()  # empties the line,
    talk.wait_for(PROMPT)
    talk.process.sendintr()  # and leaves the editing, not the chat
    talk.say("/regen")
    talk.wait_for("You said: hello in the\n")
    talk.wait_for("at temperature 0")
    talk.wait_for(PROMPT)
    talk.process.sendintr()
    assert talk.end() == 130
    saved = conversation_file.load(file)
    assert [m["content"] for m in saved.messages] == ["hello in the", "You said: hello in the"]


def test_a_conversation_goes_on_from_a_file(chat: type[Chat], tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    talk = chat("chat", "--save", str(file), step_seconds=0.03)
    talk.say("a rather long question that takes a while to repeat")
    talk.wait_for("You said: ")
    talk.process.sendintr()
    talk.wait_for("stopped")
    talk.process.kill(signal.SIGKILL)  # nothing is lost
    talk.process.expect(pexpect.EOF)
    said = conversation_file.load(file).messages[1]["content"]
    assert said.startswith("You said: ")
    talk = chat("chat", "--load", str(file), "--save", str(file))
    talk.wait_for("loaded 1 turn")
    talk.say("hello")
    talk.wait_for("You said: hello\n")
    talk.say("/exit")
    assert talk.end() == 0
    assert len(conversation_file.load(file).messages) == 4


# -- the screen


def test_progress_counts_tokens_and_vanishes(chat: type[Chat]) -> None:
    talk = chat("chat", step_seconds=1.5)
    talk.say("qwerty " * 10)  # a token per letter, eight to a slice
    talk.wait_for("reading the prompt: ")
    talk.wait_for(" of 76 tokens")
    talk.wait_for("%")
    talk.process.sendintr()
    talk.wait_for("stopped")
    assert "\x1b[2K" in talk._raw.split("reading the prompt")[-1]  # the line was taken away
    talk.wait_for(PROMPT)
    talk.process.sendcontrol("d")
    assert talk.end() == 0


@pytest.mark.parametrize("pause_seconds", [0.05, 0.3])
def test_two_quick_presses_end_with_130(chat: type[Chat], pause_seconds: float) -> None:
    talk = chat("chat", step_seconds=0.05)
    talk.say("a rather long question")
    talk.wait_for("You said: ")
    talk.process.sendintr()
    time.sleep(pause_seconds)  # the system makes one of two signals that wait
    talk.process.sendintr()
    assert talk.end() == 130


def test_the_window_may_change_its_size_at_any_time(chat: type[Chat]) -> None:
    talk = chat("chat", step_seconds=0.02)
    question = "**日本** 👋 " * 8
    talk.say(question)
    talk.wait_for("You said: ")
    for columns in (20, 7, 200, 30):
        talk.process.setwinsize(10, columns)
        time.sleep(0.05)
    shown = talk.wait_for("tokens/s")
    assert question.strip() in shown  # streamed text is never laid out again
    talk.process.setwinsize(40, 120)
    talk.say("hello")
    talk.wait_for("You said: hello\n")
    talk.say("/exit")
    assert talk.end() == 0


@pytest.mark.parametrize("colours", [True, False])
def test_markdown_has_colours_unless_they_are_not_wanted(chat: type[Chat], colours: bool) -> None:
    talk = chat("chat", environment={} if colours else {"NO_COLOR": "1"})
    talk.say("a **bold** word")
    talk.wait_for("You said: a **bold** word\n")
    assert ("\x1b[1mbold" in talk._raw) == colours
    talk.say("/exit")
    assert talk.end() == 0


def test_answers_in_a_file_have_no_codes(chat: type[Chat], tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = f"{sys.executable} {HERE / 'scripted_cli.py'} chat > {out}"
    talk = chat(shell=command)
    talk.wait_for(PROMPT)
    talk.process.send("a **bold** word\r")
    talk.wait_for("tokens/s")
    talk.say("/exit")
    assert talk.end() == 0
    assert out.read_bytes() == b"You said: a **bold** word\n"
