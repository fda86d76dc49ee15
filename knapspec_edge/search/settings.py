"""The best settings of a context, chosen among those that were measured.

Flash attention and the type of keys and values are fixed when a context is created, so they are
chosen for the length it is expected to reach; threads come with them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from ..config import CTX_TOKENS_MAX, DEFAULTS, THREADS_MAX, Config
from ..latency.costs import Costs
from ..latency.fidelity import Fidelity, Losses
from ..records import SubLayer
from .candidates import candidate_plans, geometric_rate, verification_ms

# Grows when a stored record means something else than before.
_SETTINGS = 2


@dataclass(frozen=True)
class Candidate:
    """One measured setting: time per token by context length."""

    flash_attn: str  # "on" or "off"
    kv_type: str
    threads: int
    threads_batch: int
    contexts: tuple[int, ...]  # tokens, ascending
    plain_ms: tuple[float, ...]  # per token, plain decoding
    speculation_ms: tuple[float, ...]  # per token, with the best draft found for that context

    def ms(self, context_tokens: int, purpose: str) -> float:
        """Predicted time per token at a context; `purpose` is "plain" or "speculation".

        Whoever speculates may also decode plainly, so the better of the two counts there.
        """
        plain = float(np.interp(context_tokens, self.contexts, self.plain_ms))
        return plain if purpose == "plain" else min(plain, self.speculation_at(context_tokens))

    def speculation_at(self, context_tokens: int) -> float:
        """Predicted time per token with the best draft found, whether it pays or not."""
        return float(np.interp(context_tokens, self.contexts, self.speculation_ms))


def candidate(
    settings: Mapping[str, Any],
    costs: Costs,
    fidelity: Fidelity,
    sublayers: tuple[SubLayer, ...],
    config: Config = DEFAULTS,
) -> Candidate:
    """Predict both ways of decoding at every measured context.

    A draft's agreement is the product of the agreements of what it leaves out, which is good for
    comparing settings and not for deciding whether to speculate.
    """
    contexts = costs.profile.contexts
    plain = tuple(costs.step_ms(c) for c in contexts)
    speculation = tuple(_speculation_ms(costs, fidelity, c, sublayers, config) for c in contexts)
    return Candidate(
        str(settings["flash_attn"]),
        str(settings["kv_type"]),
        int(settings["threads"]),
        int(settings["threads_batch"]),
        contexts,
        plain,
        speculation,
    )


def _speculation_ms(
    costs: Costs,
    fidelity: Fidelity,
    context_tokens: int,
    sublayers: tuple[SubLayer, ...],
    config: Config,
) -> float:
    if costs.max_width < 2 or not fidelity.counts:
        return costs.step_ms(context_tokens)
    losses = Losses(fidelity, sublayers, config)
    verify_ms = verification_ms(costs, context_tokens, config)
    rates = [
        geometric_rate(
            costs.draft_ms(plan, context_tokens),
            losses.agreement(plan),
            verify_ms,
        )
        for plan in candidate_plans(costs, fidelity, context_tokens, sublayers, config)
    ]
    return 1.0 / max(rates) if rates else costs.step_ms(context_tokens)


def normalised(
    candidates: Sequence[Candidate], ratios: Mapping[int, Sequence[float]]
) -> list[Candidate]:
    """Profiles of several settings are measured one after the other, on a machine that drifts; the
    ratios of their plain steps, by context, were measured in turn. All times of a candidate are
    scaled so that its plain steps stand in those ratios to the first candidate's."""
    if not ratios or len(candidates) < 2:
        return list(candidates)
    first = candidates[0]
    contexts = sorted(ratios)
    scaled = [first]
    for i, c in enumerate(candidates[1:], start=1):
        factors = [ratios[n][i] * first.ms(n, "plain") / c.ms(n, "plain") for n in contexts]

        def by(times: tuple[float, ...], of: Candidate = c, f: list[float] = factors) -> Any:
            at = np.interp(of.contexts, contexts, f)
            return tuple(float(ms * factor) for ms, factor in zip(times, at, strict=True))

        scaled.append(replace(c, plain_ms=by(c.plain_ms), speculation_ms=by(c.speculation_ms)))
    return scaled


def choose(
    candidates: Sequence[Candidate],
    context_tokens: int,
    purpose: str,
    *,
    flash_attn: str | None = None,
    kv_type: str | None = None,
    config: Config = DEFAULTS,
) -> Candidate | None:
    """The candidate with the least time per token among those that fit what was asked for.

    The first one stays unless another is better by more than `settings_margin`. None where no
    candidate fits.
    """
    fitting = [
        c for c in candidates if flash_attn in (None, c.flash_attn) and kv_type in (None, c.kv_type)
    ]
    if not fitting:
        return None
    best = min(fitting, key=lambda c: c.ms(context_tokens, purpose))
    first = fitting[0]
    worth = first.ms(context_tokens, purpose) > (1.0 + config.settings_margin) * best.ms(
        context_tokens, purpose
    )
    return best if worth else first


def settings_key(
    model_key: Mapping[str, Any], gpu_layers: int | None, threads: int | None
) -> dict[str, Any]:
    """`threads` as they were asked for: what was measured with a number that somebody wanted once
    is nobody's default."""
    return {
        "best_settings": _SETTINGS,
        **model_key,
        "gpu_layers": gpu_layers,
        "threads": threads,
    }


def to_json(candidates: Sequence[Candidate]) -> dict[str, Any]:
    return {"candidates": [asdict(c) for c in candidates]}


def from_json(data: Mapping[str, Any]) -> tuple[Candidate, ...]:
    """The inverse of to_json. Raises one of store.INVALID for anything else."""
    found = []
    for entry in data["candidates"]:
        c = Candidate(
            str(entry["flash_attn"]),
            str(entry["kv_type"]),
            int(entry["threads"]),
            int(entry["threads_batch"]),
            tuple(int(n) for n in entry["contexts"]),
            tuple(float(ms) for ms in entry["plain_ms"]),
            tuple(float(ms) for ms in entry["speculation_ms"]),
        )
        if not c.contexts or not len(c.contexts) == len(c.plain_ms) == len(c.speculation_ms):
            raise ValueError("times and contexts of a setting do not match")
        if list(c.contexts) != sorted({n for n in c.contexts if 0 <= n <= CTX_TOKENS_MAX}):
            raise ValueError("the contexts of a setting do not ascend")
        if not all(0.0 < ms < math.inf for ms in (*c.plain_ms, *c.speculation_ms)):
            raise ValueError("a time is impossible")
        if c.flash_attn not in ("on", "off"):
            raise ValueError("flash attention is neither on nor off")
        if not (1 <= c.threads <= THREADS_MAX and 1 <= c.threads_batch <= THREADS_MAX):
            raise ValueError("a setting needs threads")
        found.append(c)
    return tuple(found)
