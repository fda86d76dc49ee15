"""One model, open: prompts in, text and tokens out. What applications and library users hold.

Joins the parts below: the native library or any other backend, the session that decodes, the
planner that decides about speculation, and the text layer. It prints nothing and reads no options.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .closing import Closing
from .config import DEFAULTS, Config
from .decode.guard import SpeedGuard
from .decode.session import Generation, Session, check_idle
from .errors import KnapspecError, ModelError, PlanError, UsageError
from .records import Draft, Sampling, Stats, TokenEvent
from .text.calibration import calibration_tokens
from .text.stop import StopFilter
from .text.stream import StreamDecoder
from .text.templates import ChatTemplate, Message, choose_template
from .text.vocabulary import Vocabulary, tokenize_prompt

if TYPE_CHECKING:
    from .backend import Backend
    from .gguf_check import GgufInfo
    from .search.planner import Decision

# Reports how far something slow is: (stage, share done in 0..1 or None if unknown).
# Stages: "load" (the model), "measure" (this machine, once), "prompt" (prefill).
Progress = Callable[[str, float | None], None]

MAX_SEED = 2**63 - 1


@dataclass(frozen=True)
class Settings:
    """How an answer is generated. `seed` None or -1 with a temperature means a random one."""

    temperature: float = 0.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None  # None: until the model ends, or the context does
    stop: tuple[str, ...] = ()

    def sampling(self) -> Sampling:
        """The sampler's record, with the seed that is really used.

        Raises UsageError, one line, for a value out of its range.
        """
        if not 0.0 <= self.temperature <= 100.0:
            raise UsageError(f"the temperature is {self.temperature}; it has to be 0 or more")
        if not 0.0 <= self.min_p <= 1.0:
            raise UsageError(f"min-p is {self.min_p}; it has to be between 0 and 1")
        if self.seed is not None and not -1 <= self.seed <= MAX_SEED:
            raise UsageError(f"the seed is {self.seed}; it has to be -1 or a number up to 2^63-1")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise UsageError(f"max-tokens is {self.max_tokens}; it has to be at least 1")
        seed = self.seed
        if seed is None or seed == -1:
            # Greedy decoding uses no random numbers, so no seed needs to be remembered.
            seed = secrets.randbelow(2**32) if self.temperature > 0.0 else 0
        return Sampling(temperature=self.temperature, min_p=self.min_p, seed=seed)


@dataclass(frozen=True)
class Speculation:
    """Whether answers are speculated, and why or why not."""

    state: str  # "on" or "off"
    reason: str  # one line
    policy: str  # "knapspec", "file", or "none" where nothing is drafted
    draft: Draft | None = None  # what is drafted with; None when off
    baseline_per_second: float | None = None  # measured speed of plain decoding, tokens/s
    predicted_ratio: float | None = None  # predicted speed relative to plain decoding
    guarded: bool = False  # auto: may be given up in the middle of an answer


@dataclass(frozen=True)
class TextEvent:
    """What one token added to the text; `token` is None for text that was only held back."""

    text: str
    token: TokenEvent | None


class Answer(Closing):
    """Iterator over the events of one answer; afterwards its text, ids and statistics.

    The texts of all events, joined, are `text`. A stop string ends it: text, ids and counters are
    cut before it alike. Raises Interrupted after the last event if the computation was interrupted;
    what came before stays valid. Closing it early does the same to the cache as an end.
    """

    def __init__(
        self,
        generation: Generation,
        decoder: StreamDecoder,
        stop: StopFilter,
        *,
        sampling: Sampling,
        speculation: Speculation,
        n_ctx: int,
        notices: tuple[str, ...] = (),
    ) -> None:
        self.sampling = sampling
        self.notices = notices
        self.n_ctx = n_ctx
        self.text = ""
        self.token_ids: list[int] = []
        self._speculation = speculation
        self._generation = generation
        self._decoder = decoder
        self._stop = stop
        self._events = self._run()

    def __iter__(self) -> Iterator[TextEvent]:
        return self

    def __next__(self) -> TextEvent:
        check_idle(self._events)
        return next(self._events)

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
        """What held for this answer, including that auto gave up in the middle."""
        stopped = self.stats.speculation_stopped
        if stopped is None:
            return self._speculation
        return replace(self._speculation, reason=stopped, guarded=True)

    def close(self) -> None:
        """End the answer here; held-back text still belongs to `text`."""
        check_idle(self._events)
        self._events.close()
        self._finish()

    def _run(self) -> Generator[TextEvent, None, None]:
        try:
            for token in self._generation:
                self.token_ids.append(token.token)
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
        surplus = len(self.token_ids) - self._stop.n_text_tokens
        self._generation.close(finish_reason="stop", unread=surplus)
        if surplus:
            del self.token_ids[-surplus:]
        self.stats.finish_reason = "stop"
        return ""


class Engine(Closing):
    """An open model with one conversation's worth of KV cache. A context manager.

    `vocabulary` and `backend` are all it needs; `Engine.open` builds both from a GGUF file.
    """

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
        library: str = "",
    ) -> None:
        self.vocabulary = vocabulary
        self.backend = backend
        self.info = info
        self.config = config
        self._warnings = list(warnings)
        self._library = library
        self.session = Session(backend)
        self.speculation = Speculation("off", "speculation was not asked for", "none")
        self.template_error: ModelError | None = None
        self._resources = resources or ExitStack()
        self._guard: SpeedGuard | None = None
        self._decision: Decision | None = None  # once measured
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
        template: str | None = None,
        needs_template: bool = False,
        config: Config = DEFAULTS,
        progress: Progress | None = None,
    ) -> Engine:
        """Open a GGUF file, or a model of the manifest that has been fetched (None: the demo).

        `ctx`: context size in tokens; None takes what the model was trained for, at most
        config.ctx_tokens. `gpu_layers`: None lets the library decide. `spec`: "auto" speculates
        where it was measured to pay, "on" always with the best plan found, "off" never, or a plan
        file. `template`: a built-in chat template's name or a file, in place of the model's own.
        `needs_template`: refuse a model that cannot chat now, before anything is measured.

        Raises ModelError, LibraryError, ContextError, PlanError ("on" or a plan that cannot be
        honoured), UsageError, Interrupted.
        """
        from . import gguf_check, models

        if ctx is not None and ctx < 1:
            raise UsageError(f"the context size is {ctx}; it has to be at least 1 token")
        if threads is not None and threads < 1:
            raise UsageError(f"the number of threads is {threads}; it has to be at least 1")
        _check_spec(spec)
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
            backend = resources.enter_context(
                native.open_context(
                    opened,
                    ctx_tokens=ctx_tokens,
                    threads=threads,
                    kv_type=kv_type,
                    flash_attn=flash_attn,
                    max_verify_tokens=config.max_verify_tokens,
                )
            )
            engine = cls(
                opened,
                backend,
                template=template,
                config=config,
                info=info,
                warnings=warnings,
                library=native.library_digest(),
            )
            if needs_template:
                engine.require_template()
            engine.set_speculation(spec, progress=progress)
            engine._resources = resources.pop_all()
        return engine

    def close(self) -> None:
        """Free the model. The engine cannot be used afterwards; an unfinished answer ends here.

        Raises UsageError while another thread computes an answer: `backend.interrupt()` ends it.
        """
        if self._latest is not None:
            self._latest.close()
            self._latest = None
        self._resources.close()

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

    # -- speculation

    def set_speculation(
        self, spec: str | os.PathLike[str], *, progress: Progress | None = None
    ) -> Speculation:
        """Choose "auto", "on", "off" or a plan file for the answers to come.

        Measures this machine on first use (seconds; kept on disk). Raises PlanError where "on" or a
        plan file cannot be honoured; then what held before still holds.
        """
        _check_spec(spec)
        guard: SpeedGuard | None = None
        if spec == "off":
            chosen = Speculation("off", "--spec off", "none")
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
            if state == "on" and spec == "auto":
                guard = SpeedGuard(self.config)
            chosen = Speculation(
                state=state,
                reason=reason,
                policy="knapspec" if state == "on" else "none",
                draft=decision.draft if state == "on" else None,
                baseline_per_second=decision.baseline_per_second,
                predicted_ratio=decision.predicted_ratio,
                guarded=guard is not None,
            )
        else:
            chosen = Speculation("on", f"plan file {spec}", "file", self._load_plan(Path(spec)))
        self._guard = guard
        self.speculation = chosen
        return chosen

    def _decide(self, progress: Progress | None) -> Decision:
        if self._decision is None:

            def measured(share: float) -> None:
                if progress is not None:
                    progress("measure", share)

            # Said before the imports below and the calibration text, which take their time.
            measured(0.0)
            from .latency.store import Store
            from .search import planner

            tokens = calibration_tokens(self.vocabulary, self._template)
            key = {"model": self.fingerprint(), "library": self._library}
            self.session.reset()  # the measurement needs the whole context
            with self.interruptible():
                self._decision = planner.decide(
                    self.backend,
                    key,
                    tokens,
                    self.config,
                    Store(warn=self._warnings.append),
                    measured,
                )
        return self._decision

    def _load_plan(self, path: Path) -> Draft:
        from .search import plan_file

        if self.backend.refusal is not None:
            raise PlanError(f"a plan cannot be honoured: {self.backend.refusal}; use --spec off")
        architecture = "" if self.info is None else self.info.architecture
        return plan_file.load(path, self.backend.sublayers, self.fingerprint(), architecture)

    def fingerprint(self) -> str:
        """Identity of the model file in cache keys and plan files; empty without a file."""
        from .gguf_check import fingerprint

        return "" if self.info is None else fingerprint(self.info)

    # -- answers

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
        no room. The KV cache is reused as far as prompts agree.
        """
        if isinstance(prompt, str):
            tokens = tokenize_prompt(self.vocabulary, prompt, parse_special=parse_special)
        else:
            tokens = [int(token) for token in prompt]
            outside = next((t for t in tokens if not 0 <= t < self.backend.n_vocab), None)
            if outside is not None:
                raise UsageError(
                    f"the prompt holds token {outside}; this model's tokens are "
                    f"0..{self.backend.n_vocab - 1}"
                )
        return self._answer(tokens, settings or Settings(), starts_text=False, progress=progress)

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
        template = self.require_template()
        rendered = template.apply(messages)
        return self._answer(
            rendered.tokens,
            settings or Settings(),
            starts_text=True,
            progress=progress,
            template=template,
            notices=rendered.notices,
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
    ) -> Answer:
        sampling = settings.sampling()
        extra_ends = frozenset[int]() if template is None else template.extra_end_tokens
        extra_stop = () if template is None else template.stop
        stop = StopFilter((*settings.stop, *extra_stop))

        def is_end(token: int) -> bool:
            return token in extra_ends or self.backend.is_end(token)

        def prompt_progress(done: int, total: int) -> None:
            if progress is not None:
                progress("prompt", done / total if total else None)

        generation = self.session.generate(
            tokens,
            sampling=sampling,
            draft=self.speculation.draft,
            max_tokens=settings.max_tokens,
            is_end=is_end,
            progress=prompt_progress,
            guard=self._guard,
        )
        self._latest = Answer(
            generation,
            StreamDecoder(self.vocabulary, starts_text=starts_text),
            stop,
            sampling=sampling,
            speculation=self.speculation,
            n_ctx=self.n_ctx,
            notices=notices,
        )
        return self._latest


def _check_spec(spec: str | os.PathLike[str]) -> None:
    if isinstance(spec, str) and spec in ("auto", "on", "off"):
        return
    try:
        is_file = Path(spec).is_file()
    except (OSError, ValueError):  # too long, a zero byte, a folder that may not be read
        is_file = False
    if not is_file:
        raise UsageError(
            f"--spec {os.fspath(spec)}: give auto, on, off, or the path of a plan file"
        )


def _load_progress(progress: Progress) -> Callable[[float], bool]:
    def report(share: float) -> bool:
        progress("load", share)
        return True  # go on loading

    return report
