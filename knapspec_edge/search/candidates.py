"""Candidate plans from single measurements: which sublayers to leave out for every saving of time.

The exact knapsack over latency units; its values multiply, so it ranks plans without running them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..config import DEFAULTS, Config
from ..latency.costs import Costs
from ..latency.fidelity import Fidelity, Losses
from ..records import FULL, SKIP, Mode, Plan, SubLayer
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
    found, choices = _sweep(costs, fidelity, context_tokens, sublayers, config)
    return [
        Cut(
            choices.plan(found.options[row]),
            int(found.saving_units[row]),
            math.exp(-float(found.losses[row])),
        )
        for row in range(len(found))
    ]


class _Choices(NamedTuple):
    """What the options of a sweep stand for."""

    modes: list[Mode]  # of a sublayer
    heads: list[int]  # rows of the head

    def plan(self, options: NDArray[np.int16]) -> Plan:
        *sublayers, head = options.tolist()
        return Plan(tuple(self.modes[option] for option in sublayers), self.heads[head])


def _sweep(
    costs: Costs,
    fidelity: Fidelity,
    context_tokens: int,
    sublayers: tuple[SubLayer, ...],
    config: Config,
) -> tuple[Sweep, _Choices]:
    """Rows that save something, ascending, and what their options stand for; the last item is the
    head."""
    weights, unit_ms = costs.integer_weights(
        context_tokens, largest_error=config.plan_rounding_error
    )
    modes = [FULL, *_windows(costs, context_tokens, sublayers, config), SKIP]
    heads = _heads(costs, fidelity, context_tokens, config)
    expected = Losses(fidelity, sublayers, config)
    units = np.zeros((len(sublayers) + 1, max(len(modes), len(heads))), dtype=np.int64)
    losses = np.full(units.shape, np.inf)
    losses[:, 0] = 0.0
    for option, mode in enumerate(modes[1:], start=1):
        for item in expected.items(mode):
            if mode == SKIP:
                # Where noise hid all costs, one unit each: a deeper plan is at least not slower.
                weight = 1 if costs.blind else int(weights[item.index])
            else:
                weight = round(costs.saving_ms(item.index, context_tokens, mode) / unit_ms)
            if weight >= 1 and item.agreement >= config.plan_floor_agreement:
                units[item.index, option], losses[item.index, option] = weight, item.loss
    for option, n_rows in enumerate(heads[1:], start=1):
        units[-1, option] = round(costs.head_saving_ms(n_rows) / unit_ms)
        losses[-1, option] = fidelity.head_loss(n_rows)
    # Importing the compiler takes longer than solving without it; whoever has loaded it gets it.
    found = sweep(units, losses, front=True, load=False)
    saving = found.saving_units > 0
    chosen = Sweep(found.saving_units[saving], found.losses[saving], found.options[saving])
    return chosen, _Choices(modes, heads)


def _heads(costs: Costs, fidelity: Fidelity, context_tokens: int, config: Config) -> list[int]:
    """Rows of the heads to choose from: all (0), then those that save something worth while, the
    largest first."""
    if not config.short_head or costs.blind:
        return [0]
    least_ms = config.head_min_share * costs.step_ms(context_tokens)
    found = [
        n_rows
        for n_rows in costs.short_heads
        if costs.head_saving_ms(n_rows) >= least_ms
        and math.exp(-fidelity.head_loss(n_rows)) >= config.plan_floor_agreement
    ]
    return [0, *reversed(found)]


def _windows(
    costs: Costs, context_tokens: int, sublayers: tuple[SubLayer, ...], config: Config
) -> list[Mode]:
    """Windows that save something somewhere, the widest first."""
    found = {
        mode
        for i in range(len(sublayers))
        for mode in costs.windows(i, context_tokens)
        if mode.window_tokens in config.window_tokens
    }
    return sorted(found, key=lambda m: (-m.window_tokens, m.sink_tokens))


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
    found, choices = _sweep(costs, fidelity, context_tokens, sublayers, config)
    if not len(found):
        return []
    verify_ms = verification_ms(costs, context_tokens, config)
    rows = np.arange(len(sublayers))
    savings_ms = np.array(
        [
            [costs.saving_ms(i, context_tokens, mode) for mode in choices.modes]
            for i in rows.tolist()
        ]
    )  # f64 [sublayers, modes]
    heads_ms = np.array([costs.head_saving_ms(n_rows) for n_rows in choices.heads])
    saved_ms = savings_ms[rows, found.options[:, :-1]].sum(axis=1)  # f64 [rows of the sweep]
    saved_ms += heads_ms[found.options[:, -1]]
    drafts_ms = costs.step_ms(context_tokens) - saved_ms
    least = Plan((SKIP,) * len(sublayers), choices.heads[-1])
    least_ms = costs.draft_ms(least, context_tokens)
    deepest = int(found.saving_units[-1])
    best: dict[int, tuple[float, int]] = {}
    for row in range(len(found)):
        draft_ms = max(least_ms, float(drafts_ms[row]))
        rate = geometric_rate(draft_ms, math.exp(-float(found.losses[row])), verify_ms)
        saving = int(found.saving_units[row])
        part = math.isqrt(config.plan_shortlist**2 * (saving - 1) // deepest)
        if part not in best or rate > best[part][0]:
            best[part] = (rate, row)
    return [choices.plan(found.options[row]) for _, (_, row) in sorted(best.items())]


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
