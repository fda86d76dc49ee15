"""One side of a comparison of backends, in a process of its own: `measure` or `serve`.

Which libraries it loads and which devices they see is set by the environment. scripts/backends.py
starts it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

CTX_TOKENS = 256
DRAFT_MAX_TOKENS = 2


def measure(request: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Compute what is compared. Returns (JSON-ready facts, arrays by name).

    `request`: model (path), gpu_layers (None: all), prompt (text), max_tokens, full (False: only
    the placement and the logits of the prompt). Arrays: prompt_logits f32 [tokens, vocabulary],
    draft_logits f32 [vocabulary] of the step after the prompt under a plan.
    """
    import numpy as np

    from knapspec_edge.decode.session import Session
    from knapspec_edge.native import open_context, open_model
    from knapspec_edge.native.devices import placement
    from knapspec_edge.records import Draft, Plan, Sampling

    greedy = Sampling()
    with (
        open_model(request["model"], gpu_layers=request["gpu_layers"]) as model,
        open_context(model, ctx_tokens=CTX_TOKENS, kv_type="f32", flash_attn="off") as backend,
    ):
        prompt = model.tokenize(request["prompt"], parse_special=True)
        facts: dict[str, Any] = {
            "placement": placement(backend),
            "refusal": backend.refusal,
            "n_sublayers": len(backend.sublayers),
            "n_prompt": len(prompt),
        }
        backend.evaluate(prompt)
        arrays = {"prompt_logits": np.stack([backend.logits(i) for i in range(len(prompt))])}
        if not request["full"]:
            return facts, arrays

        backend.truncate(0)
        picks = [backend.prefill(prompt, greedy)]
        while len(picks) < request["max_tokens"]:
            picks.append(backend.decode(picks[-1].token, greedy))
        facts["text"] = [pick.token for pick in picks]
        facts["margins"] = [pick.margin for pick in picks]
        facts["n_nodes"] = backend.graph_stats()["n_nodes"]

        backend.truncate(len(prompt))
        verified = backend.verify(facts["text"][:-1][: backend.max_verify_tokens], greedy)
        facts["verified"] = [pick.token for pick in verified]
        backend.truncate(len(prompt))
        if backend.refusal is not None:
            return facts, arrays

        count = len(backend.sublayers)
        plan = Plan.skipping(count, [count // 3, count // 2, count // 2 + 1])
        backend.decode(picks[0].token, greedy, plan)
        arrays["draft_logits"] = backend.logits()
        facts["n_nodes_plan"] = backend.graph_stats()["n_nodes"]
        backend.truncate(0)
        generation = Session(backend).generate(
            prompt,
            draft=Draft(plan, DRAFT_MAX_TOKENS, 0.0),
            max_tokens=request["max_tokens"],
            is_end=lambda token: False,
        )
        facts["drafted_text"] = [event.token for event in generation]
        facts["n_drafted"] = generation.stats.draft_n
        facts["n_accepted"] = generation.stats.draft_n_accepted
        return facts, arrays


def serve(folder: Path, endpoint: str, threads: int) -> None:
    """Offer the CPU of this process to RPC clients, until standard input closes.

    The parent's end of that pipe closes however it ends, so no server is left behind.
    """

    def end_with_parent() -> None:
        with contextlib.suppress(OSError):
            while os.read(0, 4096):
                pass
        os._exit(0)

    threading.Thread(target=end_with_parent, daemon=True).start()
    endings = {"win32": "{}.dll", "darwin": "lib{}.dylib"}
    ending = endings.get(sys.platform, "lib{}.so")
    ggml = ctypes.CDLL(os.fspath(folder / ending.format("ggml")))
    # ggml_backend_dev_t ggml_backend_dev_by_name(const char * name);
    ggml.ggml_backend_dev_by_name.restype = ctypes.c_void_p
    ggml.ggml_backend_dev_by_name.argtypes = [ctypes.c_char_p]
    device = ggml.ggml_backend_dev_by_name(b"CPU")
    rpc = ctypes.CDLL(os.fspath(folder / ending.format("ggml-rpc")))
    # void ggml_backend_rpc_start_server(const char * endpoint, const char * cache_dir,
    #     size_t n_threads, size_t n_devices, ggml_backend_dev_t * devices);
    rpc.ggml_backend_rpc_start_server.restype = None
    rpc.ggml_backend_rpc_start_server.argtypes = [
        ctypes.c_char_p,
        ctypes.c_char_p,
        ctypes.c_size_t,
        ctypes.c_size_t,
        ctypes.POINTER(ctypes.c_void_p),
    ]
    devices = (ctypes.c_void_p * 1)(device)
    # returns only where it cannot listen
    rpc.ggml_backend_rpc_start_server(endpoint.encode(), None, threads, 1, devices)


def main(arguments: list[str]) -> int:
    from knapspec_edge.errors import KnapspecError

    if arguments[0] == "serve":
        serve(Path(arguments[1]), arguments[2], int(arguments[3]))
        return 1
    import numpy as np

    try:
        facts, arrays = measure(json.loads(arguments[1]))
    except KnapspecError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    folder = Path(arguments[2])
    np.savez(folder / "arrays.npz", **arrays)
    (folder / "facts.json").write_text(json.dumps(facts), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
