"""Our planner, see search.online: decides from what was measured and goes on measuring.

`forced`: it never turns to plain decoding, and drafts with the best plan it knows.
"""

from __future__ import annotations

from ..decode.policy import Policy
from ..errors import PlanError
from ..search.online import OnlinePlanner
from .setting import Setting


def create(setting: Setting) -> Policy:
    """Raises PlanError without a measurement."""
    if setting.book is None or setting.drift is None:
        raise PlanError("--policy knapspec needs a measurement of this model, and has none")
    return OnlinePlanner(
        setting.backend,
        setting.book,
        setting.drift,
        forced=setting.forced,
        config=setting.config,
        clock=setting.clock,
    )
