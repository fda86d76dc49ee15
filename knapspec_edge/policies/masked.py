"""What policies have in common that draft with a part of the target's sublayers."""

from __future__ import annotations

from collections.abc import Sequence

from ..backend import Backend
from ..errors import ContextError, NativeError, PlanError
from ..records import Draft, Plan, RoundTimes, Sampling, SubLayer
from ..search.hidden_state import Reference, latest_reference
from .setting import Setting


class Masked:
    """Drafts under `plan`, which may change between rounds (None: plain steps), up to `max_tokens`
    and until a token is less probable than `threshold`, which is still verified.

    Implements decode.policy.Policy.
    """

    stopped: str | None = None

    def __init__(self, max_tokens: int, threshold: float = 0.0, plan: Plan | None = None) -> None:
        self.plan = plan
        self.max_tokens = max_tokens
        self.threshold = threshold
        self.prompt: Sequence[int] = ()

    def begin(self, sampling: Sampling, prompt: Sequence[int]) -> None:
        self.prompt = prompt

    def spare(self, emitted: Sequence[int], position: int) -> None:
        pass

    def draft(self, context_tokens: int) -> Draft | None:
        return None if self.plan is None else Draft(self.plan, self.max_tokens, self.threshold)

    def go_on(self, confidences: Sequence[float]) -> bool:
        return not confidences or confidences[-1] >= self.threshold

    def keep(self, confidences: Sequence[float]) -> int:
        return len(confidences)

    def observe(self, times: RoundTimes) -> None:
        pass


class StateMasked(Masked):
    """Chooses its plan by the target's hidden states at the latest tokens.

    Where they cannot be had (no cells for branches, a sliding window that moved on), the plan stays
    as it is for the rest of the answer.
    """

    def __init__(self, backend: Backend, max_tokens: int, threshold: float = 0.0) -> None:
        super().__init__(max_tokens, threshold)
        self.backend = backend
        self.n_searches = 0
        self._can_search = True

    def begin(self, sampling: Sampling, prompt: Sequence[int]) -> None:
        super().begin(sampling, prompt)
        self._can_search = True

    def spare(self, emitted: Sequence[int], position: int) -> None:
        n_tokens = self.wanted(position) if self._can_search else 0
        if not n_tokens:
            return
        text = [*self.prompt, *emitted]
        try:
            self.search(latest_reference(text, position, n_tokens))
        except (ContextError, NativeError):
            self._can_search = False
            return
        self.n_searches += 1

    def wanted(self, position: int) -> int:
        """How many of the latest tokens to look at now, the cache ending at `position`; 0: none."""
        raise NotImplementedError

    def search(self, reference: Reference) -> None:
        """Choose the plan. Raises ContextError, NativeError, Interrupted."""
        raise NotImplementedError


def check_branches(name: str, setting: Setting) -> None:
    """Raises PlanError where hidden states cannot be computed beside the text."""
    check_sublayers(name, setting)
    if setting.backend.branch_refusal is not None:
        raise PlanError(f"--policy {name} cannot be honoured: {setting.backend.branch_refusal}")


def check_sublayers(name: str, setting: Setting) -> None:
    """Raises PlanError for a model that cannot speculate: its sublayers are not recognised, or its
    cache cannot be cut back to what was accepted."""
    if setting.backend.refusal is not None:
        raise PlanError(f"--policy {name} cannot be honoured: {setting.backend.refusal}")


def check_cut(name: str, setting: Setting) -> None:
    """Raises PlanError for a model whose cache cannot be cut back to what was accepted."""
    if setting.backend.cut_refusal is not None:
        raise PlanError(f"--policy {name} cannot be honoured: {setting.backend.cut_refusal}")


def most_valued(items: Sequence[int], values: Sequence[float], n: int) -> list[int]:
    """The n items of the highest values; the earlier of equals."""
    ranked = sorted(zip(items, values, strict=True), key=lambda pair: (-pair[1], pair[0]))
    return sorted(item for item, _ in ranked[:n])


def layers(sublayers: Sequence[SubLayer]) -> list[tuple[int, ...]]:
    """Indices of the sublayers of each layer, in execution order."""
    found: dict[int, list[int]] = {}
    for sublayer in sublayers:
        found.setdefault(sublayer.layer, []).append(sublayer.index)
    return [tuple(indices) for indices in found.values()]


def exit_plan(sublayers: Sequence[SubLayer], n_layers: int) -> Plan:
    """Only the first `n_layers` layers, then the final norm and the head."""
    behind = [i for indices in layers(sublayers)[n_layers:] for i in indices]
    return Plan.skipping(len(sublayers), behind)


def exit_at(name: str, setting: Setting, n_layers: int) -> Plan:
    """exit_plan after at least one layer. Raises PlanError where none is left to leave out."""
    check_sublayers(name, setting)
    sublayers = setting.backend.sublayers
    n = max(1, n_layers)
    total = len(layers(sublayers))
    if n >= total:
        raise PlanError(f"--policy {name} exits after layer {n}, and this model has {total}")
    return exit_plan(sublayers, n)
