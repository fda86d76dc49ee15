"""Real rounds at one context length: texts, judged plans, timed visits, and what was predicted.

Plans are judged on answers to other prompts than those that are timed. Each timing alternates with
plain decoding and counts in plain steps timed around it; plans take turns.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from knapspec_edge.backend import Backend  # noqa: E402
from knapspec_edge.config import DEFAULTS, Config  # noqa: E402
from knapspec_edge.decode.session import Session  # noqa: E402
from knapspec_edge.errors import UsageError  # noqa: E402
from knapspec_edge.latency.costs import Costs  # noqa: E402
from knapspec_edge.latency.fidelity import Fidelity, Text, measure_fidelity  # noqa: E402
from knapspec_edge.latency.timing import Clock  # noqa: E402
from knapspec_edge.records import Draft, Kind, Plan, Stats, SubLayer  # noqa: E402
from knapspec_edge.search.acceptance import Judgement, judge  # noqa: E402
from knapspec_edge.search.candidates import draft_lengths  # noqa: E402
from knapspec_edge.search.draft_length import FixedRule  # noqa: E402
from knapspec_edge.search.throughput import (  # noqa: E402
    expected_tokens_geometric,
    replay,
    tokens_per_ms,
)
from knapspec_edge.text.calibration import long_calibration_tokens, passages  # noqa: E402

# Passages of the calibration text at the end of a prompt: plans are made on the answer to one,
# judged on some and timed on the others.
FITTED_OFFSET = 1
JUDGED_OFFSETS = (2, 3, 4)
TIMED_OFFSETS = (5, 6, 7, 8, 9, 10)
# The end of a prompt in which prompts of one length differ, so that most of it is computed once.
TAIL_TOKENS = 256
JUDGED_TOKENS = 64  # of each answer
# One visit of a plan: rounds are timed until either is reached, after those that are not counted.
VISIT_ROUNDS, VISIT_TOKENS, WARM_UP_ROUNDS = 10, 40, 2
PLAIN_STEPS = 10
LENGTHS = (1, 2, 3, 4, 5, 6, 8)

Prompts = Callable[[int, int], list[int]]  # (length in tokens, offset of the passage) -> token ids
Show = Callable[[str, float], None]


# ---------------------------------------------------------------------------------------------
# Statistics


def pearson(x: Sequence[float], y: Sequence[float]) -> float:
    """Correlation of two samples; not a number where one of them does not vary."""
    a, b = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    if len(a) < 2 or np.ptp(a) == 0.0 or np.ptp(b) == 0.0:
        return math.nan
    return float(np.corrcoef(a, b)[0, 1])


def ranks(x: Sequence[float]) -> NDArray[np.float64]:
    """Ranks f64 [n] from 1 on; equal values share the mean of their ranks."""
    _, inverse, counts = np.unique(
        np.asarray(x, dtype=np.float64), return_inverse=True, return_counts=True
    )
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2.0)[inverse]


def spearman(x: Sequence[float], y: Sequence[float]) -> float:
    """Rank correlation; not a number where one of them does not vary."""
    return pearson(ranks(x), ranks(y))  # type: ignore[arg-type]


def quartiles(x: Sequence[float]) -> tuple[float, float, float]:
    low, median, high = np.quantile(np.asarray(x, dtype=np.float64), (0.25, 0.5, 0.75))
    return float(low), float(median), float(high)


def bound(alpha: float, draft_cost: float, verify_cost: Mapping[int, float]) -> tuple[float, int]:
    """S(α, c, s) = max over γ of E(α, γ) / (γ c + v(γ)), in plain steps, and its γ.

    `draft_cost` c is a draft step, `verify_cost` v(γ) a pass over γ + 1 tokens. (1, 0) where no γ
    reaches plain decoding.
    """
    best = (1.0, 0)
    for gamma, cost in verify_cost.items():
        speed = expected_tokens_geometric(alpha, gamma) / (gamma * draft_cost + cost)
        best = max(best, (speed, gamma), key=lambda pair: pair[0])
    return best


# ---------------------------------------------------------------------------------------------
# Texts


def prompts_of(vocabulary: Any, template: Any, repeated: set[int]) -> Prompts:
    """Prompts of exactly so many tokens in the model's chat format, each for another passage.

    Lengths at which the calibration text has to repeat itself are noted in `repeated`.
    """

    @lru_cache(maxsize=1)
    def whole_text() -> int:
        tokenize = vocabulary.tokenize
        return sum(len(tokenize(text, parse_special=False)) for text in passages())

    @lru_cache(maxsize=8)
    def of_length(n_tokens: int, offset: int) -> tuple[int, ...]:
        return tuple(long_calibration_tokens(vocabulary, template, n_tokens, offset))

    def prompt(n_tokens: int, offset: int) -> list[int]:
        if n_tokens > whole_text():
            repeated.add(n_tokens)
        if n_tokens <= 2 * TAIL_TOKENS:
            return list(of_length(n_tokens, offset))
        # what is in front of the tail is the same for all, so the cache keeps it
        tail = of_length(2 * TAIL_TOKENS, offset)[-TAIL_TOKENS:]
        return [*of_length(n_tokens, 0)[: n_tokens - TAIL_TOKENS], *tail]

    return prompt


def never(_token: int) -> bool:
    """No token ends an answer: a visit goes on until it has been timed."""
    return False


# ---------------------------------------------------------------------------------------------
# Measuring at one context


@dataclass(frozen=True)
class Visit:
    """Rounds of one plan on one answer; of plain steps where nothing was drafted."""

    tokens: int
    ms: float
    rounds: int
    drafted: int
    accepted: int

    @property
    def ms_per_token(self) -> float:
        return self.ms / self.tokens


def visit(
    session: Session,
    prompt: Sequence[int],
    draft: Draft | None,
    most_rounds: int = VISIT_ROUNDS,
    most_tokens: int = VISIT_TOKENS,
    warm_up: int = WARM_UP_ROUNDS,
) -> Visit:
    """Time whole rounds of the real loop at the beginning of a greedy answer.

    The first `warm_up` rounds, in which graphs are built, are not counted.
    """

    def counters(stats: Stats) -> Visit:
        # all verified tokens count, also those that nobody has read yet
        tokens = stats.draft_n_accepted + stats.rounds
        accepted = stats.draft_n_accepted
        return Visit(tokens, stats.predicted_ms, stats.rounds, stats.draft_n, accepted)

    begun: Visit | None = None
    with session.generate(prompt, draft=draft, is_end=never) as generation:
        for _ in generation:
            now = counters(generation.stats)
            if begun is None:
                if now.rounds >= warm_up:
                    begun = now
            elif now.rounds > begun.rounds and (
                now.rounds - begun.rounds >= most_rounds or now.tokens - begun.tokens >= most_tokens
            ):
                break
    if begun is None or now.rounds == begun.rounds:
        raise UsageError("the context has no room for a single round: raise --ctx")
    return Visit(
        now.tokens - begun.tokens,
        now.ms - begun.ms,
        now.rounds - begun.rounds,
        now.drafted - begun.drafted,
        now.accepted - begun.accepted,
    )


@dataclass
class Timed:
    """Visits of one draft, each with the time of a plain token around it."""

    draft: Draft
    visits: list[Visit] = field(default_factory=list)
    plain_ms: list[float] = field(default_factory=list)  # per token

    @property
    def ratio(self) -> float:
        """Speed relative to plain decoding, all visits together."""
        steps = sum(v.ms / ms for v, ms in zip(self.visits, self.plain_ms, strict=True))
        return sum(v.tokens for v in self.visits) / steps

    @property
    def ratios(self) -> list[float]:
        """Of each visit."""
        return [ms / v.ms_per_token for v, ms in zip(self.visits, self.plain_ms, strict=True)]

    @property
    def acceptance(self) -> float:
        """Share of the drafted tokens that were accepted."""
        drafted = sum(v.drafted for v in self.visits)
        return sum(v.accepted for v in self.visits) / drafted if drafted else math.nan

    @property
    def rounds(self) -> int:
        return sum(v.rounds for v in self.visits)


class Place:
    """A context length: prompts, what the target answers to them, and what plans do there."""

    def __init__(
        self,
        backend: Backend,
        session: Session,
        prompts: Prompts,
        costs: Costs,
        context_tokens: int,
        *,
        config: Config = DEFAULTS,
        clock: Clock = time.perf_counter,
    ) -> None:
        self.backend = backend
        self.session = session
        self.costs = costs
        self.context_tokens = context_tokens
        self.config = config
        self._prompts = prompts
        self.clock = clock

    @property
    def sublayers(self) -> tuple[SubLayer, ...]:
        return self.backend.sublayers

    @property
    def step_ms(self) -> float:
        return self.costs.step_ms(self._where)

    @property
    def _where(self) -> int:
        """In the middle of what is timed."""
        return self.context_tokens + VISIT_TOKENS // 2

    def prompt(self, offset: int) -> list[int]:
        return self._prompts(self.context_tokens, offset)

    def text(self, offset: int, n_tokens: int = JUDGED_TOKENS + 1) -> Text:
        """The target's greedy answer by plain steps; the cache is left at the end of the prompt."""
        prompt = self.prompt(offset)
        tokens: list[int] = []
        with self.session.generate(prompt, is_end=never, max_tokens=n_tokens) as answer:
            tokens.extend(event.token for event in answer)
        list(self.session.generate(prompt, is_end=never, max_tokens=1))
        return Text(tuple(prompt), tuple(tokens))

    def fidelity(self, seconds: float) -> Fidelity:
        """Agreement of single skips on an answer that is neither judged nor timed, on less of it
        where it takes too long."""
        text = self.text(FITTED_OFFSET)
        deadline = self.clock() + seconds
        return measure_fidelity(
            self.backend,
            text,
            range(len(self.sublayers)),
            self.config.measure_block_tokens,
            enough=lambda: self.clock() > deadline,
        )

    def judge(self, plans: Sequence[Plan], seconds: float, show: Show) -> list[Judgement]:
        """Picks of each plan on the judged answers: all of them, or as many as there is time for
        (one at least)."""
        started = self.clock()
        found: list[Judgement] = []
        for number, offset in enumerate(JUDGED_OFFSETS):
            text = self.text(offset)
            done = 0

            def one_more(number: int = number) -> None:
                nonlocal done
                done += 1
                show("judging", (number + min(1.0, done / len(plans))) / len(JUDGED_OFFSETS))

            block = self.config.plan_judge_block_tokens
            here = judge(self.backend, text.window, plans, block, one_more)
            found = [a.plus(b, 10**9) for a, b in zip(found, here, strict=True)] if found else here
            spent = self.clock() - started
            if spent * (number + 2) / (number + 1) > seconds:
                break
        return found

    def time(self, drafts: Sequence[Draft], seconds: float, show: Show) -> list[Timed]:
        """Time the drafts in turn, plain steps before and after each, on one answer after the
        other: as many as there is time for, one at least."""
        started = self.clock()
        found = [Timed(draft) for draft in drafts]
        number = 0
        while True:
            prompt = self.prompt(TIMED_OFFSETS[number % len(TIMED_OFFSETS)])
            # Every other turn backwards, so that nobody always goes first.
            turn = found[:: 1 if number % 2 == 0 else -1]
            before = self._plain(prompt)
            for done, timed in enumerate(turn):
                timed.visits.append(visit(self.session, prompt, timed.draft))
                after = self._plain(prompt)
                timed.plain_ms.append(math.sqrt(before * after))
                before = after
                share = (self.clock() - started) / max(seconds, 1e-9)
                show("timing rounds", max(share, (done + 1) / len(turn) if number == 0 else 0.0))
            number += 1
            spent = self.clock() - started
            if spent * (number + 1) / number > seconds:
                return found

    def _plain(self, prompt: Sequence[int]) -> float:
        """Time per token of plain decoding, ms."""
        return visit(self.session, prompt, None, PLAIN_STEPS, PLAIN_STEPS).ms_per_token

    # -- predictions

    def draft_ms(self, plan: Plan) -> float:
        return self.costs.draft_ms(plan, self._where)

    def saving(self, plan: Plan) -> float:
        """Share of a plain step that the plan saves, 0..1."""
        return 1.0 - self.draft_ms(plan) / self.step_ms

    def verify_ms(self, width: int) -> float:
        return self.costs.verify_ms(self._where, width)

    def predicted_ms(self, judgement: Judgement, gamma: int, min_probability: float) -> float:
        """Time per token with the measured acceptance at each place and the measured costs; not a
        number where the judged text is shorter than a draft."""
        found = replay(
            judgement.windows,
            FixedRule(gamma, min_probability),
            self.draft_ms(judgement.plan),
            self.verify_ms,
            longest=max(LENGTHS),
        )
        return math.nan if found is None else found.ms_per_token

    def best_draft(self, judgement: Judgement) -> tuple[Draft, float]:
        """The length with the best prediction, and the speed predicted for it relative to plain."""
        threshold = self.config.draft_min_probability
        times = {
            gamma: self.predicted_ms(judgement, gamma, threshold)
            for gamma in draft_lengths(self.costs, self.config)
        }
        gamma = min(times, key=lambda g: times[g])
        return Draft(judgement.plan, gamma, threshold), self.step_ms / times[gamma]

    def geometric(self, plan: Plan, alpha: float, gamma: int) -> float:
        """The TPT of the geometric model with the measured costs, tokens per ms."""
        tokens = expected_tokens_geometric(alpha, gamma)
        return tokens_per_ms(tokens, gamma, self.draft_ms(plan), self.verify_ms(gamma + 1))

    def paper(self, plan: Plan, alpha: float, gamma: int) -> float:
        """The TPT of the paper: sublayers are all that costs, verification is one step."""
        costs = [self.costs.saving_ms(s.index, self._where) for s in self.sublayers]
        skipped = set(plan.skipped)
        kept_ms = sum(ms for i, ms in enumerate(costs) if i not in skipped)
        tokens = expected_tokens_geometric(alpha, gamma)
        return tokens_per_ms(tokens, gamma, kept_ms, max(sum(costs), 1e-9))

    def shares(self, plan: Plan) -> dict[Kind, float]:
        """Share of the sublayers of each kind that a plan leaves out."""
        return shares(plan, self.sublayers)


def shares(plan: Plan, sublayers: Sequence[SubLayer]) -> dict[Kind, float]:
    """Share of the sublayers of each kind that a plan leaves out."""
    skipped = set(plan.skipped)
    found = {}
    for kind in dict.fromkeys(s.kind for s in sublayers):
        own = [s.index for s in sublayers if s.kind is kind]
        found[kind] = sum(i in skipped for i in own) / len(own)
    return found
