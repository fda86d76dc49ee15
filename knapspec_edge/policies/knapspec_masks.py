"""Our planner without lookups: plans of its own model are all it drafts with."""

from __future__ import annotations

from ..decode.policy import Policy
from ..errors import PlanError
from ..search.online import OnlinePlanner
from .setting import Setting


def create(setting: Setting) -> Policy:
    """Raises PlanError without a measurement."""
    return planner("knapspec-masks", setting)


def planner(name: str, setting: Setting) -> OnlinePlanner:
    """Raises PlanError without a measurement, which says the policy's name."""
    if setting.book is None or setting.drift is None:
        raise PlanError(f"--policy {name} needs a measurement of this model, and has none")
    return OnlinePlanner(
        setting.backend,
        setting.book,
        setting.drift,
        forced=setting.forced,
        config=setting.config,
        clock=setting.clock,
    )
