"""The demo model, through the whole stack: forced plans must not change the text."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from knapspec_edge import models
from knapspec_edge.apps.bench.runner import EXPLAINED_MARGIN, EXPLAINED_MARGIN_QUANTISED
from knapspec_edge.apps.bench.texts import QUESTIONS
from knapspec_edge.decode.session import Session
from knapspec_edge.errors import DownloadError
from knapspec_edge.native import open_context, open_model
from knapspec_edge.quantize import converted
from knapspec_edge.records import Draft, Plan, Sampling, Stats
from knapspec_edge.text.templates import choose_template

pytestmark = [pytest.mark.model, pytest.mark.slow]

# Middle sublayers only, so that drafts are good enough to be accepted often and bad enough to fail.
SKIPPED = [16, 20, 24, 27, 30, 33, 36, 40, 44, 48]
N_PROMPTS, N_TOKENS = 5, 64

# (type, settings of the context, largest margin of a flipped pick that is rounding)
TYPES = [
    ("F32", {"kv_type": "f32", "flash_attn": "off"}, EXPLAINED_MARGIN["f32"]),
    ("F16", {}, EXPLAINED_MARGIN["f16"]),
    ("Q8_0", {}, EXPLAINED_MARGIN_QUANTISED),
    ("Q4_1", {}, EXPLAINED_MARGIN_QUANTISED),
]


def model_file(file_type: str) -> Path:
    try:
        if file_type == "Q4_1":  # as it is shipped
            return models.obtain(models.default_model().name)
        return converted(models.default_model().name, file_type)
    except DownloadError as error:
        pytest.skip(f"the demo model cannot be fetched: {error}")


@pytest.fixture(scope="module", params=TYPES, ids=[t[0] for t in TYPES])
def opened(request: pytest.FixtureRequest, patched_library: Path) -> Iterator[tuple[Any, float]]:
    file_type, settings, margin = request.param
    with (
        open_model(model_file(file_type)) as model,
        open_context(model, ctx_tokens=1024, **settings) as context,
    ):
        yield context, margin


def answer(session: Session, prompt: list[int], draft: Draft | None, sampling: Sampling) -> Any:
    generation = session.generate(
        prompt, sampling=sampling, draft=draft, max_tokens=N_TOKENS, reuse=False
    )
    events = list(generation)
    return events, generation.stats


def prompts_of(context: Any) -> list[list[int]]:
    template = choose_template(context.model, None)
    assert template is not None
    return [
        template.apply([{"role": "user", "content": text}]).tokens for text in QUESTIONS[:N_PROMPTS]
    ]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_forced_plan_keeps_the_text(opened: tuple[Any, float], temperature: float) -> None:
    context, margin = opened
    session = Session(context)
    draft = Draft(Plan.skipping(len(context.sublayers), SKIPPED), 4, 0.3)
    sampling = Sampling(temperature=temperature, min_p=0.05 if temperature else 0.0, seed=11)
    total = Stats()
    full_rounds = rejected = 0
    for prompt in prompts_of(context):
        plain, _ = answer(session, prompt, None, sampling)
        drafted, stats = answer(session, prompt, draft, sampling)
        total.draft_n += stats.draft_n
        total.draft_n_accepted += stats.draft_n_accepted
        full_rounds += stats.accepted_lengths.get(4, 0)
        rejected += stats.draft_n - stats.draft_n_accepted
        for a, b in zip(plain, drafted, strict=False):
            if a.token != b.token:
                # rounding of another batch width; everything after it may differ
                assert min(a.margin, b.margin) <= margin, f"at {a.position}: {a} and {b}"
                break
        else:
            assert len(plain) == len(drafted)
    # off equals off would prove nothing
    assert total.draft_n > 0
    assert total.draft_n_accepted > 0
    assert rejected > 0
    assert full_rounds > 0


def test_an_empty_plan_is_accepted(opened: tuple[Any, float]) -> None:
    context, margin = opened
    session = Session(context)
    draft = Draft(Plan.full(len(context.sublayers)), 4, 0.0)
    drafted = accepted = 0
    for prompt in prompts_of(context)[:3]:
        _, stats = answer(session, prompt, draft, Sampling())
        drafted += stats.draft_n
        accepted += stats.draft_n_accepted
    assert drafted > 100
    # below 1 only by the rounding of another batch width
    assert accepted / drafted >= (0.99 if margin < 0.1 else 0.9)


def test_a_speculated_round_leaves_the_state_of_a_plain_one(opened: tuple[Any, float]) -> None:
    """After a round with rejections the logits are those of a context that never drafted."""
    import numpy as np

    context, _ = opened
    greedy = Sampling()
    prompt = prompts_of(context)[0]
    context.truncate(0)
    context.prefill(prompt, greedy)
    n = context.n_past
    block = [1000, 2000, 3000]
    context.verify(block, greedy)
    expected = [context.logits(i) for i in range(3)]
    context.truncate(n)
    plan = Plan.skipping(len(context.sublayers), SKIPPED)
    token = 500
    for _ in range(6):
        token = context.decode(token, greedy, plan).token
    context.truncate(n)
    context.verify(block, greedy)
    assert all(np.array_equal(context.logits(i), expected[i]) for i in range(3))
    context.truncate(0)


def test_what_a_grammar_allows_is_utf8(patched_library: Path) -> None:
    """Bytes that never become the character they would stand for are shown as several: one of a
    counted string would be three."""
    with open_model(model_file("Q4_1")) as model, open_context(model, ctx_tokens=64) as context:
        tokens = {model.token_bytes(t, special=True): t for t in range(model.n_vocab)}
        lib = context._lib
        grammar = lib.knapspec_grammar_init(model.pointer, b"root ::= .{1,2}", b"root", None, 0)
        assert grammar

        def allowed(data: bytes) -> list[bool]:
            """Whether each byte may come behind those before it, each a token of its own."""
            ids = [tokens[bytes([byte])] for byte in data]
            return [
                lib.knapspec_grammar_allows(grammar, (ctypes.c_int32 * i)(*ids[:i]), i, ids[i])
                for i in range(len(ids))
            ]

        for character in "é日\ud7ff\ue000🎉\U0010ffff":
            assert all(allowed(character.encode()))
        # longer than it has to be, halves of surrogate pairs, beyond the last code point
        for data in (b"\xe0\x80", b"\xe0\x9f", b"\xed\xa0", b"\xf0\x80", b"\xf4\x90", b"\xe9a"):
            assert allowed(data) == [True, False]
        lib.knapspec_grammar_free(grammar)
