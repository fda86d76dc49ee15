"""Our lookup alone, see search.lookup_first: proposals where they pay, plain steps elsewhere."""

from __future__ import annotations

from ..decode.policy import Policy
from ..errors import PlanError
from ..search.lookup_first import LookupFirst, PlainSteps
from .masked import check_cut
from .setting import Setting


def create(setting: Setting) -> Policy:
    """Raises PlanError for a model whose cache cannot be cut back, or without a measurement of what
    verification costs."""
    check_cut("lookup-by-value", setting)
    if setting.costs is None or setting.drift is None:
        raise PlanError("--policy lookup-by-value needs to know what verification costs")
    plain = PlainSteps(setting.costs, setting.drift, setting.config)
    return LookupFirst(plain, config=setting.config, clock=setting.clock)
