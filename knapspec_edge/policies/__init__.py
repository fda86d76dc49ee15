"""Every way of drafting as a policy of one runtime: ours, those it is compared with, and controls.

One contract (decode.policy.Policy): what verification showed goes in, a plan or tokens and the
limits of a draft come out. Whatever a policy does between rounds counts as decode time. Importing
this package loads none of them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from ..arguments import choice
from .catalogue import DESCRIPTIONS, Description

if TYPE_CHECKING:
    from ..decode.policy import Policy
    from .setting import Setting

NAMES: tuple[str, ...] = tuple(DESCRIPTIONS)
# The planner: the only one that decides by itself whether to speculate.
DEFAULT = "knapspec"
# Lookups alone, as `--spec lookup` has them.
LOOKUP = "lookup-by-value"

__all__ = ["DEFAULT", "LOOKUP", "NAMES", "Description", "create", "describe", "needs_of"]


def describe(name: str) -> Description:
    """What a policy is and needs. Raises UsageError for a name that is none."""
    choice("--policy", name, NAMES)
    return DESCRIPTIONS[name]


def needs_of(name: str) -> tuple[str, ...]:
    """Description.needs; of what is no policy, such as a plan file, nothing."""
    return DESCRIPTIONS[name].needs if name in DESCRIPTIONS else ()


def create(name: str, setting: Setting) -> Policy:
    """The policy of this name. What it has to find out once, it may find out now, in an empty cache
    (see Description.search), which is left empty.

    What it holds open is given back by its `close`, where it has one. Raises UsageError for a name
    that is none, PlanError where model, backend or setting do not allow it, ModelError for a draft
    model that does not fit, Interrupted.
    """
    describe(name)
    module = import_module(f".{DESCRIPTIONS[name].module}", __name__)
    policy: Policy = module.create(setting)
    return policy
