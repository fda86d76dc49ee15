"""Obvious twins of what the package does cleverly. No cache, no limits, no speed."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from fakes import ToyModel

from knapspec_edge.records import Draft, Sampling


def plain(
    model: ToyModel, prompt: Sequence[int], limit: int, sampling: Sampling
) -> tuple[list[int], str]:
    """Emitted tokens (an end token included) and the finish reason."""
    text = list(prompt)
    while True:
        token = model.pick(text, sampling, None, len(prompt)).token
        text.append(token)
        if token in model.end_tokens:
            return text[len(prompt) :], "stop"
        if len(text) - len(prompt) == limit:
            return text[len(prompt) :], "length"


@dataclass
class Rounds:
    """What a speculative generation should count."""

    tokens: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)  # per round
    accepted: list[int] = field(default_factory=list)
    finish: str = ""


def speculative(
    model: ToyModel,
    prompt: Sequence[int],
    limit: int,
    sampling: Sampling,
    draft: Draft,
    max_verify: int,
) -> Rounds:
    """The textbook round, one whole text at a time."""
    result = Rounds()
    start = len(prompt)

    def emit(token: int) -> bool:
        result.tokens.append(token)
        if token in model.end_tokens:
            result.finish = "stop"
        elif len(result.tokens) == limit:
            result.finish = "length"
        return bool(result.finish)

    if emit(model.pick(prompt, sampling, None, start).token):
        return result
    while True:
        text = [*prompt, *result.tokens]
        most = min(draft.max_tokens, limit - len(result.tokens) - 1, max_verify - 1)
        guesses: list[int] = []
        while len(guesses) < most:
            pick = model.pick(text + guesses, sampling, draft.plan, start)
            guesses.append(pick.token)
            if pick.probability < draft.min_probability or pick.token in model.end_tokens:
                break
        right = 0
        for i, guess in enumerate(guesses):
            if model.pick(text + guesses[:i], sampling, None, start).token != guess:
                break
            right += 1
        extra = model.pick(text + guesses[:right], sampling, None, start).token
        result.drafted.append(len(guesses))
        result.accepted.append(right)
        for token in [*guesses[:right], extra]:
            if emit(token):
                return result


def tokens_per_round(acceptance: Sequence[float], rounds: int, seed: int) -> float:
    """Mean tokens of a round by throwing dice; acceptance[i] is p of place i given all before."""
    dice = random.Random(seed)
    total = 0
    for _ in range(rounds):
        total += 1
        for p in acceptance:
            if dice.random() >= p:
                break
            total += 1
    return total / rounds


def tokens_per_round_enumerated(acceptance: Sequence[float]) -> float:
    """The same by summing over every outcome of every place."""
    expected = 0.0
    for outcome in itertools.product((True, False), repeat=len(acceptance)):
        weight = math.prod(p if o else 1.0 - p for p, o in zip(acceptance, outcome, strict=True))
        lead = next((i for i, o in enumerate(outcome) if not o), len(outcome))
        expected += weight * (1 + lead)
    return expected


def knapsack(items: Sequence[Sequence[tuple[int, float]]]) -> dict[int, float]:
    """Least loss for every reachable exact saving; items are lists of (saving, loss) options."""
    best: dict[int, float] = {}
    for choice in itertools.product(*items):
        saving = sum(s for s, _ in choice)
        loss = math.fsum(x for _, x in choice)
        if loss < best.get(saving, math.inf):
            best[saving] = loss
    return best
