"""LayerSkip (arXiv 2404.16710): early exit after a fixed number of layers.

The draft is the first layers, then the final norm and the head; a fixed number of tokens, no stop.
The publication trains the weights for it (layer dropout, a loss at every exit) and lets
verification resume behind the exit with the keys and states of the draft. Here the weights are what
they are, so that few tokens are accepted, and verification runs all layers: llama.cpp cannot begin
a pass in the middle of the network.
"""

from __future__ import annotations

from ..decode.policy import FixedPolicy, Policy
from ..records import Draft
from .masked import check_sublayers, exit_at, layers
from .setting import Setting


def create(setting: Setting) -> Policy:
    """Raises PlanError where sublayers cannot be left out."""
    check_sublayers("layerskip", setting)
    config = setting.config
    n_layers = round(config.layerskip_exit_share * len(layers(setting.backend.sublayers)))
    plan = exit_at("layerskip", setting, n_layers)
    return FixedPolicy(Draft(plan, config.layerskip_max_draft, 0.0))
