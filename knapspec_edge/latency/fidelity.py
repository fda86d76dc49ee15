"""How often the target's pick survives a change of one single sublayer.

Counted on text that the target itself produced, behind keys of the full model, as a draft is. The
counts of several runs add up: each run brings other text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..backend import Backend
from ..decode.rollback import rewind
from ..records import GREEDY, SKIP, Kind, Plan, SubLayer
from .store import MAX_COUNT

# The beginning of a prompt (begin token, chat header) survives shortening, and so does its end.
_KEPT_HEAD_TOKENS = 8


@dataclass(frozen=True)
class ItemCount:
    """Picks that survived a change of one sublayer, at one context length."""

    index: int
    mode: str  # what was done to it, see records.Mode: "skip"
    context_tokens: int
    agreed: int
    total: int


@dataclass(frozen=True)
class ItemAgreement:
    """Share of the target's picks that survive leaving out one sublayer."""

    index: int
    agreement: float
    total: int  # picks it was judged on
    probed: bool  # False: interpolated between probed neighbours of its kind


@dataclass(frozen=True)
class Fidelity:
    """Counts of all runs so far. `batch_*` compare passes of several tokens with single steps."""

    counts: tuple[ItemCount, ...] = ()
    batch_agreed: int = 0
    batch_total: int = 0
    runs: int = 0
    notes: tuple[str, ...] = field(default=())  # of the latest run

    @property
    def contexts(self) -> tuple[int, ...]:
        return tuple(sorted({c.context_tokens for c in self.counts}))

    @property
    def batch_agreement(self) -> float:
        """Share in which a pass of several tokens picks what single steps pick."""
        return self.batch_agreed / self.batch_total if self.batch_total else 1.0

    def plus(self, other: Fidelity) -> Fidelity:
        """Both together; notes are those of `other`."""
        sums: dict[tuple[int, str, int], list[int]] = {}
        for c in (*self.counts, *other.counts):
            both = sums.setdefault((c.context_tokens, c.mode, c.index), [0, 0])
            both[0] += c.agreed
            both[1] += c.total
        counts = tuple(
            ItemCount(index, mode, context, agreed, total)
            for (context, mode, index), (agreed, total) in sorted(sums.items())
        )
        return Fidelity(
            counts,
            self.batch_agreed + other.batch_agreed,
            self.batch_total + other.batch_total,
            self.runs + other.runs,
            other.notes,
        )

    def agreements(
        self, sublayers: Sequence[SubLayer], context_tokens: int | None = None
    ) -> tuple[ItemAgreement, ...]:
        """One per sublayer, for skipping it. `context_tokens` takes the counts of the measured
        context nearest to it (in ratio), None those of all contexts together.

        Sublayers that were never probed are interpolated over the layers, within their kind; an
        unmeasured kind agrees never.
        """
        counts = [c for c in self.counts if c.mode == str(SKIP)]
        if context_tokens is not None and counts:
            near = min(
                {c.context_tokens for c in counts},
                key=lambda c: abs(np.log(max(1, c) / max(1, context_tokens))),
            )
            counts = [c for c in counts if c.context_tokens == near]
        sums: dict[int, list[int]] = {}
        for c in counts:
            both = sums.setdefault(c.index, [0, 0])
            both[0] += c.agreed
            both[1] += c.total
        probed = {i: (agreed / total, total) for i, (agreed, total) in sums.items() if total}
        found = []
        for i, sublayer in enumerate(sublayers):
            if i in probed:
                found.append(ItemAgreement(i, *probed[i], True))
                continue
            known = [j for j in probed if sublayers[j].kind is sublayer.kind]
            if not known:
                found.append(ItemAgreement(i, 0.0, 0, False))
                continue
            known.sort()
            value = float(np.interp(i, known, [probed[j][0] for j in known]))
            found.append(ItemAgreement(i, value, min(probed[j][1] for j in known), False))
        return tuple(found)

    def to_json(self) -> dict[str, Any]:
        return {
            "counts": [[c.index, c.mode, c.context_tokens, c.agreed, c.total] for c in self.counts],
            "batch_agreed": self.batch_agreed,
            "batch_total": self.batch_total,
            "runs": self.runs,
            "notes": list(self.notes),
        }

    @classmethod
    def from_json(cls, data: dict[str, Any], n_sublayers: int) -> Fidelity:
        """The inverse of to_json. Raises one of store.INVALID for anything else."""
        counts = tuple(
            ItemCount(int(i), str(mode), int(context), int(agreed), int(total))
            for i, mode, context, agreed, total in data["counts"]
        )
        for c in counts:
            known = 0 <= c.index < n_sublayers and 0 <= c.context_tokens <= MAX_COUNT
            if not (known and 0 <= c.agreed <= c.total):
                raise ValueError("a count is impossible")
        found = cls(
            counts,
            int(data["batch_agreed"]),
            int(data["batch_total"]),
            int(data["runs"]),
            tuple(str(note) for note in data["notes"]),
        )
        if found.runs < 0 or not 0 <= found.batch_agreed <= found.batch_total:
            raise ValueError("a count is impossible")
        return found


@dataclass(frozen=True)
class Text:
    """Calibration text: a prompt, and what the target went on with."""

    prompt: tuple[int, ...]
    window: tuple[int, ...]  # inputs; the target's greedy token after input i is window[i + 1]


def target_text(
    backend: Backend,
    prompt: Sequence[int],
    n_tokens: int,
    report: Callable[[], None] = lambda: None,
) -> Text:
    """Prefill a prompt, of which the cache may hold the beginning, and let the target go on,
    through an end token if need be. The cache is left at the end of the prompt."""
    window = [backend.prefill(prompt[backend.n_past :], GREEDY).token]
    while len(window) < n_tokens:
        window.append(backend.decode(window[-1], GREEDY).token)
        report()
    rewind(backend, len(prompt))
    return Text(tuple(prompt), tuple(window))


def shorten(tokens: Sequence[int], length: int) -> list[int]:
    """Cut the middle out of a prompt, so that its header and its end remain."""
    if length >= len(tokens):
        return list(tokens)
    head = min(_KEPT_HEAD_TOKENS, length // 2)
    return [*tokens[:head], *tokens[len(tokens) - (length - head) :]]


def measure_fidelity(
    backend: Backend,
    text: Text,
    indices: Sequence[int],
    block_tokens: int,
    *,
    report: Callable[[], None] = lambda: None,
    enough: Callable[[], bool] = lambda: False,
) -> Fidelity:
    """Agreement of each single skip with the full model on the text's window.

    The cache holds the text's prompt and is left so. `enough` is asked after each block and may end
    the count; what was counted until then is kept.
    """
    n = len(backend.sublayers)
    plans: list[Plan | None] = [None, *(Plan.skipping(n, [i]) for i in indices)]
    window, context = text.window, backend.n_past
    first, picks, _ = evaluate_plans(
        backend, window, plans, block_tokens, report=report, enough=enough
    )
    target = picks[0, first:]
    agreed = (picks[1:, first:] == target).sum(axis=1)
    own = np.array(window[first + 1 :], dtype=np.int32)  # i32 [window - first - 1]
    notes = []
    if first:
        notes.append(f"items judged on {len(window) - first} tokens: out of time")
    if len(indices) < n:
        notes.append(f"{len(indices)} of {n} sublayers probed, the others interpolated")
    count = partial(ItemCount, mode=str(SKIP), context_tokens=context, total=len(target))
    return Fidelity(
        tuple(count(i, agreed=int(a)) for i, a in zip(indices, agreed, strict=True)),
        batch_agreed=int((target[:-1] == own).sum()),
        batch_total=int(own.size),
        runs=1,
        notes=tuple(notes),
    )


def probed_indices(sublayers: Sequence[SubLayer], stride: int, offset: int = 0) -> list[int]:
    """Every k-th sublayer of each kind from the offset on, and always its first and last two: they
    differ most. With offsets 0, 1, 2 ... all get their turn."""
    by_kind: dict[Kind, list[int]] = {}
    for i, sublayer in enumerate(sublayers):
        by_kind.setdefault(sublayer.kind, []).append(i)
    chosen: set[int] = set()
    for indices in by_kind.values():
        chosen.update(indices[offset % stride :: stride])
        if stride > 1:
            chosen.update([*indices[:2], *indices[-2:]])
    return sorted(chosen)


def evaluate_plans(
    backend: Backend,
    window: Sequence[int],
    plans: Sequence[Plan | None],
    block_tokens: int,
    *,
    report: Callable[[], None] = lambda: None,
    enough: Callable[[], bool] = lambda: False,
) -> tuple[int, NDArray[np.int32], NDArray[np.float32]]:
    """Greedy picks i32 [plans, window] and their probabilities f32 [plans, window].

    Every block of a plan is computed behind keys of the full model, as a draft is: beside the
    text, as many blocks in a pass as fit, or, where that is impossible, by cutting the cache back.
    The window is walked from its end, so that then nothing has to be restored in between. The cache
    is left where it was. `enough` is asked in between and may end it: only columns from the first
    returned value on are computed.
    """
    start = backend.n_past
    beside = backend.max_beside_tokens
    most = max(1, min(block_tokens, beside or backend.max_verify_tokens))
    blocks = -(-len(window) // most)
    block = -(-len(window) // blocks)  # of about equal length, so that any one of them says much
    picks = np.zeros((len(plans), len(window)), dtype=np.int32)
    probabilities = np.zeros((len(plans), len(window)), dtype=np.float32)
    starts = list(range(0, len(window), block))
    # blocks of a pass
    several = max(1, beside // block)
    try:
        # Only a prompt slice has no bound on its tokens; the last block need not be there.
        ahead = list(window[: starts[-1]])
        for i in range(0, len(ahead), backend.max_verify_tokens):
            backend.evaluate(ahead[i : i + backend.max_verify_tokens], None)
        while starts:
            group = starts[-several:] if beside else starts[-1:]
            del starts[-len(group) :]
            inputs = [list(window[i : i + block]) for i in group]
            for row, plan in enumerate(plans):
                if beside:
                    places = [(start + i, tokens) for i, tokens in zip(group, inputs, strict=True)]
                    found = backend.evaluate_beside(places, plan)
                else:
                    rewind(backend, start + group[0])
                    found = [backend.evaluate(inputs[0], plan)]
                for i, (tokens, sure) in zip(group, found, strict=True):
                    picks[row, i : i + len(tokens)] = tokens
                    probabilities[row, i : i + len(tokens)] = sure
                report()
            if enough():
                break
    finally:
        rewind(backend, min(start, backend.n_past))
    return group[0], picks, probabilities
