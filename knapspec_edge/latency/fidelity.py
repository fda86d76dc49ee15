"""How often the target's pick survives a change of one single sublayer.

Counted on text that the target itself produced, behind keys of the full model, as a draft is. The
counts of several runs add up: each run brings other text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..backend import Backend, Beside
from ..config import DEFAULTS, Config
from ..decode.rollback import rewind
from ..records import FULL, GREEDY, SKIP, Kind, Mode, ModeKind, Plan, SubLayer, parse_mode
from .store import MAX_COUNT

# The beginning of a prompt (begin token, chat header) survives shortening, and so does its end.
_KEPT_HEAD_TOKENS = 8
# How many counted places the changes of the margins are worth.
_PRIOR_PLACES = 16.0
# Contexts that differ by less than this factor share their counts.
_NEAR = 3.0
# No item is believed to be more harmless than this.
_LEAST_MISS = 1e-6
# Margins of the target's picks that are kept, and that stand for them in sums.
_KEPT_MARGINS = 512
_MARGIN_QUANTILES = 32
_HEAD = "head:"


def head_mode(n_rows: int) -> str:
    """How counts name a short head."""
    return f"{_HEAD}{n_rows}"


@dataclass(frozen=True)
class ItemCount:
    """Picks that survived a change of one sublayer, or of the head, at one context length."""

    index: int  # of the sublayer; the head comes behind the last one
    mode: str  # what was done to it, see records.Mode: "skip", or a window; or head_mode
    context_tokens: int
    agreed: int
    total: int
    # sum of squared changes of the margin of the target's pick, over as many places
    shift_sq: float = 0.0
    shifts: int = 0  # places of that sum; 0 where margins are not known

    def expected(self, margins: Sequence[float]) -> float:
        """The share to expect elsewhere, given margins of the target's picks."""
        prior = None
        if self.shifts and margins:
            prior = agreement_of_shift(margins, math.sqrt(self.shift_sq / self.shifts))
        return expected_agreement(self.agreed, self.total, prior)


@dataclass(frozen=True)
class ItemAgreement:
    """Share of the target's picks that survive a change of one sublayer."""

    index: int
    agreement: float  # as counted
    total: int  # picks it was judged on
    probed: bool  # False: interpolated between probed neighbours of its kind
    expected: float = 0.0  # in (0, 1): the share to expect elsewhere, see expected_agreement

    @property
    def loss(self) -> float:
        """-log of the expected agreement, so that losses of items add up; infinite if unknown."""
        return -math.log(self.expected) if self.expected > 0.0 else math.inf


def expected_agreement(agreed: float, total: float, prior: float | None = None) -> float:
    """Posterior mean of an agreement that was counted.

    A window without a miss is no proof of 1. `prior`: what the changes of the margins say, which
    counts as `_PRIOR_PLACES` places: they tell 0.999 from 0.98 where nothing was missed. None: half
    a miss and half a hit are added.
    """
    if prior is None:
        return (agreed + 0.5) / (total + 1.0)
    return (agreed + _PRIOR_PLACES * prior) / (total + _PRIOR_PLACES)


def agreement_of_shift(margins: Sequence[float], shift: float) -> float:
    """Chance that a pick survives if its margin changes by a normal deviate of standard deviation
    `shift` (in logits): the mean of Φ(margin / shift) over the target's margins."""
    if shift <= 0.0:
        return 1.0 - _LEAST_MISS
    chances = [0.5 + 0.5 * math.erf(m / (shift * math.sqrt(2.0))) for m in margins]
    return min(1.0 - _LEAST_MISS, max(_LEAST_MISS, sum(chances) / len(chances)))


@dataclass(frozen=True)
class Fidelity:
    """Counts of all runs so far. `batch_*` compare passes of several tokens with single steps."""

    counts: tuple[ItemCount, ...] = ()
    batch_agreed: int = 0
    batch_total: int = 0
    runs: int = 0
    notes: tuple[str, ...] = field(default=())  # of the latest run
    margins: tuple[float, ...] = ()  # of the target's picks, in logits; the latest ones

    @property
    def contexts(self) -> tuple[int, ...]:
        return tuple(sorted({c.context_tokens for c in self.counts}))

    @property
    def batch_agreement(self) -> float:
        """Share in which a pass of several tokens picks what single steps pick."""
        return self.batch_agreed / self.batch_total if self.batch_total else 1.0

    def covers(self, index: int, context_tokens: int, mode: Mode = SKIP) -> bool:
        """Whether this mode of a sublayer was counted at a context within a factor of `_NEAR`."""
        return any(
            c.index == index
            and c.mode == str(mode)
            and c.total
            and c.context_tokens <= _NEAR * context_tokens
            and context_tokens <= _NEAR * c.context_tokens
            for c in self.counts
        )

    def plus(self, other: Fidelity) -> Fidelity:
        """Both together; notes are those of `other`."""
        sums: dict[tuple[int, str, int], ItemCount] = {}
        for c in (*self.counts, *other.counts):
            key = (c.context_tokens, c.mode, c.index)
            known = sums.get(key)
            sums[key] = c if known is None else _sum(known, c)
        counts = tuple(count for _, count in sorted(sums.items()))
        return Fidelity(
            counts,
            self.batch_agreed + other.batch_agreed,
            self.batch_total + other.batch_total,
            self.runs + other.runs,
            other.notes,
            (*self.margins, *other.margins)[-_KEPT_MARGINS:],
        )

    def agreements(
        self,
        sublayers: Sequence[SubLayer],
        context_tokens: int | None = None,
        mode: Mode = SKIP,
    ) -> tuple[ItemAgreement, ...]:
        """One per sublayer, for this mode of it. `context_tokens` takes the counts of the measured
        context nearest to it (in ratio), None those of all contexts together.

        Sublayers that were never probed are interpolated over the layers, within their kind; an
        unmeasured kind agrees never.
        """
        counts = [c for c in self.counts if c.mode == str(mode)]
        if context_tokens is not None and counts:
            near = min(
                {c.context_tokens for c in counts},
                key=lambda c: abs(np.log(max(1, c) / max(1, context_tokens))),
            )
            counts = [c for c in counts if c.context_tokens == near]
        sums: dict[int, ItemCount] = {}
        for c in counts:
            sums[c.index] = _sum(sums[c.index], c) if c.index in sums else c
        margins = self._margin_quantiles()
        # (agreement, total, expected)
        probed = {
            i: (
                c.agreed / c.total,
                c.total,
                c.expected(margins),
            )
            for i, c in sums.items()
            if c.total
        }
        found = []
        for i, sublayer in enumerate(sublayers):
            if i in probed:
                agreement, total, expected = probed[i]
                found.append(ItemAgreement(i, agreement, total, True, expected))
                continue
            known = [j for j in probed if sublayers[j].kind is sublayer.kind]
            if not known:
                found.append(ItemAgreement(i, 0.0, 0, False))
                continue
            known.sort()
            agreement, expected = (
                float(np.interp(i, known, [probed[j][k] for j in known])) for k in (0, 2)
            )
            total = min(probed[j][1] for j in known)
            # a guess between neighbours is no measurement: it counts as little as can be
            expected = min(expected, expected_agreement(agreement * total, total))
            found.append(ItemAgreement(i, agreement, total, False, expected))
        return tuple(found)

    def window_agreements(
        self, sublayers: Sequence[SubLayer], mode: Mode, config: Config = DEFAULTS
    ) -> tuple[ItemAgreement, ...]:
        """The same for a window. One that was not counted is believed to lose what the widest
        narrower one does, or without any what config.window_expected_agreement says."""
        own = (c.mode for c in self.counts if c.total and not c.mode.startswith(_HEAD))
        counted = {parse_mode(mode) for mode in own}
        narrower = [
            m
            for m in counted
            if m.kind is ModeKind.WINDOW
            and m.window_tokens <= mode.window_tokens
            and m.sink_tokens <= mode.sink_tokens
        ]
        if not narrower:
            expected = config.window_expected_agreement
            return tuple(
                ItemAgreement(i, expected, 0, False, expected) for i in range(len(sublayers))
            )
        nearest = max(narrower, key=lambda m: (m.window_tokens, m.sink_tokens))
        return self.agreements(sublayers, mode=nearest)

    def covers_head(self, n_rows: int) -> bool:
        """Whether the tokens of a short head were counted."""
        return any(c.mode == head_mode(n_rows) and c.total for c in self.counts)

    def head_agreement(self, n_rows: int) -> tuple[float, int]:
        """Share of the target's tokens that a head of so many rows had, and of how many."""
        counts = [c for c in self.counts if c.mode == head_mode(n_rows)]
        total = sum(c.total for c in counts)
        return (sum(c.agreed for c in counts) / total if total else 0.0), total

    def head_loss(self, n_rows: int) -> float:
        """-log of the share to expect elsewhere; 0 for the whole head. Sizes that were not counted
        are taken for the next smaller one, or lose everything."""
        if not n_rows:
            return 0.0
        known = [c for c in self._head_sizes if c <= n_rows]
        if not known:
            return math.inf
        agreement, total = self.head_agreement(known[-1])
        return -math.log(expected_agreement(agreement * total, total))

    @property
    def _head_sizes(self) -> list[int]:
        sizes = {c.mode.removeprefix(_HEAD) for c in self.counts if c.mode.startswith(_HEAD)}
        return sorted(int(size) for size in sizes)

    def _margin_quantiles(self) -> tuple[float, ...]:
        if len(self.margins) <= _MARGIN_QUANTILES:
            return self.margins
        places = (np.arange(_MARGIN_QUANTILES) + 0.5) / _MARGIN_QUANTILES
        return tuple(float(m) for m in np.quantile(self.margins, places))

    def to_json(self) -> dict[str, Any]:
        return {
            "counts": [
                [c.index, c.mode, c.context_tokens, c.agreed, c.total, c.shift_sq, c.shifts]
                for c in self.counts
            ],
            "margins": [round(m, 3) for m in self.margins],
            "batch_agreed": self.batch_agreed,
            "batch_total": self.batch_total,
            "runs": self.runs,
            "notes": list(self.notes),
        }

    @classmethod
    def from_json(cls, data: dict[str, Any], n_sublayers: int) -> Fidelity:
        """The inverse of to_json. Raises one of store.INVALID for anything else."""
        counts = tuple(
            ItemCount(
                int(i), str(mode), int(context), int(agreed), int(total), float(sq), int(shifts)
            )
            for i, mode, context, agreed, total, sq, shifts in data["counts"]
        )
        for c in counts:
            head = c.mode.startswith(_HEAD)
            if not head:
                parse_mode(c.mode)
            elif not 0 < int(c.mode.removeprefix(_HEAD)) <= MAX_COUNT:
                raise ValueError("a head is impossible")
            known = 0 <= c.index < n_sublayers + head and 0 <= c.context_tokens <= MAX_COUNT
            shifts = 0 <= c.shifts <= c.total and 0.0 <= c.shift_sq < math.inf
            if not (known and shifts and 0 <= c.agreed <= c.total):
                raise ValueError("a count is impossible")
        found = cls(
            counts,
            int(data["batch_agreed"]),
            int(data["batch_total"]),
            int(data["runs"]),
            tuple(str(note) for note in data["notes"]),
            tuple(float(m) for m in data["margins"]),
        )
        if not all(math.isfinite(m) for m in found.margins):
            raise ValueError("a margin is impossible")
        if found.runs < 0 or not 0 <= found.batch_agreed <= found.batch_total:
            raise ValueError("a count is impossible")
        return found


def _sum(a: ItemCount, b: ItemCount) -> ItemCount:
    return replace(
        a,
        agreed=a.agreed + b.agreed,
        total=a.total + b.total,
        shift_sq=a.shift_sq + b.shift_sq,
        shifts=a.shifts + b.shifts,
    )


class Losses:
    """What each mode of each sublayer is expected to cost in agreement: -log of the share of picks
    that survive it, so that those of a plan add up."""

    def __init__(
        self, fidelity: Fidelity, sublayers: Sequence[SubLayer], config: Config = DEFAULTS
    ) -> None:
        self._fidelity = fidelity
        self._sublayers = sublayers
        self._config = config
        self._items: dict[Mode, tuple[ItemAgreement, ...]] = {}

    def items(self, mode: Mode) -> tuple[ItemAgreement, ...]:
        """One per sublayer, for this mode of it."""
        if mode not in self._items:
            self._items[mode] = (
                self._fidelity.agreements(self._sublayers)
                if mode == SKIP
                else self._fidelity.window_agreements(self._sublayers, mode, self._config)
            )
        return self._items[mode]

    def agreement(self, plan: Plan) -> float:
        """What single sublayers and the head let expect of a plan: the product over what it
        changes."""
        changed = [(i, mode) for i, mode in enumerate(plan.modes) if mode != FULL]
        loss = sum(self.items(mode)[i].loss for i, mode in changed)
        return math.exp(-loss - self._fidelity.head_loss(plan.head_rows))


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
    windows: Sequence[tuple[Mode, Sequence[int]]] = (),
    report: Callable[[], None] = lambda: None,
    enough: Callable[[], bool] = lambda: False,
) -> Fidelity:
    """Agreement of each single skip with the full model on the text's window, and of each window
    on all sublayers that are named with it.

    What windows lose is hardly more for all of them than for some, so that a product of single
    ones would say little: they are judged together, and each bears its part of the misses.

    The cache holds the text's prompt and is left so. `enough` is asked after each block and may end
    the count; what was counted until then is kept.
    """
    n = len(backend.sublayers)
    items: list[tuple[Mode, Sequence[int]]] = [*((SKIP, [i]) for i in indices), *windows]
    plans: list[Plan | None] = [None]
    plans += [Plan(tuple(m if k in group else FULL for k in range(n))) for m, group in items]
    window, context = text.window, backend.n_past
    found = evaluate_plans(backend, window, plans, block_tokens, report=report, enough=enough)
    first = found.first
    target = found.tokens[0, first:]
    agreed = (found.tokens[1:, first:] == target).sum(axis=1)
    own = np.array(window[first + 1 :], dtype=np.int32)  # i32 [window - first - 1]
    # Where passes of several tokens pick another one than the text has, margins have no meaning.
    usable = np.isfinite(found.margins).all(axis=0) & (found.margins[0] > 0.0)  # bool [window]
    places = first + np.flatnonzero(usable[first : len(window) - 1])
    margins = found.margins[0, places]
    shifts = ((found.margins[1:, places] - margins) ** 2).sum(axis=1)
    notes = []
    if first:
        notes.append(f"items judged on {len(window) - first} tokens: out of time")
    counts = []
    for (mode, group), a, s in zip(items, agreed, shifts, strict=True):
        of = len(group)
        total = of * len(target)
        count = partial(
            ItemCount,
            mode=str(mode),
            context_tokens=context,
            agreed=total - (len(target) - int(a)),
            total=total,
        )
        if of == 1:
            count = partial(count, shift_sq=float(s), shifts=len(places))
        counts += [count(i) for i in group]
    return Fidelity(
        tuple(counts),
        batch_agreed=int((target[:-1] == own).sum()),
        batch_total=int(own.size),
        runs=1,
        notes=tuple(notes),
        margins=tuple(float(m) for m in margins)[-_KEPT_MARGINS:],
    )


def count_heads(backend: Backend, text: Text, sizes: Sequence[int]) -> Fidelity:
    """How many tokens of the text's window short heads of these sizes had when the text came to
    them: whatever else a draft leaves out, it picks no other. The window was decoded behind the
    text's prompt just before. Computes nothing, unless the list of tokens is still to be made."""
    n, window = len(backend.sublayers), text.window
    start = len(text.prompt)
    counts = []
    for n_rows in sizes:
        plan = Plan.skipping(n, [], n_rows)
        had = int((~backend.lacked(window, start, plan)).sum())
        counts.append(ItemCount(n, head_mode(n_rows), start, had, len(window)))
    return Fidelity(tuple(counts))


def probed_indices(sublayers: Sequence[SubLayer], stride: int, offset: int = 0) -> list[int]:
    """Every k-th sublayer of each kind from the offset on, and always its first and last two: they
    differ most. With offsets 0, 1, 2 ... all get their turn. Indices are the sublayers' own."""
    by_kind: dict[Kind, list[int]] = {}
    for sublayer in sublayers:
        by_kind.setdefault(sublayer.kind, []).append(sublayer.index)
    chosen: set[int] = set()
    for indices in by_kind.values():
        chosen.update(indices[offset % stride :: stride])
        if stride > 1:
            chosen.update([*indices[:2], *indices[-2:]])
    return sorted(chosen)


class Evaluated(NamedTuple):
    """Picks of plans on a window; only columns from `first` on were computed."""

    first: int
    tokens: NDArray[np.int32]  # i32 [plans, window]
    probabilities: NDArray[np.float32]  # f32 [plans, window]
    # f32 [plans, window]: of the window's next token over the best other one, in logits; NaN where
    # the window has no next token or margins are not known
    margins: NDArray[np.float32]


def evaluate_plans(
    backend: Backend,
    window: Sequence[int],
    plans: Sequence[Plan | None],
    block_tokens: int,
    *,
    report: Callable[[], None] = lambda: None,
    enough: Callable[[], bool] = lambda: False,
) -> Evaluated:
    """Greedy picks of each plan on the window, the target's own text.

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
    margins = np.full((len(plans), len(window)), np.nan, dtype=np.float32)
    following = [*window[1:], 0]  # the last one is not looked at
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
                    expected = [following[i : i + block] for i in group]
                    found = backend.evaluate_beside(places, plan, expected=expected)
                else:
                    rewind(backend, start + group[0])
                    tokens, sure = backend.evaluate(inputs[0], plan)
                    unknown = np.full(len(tokens), np.nan, dtype=np.float32)
                    found = [Beside(tokens, sure, unknown)]
                for i, part in zip(group, found, strict=True):
                    end = i + len(part.tokens)
                    picks[row, i:end], probabilities[row, i:end] = part.tokens, part.probabilities
                    margins[row, i:end] = part.margins
                report()
            if enough():
                break
    finally:
        rewind(backend, min(start, backend.n_past))
    margins[:, -1] = np.nan
    return Evaluated(group[0], picks, probabilities, margins)
