"""Files of scripts/make_shape.py: llama.cpp loads them, computes, and would mix the same types."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
from scripted_tools import load

from knapspec_edge.native import open_context, open_model
from knapspec_edge.native.quantize import quantize_file
from knapspec_edge.records import Kind, Plan, Sampling

make_shape = load("make_shape")
check_latency = load("check_latency")
GREEDY = Sampling()
MOE = ["--experts", "4", "--experts-used", "2"]


def write(target: Path, file_type: str, *changes: str) -> Path:
    arguments = ["tiny", "--type", file_type, "-o", str(target), *changes]
    assert make_shape.main(arguments) == 0
    return target


@pytest.mark.parametrize("changes", [[], ["--tied"], MOE], ids=["untied", "tied", "experts"])
@pytest.mark.parametrize("file_type", make_shape.FILE_TYPES)
def test_every_type_loads_and_computes_finite_logits(patched_library, tmp_path, file_type, changes):
    path = write(tmp_path / "shape.gguf", file_type, *changes)
    with open_model(path) as model, open_context(model, ctx_tokens=64, threads=1) as backend:
        assert backend.refusal is None
        assert [s.kind for s in backend.sublayers] == [Kind.ATTENTION, Kind.MLP] * 2
        assert model.n_vocab == 512
        prompt = model.tokenize("any text at all", parse_special=False)
        backend.prefill(prompt[:20], GREEDY)
        spread = []
        for token in range(300, 320):
            backend.decode(token, GREEDY)
            logits = backend.logits()
            assert np.isfinite(logits).all()
            spread.append(float(np.std(logits)))
        assert min(spread) > 0.1
        assert max(spread) < 10.0
        backend.decode(7, GREEDY, Plan.skipping(4, [1, 2]))


@pytest.mark.parametrize("changes", [[], ["--tied"], MOE], ids=["untied", "tied", "experts"])
@pytest.mark.parametrize("file_type", ["Q8_0", "Q4_0", "Q4_1", "Q4_K_M"])
def test_types_are_those_of_the_quantizer(patched_library, tmp_path, file_type, changes):
    """The IQ types are left out: the quantizer wants an importance matrix for them."""
    layers = ["--layers", "9"]  # not a multiple of eight: the rules round
    source = write(tmp_path / "f16.gguf", "F16", *layers, *changes)
    quantize_file(source, tmp_path / "theirs.gguf", file_type, threads=1)
    ours = write(tmp_path / "ours.gguf", file_type, *layers, *changes)

    def types(path: Path) -> dict[str, tuple[str, list[int]]]:
        tensors = gguf.GGUFReader(path).tensors
        return {t.name: (t.tensor_type.name, t.shape.tolist()) for t in tensors}

    assert types(ours) == types(tmp_path / "theirs.gguf")


def test_predictions_are_checked_on_a_shape(patched_library, tmp_path, capsys):
    path, report = write(tmp_path / "shape.gguf", "Q4_K_M"), tmp_path / "report.json"
    # fmt: off
    arguments = [
        str(path), "--ctx", "1024", "--budget", "1", "--plans", "2", "--widths", "2",
        "--contexts", "2", "--repeats", "2", "--threads", "1", "--json", str(report),
    ]
    # fmt: on
    assert check_latency.main(arguments) == 0
    assert "| draft step | all | 4 |" in capsys.readouterr().out
    data = json.loads(report.read_text(encoding="utf-8"))
    assert data["settings"]["ctx_tokens"] == 1024
    drafts = [p for p in data["passes"] if p["what"]["width"] == 1]
    assert len(drafts) == 2 * 2
    # a busy machine may leave the profile no time for the wide ones
    assert len(data["passes"]) - len(drafts) >= 2
    assert {len(p["samples_ms"]) for p in data["passes"]} == {2}
    assert all(ms > 0.0 for p in data["passes"] for ms in p["samples_ms"])


def test_filled_cells_are_compared_on_a_shape(patched_library, tmp_path, capsys):
    path, report = write(tmp_path / "shape.gguf", "Q8_0"), tmp_path / "report.json"
    arguments = [str(path), "--ctx", "512", "--threads", "1", "--json", str(report)]
    assert check_latency.main([*arguments, "--check-fill", "300", "100"]) == 0
    found = json.loads(report.read_text(encoding="utf-8"))["fill"]
    assert [(r["context_tokens"], r["width"]) for r in found] == [
        (100, 1),
        (100, 8),
        (300, 1),
        (300, 8),
    ]
    assert all(r["low"] <= r["median"] <= r["high"] for r in found)
    assert capsys.readouterr().out.count("| 300 | 8 |") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--ctx", "100"], "--ctx 100 is too small"),
        (["--ctx", "256", "--check-fill", "250"], "--check-fill 250"),
        (["--kv-type", "q3"], "--kv-type q3"),
    ],
)
def test_bad_settings_get_one_line(patched_library, tmp_path, capsys, arguments, words):
    path = write(tmp_path / "shape.gguf", "Q8_0")
    capsys.readouterr()
    assert check_latency.main([str(path), *arguments]) == 2
    shown = capsys.readouterr()
    assert words in shown.err
    assert shown.err.count("\n") == 1
