"""A conversation as a JSON file, to be gone on with later.

    {
      "format": "knapspec-edge conversation", "version": 1,
      "saved_at": "2025-01-31T18:00:00+00:00",
      "model": {"name": "...", "fingerprint": "..."},
      "settings": {"temperature": 0.7, ...},        what is not the default
      "overflow": "stop",
      "system": "..." or null,
      "messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}, ...]
    }

Settings have the names of `sampling.Settings`, biases the form of --logit-bias. User and assistant
take turns; thoughts are part of what the assistant said. Keys that are not known are passed over.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ..config import OVERFLOWS
from ..errors import OutputError, UsageError
from ..folders import read_at_most
from ..sampling import VALUES, Settings, parse_bias
from ..text.templates import Message
from .files import check_writable, target, temporary
from .jsonl import sync

FORMAT = "knapspec-edge conversation"
VERSION = 1

_MAX_BYTES = 256 << 20  # by mistake: no context holds as much


@dataclass(frozen=True)
class Saved:
    """What a file holds. `messages`: user and assistant in turn, without the system prompt."""

    messages: tuple[Message, ...]
    system: str | None = None
    settings: Settings = Settings()
    overflow: str = OVERFLOWS[0]
    model_name: str = ""
    fingerprint: str = ""
    saved_at: str = ""  # ISO 8601, with its time zone


def load(path: Path) -> Saved:
    """Raises UsageError, one line, for a file that cannot be read or is no conversation."""
    try:
        if path.is_dir():
            raise UsageError(f"cannot read {path}: it is a folder")
        text = read_at_most(path, _MAX_BYTES).decode("utf-8-sig")
    except FileNotFoundError:
        raise UsageError(f"there is no conversation {path}: no such file") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path} is no saved conversation: not a text file") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {path}: {getattr(error, 'strerror', error)}") from None
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = "a number is too long"
        if isinstance(error, json.JSONDecodeError):
            reason = f"line {error.lineno}"
        elif isinstance(error, RecursionError):
            reason = "too deep"
        raise UsageError(f"{path} is no saved conversation: it is not JSON ({reason})") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise UsageError(f'{path} is no saved conversation: "format" is not "{FORMAT}"')
    if data.get("version") != VERSION:
        raise UsageError(
            f"{path} is a conversation of another version ({data.get('version')!r}, this program "
            f"reads {VERSION})"
        )
    try:
        return _read(data)
    except (UsageError, ValueError, TypeError, OverflowError) as error:
        raise UsageError(f"{path} is damaged: {error}") from None


def _read(data: Mapping[str, Any]) -> Saved:
    messages = data.get("messages")
    if not isinstance(messages, list):
        raise ValueError('"messages" is not a list')
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            raise ValueError(f"message {i + 1} has no text")
        role = ("user", "assistant")[i % 2]
        if message.get("role") != role:
            raise ValueError(
                f"message {i + 1} is by {message.get('role')!r} in place of {role!r}; user and "
                "assistant take turns"
            )
        _check_text(message["content"], f"message {i + 1}")
    if len(messages) % 2:
        raise ValueError("the last message has no answer")
    system = data.get("system")
    if not isinstance(system, str | None):
        raise ValueError('"system" is not a text')
    _check_text(system or "", '"system"')
    overflow = data.get("overflow", OVERFLOWS[0])
    if overflow not in OVERFLOWS:
        raise ValueError(f'"overflow" is {overflow!r}; it is {" or ".join(OVERFLOWS)}')
    model = data.get("model")
    model = model if isinstance(model, dict) else {}
    return Saved(
        tuple({"role": m["role"], "content": m["content"]} for m in messages),
        system or None,
        _settings(data.get("settings", {})),
        overflow,
        str(model.get("name", "")),
        str(model.get("fingerprint", "")),
        str(data.get("saved_at", "")),
    )


def _check_text(text: str, what: str) -> None:
    """JSON can name half a character, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{what} is not text") from None


def _settings(data: Any) -> Settings:
    if not isinstance(data, dict):
        raise ValueError('"settings" is not an object')
    known = {field.name for field in fields(Settings)}
    given = {name: value for name, value in data.items() if name in known}
    for name, kind in (("stop", list), ("logit_bias", list)):
        entries = given.get(name) or []
        if not isinstance(entries, kind) or not all(isinstance(e, str) for e in entries):
            raise ValueError(f'"{name}" is not a list of texts')
    for name in ("preset", "grammar"):
        if not isinstance(given.get(name, ""), str | None):
            raise ValueError(f'"{name}" is not a text')
    for name in ("seed", "max_tokens", "logprobs"):
        value = given.get(name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise ValueError(f'"{name}" is not a whole number')
    for name in ("think", "temperature_first"):
        if not isinstance(given.get(name), bool | None):
            raise ValueError(f'"{name}" is neither true nor false')
    if not isinstance(given.get("json_schema"), str | dict | bool | None):
        raise ValueError('"json_schema" is no schema')
    if "stop" in given:
        given["stop"] = tuple(given["stop"] or ())
    if "logit_bias" in given:  # none is an empty list in some files
        given["logit_bias"] = dict(map(parse_bias, given["logit_bias"] or ())) or None
    settings = Settings(**given)
    settings.sampling()  # what is out of range
    return settings


def begin(
    source: Path | None,
    kept_in: Path | None,
    settings: Settings,
    *,
    system: str | None = None,
    overflow: str | None = None,
) -> Saved:
    """What a chat begins with: the conversation in `source`, if any, with what was asked for in
    place of what was saved. `kept_in`: where it is to be saved to.

    Raises UsageError, one line, also where saving would overwrite something else.
    """
    if kept_in is not None:
        check_target(kept_in)
        try:
            is_other = kept_in.stat().st_size > 0 and not (source and source.samefile(kept_in))
        except FileNotFoundError:
            is_other = False
        if is_other:
            raise UsageError(
                f"{kept_in} holds a conversation: --load {kept_in} goes on with it, or give "
                "another name"
            )
    if source is None:
        return Saved((), system or None, settings, overflow or OVERFLOWS[0])
    saved = load(source)
    return replace(
        saved,
        settings=_overridden(saved.settings, settings),
        system=saved.system if system is None else system or None,
        overflow=overflow or saved.overflow,
    )


def _overridden(saved: Settings, asked: Settings) -> Settings:
    given = _differing(asked)
    if "preset" in given:  # it stands for all numbers of the sampler
        numbers: dict[str, Any] = dict.fromkeys((*VALUES, "temperature_first"))
        saved = replace(saved, **numbers)
    if "grammar" in given or "json_schema" in given:
        saved = replace(saved, grammar=None, json_schema=None)
    return replace(saved, **given)


def _differing(settings: Settings) -> dict[str, Any]:
    """The fields that are not the default."""
    default = Settings()
    values = {field.name: getattr(settings, field.name) for field in fields(settings)}
    values["logit_bias"] = values["logit_bias"] or None  # the command line gives an empty one
    return {name: v for name, v in values.items() if v != getattr(default, name)}


def check_target(path: Path) -> None:
    """Whether a conversation may be written there: into a new file, or in place of another
    conversation. Raises UsageError, one line."""
    check_writable(path, "the conversation")
    if not path.exists() or path.stat().st_size == 0:
        return
    try:
        load(path)
    except UsageError as error:
        raise UsageError(f"{error}; it is not overwritten, give another name") from None


def save(path: Path, saved: Saved) -> None:
    """Write it, all of it or nothing, in place of a conversation that may be there.

    Raises UsageError where something else is there, OutputError where it cannot be written.
    """
    check_target(path)
    data = {
        "format": FORMAT,
        "version": VERSION,
        "saved_at": saved.saved_at or datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "model": {"name": saved.model_name, "fingerprint": saved.fingerprint},
        "settings": _settings_json(saved.settings),
        "overflow": saved.overflow,
        "system": saved.system,
        "messages": list(saved.messages),
    }
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, indent=1) + "\n"
    new = temporary(path)
    try:
        try:
            with open(new, "xb") as file:
                file.write(text.encode("utf-8", "replace"))
                file.flush()
                if path.exists():
                    os.chmod(new, path.stat().st_mode & 0o777)
                sync(file.fileno())
            os.replace(new, target(path))
        except BaseException:
            with suppress(OSError):
                new.unlink()
            raise
    except OSError as error:
        raise OutputError(
            f"cannot save the conversation as {path}: {error.strerror or error}"
        ) from None


def _settings_json(settings: Settings) -> dict[str, Any]:
    given = _differing(settings)
    if "logit_bias" in given:
        given["logit_bias"] = [f"{token}{bias:+}" for token, bias in given["logit_bias"].items()]
    return given


def turns(messages: Sequence[Message]) -> list[tuple[str, str]]:
    """(question, answer) pairs."""
    texts = [message["content"] for message in messages]
    return list(zip(texts[::2], texts[1::2], strict=True))
