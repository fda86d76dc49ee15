"""Stands in for the Python of another environment: a fake ik_llama_cpp or llama_cpp, no libraries.

Run as `scripted_peer.py MODE SCRIPT`, by an executable that a test writes: it runs the real worker
program SCRIPT with nothing but the bindings that MODE asks for. The scripted model picks the token
(last token + position) modulo 50 behind every token, with a logit 3 above all others.

MODE: "new" and "old", names of llama.cpp's interface today and years ago; "ik", that of
ik-llama-cpp-python; "none", no bindings; "broken", bindings that do not load; "incomplete",
bindings whose dependency is missing; "no-model", it cannot load a model; "no-context"; "full", its
cache is full at once; "abort", it dies of a failed assertion while it decodes; "killed".
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys
from types import ModuleType
from typing import Any

N_VOCAB = 50


class Hidden:
    """No bindings but those given here, whatever is installed."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.split(".")[0] in ("llama_cpp", "ik_llama_cpp"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name.split(".")[0])


class ModelParameters(ctypes.Structure):
    _fields_ = [("n_gpu_layers", ctypes.c_int32)]  # noqa: RUF012


def context_parameters(mode: str) -> type[ctypes.Structure]:
    names = ["n_ctx", "n_batch", "n_ubatch", "n_seq_max", "n_threads", "n_threads_batch"]
    fields: list[tuple[str, Any]] = [(name, ctypes.c_uint32) for name in names]
    fields += [("type_k", ctypes.c_int), ("type_v", ctypes.c_int)]
    if mode in ("ik", "old"):
        fields += [("flash_attn", ctypes.c_bool)]
    else:
        fields += [("flash_attn_type", ctypes.c_int), ("n_outputs_max", ctypes.c_uint32)]
    return type("ContextParameters", (ctypes.Structure,), {"_fields_": fields})


class Batch(ctypes.Structure):
    _fields_ = [  # noqa: RUF012
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.POINTER(ctypes.c_int32)),
        ("pos", ctypes.POINTER(ctypes.c_int32)),
        ("n_seq_id", ctypes.POINTER(ctypes.c_int32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    ]


def new_batch(size: int, _embd: int, _n_seq_max: int) -> Batch:
    rows = [(ctypes.c_int32 * 1)() for _ in range(size)]
    batch = Batch(0)
    for name in ("token", "pos", "n_seq_id"):
        setattr(batch, name, (ctypes.c_int32 * size)())
    batch.seq_id = (ctypes.POINTER(ctypes.c_int32) * size)(
        *(ctypes.cast(r, ctypes.POINTER(ctypes.c_int32)) for r in rows)
    )  # noqa: E501
    batch.logits = (ctypes.c_int8 * size)()
    return batch


class Llama:
    """What the scripted library does, under its newest names."""

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self.n_past = 0
        self.rows: dict[int, Any] = {}

    def llama_backend_init(self) -> None: ...

    def llama_model_default_params(self) -> ModelParameters:
        return ModelParameters(-1)

    def llama_model_load_from_file(self, path: bytes, _parameters: Any) -> int:
        return int(self.mode != "no-model" and os.path.exists(path))

    def llama_model_get_vocab(self, _model: int) -> int:
        return 2

    def llama_vocab_n_tokens(self, _vocabulary: int) -> int:
        return N_VOCAB

    def llama_context_default_params(self) -> Any:
        return context_parameters(self.mode)()

    def llama_init_from_model(self, _model: int, parameters: Any) -> int:
        print("noise of native code", flush=True)
        os.write(1, b"more of it\n")
        values = {name: getattr(parameters, name) for name, _ in parameters._fields_}
        if path := os.environ.get("SCRIPTED_PEER_SETTINGS"):
            with open(path, "w") as file:
                file.write(repr(values))
        self.n_ctx = parameters.n_ctx
        return 0 if self.mode == "no-context" else 3

    def llama_get_memory(self, _context: int) -> int:
        return 4

    def llama_memory_clear(self, memory: int, _data: bool) -> None:
        assert memory == 4
        self.n_past = 0

    def llama_batch_init(self, size: int, embd: int, n_seq_max: int) -> Batch:
        return new_batch(size, embd, n_seq_max)

    def llama_decode(self, _context: int, batch: Batch) -> int:
        if self.mode == "abort":
            os.write(2, b"x.cpp:7: GGML_ASSERT(S > 0) failed\n[New LWP 12]\n#0 a frame\n")
            os.abort()
        if self.mode == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        self.rows = {}
        for i in range(batch.n_tokens):
            assert batch.pos[i] == self.n_past
            assert (batch.n_seq_id[i], batch.seq_id[i][0]) == (1, 0)
            if self.n_past == (0 if self.mode == "full" else self.n_ctx):
                return 1
            if batch.logits[i]:
                row = (ctypes.c_float * N_VOCAB)()
                row[(batch.token[i] + self.n_past) % N_VOCAB] = 3.0
                self.rows[i] = row
            self.n_past += 1
        return 0

    def llama_get_logits_ith(self, _context: int, i: int) -> Any:
        return ctypes.cast(self.rows[i], ctypes.POINTER(ctypes.c_float))


# what names of today were called
OLD = {
    "llama_model_load_from_file": "llama_load_model_from_file",
    "llama_init_from_model": "llama_new_context_with_model",
}


def bindings(mode: str, name: str) -> ModuleType:
    module = ModuleType(name)
    llama = Llama(mode)
    old = mode == "old"
    for function in dir(llama):
        if function.startswith("llama_"):
            called = OLD.get(function, function) if old else function
            setattr(module, called, getattr(llama, function))
    if mode in ("old", "ik"):
        del module.llama_get_memory, module.llama_memory_clear
        module.llama_kv_cache_clear = lambda _: llama.llama_memory_clear(4, True)  # type: ignore[attr-defined]
    if old:
        del module.llama_model_get_vocab, module.llama_vocab_n_tokens
        module.llama_n_vocab = llama.llama_vocab_n_tokens  # type: ignore[attr-defined]
    return module


class Failing:
    """Finds the package, but what it imports fails."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.split(".")[0] == "llama_cpp":
            raise self.error


def main(mode: str, script: str) -> None:
    sys.meta_path.insert(0, Hidden())  # type: ignore[arg-type]
    if mode == "broken":
        sys.meta_path.insert(0, Failing(RuntimeError("libllama.so: no such\nfile")))  # type: ignore[arg-type]
    elif mode == "incomplete":
        sys.meta_path.insert(0, Failing(ModuleNotFoundError("No x", name="diskcache")))  # type: ignore[arg-type]
    elif mode != "none":
        package = "ik_llama_cpp" if mode == "ik" else "llama_cpp"
        inner = "_ctypes_api" if mode == "ik" else "llama_cpp"
        outer = ModuleType(package)
        outer.__path__ = []
        outer.__version__ = "9.9"  # type: ignore[attr-defined]
        sys.modules[package] = outer
        sys.modules[f"{package}.{inner}"] = bindings(mode, f"{package}.{inner}")
    sys.argv[:] = [script]
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
