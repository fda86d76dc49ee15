"""Measures how often a whole plan picks what the target picks.

Single-item agreements rank plans; only the joint measurement decides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..backend import Backend
from ..latency.fidelity import evaluate_plans
from ..records import Plan


@dataclass(frozen=True)
class Judgement:
    """One plan on one window. Place i is the pick after input i of the window."""

    plan: Plan
    agree: tuple[bool, ...]
    probability: tuple[float, ...]

    @property
    def agreement(self) -> float:
        return sum(self.agree) / len(self.agree)


def judge(
    backend: Backend,
    window: Sequence[int],
    plans: Sequence[Plan],
    block_tokens: int,
    report: Callable[[], None] = lambda: None,
) -> list[Judgement]:
    """Compare each plan with the tokens the target itself emitted, window[1:].

    The window stands for what follows the cache, which is left as it was. Blocks are about as long
    as a draft, so that a plan sees as few keys of its own as it will in use.
    """
    if not plans:
        return []
    if len(window) < 2:
        raise ValueError("a window of at least 2 tokens is needed to judge a plan")
    _, picks, probabilities = evaluate_plans(backend, window, plans, block_tokens, report=report)
    return [
        Judgement(
            plan,
            tuple(int(p) == t for p, t in zip(picks[row], window[1:], strict=False)),
            tuple(round(float(p), 4) for p in probabilities[row][: len(window) - 1]),
        )
        for row, plan in enumerate(plans)
    ]
