"""Plain decoding: one token per pass of the full model. What everything is compared with."""

from __future__ import annotations

from ..decode.policy import FixedPolicy, Policy
from .setting import Setting


def create(setting: Setting) -> Policy:
    return FixedPolicy(None)
