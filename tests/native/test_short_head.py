"""Drafts that multiply some rows of the head: what they pick, and that nothing else changes."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from knapspec_edge.decode.session import Session
from knapspec_edge.errors import NativeError, PlanError
from knapspec_edge.native import bindings, open_context, open_model
from knapspec_edge.native.quantize import quantize_file
from knapspec_edge.native.short_head import ShortHead, head_sizes
from knapspec_edge.records import GREEDY, Draft, Grammar, Plan, Sampling

from .picking import native_pick

EXACT = {"kv_type": "f32", "flash_attn": "off", "threads": 1}
TOKENS = [3, 14, 15, 9, 26, 5, 35, 8, 97, 93, 23, 84, 62, 64]
GBNF = Grammar('root ::= [0-9a-f]+ | "the " [a-z ]+')
SETTINGS = {
    "greedy": GREEDY,
    "temperature": Sampling(0.7),
    "flat": Sampling(5.0),
    "min-p": Sampling(0.5, min_p=0.3),
    "top-k": Sampling(0.8, top_k=7),
    "wide top-k": Sampling(0.8, top_k=100),
    "top-p": Sampling(1.0, top_p=0.6),
    "typical": Sampling(0.9, typical_p=0.5, temperature_first=True),
    "greedy typical": Sampling(0.0, typical_p=0.4),
    "penalties": Sampling(
        0.0, repeat_penalty=1.7, presence_penalty=0.3, frequency_penalty=0.2, penalty_last_n=9
    ),
    "bias": Sampling(0.6, logit_bias=((5, 0.4), (9, -0.3), (15, -float("inf")), (77, 0.2))),
    "all": Sampling(
        0.9, top_k=30, typical_p=0.95, top_p=0.9, min_p=0.02, repeat_penalty=1.3, penalty_last_n=-1
    ),
}


@pytest.fixture(params=["llama-dense", "gemma2-dense", "granite-dense", "qwen3moe-moe"])
def context(request: pytest.FixtureRequest, tiny_models: Path, patched_library: Path) -> Any:
    """Plain, capped and scaled logits, tied and untied heads."""
    path = tiny_models / f"{request.param}.gguf"
    with open_model(path) as model, open_context(model, ctx_tokens=256, **EXACT) as opened:
        yield opened


@pytest.fixture
def llama(tiny_models: Path, patched_library: Path) -> Iterator[Any]:
    with (
        open_model(tiny_models / "llama-dense.gguf") as model,
        open_context(model, ctx_tokens=256, **EXACT) as opened,
    ):
        yield opened


def short(context: Any, rows: int = 40, *skipped: int) -> Plan:
    return Plan.skipping(len(context.sublayers), list(skipped), rows)


def masked(whole: np.ndarray, tokens: Sequence[int]) -> np.ndarray:
    row = np.full_like(whole, -np.inf)
    row[tokens] = whole[tokens]
    return row


def both(
    context: Any, token: int, plan: Plan, sampling: Sampling = GREEDY
) -> tuple[Any, np.ndarray, np.ndarray]:
    """The pick under the plan, its logits, and those of the same sublayers with the whole head."""
    n = context.n_past
    pick = context.decode(token, sampling, plan)
    logits = context.logits()
    context.truncate(n)
    context.decode(token, GREEDY, replace(plan, head_rows=0))
    whole = context.logits()
    context.truncate(n)
    return pick, logits, whole


@pytest.mark.parametrize("skipped", [(), (1,), (0, 3)], ids=str)
def test_rows_equal_those_of_the_whole_head(context: Any, skipped: tuple[int, ...]) -> None:
    context.prefill(TOKENS, GREEDY)
    for rows in (8, 40, 41):
        plan = short(context, rows, *skipped)
        pick, logits, whole = both(context, 7, plan)
        tokens = context._head.tokens(rows)
        assert len(set(tokens.tolist())) == rows == int(np.isfinite(logits).sum())
        assert np.array_equal(logits[tokens], whole[tokens])
        assert pick.token == int(np.argmax(masked(whole, tokens)))


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "F16"])
def test_quantised_rows_are_copied_as_they_are(
    kind: str, tiny_models: Path, tmp_path: Path, patched_library: Path
) -> None:
    """Also where the head itself has been packed for the CPU."""
    path = tmp_path / "model.gguf"
    quantize_file(tiny_models / "llama-dense.gguf", path, kind, threads=1)
    with open_model(path) as model, open_context(model, ctx_tokens=128, **EXACT) as context:
        context.prefill(TOKENS, GREEDY)
        _, logits, whole = both(context, 7, short(context))
        tokens = context._head.tokens(40)
        # another layout may sum in another order
        assert np.allclose(logits[tokens], whole[tokens], rtol=1e-5, atol=1e-5)
        assert np.ptp(whole[tokens]) > 0.01


@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_a_pick_is_that_of_a_row_without_the_others(llama: Any, name: str) -> None:
    """Noise by token, filters, penalties, bias: as if all other logits were -inf."""
    text = list(TOKENS)
    llama.prefill(text, GREEDY)
    plan = short(llama, 37, 2)
    picked = set()
    for seed in range(60):
        sampling = replace(SETTINGS[name], seed=seed)
        token = (7 * seed + 1) % llama.n_vocab
        pick, _, whole = both(llama, token, plan, sampling)
        row = masked(whole, llama._head.tokens(37))
        history = [*text, token]
        code, expected, probability, margin = native_pick(row, sampling, len(history), history)
        assert (code, pick.token) == (0, expected)
        assert pick.probability == pytest.approx(probability, rel=1e-4)
        assert pick.margin == pytest.approx(margin, rel=1e-3, abs=1e-4) or margin > 80
        picked.add(pick.token)
    assert len(picked) > (5 if SETTINGS[name].temperature else 1)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_grammar_holds_for_short_rows(llama: Any, temperature: float) -> None:
    plan = short(llama, 60)
    agreed = 0
    for seed in range(20):
        sampling = Sampling(temperature, seed=seed, grammar=GBNF)
        llama.truncate(0)
        first = llama.prefill([*TOKENS, seed], sampling)
        start = llama.n_past
        grammar = llama._grammar
        pick, _, whole = both(llama, first.token, plan, sampling)
        history = [*TOKENS, seed, first.token]
        code, token, _, _ = native_pick(
            masked(whole, llama._head.tokens(60)),
            sampling,
            len(history),
            history,
            grammar=grammar,
            answer_start=start,
        )
        assert (code, token) == (0, pick.token)
        agreed += 1
    assert agreed == 20


def test_equal_logits_go_to_the_lower_token(llama: Any) -> None:
    """Whatever the order of the list."""
    llama.prefill(TOKENS, GREEDY)
    plan = short(llama, 40)
    llama.decode(7, GREEDY, plan)
    tokens = llama._head.tokens(40)
    high, low = int(tokens[3]), int(tokens[30])
    if high < low:
        high, low = low, high
    sampling = Sampling(logit_bias=((high, 1e9), (low, 1e9)))  # swallows the logits
    llama.truncate(len(TOKENS))
    assert llama.decode(7, sampling, plan).token == low


def test_blocks_beside_pick_what_drafts_pick(context: Any) -> None:
    context.prefill(TOKENS, GREEDY)
    plan = short(context, 40, 1)
    context.decode(1, GREEDY, plan)  # makes the list; nothing new comes into it below
    context.truncate(len(TOKENS))
    block = [4, 8, 15]
    beside = context.evaluate_beside([(10, block)], plan)[0]
    expected = [[11, 12, int(context._head.tokens(40)[5])]]
    margins = context.evaluate_beside([(10, block)], plan, expected=expected)[0].margins
    context.truncate(10)
    picks, probabilities = context.evaluate(block, plan)
    logits = context.logits()
    assert beside.tokens.tolist() == picks.tolist()
    assert np.allclose(beside.probabilities, probabilities, rtol=1e-4)
    listed = set(context._head.tokens(40).tolist())
    for token, margin in zip(expected[0], margins, strict=True):
        assert np.isnan(margin) == (token not in listed)
    token = expected[0][2]
    others = np.delete(logits, token)
    assert margins[2] == pytest.approx(logits[token] - others[np.isfinite(others)].max(), abs=1e-4)


def test_new_tokens_of_the_text_move_in_without_a_new_graph(llama: Any) -> None:
    llama.prefill(TOKENS, GREEDY)
    plan = short(llama, 40)
    llama.decode(1, GREEDY, plan)
    head = llama._head
    built = llama.graph_stats()["n_builds"]
    outside = [t for t in range(llama.n_vocab) if t not in set(head.tokens(40).tolist())]
    new = outside[:3]
    assert llama.lacked(new, llama.n_past, plan).all()
    for token in new:
        llama.decode(token, GREEDY, plan)
        at = llama.n_past
        assert token in head.tokens(40)
        # it was not there when the text came to it, and is from then on
        assert llama.lacked([token, token], at - 1, plan).tolist() == [True, False]
    _, logits, whole = both(llama, 2, plan)
    assert np.array_equal(logits[new], whole[new])
    assert llama.graph_stats()["n_builds"] == built + 1  # the whole head's, in `both`
    listed = head.tokens(40).tolist()
    assert len(set(listed)) == 40


def test_tokens_change_places_between_a_small_and_a_large_head(llama: Any) -> None:
    head = ShortHead(llama._lib, llama.pointer, llama.model, (16, 64), text_share=0.25)
    before = head.tokens(64).tolist()
    head.note([before[40], before[3], before[50]], 7)
    after = head.tokens(64).tolist()
    assert sorted(after) == sorted(before)
    assert {before[40], before[50]} <= set(after[:16])
    assert after[:12] == before[:12]
    assert head.lacked([before[40]], 7, 16).tolist() == [True]
    assert head.lacked([before[40]], 7, 64).tolist() == [False]  # stood there all along
    head.forget_from(7)
    assert head.lacked([before[40]], 7, 16).tolist() == [False]
    # more than there is room for: the latest
    everything = list(range(llama.n_vocab))
    head.note(everything, 0)
    now = head.tokens(64).tolist()
    assert len(set(now)) == 64


def test_ends_and_suggested_tokens_come_first(llama: Any) -> None:
    suggested = [99, 50, 77]
    llama.suggest_head(suggested)
    llama.decode(1, GREEDY, short(llama, 40))
    listed = llama._head.tokens(40).tolist()
    ends = list(llama.model.end_tokens)
    assert listed[: len(ends)] == ends
    rest = [t for t in suggested if t not in ends]
    assert listed[len(ends) : len(ends) + len(rest)] == rest
    assert len(set(listed)) == 40


def test_whole_rows_stay_as_they_were(context: Any) -> None:
    """The target's, and those of whoever decodes without picking, before and after."""
    rows = []
    for use in (False, True, False):
        context.truncate(0)
        context.prefill(TOKENS, GREEDY)
        if use:
            context.decode(1, GREEDY, short(context, 40, 1))
            context.truncate(len(TOKENS))
        picks = context.verify([5, 6, 7], GREEDY)
        rows.append((context.logits(), [p.token for p in picks]))
    for row, tokens in rows[1:]:
        assert np.array_equal(row, rows[0][0])
        assert tokens == rows[0][1]
    context.decode(3, GREEDY, short(context, 40))
    with pytest.raises(NativeError, match="whole rows"):
        context._pick(0, Sampling(n_probs=1))


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(0.7, seed=5, top_p=0.9)], ids=str)
def test_the_text_does_not_depend_on_it(llama: Any, sampling: Sampling) -> None:
    def said(draft: Draft | None) -> tuple[list[int], Any]:
        generation = Session(llama).generate(TOKENS, sampling=sampling, draft=draft, max_tokens=80)
        return [e.token for e in generation], generation.stats

    plain, _ = said(None)
    for rows in (16, 64):
        text, stats = said(Draft(short(llama, rows), 4, 0.0))
        assert text == plain
        assert stats.draft_n > 20
    assert stats.draft_n_accepted > 10


def test_refusals_name_what_is_in_the_way(tiny_models: Path, patched_library: Path) -> None:
    with (
        open_model(tiny_models / "phi2-dense.gguf") as model,
        open_context(model, ctx_tokens=64) as context,
    ):
        assert context.head_sizes == ()
        assert "ADD with output.bias" in context.head_refusal
        with pytest.raises(PlanError, match=r"output\.bias"):
            context.decode(1, GREEDY, short(context, 40))
        assert context.n_past == 0
        context.decode(1, GREEDY)


def test_impossible_lists_are_refused(llama: Any) -> None:
    lib, pointer = llama._lib, llama.pointer
    n = llama.n_vocab

    def put(places: list[int], tokens: list[int]) -> int:
        array = ctypes.c_int32 * len(places)
        return int(lib.knapspec_head_set(pointer, array(*places), array(*tokens), len(places)))

    for rows in (-1, n + 1):
        assert lib.knapspec_head_reserve(pointer, rows, None) == bindings.BAD_ARGUMENT
    assert put([0], [1]) == bindings.BAD_ARGUMENT  # there is no list
    assert lib.knapspec_use_head(pointer, 1) == bindings.BAD_ARGUMENT
    assert lib.knapspec_head_reserve(pointer, 4, None) == bindings.OK
    assert put([0, 1], [5, 6]) == bindings.OK
    assert lib.knapspec_use_head(pointer, 3) == bindings.BAD_ARGUMENT  # not filled so far
    for places, tokens in (
        ([2], [5]), ([2, 3], [7, 7]), ([4], [7]), ([-1], [7]), ([2], [n]), ([2], [-1]),
        ([2, 2], [7, 8]), ([0, 2], [9, 6]),
    ):  # fmt: skip
        assert put(places, tokens) == bindings.BAD_ARGUMENT, (places, tokens)
    assert put([0, 1], [6, 5]) == bindings.OK  # changed places; all was as before
    assert put([2, 3], [7, 8]) == bindings.OK
    assert lib.knapspec_use_head(pointer, 4) == bindings.OK
    assert lib.knapspec_head_reserve(pointer, 0, None) == bindings.OK
    assert lib.knapspec_use_head(pointer, 4) == bindings.BAD_ARGUMENT
    with pytest.raises(PlanError, match="impossible"):
        llama.decode(1, GREEDY, short(llama, n + 1))


def test_two_contexts_have_lists_of_their_own(tiny_models: Path, patched_library: Path) -> None:
    with (
        open_model(tiny_models / "llama-dense.gguf") as model,
        open_context(model, ctx_tokens=64, **EXACT) as one,
        open_context(model, ctx_tokens=64, **EXACT) as two,
    ):
        one.suggest_head([100, 101])
        two.suggest_head([110, 111])
        for context in (one, two, one):
            context.truncate(0)
            context.prefill(TOKENS, GREEDY)
            _, logits, whole = both(context, 7, short(context))
            tokens = context._head.tokens(40)
            assert np.array_equal(logits[tokens], whole[tokens])
        assert 100 in one._head.tokens(40)
        assert 100 not in two._head.tokens(40)
        one.close()
        two.decode(7, GREEDY, short(two))


def test_memory_goes_with_the_context(tiny_models: Path, patched_library: Path) -> None:
    """A list as large as the head, many times over."""
    path = tiny_models / "llama-dense.gguf"
    with open_model(path) as model:
        sizes = []
        for _ in range(30):
            with open_context(model, ctx_tokens=64, **EXACT) as context:
                context.decode(1, GREEDY, short(context, model.n_vocab))
                for rows in (20, 40, 60):
                    context.decode(1, GREEDY, short(context, rows))
            sizes.append(_resident_bytes())
    assert sizes[-1] - sizes[9] < 8 << 20


def _resident_bytes() -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
    except OSError:
        pytest.skip("no /proc here")


def test_sizes_are_whole_tiles() -> None:
    assert head_sizes(49152) == (6144, 12288, 24576)
    assert head_sizes(262144) == (32768, 65536, 131072)
    assert all(n % 256 == 0 for n in head_sizes(151936))
    assert head_sizes(256) == ()
