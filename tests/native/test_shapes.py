"""Files of scripts/make_shape.py: llama.cpp loads them, computes, and would mix the same types."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from scripted_tools import load

from knapspec_edge.native import open_context, open_model
from knapspec_edge.native.quantize import quantize_file
from knapspec_edge.records import Kind, Plan, Sampling

make_shape = load("make_shape")
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
