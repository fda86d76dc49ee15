"""What was measured about plans, and what it predicts for one of them."""

from __future__ import annotations

from dataclasses import dataclass

from ..config import Config
from ..latency.costs import Costs
from ..latency.drift import NO_CORRECTION, Correction
from ..latency.fidelity import Fidelity, Text
from ..latency.rounds import RoundTiming
from ..records import Draft
from .acceptance import Judgement
from .candidates import draft_lengths
from .draft_length import FixedRule
from .throughput import Replay, replay
from .valuation import Prices, expected_rate, verification_curve


@dataclass(frozen=True)
class Alternative:
    """One candidate with its figures. Costs are in plain steps at the measured context."""

    draft: Draft
    agreement: float  # of the picks on the window, each place by itself
    draft_cost: float  # one draft step
    verify_cost: float  # the pass over draft.max_tokens + 1 tokens
    tokens_per_round: float
    drafted_per_round: float  # below draft.max_tokens where drafts stop early
    predicted_ratio: float  # speed relative to plain decoding, with lengths chosen by value
    fixed_ratio: float  # the same with `draft` as it stands: one length, one threshold
    timed: bool  # costs come from real rounds, not from the model
    acceptance: tuple[float, ...] = ()  # p_1..p_γ, see throughput.Replay


@dataclass(frozen=True)
class Measured:
    """What a decision rests on. Costs are looked up at the end of the text's prompt."""

    costs: Costs
    text: Text
    fidelity: Fidelity

    @property
    def context_tokens(self) -> int:
        return len(self.text.prompt)

    @property
    def step_ms(self) -> float:
        return self.costs.step_ms(self.context_tokens)

    @property
    def notes(self) -> tuple[str, ...]:
        return self.costs.profile.notes + self.fidelity.notes


@dataclass(frozen=True)
class Finalist:
    """A judged plan, with its timing in real rounds if it got that far."""

    judgement: Judgement
    timing: RoundTiming | None = None


def best_length(
    measured: Measured,
    finalist: Finalist,
    config: Config,
    correction: Correction = NO_CORRECTION,
) -> Alternative | None:
    """The γ with the best predicted speed for one plan; of equal ones the shortest."""
    costs, context = measured.costs, measured.context_tokens
    judgement, timing = finalist.judgement, finalist.timing
    plan = judgement.plan
    step_ms, draft_ms, verify_scale = measured.step_ms, costs.draft_ms(plan, context), 1.0
    if timing is not None:
        step_ms, draft_ms = timing.plain_step_ms, timing.draft_step_ms
        # The curve keeps its shape; its height is that of the pass in a real round.
        verify_scale = timing.verify_ms / costs.verify_ms(context, timing.draft_tokens + 1)
    step_ms *= correction.step
    draft_ms *= correction.draft
    verify_scale *= correction.verify
    curve = verification_curve(costs, context, step_ms, verify_scale, config)

    best: tuple[int, Replay] | None = None
    # Every length is replayed from the same places, or a lucky place would favour one of them.
    places = max((len(w.agree) for w in judgement.windows), default=0)
    lengths = [g for g in draft_lengths(costs, config) if 2 * g <= places + 1]
    for gamma in lengths:
        rule = FixedRule(gamma, config.draft_min_probability)
        result = replay(
            judgement.windows, rule, draft_ms, lambda tokens: curve[tokens - 1], max(lengths)
        )
        if result is not None and (best is None or result.ms_per_token < best[1].ms_per_token):
            best = (gamma, result)
    if best is None:
        return None
    gamma, fixed = best
    prices = Prices(step_ms, draft_ms, curve)
    by_value, rate = expected_rate(judgement, prices, config.calibration_memory_tokens)
    shown = fixed if by_value is None else by_value
    return Alternative(
        Draft(plan, gamma, config.draft_min_probability),
        judgement.agreement,
        draft_ms / step_ms,
        curve[gamma] / step_ms,
        shown.tokens_per_round,
        shown.drafted_per_round,
        rate * step_ms,
        step_ms / fixed.ms_per_token,
        timing is not None,
        fixed.acceptance,
    )
