"""How many tokens a round yields and what they cost: the paper's TPT with the costs it leaves out.

TPT(S, γ) = E(α, γ) / (γ · t_draft(S) + t_verify(γ + 1)). The paper takes t_verify as one plain
step; here it is the measured time of a pass over γ + 1 tokens. All times in milliseconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass


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


def replay(
    agree: Sequence[bool],
    probability: Sequence[float],
    draft_tokens: int,
    min_probability: float,
    draft_ms: float,
    verify_ms: Callable[[int], float],
    starts: int | None = None,
) -> Replay | None:
    """Run the loop's rounds from the first `starts` places of a judged window (None: from all).

    `agree[i]` says whether the draft's pick after input i is the target's, `probability[i]` how
    sure it was. As in the loop, a doubtful token is still drafted and ends the draft. After a wrong
    token a real draft goes on from it; how long is estimated by the confidences at the same places.
    None if the window is shorter than a draft.
    """
    possible = len(agree) - draft_tokens + 1
    starts = possible if starts is None else min(starts, possible)
    if starts < 1 or draft_tokens < 1:
        return None
    tokens = drafted_total = 0
    total_ms = 0.0
    tried, right = [0] * draft_tokens, [0] * draft_tokens
    for start in range(starts):
        drafted = 0
        while drafted < draft_tokens:
            drafted += 1
            if probability[start + drafted - 1] < min_probability:
                break
        accepted = 0
        while accepted < drafted and agree[start + accepted]:
            accepted += 1
        for i in range(min(accepted + 1, drafted)):
            tried[i] += 1
            right[i] += i < accepted
        tokens += accepted + 1
        drafted_total += drafted
        total_ms += drafted * draft_ms + verify_ms(drafted + 1)
    return Replay(
        tokens / starts,
        drafted_total / starts,
        total_ms / tokens,
        tuple(r / t for r, t in zip(right, tried, strict=True) if t),
    )


def loss(agreement: float, samples: int) -> float:
    """-log of an agreement measured on so many samples, so that losses of items add up.

    Half a count is added on the wrong side: a window without a miss is no proof of 1.
    """
    hits = agreement * samples
    return -math.log((hits + 0.5) / (samples + 1.0))
