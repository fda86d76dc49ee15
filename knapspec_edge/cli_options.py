"""Options of the command line that several commands share, and how their values are read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from .sampling import (
    DEFAULT_PRESET,
    MAX_COUNT,
    MAX_LOGPROBS,
    PRESETS,
    VALUES,
    differences,
    parse_bias,
)

PREFIX = "KNAPSPEC_EDGE_"

F = TypeVar("F", bound=Callable[..., Any])


def option(*names: str, **settings: Any) -> Callable[[F], F]:
    """An option with its environment variable: --min-p is KNAPSPEC_EDGE_MIN_P."""
    long = next(name for name in names if name.startswith("--"))
    variable = PREFIX + long.removeprefix("--").replace("-", "_").upper()
    return click.option(*names, envvar=variable, **settings)


class Number(click.FloatRange):
    """A range without "nan", which compares as inside every range."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if number != number:
            self.fail(f"{value} is not a number", param, ctx)
        return number


def _biases(
    ctx: click.Context, param: click.Parameter, values: tuple[str, ...]
) -> dict[int, float]:
    return dict(map(parse_bias, values))


def _value(field: str, text: str) -> Callable[[F], F]:
    """An option for one number of the sampler; without it the preset's holds."""
    value = VALUES[field]
    return option(
        f"--{value.name}",
        field,
        type=click.IntRange(int(value.low), None if value.high == MAX_COUNT else int(value.high))
        if value.whole
        else Number(value.low, value.high),
        metavar="N" if value.whole else "X",
        help=text,
    )


def _presets() -> str:
    """What each preset stands for, for the help."""
    words = (
        f"{name} ({', '.join(' '.join(row) for row in differences(values))})"
        for name, values in PRESETS.items()
    )
    return ", ".join(words)


SAMPLING_OPTIONS = (
    option(
        "--preset",
        type=click.Choice(list(PRESETS)),
        default=DEFAULT_PRESET,
        show_default=True,
        help=f"Values of all sampling options that are not given: {_presets()}.",
    ),
    _value("temperature", "Temperature; 0 always takes the most probable token."),
    _value("top_k", "Choose among the N most probable tokens; 0: all."),
    _value("top_p", "Choose among the most probable tokens that together have this share; 1: all."),
    _value("min_p", "Leave out tokens less probable than this share of the best; 0: none."),
    _value("typical_p", "Choose among the most typical tokens that together have this share."),
    _value("repeat_penalty", "Make tokens of the text before less likely; 1: off."),
    _value("presence_penalty", "Take this from the logit of each token of the text before."),
    _value("frequency_penalty", "Take this from it for each time that the token occurs."),
    _value("repeat_last_n", "Tokens that penalties look back on; 64 by default, -1: all."),
    option(
        "--logit-bias",
        callback=_biases,
        multiple=True,
        metavar="TOKEN(+|-)BIAS",
        help="Add BIAS to the logit of a token id, as in 15043+1.5; -inf forbids it; repeatable.",
    ),
    option("--grammar", metavar="FILE", help="Form of the answer: a GBNF grammar, rule root."),
    option(
        "--json-schema",
        metavar="FILE|JSON",
        help="Form of the answer: JSON that keeps to this schema; json: any JSON.",
    ),
)
LOGPROBS_OPTION = option(
    "--logprobs",
    type=click.IntRange(0, MAX_LOGPROBS),
    metavar="N",
    help="With --json: log-probabilities of all tokens, and of the N most probable at each place.",
)


def sampling_settings(options: dict[str, Any]) -> dict[str, Any]:
    """Fields of sampling.Settings that these options give, files read.

    Raises UsageError, one line.
    """
    from .text import grammar

    given = {name: options[name] for name in ("preset", *VALUES, "logit_bias")}
    if options["grammar"] is not None:
        given["grammar"] = grammar.read_grammar(options["grammar"])
    if options["json_schema"] is not None:
        given["json_schema"] = grammar.read_schema(options["json_schema"])
    return given
