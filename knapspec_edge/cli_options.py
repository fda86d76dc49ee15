"""Options of the command line that several commands share, and how their values are read."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from . import cli_completion, policies
from .cli_config import MODEL_VARIABLE, PREFIX
from .config import CTX_TOKENS_MAX, EXACTNESS, GPU_LAYERS_MAX, SPECS, THREADS_MAX
from .errors import UsageError
from .sampling import (
    DEFAULT_PRESET,
    MAX_COUNT,
    MAX_LOGPROBS,
    PRESETS,
    VALUES,
    differences,
    parse_bias,
)
from .text.builtin_templates import BUILTIN

if TYPE_CHECKING:
    from .records import Sampling
    from .sampling import Settings

KV_TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0")

F = TypeVar("F", bound=Callable[..., Any])


def option(*names: str, **settings: Any) -> Callable[[F], F]:
    """An option with its environment variable: --min-p is KNAPSPEC_EDGE_MIN_P."""
    long = next(name for name in names if name.startswith("--"))
    long = long.split("/")[0]  # --think/--no-think
    variable = PREFIX + long.removeprefix("--").replace("-", "_").upper()
    settings.setdefault("envvar", variable)
    if "FILE" in settings.get("metavar", ""):
        settings.setdefault("shell_complete", cli_completion.files)
    return click.option(*names, **settings)


class Arguments(click.Argument):
    """Several arguments, the first of which may be a MODEL."""

    takes_model = True


MODEL = click.argument(
    "model", required=False, envvar=MODEL_VARIABLE, shell_complete=cli_completion.model
)


class Texts(click.types.StringParamType):
    """Several texts; in an environment variable one per line, as a text may hold spaces."""

    envvar_list_splitter = "\n"


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
    try:
        return dict(map(parse_bias, values))
    except UsageError as error:  # click says where it comes from
        raise click.BadParameter(str(error), ctx, param) from None


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
        shell_complete=cli_completion.words_and_files("json"),
        help="Form of the answer: JSON that keeps to this schema; json: any JSON.",
    ),
)
LOGPROBS_OPTION = option(
    "--logprobs",
    type=click.IntRange(0, MAX_LOGPROBS),
    metavar="N",
    help="With --json: log-probabilities of all tokens, and of the N most probable at each place.",
)

# How `bench` draws; greedily without them.
DRAW_OPTIONS = (
    option(
        "--preset",
        type=click.Choice(list(PRESETS)),
        default=DEFAULT_PRESET,
        show_default=True,
        help="Values of the sampling options that are not given, as for `run`.",
    ),
    _value("temperature", "Temperature; 0 always takes the most probable token."),
    _value("top_k", "Choose among the N most probable tokens; 0: all."),
    _value("top_p", "Choose among the most probable tokens that together have this share; 1: all."),
    option("--seed", type=int, default=0, show_default=True, help="Seed of the sampler."),
)


def drawn_sampling(options: dict[str, Any]) -> Sampling:
    """What DRAW_OPTIONS ask for; they are taken out of `options`. Raises UsageError."""
    from .sampling import Settings

    names = ("preset", "temperature", "top_k", "top_p", "seed")
    return Settings(**{name: options.pop(name) for name in names}).sampling()


def sampling_settings(options: dict[str, Any]) -> dict[str, Any]:
    """Fields of sampling.Settings that these options give, files read.

    Raises UsageError, one line.
    """
    from .text import grammar

    given = {name: options[name] for name in ("preset", *VALUES)}
    given["logit_bias"] = options["logit_bias"] or None
    if options["grammar"] is not None:
        given["grammar"] = grammar.read_grammar(options["grammar"])
    if options["json_schema"] is not None:
        given["json_schema"] = grammar.read_schema(options["json_schema"])
    return given


def _gpu_layers(ctx: click.Context, param: click.Parameter, value: str) -> int | None:
    if value == "auto":
        return None
    if not value.isdecimal():
        raise click.BadParameter(f"{value!r} is neither auto nor a number of layers")
    return min(int(value), GPU_LAYERS_MAX)  # as many as there are


def _rpc(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    """Through the environment: it has to be known when the library is loaded."""
    if value:
        from .native.rpc import SERVERS, named_servers

        named_servers(value)
        os.environ[SERVERS] = value


THREADS = option("--threads", type=click.IntRange(1, THREADS_MAX), help="CPU threads.")
GPU_LAYERS = option(
    "--gpu-layers",
    callback=_gpu_layers,
    default="auto",
    show_default=True,
    metavar="auto|N",
    help="Layers on the GPU.",
)


def kv_type_option(auto: str) -> Callable[[F], F]:
    """`auto`: what that value means, for the help."""
    return option(
        "--kv-type",
        type=click.Choice((*KV_TYPES, "auto")),
        default="f16",
        show_default=True,
        metavar="TYPE",
        help=f"Number type of the KV cache: {', '.join(KV_TYPES)}, or auto, {auto}.",
    )


def flash_attn_option(auto: str) -> Callable[[F], F]:
    return option(
        "--flash-attn",
        type=click.Choice(["auto", "on", "off"]),
        default="auto",
        show_default=True,
        help=f"Flash attention; auto {auto}.",
    )


ACCEPT_LICENCE = option(
    "--accept-licence", is_flag=True, help="Accept the licence of a model to be fetched."
)
MODEL_OPTIONS = (
    option("--ctx", type=click.IntRange(1, CTX_TOKENS_MAX), help="Context size in tokens."),
    THREADS,
    GPU_LAYERS,
    kv_type_option("the fastest that `profile --kv-type auto` found"),
    flash_attn_option("takes what `profile` found best, or llama.cpp's choice"),
    option(
        "--template",
        metavar="NAME|FILE",
        shell_complete=cli_completion.words_and_files(*BUILTIN),
        help="Chat template in place of the model's own.",
    ),
    option(
        "--rpc",
        envvar=f"{PREFIX}RPC_SERVERS",
        callback=_rpc,
        expose_value=False,
        metavar="HOST:PORT,...",
        help="Use the devices of these RPC servers of llama.cpp too, for a model too large for one "
        "machine; takes a build with -DGGML_RPC=on and a network you trust.",
    ),
    ACCEPT_LICENCE,
)
WINDOWS = option(
    "--windows/--no-windows",
    default=True,
    show_default=True,
    help="Whether the attention of a draft may be limited to the first and the most recent tokens "
    "where the context is long. The text is the same.",
)
ANSWER_OPTIONS = (
    option(
        "--spec",
        default="auto",
        show_default=True,
        metavar="auto|on|lookup|off|FILE",
        shell_complete=cli_completion.words_and_files(*SPECS),
        help="Speculation: where it pays, always, with what stood in the text before alone, never, "
        "or by a plan file.",
    ),
    option(
        "--lookup/--no-lookup",
        default=True,
        show_default=True,
        help="Whether auto and on first propose what followed the same words before.",
    ),
    option(
        "--policy",
        type=click.Choice(policies.NAMES),
        default=policies.DEFAULT,
        show_default=True,
        help="What drafts, for comparison: all but knapspec are always on. docs/policies.md says "
        "what each is.",
    ),
    option(
        "--draft-model",
        metavar="MODEL",
        shell_complete=cli_completion.model,
        help="A small model with the vocabulary of MODEL, for --policy draft-model.",
    ),
    WINDOWS,
    option(
        "--exact",
        type=click.Choice(EXACTNESS),
        default=EXACTNESS[0],
        show_default=True,
        help="strict: the text of --spec off to the last bit; drafts only where passes over "
        "several tokens were found to compute what passes over one do.",
    ),
    *SAMPLING_OPTIONS,
    option("--seed", type=int, help="Seed of the sampler; -1 or none: a random one, shown."),
    option("--max-tokens", type=click.IntRange(1), help="Longest answer in tokens."),
    option(
        "--stop",
        type=Texts(),
        multiple=True,
        metavar="TEXT",
        help="End the answer before TEXT (\\\\n is a newline); repeatable (in the environment: one "
        "per line).",
    ),
    option("--system", metavar="TEXT", help="System prompt."),
    option(
        "--think/--no-think",
        default=None,
        help="Whether to think before answering, for models whose chat template has a switch.",
    ),
)
OUTPUT_OPTIONS = (
    option("--quiet", "-q", is_flag=True, help="No notices, statistics or progress."),
    option(
        "--verbose",
        "-v",
        is_flag=True,
        help="Notices and statistics even where standard error is not a terminal.",
    ),
)


def with_options(*options: Callable[[Any], Any]) -> Callable[[F], F]:
    def add(command: F) -> F:
        for add_one in reversed(options):
            command = add_one(command)
        return command

    return add


def answer_settings(options: dict[str, Any], *, logprobs: int | None = None) -> Settings:
    from .sampling import Settings

    check_text("--system", options["system"])
    for text in options["stop"]:
        check_text("--stop", text)
    return Settings(
        seed=options["seed"],
        max_tokens=options["max_tokens"],
        stop=tuple(_unescaped(text) for text in options["stop"]),
        logprobs=logprobs,
        think=options["think"],
        **sampling_settings(options),
    )


def check_text(name: str, text: str | None) -> None:
    """Raises UsageError for bytes that the shell passed on but that are no text."""
    try:
        (text or "").encode()
    except UnicodeEncodeError:
        raise UsageError(f"{name} is not UTF-8 text") from None


def _unescaped(text: str) -> str:
    """A stop string as typed in a shell, where a newline is hard to write."""
    return text.replace("\\n", "\n").replace("\\t", "\t")
