"""States at the input of the head: they give the logits, and asking for them leaves no trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from knapspec_edge import models
from knapspec_edge.apps.certify import certify
from knapspec_edge.errors import DownloadError, ModelError, PlanError
from knapspec_edge.gguf_check import find_tensor, inspect
from knapspec_edge.gguf_head import GgufHead
from knapspec_edge.latency.fidelity import target_text
from knapspec_edge.native import open_context, open_model
from knapspec_edge.quantize import converted
from knapspec_edge.records import Plan

# Tied and not, with a bias (phi2, qwen2), with scaled (command-r) and capped logits (gemma2), with
# something between norm and head (minicpm3), mixtures of experts, parallel residuals.
MODELS = [
    "command-r-dense", "falcon-dense", "gemma2-dense", "gemma3-dense", "gpt2-dense", "grok-moe",
    "llama-dense", "llama4-moe", "minicpm3-dense", "phi2-dense", "qwen2-dense", "qwen3moe-moe",
]  # fmt: skip

LAST = (-3, -2, -1)  # rows whose logits are compared


def text(n: int, n_vocab: int) -> list[int]:
    return [int(t) for t in np.random.default_rng(0).integers(1, n_vocab, n)]


def dense(head: GgufHead) -> np.ndarray:
    return head.rows(0, head.n_vocab)


@pytest.mark.parametrize("name", MODELS)
def test_states_times_head_are_the_logits(
    name: str, tiny_models: Path, patched_library: Path
) -> None:
    path = tiny_models / f"{name}.gguf"
    head = GgufHead(inspect(path))
    with (
        open_model(path) as model,
        open_context(model, ctx_tokens=256, kv_type="f32", flash_attn="off") as context,
    ):
        tokens = text(90, context.n_vocab)  # more than one pass
        assert head.n_vocab == context.n_vocab
        for plan in (None, Plan.skipping(len(context.sublayers), [1])):
            expected, _ = context.evaluate(tokens, plan)
            before = [context.logits(row) for row in LAST]
            context.truncate(0)
            states, picks = context.final_states(tokens, plan)
            assert context.n_past == 90
            assert (states.shape, states.dtype) == ((90, head.n_embd), np.float32)
            assert (picks == expected).all()
            assert all((context.logits(r) == b).all() for r, b in zip(LAST, before, strict=True))
            context.truncate(0)
            products = states @ dense(head).T
            if head.bias is not None:
                products = products + head.bias
            assert (products.argmax(axis=1) == picks).all()
            for row, logits in zip(LAST, before, strict=True):
                # a positive factor and a cap keep the order; so they nearly keep the correlation
                assert np.corrcoef(products[row], logits)[0, 1] > 0.99
            again, _ = context.evaluate(tokens, plan)
            assert (again == expected).all()
            assert all((context.logits(r) == b).all() for r, b in zip(LAST, before, strict=True))
            context.truncate(0)


@pytest.mark.parametrize("name", ["llama-dense", "phi2-dense", "gemma2-dense"])
def test_what_is_certified_is_picked(name: str, tiny_models: Path, patched_library: Path) -> None:
    path = tiny_models / f"{name}.gguf"
    head = GgufHead(inspect(path))
    with (
        open_model(path) as model,
        open_context(model, ctx_tokens=256, kv_type="f32", flash_attn="off") as context,
    ):
        n = len(context.sublayers)
        plans = [Plan.full(n), *(Plan.skipping(n, [i]) for i in range(n))]
        window = target_text(context, text(20, context.n_vocab), 40)
        context.truncate(0)
        found = certify(context, head, plans, window)
        assert context.n_past == 0
        assert found.head_agreement == 1.0
        assert found.plans[0].loose == found.plans[0].tight == found.plans[0].agreed == 40
        for result in found.plans:
            assert result.loose <= result.tight <= result.agreed
            assert result.broken == 0


def test_a_head_that_llama_cpp_uses_otherwise_is_noticed(
    tiny_models: Path, patched_library: Path
) -> None:
    """This file has a bias of the head that its architecture leaves out."""
    path = tiny_models / "qwen2vl-dense.gguf"
    with (
        open_model(path) as model,
        open_context(model, ctx_tokens=256, kv_type="f32", flash_attn="off") as context,
    ):
        window = target_text(context, text(20, context.n_vocab), 40)
        context.truncate(0)
        with pytest.raises(ModelError, match="something else lies between them"):
            certify(context, GgufHead(inspect(path)), [], window)


def test_models_without_states_are_refused(tiny_models: Path, patched_library: Path) -> None:
    with (
        open_model(tiny_models / "mamba-dense.gguf") as model,
        open_context(model, ctx_tokens=256) as context,
        pytest.raises(PlanError, match="recurrent state"),
    ):
        context.final_states([1, 2, 3])


def test_the_head_is_read_as_gguf_reads_it(tiny_models: Path) -> None:
    for name in ("llama-dense", "gemma2-dense", "phi2-dense"):
        path = tiny_models / f"{name}.gguf"
        info = inspect(path)
        head = GgufHead(info)
        tensors = {t.name: t for t in gguf.GGUFReader(path).tensors}
        weight = tensors["token_embd.weight" if info.tied_embeddings else "output.weight"]
        assert (dense(head) == weight.data).all()
        assert (head.take(np.array([5, 2])) == weight.data[[5, 2]]).all()
        assert (head.bias is None) == ("output.bias" not in tensors)
        if head.bias is not None:
            assert (head.bias == tensors["output.bias"].data).all()
        assert find_tensor(info, "no.such.tensor") is None


def test_a_head_of_an_unknown_type_is_refused(
    tiny_models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise NotImplementedError

    monkeypatch.setattr(gguf.quants, "dequantize", refuse)
    with pytest.raises(ModelError, match="weights of type F32 cannot be dequantised"):
        GgufHead(inspect(tiny_models / "llama-dense.gguf"))


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("file_type", ["F32", "Q4_1"])
def test_demo_model(file_type: str, patched_library: Path) -> None:
    try:
        name = models.default_model().name
        path = models.obtain(name) if file_type == "Q4_1" else converted(name, file_type)
    except DownloadError as error:
        pytest.skip(f"the demo model cannot be fetched: {error}")
    settings: dict[str, Any] = {"kv_type": "f32", "flash_attn": "off"} if file_type == "F32" else {}
    head = GgufHead(inspect(path))
    with open_model(path) as model, open_context(model, ctx_tokens=256, **settings) as context:
        n = len(context.sublayers)
        prompt = model.tokenize("The harbour town wakes before the sun does. ", parse_special=False)
        window = target_text(context, prompt, 24)
        context.truncate(0)
        plans = [Plan.full(n), Plan.skipping(n, [34]), Plan.skipping(n, [10, 30])]
        found = certify(context, head, plans, window)
    assert (found.n_embd, found.n_vocab) == (576, 49152)
    assert found.head_agreement >= (1.0 if file_type == "F32" else 0.9)
    assert found.plans[0].tight >= 23
    for result in found.plans:
        assert result.loose <= result.tight <= result.agreed + result.broken
        assert result.broken <= (0 if file_type == "F32" else 1)
    assert 0.0 < found.room_loose < found.room_tight < 0.1
