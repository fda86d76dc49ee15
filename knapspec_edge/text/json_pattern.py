"""From a regular expression to GBNF for the inside of a JSON string, where quotation marks,
backslashes and control characters are written as escapes.

Knows what JSON schemas commonly use: literals, classes, groups, alternatives, repetitions, ^ and $
at the ends. As JSON schema demands, a pattern without anchors may match anywhere.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

Ranges = list[tuple[int, int]]  # of code points, both ends included

MAX_REPETITIONS = 2000  # llama.cpp refuses more, or takes them for unlimited
_LAST = 0x10FFFF
_DIGIT: Ranges = [(48, 57)]
_WORD: Ranges = [(48, 57), (65, 90), (95, 95), (97, 122)]
_SPACE: Ranges = [(9, 13), (32, 32)]
_CLASSES = {"d": _DIGIT, "w": _WORD, "s": _SPACE}
_CONTROL_ESCAPES = {"n": 10, "r": 13, "t": 9, "f": 12, "v": 11, "0": 0}
# what a JSON string holds as an escape only
_ESCAPED: Ranges = [(0, 31), (34, 34), (92, 92)]


class Inexpressible(Exception):
    """This pattern has no equivalent here."""


def literal(text: str) -> str:
    """GBNF for exactly this text."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{"".join(c if c.isprintable() else _code(ord(c)) for c in escaped)}"'


def plain_class(excluded: Ranges) -> str:
    """GBNF for one character that a JSON string holds as it is and that is not excluded."""
    return f"[^{''.join(map(_range, [*excluded, *_ESCAPED, (127, 127)]))}]"


def character_class(ranges: Ranges, negated: bool = False) -> str:
    """GBNF for one character of a JSON string, escaped where it has to be, that is (not) in these
    ranges of code points. Raises Inexpressible for an empty class."""

    def wanted(code: int) -> bool:
        return any(low <= code <= high for low, high in ranges) != negated

    options = []
    if negated:
        options.append(plain_class(ranges))
    else:
        plain = ranges
        for low, high in _ESCAPED:
            plain = [part for r in plain for part in _without(r, low, high)]
        if plain:
            options.append(f"[{''.join(map(_range, plain))}]")
    for low, high in _ESCAPED:
        escapes = (json.dumps(chr(code))[1:-1] for code in range(low, high + 1) if wanted(code))
        # of all that a negated class leaves, only what has a short escape
        options += [literal(escape) for escape in escapes if not negated or len(escape) == 2]
    if not options:
        raise Inexpressible
    return options[0] if len(options) == 1 else f"({' | '.join(options)})"


def pattern_grammar(
    pattern: object, builtin: Callable[[str], str], rule: Callable[[str], str]
) -> str:
    """GBNF for a string's content that matches the pattern.

    `builtin("char")` and `builtin("dot")` name the rules for any character and for any but a
    newline; `rule` makes a new rule. Raises Inexpressible.
    """
    if not isinstance(pattern, str):
        raise Inexpressible
    parser = _Parser(pattern, builtin, rule)
    body = parser.alternatives(outermost=True)
    if parser.rest:
        raise Inexpressible
    return body


class _Parser:
    def __init__(
        self, pattern: str, builtin: Callable[[str], str], rule: Callable[[str], str]
    ) -> None:
        self.rest = pattern
        self._builtin = builtin
        self._rule = rule

    def alternatives(self, *, outermost: bool = False) -> str:
        options = [self._sequence(outermost)]
        while self._take("|"):
            options.append(self._sequence(outermost))
        return f"({' | '.join(options)})"

    def _sequence(self, outermost: bool) -> str:
        anywhere = f"{self._builtin('char')}*" if outermost else ""
        before = "" if outermost and self._take("^") else anywhere
        after = anywhere
        items = []
        while self.rest and self.rest[0] not in "|)":
            if outermost and self.rest[0] == "$" and self.rest[1:2] in ("", "|"):
                self._take("$")
                after = ""
                break
            items.append(self._repeated(self._atom()))
        return " ".join(part for part in (before, *items, after) if part) or '""'

    def _atom(self) -> str:
        c, self.rest = self.rest[0], self.rest[1:]
        if c == "(":
            if self._take("?") and not self._take(":"):
                raise Inexpressible
            inside = self.alternatives()
            if not self._take(")"):
                raise Inexpressible
            return inside
        if c == "[":
            return self._bracket()
        if c == ".":
            return self._builtin("dot")
        if c == "\\":
            ranges, negated = self._escape()
            return character_class(ranges, negated)
        if c in "^$*+?{":
            raise Inexpressible
        return character_class([(ord(c), ord(c))])

    def _repeated(self, atom: str) -> str:
        low, high = 1, 1
        if self._take("*"):
            sign = "*"
        elif self._take("+"):
            sign = "+"
        elif self._take("?"):
            sign = "?"
        elif self._take("{"):
            inside, closed, self.rest = self.rest.partition("}")
            least, comma, most = inside.partition(",")
            if not closed or not least.isdecimal() or not (most.isdecimal() or not most):
                raise Inexpressible
            low, high = int(least), int(most or least)
            if max(low, high) > MAX_REPETITIONS or (most and low > high):
                raise Inexpressible
            if high == 0 and (not comma or most):
                return '""'
            sign = f"{{{low},{most}}}" if comma else f"{{{low}}}"
            # repeated groups count by their parts, a rule counts once
            atom = self._rule(atom)
        else:
            return atom
        self._take("?")  # lazy or not, the same texts match
        if self.rest[:1] in ("*", "+", "{"):
            raise Inexpressible
        return atom + sign

    def _bracket(self) -> str:
        negated = self._take("^")
        ranges: Ranges = []
        while not self._take("]"):
            if not self.rest:
                raise Inexpressible
            low = self._member()
            if len(low) == 1 and low[0][0] == low[0][1] and self.rest[:1] == "-":
                if self.rest[1:2] in ("]", ""):
                    ranges += low
                    continue
                self._take("-")
                high = self._member()
                if len(high) != 1 or not low[0][0] <= high[0][0] == high[0][1]:
                    raise Inexpressible
                ranges.append((low[0][0], high[0][0]))
            else:
                ranges += low
        if not ranges:
            raise Inexpressible
        return character_class(ranges, negated)

    def _member(self) -> Ranges:
        c, self.rest = self.rest[0], self.rest[1:]
        if c != "\\":
            return [(ord(c), ord(c))]
        ranges, negated = self._escape()
        if negated:
            raise Inexpressible
        return ranges

    def _escape(self) -> tuple[Ranges, bool]:
        """The characters of an escape, and whether it is all but these."""
        if not self.rest:
            raise Inexpressible
        c, self.rest = self.rest[0], self.rest[1:]
        if c.lower() in _CLASSES:
            return _CLASSES[c.lower()], c.isupper()
        if c in "xu":
            n = 2 if c == "x" else 4
            digits, self.rest = self.rest[:n], self.rest[n:]
            try:
                code = int(digits, 16)
            except ValueError:
                raise Inexpressible from None
            if len(digits) != n or 0xD800 <= code <= 0xDFFF:
                raise Inexpressible
        elif c in _CONTROL_ESCAPES and not (c == "0" and self.rest[:1].isdecimal()):
            code = _CONTROL_ESCAPES[c]
        elif c.isalnum():
            raise Inexpressible  # a boundary, a reference to a group, a property
        else:
            code = ord(c)
        return [(code, code)], False

    def _take(self, text: str) -> bool:
        found = self.rest.startswith(text)
        if found:
            self.rest = self.rest[len(text) :]
        return found


def _without(part: tuple[int, int], low: int, high: int) -> Sequence[tuple[int, int]]:
    """What a range has outside low..high."""
    first, last = part
    return [
        (a, b) for a, b in ((first, min(last, low - 1)), (max(first, high + 1), last)) if a <= b
    ]


def _range(part: tuple[int, int]) -> str:
    low, high = part
    return _in_class(low) if low == high else f"{_in_class(low)}-{_in_class(high)}"


def _in_class(code: int) -> str:
    c = chr(code)
    return c if c.isascii() and c.isalnum() else _code(code)


def _code(code: int) -> str:
    if code <= 0xFF:
        return f"\\x{code:02X}"
    return f"\\u{code:04X}" if code <= 0xFFFF else f"\\U{code:08X}"
