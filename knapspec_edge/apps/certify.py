"""How much of a plan's agreement the cosine of its states guarantees (Lemma 4.1), and how much was
measured: the certificate beside what it is about, on the same positions.

The certificate speaks about the head's weights as the file means them, in real numbers. With
quantised weights llama.cpp rounds the activations in front of the head, so where two logits are
almost equal its pick may differ from theirs: `head_agreement` says how often it does for the full
model, `broken` how often a guaranteed token was not picked. Both are nearly always 1 and 0; for F32
weights only rounding of 32-bit sums is left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..backend import Backend
from ..config import DEFAULTS
from ..decode.rollback import rewind
from ..errors import ModelError, PlanError
from ..latency.fidelity import Text
from ..records import GREEDY, Plan
from ..search.certificate import Head, Requirement, certified, cosines, requirement

# Positions whose logits are in memory at once.
_POSITIONS = 64
# Share of the target's picks that states times head have to give. Below, they are not what this
# architecture picks from.
_LEAST_HEAD_AGREEMENT = 0.9


@dataclass(frozen=True)
class PlanCertificate:
    """One plan: counts of positions."""

    plan: Plan
    positions: int
    agreed: int  # the plan's greedy token was the target's, as llama.cpp computes both
    tight: int  # guaranteed by the cosine alone
    loose: int  # the same by the lemma as published
    broken: int  # guaranteed and yet another token: rounding, see the module
    cosine: float  # median over the positions

    @property
    def agreement(self) -> float:
        return self.agreed / self.positions

    @property
    def tight_share(self) -> float:
        return self.tight / self.positions

    @property
    def loose_share(self) -> float:
        return self.loose / self.positions

    def to_json(self) -> dict[str, Any]:
        return {
            "modes": [str(mode) for mode in self.plan.modes],
            "positions": self.positions,
            "agreement": self.agreement,
            "guaranteed_tight": self.tight_share,
            "guaranteed_loose": self.loose_share,
            "broken": self.broken,
            "median_cosine": self.cosine,
        }


@dataclass(frozen=True)
class Certification:
    """The plans of one model on one text."""

    context_tokens: int  # before the first position
    positions: int
    n_embd: int
    n_vocab: int
    head_agreement: float  # share of the target's picks that states times head give
    # medians over the positions of 1 - the cosine that guarantees the target's token
    room_tight: float
    room_loose: float
    plans: tuple[PlanCertificate, ...]  # in the order asked for

    def to_json(self) -> dict[str, Any]:
        return {
            "context_tokens": self.context_tokens,
            "positions": self.positions,
            "dimension": self.n_embd,
            "vocabulary": self.n_vocab,
            "head_agreement": self.head_agreement,
            "median_room_tight": self.room_tight,
            "median_room_loose": self.room_loose,
            "plans": [plan.to_json() for plan in self.plans],
        }


def certify(
    backend: Backend,
    head: Head,
    plans: Sequence[Plan],
    text: Text,
    *,
    block_tokens: int = DEFAULTS.plan_judge_block_tokens,
    progress: Callable[[float], None] = lambda share: None,
) -> Certification:
    """Certify each plan at every token of the text's window, behind keys of the full model.

    `head` is the model's own (gguf_head.GgufHead). Blocks are about as long as a draft, as in
    search.acceptance.judge. The cache has to be empty and is empty afterwards. Raises PlanError for
    a model that cannot be pruned, ModelError where head and states do not belong together.
    """
    if backend.refusal is not None:
        raise PlanError(f"no plan can be certified: {backend.refusal}")
    if backend.n_past or not text.prompt or not text.window:
        raise ValueError("certifying takes an empty cache, a prompt and a window")
    blocks = range(0, len(text.window), max(1, block_tokens))
    passes = (len(plans) + 1) * len(blocks)
    target: list[NDArray[np.float32]] = []
    target_picks: list[NDArray[np.int32]] = []
    drafts: list[list[NDArray[np.float32]]] = [[] for _ in plans]
    draft_picks: list[list[NDArray[np.int32]]] = [[] for _ in plans]
    done = 0
    try:
        backend.prefill(text.prompt, GREEDY)
        for start in blocks:
            tokens = text.window[start : start + blocks.step]
            before = backend.n_past
            for row, plan in enumerate(plans):
                # about what a draft skips: tokens that a short head lacks have no bound
                states, picks = backend.final_states(tokens, replace(plan, head_rows=0))
                drafts[row].append(states)
                draft_picks[row].append(picks)
                rewind(backend, before)
                done += 1
                progress(0.8 * done / passes)
            # last of all: its keys stay
            states, picks = backend.final_states(tokens, None)
            target.append(states)
            target_picks.append(picks)
            done += 1
    finally:
        rewind(backend, 0)
    states, picks = np.concatenate(target), np.concatenate(target_picks)
    if states.shape[1] != head.n_embd:
        raise ModelError(
            f"the states of this model have {states.shape[1]} numbers, its head takes {head.n_embd}"
        )
    needed = _requirement(states, head)
    head_agreement = float((needed.token == picks).mean())
    if head_agreement < _LEAST_HEAD_AGREEMENT:
        raise ModelError(
            "no certificate for this model: its states times its head give only "
            f"{100 * head_agreement:.0f} % of its picks, so something else lies between them"
        )
    progress(0.95)
    found = []
    for row, plan in enumerate(plans):
        cosine = cosines(states, np.concatenate(drafts[row]), head)
        agreed = np.concatenate(draft_picks[row]) == picks
        tight, loose = certified(cosine, needed.tight), certified(cosine, needed.loose)
        found.append(
            PlanCertificate(
                plan,
                positions=len(picks),
                agreed=int(agreed.sum()),
                tight=int(tight.sum()),
                loose=int(loose.sum()),
                broken=int((tight & ~agreed).sum()),
                cosine=float(np.median(np.nan_to_num(cosine))),
            )
        )
    progress(1.0)
    return Certification(
        context_tokens=len(text.prompt),
        positions=len(picks),
        n_embd=head.n_embd,
        n_vocab=head.n_vocab,
        head_agreement=head_agreement,
        room_tight=float(np.median(1.0 - needed.tight)),
        room_loose=float(np.median(1.0 - needed.loose)),
        plans=tuple(found),
    )


def _requirement(states: NDArray[np.float32], head: Head) -> Requirement:
    """`requirement` in parts that fit into memory."""
    parts = [
        requirement(states[i : i + _POSITIONS], head) for i in range(0, len(states), _POSITIONS)
    ]
    return Requirement(
        *(
            np.concatenate([getattr(part, name) for part in parts])
            for name in ("token", "margin", "loose", "tight")
        )
    )
