"""ASD, "Draft on the Fly" (arXiv 2410.01028): attention sublayers that change the stream least.

At the beginning of an answer, the cosine between the hidden states entering and leaving each
attention sublayer is measured on the latest tokens; the draft leaves out those of the highest
cosine, between the first and the last layer. The length adapts by Draft & Verify's controller.
The publication leaves out all above a threshold, and more by two structural rules that are not
known to us; here the threshold is the one that leaves out `asd_skip_share` of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ..decode.policy import Policy
from ..errors import PlanError
from ..records import Kind, Plan, RoundTimes, Sampling
from ..search.hidden_state import Reference, mean_cosine, movable_indices
from .controller import ThresholdController
from .masked import StateMasked, check_branches, layers, most_valued
from .setting import Setting


def create(setting: Setting) -> Policy:
    """Raises PlanError where hidden states cannot be computed beside the text, or for a model
    without attention sublayers of their own."""
    check_branches("asd", setting)
    policy = AttentionSimilarity(setting)
    if not policy.candidates:
        raise PlanError(
            "--policy asd cannot be honoured: this model has no attention sublayers of their own "
            "between its first and its last layer"
        )
    return policy


def most_similar(cosines: Mapping[int, float], share: float) -> list[int]:
    """The sublayers of the highest cosine, as many as this share of all; the earlier of equals."""
    return most_valued(list(cosines), list(cosines.values()), round(share * len(cosines)))


class AttentionSimilarity(StateMasked):
    """One per session; the mask is that of the present answer."""

    def __init__(self, setting: Setting) -> None:
        config = setting.config
        self._controller = ThresholdController(config)
        super().__init__(setting.backend, config.draft_verify_max_draft, self._controller.threshold)
        self._config = config
        sublayers = setting.backend.sublayers
        self._movable = movable_indices(sublayers)
        self.candidates = tuple(
            s.index for s in sublayers if s.kind is Kind.ATTENTION and s.index in self._movable
        )

    def begin(self, sampling: Sampling, prompt: Sequence[int]) -> None:
        super().begin(sampling, prompt)
        self.plan = None

    def wanted(self, position: int) -> int:
        most = min(self._config.asd_window_tokens, self.backend.max_verify_tokens)
        return most if self.plan is None else 0

    def search(self, reference: Reference) -> None:
        sublayers = self.backend.sublayers
        cosines: dict[int, float] = {}
        first = layers(sublayers)[0][-1]
        with self.backend.branches(reference.start, reference.inputs, 1) as branches:
            states = branches.embed(first)[np.newaxis]  # f32 [1, tokens, hidden]
            for i in range(first + 1, self.candidates[-1] + 1):
                before, states = states, branches.apply(i, states)
                if i in self.candidates:
                    cosines[i] = float(mean_cosine(before, states[0])[0])
        skipped = most_similar(cosines, self._config.asd_skip_share)
        self.plan = Plan.skipping(len(sublayers), skipped)

    def observe(self, times: RoundTimes) -> None:
        self.threshold = self._controller.observe(times, self.max_tokens)
