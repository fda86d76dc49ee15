"""Planted models: what is planted does next to nothing, and leaving it out changes no pick."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray
from scripted_tools import load

from knapspec_edge import models
from knapspec_edge.errors import DownloadError
from knapspec_edge.native import open_context, open_model
from knapspec_edge.quantize import converted
from knapspec_edge.records import GREEDY, Plan
from knapspec_edge.search.acceptance import judge
from knapspec_edge.text.templates import choose_template

plant_model = load("plant_model")
check_search = load("check_search")

TOKENS = [3, 17, 42, 5, 99, 64, 23, 8]
EXACT = {"kv_type": "f32", "flash_attn": "off"}


def logits(path: Path, skipped: Sequence[int] = ()) -> NDArray[np.float32]:
    """f32 [tokens, vocabulary], decoded one by one under a plan."""
    rows = []
    with open_model(path) as model, open_context(model, ctx_tokens=64, **EXACT) as context:
        plan = Plan.skipping(len(context.sublayers), list(skipped)) if skipped else None
        for token in TOKENS:
            context.decode(token, GREEDY, plan)
            rows.append(context.logits())
    return np.array(rows)


def planted(*arguments: str) -> None:
    assert plant_model.main(list(arguments)) == 0


@pytest.mark.parametrize("name", ["llama-dense", "llama-moe", "qwen2-dense", "qwen3-dense"])
def test_layers_that_do_nothing_change_nothing(
    name: str, tiny_models: Path, patched_library: Path, tmp_path: Path
) -> None:
    """With a factor of 0 the deep model computes bit for bit what its source does."""
    source, target = tiny_models / f"{name}.gguf", tmp_path / "deep.gguf"
    planted("--model", str(source), "-o", str(target), "--insert", "3", "--type", "F32",
            "--factor", "0")  # fmt: skip
    record = plant_model.read_record(target)
    expected = logits(source)
    assert np.array_equal(logits(target), expected)
    assert np.array_equal(logits(target, record.indices), expected)
    # leaving out anything else does change it
    kept = next(i for i in range(record.n_sublayers) if i not in record.indices)
    assert not np.array_equal(logits(target, [kept]), expected)


@pytest.mark.parametrize("name", ["llama-dense", "gemma3-dense", "qwen2-dense", "llama-moe"])
@pytest.mark.parametrize("item", ["attention:1", "mlp:0"])
def test_a_planted_sublayer_adds_as_little_as_asked(
    name: str, item: str, tiny_models: Path, patched_library: Path, tmp_path: Path
) -> None:
    source, target = tiny_models / f"{name}.gguf", tmp_path / "planted.gguf"
    planted("--model", str(source), "-o", str(target), "--plant", item, "--type", "F32",
            "--factor", "0.001")  # fmt: skip
    record = plant_model.read_record(target)
    assert len(record.indices) == 1
    without = logits(target, record.indices)
    # what is left without it is what is left of the source without it
    assert np.array_equal(without, logits(source, record.indices))
    effect = np.abs(logits(source) - without).max()
    left = np.abs(logits(target) - without).max()
    assert 0.0 < left < 0.01 * effect


def test_the_written_file_is_the_source_but_for_what_was_planted(
    tiny_models: Path, patched_library: Path, tmp_path: Path
) -> None:
    source, target = tiny_models / "llama-dense.gguf", tmp_path / "both.gguf"
    planted("--model", str(source), "-o", str(target), "--insert", "1", "--plant", "mlp:1",
            "--type", "F32")  # fmt: skip
    record = plant_model.read_record(target)
    before, after = gguf.GGUFReader(source), gguf.GGUFReader(target)
    n_layers = before.get_field("llama.block_count").contents()
    assert after.get_field("llama.block_count").contents() == n_layers + 1 == record.n_layers
    assert record.model == "both.gguf"
    assert record.source == "llama-dense.gguf"
    assert record.inserted_layers == ((n_layers - 1) // 2 + 1,)
    for key in ("tokenizer.ggml.tokens", "tokenizer.ggml.model", "llama.context_length"):
        field = before.get_field(key)
        assert (field and field.contents()) == (after.get_field(key) or field).contents()
    layers = plant_model.layout(n_layers, 1)
    weights = {t.name: t.data for t in before.tensors}
    planted_at = {(p.layer, p.kind) for p in record.planted}
    changed = set()
    for tensor in after.tensors:
        parts = tensor.name.split(".")
        own = tensor.name
        if parts[0] == "blk":
            own = ".".join(["blk", str(layers[int(parts[1])].source), *parts[2:]])
        if not np.array_equal(tensor.data, weights[own]):
            kind = {"attn_output": "attention", "ffn_down": "mlp"}[parts[2]]
            changed.add((int(parts[1]), kind))
            assert np.array_equal(tensor.data, weights[own] * np.float32(record.factor))
    assert changed == planted_at
    assert len(changed) == 3


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("gemma3-dense", ["--insert", "2"], "may depend on their number"),
        ("phi2-dense", ["--plant", "mlp:0"], "no mlp 0"),
        ("llama-dense", ["--plant", "attention:40"], "no attention 40"),
    ],
)
def test_what_cannot_be_planted_gets_one_line(
    name: str,
    arguments: list[str],
    words: str,
    tiny_models: Path,
    patched_library: Path,
    tmp_path: Path,
    capsys: Any,
) -> None:
    target = tmp_path / "x.gguf"
    assert (
        plant_model.main(["--model", str(tiny_models / f"{name}.gguf"), "-o", str(target)]
                         + arguments) == 2
    )  # fmt: skip
    shown = capsys.readouterr()
    assert words in shown.err
    assert shown.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_the_source_is_never_overwritten(
    tiny_models: Path, patched_library: Path, tmp_path: Path, capsys: Any
) -> None:
    source = tmp_path / "x.gguf"
    source.write_bytes((tiny_models / "llama-dense.gguf").read_bytes())
    before = source.read_bytes()
    assert plant_model.main(["--model", str(source), "-o", str(source), "--insert", "1"]) == 2
    assert source.read_bytes() == before


# ---------------------------------------------------------------------------------------------
# The demo model


def demo(file_type: str) -> Path:
    try:
        return converted(models.default_model().name, file_type)
    except DownloadError as error:
        pytest.skip(f"the demo model cannot be fetched: {error}")


def answer(context: Any, prompt: str, n_tokens: int) -> tuple[list[int], list[int]]:
    """The prompt's tokens and the model's own greedy ones."""
    template = choose_template(context.model, None)
    assert template is not None
    ids = template.apply([{"role": "user", "content": prompt}]).tokens
    context.truncate(0)
    tokens = [context.prefill(ids, GREEDY).token]
    while len(tokens) < n_tokens:
        tokens.append(context.decode(tokens[-1], GREEDY).token)
    return ids, tokens


PROMPTS = ("Why is the sky blue?", "Write a short story about a lighthouse keeper.")


@pytest.mark.model
@pytest.mark.slow
def test_the_deep_demo_model_chats_as_the_demo_does(patched_library: Path, tmp_path: Path) -> None:
    source, target = demo("F32"), tmp_path / "deep.gguf"
    planted("--model", str(source), "-o", str(target), "--insert", "3", "--type", "F32")
    record = plant_model.read_record(target)
    assert len(record.indices) == 6
    with open_model(source) as model, open_context(model, ctx_tokens=512, **EXACT) as context:
        expected = [answer(context, prompt, 32) for prompt in PROMPTS]
    with open_model(target) as model, open_context(model, ctx_tokens=512, **EXACT) as context:
        for prompt, (ids, tokens) in zip(PROMPTS, expected, strict=True):
            assert answer(context, prompt, 32) == (ids, tokens)
            context.truncate(len(ids))
            plan = Plan.skipping(record.n_sublayers, list(record.indices))
            (judgement,) = judge(context, tokens, [plan], 8)
            assert judgement.agreement == 1.0


def judged(context: Any, skipped: Sequence[int]) -> float:
    """Agreement of the draft that leaves these sublayers out."""
    plan = Plan.skipping(len(context.sublayers), list(skipped))
    agree: list[bool] = []
    for prompt in PROMPTS:
        ids, tokens = answer(context, prompt, 48)
        context.truncate(len(ids))
        agree += judge(context, tokens, [plan], 8)[0].agree
    return sum(agree) / len(agree)


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("file_type", ["F16", "Q4_0"])
def test_planted_sublayers_of_the_demo_model_can_be_left_out(
    file_type: str, patched_library: Path, tmp_path: Path
) -> None:
    """In quantized types, rounding alone turns near ties: also passes of another width do."""
    target = tmp_path / "planted.gguf"
    demo("F32")
    planted("-o", str(target), "--plant", "attention:5,11,20", "mlp:9,14", "--type", file_type)
    record = plant_model.read_record(target)
    assert record.indices == (10, 19, 22, 29, 40)
    weights = {t.name: t for t in gguf.GGUFReader(target).tensors}
    for name in ("blk.5.attn_output.weight", "blk.9.ffn_down.weight"):
        assert weights[name].tensor_type.name == file_type
        scaled, whole = (
            float(np.std(gguf.quants.dequantize(weights[n].data, weights[n].tensor_type)))
            for n in (name, name.replace("blk.5", "blk.6").replace("blk.9", "blk.10"))
        )
        assert 0.2 * record.factor < scaled / whole < 5 * record.factor
    with open_model(target) as model, open_context(model, ctx_tokens=512) as context:
        agreement = judged(context, record.indices)
    with open_model(demo(file_type)) as model, open_context(model, ctx_tokens=512) as context:
        unplanted = judged(context, record.indices)
    assert agreement >= (1.0 if file_type == "F16" else 0.85)
    assert unplanted <= agreement - 0.1


@pytest.mark.parametrize(
    ("command", "more"),
    [
        ("correlate", ["--plans", "3", "--contexts", "64"]),
        ("generators", ["--random", "1", "--contexts", "64"]),
        ("attention-share", ["--contexts", "64,96"]),
        ("planted", ["--at", "64"]),
    ],
)
def test_the_experiments_run_on_a_tiny_model(
    command: str, more: list[str], tiny_models: Path, patched_library: Path, tmp_path: Path,
    capsys: Any,
) -> None:  # fmt: skip
    """Random weights: nothing can be said about what they find, only that they find it."""
    target = tmp_path / "deep.gguf"
    planted("--model", str(tiny_models / "llama-dense.gguf"), "-o", str(target), "--insert", "2",
            "--type", "F32")  # fmt: skip
    capsys.readouterr()
    options = ["--budget", "0.5", "--profile-budget", "0.5", "--threads", "1"]
    status = check_search.main([command, str(target), *options, *more])
    shown = capsys.readouterr()
    if status:
        # a model of random weights may allow no plan at all
        assert "no sublayer can be left out" in shown.err
        return
    assert shown.out.count("| --- |") >= 1
    data = json.loads(shown.out.splitlines()[-1])
    assert data["command"] == command
