"""The command `summarize`: parse, call, print."""

from __future__ import annotations

import os
import stat
import sys
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

import click

from . import cli_completion, cli_config
from .cli_open import engine_options, obtain, open_file
from .cli_options import (
    ANSWER_OPTIONS,
    MODEL_OPTIONS,
    OUTPUT_OPTIONS,
    Arguments,
    answer_settings,
    check_text,
    option,
    with_options,
)
from .errors import Interrupted, ModelError, UsageError
from .folders import expanded

if TYPE_CHECKING:
    from .apps.jsonl import Record
    from .apps.summarize_job import Job, Outcome, Step, Work
    from .apps.summarize_prompts import Request
    from .engine import Engine
    from .terminal import Terminal

_COMMAND_LINE = click.core.ParameterSource.COMMANDLINE
_STYLES = ("paragraph", "bullets", "headline", "keypoints")
_NAME_COLUMNS = 32  # of a document's name in the progress line
_MAX_PROMPT_BYTES = 1 << 20


_OWN_OPTIONS = (
    option(
        "--output",
        "-o",
        metavar="FILE",
        help="Write the records to FILE and go on from what it holds; without it to standard "
        "output.",
    ),
    option(
        "--style",
        type=click.Choice(_STYLES),
        default=_STYLES[0],
        show_default=True,
        help="Form of a summary.",
    ),
    option(
        "--words",
        type=click.IntRange(1, 10000),
        metavar="N",
        help="About how many words; without it what suits the style. The limit in tokens follows.",
    ),
    option("--language", metavar="NAME", help='Language to write in, such as "German".'),
    option(
        "--prompt-file",
        metavar="FILE",
        help="Your own instruction, in place of a style; the text follows it.",
    ),
    option("--encoding", metavar="NAME", help="Of text and HTML; without it found out per file."),
    option(
        "--dask",
        metavar="ADDRESS",
        help="Have the workers of the Dask scheduler at ADDRESS make the summaries, each with its "
        "own copy of MODEL; local:N starts N workers on this machine.",
    ),
)


@click.command(cls=cli_config.Command)
@click.argument(
    "arguments",
    cls=Arguments,
    nargs=-1,
    metavar="[MODEL] PATH...",
    shell_complete=cli_completion.model_then_files,
)
@with_options(*_OWN_OPTIONS, *MODEL_OPTIONS, *ANSWER_OPTIONS, *OUTPUT_OPTIONS)
def summarize(arguments: tuple[str, ...], quiet: bool, verbose: bool, **options: Any) -> int:
    """Summarize documents, one JSON record per line and document.

    PATH is a file, a folder, a pattern, or - for standard input: text, Markdown, HTML; PDF,
    Word and EPUB with the extra "documents". The first argument is the MODEL if it ends in
    .gguf or is a name from `knapspec-edge models list` (./NAME is a document of that name);
    otherwise the demo model is used. What does not fit into the context is summarized in
    parts, and the parts' summaries are combined.

    With -o each record is on the disk before the next document begins. The same command again
    skips what is finished (same name, contents, model and wording) and tries the rest. An input
    that fails has a record with "error"; the others go on, and the exit code is 1.

    \b
    Examples:
      knapspec-edge summarize notes/ -o notes.jsonl
      knapspec-edge summarize model.gguf *.md report.pdf --style bullets --words 80 -o out.jsonl
      knapspec-edge summarize letters/ --language English --spec off -o letters.jsonl
      cat minutes.txt | knapspec-edge summarize --style headline
      knapspec-edge summarize papers/ --prompt-file methods.txt -o methods.jsonl
      knapspec-edge summarize /models/model.gguf papers/ --dask tcp://host:8786 -o papers.jsonl
    """
    from .terminal import Terminal

    terminal = Terminal(quiet=quiet, verbose=verbose)
    try:
        return _summarize(arguments, options, terminal, verbose=verbose)
    finally:
        terminal.clear_progress()


def _summarize(
    arguments: tuple[str, ...],
    options: dict[str, Any],
    terminal: Terminal,
    *,
    verbose: bool,
) -> int:

    from .apps import summarize_job as app
    from .apps.jsonl import RecordFile
    from .text.documents import find

    # Everything that can be wrong with the request is found before a model is fetched or loaded.
    request = _request(options)
    _check_encoding(options["encoding"])
    model, paths = _model_and_paths(arguments)
    target = options["output"]
    found = find(paths, outputs=_outputs(target, terminal))
    for note in found.notes:
        terminal.notice(note)
    with ExitStack() as stack:
        output: RecordFile | _StandardOutput
        if target is None or target == "-":
            output = _StandardOutput(terminal)
        else:
            path = expanded(target)
            output = stack.enter_context(RecordFile(path, app.FIRST_KEY))
            if output.repaired is not None:
                terminal.warning(output.repaired)
        if not found.sources and not found.problems:
            raise UsageError(f"there is nothing to summarize: {'; '.join(found.notes)}")
        place = _Here if options["dask"] is None else _Elsewhere
        maker = place(model, request, options, terminal, stack)
        settings = app.job_settings(
            request,
            maker.fingerprint,
            template=options["template"],
            encoding=options["encoding"],
        )
        job = app.Job(found, settings, output, encoding=options["encoding"])
        if job.n_other_settings:
            terminal.warning(
                f"{target} holds summaries of {job.n_other_settings} of these documents made with "
                "another model or other settings; they stay, and new ones are added"
            )
        if not job.pending:
            job.run(lambda documents: iter(()), lambda record: _tell(record, terminal, verbose))
            return _end(job, output, terminal)
        work = maker.start(job)
        interrupted = False
        try:
            job.run(work, lambda record: _tell(record, terminal, verbose))
        except (Interrupted, KeyboardInterrupt):
            interrupted = True
        exit_code = _end(job, output, terminal, interrupted=interrupted)
        return Interrupted.exit_code if interrupted else exit_code


class _Here:
    """Summaries made in this process."""

    def __init__(
        self,
        model: str | None,
        request: Request,
        options: dict[str, Any],
        terminal: Terminal,
        stack: ExitStack,
    ) -> None:
        """What is opened is closed with `stack`."""
        from . import gguf_check

        self._request = request
        self._options = options
        self._terminal = terminal
        self._stack = stack
        self._path = obtain(model, options, terminal)
        self._info = gguf_check.inspect(self._path)
        self._engine: Engine | None = None
        self.fingerprint = gguf_check.fingerprint(self._info)

    def start(self, job: Job) -> Work:
        """Open the model for the documents that are left."""
        from .apps import summarize_job as app
        from .apps.summarize import room

        chosen = dict(self._options)
        if chosen["ctx"] is None:
            chosen["ctx"] = app.choose_context(
                job.longest_bytes,
                self._request,
                self._info,
                kv_type=chosen["kv_type"],
                gpu_layers=chosen["gpu_layers"],
            )
        expected = app.expected_tokens(chosen["ctx"], job.longest_bytes, self._request)
        engine = self._engine = self._stack.enter_context(
            open_file(
                self._path, chosen, self._terminal, needs_template=True, expected_tokens=expected
            )
        )
        # what fits no document is said once, and not in a record of each
        room(engine, self._request)
        return app.local_work(engine, self._request, job, lambda step: _show(step, self._terminal))


class _Elsewhere:
    """Summaries made by the workers of a cluster, which need not see the files here."""

    def __init__(
        self,
        model: str | None,
        request: Request,
        options: dict[str, Any],
        terminal: Terminal,
        stack: ExitStack,
    ) -> None:
        """Connect and ask for the model there; closed with `stack`."""
        from . import models as store
        from .apps import summarize_dask

        if click.get_current_context().get_parameter_source("rpc") is _COMMAND_LINE:
            raise UsageError(
                "--rpc and --dask exclude each other: set KNAPSPEC_EDGE_RPC_SERVERS where the "
                "workers are started"
            )
        self._request = request
        self._ctx_tokens = options["ctx"]
        self._terminal = terminal
        order = summarize_dask.order(
            model or store.default_model().name,
            request,
            engine_options(options),
            accept_licence=options["accept_licence"],
        )
        self._cluster = stack.enter_context(
            summarize_dask.Cluster(options["dask"], order, warn=terminal.warning)
        )
        self.fingerprint = self._cluster.examine(lambda: terminal.progress("workers", None))
        terminal.clear_progress()

    def start(self, job: Job) -> Work:
        from .apps.summarize_job import expected_tokens

        longest = job.longest_bytes
        ctx = self._ctx_tokens or self._cluster.choose_context(longest)
        expected = expected_tokens(ctx, longest, self._request)
        return self._cluster.work(
            job,
            {"ctx": ctx, "expected_tokens": expected},
            lambda step: _show(step, self._terminal),
        )


class _StandardOutput:
    """Records on standard output, each passed on as soon as it is there."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal

    def append(self, record: Record) -> None:
        from .apps.jsonl import encode, sync

        self._terminal.text(encode(record) + "\n")
        with suppress(OSError, ValueError, AttributeError):  # no file behind it
            sync(self._terminal.out.fileno())


def _outputs(target: str | None, terminal: Terminal) -> list[os.stat_result]:
    """The files that records go to, so far as there are any yet; they are no input."""
    with suppress(OSError, ValueError, AttributeError):
        if target is not None and target != "-":
            return [os.stat(os.path.expanduser(target))]
        written = os.fstat(terminal.out.fileno())
        if stat.S_ISREG(written.st_mode):
            return [written]
    return []


def _request(options: dict[str, Any]) -> Request:
    """What is asked of the model. Raises UsageError."""
    from .apps.summarize_prompts import Request

    settings = answer_settings(options)
    settings.sampling()  # a value out of range is reported before the model is loaded
    check_text("--language", options["language"])
    file, instruction = options["prompt_file"], None
    if file is not None:
        source = click.get_current_context().get_parameter_source("style")
        if source in (_COMMAND_LINE, click.core.ParameterSource.ENVIRONMENT):
            raise UsageError("--style and --prompt-file exclude each other: write the form into it")
        instruction = _instruction(file)
    return Request(
        style=options["style"],
        words=options["words"],
        language=" ".join((options["language"] or "").split()) or None,
        instruction=instruction,
        system=options["system"],
        settings=settings,
    )


def _check_encoding(name: str | None) -> None:
    from .text.documents import is_text_encoding

    if name is not None and not is_text_encoding(name):
        raise UsageError(f"there is no encoding {name}")


def _instruction(file: str) -> str:
    try:
        with open(os.path.expanduser(file), "rb") as stream:
            data = stream.read(_MAX_PROMPT_BYTES + 1)
        text = data.decode("utf-8").removeprefix("\ufeff")
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror or error}") from None
    except (UnicodeDecodeError, ValueError):
        raise UsageError(f"{file} is not UTF-8 text") from None
    if len(data) > _MAX_PROMPT_BYTES:
        raise UsageError(f"{file} is too long for an instruction")
    if "\0" in text:
        raise UsageError(f"{file} is not text")
    if not text.strip():
        raise UsageError(f"{file} is empty; it should hold the instruction")
    return text


def _model_and_paths(arguments: tuple[str, ...]) -> tuple[str | None, list[str]]:
    """Which of the arguments is what; see the help of `summarize`."""
    from . import models as store
    from .terminal import is_terminal

    model = cli_config.default_model()
    paths = list(arguments)
    if paths:
        first = paths[0]
        is_model = first.lower().endswith(".gguf")
        if not is_model:
            with suppress(ModelError):
                store.find(first)
                is_model = True
        if is_model:
            model, paths = first, paths[1:]
    if not paths:
        if sys.stdin is None or is_terminal(sys.stdin):
            raise UsageError(
                "there is nothing to summarize: give files, folders or patterns, or text on "
                "standard input"
            )
        paths = ["-"]
    return model, paths


# -- what the user sees


def _show(step: Step, terminal: Terminal) -> None:
    """The progress line: which document, what of it, how fast."""
    parts = [f"{min(step.n_done + 1, step.n_total)} of {step.n_total}"]
    if step.per_minute is not None:
        parts.append(f"{step.per_minute:.1f}/min")
    name = step.name
    if len(name) > _NAME_COLUMNS:
        name = "…" + name[1 - _NAME_COLUMNS :]
    if name:
        parts.append(name)
    if step.detail:
        parts.append(step.detail)
    terminal.job_progress(" · ".join(parts), step.share, step.elapsed_seconds)


def _tell(record: Record, terminal: Terminal, verbose: bool) -> None:
    """One line about a finished document: always if it failed, else where it was asked for."""
    from .apps.report import clean, counted, duration

    name = clean(record["input"])
    if record["error"] is not None:
        error = clean(record["error"])
        # most errors begin with the name of what they are about
        terminal.warning(error if name in error else f"{name}: {error}")
        return
    for note in record["notes"]:
        terminal.notice(f"{name}: {clean(note)}")
    if verbose:
        tokens = record["tokens"]
        parts = "" if tokens["chunks"] == 1 else f" in {tokens['chunks']} parts"
        cut = "" if record["finish_reason"] == "stop" else ", cut at the limit of tokens"
        terminal.notice(
            f"{name}: {counted(tokens['document'], 'token')}{parts}, "
            f"{duration(record['timings']['total_ms'] / 1000.0)}{cut}"
        )


def _end(job: Job, output: Any, terminal: Terminal, *, interrupted: bool = False) -> int:
    """The last line, and the exit code."""
    terminal.clear_progress()
    if not job.tidy():
        terminal.warning("records that newer ones stand for could not be removed")
    outcome = job.outcome
    terminal.notice(_summary_line(outcome, job, interrupted=interrupted))
    return 1 if outcome.n_failed else 0


def _summary_line(outcome: Outcome, job: Job, *, interrupted: bool) -> str:
    from .apps.report import counted, duration

    n = outcome.n_done
    parts = [f"{counted(n, 'document')} summarized in {duration(outcome.elapsed_seconds)}"]
    if n and outcome.elapsed_seconds > 0.0:
        parts[0] += f" ({60.0 * n / outcome.elapsed_seconds:.1f} a minute)"
    if outcome.n_skipped:
        parts.append(f"{outcome.n_skipped} finished before")
    if outcome.n_failed:
        parts.append(f"{outcome.n_failed} failed")
    if outcome.prompt_tokens:
        share = 100.0 * outcome.cached_tokens / outcome.prompt_tokens
        parts.append(
            f"{outcome.prompt_tokens:,} tokens read ({share:.0f} % cached), "
            f"{outcome.completion_tokens:,} written"
        )
        parts.append(
            f"reading {duration(outcome.prompt_ms / 1000.0)}, "
            f"writing {duration(outcome.predicted_ms / 1000.0)}"
        )
    if outcome.drafted:
        parts.append(f"drafted {outcome.drafted}, accepted {outcome.accepted}")
    elif outcome.speculation is not None:
        spec = outcome.speculation
        parts.append(f"speculation {spec['state']}: {spec['reason'].removeprefix('off: ')}")
    if interrupted:
        left = len(job.pending) - outcome.n_done - (outcome.n_failed - job.n_problems)
        parts.insert(0, f"interrupted, {left} left; the same command goes on from here")
    return " · ".join(parts)
