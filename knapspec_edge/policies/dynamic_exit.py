"""DEL (arXiv 2504.05598): exit layer and draft length by shadow tokens.

At verified positions the final norm and the head are applied to the states after every layer: what
the draft would have picked there, had it exited there. With α_ℓ the share of these shadow tokens
that are the target's, older ones fading by `del_decay` per token, the exit ℓ and length γ are those
of the most tokens per layer,

    [(1 - α_ℓ^(γ+1)) / (1 - α_ℓ)] / (γ ℓ + L),

γ = 0 (no draft) included. A draft ends below the midpoint of the mean confidences of right and of
wrong shadow tokens at its exit. The publication takes weights that were trained to exit early
(LayerSkip's), reads the states from the verification pass, each round, and lets verification resume
behind the exit, which does not change the formula. Here the states are computed again beside the
text, whenever some new tokens have come together.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..decode.policy import Policy
from ..records import Sampling
from ..search.hidden_state import Reference
from ..search.throughput import expected_tokens_geometric
from .masked import StateMasked, check_branches, exit_plan, layers
from .setting import Setting


def create(setting: Setting) -> Policy:
    """Raises PlanError where hidden states cannot be computed beside the text."""
    check_branches("del", setting)
    return DynamicExit(setting)


class ShadowTokens:
    """Faded counts of right and wrong shadow tokens per exit, and of how sure they were.

    Exit ℓ = 1..L-1 (layers that are run) is row ℓ - 1 of everything here.
    """

    def __init__(self, n_exits: int, decay: float) -> None:
        self._decay = decay
        # f64 [exits, 2]: counts and summed confidences of wrong (column 0) and right (1) ones
        self.counts = np.zeros((n_exits, 2))
        self.confidences = np.zeros((n_exits, 2))

    def add(self, right: NDArray[np.bool_], confidence: NDArray[np.float32]) -> None:
        """Shadow tokens in the order of the text: bool and f32 [exits, tokens]."""
        for hit, sure in zip(right.T, confidence.T, strict=True):
            one_hot = np.stack([~hit, hit], axis=1)
            self.counts = self._decay * self.counts + one_hot
            self.confidences = self._decay * self.confidences + one_hot * sure[:, np.newaxis]

    def acceptance(self) -> NDArray[np.float64]:
        """α of each exit, f64 [exits]; 0 before the first token."""
        total = self.counts.sum(axis=1)
        alpha: NDArray[np.float64] = self.counts[:, 1] / np.maximum(total, 1e-12)
        return alpha

    def threshold(self, row: int) -> float:
        """Between how sure right and wrong tokens were there; 0 where none was wrong."""
        wrong, right = (float(n) for n in self.counts[row])
        if wrong <= 0.0 or right <= 0.0:
            return 0.0 if right > 0.0 else 1.0
        means = self.confidences[row] / self.counts[row]
        return float(means.mean())


def best_exit(acceptance: Sequence[float], n_layers: int, max_draft: int) -> tuple[int, int] | None:
    """(ℓ, γ) of the most tokens per layer; None where no draft beats a plain step.

    `acceptance[ℓ - 1]` is α of the exit after ℓ layers.
    """
    best, best_rate = None, 1.0 / n_layers
    for exit_, alpha in enumerate(acceptance, start=1):
        for gamma in range(1, max_draft + 1):
            tokens = expected_tokens_geometric(float(alpha), gamma)
            rate = tokens / (gamma * exit_ + n_layers)
            if rate > best_rate:
                best, best_rate = (exit_, gamma), rate
    return best


class DynamicExit(StateMasked):
    """One per session; shadow tokens of earlier answers fade like older ones of the same."""

    def __init__(self, setting: Setting) -> None:
        config = setting.config
        super().__init__(setting.backend, config.del_max_draft)
        self._config = config
        self._layers = layers(setting.backend.sublayers)
        self.shadow = ShadowTokens(len(self._layers) - 1, config.del_decay)
        self._seen = 0  # tokens of this text that have been shadow tokens

    def begin(self, sampling: Sampling, prompt: Sequence[int]) -> None:
        super().begin(sampling, prompt)
        self._seen = max(0, len(prompt) - self._config.del_shadow_tokens)

    def wanted(self, position: int) -> int:
        new = position - self._seen
        # a prompt may be shorter than that
        first = self._seen < len(self.prompt)
        if new < self._config.del_shadow_tokens and not first:
            return 0
        return min(new, self.backend.max_verify_tokens)

    def search(self, reference: Reference) -> None:
        sublayers, n_layers = self.backend.sublayers, len(self._layers)
        with self.backend.branches(reference.start, reference.inputs, n_layers) as branches:
            states = branches.embed(self._layers[0][-1])[np.newaxis]
            after = [states[0]]
            for indices in self._layers[1:]:
                for i in indices:
                    states = branches.apply(i, states)
                after.append(states[0])
            picks, confidences = branches.head(np.stack(after))  # [layers, tokens]
        self._seen = reference.start + len(reference.inputs)
        self.shadow.add(picks[:-1] == picks[-1], confidences[:-1])
        chosen = best_exit(list(self.shadow.acceptance()), n_layers, self._config.del_max_draft)
        if chosen is None:
            self.plan = None
            return
        exit_, self.max_tokens = chosen
        self.plan = exit_plan(sublayers, exit_)
        self.threshold = self.shadow.threshold(exit_ - 1)
