"""Another build of llama.cpp, decoding greedily in a process of its own.

Run as a program, never imported: two builds in one process would mix, and the Python that runs it
need not be ours. It knows llama.cpp's public interface only, through whichever bindings that
Python has: llama-cpp-python of any age, or ik-llama-cpp-python, which has the names of an older
llama.cpp. One request per line of standard input, one answer per line of standard output, both
JSON.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from typing import Any

# name of the package, its module that binds llama.h, what it is installed as
BINDINGS = (
    ("llama_cpp", "llama_cpp.llama_cpp", "llama-cpp-python"),
    ("ik_llama_cpp", "ik_llama_cpp._ctypes_api", "ik-llama-cpp-python"),
)


def bindings() -> tuple[Any, str]:
    """The module that binds llama.h, and what it is. Raises RuntimeError."""
    for package, module, name in BINDINGS:
        try:
            found = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name != package:
                raise RuntimeError(f"its {name} lacks {error.name}") from error
        except Exception as error:
            raise RuntimeError(f"its {name} does not load: {error}") from error
        else:
            version = getattr(sys.modules[package], "__version__", "of unknown version")
            return found, f"{name} {version}"
    names = " nor ".join(name for _, _, name in BINDINGS)
    raise RuntimeError(f"this Python has neither {names}; install one of them there")


def put(parameters: Any, **values: Any) -> None:
    """Set those that this build has: a ctypes structure takes any other name without a word."""
    known = {field[0] for field in parameters._fields_}
    for name, value in values.items():
        if name in known:
            setattr(parameters, name, value)


class Peer:
    """A model and a context of the build under comparison."""

    def __init__(self, settings: dict[str, Any]) -> None:
        try:
            import numpy
        except ModuleNotFoundError as error:
            raise RuntimeError("this Python has no NumPy; install it there") from error
        self.numpy = numpy
        self.llama, self.package = bindings()
        if hasattr(self.llama, "llama_log_callback"):
            # standard error is kept to tell why a build died
            self._silent = self.llama.llama_log_callback(lambda level, text, data: None)
            self.function("llama_log_set")(self._silent, None)
        self.function("llama_backend_init")()

        parameters = self.function("llama_model_default_params")()
        put(parameters, n_gpu_layers=settings["gpu_layers"])
        load = self.function("llama_model_load_from_file", "llama_load_model_from_file")
        self.model = load(os.fsencode(settings["model"]), parameters)
        if not self.model:
            raise RuntimeError(f"it cannot load {settings['model']}")
        self.n_vocab = self._n_vocab()
        self.slice_tokens = settings["slice_tokens"]

        parameters = self.function("llama_context_default_params")()
        flash_attn = settings["flash_attn"]
        put(
            parameters,
            n_ctx=settings["ctx_tokens"],
            n_batch=self.slice_tokens,
            n_ubatch=self.slice_tokens,
            n_seq_max=1,
            n_outputs_max=settings["max_rows"],
            n_threads=settings["threads"],
            n_threads_batch=settings["threads_batch"],
            type_k=settings["kv_type"],
            type_v=settings["kv_type"],
            flash_attn_type=flash_attn,
            no_perf=True,
            swa_full=False,
        )
        if flash_attn >= 0:  # where it is yes or no, "auto" is what the build itself does
            put(parameters, flash_attn=bool(flash_attn))
        create = self.function("llama_init_from_model", "llama_new_context_with_model")
        self.context = create(self.model, parameters)
        if not self.context:
            raise RuntimeError("it cannot create the context")
        self.clear = self._clear()
        self.decode_batch = self.function("llama_decode")
        self.logits_of = self.function("llama_get_logits_ith")
        self.batch = self.function("llama_batch_init")(self.slice_tokens, 0, 1)
        self.n_past = 0

    def function(self, *names: str) -> Callable[..., Any]:
        """The first that these bindings have: newer names come first."""
        for name in names:
            found = getattr(self.llama, name, None)
            if found is not None:
                return found  # type: ignore[no-any-return]
        raise RuntimeError(f"its {self.package} has no {names[0]}")

    def _n_vocab(self) -> int:
        if hasattr(self.llama, "llama_model_get_vocab"):
            vocabulary = self.llama.llama_model_get_vocab(self.model)
            return int(self.function("llama_vocab_n_tokens")(vocabulary))
        return int(self.function("llama_n_vocab")(self.model))

    def _clear(self) -> Callable[[], None]:
        if hasattr(self.llama, "llama_get_memory"):
            memory = self.llama.llama_get_memory(self.context)
            clear = self.function("llama_memory_clear")
            return lambda: clear(memory, True)
        clear = self.function("llama_kv_self_clear", "llama_kv_cache_clear")
        return lambda: clear(self.context)

    def decode(self, tokens: list[int], rows: int) -> None:
        """Tokens behind those before; logits of the last `rows` of them."""
        batch = self.batch
        for i, token in enumerate(tokens):
            batch.token[i] = token
            batch.pos[i] = self.n_past + i
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = 0
            batch.logits[i] = i >= len(tokens) - rows
        batch.n_tokens = len(tokens)
        code = self.decode_batch(self.context, batch)
        if code:
            raise RuntimeError(f"llama_decode returned {code}")
        self.n_past += len(tokens)

    def logits(self, i: int) -> Any:
        """f32 [n_vocab] behind token i of the last batch; valid until the next."""
        pointer = ctypes.cast(self.logits_of(self.context, i), ctypes.POINTER(ctypes.c_float))
        return self.numpy.ctypeslib.as_array(pointer, shape=(self.n_vocab,))

    def pick(self, i: int) -> int:
        return int(self.logits(i).argmax())

    def fill(self, prompt: list[int]) -> int:
        """Begin anew with this prompt; the token picked behind it."""
        self.clear()
        self.n_past = 0
        for at in range(0, len(prompt), self.slice_tokens):
            part = prompt[at : at + self.slice_tokens]
            self.decode(part, int(at + len(part) == len(prompt)))
        return self.pick(len(part) - 1)

    def answer(self, prompt: list[int], max_tokens: int, ends: list[int]) -> dict[str, Any]:
        """Greedy answer with its times. Nothing of an earlier prompt is reused."""
        started = time.perf_counter()
        tokens = [self.fill(prompt)]
        first = time.perf_counter()
        stop = set(ends)
        while len(tokens) < max_tokens and tokens[-1] not in stop:
            self.decode([tokens[-1]], 1)
            tokens.append(self.pick(0))
        return {
            "tokens": tokens,
            "prompt_ms": 1000.0 * (first - started),
            "predicted_ms": 1000.0 * (time.perf_counter() - first),
        }

    def passes(self, tokens: list[int], widths: list[int]) -> dict[str, Any]:
        """Times of passes over so many tokens each, one behind the other, with all their picks."""
        times = []
        for width in widths:
            started = time.perf_counter()
            self.decode(tokens[:width], width)
            for i in range(width):
                self.pick(i)
            times.append(1000.0 * (time.perf_counter() - started))
        return {"passes_ms": times}

    def surprisal(self, tokens: list[int], first: int, width: int) -> dict[str, Any]:
        """Natural logarithms of 1/probability of tokens[first:], each given all before it, computed
        `width` tokens a pass."""
        np = self.numpy
        self.clear()
        self.n_past = 0
        found = []
        for at in range(0, len(tokens) - 1, width):
            part = tokens[at : min(at + width, len(tokens) - 1)]
            rows = min(len(part), max(0, at + len(part) + 1 - first))
            self.decode(part, rows)
            for i in range(len(part) - rows, len(part)):
                row = self.logits(i).astype(np.float64)
                row -= row.max()
                found.append(float(np.log(np.exp(row).sum()) - row[tokens[at + i + 1]]))
        return {"surprisal": found}

    def handle(self, request: dict[str, Any]) -> dict[str, Any]:
        asked = request.pop("do")
        if asked == "fill":
            return {"token": self.fill(**request)}
        if asked in ("answer", "passes", "surprisal"):
            result: dict[str, Any] = getattr(self, asked)(**request)
            return result
        raise RuntimeError(f"it does not know the request {asked}")


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever native code prints is no answer
    # beside this file lie modules of ours, whose names are none of that Python's business
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != here]
    peer = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if peer is None:
                peer = Peer(request)
                reply = {"package": peer.package, "python": platform.python_version()}
            else:
                reply = peer.handle(request)
        except (RuntimeError, OSError, ImportError, AttributeError, ctypes.ArgumentError) as error:
            reply = {"error": str(error)}
        answers.write(json.dumps(reply) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
