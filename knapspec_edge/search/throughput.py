"""How many tokens a round yields and what they cost: the paper's TPT with the costs it leaves out.

TPT(S, γ) = E(α, γ) / (γ · t_draft(S) + t_verify(γ + 1)). The paper takes t_verify as one plain
step; here it is the measured time of a pass over γ + 1 tokens. All times in milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


def expected_tokens(acceptance: Sequence[float]) -> float:
    """Tokens per round from p_1..p_γ: p_i is the chance of place i given that all before held.

    One (the target's own) plus the expected length of the accepted prefix.
    """
    total, alive = 1.0, 1.0
    for p in acceptance:
        alive *= p
        total += alive
    return total


def expected_tokens_geometric(acceptance: float, draft_tokens: int) -> float:
    """The same with one α for every place: (1 - α^(γ+1)) / (1 - α).

    Over-rates long drafts, since acceptance falls with depth; good for ranking, not for deciding.
    """
    if acceptance >= 1.0:
        return draft_tokens + 1.0
    return (1.0 - acceptance ** (draft_tokens + 1)) / (1.0 - acceptance)


def tokens_per_ms(
    tokens_per_round: float, draft_tokens: float, draft_ms: float, verify_ms: float
) -> float:
    """TPT: tokens of a round over its time."""
    return tokens_per_round / (draft_tokens * draft_ms + verify_ms)


def can_pay(acceptance: float, draft_cost: float, verify_slope: float) -> bool:
    """Whether any draft length can beat plain decoding: α > c + s.

    `draft_cost` c is a draft step and `verify_slope` s the extra cost of each verified token, both
    in plain steps. Exact for t_verify(b) = 1 + s(b - 1) under the geometric model.
    """
    return acceptance > draft_cost + verify_slope


@dataclass(frozen=True)
class Replay:
    """What rounds would have done on tokens whose agreement is known."""

    tokens_per_round: float
    drafted_per_round: float
    ms_per_token: float
    # p_1..p_γ; shorter where no round ever drafted that far with everything before accepted
    acceptance: tuple[float, ...]


class Rule(Protocol):
    """How far to draft, see draft_length."""

    @property
    def most(self) -> int: ...

    def lengths(
        self, confidences: NDArray[np.float64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(drafted, verified), i64 [rounds], of rounds whose tokens would have these confidences,
        f64 [rounds, tokens]."""
        ...


@dataclass(frozen=True)
class Window:
    """Picks of a draft on a piece of the target's own text, one per place: whether each was the
    target's, and how sure the draft was."""

    agree: tuple[bool, ...]
    probability: tuple[float, ...]


def replay(
    windows: Sequence[Window],
    rule: Rule,
    draft_ms: float,
    verify_ms: Callable[[int], float],
    longest: int | None = None,
) -> Replay | None:
    """Run the loop's rounds from each place of the judged windows.

    `verify_ms(b)` is a pass over b tokens. Only places with `longest` more behind them (None: the
    rule's longest draft) are starts, so that rules of different length are compared on the same
    ones. After a wrong token a real draft goes on from it; how long is estimated by the confidences
    at the same places. None if no window is as long as a draft.
    """
    most = rule.most
    longest = max(most, longest or 0)
    starts = [
        (window, start) for window in windows for start in range(len(window.agree) - longest + 1)
    ]
    if not starts:
        return None
    confidences = np.array([w.probability[i : i + most] for w, i in starts])  # f64 [rounds, most]
    agree = np.array([w.agree[i : i + most] for w, i in starts])  # bool [rounds, most]
    drafted, verified = rule.lengths(confidences)
    lead = np.logical_and.accumulate(agree, axis=1).sum(axis=1)
    accepted = np.minimum(lead, verified)
    places = np.arange(most)
    tried = (places < np.minimum(accepted + 1, verified)[:, None]).sum(axis=0)
    right = (places < accepted[:, None]).sum(axis=0)
    n_tokens = len(starts) + int(accepted.sum())
    widths, rounds = np.unique(verified + 1, return_counts=True)
    total_ms = float(drafted.sum()) * draft_ms + sum(
        int(n) * verify_ms(int(b)) for b, n in zip(widths, rounds, strict=True)
    )
    return Replay(
        n_tokens / len(starts),
        float(drafted.mean()),
        total_ms / n_tokens,
        tuple(float(r / t) for r, t in zip(right, tried, strict=True) if t),
    )
