"""Lookup first: what followed the end of the text at an earlier place is proposed, where that pays;
elsewhere the draft under a plan decides, or plain decoding.

A match costs nothing, so only verification has to be paid for. How likely a proposal is right is
counted, by the length of the match and whether other places contradict it, at every token of the
text, also where nothing was proposed: the token tells what a proposal would have come to. A second
token's chance is that of a match one token longer, and so on. How many tokens are proposed follows
from these chances and the measured cost of passes, in the price of time that decoding here has
anyway (draft_length). So a text that repeats nothing soon has no proposals; and what real rounds
lose against plain steps all the same ends them for the rest of the answer.
"""

from __future__ import annotations

import statistics
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from ..config import DEFAULTS, Config
from ..decode.loop import Clock
from ..decode.policy import FixedPolicy, Guess, Policy
from ..latency.costs import Costs
from ..latency.drift import DriftTracker
from ..records import Draft, RoundTimes, Sampling
from .draft_length import best_prefix
from .suffix_index import Match, SuffixIndex
from .valuation import verification_curve

# Upper ends of the ranges of match lengths that are counted apart; a last one has no end.
LENGTH_BINS = (2, 3, 4, 6, 9, 15)
# What followed such matches was right in summaries, code, chats and solved problems of the demo
# model, uncontested and contested; short ones rather less, as texts that repeat nothing have those.
_USUALLY_RIGHT = (
    (0.40, 0.52, 0.66, 0.78, 0.85, 0.92, 0.97),
    (0.22, 0.27, 0.40, 0.50, 0.55, 0.65, 0.75),
)
# Costs at a context hold for so many further tokens.
_CONTEXT_STEP = 64


class Record:
    """How often what followed a match was right, by its length and whether it was contested.

    Counts fade, so that the latest `memory_matches` or so of each sort decide; what is known
    beforehand counts as `weight` matches: of another record, or the usual.
    """

    def __init__(self, memory_matches: float, weight: float, before: Record | None = None) -> None:
        self._fade = 1.0 - 1.0 / memory_matches
        self._weight = weight
        self._before = before
        n = len(LENGTH_BINS) + 1
        self._right = ([0.0] * n, [0.0] * n)
        self._tried = ([0.0] * n, [0.0] * n)

    def observe(self, match: Match, right: bool) -> None:
        """A token of the text, and whether it was what followed the match."""
        b = bisect_left(LENGTH_BINS, match.length)
        rights, tries = self._right[match.contested], self._tried[match.contested]
        rights[b] = self._fade * rights[b] + right
        tries[b] = self._fade * tries[b] + 1.0
        if self._before is not None:
            self._before.observe(match, right)

    def chance(self, length: int, contested: bool = False) -> float:
        """That what follows a match of so many tokens is right, in 0..1."""
        return self._chance(bisect_left(LENGTH_BINS, length), contested)

    def _chance(self, b: int, contested: bool) -> float:
        before = self._before
        known = _USUALLY_RIGHT[contested][b] if before is None else before._chance(b, contested)
        right = self._right[contested][b] + self._weight * known
        return right / (self._tried[contested][b] + self._weight)

    def survival(self, match: Match, n_tokens: int) -> list[float]:
        """[j - 1]: the chance that the first j tokens that followed the match are all right."""
        alive, found = 1.0, []
        for j in range(n_tokens):
            alive *= self.chance(match.length + j, match.contested and j == 0)
            found.append(alive)
        return found


class Otherwise(Policy, Protocol):
    """What drafts where nothing is proposed."""

    def outlook(self) -> tuple[float, float] | None:
        """(tokens per ms, tokens per round) to expect of the next round; None for a plain step."""
        ...

    def verification_ms(self, context_tokens: int) -> tuple[float, ...]:
        """[j]: verifying j drafted tokens at this context, j = 0 being a plain step, in ms."""
        ...

    def prepare(self, context_tokens: int) -> None:
        """Do ahead what the first answer need not wait for."""
        ...

    def settle(self) -> None:
        """Write down what was learned."""
        ...


class PlainSteps(FixedPolicy):
    """Plain decoding where nothing is proposed. Implements Otherwise."""

    def __init__(self, costs: Costs, drift: DriftTracker, config: Config = DEFAULTS) -> None:
        super().__init__(None)
        self._costs = costs
        self._drift = drift
        self._config = config

    def outlook(self) -> tuple[float, float] | None:
        return None

    def verification_ms(self, context_tokens: int) -> tuple[float, ...]:
        now = self._drift.correction()
        step_ms = now.step * self._costs.step_ms(context_tokens)
        return verification_curve(self._costs, context_tokens, step_ms, now.verify, self._config)

    def prepare(self, context_tokens: int) -> None:
        pass

    def settle(self) -> None:
        pass

    def observe(self, times: RoundTimes) -> None:
        self._drift.observe(times, None)


class LookupFirst:
    """Implements decode.policy.Policy and Proposer. One per session; `forced`: every round drafts,
    so a proposal has to be better than `otherwise`, and need not beat plain decoding."""

    def __init__(
        self,
        otherwise: Otherwise,
        *,
        forced: bool = False,
        config: Config = DEFAULTS,
        clock: Clock = time.perf_counter,
    ) -> None:
        self.otherwise = otherwise
        self._forced = forced
        self._config = config
        self._clock = clock
        self._index = SuffixIndex(config.lookup_places)
        self._session = Record(config.lookup_session_matches, config.lookup_session_weight)
        self._record = self._session
        self._match: Match | None = None  # of the end of the text
        self._n_prompt = 0
        self._n_emitted = 0  # tokens of the answer in the index
        self._proposed = False  # in this round
        self._verify_ms: tuple[float, ...] = ()
        self._costs_at = -1  # context that they were asked for
        self._pace = _Pace(config.lookup_pace_rounds)
        self._losses = _Losses(config)

    # -- what the engine asks ----------------------------------------------------------------------

    def prepare(self, context_tokens: int) -> None:
        self.otherwise.prepare(context_tokens)

    def settle(self) -> None:
        self.otherwise.settle()

    # -- decode.policy.Policy ----------------------------------------------------------------------

    @property
    def stopped(self) -> str | None:
        reasons = [r for r in (self._losses.stopped, self.otherwise.stopped) if r is not None]
        return "; ".join(reasons) or None

    def begin(self, sampling: Sampling, prompt: Sequence[int]) -> None:
        self.otherwise.begin(sampling, prompt)
        config = self._config
        self._index.follow(prompt)
        self._n_prompt, self._n_emitted = len(prompt), 0
        self._match = self._index.best()
        weight = config.lookup_answer_weight
        self._record = Record(config.lookup_answer_matches, weight, self._session)
        self._proposed = False
        self._costs_at = -1
        self._pace.begin()
        self._losses.begin()

    def spare(self, emitted: Sequence[int], position: int) -> None:
        self.otherwise.spare(emitted, position)

    def propose(self, emitted: Sequence[int], most: int) -> Sequence[Guess]:
        self._proposed = False
        self._read(emitted)
        match = self._match
        if match is None or self._losses.stopped is not None:
            return ()
        context = self._n_prompt + self._n_emitted
        if not 0 <= context - self._costs_at < _CONTEXT_STEP or self._costs_at < 0:
            self._costs_at = context
            self._verify_ms = self.otherwise.verification_ms(max(1, context))
        most = min(most, len(self._verify_ms) - 1)
        survival = self._record.survival(match, most)
        n_tokens = self._length(survival)
        if not n_tokens:
            return ()
        self._proposed = True
        tokens = self._index.continuation(match, n_tokens)
        chances = [self._record.chance(match.length + j) for j in range(n_tokens)]
        return [Guess(token, chance) for token, chance in zip(tokens, chances, strict=True)]

    def draft(self, context_tokens: int) -> Draft | None:
        return self.otherwise.draft(context_tokens)

    def go_on(self, confidences: Sequence[float]) -> bool:
        return self.otherwise.go_on(confidences)

    def keep(self, confidences: Sequence[float]) -> int:
        return len(confidences) if self._proposed else self.otherwise.keep(confidences)

    def observe(self, times: RoundTimes) -> None:
        self.otherwise.observe(times)
        self._pace.observe(times)
        costs = self._verify_ms
        if not times.drafted:
            self._losses.observe_plain(times.elapsed_ms)
        elif times.proposed and times.width <= len(costs):
            self._losses.observe(times, costs[0], costs[times.width - 1])

    # -- inside ------------------------------------------------------------------------------------

    def _read(self, emitted: Sequence[int]) -> None:
        """Learn from the tokens that are new, and find what the text agrees with now."""
        index, record = self._index, self._record
        for token in emitted[self._n_emitted :]:
            match = self._match
            if match is not None:
                record.observe(match, index.text[match.place] == token)
            index.push(token)
            self._match = index.best()
        self._n_emitted = len(emitted)

    def _length(self, survival: Sequence[float]) -> int:
        """How many tokens to propose; 0: what else there is promises more."""
        config, verify_ms = self._config, self._verify_ms
        plain = 1.0 / verify_ms[0]
        other = self.otherwise.outlook()
        base = plain
        if other is not None:
            base = other[0] if self._forced else max(plain, other[0])
        rate = max(base, self._pace.rate(base))
        # tokens of a round beyond what its time is worth
        floor = 1.0 - rate * verify_ms[0] if other is None or not self._forced else float("-inf")
        if other is not None:
            floor = max(floor, other[1] * (1.0 - rate / other[0]))
        prices = [float("inf")] * (len(survival) + 1)
        for n in config.lookup_lengths:
            if n <= len(survival):
                prices[n] = rate * verify_ms[n]
        value, n_tokens = best_prefix(survival, prices, least=1)
        return n_tokens if 1.0 + value > floor + config.lookup_margin_tokens else 0


class _Pace:
    """Tokens per ms of the latest rounds, `memory_rounds` or so; older ones fade."""

    def __init__(self, memory_rounds: float) -> None:
        self._fade = 1.0 - 1.0 / memory_rounds
        self._memory = memory_rounds
        self.begin()

    def begin(self) -> None:
        self._tokens = self._ms = 0.0
        self._rounds = 0.0

    def observe(self, times: RoundTimes) -> None:
        self._tokens = self._fade * self._tokens + times.tokens
        self._ms = self._fade * self._ms + times.elapsed_ms
        self._rounds = self._fade * self._rounds + 1.0

    def rate(self, base: float) -> float:
        """Tokens per ms; as long as few rounds are known, `base` stands for the others."""
        missing = max(0.0, self._memory - self._rounds)
        return (self._tokens + missing) / (self._ms + missing / base)


class _Losses:
    """What proposals have lost against plain steps in this answer; ends them when it is too much.

    An answer may lose `lookup_loss_steps` plain steps; the next one half of that if it did, and so
    on. Gains are banked up to the same.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._allowance = config.lookup_loss_steps
        self._plain_ms: deque[float] = deque(maxlen=config.guard_kept_steps)
        self.stopped: str | None = None
        self._rounds = 0
        self.begin()

    def begin(self) -> None:
        if self.stopped is not None:
            self._allowance /= 2
        elif self._rounds:
            self._allowance = self._config.lookup_loss_steps
        self.stopped = None
        self._lost = 0.0
        self._rounds = 0
        self._tokens = 0
        self._steps = 0.0  # time of the rounds, in plain steps

    def observe_plain(self, elapsed_ms: float) -> None:
        self._plain_ms.append(elapsed_ms)

    def observe(self, times: RoundTimes, step_ms: float, verify_ms: float) -> None:
        """A round with a proposal; `step_ms` and `verify_ms`: a plain step and its pass, as
        predicted."""
        config = self._config
        if len(self._plain_ms) >= config.guard_plain_rounds:
            step_ms = statistics.median(self._plain_ms)
        # a stall of the machine is no property of the proposal
        steps = min(times.elapsed_ms, config.guard_stall * max(step_ms, verify_ms)) / step_ms
        self._rounds += 1
        self._tokens += times.tokens
        self._steps += steps
        lost = self._lost + steps - times.tokens * (1.0 + config.guard_slack)
        self._lost = max(-config.lookup_loss_steps, lost)
        if self._lost > self._allowance:
            self.stopped = (
                f"lookup stopped after {self._rounds} rounds: it ran at "
                f"{self._tokens / self._steps:.2f}x of plain decoding here"
            )
