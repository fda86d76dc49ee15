"""Kangaroo (arXiv 2404.18911), training-free form: a shallow exit and a stop by confidence.

The draft is the first two layers, the final norm and the head, and ends after a token less probable
than 0.6. The publication puts a trained adapter (one attention and two norms) behind the exit, and
verification goes on from the exit's states. Here there is no adapter, so that hardly a token is
accepted, and verification runs all layers.
"""

from __future__ import annotations

from ..decode.policy import FixedPolicy, Policy
from ..records import Draft
from .masked import exit_at
from .setting import Setting


def create(setting: Setting) -> Policy:
    """Raises PlanError where sublayers cannot be left out, or for a model of so few layers."""
    config = setting.config
    plan = exit_at("kangaroo", setting, config.kangaroo_exit_layers)
    return FixedPolicy(Draft(plan, config.kangaroo_max_draft, config.kangaroo_min_probability))
