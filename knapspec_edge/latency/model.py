"""Predicts the time of a pass from a measured profile."""

from __future__ import annotations

import numpy as np

from ..records import ModeKind, Plan, SubLayer
from .measure import Profile


class LatencyModel:
    """Costs at the profile's context, in milliseconds.

    A draft step is the measured full step minus what was measured for each sublayer it leaves out;
    embedding, head and overhead stay in, since no skip removes them.
    """

    def __init__(self, profile: Profile, sublayers: tuple[SubLayer, ...]) -> None:
        self._profile = profile
        self._item_ms = [profile.kinds[s.kind.value].item_ms for s in sublayers]
        self._sizes = np.array(sorted(profile.verify), dtype=np.float64)
        self._times = np.array(
            [profile.verify[b].median_ms for b in sorted(profile.verify)], dtype=np.float64
        )
        # A pass over one token is a step. Steps and passes were measured in different phases:
        # what differs between the two is the machine's drift, so the curve is anchored at the step.
        alone_ms = profile.verify[1].median_ms if 1 in profile.verify else 0.0
        if alone_ms > 0.0 and profile.step.median_ms > 0.0:
            self._times *= profile.step.median_ms / alone_ms

    @property
    def step_ms(self) -> float:
        return self._profile.step.median_ms

    @property
    def max_verify_tokens(self) -> int:
        """The widest pass that was measured; nothing is predicted beyond."""
        return int(self._sizes[-1])

    def saving_ms(self, index: int) -> float:
        """What leaving out this sublayer saves; >= 0."""
        return self._item_ms[index]

    def draft_ms(self, plan: Plan) -> float:
        """One draft step. Never below the part of a step that belongs to no sublayer."""
        saved = sum(self._item_ms[i] for i, m in enumerate(plan.modes) if m.kind is ModeKind.SKIP)
        floor = max(0.0, self.step_ms - sum(self._item_ms))
        return max(floor, self.step_ms - saved)

    def verify_ms(self, tokens: int) -> float:
        """A pass of the full model over this many tokens, between measured sizes linear.

        Never below a step: a measurement in which several tokens cost less than one was disturbed.
        """
        if not 1 <= tokens <= self.max_verify_tokens:
            raise ValueError(f"a pass of {tokens} tokens was not measured")
        return max(self.step_ms, float(np.interp(tokens, self._sizes, self._times)))
