"""The `profile` command: measures what passes cost and what sublayers contribute, and keeps it.

How a report is shown is in profile_report and plots.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import DEFAULTS, Config
from ..errors import ContextError, Interrupted, ModelError, UsageError
from ..latency import kept
from ..latency.costs import Costs
from ..latency.fidelity import (
    Fidelity,
    measure_fidelity,
    probed_indices,
    target_text,
)
from ..latency.paired import paired_steps
from ..latency.profile import LatencyProfile
from ..latency.profiler import MIN_CONTEXT_TOKENS, measure_latency
from ..latency.store import INVALID, Store
from ..latency.threads import ThreadTimes, best_threads, measure_threads, thread_candidates
from ..latency.windows import windows_at
from ..records import GREEDY, SubLayer
from ..search import settings as best_settings
from ..text.calibration import calibration_tokens, long_calibration_tokens
from ..text.templates import ChatTemplate, choose_template
from .memory import tokens_that_fit

if TYPE_CHECKING:
    from ..native.context import LlamaBackend
    from ..native.model import Model

# Reports how far something slow is: (stage, share done in 0..1 or None if unknown).
# Stages: "load" (the model), "profile" (passes), "fidelity" (what sublayers contribute).
Progress = Callable[[str, float | None], None]

_AUTO = "auto"
_FLASH_ATTN = ("on", "off")
# What --kv-type auto tries: the second halves the memory and its traffic, and changes the text as
# much as quantizing weights does, which is why it has to be asked for.
_KV_TYPES = ("f16", "q8_0")
# Shares of the budget; passes take what is left, in equal parts for each setting.
_FIDELITY_SHARE = 0.25
_COMPARE_SHARE = 0.05
_THREADS_SHARE = 0.07
_COMPARE_ROOM = 64  # tokens behind the longest context of a comparison
_SHORT_CONTEXT_SHARE = 0.5  # of the fidelity's, for the short context
_ASSUMED_STEPS = 450.0  # budget in times the sum of one plain step at each context of a grid


@dataclass(frozen=True)
class Options:
    """What was asked for; None and "auto" leave it to the measurement."""

    ctx: int | None = None
    budget_seconds: float | None = None
    threads: int | None = None
    gpu_layers: int | None = None
    kv_type: str = "f16"
    flash_attn: str = _AUTO


@dataclass(frozen=True)
class SettingResult:
    """One setting of the context with its latency profile."""

    flash_attn: str  # "on" or "off"
    kv_type: str
    threads: int
    threads_batch: int
    profile: LatencyProfile
    # what it is the best measured setting for, at the expected context: "plain", "speculation"
    best_for: tuple[str, ...] = ()
    # predicted time per token at the expected context
    plain_ms: float = 0.0
    speculation_ms: float = 0.0  # with the best draft that single items suggest, never "off"


@dataclass(frozen=True)
class ProfileReport:
    """What one run of the command found. `results` holds the best setting for plain decoding
    first."""

    model: str  # name for people
    path: str
    n_params: int
    size_bytes: int
    device: dict[str, Any]  # where the layers lie, JSON-ready
    sublayers: tuple[SubLayer, ...]
    expected_tokens: int  # context length that `best_for` refers to
    results: tuple[SettingResult, ...]
    fidelity: Fidelity
    threads_ms: dict[str, dict[str, float]]  # threads -> {"step_ms": ..., "pass_ms": ...}
    elapsed_seconds: float
    budget_seconds: float
    kept_in: str | None  # folder of the stored measurement; None where it could not be kept
    interrupted: bool = False
    notes: tuple[str, ...] = field(default=())
    warnings: tuple[str, ...] = field(default=())


def run(
    model_path: str | os.PathLike[str],
    options: Options,
    progress: Progress = lambda stage, share: None,
    *,
    warn: Callable[[str], None] = lambda warning: None,
    config: Config = DEFAULTS,
    store: Store | None = None,
) -> ProfileReport:
    """Measure a model on this machine and keep the result.

    `warn` takes each warning when it is due; the report lists them all.

    Raises ModelError for a file that cannot be used or a model whose sublayers are not recognised,
    ContextError, UsageError, LibraryError; Interrupted where nothing useful had been measured yet.
    Interrupted later, what there is comes back; what was finished is kept.
    """
    from .. import gguf_check, native

    if options.ctx is not None and options.ctx < MIN_CONTEXT_TOKENS:
        raise UsageError(
            f"--ctx is {options.ctx}; measuring takes at least {MIN_CONTEXT_TOKENS} tokens"
        )
    started = time.monotonic()
    info = gguf_check.inspect(Path(model_path))
    with native.open_model(
        info.path, gpu_layers=options.gpu_layers, progress=_loading(progress)
    ) as model:
        run_ = _Run(model, options, progress, warn, config, store, started)
        run_.model_key = {
            "model": gguf_check.fingerprint(info),
            **native.machine_key(),
        }
        run_.name = info.name or info.path.stem
        return run_.execute()


def _loading(progress: Progress) -> Callable[[float], bool]:
    def report(share: float) -> bool:
        progress("load", share)
        return True  # go on loading

    return report


class _Run:
    """The phases: threads, latency of each setting, fidelity, choice."""

    name: str
    model_key: dict[str, Any]

    def __init__(
        self,
        model: Model,
        options: Options,
        progress: Progress,
        warn: Callable[[str], None],
        config: Config,
        store: Store | None,
        started: float,
    ) -> None:
        self.model = model
        self.options = options
        self.progress = progress
        self.config = config
        self.warnings: list[str] = []
        self.notes: list[str] = []
        self.warn = warn
        self.store = store or Store(warn=self._warn)
        self.started = started
        self.budget_seconds = 0.0
        self.measuring_since = started
        self.thread_times: list[ThreadTimes] = []
        self.threads: tuple[int, int] | None = None
        self.device: dict[str, Any] = {}
        self.sublayers: tuple[SubLayer, ...] = ()
        self.fidelity = Fidelity()
        # plain steps of each setting relative to the first one's, by context
        self.ratios: dict[int, list[float]] = {}
        self.kept = True
        self.unfinished: LatencyProfile | None = None  # of the first setting, if interrupted there
        self.prompt_token_ms = 0.0  # of the latest prompt

    def execute(self) -> ProfileReport:
        found: list[tuple[dict[str, Any], LatencyProfile]] = []
        refusals: list[ContextError] = []
        interrupted = False
        settings = self._settings()
        self.n_ctx = self._context_size(settings[0][1])
        try:
            for n, (flash_attn, kv_type) in enumerate(settings):
                try:
                    result = self._measure_setting(flash_attn, kv_type, n, len(settings))
                except ContextError as error:
                    # Not every backend has flash attention for every model.
                    if n == 0 and len(settings) == 1:
                        raise
                    self.notes.append(f"flash attention {flash_attn}, {kv_type} keys: {error}")
                    refusals.append(error)
                    continue
                found.append(result)
            if not found:
                alike = len({str(error) for error in refusals}) == 1
                raise refusals[0] if alike else ContextError(self.notes[-1])
            self._compare(found)
            self._measure_fidelity(found)
        except (Interrupted, KeyboardInterrupt):
            if not found:
                if self.unfinished is None:
                    raise Interrupted("interrupted") from None
                # too little for anybody to decide by, so it is shown and not kept
                found.append((self.unfinished.settings, self.unfinished))
                self.kept = False
            interrupted = True
        return self._report(found, interrupted)

    # -- what to measure

    def _settings(self) -> list[tuple[str, str]]:
        flash = _FLASH_ATTN if self.options.flash_attn == _AUTO else (self.options.flash_attn,)
        types = _KV_TYPES if self.options.kv_type == _AUTO else (self.options.kv_type,)
        pairs = [(f, k) for k in types for f in flash]
        if len(pairs) > 1:
            # values of a quantized cache are read by flash attention only
            pairs = [(f, k) for f, k in pairs if f == "on" or k in ("f32", "f16", "bf16")]
        return pairs

    def _context_size(self, kv_type: str) -> int:
        """The model's limit, or what was asked for; less where it would take too much memory."""
        trained = self.model.n_ctx_train
        if self.options.ctx is not None:
            if trained and self.options.ctx > trained:
                self._warn(
                    f"the context of {self.options.ctx} tokens is larger than the {trained} the "
                    "model was trained for"
                )
            return self.options.ctx
        n_ctx = min(trained or self.config.ctx_tokens, self.config.profile_ctx_tokens)
        fits = self._tokens_that_fit(kv_type)
        if 0 < fits < n_ctx:
            n_ctx = max(512, fits)
            self.notes.append(
                f"measured up to a context of {n_ctx} tokens, for which there is memory to spare; "
                "--ctx N goes on"
            )
        elif trained and n_ctx < trained:
            self.notes.append(
                f"measured up to a context of {n_ctx} of {trained} tokens; --ctx N goes on"
            )
        return n_ctx

    def _tokens_that_fit(self, kv_type: str) -> int:
        """Tokens whose keys and values there is memory to spare for; 0 where it is not known."""
        return tokens_that_fit(
            self.model.metadata,
            self.model.architecture,
            kv_type,
            on_gpu=self.model.gpu_layers != 0,
            config=self.config,
        )

    @contextmanager
    def _context(
        self, flash_attn: str, kv_type: str, n_ctx: int | None = None
    ) -> Iterator[LlamaBackend]:
        from .. import native

        with ExitStack() as stack:
            backend = stack.enter_context(
                native.open_context(
                    self.model,
                    ctx_tokens=n_ctx or self.n_ctx,
                    threads=self.options.threads or (self.threads[0] if self.threads else None),
                    threads_batch=self.options.threads
                    or (self.threads[1] if self.threads else None),
                    kv_type=kv_type,
                    flash_attn=flash_attn,
                    max_verify_tokens=self.config.max_verify_tokens,
                    short_head=self.config.short_head,
                )
            )
            if backend.refusal is not None:
                raise ModelError(f"{self.name} cannot be profiled: {backend.refusal}")
            stack.enter_context(backend.interruptible())
            yield backend

    # -- measuring

    def _measure_setting(
        self, flash_attn: str, kv_type: str, n: int, of: int
    ) -> tuple[dict[str, Any], LatencyProfile]:
        with self._context(flash_attn, kv_type) as backend:
            if n == 0:
                self._look_around(backend)
            share_here = 1.0 - _FIDELITY_SHARE - (_COMPARE_SHARE if of > 1 else 0.0)
            left = share_here * self.budget_seconds - self._elapsed()
            first = n / of
            profile = measure_latency(
                backend,
                budget_seconds=max(0.5, left / (of - n)),
                tokens=calibration_tokens(self.model, self._template()),
                config=self.config,
                progress=lambda share: self.progress("profile", share_here * (first + share / of)),
                unfinished=self._take_unfinished,
            )
            self.kept = kept.save_latency(
                self.store, kept.latency_key(backend, self.model_key), profile
            )
            return dict(backend.settings), profile

    def _take_unfinished(self, profile: LatencyProfile) -> None:
        self.unfinished = profile

    def _warn(self, warning: str) -> None:
        self.warnings.append(warning)
        self.warn(warning)

    def _compare(self, found: Sequence[tuple[dict[str, Any], LatencyProfile]]) -> None:
        """Plain steps of all settings in turn: their profiles were measured one after another.

        All contexts are open at once, so they share the memory that one was measured with.
        """
        if len(found) < 2:
            return
        middle, longest = self._expected(), min(p.limit_tokens for _, p in found)
        room = min(self._tokens_that_fit(s["kv_type"]) for s, _ in found) // len(found)
        n_ctx = min(self.n_ctx, max(middle + _COMPARE_ROOM, room or self.n_ctx))
        longest = min(longest, n_ctx - _COMPARE_ROOM)
        contexts = [c for c in dict.fromkeys((middle, longest)) if 0 < c < n_ctx - 8]
        with ExitStack() as stack:
            try:
                backends = [
                    stack.enter_context(self._context(s["flash_attn"], s["kv_type"], n_ctx))
                    for s, _ in found
                ]
            except ContextError:
                return  # not enough memory for all of them at once
            self.ratios = paired_steps(
                backends, contexts, budget_seconds=_COMPARE_SHARE * self.budget_seconds
            )

    def _look_around(self, backend: LlamaBackend) -> None:
        """Budget, placement, threads: once, in the first context."""
        from ..native.devices import placement
        from ..native.threads import usable_threads

        self.sublayers = backend.sublayers
        self.progress("profile", 0.0)
        self.measuring_since = time.monotonic()
        self.budget_seconds = self.options.budget_seconds or self._default_budget(backend)
        self.device = placement(backend)
        if self.options.threads is None and self._uses_cpu():
            self.thread_times = measure_threads(
                backend,
                thread_candidates(backend.settings["threads"], usable_threads()),
                budget_seconds=_THREADS_SHARE * self.budget_seconds,
            )
            self.threads = best_threads(self.thread_times, self.config)
            backend.set_threads(*self.threads)

    def _uses_cpu(self) -> bool:
        return bool(self.device["partial"]) or not self.device["offloaded_layers"]

    def _default_budget(self, backend: LlamaBackend) -> float:
        """From what one plain step takes at both ends of the contexts."""
        times = []
        short = min(128, self.n_ctx // 2)
        for context in (short, max(short, self.n_ctx - 8)):
            backend.fill(context)
            for _ in range(2):
                begun = time.perf_counter()
                backend.append([0])
                seconds = time.perf_counter() - begun
            times.append(seconds)
            backend.truncate(0)
        least, most = self.config.profile_budget_seconds
        # a geometric grid: its steps sum to about twice the last one, and the first one each
        doublings = max(1, self.n_ctx // 128).bit_length()
        return min(most, max(least, _ASSUMED_STEPS * (2 * times[1] + doublings * times[0])))

    def _template(self) -> ChatTemplate | None:
        try:
            return choose_template(self.model, None)
        except ModelError:
            return None

    def _measure_fidelity(self, found: Sequence[tuple[dict[str, Any], LatencyProfile]]) -> None:
        """Agreement of single skips at a short and at a long context, in the fastest setting."""
        settings, profile = min(found, key=lambda f: Costs(f[1]).step_ms(self._expected()))
        costs = Costs(profile)
        with self._context(settings["flash_attn"], settings["kv_type"]) as backend:
            key = kept.fidelity_key(backend, self.model_key)
            before = kept.load_fidelity(self.store, key, backend)
            budget = max(1.0, _FIDELITY_SHARE * self.budget_seconds)
            begun = time.monotonic()
            short = min(self.config.measure_context_tokens, self.n_ctx // 2)
            long = min(self.config.profile_long_context_tokens, self.n_ctx // 2)
            total = Fidelity()
            end = begun + (_SHORT_CONTEXT_SHARE if long > short else 1.0) * budget
            for n, wanted in enumerate(sorted({short, long})):
                context = wanted
                if n > 0:
                    end = begun + budget
                    context = self._affordable(backend, costs, short, wanted, end)
                if n > 0 and context <= short:
                    self.notes.append(f"no time to judge sublayers at a context of {wanted} tokens")
                    continue
                total = total.plus(
                    self._count(backend, costs, context, before.runs + n, begun, budget, end)
                )
            if total.counts:
                kept.add_fidelity(self.store, key, backend, total)
            self.fidelity = before.plus(total)

    def _affordable(
        self, backend: LlamaBackend, costs: Costs, short: int, context: int, end: float
    ) -> int:
        """The long context, halved until prompt and a block of a few probes fit the time."""
        fewest = len(probed_indices(backend.sublayers, len(backend.sublayers))) + 2
        while context > short:
            width = min(costs.max_width, self.config.measure_block_tokens)
            ms = self.prompt_token_ms * context + width * costs.step_ms(context)
            ms += fewest * costs.verify_ms(context, width)
            if ms <= 1000.0 * (end - time.monotonic()):
                return context
            context //= 2
        return short

    def _count(
        self,
        backend: LlamaBackend,
        costs: Costs,
        context: int,
        offset: int,
        begun: float,
        budget: float,
        end: float,
    ) -> Fidelity:
        """Agreement at one context, of as many sublayers on as many tokens as the time until `end`
        allows."""

        def share() -> None:
            spent = (time.monotonic() - begun) / budget
            self.progress("fidelity", min(0.99, spent))

        prompt = long_calibration_tokens(self.model, self._template(), context, offset)
        loading = time.monotonic()
        backend.prefill(prompt[:-1], GREEDY)
        self.prompt_token_ms = 1000.0 * (time.monotonic() - loading) / max(1, context - 1)
        share()
        width = min(costs.max_width, self.config.measure_block_tokens)
        block_ms = costs.verify_ms(context, width)
        left_ms = 1000.0 * (end - time.monotonic())
        windows = windows_at(backend, context, self.config)
        blocks, stride = 0, 0
        while blocks < 1 and stride < len(backend.sublayers):
            stride += 1
            # a window costs its own steps, and for every plan one pass per block
            probes = len(probed_indices(backend.sublayers, stride)) + len(windows) + 2
            blocks = int(left_ms / (width * costs.step_ms(context) + probes * block_ms))
        most = min(2 * self.config.measure_window_tokens, self.n_ctx - context - 1)
        window = min(most, max(1, blocks) * width)
        text = target_text(backend, prompt, window, share)
        try:
            return measure_fidelity(
                backend,
                text,
                probed_indices(backend.sublayers, stride, offset),
                self.config.measure_block_tokens,
                windows=windows,
                report=share,
                enough=lambda: time.monotonic() > end + 0.25 * budget,
            )
        finally:
            backend.truncate(0)

    # -- results

    def _expected(self) -> int:
        return min(self.config.expected_context_tokens, self.n_ctx)

    def _elapsed(self) -> float:
        return time.monotonic() - self.measuring_since

    def _report(
        self, found: Sequence[tuple[dict[str, Any], LatencyProfile]], interrupted: bool
    ) -> ProfileReport:
        expected = self._expected()
        candidates = [
            best_settings.candidate(
                settings, Costs(profile), self.fidelity, self.sublayers, self.config
            )
            for settings, profile in found
        ]
        candidates = best_settings.normalised(candidates, self.ratios)
        best = {
            purpose: best_settings.choose(candidates, expected, purpose, config=self.config)
            for purpose in ("plain", "speculation")
        }
        results = [
            SettingResult(
                c.flash_attn,
                c.kv_type,
                c.threads,
                c.threads_batch,
                profile,
                tuple(purpose for purpose, chosen in best.items() if chosen is c),
                plain_ms=c.ms(expected, "plain"),
                speculation_ms=c.speculation_at(expected),
            )
            for c, (_, profile) in zip(candidates, found, strict=True)
        ]
        results.sort(key=lambda r: "plain" not in r.best_for)
        complete = not interrupted and self.options.flash_attn == _AUTO
        if complete:
            # only where settings could be compared is there something to choose from next time
            self._keep_settings(candidates)
        return ProfileReport(
            model=self.name,
            path=str(self.model.path),
            n_params=self.model.n_params,
            size_bytes=self.model.size_bytes,
            device=self.device,
            sublayers=self.sublayers,
            expected_tokens=expected,
            results=tuple(results),
            fidelity=self.fidelity,
            threads_ms={
                str(t.threads): {"step_ms": t.step_ms, "pass_ms": t.pass_ms}
                for t in self.thread_times
            },
            elapsed_seconds=time.monotonic() - self.started,
            budget_seconds=self.budget_seconds,
            kept_in=str(self.store.folder) if self.kept else None,
            interrupted=interrupted,
            notes=tuple(
                dict.fromkeys([*self.notes, *_profile_notes(results), *self.fidelity.notes])
            ),
            warnings=tuple(self.warnings),
        )

    def _keep_settings(self, candidates: Sequence[best_settings.Candidate]) -> None:
        """Those of other types of keys and values that were measured before stay."""
        key = best_settings.settings_key(
            self.model_key, self.options.gpu_layers, self.options.threads
        )
        with self.store.updating():
            self._merge_settings(key, candidates)

    def _merge_settings(
        self, key: dict[str, Any], candidates: Sequence[best_settings.Candidate]
    ) -> None:
        known: tuple[best_settings.Candidate, ...] = ()
        stored = self.store.load(key)
        if stored is not None:
            try:
                known = best_settings.from_json(stored)
            except INVALID:
                self.store.ignore(key)
        types = {c.kv_type for c in candidates}
        others = [c for c in known if c.kv_type not in types]
        self.store.save(key, best_settings.to_json([*candidates, *others]))


def _profile_notes(results: Sequence[SettingResult]) -> list[str]:
    several = len(results) > 1
    return [
        f"flash attention {r.flash_attn}, {r.kv_type} keys: {note}" if several else note
        for r in results
        for note in r.profile.notes
    ]
