"""Draft & Verify, also Self-SD (arXiv 2309.08168): a static mask of sublayers, found offline.

Each sublayer has a real number in 0..1 and is left out above 0.5. Bayesian optimisation maximises
the measured tokens per second of self-speculative decoding on a few calibration prompts, 32 new
tokens each. Drafts have 8 tokens at most and end below a threshold that adapts itself (controller).
The publication takes about 1,000 evaluations, which is hours, on prompts of the task; here two
pieces of the calibration text and `draft_verify_seconds`, after which the best mask so far is
kept on disk. Sampling is shared noise in place of rejection sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..decode.policy import Policy
from ..decode.session import Session
from ..errors import ContextError, PlanError
from ..latency import kept
from ..latency.store import INVALID
from ..records import Plan, RoundTimes
from .bayesian import MaskOptimizer
from .controller import ThresholdController
from .masked import Masked, check_sublayers
from .setting import Setting

# Grows when what is kept means something else than before.
_KEPT = 1


@dataclass(frozen=True)
class Found:
    """The best mask of a search."""

    skipped: tuple[int, ...]
    per_second: float  # tokens, on the calibration prompts
    evaluations: int
    seconds: float  # of the search


def create(setting: Setting) -> Policy:
    """Takes the mask that is kept, or searches for one in the cache, which is empty before and
    after. Raises PlanError where sublayers cannot be left out, without the optimiser or a text;
    ContextError for a context too small to search in; Interrupted."""
    check_sublayers("draft-verify", setting)
    n, config = len(setting.backend.sublayers), setting.config
    key = {
        **kept.latency_key(setting.backend, setting.model_key),
        "draft_verify": _KEPT,
        "evaluations": config.draft_verify_evaluations,
        "seconds": config.draft_verify_seconds,
    }
    found = _kept(setting, key, n)
    if found is None:
        found = search(setting)
        content = {"skipped": list(found.skipped), "per_second": found.per_second,
                   "evaluations": found.evaluations, "seconds": found.seconds}  # fmt: skip
        setting.store.save(key, content)
    return StaticMask(setting, Plan.skipping(n, list(found.skipped)))


def _kept(setting: Setting, key: dict[str, Any], n_sublayers: int) -> Found | None:
    content = setting.store.load(key)
    if content is None:
        return None
    try:
        skipped = tuple(int(i) for i in content["skipped"])
        Plan.skipping(n_sublayers, list(skipped))
        return Found(
            skipped,
            float(content["per_second"]),
            int(content["evaluations"]),
            float(content["seconds"]),
        )
    except INVALID:
        setting.store.ignore(key)
        return None


class StaticMask(Masked):
    """One mask; the stop threshold adapts."""

    def __init__(self, setting: Setting, plan: Plan) -> None:
        self._controller = ThresholdController(setting.config)
        limit = setting.config.draft_verify_max_draft
        super().__init__(limit, self._controller.threshold, plan)

    def observe(self, times: RoundTimes) -> None:
        self.threshold = self._controller.observe(times, self.max_tokens)


def search(setting: Setting) -> Found:
    """Optimise the mask on the calibration text until evaluations or time are used up."""
    config, backend, clock = setting.config, setting.backend, setting.clock
    prompts = _prompts(setting)
    n = len(backend.sublayers)
    optimizer = MaskOptimizer("draft-verify", n, config.bayes_kappa, setting.seed)
    session = Session(backend, clock=clock)
    began = clock()

    def per_second(skipped: Sequence[int]) -> float:
        plan = Plan.skipping(n, list(skipped))
        tokens = total_ms = 0.0
        for prompt in prompts:
            generation = session.generate(
                prompt,
                policy=StaticMask(setting, plan),
                max_tokens=config.draft_verify_new_tokens,
                is_end=lambda token: False,
            )
            tokens += sum(1 for _ in generation) - 1  # the first comes with the prompt
            total_ms += generation.stats.predicted_ms
        return 1000.0 * tokens / total_ms if total_ms > 0.0 else 0.0

    def late() -> float:
        return (clock() - began) / config.draft_verify_seconds

    try:
        best, n_evaluations = optimise(
            optimizer, per_second, config.draft_verify_evaluations, late, setting.progress
        )
    finally:
        session.reset()
    skipped, rate = best
    return Found(skipped, rate, n_evaluations, clock() - began)


def optimise(
    optimizer: MaskOptimizer,
    score: Callable[[Sequence[int]], float],
    most: int,
    spent: Callable[[], float],
    progress: Callable[[float], None] | None = None,
) -> tuple[tuple[tuple[int, ...], float], int]:
    """The best (mask, score) of up to `most` masks, and how many were tried: one at least, then
    until `spent()`, the share of the time that is gone, is 1."""
    best: tuple[tuple[int, ...], float] | None = None
    n = 0
    while best is None or (n < most and spent() < 1.0):
        point = optimizer.suggest()
        skipped = tuple(i for i, x in enumerate(point) if x > 0.5)
        value = score(skipped)
        optimizer.register(point, value)
        n += 1
        if best is None or value > best[1]:
            best = (skipped, value)
        if progress is not None:
            progress(min(1.0, max(n / most, spent())))
    return best, n


def _prompts(setting: Setting) -> list[list[int]]:
    """Two pieces of the calibration text, of different places."""
    config, text = setting.config, list(setting.calibration)
    if len(text) < 2:
        raise PlanError("--policy draft-verify needs a text to search on")
    room = setting.backend.n_ctx - config.draft_verify_new_tokens
    if room < 1:
        raise ContextError(
            f"--policy draft-verify searches with {config.draft_verify_new_tokens} new tokens; "
            f"the context has {setting.backend.n_ctx}; raise --ctx"
        )
    length = min(config.draft_verify_prompt_tokens, room, len(text))
    return [text[:length], text[-length:]]
