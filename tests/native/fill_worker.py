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
CTX_TOKENS = 128  # tiny models that learn their positions know no more


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


def layer_bytes(path: Path, traits: list[dict[str, Any]]) -> int:
    """Bytes of all weights of the layers that one token needs; of experts those that are used."""
    used = {t["n_experts"]: t["n_experts_used"] for t in traits if t["n_experts"]}
    total = 0
    for tensor in gguf.GGUFReader(path).tensors:
        if tensor.name.startswith("blk."):
            size, count = int(tensor.n_bytes), int(tensor.shape[-1])
            if "_exps.weight" in tensor.name and count in used:
                size = size // count * used[count]
            total += size
    return total


def look(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with open_model(path) as model:
        with open_exact(model) as backend:
            if not backend.sublayers:
                return {"refusal": backend.refusal}
            fresh = answer(backend)
            found["kinds"] = [s.kind.value for s in backend.sublayers]
            found["traits"] = [vars(t) for t in backend.traits]
        found["layer_bytes"] = layer_bytes(path, found["traits"])
        with open_exact(model) as backend:
            backend.fill(50)
            past = [backend.n_past]
            backend.decode(5, GREEDY)
            backend.append([9, 4, 2])
            backend.verify([9, 4, 2], GREEDY)
            past.append(backend.n_past)
            if backend.refusal is None:
                n = len(backend.sublayers)
                backend.decode(8, GREEDY, Plan.skipping(n, [0]))
                backend.truncate(50)
                backend.fill(100)
                backend.evaluate([1, 2], Plan.skipping(n, [n - 1]))
                backend.truncate(100)
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
