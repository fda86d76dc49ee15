"""Another build of llama.cpp, decoding greedily in a process of its own.

Run as a program, never imported: two builds in one process would mix. It knows llama.cpp's public
interface only, through llama-cpp-python and whatever LLAMA_CPP_LIB_PATH names. One request per line
of standard input, one answer per line of standard output, both JSON.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from typing import Any

import numpy as np


class Peer:
    """A model and a context of the build under comparison."""

    def __init__(self, settings: dict[str, Any]) -> None:
        import llama_cpp.llama_cpp as llama

        self.llama = llama
        # native logs would go to standard error, where the user watches progress
        self._silent = llama.llama_log_callback(lambda level, text, data: None)
        llama.llama_log_set(self._silent, None)
        llama.llama_backend_init()
        parameters = llama.llama_model_default_params()
        parameters.n_gpu_layers = settings["gpu_layers"]
        self.model = llama.llama_model_load_from_file(os.fsencode(settings["model"]), parameters)
        if not self.model:
            raise RuntimeError(f"it cannot load {settings['model']}")
        self.n_vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self.model))
        self.slice_tokens = settings["slice_tokens"]
        parameters = llama.llama_context_default_params()
        parameters.n_ctx = settings["ctx_tokens"]
        parameters.n_batch = parameters.n_ubatch = self.slice_tokens
        parameters.n_seq_max = 1
        parameters.n_outputs_max = settings["max_rows"]
        parameters.n_threads = settings["threads"]
        parameters.n_threads_batch = settings["threads_batch"]
        parameters.type_k = parameters.type_v = settings["kv_type"]
        parameters.flash_attn_type = settings["flash_attn"]
        parameters.no_perf = True
        parameters.swa_full = False
        self.context = llama.llama_init_from_model(self.model, parameters)
        if not self.context:
            raise RuntimeError("it cannot create the context")
        self.memory = llama.llama_get_memory(self.context)
        self.batch = llama.llama_batch_init(self.slice_tokens, 0, 1)

    def decode(self, tokens: list[int], position: int, last: bool) -> None:
        batch = self.batch
        for i, token in enumerate(tokens):
            batch.token[i] = token
            batch.pos[i] = position + i
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = 0
            batch.logits[i] = last and i == len(tokens) - 1
        batch.n_tokens = len(tokens)
        code = self.llama.llama_decode(self.context, batch)
        if code:
            raise RuntimeError(f"llama_decode returned {code}")

    def pick(self) -> int:
        row = np.ctypeslib.as_array(
            ctypes.cast(self.llama.llama_get_logits(self.context), ctypes.POINTER(ctypes.c_float)),
            shape=(self.n_vocab,),
        )
        return int(row.argmax())

    def answer(self, prompt: list[int], max_tokens: int, ends: list[int]) -> dict[str, Any]:
        """Greedy answer with its times. Nothing of an earlier prompt is reused."""
        self.llama.llama_memory_clear(self.memory, True)
        started = time.perf_counter()
        for at in range(0, len(prompt), self.slice_tokens):
            part = prompt[at : at + self.slice_tokens]
            self.decode(part, at, at + len(part) == len(prompt))
        tokens = [self.pick()]
        first = time.perf_counter()
        stop = set(ends)
        while len(tokens) < max_tokens and tokens[-1] not in stop:
            self.decode([tokens[-1]], len(prompt) + len(tokens) - 1, True)
            tokens.append(self.pick())
        return {
            "tokens": tokens,
            "prompt_ms": 1000.0 * (first - started),
            "predicted_ms": 1000.0 * (time.perf_counter() - first),
        }


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever native code prints is no answer
    peer = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if peer is None:
                peer = Peer(request)
                reply: dict[str, Any] = {"ready": True}
            else:
                reply = peer.answer(request["prompt"], request["max_tokens"], request["ends"])
        except (RuntimeError, OSError, ImportError, AttributeError) as error:
            reply = {"error": str(error)}
        answers.write(json.dumps(reply) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
