"""What sublayers work on, cells filled without computing, passes without logits, threads."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from knapspec_edge.errors import ContextError, UsageError
from knapspec_edge.latency.classes import layer_classes
from knapspec_edge.native import bindings, open_context, open_model
from knapspec_edge.records import Kind, Plan, Sampling

from .oracle import TOKENS

GREEDY = Sampling()
# Files of the generator that are named after experts and have none.
WITHOUT_EXPERTS = {"ernie4_5-moe", "paddleocr-moe"}


@pytest.fixture(scope="module")
def looked(patched_library: Path, tiny_models: Path) -> dict[str, dict[str, Any]]:
    """What fill_worker.py found, by model."""
    worker = Path(__file__).with_name("fill_worker.py")
    models = [str(path) for path in sorted(tiny_models.glob("*.gguf"))]
    found: dict[str, dict[str, Any]] = {}
    while models:
        run = subprocess.run(
            [sys.executable, str(worker), *models], capture_output=True, text=True, check=False
        )
        lines = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
        found.update({line["name"]: line for line in lines})
        if run.returncode == 0:
            break
        # the one that it died of is the last that was begun
        models = models[len({line["name"] for line in lines}) :]
    return found


def recognised(looked: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {name: found for name, found in looked.items() if "traits" in found}


def test_no_model_is_taken_down_by_a_fill(looked: dict[str, dict[str, Any]]) -> None:
    assert len(looked) >= 128
    assert [name for name, found in looked.items() if "begun" in found] == []
    assert {name: found["error"] for name, found in looked.items() if "error" in found} == {}
    assert len(recognised(looked)) >= 100


def test_after_a_fill_passes_work_at_the_right_place(looked: dict[str, dict[str, Any]]) -> None:
    for name, found in recognised(looked).items():
        # a fill to 50, then one, three and three tokens; cut and filled again where that works
        assert found["past"] in ([50, 57, 100], [50, 57]), name
        assert found["finite"], name


def test_nothing_of_filled_cells_survives(looked: dict[str, dict[str, Any]]) -> None:
    """After an emptied cache the logits are those of a fresh context, bit for bit."""
    wrong = [name for name, found in recognised(looked).items() if not found["as_fresh"]]
    assert wrong == []


def test_every_sublayer_has_traits(looked: dict[str, dict[str, Any]]) -> None:
    for name, found in recognised(looked).items():
        assert len(found["traits"]) == len(found["kinds"]), name
        for kind, traits in zip(found["kinds"], found["traits"], strict=True):
            assert traits["weight_bytes"] > 0, name
            assert traits["device"], name
            if kind == "mlp":
                assert (traits["cell_bytes"], traits["n_cells"]) == (0, 0), name
            if kind == "attention":
                assert traits["cell_bytes"] > 0, name
                assert traits["n_cells"] > 0, name


def test_experts_are_seen(looked: dict[str, dict[str, Any]]) -> None:
    for name, found in recognised(looked).items():
        has = any(t["n_experts"] >= t["n_experts_used"] > 0 for t in found["traits"])
        assert has == (name.endswith("-moe") and name not in WITHOUT_EXPERTS), name


@pytest.mark.parametrize(
    "name",
    ["llama-dense", "qwen3-dense", "gemma3-dense", "gpt2-dense", "falcon-dense", "phi2-dense",
     "qwen3moe-moe", "gpt-oss-moe"],
)  # fmt: skip
def test_weights_of_all_sublayers_are_those_of_the_file(
    looked: dict[str, dict[str, Any]], name: str
) -> None:
    """Keys and values too, which are computed beside the residual chain."""
    total = sum(t["weight_bytes"] for t in looked[name]["traits"])
    assert total == pytest.approx(looked[name]["layer_bytes"], rel=0.02)


def test_equal_layers_have_equal_signatures(looked: dict[str, dict[str, Any]]) -> None:
    def signatures(name: str, kind: str) -> list[int]:
        found = looked[name]
        pairs = zip(found["kinds"], found["traits"], strict=True)
        return [t["signature"] for k, t in pairs if k == kind]

    for name in ("llama-dense", "qwen2-dense", "mistral3-dense"):
        attention, mlp = set(signatures(name, "attention")), set(signatures(name, "mlp"))
        assert len(signatures(name, "attention")) > 1
        assert (len(attention), len(mlp)) == (1, 1), name
        assert attention != mlp
    # layers with and without a sliding window take turns
    for name in ("gemma3-dense", "gpt-oss-moe"):
        assert len(set(signatures(name, "attention"))) == 2, name
        assert len(set(signatures(name, "mlp"))) == 1, name


def test_windows_hold_fewer_cells(patched_library: Path, tiny_models: Path) -> None:
    path = tiny_models / "gemma3-dense.gguf"
    with open_model(path) as model, open_context(model, ctx_tokens=4096) as context:
        classes = layer_classes(context.sublayers, context.traits, 6)
        cells = sorted(c.n_cells for c in classes if c.kind is Kind.ATTENTION)
        assert len(cells) == 2
        # those beside the context, in whole steps of the cache, come on top
        assert cells[0] < 4096 <= cells[1] <= 4096 + 2 * 256


@pytest.fixture(params=["llama-dense", "gemma3-dense", "qwen3moe-moe", "phi2-dense"])
def backend(
    request: pytest.FixtureRequest, patched_library: Path, tiny_models: Path
) -> Iterator[Any]:
    path = tiny_models / f"{request.param}.gguf"
    settings = {"ctx_tokens": 256, "threads": 1, "kv_type": "f32", "flash_attn": "off"}
    with open_model(path) as model, open_context(model, **settings) as context:
        yield context


def test_a_sublayer_that_does_not_exist_has_no_traits(backend: Any) -> None:
    lib, n = backend._lib, len(backend.sublayers)
    for index in (-1, n, 2**31 - 1):
        read = bindings.Traits()
        read.weight_bytes = 77
        assert lib.knapspec_sublayer_traits(backend.pointer, index, ctypes.byref(read)) != 0
        assert read.weight_bytes == 77
    assert lib.knapspec_sublayer_traits(backend.pointer, n - 1, ctypes.byref(read)) == 0


def test_a_fill_beyond_the_context_changes_nothing(backend: Any) -> None:
    backend.prefill(TOKENS, GREEDY)
    with pytest.raises(ContextError, match="--ctx"):
        backend.fill(257)
    assert backend.n_past == len(TOKENS)
    backend.decode(7, GREEDY)
    after = backend.logits()
    backend.truncate(0)
    backend.prefill(TOKENS, GREEDY)
    backend.decode(7, GREEDY)
    assert np.array_equal(after, backend.logits())


def test_a_fill_to_the_last_cell(backend: Any) -> None:
    backend.fill(256)
    assert backend.n_past == 256
    with pytest.raises(ContextError):
        backend.decode(1, GREEDY)
    backend.truncate(0)
    backend.fill(0)
    assert backend.n_past == 0
    backend.fill(255)
    backend.decode(1, GREEDY)
    assert backend.n_past == 256


def test_a_fill_does_not_shrink_the_cache(backend: Any) -> None:
    backend.prefill(TOKENS, GREEDY)
    with pytest.raises(ValueError, match="in the cache already"):
        backend.fill(3)
    assert backend.n_past == len(TOKENS)


def test_a_fill_behind_text(backend: Any) -> None:
    """The text before it is still there once the filled cells are cut."""
    backend.prefill(TOKENS, GREEDY)
    backend.decode(7, GREEDY)
    expected = backend.logits()
    backend.truncate(len(TOKENS))
    backend.fill(40)
    backend.decode(9, GREEDY)
    backend.truncate(len(TOKENS))
    backend.decode(7, GREEDY)
    assert np.array_equal(backend.logits(), expected)


def test_a_pass_without_logits_leaves_the_same_keys(backend: Any) -> None:
    backend.evaluate(TOKENS[:-1])
    backend.decode(TOKENS[-1], GREEDY)
    expected = backend.logits()
    backend.truncate(0)
    backend.append(TOKENS[:-1])
    assert backend.n_past == len(TOKENS) - 1
    with pytest.raises(IndexError):
        backend.logits()
    backend.decode(TOKENS[-1], GREEDY)
    assert np.array_equal(backend.logits(), expected)
    # another shape of pass rounds differently, at most
    backend.truncate(0)
    backend.prefill(TOKENS, GREEDY)
    assert np.allclose(backend.logits(), expected, atol=1e-4)


def test_a_pass_without_logits_honours_the_plan(backend: Any) -> None:
    n = len(backend.sublayers)
    plan = Plan.skipping(n, [0])
    rows = []
    for chosen in (None, plan):
        backend.append(TOKENS, chosen)
        backend.decode(7, GREEDY, chosen)
        rows.append(backend.logits())
        backend.truncate(0)
    backend.evaluate(TOKENS, plan)
    backend.decode(7, GREEDY, plan)
    assert np.array_equal(backend.logits(), rows[1])
    assert not np.array_equal(rows[0], rows[1])


def test_threads_can_change_between_passes(backend: Any) -> None:
    llama = backend._llama
    backend.set_threads(2)
    assert (backend.settings["threads"], backend.settings["threads_batch"]) == (2, 2)
    assert llama.llama_n_threads(backend.pointer) == 2
    backend.set_threads(1, 3)
    assert (backend.settings["threads"], backend.settings["threads_batch"]) == (1, 3)
    assert llama.llama_n_threads(backend.pointer) == 1
    assert llama.llama_n_threads_batch(backend.pointer) == 3
    for wrong in ((0,), (513,), (-1,), (1, 0), (1, 513)):
        with pytest.raises(UsageError, match="--threads must be in"):
            backend.set_threads(*wrong)
        assert (backend.settings["threads"], backend.settings["threads_batch"]) == (1, 3)
        assert llama.llama_n_threads_batch(backend.pointer) == 3
    backend.prefill(TOKENS, GREEDY)
