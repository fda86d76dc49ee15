"""Where an option's value comes from: command line, environment, configuration file, default.

The file becomes click's default map before a command is parsed. A fault in it ends every command
with one line, except those that help to find it and every `--help`.
"""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from .errors import KnapspecError, UsageError
from .folders import config_file, expanded

PREFIX = "KNAPSPEC_EDGE_"
MODEL_VARIABLE = f"{PREFIX}MODEL"
# Variables that are no option's.
OTHER_VARIABLES = {
    "CONFIG": "configuration file to read; empty: none",
    "CACHE": "folder for models and measurements",
    "DEBUG": "1 shows tracebacks",
    "NATIVE_LOG": "error, warn, info or debug: llama.cpp's own log",
    "NUMBA": "0 keeps Numba out",
    "LIBRARY": "folder of other builds of the patched llama.cpp",
    "SDIST": "archive with llama.cpp's sources, for the build",
    "PRISTINE_LIB": "for the tests",
    "TINY_MODELS": "for the tests",
}
_META = f"{__name__}.loaded"
_WITHOUT_CONFIG = ("doctor", "config", "completion")
_MAX_BYTES = 1 << 20


@dataclass(frozen=True)
class Loaded:
    """The configuration file as read."""

    path: Path | None
    exists: bool = False
    defaults: dict[str, Any] = field(default_factory=dict)  # click's default map of the root
    problem: str | None = None  # one line; nothing of the file holds then

    def to_json(self) -> dict[str, Any]:
        path = None if self.path is None else str(self.path)
        return {"path": path, "exists": self.exists, "problem": self.problem}


class Command(click.Command):
    """A command whose options have defaults in the configuration file, and that says where a wrong
    value comes from."""

    def invoke(self, ctx: click.Context) -> Any:
        problem = loaded(ctx).problem
        if problem is not None and self.name not in _WITHOUT_CONFIG:
            raise UsageError(problem)
        try:
            return super().invoke(ctx)
        except KnapspecError as error:
            if origins := _origins(ctx, str(error)):
                error.args = (f"{error} ({'; '.join(origins)})",)
            raise


class Group(click.Group):
    """A group of such commands."""

    command_class = Command


def loaded(ctx: click.Context) -> Loaded:
    found = ctx.meta.get(_META)
    return found if isinstance(found, Loaded) else Loaded(None)


def apply(ctx: click.Context) -> None:
    """Read the file and give its values to the commands below this context. Never fails."""
    if _META not in ctx.meta and isinstance(ctx.command, click.Group):
        found = load(ctx.command)
        ctx.meta[_META] = found
        ctx.default_map = found.defaults


def load(root: click.Group) -> Loaded:
    path = config_file()
    if path is None:
        return Loaded(None)
    try:
        text = _read(path)
        if text is None:
            return Loaded(path)
        return Loaded(path, True, _Reader(path, text).defaults(root))
    except UsageError as error:
        return Loaded(path, True, {}, str(error))


def default_model(ctx: click.Context | None = None) -> str | None:
    """The MODEL of a command line without one; None: the demo."""
    ctx = ctx or click.get_current_context(silent=True)
    from_file = None if ctx is None else ctx.lookup_default("model")
    return os.environ.get(MODEL_VARIABLE) or from_file or None


def origin(ctx: click.Context, param: click.Parameter) -> str | None:
    """The variable, or the key and file, that an option has its value from; None: neither."""
    source = ctx.get_parameter_source(param.name or "")
    if source is ParameterSource.ENVIRONMENT:
        return variable(param)
    if source is ParameterSource.DEFAULT_MAP:
        return f"{key_of(param)} in {loaded(ctx).path}"
    return None


def variable(param: click.Parameter) -> str | None:
    """The environment variable of an option."""
    named = param.envvar
    if named is None or isinstance(named, str):
        return named
    return next(iter(named), None)


def key_of(param: click.Parameter) -> str | None:
    """What the configuration file calls it: --min-p is min-p. None: it cannot be set there."""
    if isinstance(param, click.Argument):
        return "model" if param.name == "model" else None
    names = [name for name in param.opts if name.startswith("--")]
    if not names or param.name in ("help", "version"):
        return None
    return max(names, key=len).removeprefix("--")


def keys(command: click.Command) -> dict[str, click.Parameter]:
    """Everything that a command takes from the configuration file, by key."""
    found = {key: param for param in command.params if (key := key_of(param)) is not None}
    if any(getattr(param, "takes_model", False) for param in command.params):
        found["model"] = click.Argument(["model"], required=False, envvar=MODEL_VARIABLE)
    return found


def _origins(ctx: click.Context, message: str) -> list[str]:
    """Of the options that a message speaks of, those that nobody typed here."""
    found = []
    for key, param in keys(ctx.command).items():
        value = ctx.params.get(param.name or "")
        where = origin(ctx, param)
        if key == "model" and "model" not in ctx.params and (value := default_model(ctx)):
            in_environment = os.environ.get(MODEL_VARIABLE)
            where = MODEL_VARIABLE if in_environment else f"model in {loaded(ctx).path}"
        if where is None:
            continue
        words = re.escape(key).replace(r"\-", "[- ]")  # "the JSON schema" is json-schema
        named = re.search(rf"(?<![\w-])(--)?{words}(?![\w-])", message, re.IGNORECASE)
        if key == "model":  # a word of many messages
            named = None
        if named or (isinstance(value, str) and len(value) > 2 and _speaks_of(message, value)):
            found.append(
                f"{key} comes from {where}" if where == variable(param) else f"see {where}"
            )
    return found


def _speaks_of(message: str, value: str) -> bool:
    return value in message or str(expanded(value)) in message


# -- reading the file


def _read(path: Path) -> str | None:
    """Its text; None where there is none. Raises UsageError."""
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
        if len(data) > _MAX_BYTES:
            raise UsageError(f"{path} is too large for a configuration file")
        return data.decode("utf-8-sig")
    except FileNotFoundError:
        if os.environ.get(f"{PREFIX}CONFIG"):
            raise UsageError(
                f"there is no configuration file {path}, which {PREFIX}CONFIG names"
            ) from None
        return None
    except NotADirectoryError:
        return None
    except OSError as error:
        raise UsageError(
            f"cannot read the configuration file {path}: {error.strerror or error}"
        ) from None
    except UnicodeDecodeError:
        raise UsageError(f"the configuration file {path} is not UTF-8 text") from None


class _Reader:
    """From the text of a file to click's default map. Raises UsageError, one line."""

    def __init__(self, path: Path, text: str) -> None:
        self._path = path
        self._text = text

    def defaults(self, root: click.Group) -> dict[str, Any]:
        if sys.version_info >= (3, 11):
            import tomllib
        else:
            import tomli as tomllib
        try:
            table = tomllib.loads(self._text)
        except (tomllib.TOMLDecodeError, RecursionError) as error:
            raise UsageError(f"{self._path} is not TOML: {error}") from None
        return self._of_group(root, table, (), {})

    def _of_group(
        self,
        group: click.Group,
        table: Mapping[str, Any],
        place: tuple[str, ...],
        inherited: Mapping[str, Any],
    ) -> dict[str, Any]:
        """`inherited`: settings of the tables around this one, which a command's own override."""
        takers: dict[str, list[click.Command]] = {}
        for command in _commands(group):
            for key in keys(command):
                takers.setdefault(key, []).append(command)
        settings = dict(inherited)
        for key, value in table.items():
            if key in group.commands:
                if not isinstance(value, dict):
                    raise self._error(place, key, f"{key} is a command: write [{key}] on a line")
                continue
            known = key.replace("_", "-")
            if known not in takers:
                raise self._unknown(place, key, [*takers, *group.commands])
            # another command's range may be narrower, and says so itself
            problems = [self._problem(c, keys(c)[known], value) for c in takers[known]]
            if None not in problems:
                raise self._error(place, key, f"{key} is {_shown(value)}; {problems[0]}")
            self._check_once(place, key, known, table)
            settings[known] = value
        result: dict[str, Any] = {}
        for name, command in group.commands.items():
            own = table.get(name, {})
            if isinstance(command, click.Group):
                result[name] = self._of_group(command, own, (*place, name), settings)
            else:
                result[name] = self._of_command(command, own, (*place, name), settings)
        return result

    def _of_command(
        self,
        command: click.Command,
        table: Mapping[str, Any],
        place: tuple[str, ...],
        inherited: Mapping[str, Any],
    ) -> dict[str, Any]:
        known = keys(command)
        settings = {key: value for key, value in inherited.items() if key in known}
        for key, value in table.items():
            name = key.replace("_", "-")
            if name not in known:
                raise self._unknown(place, key, list(known))
            problem = self._problem(command, known[name], value)
            if problem is not None:
                raise self._error(place, key, f"{key} is {_shown(value)}; {problem}")
            self._check_once(place, key, name, table)
            settings[name] = value
        return {known[k].name or k: _for_click(known[k], v) for k, v in settings.items()}

    def _problem(self, command: click.Command, param: click.Parameter, value: Any) -> str | None:
        """What is wrong with a value, or None."""
        values = value if isinstance(value, list) else [value]
        if isinstance(value, list) and not getattr(param, "multiple", False):
            return "it takes one value"
        expected = _kind(param)
        if any(not expected.holds(v) for v in values):
            return f"it has to be {expected.name}"
        try:
            ctx = click.Context(command, resilient_parsing=False)
            given = _for_click(param, value)
            if getattr(param, "expose_value", True):
                param.process_value(ctx, given)
            else:  # its callback acts
                param.type_cast_value(ctx, given)
        except click.BadParameter as error:
            return error.message.rstrip(".")
        except KnapspecError as error:
            return str(error)
        return None

    def _check_once(
        self, place: tuple[str, ...], key: str, name: str, table: Mapping[str, Any]
    ) -> None:
        """TOML itself takes min_p and min-p for two keys."""
        if key != name and name in table:
            raise self._error(place, key, f"{name} is given twice, as {key} and as {name}")

    def _unknown(self, place: tuple[str, ...], key: str, known: list[str]) -> UsageError:
        near = difflib.get_close_matches(key.replace("_", "-"), known, n=1, cutoff=0.5)
        hint = f"; the nearest is {near[0]}" if near else ""
        where = f" in [{'.'.join(place)}]" if place else ""
        return self._error(
            place,
            key,
            f"there is no setting {key}{where}{hint}; `knapspec-edge config "
            f"{place[0] if place else 'run'}` lists them",
        )

    def _error(self, place: tuple[str, ...], key: str, what: str) -> UsageError:
        line = _line_of(self._text, ".".join(place), key)
        return UsageError(f"{self._path}{'' if line is None else f', line {line}'}: {what}")


@dataclass(frozen=True)
class _Kind:
    """What TOML may say for an option."""

    name: str
    types: tuple[type, ...]

    def holds(self, value: Any) -> bool:
        return isinstance(value, self.types) and (bool in self.types) == isinstance(value, bool)


def _kind(param: click.Parameter) -> _Kind:
    if getattr(param, "is_flag", False):
        return _Kind("true or false", (bool,))
    if isinstance(param.type, click.types.IntParamType):
        return _Kind("a whole number", (int,))
    if isinstance(param.type, click.types.FloatParamType):
        return _Kind("a number", (int, float))
    if (getattr(param, "metavar", None) or "").endswith("|N"):
        return _Kind("a text or a number", (str, int))
    return _Kind("a text in quotation marks", (str,))


def _for_click(param: click.Parameter, value: Any) -> Any:
    """As the command line would bring it."""
    if getattr(param, "multiple", False):
        return tuple(value) if isinstance(value, list) else (value,)
    if isinstance(value, int) and isinstance(param.type, click.types.StringParamType):
        return str(value)
    return value


def _shown(value: Any) -> str:
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else f"{text[:59]}…"


def _line_of(text: str, table: str, key: str) -> int | None:
    """Where a key of a table stands, as far as that can be seen without the grammar."""
    here = ""
    for number, line in enumerate(text.splitlines(), 1):
        if match := re.match(r"\s*\[([^\[\]]+)\]", line):
            here = match[1].strip()
            if here == f"{table}.{key}".lstrip("."):
                return number
        elif here == table and re.match(rf"\s*[\"']?{re.escape(key)}[\"']?\s*[=.]", line):
            return number
    return None


def _commands(group: click.Group) -> Iterator[click.Command]:
    for command in group.commands.values():
        if isinstance(command, click.Group):
            yield from _commands(command)
        else:
            yield command


# -- the command


@click.command(cls=Command)
@click.argument("command", required=False, metavar="[COMMAND]")
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    envvar=f"{PREFIX}JSON",
    help="Print one JSON object.",
)
@click.pass_context
def config(ctx: click.Context, command: str | None, as_json: bool) -> int:
    """Show the configuration file and which settings hold, with where each comes from; with COMMAND
    all settings of that command. Exits with 2 if something is wrong with them.

    The file is TOML: one line NAME = VALUE for each option, named as on the command line. What
    stands at the top holds for all commands that have the option; what stands below [COMMAND]
    for that command. The command line comes first, then the environment, then the file.

    \b
    Examples:
      knapspec-edge config
      knapspec-edge config chat

    \b
    A file:
      model = "~/models/model.gguf"
      threads = 4
      [chat]
      preset = "llama.cpp"
      system = "You are brief."
    """
    root = ctx.find_root()
    found = loaded(ctx)
    assert isinstance(root.command, click.Group)
    if command is not None and command not in root.command.commands:
        near = difflib.get_close_matches(command, list(root.command.commands), n=1)
        hint = f"; the nearest is {near[0]}" if near else ""
        raise UsageError(f"there is no command {command}{hint}")
    rows: dict[tuple[str, str, str], list[str]] = {}
    problems = [] if found.problem is None else [found.problem]
    for name, setting in _settings(root, command, problems):
        rows.setdefault(setting, []).append(name)
    notes = _strangers(root.command)
    if as_json:
        import json

        settings = [
            {"name": n, "value": v, "source": s, "commands": c} for (n, v, s), c in rows.items()
        ]
        content = {"file": found.to_json(), "settings": settings}
        click.echo(json.dumps({**content, "problems": problems, "notes": notes}, indent=2))
    else:
        _print(found, command, rows)
        for note in notes:
            click.echo(f"note: {note}")
        for problem in problems:
            click.echo(f"problem: {problem}")
    return 2 if problems else 0


def _settings(
    root: click.Context, only: str | None, problems: list[str]
) -> Iterator[tuple[str, tuple[str, str, str]]]:
    """(command, (setting, value, where it comes from)); of all commands those that are set."""
    assert isinstance(root.command, click.Group)
    for ctx in _contexts(root, root.command, only):
        for key, param in sorted(keys(ctx.command).items()):
            value, source = param.consume_value(ctx, {})
            ctx.set_parameter_source(param.name or "", source)
            where = origin(ctx, param)
            if where is None and only is None:
                continue
            if where is not None:
                try:
                    param.type_cast_value(ctx, value)
                except click.BadParameter as error:
                    problem = f"{where}: {error.message.rstrip('.')}"
                    if problem not in problems:
                        problems.append(problem)
            named = variable(param)
            default = "default" if named is None else f"default ({named} sets it)"
            if source is ParameterSource.DEFAULT_MAP:
                where = "the file"
            yield ctx.command_path, (key, _value(value), where or default)


def _contexts(
    parent: click.Context, group: click.Group, only: str | None
) -> Iterator[click.Context]:
    for name, command in group.commands.items():
        if only is None or name == only:
            ctx = click.Context(command, parent=parent, info_name=name)
            if isinstance(command, click.Group):
                yield from _contexts(ctx, command, None)
            else:
                yield ctx


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str | int | float):
        return str(value)
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "-"
    return "-"  # none, or click's mark for it


def _strangers(root: click.Group) -> list[str]:
    """Variables with our prefix that nothing reads: a typing error, most likely."""
    known = {f"{PREFIX}{name}" for name in OTHER_VARIABLES}
    for command in _commands(root):
        for param in keys(command).values():
            named = param.envvar
            known.update([named] if isinstance(named, str) else named or ())
    notes = []
    for name in sorted(os.environ):
        if name.startswith(PREFIX) and name not in known:
            near = difflib.get_close_matches(name, sorted(known), n=1)
            hint = f"; the nearest is {near[0]}" if near else ""
            notes.append(f"nothing reads the variable {name}{hint}")
    return notes


def _print(
    found: Loaded, command: str | None, rows: Mapping[tuple[str, str, str], list[str]]
) -> None:
    if found.path is None:
        click.echo(f"file: none ({PREFIX}CONFIG is empty)")
    else:
        click.echo(f"file: {found.path}{'' if found.exists else ' (not there)'}")
    if not rows and found.problem is None:
        click.echo("nothing is set: all options have their defaults")
        return
    table = []
    for cells, commands in rows.items():
        table.append((*cells, "" if command else ", ".join(_short(c) for c in commands)))
    widths = [max(len(row[i]) for row in table) for i in range(4)] if table else []
    for row in table:
        line = "  ".join(f"{c:<{w}}" for c, w in zip(row, widths, strict=True))
        click.echo(line.rstrip())


def _short(path: str) -> str:
    with suppress(ValueError):
        return path.split(" ", 1)[1]
    return path
