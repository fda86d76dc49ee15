"""CLaSp (arXiv 2505.24196): whole layers by dynamic programming on the cosine of one token.

g[i, j] is the hidden state at the latest verified token after layer i, when j layers were left out:
of g[i-1, j] through layer i and g[i-1, j-1] passed on, the one closer by cosine to the target's own
state there. The way back from the last layer with a fixed number of layers left out is the draft.
All j of a layer run in one call. The publication reads the target's states from the verification
pass; here they are computed again, as branch 0, beside the text. It searches after verification,
how often is not known to us; here every 64 rounds, as others do who compare with it. The first
layer always runs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..backend import Branches
from ..decode.policy import Policy
from ..errors import PlanError
from ..records import Plan, RoundTimes, Sampling
from ..search.hidden_state import Reference, mean_cosine
from .masked import StateMasked, check_branches, layers
from .setting import Setting


def create(setting: Setting) -> Policy:
    """Raises PlanError where hidden states cannot be computed beside the text."""
    check_branches("clasp", setting)
    if len(layers(setting.backend.sublayers)) < 2:
        raise PlanError("--policy clasp cannot be honoured: this model has one layer only")
    return Clasp(setting)


def skipped_layers(
    branches: Branches, layers: Sequence[Sequence[int]], n_skipped: int
) -> list[int]:
    """The `n_skipped` layers (of len(layers) - 1 at most) that the way back leaves out.

    `layers` are the indices of the sublayers of each.
    """
    states = branches.embed(layers[0][-1])[np.newaxis]  # f32 [j, tokens, hidden]
    skips: list[list[bool]] = [[False]]  # per layer and j: whether it was passed on
    for indices in layers[1:]:
        executed = states
        for i in indices:
            executed = branches.apply(i, executed)
        target = executed[0]  # j = 0 is the target
        passed = states[: min(len(states), n_skipped)]
        ran, left_out = mean_cosine(executed, target), mean_cosine(passed, target)
        chosen, row = [target], [False]
        for j in range(1, len(passed) + 1):
            skip = j >= len(executed) or bool(left_out[j - 1] > ran[j])
            chosen.append(passed[j - 1] if skip else executed[j])
            row.append(skip)
        states = np.stack(chosen)
        skips.append(row)
    found, j = [], n_skipped
    for layer in range(len(layers) - 1, 0, -1):
        if skips[layer][j]:
            found.append(layer)
            j -= 1
    return found[::-1]


class Clasp(StateMasked):
    """One per session; each answer begins with a search."""

    def __init__(self, setting: Setting) -> None:
        config = setting.config
        super().__init__(setting.backend, config.clasp_max_draft, config.draft_min_probability)
        self._interval = config.clasp_interval_rounds
        self._layers = layers(setting.backend.sublayers)
        n = len(self._layers)
        self.n_skipped = max(1, min(n - 1, round(config.clasp_skip_share * n)))
        self._rounds = 0

    def begin(self, sampling: Sampling, prompt: Sequence[int]) -> None:
        super().begin(sampling, prompt)
        self._rounds = 0

    def wanted(self, position: int) -> int:
        return 1 if self._rounds % self._interval == 0 else 0

    def search(self, reference: Reference) -> None:
        with self.backend.branches(
            reference.start, reference.inputs, self.n_skipped + 1
        ) as branches:
            left_out = skipped_layers(branches, self._layers, self.n_skipped)
        skipped = [i for layer in left_out for i in self._layers[layer]]
        self.plan = Plan.skipping(len(self.backend.sublayers), skipped)

    def observe(self, times: RoundTimes) -> None:
        self._rounds += 1
