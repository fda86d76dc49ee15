"""Our planner, see search.online: decides from what was measured and goes on measuring.

What repeats the text is looked up first, see search.lookup_first; its plans draft elsewhere.
`forced`: it never turns to plain decoding, and drafts with the best plan it knows.
"""

from __future__ import annotations

from ..decode.policy import Policy
from ..search.lookup_first import LookupFirst
from . import knapspec_masks
from .setting import Setting


def create(setting: Setting) -> Policy:
    """Raises PlanError without a measurement."""
    planner = knapspec_masks.planner("knapspec", setting)
    if not setting.lookup:
        return planner
    return LookupFirst(planner, forced=setting.forced, config=setting.config, clock=setting.clock)
