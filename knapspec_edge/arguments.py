"""Whether what a library user passed is of the kind that a function takes.

Type hints are not enforced, and a wrong kind would show as an exception of whatever meets it first.
Each function raises UsageError, one line.
"""

from __future__ import annotations

import os
import reprlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from numbers import Integral, Real
from typing import Any

from .errors import UsageError

_SHOWN_CHARACTERS = 80
_CUT_CHARACTERS = 300
_short = reprlib.Repr()
_short.maxstring = _short.maxother = _short.maxlong = _SHOWN_CHARACTERS


def shown(value: Any) -> str:
    """A value in a message of one line, whatever it is: cut where it is long."""
    return " ".join(_short.repr(value).split())


def cut(text: str) -> str:
    """What somebody wrote, such as a path, in a message of one line."""
    line = " ".join(text.splitlines())
    return line if len(line) <= _CUT_CHARACTERS else f"{line[: _CUT_CHARACTERS - 1]}…"


def whole_or_none(name: str, value: Any) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, Integral)):
        raise UsageError(f"{name} is {shown(value)}; it has to be a whole number")


def number(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise UsageError(f"{name} is {shown(value)}; it has to be a number")


def flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise UsageError(f"{name} is {shown(value)}; it has to be True or False")


def flag_or_none(name: str, value: Any) -> None:
    if value is not None:
        flag(name, value)


def choice(name: str, value: Any, choices: Sequence[str]) -> None:
    if not isinstance(value, str) or value not in choices:
        given = cut(value) if isinstance(value, str) else shown(value)
        raise UsageError(f"{name} {given} is unknown: choose one of {', '.join(choices)}")


def text(name: str, value: Any) -> None:
    if not isinstance(value, str):
        raise UsageError(f"{name} is {shown(value)}; it has to be a text")


def text_or_none(name: str, value: Any) -> None:
    if value is not None:
        text(name, value)


def path_or_none(name: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, os.PathLike):
        with suppress(TypeError):  # its __fspath__ gives neither text nor bytes
            value = os.fspath(value)
    if not isinstance(value, str):
        raise UsageError(f"{name} is {shown(value)}; it has to be a name or a path")
    if "\0" in value:
        raise UsageError(f"{name} is {shown(value)}; a path holds no zero byte")


def callable_or_none(name: str, value: Any) -> None:
    if value is not None and not callable(value):
        raise UsageError(f"{name} is {shown(value)}; it has to be a function")


def token_ids(prompt: Any) -> list[int]:
    """The prompt as a list of whole numbers."""
    if isinstance(prompt, bytes | bytearray):
        raise UsageError("the prompt is bytes; give a text, as in prompt.decode()")
    try:
        tokens = list(prompt)
    except TypeError:
        raise UsageError(
            f"the prompt is {shown(prompt)}; give a text or a list of token ids"
        ) from None
    for token in tokens:
        if isinstance(token, bool) or not isinstance(token, Integral):
            raise UsageError(
                f"the prompt holds {shown(token)}; its tokens have to be whole numbers"
            )
    return [int(token) for token in tokens]


def messages(given: Any) -> None:
    """A conversation: mappings with the texts "role" and "content"."""
    example = 'give a list such as [{"role": "user", "content": "Hello"}]'
    if not isinstance(given, Sequence) or isinstance(given, str | bytes):
        raise UsageError(f"messages is a {type(given).__name__}; {example}")
    for i, message in enumerate(given):
        if not isinstance(message, Mapping):
            raise UsageError(f"message {i} is a {type(message).__name__}; {example}")
        for key in ("role", "content"):
            if key not in message:
                raise UsageError(f"message {i} has no {key!r}; {example}")
            if not isinstance(message[key], str):
                raise UsageError(
                    f"message {i} has the {key} {shown(message[key])}; it has to be a text"
                )
        if not message["role"]:
            raise UsageError(f"message {i} has an empty role; {example}")
