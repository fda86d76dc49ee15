"""Windowed attention on the native backend.

The oracle: the full model on a cache from which the tokens that a window hides were removed, the
others where they were. With flash attention both leave out the same cells of the same cache, so
bits are equal. Without it the cells that are seen are joined by a copy and summed in other groups:
differences are those of rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from knapspec_edge.errors import PlanError
from knapspec_edge.native import open_context, open_model
from knapspec_edge.records import FULL, SKIP, Kind, Mode, ModeKind, Plan, Sampling

GREEDY = Sampling()
SINKS, RECENT = 4, 64
N = 700  # behind so many tokens: two steps of the padded cache beyond the window
ROUNDING = 2e-5  # of logits whose sums are grouped otherwise, in F32
MODELS = ("llama-dense", "gemma3-dense", "phi2-dense", "bloom-dense", "gpt-oss-moe")
SETTINGS = (("on", "f16"), ("on", "q8_0"), ("on", "f32"), ("off", "f32"), ("off", "f16"))


def text(n: int) -> list[int]:
    return [int(t) for t in np.random.default_rng(0).integers(3, 100, n)]


TEXT = text(900)


def window(sinks: int = SINKS, recent: int = RECENT) -> Mode:
    return Mode(ModeKind.WINDOW, sinks, recent)


def windowed(
    context: Any, mode: Mode, only: Sequence[int] | None = None, other: Mode = FULL
) -> Plan:
    """Every attention, or only these sublayers, under this window; `other`: the rest."""
    chosen = [i for i, t in enumerate(context.traits) if t.can_window] if only is None else only
    return Plan(tuple(mode if i in chosen else other for i in range(len(context.sublayers))))


@contextmanager
def prefilled(model: Any, **settings: Any) -> Iterator[Any]:
    """A context that holds the text's first N tokens."""
    with open_context(model, ctx_tokens=1024, **settings) as context:
        context.prefill(TEXT[:N], GREEDY)
        yield context


def decoded(context: Any, tokens: Sequence[int], plan: Plan | None) -> np.ndarray:
    """Logits of these tokens, one by one; the cache is left as it was."""
    before = context.n_past
    rows = []
    for token in tokens:
        context.decode(token, GREEDY, plan)
        rows.append(context.logits())
    context.truncate(before)
    return np.stack(rows)


def hidden(context: Any, tokens: Sequence[int], mode: Mode, plan: Plan | None = None) -> np.ndarray:
    """The oracle: before each token, what it may not see is removed. Empties the cache."""
    rows = []
    for token in tokens:
        first = context.n_past - mode.window_tokens + 1  # of the window
        context._llama.llama_memory_seq_rm(context._memory, 0, mode.sink_tokens, first)
        context.decode(token, GREEDY, plan)
        rows.append(context.logits())
    context._empty()
    return np.stack(rows)


@pytest.fixture(params=MODELS)
def model(
    request: pytest.FixtureRequest, tiny_models: Path, patched_library: Path
) -> Iterator[Any]:
    with open_model(tiny_models / f"{request.param}.gguf") as opened:
        yield opened


@pytest.fixture
def llama(tiny_models: Path, patched_library: Path) -> Iterator[Any]:
    with open_model(tiny_models / "llama-dense.gguf") as opened:
        yield opened


def same(a: np.ndarray, b: np.ndarray, flash_attn: str) -> bool:
    if flash_attn == "on":
        return np.array_equal(a, b)
    return bool(np.abs(a - b).max() <= ROUNDING)


@pytest.mark.parametrize(("flash_attn", "kv_type"), SETTINGS)
def test_a_window_equals_a_cache_without_what_it_hides(
    model: Any, flash_attn: str, kv_type: str
) -> None:
    with prefilled(model, flash_attn=flash_attn, kv_type=kv_type) as context:
        new = TEXT[N : N + 4]
        full = decoded(context, new, None)
        found = decoded(context, new, windowed(context, window()))
        expected = hidden(context, new, window())
        assert same(found, expected, flash_attn)
        assert np.abs(found - full).max() > 10 * ROUNDING, "the window hides something"


@pytest.mark.parametrize(("flash_attn", "kv_type"), SETTINGS)
def test_a_window_as_long_as_the_context_is_the_full_model(
    model: Any, flash_attn: str, kv_type: str
) -> None:
    with prefilled(model, flash_attn=flash_attn, kv_type=kv_type) as context:
        new = TEXT[N : N + 2]
        full = decoded(context, new, None)
        for mode in (window(0, N + 2), window(SINKS, N + 2 - SINKS), window(N, 2)):
            assert np.array_equal(decoded(context, new, windowed(context, mode)), full)


@pytest.mark.parametrize("flash_attn", ["on", "off"])
def test_each_sublayer_has_a_window_of_its_own(llama: Any, flash_attn: str) -> None:
    """One attention is windowed, or full over what remained; nothing else sees any key."""
    with open_context(llama, ctx_tokens=1024, flash_attn=flash_attn, kv_type="f32") as context:
        attention = [s.index for s in context.sublayers if s.kind is Kind.ATTENTION]
        new = TEXT[N : N + 2]
        found = []
        for i in attention:
            others = [k for k in attention if k != i]
            modes = [SKIP if k in others else FULL for k in range(len(context.sublayers))]
            alone = Plan(tuple(modes))
            modes[i] = window()
            context.prefill(TEXT[:N], GREEDY)
            found.append(decoded(context, new, Plan(tuple(modes))))
            assert same(found[-1], hidden(context, new, window(), alone), flash_attn)
        assert len({rows.tobytes() for rows in found}) == len(attention)


@pytest.mark.parametrize("flash_attn", ["on", "off"])
def test_windows_that_differ_in_nothing_but_their_size_do_not_share_graphs(
    llama: Any, flash_attn: str
) -> None:
    modes = [window(), window(SINKS, RECENT + 1), window(SINKS + 1, RECENT)]
    expected = []
    for mode in modes:
        with prefilled(llama, flash_attn=flash_attn) as context:
            expected.append(decoded(context, TEXT[N : N + 3], windowed(context, mode)))
    assert not np.array_equal(expected[0], expected[1])
    assert not np.array_equal(expected[0], expected[2])
    with prefilled(llama, flash_attn=flash_attn) as context:
        for _ in range(2):
            for mode, rows in zip(modes, expected, strict=True):
                found = decoded(context, TEXT[N : N + 3], windowed(context, mode))
                assert np.array_equal(found, rows)


@pytest.mark.parametrize("flash_attn", ["on", "off"])
def test_graphs_live_as_long_as_those_of_the_full_model(llama: Any, flash_attn: str) -> None:
    """The window moves with every token; its edge in the graph only where the cache grows."""
    with open_context(llama, ctx_tokens=1024, flash_attn=flash_attn) as context:
        plan = windowed(context, window())
        context.prefill(TEXT[:500], GREEDY)
        context.decode(5, GREEDY, plan)
        built = context.graph_stats()["n_builds"]
        for _ in range(40):
            context.decode(5, GREEDY, plan)
        # the cache grew once meanwhile, by a step of its own
        assert context.graph_stats()["n_builds"] - built <= 1


@pytest.mark.parametrize("flash_attn", ["on", "off"])
def test_a_window_across_a_growing_cache(llama: Any, flash_attn: str) -> None:
    """Positions on both sides of a step of the padded cache, and windows that reach to its edge."""
    for recent in (RECENT, 255, 257):
        with open_context(llama, ctx_tokens=1024, flash_attn=flash_attn, kv_type="f32") as context:
            for n in (510, 511, 512, 766):
                new = TEXT[n : n + 4]
                context.prefill(TEXT[:n], GREEDY)
                found = decoded(context, new, windowed(context, window(SINKS, recent)))
                assert same(found, hidden(context, new, window(SINKS, recent)), flash_attn)


def test_without_flash_attention_only_what_is_seen_is_read(llama: Any) -> None:
    """Cells that no window reaches may hold anything, so they are not multiplied by zero."""
    with open_context(llama, ctx_tokens=1024, flash_attn="off", kv_type="f32") as context:
        plan = windowed(context, window())
        context.prefill(TEXT[:200], GREEDY)
        context.decode(5, GREEDY, plan)
        short = context.graph_stats()["n_nodes"]
        context.prefill(TEXT[201:N], GREEDY)
        context.decode(5, GREEDY, plan)
        assert context.graph_stats()["n_nodes"] > short, "two ranges are joined"


@pytest.mark.parametrize("flash_attn", ["on", "off"])
def test_cells_out_of_order(llama: Any, flash_attn: str) -> None:
    """After a shift of the context a token no longer stands in the cell of its position."""
    with open_context(llama, ctx_tokens=1024, flash_attn=flash_attn, kv_type="f32") as context:

        def shifted() -> None:
            context.prefill(TEXT[:N], GREEDY)
            context._llama.llama_memory_seq_rm(context._memory, 0, 4, 104)
            context._llama.llama_memory_seq_add(context._memory, 0, 104, N, -100)
            context._n_past = N - 100

        new = TEXT[N : N + 3]
        shifted()
        found = decoded(context, new, windowed(context, window()))
        context._empty()
        shifted()
        assert same(found, hidden(context, new, window()), flash_attn)


@pytest.mark.parametrize("flash_attn", ["on", "off"])
def test_judged_beside_the_text_as_drafted(model: Any, flash_attn: str) -> None:
    """Blocks at several places of the text, each with its own window."""
    with open_context(model, ctx_tokens=1024, flash_attn=flash_attn, kv_type="f32") as context:
        plan = windowed(context, window())
        places = (N - 40, N - 20, N)
        context.prefill(TEXT[:N], GREEDY)
        blocks = [(n, TEXT[n : n + 4]) for n in places]
        beside = context.evaluate_beside(blocks, plan)
        for (n, tokens), found in zip(blocks, beside, strict=True):
            context.truncate(0)
            context.prefill(TEXT[:n], GREEDY)
            for token, picked, probability in zip(
                tokens, found.tokens, found.probabilities, strict=True
            ):
                pick = context.decode(token, GREEDY, plan)
                assert pick.probability == pytest.approx(probability, abs=1e-5)
                if pick.margin > 1e-4:
                    assert pick.token == picked


@pytest.mark.parametrize("flash_attn", ["on", "off"])
def test_a_windowed_draft_leaves_the_full_model_unchanged(model: Any, flash_attn: str) -> None:
    with prefilled(model, flash_attn=flash_attn) as context:
        context.verify([1, 2, 3], GREEDY)
        expected = [context.logits(i) for i in range(3)]
        context.truncate(N)
        for mode in (window(), window(0, 1)):
            decoded(context, (9, 8, 7, 6), windowed(context, mode))
            context.verify([1, 2, 3], GREEDY)
            assert all(np.array_equal(context.logits(i), expected[i]) for i in range(3))
            context.truncate(N)


def test_a_window_writes_its_keys(llama: Any) -> None:
    """What was computed under a window can be read by the full model behind it."""
    with open_context(llama, ctx_tokens=1024) as context:
        wide = windowed(context, window(SINKS, N))
        for token in TEXT[:20]:
            context.decode(token, GREEDY, wide)
        after = decoded(context, TEXT[20:21], None)
        context.truncate(0)
        for token in TEXT[:20]:
            context.decode(token, GREEDY)
        assert np.array_equal(after, decoded(context, TEXT[20:21], None))


def test_skips_and_windows_together(llama: Any) -> None:
    with open_context(llama, ctx_tokens=1024) as context:
        attention = [s.index for s in context.sublayers if s.kind is Kind.ATTENTION]
        mlps = [s.index for s in context.sublayers if s.kind is Kind.MLP]
        modes = [FULL] * len(context.sublayers)
        for i in attention:
            modes[i] = window()
        modes[mlps[0]] = SKIP
        alone = Plan.skipping(len(modes), [mlps[0]])
        context.prefill(TEXT[:N], GREEDY)
        new = TEXT[N : N + 3]
        found = decoded(context, new, Plan(tuple(modes)))
        assert np.array_equal(found, hidden(context, new, window(), alone))


def test_a_sliding_window_stays_as_it_is(tiny_models: Path, patched_library: Path) -> None:
    with (
        open_model(tiny_models / "gemma3-dense.gguf") as opened,
        open_context(opened, ctx_tokens=1024) as context,
    ):
        cells = [t.n_cells for t in context.traits]
        sliding = [i for i, n in enumerate(cells) if 0 < n < max(cells)]
        assert sliding
        assert all(context.traits[i].can_window for i in sliding)
        context.prefill(TEXT[:N], GREEDY)
        mode = window(0, opened.n_swa)
        plan = windowed(context, mode, sliding)
        new = TEXT[N : N + 2]
        assert np.array_equal(decoded(context, new, plan), decoded(context, new, None))


def test_what_cannot_be_windowed_is_refused_by_name(
    tiny_models: Path, patched_library: Path
) -> None:
    with (
        open_model(tiny_models / "llama-dense.gguf") as opened,
        open_context(opened, ctx_tokens=256) as context,
    ):
        can = [t.can_window for t in context.traits]
        assert can == [s.kind is Kind.ATTENTION for s in context.sublayers]
        mlp = can.index(False)
        with pytest.raises(PlanError, match=rf"sublayer {mlp} cannot have a window: it reads no"):
            context.decode(1, GREEDY, windowed(context, window(), [mlp]))
        for bad in (window(0, 0), window(-1, 8)):
            with pytest.raises(PlanError, match=r"the window of sublayer 0 holds no token"):
                context.decode(1, GREEDY, windowed(context, bad, [0]))
        assert context.n_past == 0
    with (
        open_model(tiny_models / "mamba-dense.gguf") as opened,
        open_context(opened, ctx_tokens=256) as context,
    ):
        assert not any(t.can_window for t in context.traits)
