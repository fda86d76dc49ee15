"""What a judged plan yields at given prices, with the draft length chosen by value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..config import Config
from ..latency.costs import Costs
from . import candidates
from .acceptance import Judgement
from .draft_length import Calibration, ValueRule
from .throughput import Replay, Window, replay

# Rounds of replay after which the price of time has settled.
_RATE_ROUNDS = 3


@dataclass(frozen=True)
class Prices:
    """What passes cost at one context, in ms, corrected for what recent rounds took."""

    step_ms: float
    draft_ms: float
    verify_ms: tuple[float, ...]  # [j]: verifying j drafted tokens; [0] is a plain step


def verification_curve(
    costs: Costs, context_tokens: int, step_ms: float, scale: float, config: Config
) -> tuple[float, ...]:
    """Prices.verify_ms of a context whose plain step takes `step_ms`: the measured curve times
    `scale`. Several tokens never cost less than one: what says so was disturbed."""
    by_length = candidates.verification_ms(costs, context_tokens, config)
    return (step_ms, *(max(step_ms, scale * ms) for ms in by_length.values()))


def geometric_rate(prices: Prices, alpha: float) -> float:
    """Tokens per ms at the best fixed length, one acceptance for every place."""
    by_length = dict(enumerate(prices.verify_ms[1:], start=1))
    return candidates.geometric_rate(prices.draft_ms, alpha, by_length)


def rate_by_value(
    windows: Sequence[Window], prices: Prices, calibration: Calibration
) -> tuple[Replay | None, float]:
    """Rounds of the value rule on judged text, and their rate in tokens per ms.

    The rate is the price of time in the rule that yields it: a few rounds settle it.
    """
    rate, best = 1.0 / prices.step_ms, None
    for _ in range(_RATE_ROUNDS):
        rule = ValueRule(calibration, prices.draft_ms, prices.verify_ms, rate, least=1)
        most = min(rule.most, max(1, max(len(w.agree) for w in windows) // 2))
        result = replay(
            windows,
            _Shorter(rule, most),
            prices.draft_ms,
            lambda tokens: prices.verify_ms[tokens - 1],
        )
        if result is None:
            break
        if best is not None and 1.0 / result.ms_per_token <= rate * 1.001:
            break
        best = result
        rate = 1.0 / result.ms_per_token
    if best is None:
        agree = [a for w in windows for a in w.agree]
        return None, geometric_rate(prices, sum(agree) / len(agree))
    return best, rate


def expected_rate(
    judgement: Judgement, prices: Prices, memory_tokens: float
) -> tuple[Replay | None, float]:
    """Rounds of the value rule on judged text, and the rate in tokens per ms to expect elsewhere.

    A rule that learns how far to trust a draft from the very tokens it is tried on does better on
    them than on others: the rate is that of each half with what the other half taught.
    """
    calibration = judgement.calibration(memory_tokens)
    found, rate = rate_by_value(judgement.windows, prices, calibration)
    halves = judgement.halves()
    if found is None or halves is None:
        return found, rate
    ms_per_token = [
        1.0 / rate_by_value(half.windows, prices, other.calibration(memory_tokens))[1]
        for half, other in (halves, halves[::-1])
    ]
    return found, 2.0 / sum(ms_per_token)


@dataclass(frozen=True)
class _Shorter:
    """A rule on windows too short for its longest draft."""

    rule: ValueRule
    most: int

    def lengths(
        self, confidences: NDArray[np.float64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        return self.rule.lengths(confidences[:, : self.most])
