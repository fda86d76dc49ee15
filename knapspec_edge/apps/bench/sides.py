"""Whoever answers: policies on the engine of this process, and other libraries in theirs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ...decode.policy import Policy
from ...latency.costs import Costs
from ...records import Draft, RoundTimes, Sampling, Stats
from ..peers import Peer
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
            if times.drafted and not times.proposed and stats.latest_draft is not None:
                draft_ms = self._costs.draft_ms(stats.latest_draft.plan, context)
                self.total_ms += times.drafted * draft_ms

        return observe


def draft_json(engine: Engine, draft: Draft) -> dict[str, Any]:
    return {
        "skipped": [str(s) for s in engine.backend.sublayers if s.index in draft.plan.skipped],
        "windowed": {
            str(engine.backend.sublayers[i]): str(draft.plan.modes[i]) for i in draft.plan.windowed
        },
        "head_rows": draft.plan.head_rows,
        "max_tokens": draft.max_tokens,
        "min_probability": draft.min_probability,
    }


def digest(value: Any) -> str:
    """By which what a side drafts with is known again."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def peer_side(peer: Peer) -> Answer:
    """A side that the worker process of another build computes, prompt included."""

    def answer(prompt: Sequence[int], max_tokens: int) -> Run:
        found = peer.answer(prompt, max_tokens)
        n, ms = len(found.tokens), found.predicted_ms
        return blank_run(
            peer.source.name,
            speculated=False,
            prompt_tokens=len(prompt),
            completion_tokens=n,
            prompt_ms=found.prompt_ms,
            start_ms=found.prompt_ms,
            predicted_ms=ms,
            per_second=1000.0 * (n - 1) / ms if ms else 0.0,
            tokens=found.tokens,
        )

    return answer
