"""Colours and thoughts in text that arrives in pieces."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from knapspec_edge.styling import Styler
from knapspec_edge.terminal import Terminal
from knapspec_edge.text.thoughts import ThoughtSplitter, closed, opening

CODES = re.compile(r"\x1b\[[0-9]*m")
NAMES = {"\x1b[0m": "</>", "\x1b[1m": "<b>", "\x1b[36m": "<c>", "\x1b[2m": "<d>"}
PIECES = st.lists(
    st.sampled_from(
        ["```", "`", "``", "~~~", "# ", "## ", "**", "*", "***", " ", "\n", "\n\n", "a", "word",
         "日本", "👩‍👩‍👧", "é", "    ", "<think>", "</think>", "2**3", "\r", "\t"]
    ),
    max_size=30,
)  # fmt: skip


def styled(*pieces: str, thought: bool = False) -> str:
    styler = Styler()
    text = "".join(styler.push(piece, thought=thought) for piece in pieces) + styler.end()
    return CODES.sub(lambda match: NAMES[match[0]], text)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain text", "plain text"),
        ("a **bold** word", "a **<b>bold** </>word"),
        ("**bold**", "**<b>bold**</>"),
        ("# Title\ntext", "# <b>Title\n</>text"),
        ("   ### Title", "   ### <b>Title</>"),
        ("#hash and # no title", "#hash and # no title"),
        ("call `f(x)` now", "call <c>`f(x)` </>now"),
        ("``a ` b`` c", "<c>``a ` b`` </>c"),
        ("```py\nx = '**' # y\n```\nend", "<c>```py\nx = '**' # y\n```\n</>end"),
        ("~~~\na\n```\n~~~\nb", "~~<c>~\na\n```\n~~~\n</>b"),
        ("````\n```\n````\nb", "<c>````\n```\n````\n</>b"),
        ("2 ** 3 and 2**3", "2 ** 3 and 2**3"),
        ("an open ` and\nthe next line", "an open <c>` and\n</>the next line"),
        ("an open **word and\nthe next", "an open **<b>word and\n</>the next"),
        ("* a\n* b", "* a\n* b"),
        ("这是**重点**吗", "这是**<b>重点**</>吗"),
    ],
)
def test_what_is_styled(text: str, shown: str) -> None:
    assert styled(text) == shown
    assert styled(*text) == shown


@given(PIECES)
def test_nothing_is_changed_and_the_cuts_do_not_matter(pieces: list[str]) -> None:
    text = "".join(pieces)
    whole = styled(text)
    assert styled(*pieces) == styled(*text) == whole
    assert re.sub(r"</>|<[bcd]>", "", whole) == re.sub(r"</>|<[bcd]>", "", text)
    styler = Styler()
    for piece in pieces:  # nothing is held back
        assert CODES.sub("", styler.push(piece)) == piece


def test_a_thought_is_dim_and_what_follows_is_not() -> None:
    styler = Styler()
    shown = styler.push("**a** `b\n", thought=True) + styler.push("c **d**")
    assert CODES.sub(lambda match: NAMES[match[0]], shown) == "<d>**a** `b\n</>c **<b>d**"


# -- thoughts


def split(*pieces: str, begun: str = "") -> list[tuple[str, bool]]:
    splitter = ThoughtSplitter(begun)
    joined: list[tuple[str, bool]] = []
    for piece in pieces:
        parts = splitter.push(piece)
        assert "".join(text for text, _ in parts) == piece  # nothing is held back
        for text, is_thought in parts:
            if joined and joined[-1][1] == is_thought:
                joined[-1] = (joined[-1][0] + text, is_thought)
            else:
                joined.append((text, is_thought))
    return joined


@pytest.mark.parametrize(
    ("pieces", "begun", "expected"),
    [
        (["hello"], "", [("hello", False)]),
        (["<think>", "\na", "b</th", "ink>c"], "", [("<think>\nab</think>", True), ("c", False)]),
        (["\n<think>a</think>b"], "", [("\n<think>a</think>", True), ("b", False)]),
        (["<think>a"], "", [("<think>a", True)]),
        (["a", "</think>", "b"], "<think>\n", [("a</think>", True), ("b", False)]),
        (["[THINK]a[/THINK]b"], "", [("[THINK]a[/THINK]", True), ("b", False)]),
        # in the middle it is text about thoughts
        (["a <think>b</think>"], "", [("a <think>b</think>", False)]),
        (["<think>a</think>b <think>c"], "", [("<think>a</think>", True), ("b <think>c", False)]),
        (["<th", "ink>a</think>b"], "", [("<th", False), ("ink>a</think>", True), ("b", False)]),
        (["<th", "e"], "", [("<the", False)]),
    ],
)
def test_thoughts_are_told_from_the_answer(
    pieces: list[str], begun: str, expected: list[tuple[str, bool]]
) -> None:
    assert split(*pieces, begun=begun) == expected


def test_what_a_prompt_opens() -> None:
    assert opening("assistant\n<think>\n") == "<think>\n"
    assert opening("assistant\n<think>\n\n</think>\n\n") == ""
    assert opening("assistant\n") == ""
    assert opening("") == ""


def test_a_cut_thought_gets_its_end() -> None:
    assert closed("<think>\nabc ") == "<think>\nabc\n</think>\n\n"
    assert closed("<think>a</think>b") == "<think>a</think>b"
    assert closed("a <think> b") == "a <think> b"
    assert closed("") == ""


# -- on a terminal, and nowhere else


class Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown_on(out: io.StringIO) -> str:
    terminal = Terminal(out=out, err=io.StringIO())
    terminal.answer("<think>a", thought=True)
    terminal.answer(" **b** \x1b[31mc")
    terminal.end_line()
    terminal.answer("d")
    terminal.end_line()
    return out.getvalue()


@pytest.fixture
def colours(monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    return monkeypatch


def test_a_terminal_gets_colours_and_is_put_back(colours: Any) -> None:
    assert shown_on(Tty()) == ("\x1b[2m<think>a \x1b[0m**\x1b[1mb** \x1b[0m[31mc\nd\n")


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_no_colours_where_they_are_not_wanted(colours: Any, name: str, value: str) -> None:
    colours.setenv(name, value)
    assert shown_on(Tty()) == "<think>a **b** [31mc\nd\n"


def test_a_file_gets_the_text_alone(colours: Any) -> None:
    colours.setenv("FORCE_COLOR", "1")
    assert shown_on(io.StringIO()) == "<think>a **b** \x1b[31mc\nd\n"
