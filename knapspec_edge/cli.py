"""The command line: parse, call, print. Everything heavy is imported inside the commands."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

import click

from . import cli_completion, cli_config, policies
from .cli_open import confirm_licence, fetch_progress, obtain, open_model
from .cli_options import (
    ACCEPT_LICENCE,
    ANSWER_OPTIONS,
    DRAW_OPTIONS,
    GPU_LAYERS,
    LOGPROBS_OPTION,
    MODEL,
    MODEL_OPTIONS,
    OUTPUT_OPTIONS,
    THREADS,
    WINDOWS,
    Arguments,
    Number,
    answer_settings,
    check_text,
    drawn_sampling,
    flash_attn_option,
    kv_type_option,
    option,
    with_options,
)
from .cli_summarize import summarize
from .config import (
    BENCH_TASKS,
    CTX_TOKENS_MAX,
    DEFAULTS,
    GENERATORS,
    OVERFLOWS,
    without_windows,
)
from .errors import Interrupted, KnapspecError, ModelError, UsageError
from .folders import expanded, read_at_most
from .native.giving_up import on_abort

if TYPE_CHECKING:
    from .engine import Engine
    from .terminal import Terminal

PROGRAM = "knapspec-edge"
EXIT_INTERRUPTED = 130
EXIT_USAGE = 2


class _Group(cli_config.Group):
    """Ends every command with one line and the documented exit code, never with a traceback."""

    group_class = cli_config.Group

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        cli_config.apply(ctx)
        return super().resolve_command(ctx, args)

    def main(self, *args: Any, **kwargs: Any) -> NoReturn:
        kwargs["standalone_mode"] = False
        kwargs.setdefault("prog_name", PROGRAM)
        _occupy_standard_streams()
        if cli_completion.asked():
            cli_completion.register()
        if not _debugging():
            on_abort(_give_up)
        try:
            result = super().main(*args, **kwargs)
            if sys.stdout is not None:
                sys.stdout.flush()  # a full disk is noticed here, not while the interpreter ends
            sys.exit(result if isinstance(result, int) else 0)
        except click.exceptions.NoArgsIsHelpError as error:
            # Its message is the whole help, which does not belong into one line.
            click.echo(error.format_message(), err=True)
            sys.exit(EXIT_USAGE)
        except click.UsageError as error:
            if isinstance(error, click.BadParameter) and error.ctx and error.param:
                # which of the places that a value may come from
                error.param_hint = cli_config.origin(error.ctx, error.param) or error.param_hint
            command = error.ctx.command_path if error.ctx is not None else PROGRAM
            _fail(f"{error.format_message().rstrip('.')}; see `{command} --help`", EXIT_USAGE)
        except click.ClickException as error:
            _fail(error.format_message(), error.exit_code)
        except (click.Abort, KeyboardInterrupt):
            sys.exit(EXIT_INTERRUPTED)
        except Interrupted as error:
            sys.exit(error.exit_code)
        except KnapspecError as error:
            if _debugging():
                raise
            _fail(str(error), error.exit_code)
        except OSError as error:
            # A full disk or a broken device, wherever it shows, is no fault of ours.
            if _debugging():
                raise
            where = f"{error.filename}: " if error.filename is not None else "cannot write: "
            _discard_output(sys.stdout)
            _fail(f"{where}{error.strerror or error}", 1)


def _fail(message: str, exit_code: int) -> NoReturn:
    try:
        click.echo(f"{PROGRAM}: error: {' '.join(message.split())}", err=True)
    except OSError:  # nobody can be told; the exit code still says it
        _discard_output(sys.stderr)
    sys.exit(exit_code)


def _debugging() -> bool:
    return os.environ.get(f"{cli_config.PREFIX}DEBUG", "") not in ("", "0")


def _give_up(reason: str) -> NoReturn:
    """One line in place of a backtrace, from any thread, where native code ends the process."""
    with suppress(Exception):
        sys.stdout.flush()
        line = f"{PROGRAM}: error: {reason}\n"
        if sys.stderr.isatty():
            line = f"\n{line}"  # below a progress bar
        sys.stderr.write(line)
        sys.stderr.flush()
    os._exit(1)


def _occupy_standard_streams() -> None:
    """Give closed standard streams somewhere to go: standard error to nowhere, standard output to
    one line that says so.

    Otherwise the next file that is opened takes their number, and what native code prints would end
    up in it.
    """
    with suppress(OSError):
        while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
            pass
        os.close(number)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  (for good)
    if sys.stdout is None:
        _fail("standard output is closed; give it a file, or /dev/null", 1)


def _discard_output(stream: TextIO | None) -> None:
    """Send what could not be written nowhere, or it is tried again when the interpreter ends."""
    with suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())  # type: ignore[union-attr]
        os.close(nowhere)


def _show_version(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value:
        from . import __version__

        click.echo(f"{PROGRAM} {__version__}")
        ctx.exit()


@click.group(
    cls=_Group,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Each option can be set by an environment variable, --min-p by KNAPSPEC_EDGE_MIN_P, and "
    "in a configuration file; `knapspec-edge config` shows both. KNAPSPEC_EDGE_CACHE moves the "
    "cache, KNAPSPEC_EDGE_DEBUG=1 shows tracebacks.",
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_version,
    help="Show the version and exit.",
)
def cli() -> None:
    """Run GGUF models faster, with the same output, no second model and no training."""


@cli.command()
@MODEL
@option("--load", metavar="FILE", help="Go on with a conversation that was saved.")
@option(
    "--save",
    metavar="FILE",
    envvar="KNAPSPEC_EDGE_CHAT_SAVE",  # KNAPSPEC_EDGE_SAVE is where `plan` saves plans
    help="Keep the conversation in FILE, written after every answer.",
)
@option(
    "--overflow",
    type=click.Choice(OVERFLOWS),
    help="Where the context is full: say so and stop (the default), or drop the oldest turns.",
)
@option(
    "--history",
    metavar="FILE|off",
    help="Where to keep what you type, for the next chat; without it in your state folder.",
)
@with_options(*MODEL_OPTIONS, *ANSWER_OPTIONS, *OUTPUT_OPTIONS)
def chat(
    model: str | None,
    load: str | None,
    save: str | None,
    overflow: str | None,
    history: str | None,
    quiet: bool,
    verbose: bool,
    **options: Any,
) -> int:
    """Talk to a model. MODEL is a GGUF file or a name from `knapspec-edge models list`; without it
    the demo model is used, and fetched the first time.

    \b
    Examples:
      knapspec-edge chat
      knapspec-edge chat model.gguf --temp 0.7 --system "You are brief."
      knapspec-edge chat model.gguf --load talk.json --save talk.json
      knapspec-edge chat base-model.gguf --template chatml

    /help inside lists the commands. Ctrl-C stops an answer, a second one leaves, like Ctrl-D.
    """

    from .apps.chat import loaded_line
    from .apps.conversation import Conversation
    from .apps.conversation_file import begin
    from .repl import converse, history_file, line_reader
    from .terminal import Terminal

    terminal = Terminal(quiet=quiet, verbose=verbose)
    settings = answer_settings(options)
    settings.sampling()  # a value out of range is reported before the model is loaded
    source = None if load is None else expanded(load)
    kept_in = None if save is None else expanded(save)
    begun = begin(source, kept_in, settings, system=options["system"], overflow=overflow)
    try:
        with open_model(model, options, terminal, needs_template=True) as engine:
            conversation = Conversation(engine, progress=terminal.progress)
            notices = conversation.restore(begun)
            conversation.file = kept_in
            read_line, interactive = line_reader(terminal, conversation, history_file(history))
            if interactive:
                _greet(engine, terminal)
            if source is not None:
                terminal.notice(loaded_line(source, conversation))
            for notice in notices:
                terminal.notice(notice)
            return converse(conversation, terminal, read_line, interactive=interactive)
    finally:
        terminal.clear_progress()


@cli.command()
@click.argument(
    "arguments",
    cls=Arguments,
    nargs=-1,
    metavar="[MODEL] [PROMPT]",
    shell_complete=cli_completion.model_then_nothing,
)
@option("--file", "-f", metavar="FILE", help="Read the content from FILE (- is the pipe).")
@option("--raw", is_flag=True, help="Complete the prompt as it is, without chat template.")
@option("--json", "as_json", is_flag=True, help="Print one JSON object at the end.")
@LOGPROBS_OPTION
@with_options(*MODEL_OPTIONS, *ANSWER_OPTIONS, *OUTPUT_OPTIONS)
def run(
    arguments: tuple[str, ...],
    file: str | None,
    raw: bool,
    as_json: bool,
    logprobs: int | None,
    quiet: bool,
    verbose: bool,
    **options: Any,
) -> int:
    """Answer one prompt and exit.

    The prompt is PROMPT, the content of FILE or of the pipe, or both: then PROMPT is the
    instruction and comes first, followed by a blank line and the content. A single argument is the
    MODEL if it ends in .gguf or is a name from `knapspec-edge models list`; otherwise it is the
    PROMPT and the demo model answers. A base model, which has no chat template, continues the text.

    \b
    Examples:
      knapspec-edge run "Why is the sky blue?"
      knapspec-edge run model.gguf "Translate to French:" -f letter.txt
      cat notes.txt | knapspec-edge run model.gguf "Summarize:" --max-tokens 200
      knapspec-edge run "Name three fruits." --json-schema '{"type": "array"}' --preset llama.cpp
      knapspec-edge run base-model.gguf --raw "Once upon a time" --json
    """
    from .apps import run as app
    from .apps.summary import form_notice, statistics_line
    from .terminal import Terminal

    terminal = Terminal(quiet=quiet, verbose=verbose)
    if logprobs is not None and not as_json:
        raise UsageError("--logprobs are shown in the object of --json alone; add --json")
    settings = answer_settings(options, logprobs=logprobs)
    settings.sampling()
    model, instruction = _model_and_prompt(arguments)
    check_text("the prompt", instruction)
    # Everything that can be wrong with the request is found before a model is fetched or loaded.
    request = app.Request(
        app.join_prompt(instruction, _content(file)),
        raw=True if raw else None,
        system=options["system"],
    )
    try:
        expected = app.expected_tokens(request, settings)
        with open_model(model, options, terminal, expected_tokens=expected) as engine:
            answer = app.answer(engine, request, settings, progress=terminal.progress)
            for notice in answer.notices:
                terminal.notice(notice)
            exit_code = 0
            terminal.progress("prompt", None)
            try:
                with engine.interruptible(), answer:
                    for event in answer:
                        if not as_json:
                            terminal.text(event.text)
            except (Interrupted, KeyboardInterrupt):
                exit_code = EXIT_INTERRUPTED
            terminal.clear_progress()
            if as_json:
                import json

                terminal.text(json.dumps(app.to_json(engine, answer), ensure_ascii=False) + "\n")
            terminal.end_line()
            if answer.context_full:
                terminal.notice(
                    f"the context of {engine.n_ctx} tokens is full and the answer was cut; --ctx N "
                    "makes room for more"
                )
            if (cut := form_notice(answer)) is not None:
                terminal.notice(cut)
            if not as_json:
                terminal.notice(statistics_line(answer))
            return exit_code
    finally:
        terminal.clear_progress()


@cli.command()
@MODEL
@option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def doctor(model: str | None, as_json: bool) -> int:
    """Show versions, devices and folders, and whether MODEL can be used and speculated with. Exits
    with 1 if something keeps it from working.

    \b
    Examples:
      knapspec-edge doctor
      knapspec-edge doctor model.gguf --json
    """
    from .apps import doctor as app

    found = cli_config.loaded(click.get_current_context())
    report = app.examine(model, configuration=found.to_json())
    if as_json:
        import json

        click.echo(json.dumps(report, ensure_ascii=False, indent=2, default=str))
    else:
        rows = app.lines(report)
        width = max(len(name) for name, _ in rows)
        for name, value in rows:
            click.echo(f"{name:<{width}}  {value}")
        for remark in report["remarks"]:
            click.echo(f"note: {remark}")
        for problem in report["problems"]:
            click.echo(f"problem: {problem}")
        if not report["problems"]:
            click.echo("everything needed is in place")
    return 1 if report["problems"] else 0


def _others() -> str:
    return ", ".join(name for name in policies.NAMES if name != "plain")


@cli.command()
@MODEL
@option(
    "--policies",
    "names",
    metavar="NAME,...",
    shell_complete=cli_completion.listed("auto", *policies.NAMES, "all"),
    help=f"What to compare with plain decoding: auto (ours as it is), {_others()}, or all; ours, "
    "knapspec, is forced to draft. Without it auto,knapspec.",
)
@option(
    "--plan",
    "plans",
    multiple=True,
    metavar="FILE",
    help="Compare this plan, forced; repeatable.",
)
@option(
    "--draft-model",
    metavar="FILE",
    help="The small GGUF that the policy draft-model drafts with.",
)
@option(
    "--unpatched",
    metavar="FOLDER",
    shell_complete=cli_completion.folders,
    help="Compare another build of llama.cpp: the folder of its libraries.",
)
@option(
    "--peer",
    "peers",
    multiple=True,
    metavar="[NAME=]WHERE",
    shell_complete=cli_completion.files,
    help="Compare another Python's llama-cpp-python or ik-llama-cpp-python, or a folder of "
    "libraries; repeatable.",
)
@option(
    "--contexts",
    metavar="N,...",
    help="Lengths of the prompts in tokens, chat format included, as in 256,2K,6K (K is 1,024); "
    "without it 256,2K.",
)
@option(
    "--tasks",
    metavar="NAME,...",
    shell_complete=cli_completion.listed(*BENCH_TASKS, "all"),
    help=f"Kinds of prompts: {', '.join(BENCH_TASKS)}; all of them without it.",
)
@option(
    "--prompts",
    metavar="FILE.jsonl",
    help='Compare on your own prompts: one {"prompt": TEXT} or {"messages": [...]} per line, with '
    '"name" and "task" where wanted.',
)
@option(
    "--repeats",
    type=click.IntRange(1, 10000),
    default=1,
    show_default=True,
    help="Prompts of each task and length, all different; rounds over your own.",
)
@option(
    "--max-tokens",
    type=click.IntRange(2),
    default=128,
    show_default=True,
    help="Longest answer in tokens.",
)
@option(
    "--cooldown",
    type=Number(0.0, 86400.0),
    default=0.0,
    show_default=True,
    metavar="SECONDS",
    help="Pause before each answer.",
)
@option(
    "--resume",
    metavar="FILE.jsonl",
    help="Keep each row in FILE as soon as it is there, and leave out what is in it already.",
)
@option(
    "--format",
    "form",
    type=click.Choice(["md", "json", "jsonl", "csv"]),
    default="md",
    show_default=True,
    help="Form of the report; jsonl: each row as soon as it is there.",
)
@option(
    "--plot",
    metavar="FOLDER",
    shell_complete=cli_completion.folders,
    help="Draw speed, acceptance, rounds and predictions into FOLDER.",
)
@with_options(*DRAW_OPTIONS, *MODEL_OPTIONS, *OUTPUT_OPTIONS)
def bench(
    model: str | None,
    names: str | None,
    plans: tuple[str, ...],
    draft_model: str | None,
    unpatched: str | None,
    peers: tuple[str, ...],
    contexts: str | None,
    tasks: str | None,
    prompts: str | None,
    repeats: int,
    max_tokens: int,
    cooldown: float,
    resume: str | None,
    form: str,
    plot: str | None,
    quiet: bool,
    verbose: bool,
    **options: Any,
) -> int:
    """Compare plain decoding with policies, plans and other builds of llama.cpp, answer by answer
    in turn, on tasks made from Python's own library and on your own prompts. Every text is compared
    with that of plain decoding, and no speed-up is given for one that differs without a reason.

    Nothing is downloaded. A comparison can be ended at any time; with --resume it goes on.

    \b
    Examples:
      knapspec-edge bench
      knapspec-edge bench model.gguf --policies all --contexts 256,2K,6K --resume rows.jsonl
      knapspec-edge bench model.gguf --policies knapspec-paper --tasks code,qa --format csv
      knapspec-edge bench model.gguf --plan mine.json --policies plain --prompts mine.jsonl
      knapspec-edge bench model.gguf --unpatched /opt/llama.cpp/build/bin --format json --plot plots
      knapspec-edge bench model.gguf --peer ik=/opt/ik/bin/python --policies plain
    """
    from .apps.bench import options as asked
    from .apps.bench import report, runner
    from .apps.jsonl import encode
    from .terminal import Terminal

    terminal = Terminal(quiet=quiet, verbose=verbose)

    def show_row(row: dict[str, Any]) -> None:
        terminal.text(encode(row) + "\n")

    # what is wrong with the request is said before a model is fetched or loaded
    chosen = asked.from_texts(
        policies=names,
        plans=plans,
        draft_model=draft_model,
        unpatched=unpatched,
        peers=peers,
        contexts=contexts,
        tasks=tasks,
        prompts=prompts,
        repeats=repeats,
        max_tokens=max_tokens,
        cooldown=cooldown,
        resume=resume,
        sampling=drawn_sampling(options),
    )
    folder = None if plot is None else expanded(plot)
    if folder is not None:
        from .apps.plots.bench import check_folder

        check_folder(folder)
    options["ctx"] = options["ctx"] or chosen.ctx_tokens()
    options["draft_model"] = draft_model
    found = None
    exit_code = 0
    try:
        with open_model(
            model, options, terminal, spec="off", expected_tokens=max(chosen.contexts)
        ) as engine:
            try:
                for found in runner.run(  # noqa: B007  (the last one is printed)
                    engine,
                    chosen,
                    lambda done, total, _: terminal.progress("compare", done / total),
                    stage=terminal.progress,
                    sink=show_row if form == "jsonl" else None,
                ):
                    pass
            except (Interrupted, KeyboardInterrupt):
                exit_code = EXIT_INTERRUPTED
    finally:
        terminal.clear_progress()
    if found is None:
        return exit_code
    if form == "json":
        terminal.text(encode(found.to_json()) + "\n")
    elif form == "csv":
        terminal.text(report.csv_table(found))
    elif form == "md":
        terminal.text(report.markdown(found) + "\n")
    if form in ("csv", "jsonl"):  # figures alone
        for remark in report.remarks(found):
            terminal.notice(remark)
    if folder is not None:
        from .apps.plots.bench import write

        write(found, folder)
        terminal.notice(f"drawn into {folder}")
    return exit_code or (1 if found.failed else 0)


@cli.command()
@MODEL
@option(
    "--ctx",
    type=click.IntRange(1, CTX_TOKENS_MAX),
    help="Longest context to measure, in tokens; without it what the model and the memory "
    "allow, at most 32768.",
)
@option(
    "--budget",
    type=Number(1.0, 86400.0),
    metavar="SECONDS",
    help="Time to measure for; without it as long as the model's size needs.",
)
@option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@option("--plot", metavar="FILE", help="Draw it into FILE.png, FILE.svg or FILE.html.")
@with_options(THREADS, GPU_LAYERS)
@with_options(
    kv_type_option("which compares f16 and q8_0"),
    flash_attn_option("compares both"),
    ACCEPT_LICENCE,
    *OUTPUT_OPTIONS,
)
def profile(
    model: str | None,
    budget: float | None,
    as_json: bool,
    plot: str | None,
    quiet: bool,
    verbose: bool,
    **options: Any,
) -> int:
    """Measure what passes cost on this machine and what each sublayer of MODEL contributes, and
    keep it: later runs load it, and choose flash attention, threads and drafts by it.

    Shows the cost of a step and of its sublayers by context, the cost of verifying several tokens
    at once, and the sublayers whose absence harms least and most. Ctrl-C ends it early with what
    was measured until then. Best done on a machine that does nothing else.

    \b
    Examples:
      knapspec-edge profile
      knapspec-edge profile model.gguf --ctx 32768 --budget 180 --plot profile.html
      knapspec-edge profile model.gguf --kv-type auto --json > profile.json
    """

    from .apps import profile as app
    from .apps import profile_report
    from .terminal import Terminal

    terminal = Terminal(quiet=quiet, verbose=verbose)
    drawing = None if plot is None else expanded(plot)
    if drawing is not None:
        from .apps import plots

        # What cannot be drawn is said before minutes are spent on measuring it.
        plots.check(drawing)
    try:
        path = obtain(model, options, terminal)
        report = app.run(
            path,
            app.Options(
                ctx=options["ctx"],
                budget_seconds=budget,
                threads=options["threads"],
                gpu_layers=options["gpu_layers"],
                kv_type=options["kv_type"],
                flash_attn=options["flash_attn"],
            ),
            terminal.progress,
            warn=terminal.warning,
        )
    finally:
        terminal.clear_progress()
    if as_json:
        _print_object(terminal, profile_report.to_json(report))
    else:
        terminal.show(profile_report.renderables(report, terminal.columns))
    if drawing is not None:
        from .apps.plots.profile import drawing as drawn

        plots.save(drawn(report), drawing)
        terminal.notice(f"drawn into {drawing}")
    if report.interrupted:
        terminal.notice("interrupted: this is what was measured until then")
        return EXIT_INTERRUPTED
    return 0


@cli.command()
@MODEL
@option(
    "--at",
    "at_tokens",
    type=click.IntRange(2, CTX_TOKENS_MAX),
    metavar="N",
    help="Context to plan for, in tokens; 1024 without it.",
)
@option(
    "--policy",
    type=click.Choice(GENERATORS),
    default=GENERATORS[0],
    show_default=True,
    help="What proposes plans: knapsack and search over hidden states, or the latter alone, as "
    "published. All are judged alike.",
)
@option(
    "--budget",
    type=Number(1.0, 86400.0),
    metavar="SECONDS",
    help="Time to measure for where nothing is kept; without it as long as the context needs.",
)
@option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@option("--plot", metavar="FILE", help="Draw it into FILE.png, FILE.svg or FILE.html.")
@option(
    "--certify",
    is_flag=True,
    help="Also show at how many positions the cosine of the states alone guarantees the token.",
)
@option("--save", metavar="FILE", help="Write the best draft as a plan file for --spec FILE.")
@WINDOWS
@with_options(*MODEL_OPTIONS, *OUTPUT_OPTIONS)
def plan(
    model: str | None,
    at_tokens: int | None,
    policy: str,
    budget: float | None,
    as_json: bool,
    plot: str | None,
    certify: bool,
    save: str | None,
    windows: bool,
    quiet: bool,
    verbose: bool,
    **options: Any,
) -> int:
    """Show what MODEL would be drafted with at a context of N tokens, and why: which sublayers are
    left out, what each costs and contributes, what skipping could gain, and how the best drafts did
    on the model's own text and in real rounds.

    The first time at a context it is measured, which is kept. A saved plan is forced with
    --spec FILE, also where plain decoding won.

    \b
    Examples:
      knapspec-edge plan
      knapspec-edge plan model.gguf --at 4096 --plot plan.html
      knapspec-edge plan model.gguf --at 2048 --save mine.json --json > plan.json
    """

    from .apps import files, plan_report
    from .apps import plan as app
    from .terminal import Terminal

    terminal = Terminal(quiet=quiet, verbose=verbose)
    drawing = None if plot is None else expanded(plot)
    plan_file = None if save is None else expanded(save)
    if drawing is not None:
        from .apps import plots

        # What cannot be written is said before minutes are spent on measuring it.
        plots.check(drawing)
    if plan_file is not None:
        files.check_writable(plan_file, "the plan")
    try:
        path = obtain(model, options, terminal)
        report = app.run(
            path,
            app.Options(
                at_tokens=at_tokens,
                ctx=options["ctx"],
                budget_seconds=budget,
                threads=options["threads"],
                gpu_layers=options["gpu_layers"],
                kv_type=options["kv_type"],
                flash_attn=options["flash_attn"],
                template=options["template"],
                policy=policy,
                certify=certify,
            ),
            terminal.progress,
            warn=terminal.warning,
            config=app.ASKED if windows else without_windows(app.ASKED),
        )
    finally:
        terminal.clear_progress()
    if as_json:
        _print_object(terminal, plan_report.to_json(report))
    else:
        unicode = terminal.can_show(plan_report.UNICODE)
        terminal.show(plan_report.renderables(report, terminal.columns, unicode=unicode))
    if drawing is not None:
        from .apps.plots.plan import drawing as drawn

        plots.save(drawn(report), drawing)
        terminal.notice(f"drawn into {drawing}")
    app.check(report)
    if plan_file is not None:
        app.save(report, plan_file)
        terminal.notice(f"saved; --spec {plan_file} drafts with it")
    return 0


@cli.group()
def models() -> None:
    """Models that can be used by name: list, fetch, find and remove them."""


@models.command("list")
@option("--json", "as_json", is_flag=True, help="Print a JSON list.")
def models_list(as_json: bool) -> None:
    """Show the models that have a name.

    \b
    Example:
      knapspec-edge models list
    """
    from .apps import models as app

    rows = app.list_rows()
    if as_json:
        import json

        click.echo(json.dumps(rows, ensure_ascii=False, indent=2))
        return
    table = [("NAME", "SIZE", "TYPE", "LICENCE", "FETCHED", "")]
    for row in rows:
        names = ", ".join((row["name"], *row["aliases"]))
        table.append(
            (
                names,
                f"{row['bytes'] / 1e6:.0f} MB",
                row["quantization"],
                row["licence"],
                "yes" if row["installed"] else "no",
                row["title"],
            )
        )
    widths = [max(len(line[i]) for line in table) for i in range(len(table[0]))]
    for line in table:
        cells = (f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True))
        click.echo("  ".join(cells).rstrip())


@models.command("get")
@click.argument("name", required=False, shell_complete=cli_completion.model_names)
@option("--accept-licence", is_flag=True, help="Accept the model's licence.")
@with_options(*OUTPUT_OPTIONS)
def models_get(name: str | None, accept_licence: bool, quiet: bool, verbose: bool) -> None:
    """Fetch a model into the cache and print its path; without NAME, the demo model.

    \b
    Example:
      knapspec-edge models get smollm2-135m-instruct
    """
    from .apps import models as app
    from .terminal import Terminal

    terminal = Terminal(quiet=quiet, verbose=verbose)
    try:
        path = app.get(
            name,
            accept_licence=accept_licence,
            confirm=confirm_licence(terminal),
            progress=fetch_progress(terminal),
        )
    finally:
        terminal.clear_progress()
    click.echo(str(path))


@models.command("path")
@click.argument("name", required=False, shell_complete=cli_completion.model_names)
def models_path(name: str | None) -> None:
    """Print where a fetched model is; fails if it has not been fetched.

    \b
    Example:
      ls -l "$(knapspec-edge models path demo)"
    """
    from .apps import models as app

    click.echo(str(app.path(name)))


@models.command("rm")
@click.argument("name", shell_complete=cli_completion.fetched_names)
@with_options(*OUTPUT_OPTIONS)
def models_rm(name: str, quiet: bool, verbose: bool) -> None:
    """Remove a model from the cache.

    \b
    Example:
      knapspec-edge models rm gemma3-270m
    """
    from .apps import models as app
    from .terminal import Terminal

    removed = app.rm(name)
    terminal = Terminal(quiet=quiet, verbose=verbose)
    for path in removed.paths:
        terminal.notice(f"removed {path}")
    terminal.notice(f"freed {removed.freed_bytes / 1e6:.0f} MB")


cli.add_command(summarize)


# -- helpers


def _print_object(terminal: Terminal, data: dict[str, Any]) -> None:
    """One JSON object on standard output."""
    import json

    terminal.text(json.dumps(data, ensure_ascii=False, allow_nan=False) + "\n")


def _greet(engine: Engine, terminal: Terminal) -> None:
    settings = getattr(engine.backend, "settings", {})
    parts = [engine.name, f"context {engine.n_ctx} tokens"]
    if threads := settings.get("threads"):
        parts.append(f"{threads} threads")
    if engine.settings_reason is not None:
        parts.append(engine.settings_reason)
    if engine.device is not None:
        parts.append(engine.device)
    terminal.notice(" · ".join(parts))
    terminal.notice(f"speculation {engine.speculation}")
    terminal.notice("/help lists the commands, Ctrl-D leaves")


def _model_and_prompt(arguments: tuple[str, ...]) -> tuple[str | None, str | None]:
    """Which of the arguments is what; see the help of `run`."""
    from . import models as store

    default = cli_config.default_model()
    if len(arguments) > 2:
        raise UsageError(
            "give at most a MODEL and one PROMPT; put a prompt of several words in quotation marks"
        )
    if len(arguments) == 2:
        return arguments[0], arguments[1]
    if not arguments:
        return default, None
    (only,) = arguments
    if only.lower().endswith(".gguf") and (os.path.exists(only) or len(only.split()) == 1):
        return only, None
    try:
        store.find(only)
    except ModelError:
        return default, only
    return only, None


def _content(file: str | None) -> str | None:
    """What -f or a pipe brings; None without either. Raises UsageError, one line."""
    from .terminal import is_terminal

    if file is not None and file != "-":
        try:
            data = read_at_most(expanded(file), DEFAULTS.document_bytes_max)
        except OSError as error:
            raise UsageError(f"cannot read {file}: {error.strerror or error}") from None
        name = file
    elif sys.stdin is None or (file is None and is_terminal(sys.stdin)):
        return None
    else:
        name = "standard input"
        try:
            data = sys.stdin.buffer.read(DEFAULTS.document_bytes_max + 1)
        except OSError as error:  # not open, or a folder
            if file is None:
                return None
            raise UsageError(f"cannot read standard input: {error.strerror or error}") from None
    if len(data) > DEFAULTS.document_bytes_max:
        raise UsageError(
            f"{name} has more than {DEFAULTS.document_bytes_max >> 20} MiB, the most that is read"
        )
    try:
        return data.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError:
        raise UsageError(f"{name} is not UTF-8 text") from None


for _command in (cli_config.config, cli_completion.completion):
    cli.add_command(_command)


def main() -> None:
    """Entry point of the `knapspec-edge` command."""
    cli.main()
