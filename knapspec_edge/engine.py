"""One model, open: prompts in, text and tokens out. What applications and library users hold.

Joins the parts below: the native library or any other backend, the session that decodes, the
planner that decides about speculation, and the text layer. It prints nothing and reads no options.
"""

from __future__ import annotations

import functools
import inspect
import math
import os
import threading
import time
import warnings as python_warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from . import arguments, policies
from .closing import Closing
from .config import DEFAULTS, EXACTNESS, GENERATORS, SPECS, Config
from .decode.loop import Clock
from .decode.policy import FixedPolicy, Policy
from .decode.session import Generation, Session
from .errors import (
    BusyError,
    ClosedError,
    Interrupted,
    KnapspecError,
    ModelError,
    PlanError,
    UsageError,
)
from .folders import expanded
from .latency.exactness import Exactness, exactness
from .records import Draft, RoundTimes, Sampling, Stats, TokenEvent
from .sampling import Settings as Settings
from .text import thoughts
from .text.calibration import calibration_tokens, long_calibration_tokens
from .text.stop import StopFilter
from .text.stream import StreamDecoder
from .text.templates import ChatTemplate, Message, choose_template
from .text.vocabulary import Vocabulary, tokenize_prompt
from .turns import Turns

if TYPE_CHECKING:
    from .backend import Backend
    from .gguf_check import GgufInfo
    from .latency.costs import Costs
    from .latency.drift import DriftTracker
    from .latency.profile import LatencyProfile
    from .latency.store import Store
    from .search.outlook import Outlook
    from .search.plan_book import PlanBook
    from .search.planner import Decision
    from .search.settings import Candidate

# Reports how far something slow is: (stage, share done in 0..1 or None if unknown).
# Stages: "load" (the model), "measure" (this machine, once), "search" (a policy's, once), "prompt"
# (prefill).
Progress = Callable[[str, float | None], None]

# Rounds between two looks at whether the machine still behaves as it was measured.
_DRIFT_INTERVAL_ROUNDS = 16

_SPECS = f"{', '.join(SPECS)}, or the path of a plan file"
_ENGINE_CLOSED = "the engine was closed"
_INTERRUPTED = "interrupted"

P = ParamSpec("P")
R = TypeVar("R")


def _in_turn(
    method: Callable[Concatenate[Engine, P], R],
) -> Callable[Concatenate[Engine, P], R]:
    """A call that has the engine to itself. Raises BusyError, ClosedError."""

    @functools.wraps(method)
    def alone(self: Engine, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self._turns:
            self._check_free()
            return method(self, *args, **kwargs)

    return alone


@dataclass(frozen=True)
class Speculation:
    """Whether answers are speculated, and why or why not."""

    state: str  # "on" or "off"
    reason: str  # one line
    policy: str  # one of policies.NAMES, "file", or "none" where nothing is drafted
    draft: Draft | None = None  # what is drafted with; None when off
    baseline_per_second: float | None = None  # measured speed of plain decoding, tokens/s
    predicted_ratio: float | None = None  # predicted speed relative to plain decoding
    guarded: bool = False  # auto: may be given up in the middle of an answer
    lookup: bool = False  # what repeats the text may be proposed, whatever `state` says of plans
    # whether drafts change no bit of what is computed, by comparison; None: not looked at
    bit_exact: bool | None = None

    def __str__(self) -> str:
        return f"{self.state}: {self.reason.removeprefix(f'{self.state}: ')}"


@dataclass(frozen=True)
class TextEvent:
    """What one token added to the text; `token` is None for text that was only held back."""

    text: str
    token: TokenEvent | None


class Answer(Closing):
    """Iterator over the events of one answer; afterwards its text, tokens and statistics.

    The texts of all events, joined, are `text`. A stop string ends it: text, tokens (with their
    log-probabilities, where asked for) and counters are cut before it alike. Raises Interrupted
    after the last event if the computation was interrupted or the engine closed; what came before
    stays valid. Closing it early does the same to the cache as an end. Nothing is computed but in
    `next`.

    Threads may take turns in reading it. Raises BusyError while another one is computing.
    """

    def __init__(
        self,
        generation: Generation,
        decoder: StreamDecoder,
        stop: StopFilter,
        *,
        settings: Settings,
        sampling: Sampling,
        speculation: Speculation,
        n_ctx: int,
        notices: tuple[str, ...] = (),
        opening: str = "",
        turns: Turns | None = None,
        owner: object = None,
    ) -> None:
        """`owner` is kept alive until the answer has ended."""
        self.reader = threading.current_thread()  # the latest one
        self._turns = turns or Turns()
        self._owner = owner
        self._broken_off: str | None = None  # why the engine ended it
        self.settings = settings  # as asked for
        self.sampling = sampling  # as it was, seed included
        self.notices = notices
        # the beginning of the message that the prompt holds already: the mark of a thought it opens
        self.opening = opening
        self.n_ctx = n_ctx
        self.text = ""
        self.tokens: list[TokenEvent] = []
        self._speculation = speculation
        self._generation = generation
        self._decoder = decoder
        self._stop = stop
        self._events = self._run()

    def __iter__(self) -> Iterator[TextEvent]:
        return self

    def __next__(self) -> TextEvent:
        if self.ended:
            if self._broken_off is not None:
                raise Interrupted(self._broken_off)
            raise StopIteration
        try:
            with self._turns:
                self.reader = threading.current_thread()
                return next(self._events)
        except ClosedError:
            if self._turns.forked:
                raise
            raise Interrupted(_ENGINE_CLOSED) from None  # it is being closed just now
        except BaseException:
            self._let_go()
            raise

    @property
    def ended(self) -> bool:
        """Whether it was read to its end, closed or interrupted."""
        return inspect.getgeneratorstate(self._events) == inspect.GEN_CLOSED

    @property
    def token_ids(self) -> list[int]:
        return [event.token for event in self.tokens]

    @property
    def stats(self) -> Stats:
        return self._generation.stats

    @property
    def finish_reason(self) -> str | None:
        """ "stop", "length", "interrupted", or None while it runs or if the reader left early."""
        return self.stats.finish_reason

    @property
    def context_full(self) -> bool:
        """Whether it was the end of the context that cut the answer."""
        stats = self.stats
        return (
            stats.finish_reason == "length"
            and stats.prompt_tokens + stats.completion_tokens >= self.n_ctx
        )

    @property
    def speculation(self) -> Speculation:
        """What held for this answer, including that auto began or gave up in the middle."""
        found = self._speculation
        latest, stopped = self.stats.latest_draft, self.stats.speculation_stopped
        if found.state == "off" and latest is None and self.stats.proposed_n:
            plans = found.reason.removeprefix("off: ")
            reason = f"what repeats the text is looked up; no plan: {plans}"
            found = replace(found, state="on", policy=policies.LOOKUP, reason=reason, guarded=True)
        if latest is not None:
            if found.state == "off":
                found = replace(
                    found, state="on", policy="knapspec", reason="it began to pay in this answer"
                )
            found = replace(found, draft=latest)
        return found if stopped is None else replace(found, reason=stopped, guarded=True)

    def close(self) -> None:
        """End the answer here; held-back text still belongs to `text`.

        Raises BusyError while another thread computes: Engine.interrupt ends that.
        """
        if not self.ended and not self._turns.forked:
            with self._turns:
                self.end()
            self._let_go()

    def _let_go(self) -> None:
        # outside of a turn: this may be the last that is known of the engine
        if self.ended:
            self._owner = None

    def end(self) -> None:
        """For the engine, within a turn: as `close`."""
        self._events.close()
        self._finish()

    def break_off(self, reason: str) -> None:
        """For the engine, within a turn: who goes on reading gets Interrupted, with the reason."""
        if not self.ended:
            self._broken_off = reason
            self.end()
            self.stats.finish_reason = self.stats.finish_reason or "interrupted"

    def _run(self) -> Generator[TextEvent, None, None]:
        try:
            for token in self._generation:
                self.tokens.append(token)
                piece = self._stop.push(self._decoder.push(token.token))
                self.text += piece
                yield TextEvent(piece, token)
                if self._stop.found is not None:
                    return
        except (KnapspecError, KeyboardInterrupt):
            if rest := self._finish():
                yield TextEvent(rest, None)
            raise
        finally:
            rest = self._finish()
        if rest:
            yield TextEvent(rest, None)

    def _finish(self) -> str:
        """Close the generation, release held-back text (returned once), cut what a stop string
        took."""
        if self._stop.found is None:
            self._generation.close()
            rest = self._stop.flush()
            self.text += rest
            return rest
        surplus = len(self.tokens) - self._stop.n_text_tokens
        self._generation.close(finish_reason="stop", unread=surplus)
        if surplus:
            del self.tokens[-surplus:]
        self.stats.finish_reason = "stop"
        return ""


class Engine(Closing):
    """An open model with one conversation's worth of KV cache. A context manager.

    `vocabulary` and `backend` are all it needs; `Engine.open` builds both from a GGUF file.

    Threads: one call at a time and one answer at a time. Threads may take turns; a call that comes
    while another one computes, or while another living thread has an answer that it neither read to
    its end nor closed, raises BusyError at once. In one thread a new answer ends the one before.
    `interrupt` and `close` may be called from any thread at any time. After `close`, and in a
    forked process, calls raise ClosedError.
    """

    _owns_model = False  # opened here, so to be closed here

    def __init__(
        self,
        vocabulary: Vocabulary,
        backend: Backend,
        *,
        template: str | None = None,
        config: Config = DEFAULTS,
        resources: ExitStack | None = None,
        info: GgufInfo | None = None,
        warnings: Sequence[str] = (),
        machine: Mapping[str, Any] | None = None,
        policy: str = policies.DEFAULT,
        draft_model: str | os.PathLike[str] | None = None,
        exact: str = EXACTNESS[0],
        lookup: bool = True,
        expected_tokens: int | None = None,
        clock: Clock = time.perf_counter,
    ) -> None:
        self._turns = Turns()
        self._interrupted = False  # asked for by `interrupt`
        self.vocabulary = vocabulary
        self.backend = backend
        self.info = info
        self.config = config
        self._warnings = list(warnings)
        # what measurements are kept under, beside the model
        self._machine = dict(machine or {})
        self._fingerprint: str | None = None
        self._clock = clock
        self._expected_tokens = expected_tokens or config.expected_context_tokens
        self.session = Session(backend, clock=clock)
        self.speculation = Speculation("off", "speculation was not asked for", "none")
        self.template_error: ModelError | None = None
        self._resources = resources or ExitStack()
        self.policy_name = policy
        self._draft_model = draft_model
        self.exact = exact
        self.lookup = lookup
        self._exactness: Exactness | None = None  # once compared
        self._policy: Policy = FixedPolicy(None)
        self._spec: str | os.PathLike[str] = "off"  # as it was asked for
        self._book: PlanBook | None = None  # what is known about plans, once measured
        self._decision: Decision | None = None  # once measured
        self._curve: Costs | None = None  # of verification alone, once measured
        self._drift: DriftTracker | None = None  # compares rounds with the decision's measurement
        self._drifted = False  # written down
        # which of the settings were measured to be best here, for people; None without a profile
        self.settings_reason: str | None = None
        self.device: str | None = None  # where the layers lie, for people; None where unknown
        self._template: ChatTemplate | None = None
        self._latest: Answer | None = None
        try:
            self._template = choose_template(vocabulary, template)
        except ModelError as error:
            if template is not None:
                raise
            # The model itself is fine: raw completion works, and so does another template.
            self.template_error = error

    @classmethod
    def open(
        cls,
        model: str | os.PathLike[str] | None = None,
        *,
        ctx: int | None = None,
        threads: int | None = None,
        gpu_layers: int | None = None,
        kv_type: str = "f16",
        flash_attn: str = "auto",
        spec: str | os.PathLike[str] = "auto",
        policy: str = policies.DEFAULT,
        draft_model: str | os.PathLike[str] | None = None,
        exact: str = EXACTNESS[0],
        lookup: bool = True,
        template: str | os.PathLike[str] | None = None,
        needs_template: bool = False,
        expected_tokens: int | None = None,
        purpose: str | None = None,
        config: Config = DEFAULTS,
        progress: Progress | None = None,
    ) -> Engine:
        """Open a GGUF file, or a model of the manifest that has been fetched (None: the demo).

        `ctx`: context size in tokens; None takes what the model was trained for, at most
        config.ctx_tokens. `gpu_layers`: None lets the library decide. `spec`: "auto" speculates
        where it was measured to pay, "on" always with the best plan found, "lookup" only with what
        stood in prompt or answer before, where that pays, "off" never, or a plan file. `lookup`:
        whether "auto" and "on" look up first, too. `policy`: what drafts (policies.NAMES); all but
        "knapspec" are always on unless `spec` is "off" or a file, and "plain" never drafts.
        `draft_model`: the GGUF of the policy "draft-model". `exact`: "strict" drafts only where
        passes over several tokens were found to compute bit for bit what passes over one do, so
        that every text is that of `spec` "off"; flash attention is on then unless it is given, and
        no setting is chosen by measurement. `template`: a built-in chat template's name or a file,
        in place of the model's own.
        `needs_template`: refuse a model that cannot chat now, before anything is measured.
        `threads` None, `flash_attn` "auto" and `kv_type` "auto" take the best of the settings that
        `knapspec-edge profile` has measured, for a context of `expected_tokens` (prompt and answer;
        None: config.expected_context_tokens) and `purpose`, "plain" or "speculation" (None: as
        `spec` is); without a profile llama.cpp's own choice. Where "auto" finds that speculation
        does not pay, the best settings for plain decoding hold.

        An engine that is not closed is closed, with a ResourceWarning, when it is collected.

        Raises ModelError, LibraryError, ContextError, PlanError ("on" or a plan that cannot be
        honoured), UsageError, Interrupted.
        """
        from . import gguf_check, models

        arguments.path_or_none("model", model)
        arguments.whole_or_none("ctx", ctx)
        arguments.whole_or_none("threads", threads)
        arguments.whole_or_none("gpu_layers", gpu_layers)
        arguments.whole_or_none("expected_tokens", expected_tokens)
        arguments.text("kv_type", kv_type)
        arguments.text("flash_attn", flash_attn)
        arguments.path_or_none("template", template)
        arguments.flag("lookup", lookup)
        arguments.flag("needs_template", needs_template)
        arguments.callable_or_none("progress", progress)
        if not isinstance(config, Config):
            raise UsageError(
                f"config is {arguments.shown(config)}; give a knapspec_edge.config.Config"
            )
        if purpose is not None and (
            not isinstance(purpose, str) or purpose not in ("plain", "speculation")
        ):
            raise UsageError(
                f"purpose is {arguments.shown(purpose)}; it has to be 'plain' or 'speculation'"
            )
        if expected_tokens is not None and expected_tokens < 1:
            raise UsageError(f"expected_tokens is {expected_tokens}; it has to be at least 1")
        if ctx is not None and ctx < 1:
            raise UsageError(f"the context size is {ctx}; it has to be at least 1 token")
        if threads is not None and threads < 1:
            raise UsageError(f"the number of threads is {threads}; it has to be at least 1")
        _check_spec(spec)
        _check_policy(policy, draft_model, spec)
        arguments.choice("--exact", exact, EXACTNESS)
        strict = exact == EXACTNESS[1]
        max_verify_tokens = config.max_verify_tokens
        if strict:
            max_verify_tokens = min(max_verify_tokens, config.exact_verify_tokens)
        if strict and flash_attn == "auto":
            flash_attn = "on"  # llama.cpp's attention without it depends on the width of a pass
        path = models.resolve(model if model is not None else models.default_model().name)
        info = gguf_check.inspect(path)

        from . import native

        with ExitStack() as resources:
            on_load = None if progress is None else _load_progress(progress)
            opened = resources.enter_context(
                native.open_model(info.path, gpu_layers=gpu_layers, progress=on_load)
            )
            trained = opened.n_ctx_train or info.context_length
            ctx_tokens = (
                ctx if ctx is not None else min(trained or config.ctx_tokens, config.ctx_tokens)
            )
            warnings = []
            if trained and ctx_tokens > trained:
                warnings.append(
                    f"the context of {ctx_tokens} tokens is larger than the {trained} the model "
                    "was trained for; answers may get worse beyond that"
                )
            machine = native.machine_key()
            context = resources.enter_context(ExitStack())

            def best_for(purpose: str) -> Candidate | None:
                if strict:  # settings that change with what is measured would change bits
                    return None
                if threads is not None and flash_attn != "auto" and kv_type != "auto":
                    return None
                return _best_settings(
                    {"model": gguf_check.fingerprint(info), **machine},
                    gpu_layers,
                    threads,
                    min(ctx_tokens, expected_tokens or config.expected_context_tokens),
                    purpose,
                    None if flash_attn == "auto" else flash_attn,
                    None if kv_type == "auto" else kv_type,
                    config,
                    warnings.append,
                )

            def open_with(best: Candidate | None) -> Engine:
                fallback_kv_type = "f16" if kv_type == "auto" else kv_type
                backend = context.enter_context(
                    native.open_context(
                        opened,
                        ctx_tokens=ctx_tokens,
                        threads=threads or (None if best is None else best.threads),
                        threads_batch=threads or (None if best is None else best.threads_batch),
                        kv_type=fallback_kv_type if best is None else best.kv_type,
                        flash_attn=flash_attn if best is None else best.flash_attn,
                        max_verify_tokens=max_verify_tokens,
                        repair_interval=config.repair_interval,
                        short_head=config.short_head,
                    )
                )
                engine = cls(
                    opened,
                    backend,
                    template=None if template is None else os.fspath(template),
                    config=config,
                    info=info,
                    warnings=warnings,
                    machine=machine,
                    policy=policy,
                    draft_model=draft_model,
                    exact=exact,
                    lookup=lookup,
                    expected_tokens=expected_tokens,
                )
                engine.device = native.describe_device(backend)
                if best is not None:
                    engine.settings_reason = _settings_reason(best, threads, kv_type, flash_attn)
                if needs_template:
                    engine.require_template()
                engine.set_speculation(spec, progress=progress)
                return engine

            best = best_for(purpose or ("plain" if spec == "off" else "speculation"))
            engine = open_with(best)
            if best is not None and spec == "auto" and engine.speculation.state == "off":
                # Single sublayers promised more than whole drafts keep: plain decoding it is, and
                # that in its own best setting.
                plain = best_for("plain")
                if plain is not None and plain != best:
                    warnings = engine.take_warnings()
                    context.close()
                    engine = open_with(plain)
            engine._resources = resources.pop_all()
            engine._owns_model = True
        return engine

    def close(self) -> None:
        """Free the model. The engine cannot be used afterwards.

        What another thread computes is interrupted and waited for, so it is safe from any thread
        and at any time; who was reading an answer gets Interrupted. A second call does nothing.
        Raises BusyError only within a function that a computation calls, such as `progress`.
        """
        # a forked process frees nothing: the threads that it would wait for are not there
        if self._turns.forked or not self._turns.end(self._interrupt_backend):
            return
        try:
            self._break_off_latest()
            self._note_drift()
            self._keep_learned()
        finally:
            _close_policy(self._policy)
            self._resources.close()

    def __del__(self) -> None:
        if not self._owns_model or self._turns.closed or self._turns.forked:
            return
        with suppress(Exception):
            # the warning may be an error to somebody; the model is freed all the same
            with suppress(Warning):
                python_warnings.warn(
                    f"unclosed {self!r}; use `with Engine.open(...)` or close()",
                    ResourceWarning,
                    stacklevel=2,
                    source=self,
                )
            self._turns.end(self._interrupt_backend)
            self._break_off_latest()
            _close_policy(self._policy)
            self._resources.close()

    def __enter__(self) -> Engine:
        """Raises ClosedError."""
        self._turns.check()
        return self

    def __repr__(self) -> str:
        state = "closed" if self._turns.closed else f"n_ctx={self.n_ctx}"
        return f"<Engine {self.name!r} {state}>"

    @property
    def closed(self) -> bool:
        return self._turns.closed

    def interrupt(self) -> None:
        """End what is being computed, soon: an unfinished answer, a measurement.

        Whoever computes gets Interrupted; of an answer, what came before stays valid, and its
        `finish_reason` is "interrupted". From any thread, at any time; without anything to end it
        does nothing.
        """
        latest = self._latest
        if self._turns.taken or (latest is not None and not latest.ended):
            self._interrupted = True
            self._interrupt_backend()

    def _interrupt_backend(self) -> None:
        interrupt = getattr(self.backend, "interrupt", None)
        if interrupt is not None:
            interrupt()

    def _break_off_latest(self) -> None:
        if self._latest is not None:
            self._latest.break_off(_ENGINE_CLOSED)
            self._latest = None

    def _check_free(self) -> None:
        """Within a turn: no other thread has an unfinished answer. Raises BusyError."""
        latest = self._latest
        if latest is not None and self._interrupted:
            # nobody was computing it, so nobody has noticed yet; whoever reads on does
            latest.break_off(_INTERRUPTED)
        if latest is not None and not latest.ended:
            reader = latest.reader
            if reader is not threading.current_thread() and reader.is_alive():
                raise BusyError(
                    f"thread {reader.name!r} has an answer of this engine that it neither read to "
                    "its end nor closed: wait for it, close() it or interrupt() it, or open the "
                    "model once more"
                )
        if self._interrupted:
            # what it was meant for has ended by itself
            self._interrupted = False
            clear = getattr(self.backend, "clear_interrupt", None)
            if clear is not None:
                clear()

    @property
    def n_ctx(self) -> int:
        return self.backend.n_ctx

    @property
    def has_template(self) -> bool:
        return self._template is not None

    @property
    def name(self) -> str:
        """What to call the model in messages."""
        if self.info is None:
            return "the model"
        return self.info.name or self.info.path.stem

    def take_warnings(self) -> list[str]:
        """What the user should know and was not told yet, one line each."""
        taken, self._warnings[:] = list(self._warnings), []
        return taken

    def interruptible(self) -> AbstractContextManager[Any]:
        """While inside, in the main thread, Ctrl-C stops a running native call (Interrupted)."""
        guard = getattr(self.backend, "interruptible", None)
        return nullcontext() if guard is None else guard()

    def check_interrupted(self) -> None:
        """Raises Interrupted for a Ctrl-C that came within `interruptible`, too late to stop
        anything there."""
        check = getattr(self.backend, "check_interrupted", None)
        if check is not None:
            check()

    # -- speculation

    @property
    def policy(self) -> Policy:
        """What decides round by round how answers are drafted; see decode.policy."""
        return self._policy

    @_in_turn
    def set_speculation(
        self, spec: str | os.PathLike[str], *, progress: Progress | None = None
    ) -> Speculation:
        """Choose "auto", "on", "lookup", "off" or a plan file for the answers to come.

        Measures this machine on first use (seconds; kept on disk). Raises PlanError where "on",
        "lookup" or a plan file cannot be honoured; then what held before still holds. UsageError,
        Interrupted, BusyError and ClosedError besides.
        """
        arguments.callable_or_none("progress", progress)
        return self._set_speculation(spec, progress)

    def _set_speculation(
        self, spec: str | os.PathLike[str], progress: Progress | None = None
    ) -> Speculation:
        _check_spec(spec)
        _check_policy(self.policy_name, self._draft_model, spec)
        chosen = self._choose(spec, progress)
        self._keep_learned()
        before, self._policy = self._policy, self._policy_for(spec, chosen, progress)
        _close_policy(before)
        self._spec = spec
        self.speculation = chosen
        return chosen

    def _policy_for(
        self,
        spec: str | os.PathLike[str],
        chosen: Speculation,
        progress: Progress | None = None,
    ) -> Policy:
        """What decides round by round: a plan file holds for all rounds, the planner adapts."""
        planned = self.policy_name == policies.DEFAULT
        if spec == "lookup" or (spec == "auto" and planned and self._book is None):
            return (
                self._create_policy(policies.LOOKUP, progress)
                if chosen.lookup
                else FixedPolicy(None)
            )
        if spec not in ("auto", "on"):
            return FixedPolicy(chosen.draft)
        # all but the planner as it is are always on
        forced = spec == "on" or not planned
        return self._create_policy(self.policy_name, progress, forced=forced)

    @property
    def costs(self) -> Costs | None:
        """What passes cost here, as it was measured; None before "auto", "on" or a policy that
        goes by it."""
        return None if self._book is None else self._book.costs

    @_in_turn
    def create_policy(
        self, name: str, *, forced: bool = False, progress: Progress | None = None
    ) -> Policy:
        """A policy by its name (policies.NAMES), for this model as it is open, to be given to
        `session.generate`. Measures first what it needs, where that is not kept; the conversation's
        keys are forgotten. `forced`: the planner never turns to plain decoding.

        What it learns is its own: several beside each other do not disturb each other. Whoever
        asked calls its `close`, where it has one. Raises PlanError where it is not
        possible, and what policies.create raises; UsageError, Interrupted, BusyError, ClosedError.
        """
        arguments.callable_or_none("progress", progress)
        _check_policy(name, self._draft_model)
        return self._create_policy(name, progress, forced=forced, apart=True)

    def _create_policy(
        self, name: str, progress: Progress | None, *, forced: bool = False, apart: bool = False
    ) -> Policy:
        """`apart`: what it learns about plans is its own, and not kept."""
        from .policies.setting import Setting

        needs = policies.describe(name).needs
        setting = Setting(
            self.backend,
            self.config,
            forced=forced,
            lookup=self.lookup,
            model_key=self._model_key(),
            store=self._store(),
            vocabulary=self.vocabulary,
            draft_model=self._draft_model,
            progress=None if progress is None else lambda share: progress("search", share),
            clock=self._clock,
        )
        if "costs" in needs or "planner" in needs:
            if self.backend.refusal is not None:
                raise PlanError(f"--policy {name} cannot be honoured: {self.backend.refusal}")
            decision = self._decide(progress)
            if self._book is None:
                reason = decision.reason.removeprefix("off: ")
                raise PlanError(f"--policy {name} cannot be honoured: {reason}")
            book, drift = self._book, self._drift
            if apart:
                from .latency.drift import DriftTracker
                from .search import planner

                drift = DriftTracker(book.costs, self.config)
                store, key = self._store(), self._book_key()
                book = planner.open_book(self.backend, decision, store, key, self.config)
            setting = replace(
                setting,
                costs=book.costs,
                book=book,
                drift=drift,
                best=decision.draft,
            )
        if "verification" in needs:
            from .latency.drift import DriftTracker

            costs = self._verification_costs(progress)
            if apart or self._drift is None:
                drift = DriftTracker(costs, self.config)
                self._drift = self._drift if apart else drift
            else:
                drift = self._drift
            setting = replace(setting, costs=costs, drift=drift)
        if "calibration" in needs:
            tokens = calibration_tokens(self.vocabulary, self._template)
            setting = replace(setting, calibration=tokens)
            self.session.reset()  # it searches in an empty cache
        with self.interruptible():
            policy = policies.create(name, setting)
        prepare = getattr(policy, "prepare", None)
        if prepare is not None:
            prepare(min(self._expected_tokens, self.n_ctx))
        return policy

    def _keep_learned(self) -> None:
        """Write down what was learned about plans since the last time, if anything."""
        settle = getattr(self._policy, "settle", None)
        if settle is not None:
            settle()
        if self._book is not None and self._book.changed:
            from .search import planner

            planner.save_book(self._store(), self._book_key(), self._book)

    def _choose(
        self, spec: str | os.PathLike[str], progress: Progress | None = None
    ) -> Speculation:
        if spec == "off":
            return Speculation("off", "--spec off", "none")
        if spec == "lookup" and self.policy_name != policies.DEFAULT:
            raise UsageError(
                f"--spec lookup and --policy {self.policy_name} do not go together; leave one away"
            )
        if self.exact == EXACTNESS[1] and self.backend.cut_refusal is None:
            found = self._examine(progress)
            if not found.holds:
                if spec == "auto" and self.policy_name == policies.DEFAULT:
                    return Speculation("off", f"--exact strict: {found.reason}", "none")
                raise PlanError(
                    f"--exact strict cannot be honoured: {found.reason}; use --spec off, or "
                    "--exact default"
                )
        if spec in ("auto", "on") and self.policy_name != policies.DEFAULT:
            chosen = self._choose_always(self.policy_name, progress)
        elif spec == "lookup":
            chosen = self._choose_always(policies.LOOKUP, progress, option="--spec lookup")
        elif spec in ("auto", "on"):
            decision = self._decide(progress)
            if spec == "on":
                if decision.draft is None:
                    reason = decision.reason.removeprefix("off: ")
                    raise PlanError(f"--spec on cannot be honoured: {reason}")
                state, reason = "on", f"forced; the planner says {decision.reason}"
                if decision.state == "on":
                    reason = decision.reason
            else:
                state, reason = decision.state, decision.reason
            chosen = Speculation(
                state=state,
                reason=reason,
                policy="knapspec" if state == "on" else "none",
                draft=decision.draft if state == "on" else None,
                baseline_per_second=decision.baseline_per_second,
                predicted_ratio=decision.predicted_ratio,
                guarded=state == "on" and spec == "auto",
                lookup=self.lookup and self.backend.cut_refusal is None,
            )
            if chosen.lookup and self._book is None:
                chosen = self._with_lookup_alone(chosen, progress)
        else:
            chosen = Speculation("on", f"plan file {spec}", "file", self._load_plan(expanded(spec)))
        # lookups alone begin at once: they do not wait for a comparison
        if chosen.state == "on" and (chosen.policy != policies.LOOKUP or self._exactness):
            found = self._examine(progress)
            compared = self._longest_draft(chosen) < found.tokens
            chosen = replace(chosen, bit_exact=found.holds and compared)
        return chosen

    def _examine(self, progress: Progress | None) -> Exactness:
        """Whether verification is bit for bit plain decoding here; looked at once and kept."""
        if self._exactness is None:
            with self.interruptible():
                self._exactness = exactness(
                    self.backend,
                    self._model_key(),
                    calibration_tokens(self.vocabulary, self._template),
                    self.config,
                    self._store(),
                    _measuring(progress),
                    prepare=self.session.reset,  # a comparison needs the whole context
                )
        return self._exactness

    def _longest_draft(self, chosen: Speculation) -> int:
        """Tokens of a draft at most."""
        if chosen.draft is not None and not chosen.lookup:
            return chosen.draft.max_tokens
        bound = policies.describe(chosen.policy).longest_draft
        return 0 if bound is None else int(getattr(self.config, bound))

    def _choose_always(
        self, name: str, progress: Progress | None, *, option: str | None = None
    ) -> Speculation:
        """A policy that decides nothing before it runs. `option`: how it was asked for."""
        described = policies.describe(name)
        option = option or f"--policy {name}"
        if described.longest_draft is None:
            return Speculation("off", option, "none")
        refusal = self.backend.cut_refusal if described.proposes else self.backend.refusal
        if refusal is not None:
            raise PlanError(f"{option} cannot be honoured: {refusal}")
        baseline, reason = None, f"{option}: always on"
        if "costs" in described.needs:
            baseline = self._decide(progress).baseline_per_second
        looks_up = name == policies.LOOKUP
        if looks_up:
            costs = self._verification_costs(progress)
            baseline = 1000.0 / costs.step_ms(min(self._expected_tokens, self.n_ctx))
            reason = f"{option}: what repeats the text is proposed where that pays"
        return Speculation(
            "on", reason, name, baseline_per_second=baseline, guarded=looks_up, lookup=looks_up
        )

    def _with_lookup_alone(self, chosen: Speculation, progress: Progress | None) -> Speculation:
        """Auto, without a measurement of plans."""
        try:
            self._verification_costs(progress)
        except Interrupted:
            raise
        except KnapspecError:
            return replace(chosen, lookup=False)
        return chosen

    def _verification_costs(self, progress: Progress | None) -> Costs:
        """What passes over several tokens cost: of the planner's measurement, or measured alone."""
        if self._book is not None:
            return self._book.costs
        if self._curve is None:
            from .latency.verification import verification_costs

            with self.interruptible():
                self._curve = verification_costs(
                    self.backend,
                    self._model_key(),
                    calibration_tokens(self.vocabulary, self._template),
                    self.config,
                    self._store(),
                    prepare=self.session.reset,
                    progress=_measuring(progress),
                    clock=self._clock,
                )
        return self._curve

    def _decide(self, progress: Progress | None) -> Decision:
        if self._decision is None:
            measured = _measuring(progress)
            # Said before the imports below and the calibration text, which take their time.
            measured(0.0)
            from .latency.drift import DriftTracker
            from .search import planner

            tokens = calibration_tokens(self.vocabulary, self._template)
            self.session.reset()  # the measurement needs the whole context
            with self.interruptible():
                self._decision = planner.decide(
                    self.backend,
                    self._model_key(),
                    tokens,
                    self.config,
                    self._store(),
                    measured,
                    clock=self._clock,
                )
            if self._decision.measured is not None:
                self._drift = DriftTracker(self._decision.measured.costs, self.config)
                self._book = planner.open_book(
                    self.backend, self._decision, self._store(), self._book_key(), self.config
                )
        return self._decision

    @_in_turn
    def profile(
        self, budget_seconds: float = 30.0, *, progress: Progress | None = None
    ) -> LatencyProfile:
        """Measure what passes cost in this context with its present settings, and keep it.

        Forgets the conversation's keys and ends an unfinished answer; the next "auto" or "on"
        decides afresh. Other settings are compared by `knapspec-edge profile`. Raises PlanError for
        a model whose sublayers are not recognised, UsageError for a budget that is not positive and
        finite, ContextError for a context of less than 16 tokens, Interrupted, BusyError,
        ClosedError.
        """
        arguments.callable_or_none("progress", progress)
        budget_seconds = _budget(budget_seconds)
        from .latency import kept
        from .latency.profiler import measure_latency

        if self.backend.refusal is not None:
            raise PlanError(f"{self.name} cannot be profiled: {self.backend.refusal}")
        self.session.reset()
        with self.interruptible():
            profile = measure_latency(
                self.backend,
                budget_seconds=budget_seconds,
                tokens=calibration_tokens(self.vocabulary, self._template),
                config=self.config,
                progress=lambda share: progress("profile", share) if progress else None,
                clock=self._clock,
            )
        key = kept.latency_key(self.backend, self._model_key())
        kept.save_latency(self._store(), key, profile)
        self._keep_learned()
        self._decision = self._drift = self._book = self._curve = None
        self._drifted = False
        if not isinstance(self._policy, FixedPolicy):
            # it decided by the costs that were measured before
            self._set_speculation(self._spec)
        return profile

    @_in_turn
    def plan(
        self,
        context_tokens: int | None = None,
        *,
        budget_seconds: float | None = None,
        policy: str | None = None,
        progress: Progress | None = None,
    ) -> Outlook:
        """What "auto" would do at a context of so many tokens, and everything it is chosen by.

        None: config.expected_context_tokens. Measures it (for about `budget_seconds`, None: as the
        context demands) unless a measurement of this context is kept. Forgets the conversation's
        keys and ends an unfinished answer; how answers are speculated stays as it is. Raises
        PlanError for a model whose sublayers are not recognised and for a measurement that failed,
        UsageError for a context that does not fit, Interrupted, BusyError, ClosedError.
        """
        arguments.whole_or_none("context_tokens", context_tokens)
        arguments.callable_or_none("progress", progress)
        if budget_seconds is not None:
            budget_seconds = _budget(budget_seconds)
        if policy is not None:
            arguments.choice("--policy", policy, GENERATORS)
        proposes = policy or (self.policy_name if self.policy_name in GENERATORS else GENERATORS[0])
        from .search import outlook, planner

        if self.backend.refusal is not None:
            raise PlanError(f"{self.name} cannot be planned for: {self.backend.refusal}")
        n = self.config.expected_context_tokens if context_tokens is None else context_tokens
        if n < 2:
            raise UsageError(f"the context is {n} tokens; a plan takes at least 2")
        needed = planner.room_tokens(n, self.config)
        if needed > self.n_ctx:
            raise UsageError(
                f"a plan for {n} tokens takes a context of {needed}, with the text it is judged "
                f"on; this one has {self.n_ctx}; raise --ctx"
            )
        config = planner.at_context(self.config, n, budget_seconds)

        measured = _measuring(progress)
        measured(0.0)
        tokens = long_calibration_tokens(self.vocabulary, self._template, n)
        self.session.reset()  # the measurement needs the whole context
        with self.interruptible():
            decision = planner.decide(
                self.backend,
                self._model_key(),
                tokens,
                config,
                self._store(),
                measured,
                policy=proposes,
                clock=self._clock,
            )
        if decision.measured is None:
            reason = decision.reason.removeprefix("off: ")
            raise PlanError(f"{self.name} cannot be planned for: {reason}")
        settings = getattr(self.backend, "settings", {})
        # what was judged here helps the planner at this length
        book = planner.open_book(
            self.backend, decision, self._store(), self._book_key(), self.config
        )
        planner.save_book(self._store(), self._book_key(), book)
        return outlook.outlook(
            decision,
            self.backend.sublayers,
            settings,
            config,
            policy=proposes,
        )

    @_in_turn
    def kept_outlook(self) -> Outlook | None:
        """What "auto" goes by with this model and these settings, from what is kept on disk.

        None where nothing was measured yet. Measures nothing. Raises BusyError, ClosedError.
        """
        from .search import outlook, planner

        if self.backend.refusal is not None:
            return None
        decision = planner.kept_decision(
            self.backend,
            self._model_key(),
            calibration_tokens(self.vocabulary, self._template),
            self.config,
            self._store(),
        )
        if decision is None:
            return None
        settings = getattr(self.backend, "settings", {})
        return outlook.outlook(decision, self.backend.sublayers, settings, self.config)

    def _model_key(self) -> dict[str, Any]:
        return {"model": self.fingerprint(), **self._machine}

    def _book_key(self) -> dict[str, Any]:
        from .search import planner

        return planner.book_key(self.backend, self._model_key())

    def _store(self) -> Store:
        from .latency.store import Store

        return Store(warn=self._warnings.append)

    def _watch(self, stats: Stats) -> Callable[[RoundTimes], None] | None:
        """Compares the rounds of an answer with what was measured."""
        tracker, draft = self._drift, self.speculation.draft
        if tracker is None:
            return None
        plan = None if draft is None else draft.plan
        # the planner compares them itself, with the plan that it used
        unknown = draft is None and self.speculation.state == "on"
        compare = isinstance(self._policy, FixedPolicy) and not unknown

        def observe(times: RoundTimes) -> None:
            if compare:
                tracker.observe(times, plan)
            if stats.rounds % _DRIFT_INTERVAL_ROUNDS == 0:
                stats.drift = tracker.report()

        return observe

    def _note_drift(self) -> None:
        """After an answer: have a machine that changed measured again, the next time it is opened.

        A profile younger than config.measure_retry_seconds stays, or a machine that is never at
        rest would be measured at every start.
        """
        decision, tracker = self._decision, self._drift
        if self._drifted or tracker is None or decision is None or decision.measured is None:
            return
        reason = tracker.report()
        if reason is None:
            return
        from .latency import kept

        profile = decision.measured.costs.profile
        age_seconds = time.time() - profile.measured_at
        if not 0.0 <= age_seconds <= self.config.measure_retry_seconds:
            self._drifted = True
            key = kept.latency_key(self.backend, self._model_key())
            kept.mark_stale(self._store(), key, profile, reason)

    def _load_plan(self, path: Path) -> Draft:
        from .search import plan_file

        if self.backend.refusal is not None:
            raise PlanError(f"a plan cannot be honoured: {self.backend.refusal}; use --spec off")
        architecture = "" if self.info is None else self.info.architecture
        return plan_file.load(path, self.backend.sublayers, self.fingerprint(), architecture)

    def fingerprint(self) -> str:
        """Identity of the model file in cache keys and plan files; empty without a file."""
        if self._fingerprint is None:
            from .gguf_check import fingerprint

            # once: the file may be gone while the model is still in use
            self._fingerprint = "" if self.info is None else fingerprint(self.info)
        return self._fingerprint

    # -- answers

    @_in_turn
    def generate(
        self,
        prompt: str | Sequence[int],
        settings: Settings | None = None,
        *,
        parse_special: bool = False,
        progress: Progress | None = None,
    ) -> Answer:
        """Complete a raw prompt, text or token ids.

        `parse_special`: control-token strings in a text prompt are control tokens. Raises at once
        UsageError for settings out of range or an empty prompt, ContextError if the prompt leaves
        no room, BusyError, ClosedError. The KV cache is reused as far as prompts agree.
        """
        arguments.flag("parse_special", parse_special)
        if isinstance(prompt, str):
            tokens = tokenize_prompt(self.vocabulary, prompt, parse_special=parse_special)
        else:
            tokens = arguments.token_ids(prompt)
            outside = next((t for t in tokens if not 0 <= t < self.backend.n_vocab), None)
            if outside is not None:
                raise UsageError(
                    f"the prompt holds token {outside}; this model's tokens are "
                    f"0..{self.backend.n_vocab - 1}"
                )
        return self._answer(
            tokens,
            _settings(settings),
            starts_text=False,
            progress=progress,
        )

    @_in_turn
    def chat(
        self,
        messages: Sequence[Message],
        settings: Settings | None = None,
        *,
        progress: Progress | None = None,
    ) -> Answer:
        """Answer a conversation: {"role": "system" | "user" | "assistant", "content": text}.

        Raises as `generate`, and ModelError where the model has no usable chat template.
        """
        arguments.messages(messages)
        template = self.require_template()
        settings = _settings(settings)
        rendered = template.apply(messages, think=settings.think)
        return self._answer(
            rendered.tokens,
            settings,
            starts_text=True,
            progress=progress,
            template=template,
            notices=rendered.notices,
            opening=thoughts.opening(rendered.text),
        )

    def require_template(self) -> ChatTemplate:
        """The chat template; ModelError, one line, where there is none that works."""
        if self.template_error is not None:
            raise self.template_error
        if self._template is None:
            raise ModelError(
                f"{self.name} has no chat template (a base model): complete text with "
                "`knapspec-edge run --raw`, or name a format with --template "
                "chatml|llama2|llama3|gemma|mistral|zephyr or a file"
            )
        return self._template

    def _answer(
        self,
        tokens: list[int],
        settings: Settings,
        *,
        starts_text: bool,
        progress: Progress | None,
        template: ChatTemplate | None = None,
        notices: tuple[str, ...] = (),
        opening: str = "",
    ) -> Answer:
        arguments.callable_or_none("progress", progress)
        sampling = settings.sampling()
        extra_ends = frozenset[int]() if template is None else template.extra_end_tokens
        extra_stop = () if template is None else template.stop
        if sampling.grammar is not None:
            sampling = replace(sampling, grammar=replace(sampling.grammar, ends=extra_ends))
            # the text is the one that the grammar saw, and JSON says itself where it ends: what
            # stands for an end of turn elsewhere may be part of one of its strings
            starts_text = False
            if settings.json_schema is not None:
                extra_stop = ()
        stop = StopFilter((*settings.stop_texts(), *extra_stop))

        def is_end(token: int) -> bool:
            return token in extra_ends or self.backend.is_end(token)

        self._note_drift()
        self._keep_learned()

        def prompt_progress(done: int, total: int) -> None:
            if progress is not None:
                progress("prompt", done / total if total else None)

        generation = self.session.generate(
            tokens,
            sampling=sampling,
            policy=self._policy,
            max_tokens=settings.max_tokens,
            is_end=is_end,
            progress=prompt_progress,
            watch=self._watch,
        )
        if self._latest is not None and not self._latest.ended:
            self._latest.end()
        self._latest = Answer(
            generation,
            StreamDecoder(self.vocabulary, starts_text=starts_text),
            stop,
            settings=settings,
            sampling=sampling,
            speculation=self.speculation,
            n_ctx=self.n_ctx,
            notices=(*notices, *settings.notices()),
            opening=opening,
            turns=self._turns,
            owner=self,
        )
        return self._latest


def _best_settings(
    model_key: dict[str, Any],
    gpu_layers: int | None,
    threads: int | None,
    context_tokens: int,
    purpose: str,
    flash_attn: str | None,
    kv_type: str | None,
    config: Config,
    warn: Callable[[str], None],
) -> Candidate | None:
    """The best measured setting for this use, or None without a profile.

    With a number of threads that was asked for, a profile with that number comes first.
    """
    from .latency.store import INVALID, Store
    from .search import settings

    store = Store(warn=warn)
    for asked in dict.fromkeys((threads, None)):
        key = settings.settings_key(model_key, gpu_layers, asked)
        stored = store.load(key)
        if stored is None:
            continue
        try:
            candidates = settings.from_json(stored)
        except INVALID:
            store.ignore(key)
            continue
        best = settings.choose(
            candidates,
            context_tokens,
            purpose,
            flash_attn=flash_attn,
            kv_type=kv_type,
            config=config,
        )
        if best is not None:
            return best
    return None


def _settings_reason(best: Candidate, threads: int | None, kv_type: str, flash_attn: str) -> str:
    """Which settings were left to the measurement, and what it chose."""
    parts = []
    if flash_attn == "auto":
        parts.append(f"flash attention {best.flash_attn}")
    if kv_type == "auto":
        parts.append(f"{best.kv_type} keys")
    if threads is None:
        several = "" if best.threads_batch == best.threads else f"/{best.threads_batch}"
        parts.append(f"{best.threads}{several} threads")
    return f"{', '.join(parts)}: the best measured"


def _check_policy(
    policy: str,
    draft_model: str | os.PathLike[str] | None,
    spec: str | os.PathLike[str] = "auto",
) -> None:
    described = policies.describe(policy)
    arguments.path_or_none("draft_model", draft_model)
    if "draft model" in described.needs and draft_model is None:
        raise UsageError(f"--policy {policy} needs --draft-model MODEL, a small one")
    if described.longest_draft is None and spec == "on":
        raise UsageError(f"--policy {policy} never drafts; leave --spec on away")


def _close_policy(policy: Policy) -> None:
    """Give back what it holds open, such as a draft model."""
    close = getattr(policy, "close", None)
    if close is not None:
        close()


def _budget(seconds: float) -> float:
    """Raises UsageError unless it is a number, positive and finite."""
    arguments.number("budget_seconds", seconds)
    seconds = float(seconds)
    if not 0.0 < seconds < math.inf:
        raise UsageError(f"the budget is {seconds} seconds; it has to be more than 0 and finite")
    return seconds


def _settings(settings: Settings | None) -> Settings:
    if settings is None:
        return Settings()
    if not isinstance(settings, Settings):
        raise UsageError(
            f"settings is a {type(settings).__name__}; give knapspec_edge.Settings(...)"
        )
    return settings


def _check_spec(spec: str | os.PathLike[str]) -> None:
    if isinstance(spec, str) and spec in SPECS:
        return
    if not isinstance(spec, str | os.PathLike):
        raise UsageError(f"spec is {arguments.shown(spec)}; give {_SPECS}")
    try:
        is_file = expanded(spec).is_file()
    # too long, a zero byte, a folder that may not be read, an __fspath__ that gives no text
    except (OSError, ValueError, TypeError):
        is_file = False
    if not is_file:
        given = arguments.cut(str(spec))
        raise UsageError(f"--spec {given}: give {_SPECS}")


def _measuring(progress: Progress | None) -> Callable[[float], None]:
    """Reports shares of a measurement, or does nothing."""

    def report(share: float) -> None:
        if progress is not None:
            progress("measure", share)

    return report


def _load_progress(progress: Progress) -> Callable[[float], bool]:
    def report(share: float) -> bool:
        progress("load", share)
        return True  # go on loading

    return report
