"""Passes beside the text: they say what a draft would have picked, and leave no trace."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from knapspec_edge.errors import ContextError, Interrupted, PlanError
from knapspec_edge.native import open_context, open_model
from knapspec_edge.records import GREEDY, Plan, Sampling

# F32 products of another number of cells add up in another order.
TOLERANCE = 1e-4


def text(n: int, n_vocab: int, seed: int = 3) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(1, n_vocab, n)]


@pytest.fixture(params=["llama-dense", "gemma3-dense", "qwen3moe-moe", "phi2-dense"])
def context(request: pytest.FixtureRequest, tiny_models: Path, patched_library: Path) -> Any:
    path = tiny_models / f"{request.param}.gguf"
    with (
        open_model(path) as model,
        open_context(model, ctx_tokens=256, kv_type="f32", flash_attn="off") as opened,
    ):
        yield opened


def plans(context: Any) -> Iterator[Plan | None]:
    n = len(context.sublayers)
    yield None
    yield Plan.skipping(n, [1])
    yield Plan.skipping(n, [0, n - 1])


def expected(
    context: Any, tokens: Sequence[int], start: int, n: int, plan: Plan | None
) -> tuple[np.ndarray, np.ndarray]:
    """The same by cutting the cache back; it is left empty."""
    context.truncate(0)
    if start:
        context.evaluate(tokens[:start], None)
    picks, probabilities = context.evaluate(tokens[start : start + n], plan)
    context.truncate(0)
    return picks, probabilities


def test_blocks_pick_what_a_shorter_cache_would_have_picked(context: Any) -> None:
    tokens = text(60, context.n_vocab)
    blocks = [(start, tokens[start : start + 7]) for start in (0, 1, 20, 33, 53)]
    for plan in plans(context):
        context.evaluate(tokens, None)
        got = context.evaluate_beside(blocks, plan)
        assert context.n_past == 60
        for (start, block), (picks, probabilities, _) in zip(blocks, got, strict=True):
            wanted, likely = expected(context, tokens, start, len(block), plan)
            assert np.array_equal(picks, wanted)
            assert np.allclose(probabilities, likely, atol=TOLERANCE)


def test_sampled_picks_use_the_noise_of_their_positions(context: Any) -> None:
    sampling = Sampling(temperature=1.0, seed=7)
    tokens = text(40, context.n_vocab)
    context.evaluate(tokens, None)
    ((picks, _, _),) = context.evaluate_beside([(30, tokens[30:40])], None, sampling)
    context.truncate(30)
    wanted = [p.token for p in context.verify(tokens[30:40], sampling)]
    assert picks.tolist() == wanted
    greedy, _, _ = context.evaluate_beside([(30, tokens[30:40])])[0]
    assert picks.tolist() != greedy.tolist()


def test_the_text_goes_on_as_if_nothing_had_been_evaluated_beside_it(context: Any) -> None:
    tokens = text(80, context.n_vocab)

    def run(*, beside: bool) -> list[np.ndarray]:
        context.truncate(0)
        context.prefill(tokens[:50], GREEDY)
        rows = []
        for i in range(50, 80):
            if beside:
                blocks = [(i - 12, tokens[i - 12 : i - 4]), (i, tokens[i : i + 8])]
                for plan in plans(context):
                    context.evaluate_beside(blocks, plan)
            context.decode(tokens[i], GREEDY)
            rows.append(context.logits())
        return rows

    for left, right in zip(run(beside=False), run(beside=True), strict=True):
        assert np.array_equal(left, right)


def test_a_full_context_still_has_cells_beside_it(context: Any) -> None:
    tokens = text(256, context.n_vocab)
    for start in range(0, 256, 64):
        context.evaluate(tokens[start : start + 64], None)
    assert context.n_past == context.n_ctx
    n = context.max_beside_tokens
    assert n == 64
    assert len(context.evaluate_beside([(256 - n, tokens[-n:])], None)[0][0]) == n


def test_what_does_not_fit_is_refused_and_nothing_is_lost(context: Any) -> None:
    tokens = text(20, context.n_vocab)
    context.evaluate(tokens, None)
    for blocks in ([], [(3, [])], [(21, [1])], [(-1, [1])], [(0, [1] * 65)]):
        with pytest.raises(ValueError, match="evaluate|context|beside"):
            context.evaluate_beside(blocks)
    with pytest.raises(PlanError):
        context.evaluate_beside([(3, tokens[3:5])], Plan.full(1000))
    assert context.n_past == 20
    assert len(context.evaluate_beside([(3, tokens[3:5])])[0][0]) == 2


def test_an_interrupted_pass_leaves_no_trace(context: Any) -> None:
    tokens = text(30, context.n_vocab)
    context.prefill(tokens, GREEDY)
    context.interrupt()
    with pytest.raises(Interrupted):
        context.evaluate_beside([(10, tokens[10:20])])
    assert context.n_past == 30
    context.decode(tokens[0], GREEDY)
    after = context.logits()
    context.truncate(0)
    context.prefill(tokens, GREEDY)
    context.decode(tokens[0], GREEDY)
    assert np.array_equal(after, context.logits())


def test_recurrent_models_have_nothing_beside_them(
    tiny_models: Path, patched_library: Path
) -> None:
    with (
        open_model(tiny_models / "mamba-dense.gguf") as model,
        open_context(model, ctx_tokens=256) as opened,
    ):
        assert opened.max_beside_tokens == 0


def test_a_sliding_window_is_shared_or_refused_never_wrong(
    tiny_models: Path, patched_library: Path
) -> None:
    """Far beyond the window, whose cells are used again."""
    with (
        open_model(tiny_models / "gemma3-dense.gguf") as model,
        open_context(model, ctx_tokens=2048, kv_type="f32", flash_attn="off") as opened,
    ):
        window = opened.model.n_swa
        assert 0 < window < 1000
        tokens = text(2000, opened.n_vocab)
        opened.prefill(tokens, GREEDY)
        plan = Plan.skipping(len(opened.sublayers), [2])
        start = 1950
        got, _, _ = opened.evaluate_beside([(start, tokens[start : start + 30])], plan)[0]
        with pytest.raises(ContextError):
            opened.evaluate_beside([(window, tokens[window : window + 4])])
        opened.truncate(0)
        opened.prefill(tokens[:start], GREEDY)
        wanted, _ = opened.evaluate(tokens[start : start + 30], plan)
        assert np.array_equal(got, wanted)
