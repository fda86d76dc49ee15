"""Candidate plans from single measurements: which sublayers to leave out for every saving of time.

The exact knapsack over latency units; its values multiply, so it ranks plans without running them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..config import DEFAULTS, Config
from ..latency.costs import Costs
from ..latency.fidelity import Fidelity
from ..records import FULL, SKIP, Plan, SubLayer
from .knapsack import Sweep, sweep
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
    """One for every saving that no other cut beats in both saving and agreement, ascending."""
    found = _sweep(costs, fidelity, context_tokens, sublayers, config)
    heads = _heads(costs, fidelity, context_tokens, config)
    return [
        Cut(
            _plan(found.options[row], heads),
            int(found.saving_units[row]),
            math.exp(-float(found.losses[row])),
        )
        for row in range(len(found))
    ]


def _sweep(
    costs: Costs,
    fidelity: Fidelity,
    context_tokens: int,
    sublayers: tuple[SubLayer, ...],
    config: Config,
) -> Sweep:
    """Option 0 of an item is full, 1 skip; the last item is the head, whose options are the sizes
    of `_heads`. Rows that save something, ascending."""
    weights, unit_ms = costs.integer_weights(
        context_tokens, largest_error=config.plan_rounding_error
    )
    heads = _heads(costs, fidelity, context_tokens, config)
    n_options = max(2, len(heads))
    units = np.zeros((len(sublayers) + 1, n_options), dtype=np.int64)
    losses = np.full((len(sublayers) + 1, n_options), np.inf)
    losses[:, 0] = 0.0
    for option, n_rows in enumerate(heads[1:], start=1):
        units[-1, option] = round(costs.head_saving_ms(n_rows) / unit_ms)
        losses[-1, option] = fidelity.head_loss(n_rows)
    for item in fidelity.agreements(sublayers):
        # Where noise hid all costs, one unit each: a deeper plan is at least not slower.
        weight = 1 if costs.blind else int(weights[item.index])
        if weight >= 1 and item.agreement >= config.plan_floor_agreement:
            units[item.index, 1], losses[item.index, 1] = weight, item.loss
    # Importing the compiler takes longer than solving without it; whoever has loaded it gets it.
    found = sweep(units, losses, front=True, load=False)
    saving = found.saving_units > 0
    return Sweep(found.saving_units[saving], found.losses[saving], found.options[saving])


def _heads(
    costs: Costs, fidelity: Fidelity, context_tokens: int, config: Config
) -> tuple[int, ...]:
    """Rows of the heads to choose from, 0 (the whole one) first, then those that save something
    worth while, the largest first."""
    if not config.short_head or costs.blind:
        return (0,)
    least_ms = config.head_min_share * costs.step_ms(context_tokens)
    found = [
        n_rows
        for n_rows in costs.short_heads
        if costs.head_saving_ms(n_rows) >= least_ms
        and math.exp(-fidelity.head_loss(n_rows)) >= config.plan_floor_agreement
    ]
    return (0, *reversed(found))


def _plan(options: NDArray[np.int16], heads: tuple[int, ...]) -> Plan:
    *modes, head = options.tolist()
    return Plan(tuple(SKIP if option else FULL for option in modes), heads[head])


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
    found = _sweep(costs, fidelity, context_tokens, sublayers, config)
    if not len(found):
        return []
    verify_ms = verification_ms(costs, context_tokens, config)
    heads = _heads(costs, fidelity, context_tokens, config)
    savings_ms = np.array([costs.saving_ms(i, context_tokens) for i in range(len(sublayers))])
    heads_ms = np.array([costs.head_saving_ms(n_rows) for n_rows in heads])
    saved_ms = found.options[:, :-1] @ savings_ms + heads_ms[found.options[:, -1]]  # f64 [rows]
    drafts_ms = costs.step_ms(context_tokens) - saved_ms
    least_ms = costs.draft_ms(Plan((SKIP,) * len(sublayers), heads[-1]), context_tokens)
    deepest = int(found.saving_units[-1])
    best: dict[int, tuple[float, int]] = {}
    for row in range(len(found)):
        draft_ms = max(least_ms, float(drafts_ms[row]))
        rate = geometric_rate(draft_ms, math.exp(-float(found.losses[row])), verify_ms)
        saving = int(found.saving_units[row])
        part = math.isqrt(config.plan_shortlist**2 * (saving - 1) // deepest)
        if part not in best or rate > best[part][0]:
            best[part] = (rate, row)
    return [_plan(found.options[row], heads) for _, (_, row) in sorted(best.items())]


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
