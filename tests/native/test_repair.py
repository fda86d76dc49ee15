"""Repair of skipped sublayers: drafts add the mean of what a sublayer added, learned from
verification; passes of the full model are left alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from knapspec_edge.native import open_context, open_model
from knapspec_edge.records import GREEDY, Plan

EXACT: dict[str, Any] = {"threads": 1, "kv_type": "f32", "flash_attn": "off"}
LEAST, MEMORY = 8, 64  # tokens; REPAIR_* in knapspec-context.cpp


def text(n: int, n_vocab: int, seed: int = 5) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(1, n_vocab, n)]


Opened = Callable[..., Any]


@pytest.fixture
def opened(patched_library: Path, tiny_models: Path) -> Iterator[Opened]:
    """Contexts of a tiny model that pass through here alone."""
    model = open_model(tiny_models / "llama-dense.gguf")
    contexts = []

    def open_one(interval: int, **settings: Any) -> Any:
        context = open_context(
            model, ctx_tokens=256, repair_interval=interval, **{**EXACT, **settings}
        )
        contexts.append(context)
        return context

    yield open_one
    for context in contexts:
        context.close()
    model.close()


def updates(context: Any, tokens: list[int], start: int) -> np.ndarray:
    """What each sublayer but the first adds to the stream, f32 [sublayers - 1, tokens, hidden]."""
    context.truncate(start)
    states = context.hidden_states(tokens)
    context.truncate(start)
    return np.diff(states, axis=0)


def test_a_draft_adds_the_mean_where_it_skips(opened: Opened) -> None:
    context, plainly = opened(1), opened(0)
    n = len(context.sublayers)
    tokens = text(40, context.n_vocab)
    for each in (context, plainly):
        each.prefill(tokens[:20], GREEDY)
    added = updates(context, tokens[20:30], 20)
    context.verify(tokens[20:30], GREEDY)
    context.truncate(20)

    seen, vectors = context.repairs()
    assert seen == 10
    assert not vectors[0].any()  # nothing keeps the stream before the first sublayer
    np.testing.assert_allclose(vectors[1:], added.mean(axis=1), rtol=1e-4, atol=1e-5)
    assert np.abs(vectors[1:]).max(axis=1).min() > 0.0

    skipped = [0, 1, n - 3, n - 2, n - 1]
    for plan in (Plan.skipping(n, [i]) for i in range(n)):
        states = context.hidden_states(tokens[20:24], plan)
        context.truncate(20)
        (i,) = plan.skipped
        before = states[i - 1] if i else None
        if before is not None:
            np.testing.assert_array_equal(states[i], before + vectors[i])
    states = context.hidden_states(tokens[20:24], Plan.skipping(n, skipped))
    context.truncate(20)
    for i in skipped[1:]:
        np.testing.assert_array_equal(states[i], states[i - 1] + vectors[i])
    unrepaired = plainly.hidden_states(tokens[20:24], Plan.skipping(n, skipped))
    np.testing.assert_array_equal(unrepaired[n - 1], unrepaired[n - 4])


def test_the_mean_follows_the_latest_tokens(opened: Opened) -> None:
    context = opened(1)
    tokens = text(200, context.n_vocab)
    context.prefill(tokens[:10], GREEDY)
    mean, seen = 0.0, 0
    for start in range(10, 170, 16):
        part = tokens[start : start + 16]
        added = updates(context, part, start).mean(axis=1)
        context.verify(part, GREEDY)
        seen += 16
        mean = mean + 16 / min(seen, MEMORY) * (added - mean)
    assert context.repairs()[0] == seen
    np.testing.assert_allclose(context.repairs()[1][1:], mean, rtol=1e-3, atol=1e-5)


def test_only_passes_of_the_full_model_teach_and_enough_of_them(opened: Opened) -> None:
    context, plainly = opened(1), opened(0)
    n = len(context.sublayers)
    plan = Plan.skipping(n, [n - 2])
    tokens = text(40, context.n_vocab)
    for each in (context, plainly):
        each.prefill(tokens[:20], GREEDY)  # one row of logits: a prompt
        each.decode(tokens[20], GREEDY)
        each.decode(tokens[21], GREEDY, plan)
        each.truncate(20)
    assert context.repairs()[0] == 0
    context.verify(tokens[20 : 20 + LEAST - 1], GREEDY)
    assert context.repairs()[0] == LEAST - 1

    def draft(each: Any) -> np.ndarray:
        each.truncate(20)
        each.decode(tokens[20], GREEDY, plan)
        row: np.ndarray = each.logits()
        return row

    np.testing.assert_array_equal(draft(context), draft(plainly))  # too few tokens
    context.truncate(20)
    context.verify(tokens[20:22], GREEDY)
    assert context.repairs()[0] == LEAST + 1
    assert (draft(context) != draft(plainly)).any()
    before = context.repairs()
    context.evaluate_beside([(10, tokens[10:20])], plan)
    context.evaluate(tokens[20:24], plan)
    assert context.repairs()[0] == before[0]
    np.testing.assert_array_equal(context.repairs()[1], before[1])


def test_one_verification_in_so_many_is_looked_at(opened: Opened) -> None:
    context = opened(3)
    tokens = text(60, context.n_vocab)
    context.prefill(tokens[:10], GREEDY)
    seen = []
    for start in range(10, 38, 4):
        context.verify(tokens[start : start + 4], GREEDY)
        seen.append(context.repairs()[0])
    assert seen == [4, 4, 4, 8, 8, 8, 12]


def test_verification_and_plain_steps_keep_their_bits(opened: Opened) -> None:
    context, plainly = opened(1), opened(0)
    n = len(context.sublayers)
    plan = Plan.skipping(n, list(range(1, n, 2)))
    tokens = text(60, context.n_vocab)
    for each in (context, plainly):
        each.prefill(tokens[:16], GREEDY)
    for start in range(16, 48, 4):
        for each in (context, plainly):
            each.decode(tokens[start], GREEDY, plan)
            each.truncate(start)
        picks = [each.verify(tokens[start : start + 4], GREEDY) for each in (context, plainly)]
        assert picks[0] == picks[1]
        for row in range(4):
            np.testing.assert_array_equal(context.logits(row), plainly.logits(row))
        for each in (context, plainly):
            each.truncate(start + 3)
            each.decode(tokens[start + 3], GREEDY)
        np.testing.assert_array_equal(context.logits(), plainly.logits())
    assert context.repairs()[0] == 32


def test_graphs_stay_alive_while_means_change(opened: Opened) -> None:
    context = opened(1)
    n = len(context.sublayers)
    plan = Plan.skipping(n, [n - 2])
    tokens = text(100, context.n_vocab)
    context.prefill(tokens[:16], GREEDY)

    def rounds() -> int:
        for _ in range(6):
            context.decode(tokens[16], GREEDY, plan)
            context.truncate(16)
            context.verify(tokens[16:20], GREEDY)
            context.truncate(16)
        built: int = context.graph_stats()["n_builds"]
        return built

    assert rounds() == rounds() == 3  # the prompt's, a draft's, a verification's
