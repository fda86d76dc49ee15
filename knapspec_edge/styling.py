"""Colours for text that arrives in pieces: Markdown as it is written, and a model's thoughts.

No character is added, changed, held back or moved: only terminal codes come in between, each at a
place that is decided by what was written before it. Headings and **bold** words become bold, `code`
and blocks of it coloured, thoughts dim.
"""

from __future__ import annotations

import re

_RESET = "\x1b[0m"
_BOLD, _CODE, _DIM = "\x1b[1m", "\x1b[36m", "\x1b[2m"
_HEADING = re.compile(r" {0,3}#{1,6} ")
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")
_HEAD_CHARACTERS = 16  # of a line; what it is shows in these


class Styler:
    """The state of one answer. What it shows does not depend on how the text was cut."""

    def __init__(self) -> None:
        self._style = ""  # the code that holds on the terminal now
        self._fence = ""  # what opened the block of code we are in
        self._begin_line()

    def push(self, text: str, *, thought: bool = False) -> str:
        """The text with codes in between."""
        out = []
        for character in text:
            if thought:
                self._begin_line()
                style = _DIM
            else:
                style = self._take(character)
            # a blank looks the same in every style
            if style != self._style and not character.isspace():
                out.append((_RESET if self._style else "") + style)
                self._style = style
            out.append(character)
        return "".join(out)

    def end(self) -> str:
        """What puts the terminal back."""
        return _RESET if self._style else ""

    def _begin_line(self) -> None:
        self._head = ""  # how the line begins
        self._column = 0
        self._fence_line = False  # it opens or closes a block of code
        self._closes = False
        self._ticks = 0  # backticks directly before
        self._stars = 0
        self._last = ""  # the character before; of a run of stars, the one before it
        self._code = 0  # backticks around the code we are in
        self._bold = False

    def _take(self, character: str) -> str:
        """The style of the next character."""
        if character == "\n":
            self._begin_line()
            return ""
        self._column += 1
        if self._column <= _HEAD_CHARACTERS:
            self._head += character
            fence = _FENCE.fullmatch(self._head)
            if fence and fence[1].startswith(self._fence) and not self._closes:
                # an opening one may go on growing
                self._closes = bool(self._fence) and not self._fence_line
                self._fence = "" if self._closes else fence[1]
                self._fence_line = True
        if self._fence or self._fence_line:
            return _CODE
        if character == "`":
            self._ticks += 1
            return _CODE
        if self._ticks:
            # the run has ended: it opens code, or closes what as many opened
            if not self._code:
                self._code = self._ticks
            elif self._code == self._ticks:
                self._code = 0
            self._ticks = 0
        if self._code:
            return _CODE
        if character == "*":
            self._stars += 1
        else:
            if self._stars >= 2:
                # not 2**3, nor 2 ** 3
                word_before = self._last.isascii() and self._last.isalnum()
                self._bold = not (self._bold or character.isspace() or word_before)
            self._stars = 0
            self._last = character
        return _BOLD if self._bold or _HEADING.match(self._head) else ""
