"""A process that computes logits with one build of llama.cpp and answers on standard output.

Two builds cannot live in one process, so the comparison tests run one worker per build. A request
is one line of JSON, the answer one line of JSON that may announce raw float32 rows behind it.
It uses llama.cpp's public interface through llama-cpp-python (LLAMA_CPP_LIB_PATH names the
build); only requests with a plan need the patch.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from typing import Any

# native code and Python warnings may print: the answers get a descriptor of their own
_answers = os.fdopen(os.dup(1), "wb")
os.dup2(2, 1)

import llama_cpp.llama_cpp as llama  # noqa: E402
import numpy as np  # noqa: E402


def open_model(path: str) -> Any:
    parameters = llama.llama_model_default_params()
    parameters.n_gpu_layers = 0
    model = llama.llama_model_load_from_file(path.encode(), parameters)
    if not model:
        raise RuntimeError(f"cannot load {path}")
    return model


def open_context(model: Any, request: dict[str, Any]) -> Any:
    parameters = llama.llama_context_default_params()
    parameters.n_ctx = request.get("ctx_tokens", 256)
    parameters.n_batch = parameters.n_ubatch = request.get("batch_tokens", 64)
    parameters.n_seq_max = 1
    parameters.n_threads = parameters.n_threads_batch = 1
    parameters.flash_attn_type = request.get("flash_attn", -1)
    parameters.type_k = parameters.type_v = request.get("kv_type", 1)
    context = llama.llama_init_from_model(model, parameters)
    if not context:
        raise RuntimeError("cannot create a context")
    return context


def sublayers(context: Any) -> tuple[list[tuple[int, int]], str]:
    lib = llama._lib
    lib.knapspec_n_sublayers.argtypes = lib.knapspec_refusal.argtypes = [ctypes.c_void_p]
    lib.knapspec_refusal.restype = ctypes.c_char_p
    integer = ctypes.POINTER(ctypes.c_int32)
    lib.knapspec_sublayer.argtypes = [ctypes.c_void_p, ctypes.c_int32, integer, integer]
    layer, kind = ctypes.c_int32(), ctypes.c_int32()
    found = []
    for i in range(max(0, lib.knapspec_n_sublayers(context))):
        lib.knapspec_sublayer(context, i, ctypes.byref(layer), ctypes.byref(kind))
        found.append((layer.value, kind.value))
    return found, lib.knapspec_refusal(context).decode()


def set_plan(context: Any, modes: list[int]) -> None:
    lib = llama._lib
    lib.knapspec_set_plan.argtypes = [
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_int32,
        ctypes.c_void_p,
    ]
    code = lib.knapspec_set_plan(context, (ctypes.c_int32 * len(modes))(*modes), len(modes), None)
    if code:
        raise RuntimeError(f"the plan was refused with {code}")


def n_nodes(context: Any) -> int:
    lib = llama._lib
    lib.knapspec_get_graph_stats.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    stats = (ctypes.c_int64 * 5)()
    lib.knapspec_get_graph_stats(context, stats)
    return int(stats[3])


def compute(context: Any, model: Any, request: dict[str, Any]) -> np.ndarray:
    """Logits f32 [tokens, vocabulary] of request["tokens"], in slices of request["steps"]."""
    tokens, steps = request["tokens"], request["steps"]
    n_vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
    rows, position = [], 0
    batch = llama.llama_batch_init(max(steps), 0, 1)
    for step in steps:
        for i in range(step):
            batch.token[i] = tokens[position + i]
            batch.pos[i] = position + i
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = 0
            batch.logits[i] = True
        batch.n_tokens = step
        code = llama.llama_decode(context, batch)
        if code:
            raise RuntimeError(f"llama_decode returned {code} at position {position}")
        base = llama.llama_get_logits(context)
        rows.append(np.array(np.ctypeslib.as_array(base, shape=(step, n_vocab)), dtype=np.float32))
        position += step
    llama.llama_batch_free(batch)
    return np.concatenate(rows)


def answer(request: dict[str, Any]) -> tuple[dict[str, Any], np.ndarray | None]:
    model = open_model(request["model"])
    try:
        context = open_context(model, request)
        try:
            if request["do"] == "describe":
                found, refusal = sublayers(context)
                flags = {
                    "recurrent": bool(
                        llama.llama_model_is_recurrent(model) or llama.llama_model_is_hybrid(model)
                    ),
                    "diffusion": bool(llama.llama_model_is_diffusion(model)),
                }
                return {"sublayers": found, "refusal": refusal, **flags}, None
            if request.get("plan"):
                set_plan(context, request["plan"])
            logits = compute(context, model, request)
            nodes = n_nodes(context) if "plan" in request else None
            return {"shape": logits.shape, "nodes": nodes}, logits
        finally:
            llama.llama_free(context)
    finally:
        llama.llama_model_free(model)


def main() -> None:
    silent = llama.llama_log_callback(lambda level, text, data: None)
    if not os.environ.get("KNAPSPEC_EDGE_NATIVE_LOG"):
        llama.llama_log_set(silent, None)
    llama.llama_backend_init()
    for line in sys.stdin:
        try:
            header, rows = answer(json.loads(line))
        except RuntimeError as error:
            header, rows = {"error": str(error)}, None
        _answers.write(json.dumps(header).encode() + b"\n")
        if rows is not None:
            _answers.write(rows.astype("<f4").tobytes())
        _answers.flush()


if __name__ == "__main__":
    main()
