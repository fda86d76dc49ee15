"""Frozen records shared by every layer of the package.

Records hold data only: no native handles, no files, no policy. Times are milliseconds, lengths are
tokens, and both stand in the names.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from enum import Enum


class Kind(str, Enum):
    """What a sublayer is made of; the value is the word used in files and tables."""

    ATTENTION = "attention"
    MLP = "mlp"
    # One residual addition per layer that carries attention and MLP together (parallel residual).
    BLOCK = "block"
    # A state-space or linear-attention mixer: prunable, but its state cannot be rolled back.
    RECURRENT = "recurrent"


class ModeKind(str, Enum):
    """How a sublayer takes part in a draft step."""

    FULL = "full"
    SKIP = "skip"
    # Attention over the first `sink_tokens` and the most recent `window_tokens` only.
    WINDOW = "window"


@dataclass(frozen=True)
class Mode:
    """One choice for one sublayer: the multiple-choice item of the knapsack."""

    kind: ModeKind = ModeKind.FULL
    sink_tokens: int = 0
    window_tokens: int = 0

    def __str__(self) -> str:
        if self.kind is ModeKind.WINDOW:
            return f"window:{self.sink_tokens}+{self.window_tokens}"
        return str(self.kind.value)


FULL = Mode(ModeKind.FULL)
SKIP = Mode(ModeKind.SKIP)

_WINDOW = re.compile(r"window:(\d{1,9})\+(\d{1,9})", re.ASCII)


def parse_mode(text: str) -> Mode:
    """The inverse of str(mode): "full", "skip", "window:SINK+WINDOW". Raises ValueError."""
    if text == FULL.kind.value:
        return FULL
    if text == SKIP.kind.value:
        return SKIP
    match = _WINDOW.fullmatch(text)
    if match is None or int(match[2]) < 1:
        raise ValueError(f"unknown mode {text!r}; it has to be full, skip or window:SINK+WINDOW")
    return Mode(ModeKind.WINDOW, int(match[1]), int(match[2]))


@dataclass(frozen=True)
class SubLayer:
    """One residual addition of the target network, in execution order."""

    index: int  # position in execution order, 0-based
    layer: int  # decoder layer it belongs to, 0-based
    kind: Kind

    def __str__(self) -> str:
        return f"{self.kind.value} {self.layer}"


@dataclass(frozen=True)
class Traits:
    """What a sublayer works on when one token is computed. Sublayers of equal signature do the same
    work, on weights of the same types, in the same place."""

    signature: int
    weight_bytes: int  # weights read for one token; of experts, those that are used
    cell_bytes: int = 0  # keys and values of one cell of the cache
    n_cells: int = 0  # cells of the cache it reads; fewer than the context for a sliding window
    n_experts: int = 0
    n_experts_used: int = 0
    device: str = ""  # buffer type of its weights, such as "CPU" or "CUDA0"
    can_window: bool = False  # its attention can be limited to the first and most recent tokens


@dataclass(frozen=True)
class Plan:
    """One mode per sublayer, in execution order, and how much of the head is multiplied. All-full
    is the target network itself."""

    modes: tuple[Mode, ...]
    # rows of the head; the tokens of all others cannot be picked. 0: all rows
    head_rows: int = 0

    @classmethod
    def full(cls, n_sublayers: int) -> Plan:
        return cls((FULL,) * n_sublayers)

    @classmethod
    def skipping(
        cls,
        n_sublayers: int,
        skipped: frozenset[int] | set[int] | list[int],
        head_rows: int = 0,
    ) -> Plan:
        """The plan that skips the sublayers with these indices and keeps all others."""
        chosen = set(skipped)
        outside = sorted(i for i in chosen if not 0 <= i < n_sublayers)
        if outside:
            raise ValueError(f"sublayer index {outside[0]} is outside 0..{n_sublayers - 1}")
        return cls(tuple(SKIP if i in chosen else FULL for i in range(n_sublayers)), head_rows)

    @property
    def skipped(self) -> tuple[int, ...]:
        return tuple(i for i, m in enumerate(self.modes) if m.kind is ModeKind.SKIP)

    @property
    def windowed(self) -> tuple[int, ...]:
        return tuple(i for i, m in enumerate(self.modes) if m.kind is ModeKind.WINDOW)

    @property
    def is_full(self) -> bool:
        return not self.head_rows and all(m.kind is ModeKind.FULL for m in self.modes)


@dataclass(frozen=True)
class Pick:
    """The token chosen from one row of logits.

    `probability` is the softmax probability of that token at the sampling temperature (at
    temperature 0: of the plain softmax), in 0..1, among the tokens that the filters left; where a
    grammar rejected the first choice, an estimate of its share of what the grammar allows. `margin`
    is the distance between the best and the second-best score that the choice was made on (logits
    at temperature 0).

    `logprob` is the natural logarithm of the token's probability in the model's own distribution,
    before any setting changes it; `top` are the (token, logprob) of the most probable ones, best
    first. Both only where `Sampling.n_probs` asked, and only for picks of the full model.
    """

    token: int
    probability: float
    margin: float
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Grammar:
    """The form that an answer has to have, in llama.cpp's GBNF."""

    text: str
    root: str = "root"
    # tokens that end an answer besides those that the vocabulary says; allowed where an end is
    ends: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Sampling:
    """How a token is picked from logits. Temperature 0 is argmax.

    In the order of llama.cpp: logit bias, penalties, top-k, typical, top-p, min-p, temperature;
    with `temperature_first`, the temperature comes before the filters. A value that switches its
    filter off is the default. The pick is then drawn by Gumbel-max.

    The random numbers of a position are a hash of (seed, position, token id), so the pick does not
    depend on who asks: draft and target share their noise. Penalties see the last `penalty_last_n`
    tokens of the text before the position, prompt included; the grammar sees the answer's. So a
    pick is a function of logits, text and settings, and no state could be out of step.
    """

    temperature: float = 0.0
    min_p: float = 0.0  # share of the most probable token's probability; 0: off
    seed: int = 0
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off
    typical_p: float = 1.0  # 1: off
    temperature_first: bool = False
    repeat_penalty: float = 1.0  # divides positive logits, multiplies others; 1: off
    presence_penalty: float = 0.0  # subtracted once from the logit of a token in the window
    frequency_penalty: float = 0.0  # subtracted once per occurrence
    penalty_last_n: int = 64  # tokens of the window; 0: no penalties, -1: the whole text
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token, added to its logit); -inf forbids
    grammar: Grammar | None = None
    # how many of the most probable tokens to report with each pick; None: no log-probabilities
    n_probs: int | None = None

    @property
    def law(self) -> Sampling:
        """What decides about probabilities: all but the seed and what is reported."""
        return replace(self, seed=0, n_probs=None)


GREEDY = Sampling()


@dataclass(frozen=True)
class Draft:
    """How to draft: under which plan, how many tokens at most, and when to stop early."""

    plan: Plan
    max_tokens: int  # γ
    min_probability: float  # a token less probable than this is still verified, then drafting stops


@dataclass(frozen=True)
class TokenEvent:
    """One emitted token. Always the target's own pick."""

    token: int
    position: int  # position in the context, 0-based
    probability: float
    drafted: bool  # it had been proposed by the draft and accepted
    round: int  # 0: the pick that came with the prompt; then one per pass of the target, from 1
    margin: float | None = None  # of the target's pick, see Pick
    logprob: float | None = None  # see Pick; None unless asked for
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class RoundTimes:
    """One round of the decoding loop: its times, and what came of its draft."""

    context_tokens: int  # in the cache before the round
    drafted: int  # 0: a plain step, whose time is verify_ms
    draft_ms: float  # of all drafted tokens together
    verify_ms: float
    verified: int | None = None  # drafted tokens that were verified; None: all
    accepted: int = 0
    confidences: tuple[float, ...] = ()  # of the drafted tokens, as the draft had them
    # of the drafted tokens, from the first on and as far as is known: whether the target picked
    # the same; the first one that was not verified is known where all before it were right
    right: tuple[bool, ...] = ()
    tokens: int = 1  # emitted
    elapsed_ms: float = 0.0  # of the whole round
    # the drafted tokens are the policy's own (decode.policy.Proposer): no plan was run for them
    proposed: bool = False

    @property
    def width(self) -> int:
        """Tokens of the verification pass."""
        return 1 + (self.drafted if self.verified is None else self.verified)


@dataclass
class Stats:
    """Counters of one generation. `draft_n` and `draft_n_accepted` are llama.cpp's names.

    `rounds` counts finished passes of the target after the prompt, `verify_ms` their time, plain or
    not; a round that an interrupt or an error broke off is in the times only. An end token is
    emitted and counted; nothing after it is.

    Identity, at every moment and whatever ends a generation (end token, limit, end of the context,
    stop string, reader, interrupt, error):
    ``completion_tokens == draft_n_accepted + target_n - cut_n``.
    Every token of the answer was either drafted and accepted, or is the target's own: `target_n` is
    `rounds` + 1, one token per round and the one that came with the prompt (0 before that). `cut_n`
    counts the tokens of these that are not in the answer: behind an end token, after the limit,
    in a stop string, or not read (yet). So, once a token is there,
    ``completion_tokens == draft_n_accepted + rounds + 1 - cut_n``.
    Lengths and places count the same drafted tokens: the sum of k times accepted_lengths[k], and
    the sum of accepted_at, are `draft_n_accepted`; accepted_at[i] is the number of rounds that
    accepted more than i. `proposed_n` and `proposed_n_accepted` are parts of `draft_n` and
    `draft_n_accepted`; the rest was drafted under a plan.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompt, found in the KV cache
    completion_tokens: int = 0
    rounds: int = 0
    draft_n: int = 0
    draft_n_accepted: int = 0
    # of these, tokens that the policy proposed, without running a part of the target for them
    proposed_n: int = 0
    proposed_n_accepted: int = 0
    target_n: int = 0
    cut_n: int = 0
    prompt_ms: float = 0.0
    predicted_ms: float = 0.0
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    plan_ms: float = 0.0
    # accepted_lengths[k]: rounds with a draft in which exactly k drafted tokens were accepted
    accepted_lengths: dict[int, int] = field(default_factory=dict)
    # per drafted place i (0-based): how often all before it were accepted / it was accepted too
    tried_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    # "stop", "length" or "interrupted"; None while running or after the reader closed it early
    finish_reason: str | None = None
    # how the latest round that drafted under a plan did so; None: none did
    latest_draft: Draft | None = None
    # why auto went on plainly in the middle of this answer (decode.guard), or None
    speculation_stopped: str | None = None
    # that passes take longer or shorter than they did when this machine was measured, or None
    drift: str | None = None

    @property
    def predicted_per_second(self) -> float:
        return 1000.0 * self.completion_tokens / self.predicted_ms if self.predicted_ms else 0.0

    @property
    def acceptance(self) -> float | None:
        """Share of drafted tokens that were accepted; None where nothing was drafted."""
        return self.draft_n_accepted / self.draft_n if self.draft_n else None

    @property
    def overhead_ms(self) -> float:
        """Time of the decode phase outside draft and verification calls."""
        return max(0.0, self.predicted_ms - self.draft_ms - self.verify_ms - self.plan_ms)
