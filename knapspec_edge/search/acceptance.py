"""Measures how often a whole plan picks what the target picks.

Single-item agreements rank plans; only the joint measurement decides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ..backend import Backend
from ..latency.fidelity import evaluate_plans
from ..records import GREEDY, Plan, Sampling
from .draft_length import Calibration
from .throughput import Window

# Places; less says nothing about how sure a draft has to be.
_LEAST_HALF = 12


@dataclass(frozen=True)
class Judgement:
    """One plan on one or more pieces of text. Place i is the pick after input i of a piece."""

    plan: Plan
    windows: tuple[Window, ...]

    @property
    def agree(self) -> tuple[bool, ...]:
        return tuple(a for w in self.windows for a in w.agree)

    @property
    def agreement(self) -> float:
        """Share of all places; each place by itself, as if everything before had been accepted."""
        agree = self.agree
        return sum(agree) / len(agree)

    def plus(self, other: Judgement, most_places: int) -> Judgement:
        """Both together, of which the oldest windows are forgotten beyond so many places."""
        windows = [*self.windows, *other.windows]
        while len(windows) > 1 and sum(len(w.agree) for w in windows) > most_places:
            windows.pop(0)
        return Judgement(self.plan, tuple(windows))

    def calibration(self, memory_tokens: float) -> Calibration:
        """Acceptance by confidence, as counted here."""
        confidences = [p for w in self.windows for p in w.probability]
        return Calibration.of(confidences, self.agree, memory_tokens)

    def halves(self) -> tuple[Judgement, Judgement] | None:
        """Both halves of every window; None where a half would be shorter than `_LEAST_HALF`."""
        if any(len(w.agree) < 2 * _LEAST_HALF for w in self.windows):
            return None
        parts: tuple[list[Window], list[Window]] = ([], [])
        for window in self.windows:
            middle = len(window.agree) // 2
            parts[0].append(Window(window.agree[:middle], window.probability[:middle]))
            parts[1].append(Window(window.agree[middle:], window.probability[middle:]))
        return Judgement(self.plan, tuple(parts[0])), Judgement(self.plan, tuple(parts[1]))


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
    found = evaluate_plans(backend, window, plans, block_tokens, report=report)
    target, position = window[1:], backend.n_past + 1
    return [
        Judgement(
            plan,
            (
                _window(
                    _drafted(backend, found.tokens[row].tolist(), target, position, plan),
                    found.probabilities[row].tolist(),
                    target,
                ),
            ),
        )
        for row, plan in enumerate(plans)
    ]


def judge_beside(
    backend: Backend,
    start: int,
    window: Sequence[int],
    plan: Plan,
    block_tokens: int,
    sampling: Sampling = GREEDY,
) -> Judgement:
    """Compare a plan with the tokens the target emitted, window[1:], in one pass beside the text.

    The cache holds the window from position `start` on (its last token may be missing) and is not
    touched. `sampling` is that of the text. Raises ContextError where there are no cells for it.
    """
    inputs, target = list(window[:-1]), window[1:]
    if not inputs or len(inputs) > backend.max_beside_tokens:
        raise ValueError(f"a window of {len(window)} tokens cannot be judged beside the text")
    blocks = [
        (start + i, inputs[i : i + block_tokens]) for i in range(0, len(inputs), block_tokens)
    ]
    parts = backend.evaluate_beside(blocks, plan, sampling)
    picks = _drafted(
        backend, [int(p) for part in parts for p in part.tokens], target, start + 1, plan
    )
    probabilities = [float(p) for part in parts for p in part.probabilities]
    return Judgement(plan, (_window(picks, probabilities, target),))


def _drafted(
    backend: Backend, picks: Sequence[int], target: Sequence[int], position: int, plan: Plan
) -> list[int]:
    """The picks that a draft would have made: of tokens that a short head lacked when the text came
    to them, none (-1), although it has them by now. target[0] stands at `position`."""
    found = list(picks)
    if plan.head_rows:
        for i in np.flatnonzero(backend.lacked(target, position, plan)).tolist():
            if found[i] == target[i]:
                found[i] = -1
    return found


def _window(picks: Sequence[int], probabilities: Sequence[float], target: Sequence[int]) -> Window:
    return Window(
        tuple(int(p) == t for p, t in zip(picks, target, strict=False)),
        tuple(round(float(p), 4) for p, _ in zip(probabilities, target, strict=False)),
    )
