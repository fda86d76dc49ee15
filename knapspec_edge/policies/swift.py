"""SWIFT (arXiv 2410.06916): masks proposed while decoding, scored on the answer's own tokens.

A fixed share of the sublayers between the first and the last layer is left out, at first every
second layer. After the first tokens of an answer, each round tries one candidate: a random subset,
now and then one that Bayesian optimisation proposes. Its score is the share of those first tokens
that it picks, too, in one pass over them; the best mask so far drafts. The search ends where the
score is good, or after many tries without a better one. What was found holds for later answers.
The publication verifies a tree of likely tokens; here a draft is a chain, as in all policies.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from ..decode.policy import Policy
from ..errors import ContextError, NativeError, PlanError
from ..records import GREEDY, Plan, Sampling
from ..search.acceptance import judge_beside
from ..search.hidden_state import movable_indices
from .bayesian import MaskOptimizer
from .masked import Masked, check_sublayers, layers, most_valued
from .setting import Setting


def create(setting: Setting) -> Policy:
    """Raises PlanError where sublayers cannot be left out or masks not be scored beside the text,
    and without the optimiser."""
    check_sublayers("swift", setting)
    if setting.backend.max_beside_tokens < 1:
        raise PlanError("--policy swift cannot be honoured: there are no cells beside the text")
    if len(layers(setting.backend.sublayers)) < 3:
        raise PlanError(
            "--policy swift cannot be honoured: it takes a model of three layers or more"
        )
    return Swift(setting)


def every_second_layer(layers: Sequence[Sequence[int]]) -> list[int]:
    """The sublayers of the second, fourth, ... layer, without the last."""
    return [i for indices in layers[1:-1:2] for i in indices]


class Swift(Masked):
    """One per session."""

    def __init__(self, setting: Setting) -> None:
        config = setting.config
        super().__init__(config.swift_max_draft, config.swift_min_probability)
        self._backend = setting.backend
        self._config = config
        sublayers = setting.backend.sublayers
        self._items = sorted(movable_indices(sublayers))
        self._n_skipped = max(1, round(config.swift_skip_share * len(self._items)))
        self._dice = random.Random(setting.seed)
        self._optimizer = MaskOptimizer("swift", len(self._items), config.bayes_kappa, setting.seed)
        self.best = Plan.skipping(len(sublayers), every_second_layer(layers(sublayers)))
        self.plan = self.best
        self.score = 0.0  # of the best
        self.n_tried = 0
        self._n_idle = 0  # tries since the plan last changed
        self._sampling = GREEDY
        self._can_score = True
        self._scored = False  # whether the plan was, on the present answer

    def begin(self, sampling: Sampling, prompt: Sequence[int]) -> None:
        super().begin(sampling, prompt)
        self._sampling = sampling
        self._can_score = True
        self._scored = self.n_tried > 0

    @property
    def searching(self) -> bool:
        config = self._config
        return (
            self.score <= config.swift_good_score
            and self._n_idle < config.swift_patience
            and self.n_tried < config.swift_candidates
        )

    def spare(self, emitted: Sequence[int], position: int) -> None:
        n = min(self._config.swift_window_tokens, self._backend.max_beside_tokens)
        if not (self._can_score and self.searching) or len(emitted) <= n:
            return
        # what the first mask is worth has to be known before another one can be better
        plan = self._candidate() if self._scored else self.best
        try:
            judged = judge_beside(
                self._backend, len(self.prompt), emitted[: n + 1], plan, n, self._sampling
            )
        except (ContextError, NativeError):
            # no cells, a window that moved on, or logits that are no numbers: not in this answer
            self._can_score = False
            return
        self._learn(plan, judged.agreement)

    def _candidate(self) -> Plan:
        if (self.n_tried + 1) % self._config.swift_bayes_interval == 0:
            skipped = most_valued(self._items, self._optimizer.suggest(), self._n_skipped)
        else:
            skipped = self._dice.sample(self._items, self._n_skipped)
        return Plan.skipping(len(self._backend.sublayers), skipped)

    def _learn(self, plan: Plan, score: float) -> None:
        skipped = set(plan.skipped)
        self._optimizer.register([float(i in skipped) for i in self._items], score)
        first, self._scored = not self._scored, True
        self.n_tried += 1
        self._n_idle += 1
        if first or score > self.score:
            self.plan = self.best = plan
            self.score, self._n_idle = score, 0
