"""Fills and traits of many models, each in this process: one line of JSON per model.

A process of its own, since a model that fails an assertion of llama.cpp takes it down.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from knapspec_edge.errors import KnapspecError
from knapspec_edge.native import open_context, open_model
from knapspec_edge.records import Plan, Sampling

GREEDY = Sampling()
PROMPT = [3, 17, 42, 5, 99, 64, 23, 8, 110, 71, 12, 50]
CTX_TOKENS = 512


def open_exact(model: Any) -> Any:
    return open_context(model, ctx_tokens=CTX_TOKENS, threads=1, kv_type="f32", flash_attn="off")


def answer(backend: Any) -> np.ndarray:
    """Logits f32 [4, vocabulary] after a prompt and three more tokens."""
    backend.prefill(PROMPT, GREEDY)
    rows = [backend.logits()]
    for token in (7, 30, 11):
        backend.decode(token, GREEDY)
        rows.append(backend.logits())
    return np.stack(rows)


def weight_bytes(path: Path, used: dict[int, int]) -> tuple[int, int]:
    """Bytes of all tensors of the layers for one token, with and without those of experts.

    `used`: experts chosen, by how many there are."""
    dense = experts = 0
    for tensor in gguf.GGUFReader(path).tensors:
        if not tensor.name.startswith("blk."):
            continue
        count = int(tensor.shape[-1])
        if "_exps" in tensor.name and len(tensor.shape) == 3 and count in used:
            experts += int(tensor.n_bytes) // count * used[count]
        else:
            dense += int(tensor.n_bytes)
    return dense + experts, dense


def look(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with open_model(path) as model:
        with open_exact(model) as backend:
            if not backend.sublayers:
                return {"refusal": backend.refusal}
            fresh = answer(backend)
            traits = backend.traits
            found["sublayers"] = [[s.layer, s.kind.value] for s in backend.sublayers]
            found["traits"] = [vars(t) for t in traits]
        used = {t.n_experts: t.n_experts_used for t in traits if t.n_experts}
        found["file_bytes"], _ = weight_bytes(path, used)
        with open_exact(model) as backend:
            backend.fill(100)
            past = [backend.n_past]
            backend.decode(5, GREEDY)
            backend.append([9, 4, 2])
            backend.verify([9, 4, 2], GREEDY)
            past.append(backend.n_past)
            if backend.refusal is None:
                n = len(backend.sublayers)
                backend.decode(8, GREEDY, Plan.skipping(n, [0]))
                backend.truncate(100)
                backend.fill(400)
                backend.evaluate([1, 2], Plan.skipping(n, [n - 1]))
                backend.truncate(400)
                past.append(backend.n_past)
            found["finite"] = bool(np.isfinite(backend.logits()).all())
            found["past"] = past
            backend.truncate(0)
            found["as_fresh"] = bool(np.array_equal(answer(backend), fresh))
    return found


def main() -> None:
    for name in sys.argv[1:]:
        path = Path(name)
        print(json.dumps({"name": path.stem, "begun": True}), flush=True)
        try:
            found = look(path)
        except KnapspecError as error:
            found = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps({"name": path.stem, **found}), flush=True)


if __name__ == "__main__":
    main()
