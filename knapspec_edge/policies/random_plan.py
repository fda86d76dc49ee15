"""A random plan of equal cost: the control. What beats plain decoding only by drafting less is
found out by it.

Sublayers between the first and the last layer, and what the planner's best plan leaves out besides,
are drawn by chance and left out until they save what that plan saves (a fixed share of a step where
there is none), as nearly as that goes. Length and stop threshold are those of that plan.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from ..decode.policy import FixedPolicy, Policy
from ..errors import PlanError
from ..records import Draft, Plan
from ..search.hidden_state import movable_indices
from .masked import check_sublayers
from .setting import Setting


def create(setting: Setting) -> Policy:
    """Raises PlanError where sublayers cannot be left out, and without their costs."""
    check_sublayers("random", setting)
    costs, config, best = setting.costs, setting.config, setting.best
    if costs is None:
        raise PlanError("--policy random needs the measured costs of sublayers")
    sublayers = setting.backend.sublayers
    context = max(1, min(config.expected_context_tokens, setting.backend.n_ctx))
    savings_ms = [costs.saving_ms(i, context) for i in range(len(sublayers))]
    if best is None:
        target_ms = config.random_saving_share * costs.step_ms(context)
        best = Draft(
            Plan.full(len(sublayers)), config.random_max_draft, config.draft_min_probability
        )
    else:
        target_ms = sum(savings_ms[i] for i in best.plan.skipped)
    movable = sorted(movable_indices(sublayers) | set(best.plan.skipped))
    skipped = drawn(savings_ms, movable, target_ms, setting.seed)
    plan = Plan.skipping(len(sublayers), skipped)
    return FixedPolicy(Draft(plan, best.max_tokens, best.min_probability))


def drawn(
    savings_ms: Sequence[float], movable: Sequence[int], target_ms: float, seed: int
) -> list[int]:
    """Sublayers in random order, each taken if that brings their sum nearer to the target.

    `savings_ms` of all sublayers; those that were not seen to save anything are never taken.
    """
    order = [i for i in movable if savings_ms[i] > 0.0]
    random.Random(seed).shuffle(order)
    skipped: list[int] = []
    saved = 0.0
    for i in order:
        if abs(saved + savings_ms[i] - target_ms) < abs(saved - target_ms):
            skipped.append(i)
            saved += savings_ms[i]
    return sorted(skipped)
