"""The form of an answer, as people give it: a GBNF grammar, or a JSON schema as text, file or data.

Whether llama.cpp takes a grammar is found out by the backend, which has its parser.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NoReturn

from ..errors import UsageError
from ..folders import expanded, read_at_most
from . import json_schema

ANY_JSON = "json"  # in place of a schema: any JSON value
_MAX_FILE_BYTES = 4 << 20


def check_grammar(text: str) -> str:
    """The grammar itself. Raises UsageError, one line, for what can be no GBNF."""
    if not text.strip():
        raise UsageError("the grammar is empty")
    if "\0" in text:
        raise UsageError("the grammar is not text: it has a zero byte")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UsageError("the grammar is not text: it has half of a surrogate pair") from None
    return text


def grammar_of_schema(schema: str | Mapping[str, Any] | bool) -> tuple[str, tuple[str, ...]]:
    """(GBNF of a JSON schema, those of its keywords that the grammar does not hold to).

    `schema`: its text, the schema itself, or "json" for any JSON value. Raises UsageError, one
    line.
    """
    if isinstance(schema, str):
        return _converted("{}" if schema.strip() == ANY_JSON else schema)
    try:
        return _converted(json.dumps(schema, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise UsageError(f"the JSON schema is no JSON: {error}") from None
    except RecursionError:
        raise UsageError("the JSON schema is nested too deeply") from None


# a conversation asks for the same schema with every answer
@lru_cache(maxsize=16)
def _converted(text: str) -> tuple[str, tuple[str, ...]]:
    try:
        schema = json.loads(text, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise UsageError(
            f"the JSON schema is no JSON: {error.msg} in line {error.lineno}, column {error.colno}"
        ) from None
    except RecursionError:
        raise UsageError("the JSON schema is nested too deeply") from None
    if not isinstance(schema, dict | bool):
        raise UsageError(
            'the JSON schema has to be an object, such as {"type": "object"}, or "json" for any '
            "JSON"
        )
    return json_schema.convert(schema)


def _no_constant(name: str) -> NoReturn:
    raise UsageError(f"the JSON schema is no JSON: it has {name}")


def read_grammar(path: str) -> str:
    """The text of a grammar file. Raises UsageError, one line."""
    return check_grammar(_read(path, "the grammar"))


def read_schema(text_or_path: str) -> str:
    """A JSON schema's text, from itself ("json" or what begins like JSON) or from a file."""
    start = text_or_path.lstrip()
    if start[:1] in ("{", "[", '"') or start.strip() in (ANY_JSON, "true", "false"):
        return text_or_path
    return _read(text_or_path, "the JSON schema")


def _read(path: str, what: str) -> str:
    if not path:  # which would be the current folder
        raise UsageError(f"{what} is empty; give a file")
    try:
        text = read_at_most(expanded(path), _MAX_FILE_BYTES).decode("utf-8")
    except UnicodeDecodeError:
        raise UsageError(f"cannot read {what} {path}: it is not UTF-8 text") from None
    except (OSError, ValueError) as error:  # no such file, a zero byte
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"cannot read {what} {path}: {reason}") from None
    if "\0" in text:
        raise UsageError(f"cannot read {what} {path}: it is not text")
    return text.removeprefix("\ufeff")
