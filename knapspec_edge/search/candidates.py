"""Candidate plans from single measurements: which sublayers to leave out for every saving of time.

The exact knapsack over latency units; its values multiply, so it ranks plans without running them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ..config import DEFAULTS, Config
from ..latency.costs import Costs
from ..latency.fidelity import Fidelity
from ..records import FULL, SKIP, Mode, Plan, SubLayer
from .knapsack import Option, solve
from .throughput import expected_tokens_geometric, tokens_per_ms


@dataclass(frozen=True)
class Cut:
    """The knapsack's plan for one saving: of all that save as much, the one whose single agreements
    multiply to the most."""

    plan: Plan
    saving_units: int  # > 0
    agreement: float  # that product


def cuts(
    costs: Costs,
    fidelity: Fidelity,
    context_tokens: int,
    sublayers: tuple[SubLayer, ...],
    config: Config = DEFAULTS,
) -> list[Cut]:
    """One for every saving that can be reached, ascending."""
    weights, _ = costs.integer_weights(context_tokens, largest_error=config.plan_rounding_error)
    modes: list[tuple[Mode, ...]] = []
    items: list[tuple[Option, ...]] = []
    for item in fidelity.agreements(sublayers):
        # Where noise hid all costs, one unit each: a deeper plan is at least not slower.
        units = 1 if costs.blind else int(weights[item.index])
        if units >= 1 and item.agreement >= config.plan_floor_agreement:
            modes.append((FULL, SKIP))
            items.append((Option(0, 0.0), Option(units, item.loss)))
        else:
            modes.append((FULL,))
            items.append((Option(0, 0.0),))
    return [
        Cut(
            Plan(tuple(m[k] for m, k in zip(modes, solution.options, strict=True))),
            solution.saving_units,
            math.exp(-solution.loss),
        )
        for solution in solve(items)
        if solution.saving_units > 0
    ]


def candidate_plans(
    costs: Costs,
    fidelity: Fidelity,
    context_tokens: int,
    sublayers: tuple[SubLayer, ...],
    config: Config = DEFAULTS,
) -> list[Plan]:
    """The shortlist: plans worth measuring jointly, from the cheapest cut to the deepest.

    The range of savings is divided into parts and each sends the cut with the best predicted
    throughput, because the product of singles is a rough guide over long distances. Shallow parts
    are finer (their borders are 1, 4, 9, ... of the square of their number): that is where most
    models have their best plan.
    """
    found = cuts(costs, fidelity, context_tokens, sublayers, config)
    if not found:
        return []
    verify_ms = verification_ms(costs, context_tokens, config)
    deepest = found[-1].saving_units
    best: dict[int, tuple[float, Plan]] = {}
    for cut in found:
        draft_ms = costs.draft_ms(cut.plan, context_tokens)
        rate = geometric_rate(draft_ms, cut.agreement, verify_ms)
        part = math.isqrt(config.plan_shortlist**2 * (cut.saving_units - 1) // deepest)
        if part not in best or rate > best[part][0]:
            best[part] = (rate, cut.plan)
    return [plan for _, (_, plan) in sorted(best.items())]


def verification_ms(
    costs: Costs, context_tokens: int, config: Config = DEFAULTS
) -> dict[int, float]:
    """Time of verifying a draft, by each length γ that may be chosen."""
    return {
        gamma: costs.verify_ms(context_tokens, gamma + 1) for gamma in draft_lengths(costs, config)
    }


def geometric_rate(draft_ms: float, alpha: float, verify_ms: Mapping[int, float]) -> float:
    """Tokens per ms with the best γ of those whose verification `verify_ms` holds; 0 without."""
    rates = (
        tokens_per_ms(expected_tokens_geometric(alpha, gamma), gamma, draft_ms, verify)
        for gamma, verify in verify_ms.items()
    )
    return max(rates, default=0.0)


def draft_lengths(costs: Costs, config: Config) -> range:
    """The γ that can be chosen: those whose verification was measured."""
    return range(1, min(config.draft_max_tokens, costs.max_width - 1) + 1)
