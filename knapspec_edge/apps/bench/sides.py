"""Whoever answers: policies on the engine of this process, and other libraries in theirs."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...decode.policy import Policy
from ...errors import LibraryError, UsageError
from ...latency.costs import Costs
from ...records import Draft, RoundTimes, Sampling, Stats
from .options import UNPATCHED
from .rows import Run

if TYPE_CHECKING:
    from ...engine import Engine

# (prompt, longest answer) -> the answer; what names prompt and visit is left to the caller
Answer = Callable[[Sequence[int], int], Run]


def blank_run(side: str, **values: Any) -> Run:
    """A run whose prompt and visit are not named yet."""
    return Run(side=side, task="", prompt="", context=None, repeat=0, visit="", place=0, **values)


def prefill(engine: Engine, prompt: Sequence[int]) -> float:
    """Compute a prompt from its first token and keep its keys: all sides of this process begin from
    them, with the last token of the prompt computed once more. The time in ms."""
    with engine.interruptible():
        generation = engine.session.generate(prompt, max_tokens=1, reuse=False)
        for _ in generation:
            pass
    return generation.stats.prompt_ms


def own_side(
    engine: Engine,
    name: str,
    policy: Policy,
    sampling: Sampling,
    is_end: Callable[[int], bool],
    costs: Callable[[], Costs | None],
) -> Answer:
    """A side that this process computes. `costs`: the cost model, once there is one."""
    session, backend = engine.session, engine.backend

    def builds() -> int | None:
        stats = getattr(backend, "graph_stats", None)
        return None if stats is None else int(stats()["n_builds"])

    def answer(prompt: Sequence[int], max_tokens: int) -> Run:
        before = builds()
        predicted = _Predicted(costs())
        with engine.interruptible():
            generation = session.generate(
                prompt,
                sampling=sampling,
                policy=policy,
                max_tokens=max_tokens,
                is_end=is_end,
                watch=predicted.watch,
            )
            events = list(generation)
        stats = generation.stats
        after = builds()
        later = stats.completion_tokens - 1  # the first token comes with the prompt
        return blank_run(
            name,
            speculated=stats.draft_n > 0,
            prompt_tokens=stats.prompt_tokens,
            completion_tokens=stats.completion_tokens,
            prompt_ms=stats.prompt_ms,
            start_ms=stats.prompt_ms,
            predicted_ms=stats.predicted_ms,
            per_second=1000.0 * later / stats.predicted_ms if stats.predicted_ms else 0.0,
            draft_n=stats.draft_n,
            draft_n_accepted=stats.draft_n_accepted,
            rounds=stats.rounds,
            draft_ms=stats.draft_ms,
            verify_ms=stats.verify_ms,
            plan_ms=stats.plan_ms,
            overhead_ms=stats.overhead_ms,
            model_ms=predicted.total_ms,
            graph_builds=None if before is None or after is None else after - before,
            stopped=stats.speculation_stopped,
            tokens=[e.token for e in events],
            margins=[0.0 if e.margin is None else e.margin for e in events],
        )

    return answer


class _Predicted:
    """What the cost model says for the rounds of one answer, as many tokens as they drafted and
    verified: None where it does not reach so far."""

    def __init__(self, costs: Costs | None) -> None:
        self._costs = costs
        self.total_ms: float | None = None if costs is None else 0.0

    def watch(self, stats: Stats) -> Callable[[RoundTimes], None]:
        def observe(times: RoundTimes) -> None:
            if self._costs is None or self.total_ms is None:
                return
            context = max(1, times.context_tokens)
            if times.width > self._costs.max_width:
                self.total_ms = None
                return
            self.total_ms += self._costs.verify_ms(context, times.width)
            if times.drafted and stats.latest_draft is not None:
                draft_ms = self._costs.draft_ms(stats.latest_draft.plan, context)
                self.total_ms += times.drafted * draft_ms

        return observe


def draft_json(engine: Engine, draft: Draft) -> dict[str, Any]:
    return {
        "skipped": [str(s) for s in engine.backend.sublayers if s.index in draft.plan.skipped],
        "max_tokens": draft.max_tokens,
        "min_probability": draft.min_probability,
    }


def digest(value: Any) -> str:
    """By which what a side drafts with is known again."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


class _Peer:
    """The worker process of another build (native/peer.py)."""

    def __init__(self, engine: Engine, library: Path) -> None:
        self.engine = engine
        self.library = library

    def __enter__(self) -> _Peer:
        from ...native import context as native

        if not any(self.library.glob("*llama.*")):
            raise UsageError(f"--unpatched {self.library}: there is no libllama in this folder")
        settings = self.engine.backend.settings  # type: ignore[attr-defined]
        script = Path(native.__file__).with_name("peer.py")
        self.process = subprocess.Popen(
            [sys.executable, os.fspath(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "LLAMA_CPP_LIB_PATH": os.fspath(self.library.resolve())},
            # Ctrl-C is for this process, which then ends the worker
            start_new_session=True,
        )
        self.ask(
            model=os.fspath(self.engine.backend.model.path),  # type: ignore[attr-defined]
            gpu_layers=settings["gpu_layers"],
            ctx_tokens=settings["ctx_tokens"],
            slice_tokens=settings["slice_tokens"],
            max_rows=settings["max_rows"],
            threads=settings["threads"],
            threads_batch=settings["threads_batch"],
            kv_type=native.KV_TYPES[settings["kv_type"]],
            flash_attn=native.FLASH_ATTN[settings["flash_attn"]],
        )
        vocabulary = self.engine.vocabulary
        self.ends = [t for t in range(vocabulary.n_vocab) if self.engine.backend.is_end(t)]
        return self

    def ask(self, **request: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        reply: dict[str, Any] = json.loads(line) if line else {"error": "it ended unexpectedly"}
        if "error" in reply:
            raise LibraryError(f"the llama.cpp in {self.library} failed: {reply['error']}")
        return reply

    def answer(self, prompt: Sequence[int], max_tokens: int) -> Run:
        reply = self.ask(prompt=list(prompt), max_tokens=max_tokens, ends=self.ends)
        tokens, ms = reply["tokens"], reply["predicted_ms"]
        return blank_run(
            UNPATCHED,
            speculated=False,
            prompt_tokens=len(prompt),
            completion_tokens=len(tokens),
            prompt_ms=reply["prompt_ms"],
            start_ms=reply["prompt_ms"],
            predicted_ms=ms,
            per_second=1000.0 * (len(tokens) - 1) / ms if ms else 0.0,
            tokens=tokens,
        )

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                # what was not sent yet no longer matters
                with suppress(BrokenPipeError):
                    stream.close()
