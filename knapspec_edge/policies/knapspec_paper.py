"""The published method, end to end, for comparison: `--policy knapspec-paper`.

Drafts with the full network at first. In every `dp_paper_interval_rounds` rounds the tokens of the
first five that follow are the reference window of a search over hidden states; of its survivors and
the lengths up to `dp_paper_max_draft` the pair with the highest TPT is taken,

    TPT(S, γ) = [(1 - α^(γ+1)) / (1 - α)] / (γ · t_draft(S) + t_target),

with α the agreement on the window and t_target one plain step. So the head of a draft and what it
costs to verify several tokens are left out, as published, and it never goes off. Its costs count as
decode time.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..backend import Backend
from ..config import DEFAULTS, Config
from ..decode.policy import FixedPolicy, Policy
from ..errors import ContextError, NativeError, PlanError
from ..latency.costs import Costs
from ..records import GREEDY, Draft, Plan, RoundTimes, Sampling
from ..search import hidden_state
from ..search.throughput import expected_tokens_geometric, tokens_per_ms
from .masked import check_branches
from .setting import Setting


def create(setting: Setting) -> Policy:
    """Raises PlanError for a model without branches, and without costs."""
    check_branches("knapspec-paper", setting)
    if setting.costs is None:
        raise PlanError("--policy knapspec-paper needs the measured costs of sublayers")
    return PaperPolicy(setting.backend, setting.costs, setting.config)


class PaperPolicy:
    """Implements decode.policy.Policy. One per session; the mask is dropped after each answer."""

    stopped = None

    def __init__(self, backend: Backend, costs: Costs, config: Config = DEFAULTS) -> None:
        self._backend = backend
        self._costs = costs
        self._config = config
        self._settings = hidden_state.Settings.paper(config)
        self.n_searches = 0
        self.begin(GREEDY, ())

    def begin(self, sampling: Sampling, prompt: Sequence[int]) -> None:
        full = Plan.full(len(self._backend.sublayers))
        self._use(Draft(full, self._config.dp_paper_max_draft, self._config.draft_min_probability))
        self._round = 0
        self._window_tokens = 0  # tokens of the rounds that are collected
        self._can_search = True

    def _use(self, draft: Draft) -> None:
        self._draft = draft
        self._fixed = FixedPolicy(draft)

    def spare(self, emitted: Sequence[int], position: int) -> None:
        config = self._config
        last = 1 + config.dp_paper_rounds
        if self._round % config.dp_paper_interval_rounds != last or not self._can_search:
            return
        n = min(self._window_tokens, len(emitted) - 1, self._settings.window_tokens)
        self._window_tokens = 0
        if n < 1:
            return
        reference = hidden_state.Reference(
            position - n, tuple(emitted[-n - 1 : -1]), tuple(emitted[-n:])
        )
        context = max(1, position)
        n_sublayers = len(self._backend.sublayers)
        weights = hidden_state.weights_at(self._costs, context, n_sublayers, config)
        try:
            found = hidden_state.search(self._backend, reference, weights, self._settings)
        except (ContextError, NativeError):
            # no cells for branches, or a branch whose logits are no numbers: not in this answer
            self._can_search = False
            return
        self.n_searches += 1
        self._round += 1  # one search per interval
        chosen = best_pair(self._costs, context, found.survivors, config)
        if chosen is not None:
            self._use(chosen)

    def draft(self, context_tokens: int) -> Draft | None:
        return self._fixed.draft(context_tokens)

    def go_on(self, confidences: Sequence[float]) -> bool:
        return self._fixed.go_on(confidences)

    def keep(self, confidences: Sequence[float]) -> int:
        return len(confidences)

    def observe(self, times: RoundTimes) -> None:
        self._round += 1
        place = self._round % self._config.dp_paper_interval_rounds
        if 2 <= place <= 1 + self._config.dp_paper_rounds:
            self._window_tokens += times.tokens


def best_pair(
    costs: Costs,
    context_tokens: int,
    survivors: Sequence[hidden_state.Survivor],
    config: Config = DEFAULTS,
) -> Draft | None:
    """The survivor and γ with the highest TPT as published; None without survivors."""
    step_ms = costs.step_ms(context_tokens)
    best: tuple[float, Draft] | None = None
    for survivor in survivors:
        draft_ms = costs.draft_ms(survivor.plan, context_tokens)
        alpha = survivor.judgement.agreement
        for gamma in range(1, config.dp_paper_max_draft + 1):
            tokens = expected_tokens_geometric(alpha, gamma)
            tpt = tokens_per_ms(tokens, gamma, draft_ms, step_ms)
            if best is None or tpt > best[0]:
                best = (tpt, Draft(survivor.plan, gamma, config.draft_min_probability))
    return None if best is None else best[1]
