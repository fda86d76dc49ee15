"""Where candidate plans come from: the knapsack over sublayers, and the search over hidden states.

Both only propose; the judge measures what they propose.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np

from ..backend import Backend
from ..config import GENERATORS, Config
from ..decode.rollback import rewind
from ..errors import ContextError, PlanError
from ..latency.costs import Costs
from ..latency.fidelity import Losses
from ..records import Plan, SubLayer
from . import hidden_state
from .candidates import candidate_plans, geometric_rate, verification_ms
from .judged import Measured

KNAPSPEC, PAPER = GENERATORS

# Full passes over the window that a search takes for each branch, on average: states die early and
# half of the sublayers are cheap. For an estimate before it is run.
_PASSES_PER_BRANCH = 1.0


def propose(
    backend: Backend,
    measured: Measured,
    config: Config,
    budget_ms: float,
    policy: str = KNAPSPEC,
    report: Callable[[], None] = lambda: None,
) -> list[Plan]:
    """The shortlist for the judge, from both generators (KNAPSPEC) or from the paper's (PAPER).

    The cache holds the text's prompt and is left so. The search over hidden states runs on the
    text's window where the model allows it and it fits `budget_ms`; PAPER runs it as published in
    any case, and raises PlanError where the model does not allow it.
    """
    if policy == PAPER:
        return hidden_state_plans(
            backend, measured, config, hidden_state.Settings.paper(config), report
        )
    costs, context = measured.costs, measured.context_tokens
    plans = candidate_plans(costs, measured.fidelity, context, backend.sublayers, config)
    settings = _affordable(measured, config, budget_ms)
    if settings is not None and backend.branch_refusal is None:
        # without room for branches in this context, the knapsack's have to do
        with suppress(PlanError, ContextError):
            plans += hidden_state_plans(backend, measured, config, settings, report)
    return list(dict.fromkeys(plans))


def by_promise(
    measured: Measured,
    plans: Sequence[Plan],
    sublayers: tuple[SubLayer, ...],
    config: Config,
) -> list[Plan]:
    """The plans by the geometric throughput that their single sublayers promise, best first."""
    costs, context = measured.costs, measured.context_tokens
    losses = Losses(measured.fidelity, sublayers, config)
    verify_ms = verification_ms(costs, context, config)

    def rate(plan: Plan) -> float:
        return geometric_rate(costs.draft_ms(plan, context), losses.agreement(plan), verify_ms)

    return sorted(plans, key=rate, reverse=True)


def _affordable(
    measured: Measured, config: Config, budget_ms: float
) -> hidden_state.Settings | None:
    """The longest window of a bounded search that fits; None if not even the shortest does."""
    costs, context = measured.costs, measured.context_tokens
    width = costs.max_width
    if width < 2:
        return None
    # a token of a wide pass
    token_ms = costs.verify_ms(context, width) / width
    for window in (config.dp_measure_window_tokens, config.dp_window_tokens):
        tokens = window * config.dp_max_branches * _PASSES_PER_BRANCH
        if tokens * token_ms <= budget_ms and window < len(measured.text.window):
            return hidden_state.Settings(
                window, config.dp_min_cosine, config.dp_budget_share, config.dp_max_branches
            )
    return None


def hidden_state_plans(
    backend: Backend,
    measured: Measured,
    config: Config,
    settings: hidden_state.Settings,
    report: Callable[[], None] = lambda: None,
) -> list[Plan]:
    """Survivors of a search on the text's window: of each part of the savings the best by its own
    agreement and cost. Raises PlanError, ContextError, Interrupted."""
    start, window = backend.n_past, list(measured.text.window)
    n_sublayers = len(backend.sublayers)
    context = measured.context_tokens
    if settings.max_branches is None:
        weights = hidden_state.weights_at(measured.costs, context, n_sublayers, config)
    else:
        units, _ = measured.costs.integer_weights(context, largest_error=config.dp_rounding_error)
        weights = np.asarray(units, dtype=np.int64)
    if measured.costs.blind or not weights.any():
        return []
    try:
        inputs = window[:-1]
        for i in range(0, len(inputs), backend.max_verify_tokens):
            backend.evaluate(inputs[i : i + backend.max_verify_tokens], None)
        text = [*measured.text.prompt, *window]
        reference = hidden_state.latest_reference(text, backend.n_past, settings.window_tokens)
        found = hidden_state.search(backend, reference, weights, settings, report=report)
    finally:
        rewind(backend, min(start, backend.n_past))
    return select(measured.costs, context, found.survivors, config)


def select(
    costs: Costs,
    context_tokens: int,
    survivors: Sequence[hidden_state.Survivor],
    config: Config,
) -> list[Plan]:
    """As many survivors as the shortlist has places: of equal parts of the range of savings, each
    the one with the best geometric throughput."""
    if not survivors:
        return []
    verify_ms = verification_ms(costs, context_tokens, config)
    deepest = max(s.skipped_units for s in survivors)
    best: dict[int, tuple[float, Plan]] = {}
    for survivor in survivors:
        plan, judgement = survivor.plan, survivor.judgement
        if not plan.skipped:
            continue
        # a short window that agrees everywhere is no proof of 1
        n = len(judgement.agree)
        alpha = (sum(judgement.agree) + 0.5) / (n + 1.0)
        rate = geometric_rate(costs.draft_ms(plan, context_tokens), alpha, verify_ms)
        part = math.ceil(config.plan_shortlist * survivor.skipped_units / max(1, deepest))
        if part not in best or rate > best[part][0]:
            best[part] = (rate, plan)
    return [plan for _, (_, plan) in sorted(best.items())]
