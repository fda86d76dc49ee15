"""Bit exactness: where passes agree, drafts change no bit; what a token's cell is does not depend
on them either."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from knapspec_edge.config import DEFAULTS
from knapspec_edge.decode.session import Session
from knapspec_edge.latency.exactness import examine
from knapspec_edge.native import open_context, open_model
from knapspec_edge.native.quantize import quantize_file
from knapspec_edge.records import GREEDY, Draft, Plan, Sampling, Stats
from native.test_real_model import SKIPPED, answer, model_file, prompts_of


@pytest.mark.parametrize("flash_attn", ["off", "on"])
@pytest.mark.parametrize("name", ["gemma3-dense", "granite_swa-dense", "muse-glimmer-dense"])
def test_a_draft_leaves_no_trace_in_the_ring_of_a_window(
    tiny_models: Path, patched_library: Path, name: str, flash_attn: str
) -> None:
    """Drafts and cuts across the end of the ring, with one token per pass: what may differ is only
    where tokens stand."""
    with (
        open_model(tiny_models / f"{name}.gguf") as model,
        open_context(model, ctx_tokens=1600, kv_type="f16", flash_attn=flash_attn) as context,
    ):
        assert 0 < model.n_swa < 1000
        tokens = np.random.default_rng(3).integers(5, context.n_vocab, 1600).tolist()
        start, end = 700, 1300

        def run(*, drafting: bool) -> list[Any]:
            context.truncate(0)
            context.prefill(tokens[:start], GREEDY)
            rows = []
            for i in range(start, end):
                if drafting and i % 3 == 0:
                    for token in tokens[i : i + 1 + i % 8]:
                        context.decode(token, GREEDY)
                    context.truncate(i)
                context.decode(tokens[i], GREEDY)
                rows.append(context.logits())
            return rows

        plain = run(drafting=False)
        for i, (a, b) in enumerate(zip(plain, run(drafting=True), strict=True)):
            assert np.array_equal(a, b), f"at {start + i}"


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("file_type", ["Q4_1", "Q8_0", "Q4_0", "F16"])
def test_where_passes_agree_every_pick_has_the_same_bits(
    patched_library: Path, tmp_path: Path, file_type: str
) -> None:
    path = model_file(file_type if file_type != "Q4_0" else "F16")
    if file_type == "Q4_0":
        path, source = tmp_path / "Q4_0.gguf", path
        quantize_file(source, path, "Q4_0")
    with (
        open_model(path) as model,
        open_context(model, ctx_tokens=1024, flash_attn="on", max_verify_tokens=16) as context,
    ):
        prompts = prompts_of(context)
        found = examine(context, prompts[0], DEFAULTS)
        if not found.holds:
            pytest.skip(f"not on this processor: {found.reason}")
        session = Session(context)
        draft = Draft(Plan.skipping(len(context.sublayers), SKIPPED), 5, 0.2)
        total = Stats()
        for temperature in (0.0, 0.8):
            sampling = Sampling(temperature=temperature, seed=5)
            for prompt in prompts[:3]:
                plain, _ = answer(session, prompt, None, sampling)
                drafted, stats = answer(session, prompt, draft, sampling)
                total.draft_n += stats.draft_n
                total.draft_n_accepted += stats.draft_n_accepted
                assert [(e.token, e.probability, e.margin) for e in plain] == [
                    (e.token, e.probability, e.margin) for e in drafted
                ]
        assert 0 < total.draft_n_accepted < total.draft_n
