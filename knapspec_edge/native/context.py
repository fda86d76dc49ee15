"""The Backend on the patched llama.cpp: one context, one sequence."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from .. import arguments
from ..backend import Beside
from ..closing import Closing
from ..config import CTX_TOKENS_MAX, DEFAULTS, THREADS_MAX
from ..errors import (
    ClosedError,
    CompleteError,
    ContextError,
    Interrupted,
    NativeError,
    NoTokenError,
    PlanError,
    RollbackError,
    UsageError,
)
from ..records import GREEDY, Grammar, Pick, Plan, Sampling, SubLayer, Traits
from . import bindings, library, plans
from .model import Model
from .short_head import ShortHead, head_sizes
from .threads import default_threads

# enum ggml_type of the types a KV cache may have
KV_TYPES = {"f32": 0, "f16": 1, "bf16": 30, "q8_0": 8, "q5_1": 7, "q5_0": 6, "q4_1": 3, "q4_0": 2}
# enum llama_flash_attn_type
FLASH_ATTN = {"auto": -1, "off": 0, "on": 1}
# Bytes per 32 numbers of those types
_KV_BLOCK_BYTES = {
    "f32": 128, "f16": 64, "bf16": 64, "q8_0": 34, "q5_1": 24, "q5_0": 22, "q4_1": 20, "q4_0": 18,
}  # fmt: skip
# What llama.cpp notes down about each cell of a cache (position, sequences, shift).
_CELL_BYTES = 48
# Rows of logits that `evaluate` asks for in one pass.
_EVALUATE_TOKENS = 64
# Backends inside `interruptible`, innermost last. Main thread only, like signal handlers.
_guarded: list[LlamaBackend] = []


def kv_bytes_per_token(metadata: Mapping[str, str], architecture: str, kv_type: str) -> int:
    """What a token of context takes at least; the keys and values only where every layer keeps
    them, which sliding windows and compressed keys do not."""

    def number(key: str) -> int:
        text = metadata.get(f"{architecture}.{key}", "")
        return int(text) if text.isdecimal() else 0

    layers, heads = number("block_count"), number("attention.head_count")
    plain = layers and heads and not number("attention.sliding_window")
    if not plain or number("attention.kv_lora_rank") or number("attention.shared_kv_layers"):
        return _CELL_BYTES
    if f"{architecture}.attention.head_count_kv" in metadata:
        kv_heads = number("attention.head_count_kv")  # 0 where it differs by layer
    else:
        kv_heads = heads
    width = number("embedding_length") // heads
    keys = number("attention.key_length") or width
    values = number("attention.value_length") or width
    return _CELL_BYTES + layers * kv_heads * (keys + values) * _KV_BLOCK_BYTES[kv_type] // 32


def _floats(array: NDArray[np.float32]) -> Any:
    """`float *` to the first element of a contiguous array."""
    return array.ctypes.data_as(ctypes.POINTER(ctypes.c_float))


class LlamaBranches:
    """Implements `knapspec_edge.backend.Branches` while its context manager is open."""

    def __init__(self, backend: LlamaBackend, n_tokens: int) -> None:
        self._backend = backend
        self._n_tokens = n_tokens

    def embed(self, last: int) -> NDArray[np.float32]:
        backend = self._backend
        states = np.empty((self._n_tokens, backend._n_hidden), dtype=np.float32)
        if not 0 <= last < len(backend.sublayers):
            raise ValueError(f"sublayer {last} is outside 0..{len(backend.sublayers) - 1}")
        self._call("knapspec_branch_embed", last, _floats(states))
        return states

    def apply(self, sublayer: int, states: NDArray[np.float32]) -> NDArray[np.float32]:
        backend = self._backend
        n = len(backend.sublayers)
        if not 0 <= sublayer < n:
            raise ValueError(f"sublayer {sublayer} is outside 0..{n - 1}")
        if backend.sublayers[sublayer].layer == backend.sublayers[0].layer:
            raise PlanError(f"{backend.sublayers[sublayer]} belongs to the first layer")
        given = self._checked(states)
        result = np.empty_like(given)
        self._call("knapspec_branch_apply", sublayer, len(given), _floats(given), _floats(result))
        return result

    def head(self, states: NDArray[np.float32]) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        given = self._checked(states)
        tokens = np.empty(given.shape[:2], dtype=np.int32)
        probabilities = np.empty(given.shape[:2], dtype=np.float32)
        self._call(
            "knapspec_branch_head",
            len(given),
            _floats(given),
            tokens.ctypes.data_as(ctypes.POINTER(ctypes.c_int32)),
            _floats(probabilities),
        )
        return tokens, probabilities

    def _checked(self, states: NDArray[np.float32]) -> NDArray[np.float32]:
        wanted = (self._n_tokens, self._backend._n_hidden)
        if states.ndim != 3 or states.shape[1:] != wanted or not len(states):
            raise ValueError(f"states have the shape (branches, {wanted[0]}, {wanted[1]})")
        return np.ascontiguousarray(states, dtype=np.float32)

    def _call(self, name: str, *arguments: Any) -> None:
        backend = self._backend
        if not backend._branching:
            raise ValueError("the branches are closed")
        code = getattr(backend._lib, name)(backend.pointer, *arguments)
        if code:
            backend._raise(code, self._n_tokens, backend.n_past)


class LlamaBackend(Closing):
    """Implements `knapspec_edge.backend.Backend`. For one thread at a time.

    `interrupt` and `close` may be called from any thread; a call that comes while another thread
    computes raises UsageError.
    """

    def __init__(
        self,
        model: Model,
        *,
        ctx_tokens: int = DEFAULTS.ctx_tokens,
        threads: int | None = None,
        threads_batch: int | None = None,
        kv_type: str = "f16",
        flash_attn: str = "auto",
        max_verify_tokens: int = DEFAULTS.max_verify_tokens,
        kept_graphs: int = DEFAULTS.kept_graphs,
        repair_interval: int = DEFAULTS.repair_interval,
        beside_tokens: int = DEFAULTS.beside_tokens,
        short_head: bool = DEFAULTS.short_head,
    ) -> None:
        """Raises UsageError for a bad setting, ContextError if the context cannot be created."""
        arguments.choice("--kv-type", kv_type, tuple(KV_TYPES))
        arguments.choice("--flash-attn", flash_attn, tuple(FLASH_ATTN))
        if flash_attn == "off" and kv_type not in ("f32", "f16", "bf16"):
            raise UsageError(
                f"--kv-type {kv_type} needs flash attention: leave --flash-attn off away, or use "
                "--kv-type f16"
            )
        if not 1 <= ctx_tokens <= CTX_TOKENS_MAX:
            raise UsageError(f"--ctx must be in 1..{CTX_TOKENS_MAX}, not {ctx_tokens}")
        for number in (threads, threads_batch):
            if number is not None and not 1 <= number <= THREADS_MAX:
                raise UsageError(f"--threads must be in 1..{THREADS_MAX}, not {number}")

        self._llama = library.load()
        self._lib = self._llama._lib
        self._pid = os.getpid()
        self._pointer: Any = None
        self._branching = False  # inside `branches`
        self._grammar: Any = None  # struct knapspec_grammar *, read from _grammar_from
        self._grammar_from: Grammar | None = None
        self._answer_start = 0  # position of the first token that a grammar is about
        # Held while native code works on the context. Reentrant, because a signal handler runs in
        # the middle of whatever its thread was doing.
        self._computing = threading.RLock()
        self._freeing = threading.RLock()  # held while the pointer is given up, or used for a flag
        self.model = model
        self._n_ctx = ctx_tokens
        self._max_verify = max_verify_tokens
        self._n_past = 0
        self._threads = threads or min(default_threads(), THREADS_MAX)
        self._slice = min(DEFAULTS.prefill_slice_tokens, max(ctx_tokens, _EVALUATE_TOKENS))
        n_rows = max(max_verify_tokens, _EVALUATE_TOKENS)

        parameters = self._llama.llama_context_default_params()
        # A recurrent state has no cells to share, and is not pruned anyway.
        beside_tokens = 0 if model.is_recurrent else beside_tokens
        parameters.n_ctx = ctx_tokens + beside_tokens
        # one pool of cells, so that sequences beside the text can share its keys and values
        parameters.kv_unified = beside_tokens > 0
        parameters.n_batch = parameters.n_ubatch = self._slice
        parameters.n_seq_max = 1
        # rows of logits are reserved for what a pass may ask for, not for a whole prompt slice
        parameters.n_outputs_max = min(n_rows, self._slice)
        parameters.n_threads = self._threads
        parameters.n_threads_batch = threads_batch or self._threads
        parameters.type_k = parameters.type_v = KV_TYPES[kv_type]
        parameters.flash_attn_type = FLASH_ATTN[flash_attn]
        parameters.no_perf = True
        # A sliding-window cache keeps the window and one batch beyond it: a draft can be undone, a
        # longer cut is noticed in `truncate`.
        parameters.swa_full = False
        self._max_rows = parameters.n_outputs_max
        self._max_beside = min(beside_tokens, self._max_rows)
        self._unified = beside_tokens > 0
        # llama.cpp fills the cache while it allocates it: a size that cannot be had takes a minute
        # and everybody else's memory before it fails.
        total_bytes = sum(d["total_bytes"] for d in library.devices())
        token_bytes = kv_bytes_per_token(model.metadata, model.architecture, kv_type)
        if not model.is_recurrent and 0 < total_bytes < ctx_tokens * token_bytes:
            raise ContextError(
                f"a context of {ctx_tokens} tokens takes at least "
                f"{ctx_tokens * token_bytes / 1e9:.0f} GB for its cache and this machine has "
                f"{total_bytes / 1e9:.0f} GB of memory; try a smaller --ctx, such as "
                f"{min(model.n_ctx_train or DEFAULTS.ctx_tokens, total_bytes // token_bytes // 2)}"
            )
        self._lib.knapspec_clear_error()
        self._pointer = self._llama.llama_init_from_model(model.pointer, parameters)
        if not self._pointer:
            reason = bindings.first_error(self._lib) or "no reason given"
            raise ContextError(
                f"llama.cpp cannot create a context of {ctx_tokens} tokens with a {kv_type} cache "
                f"({reason}); try a smaller --ctx, such as {max(256, ctx_tokens // 2)}"
            )
        model.attach()
        self._memory = self._llama.llama_get_memory(self._pointer)
        self._lib.knapspec_keep_graphs(self._pointer, kept_graphs)
        self._plan: Plan | None = None
        self._head: ShortHead | None = None  # made when a plan first asks for one
        self._head_suggested: tuple[int, ...] = ()
        self._window = model.n_swa
        self._read_sublayers()
        if self._sublayers:
            self._lib.knapspec_set_repair(self._pointer, repair_interval)
        self._head_refusal = self._find_head_refusal()
        self._head_sizes: tuple[int, ...] = ()
        if self._head_refusal is None and short_head:
            self._head_sizes = head_sizes(model.n_vocab)
        positions = self._lib.knapspec_learned_positions(self._pointer)
        if 0 < positions < ctx_tokens:
            self.close()
            raise ContextError(
                f"architecture {model.architecture} has learned {positions} positions and knows no "
                f"others: use --ctx {positions} or less"
            )

        self._tokens_in = (ctypes.c_int32 * max(self._slice, n_rows))()
        self._tokens_out = (ctypes.c_int32 * n_rows)()
        self._probs_out = (ctypes.c_float * n_rows)()
        self._margins_out = (ctypes.c_float * n_rows)()
        self._sampling = bindings.Sampling()
        self._sampling_ref = ctypes.byref(self._sampling)
        self._sampling_from: Sampling | None = None
        self._last_rows = 0
        self._presses = 0  # of Ctrl-C that no computation has noticed yet
        self.settings: dict[str, Any] = {
            "ctx_tokens": ctx_tokens,
            "threads": self._threads,
            "threads_batch": parameters.n_threads_batch,
            "kv_type": kv_type,
            "flash_attn": flash_attn,
            "gpu_layers": model.gpu_layers,
            "slice_tokens": self._slice,
            "max_rows": self._max_rows,
            "devices": [d["name"] for d in library.devices()],
        }

    def _read_sublayers(self) -> None:
        self._sublayers: tuple[SubLayer, ...] = ()
        self._traits: tuple[Traits, ...] = ()
        self._n_hidden = 0  # width of the residual stream
        self._cut_refusal = self._find_cut_refusal()
        self._refusal = self._branch_refusal = self._find_refusal()
        if not self._sublayers:
            return
        self._n_hidden = int(self._lib.knapspec_n_hidden(self._pointer))
        if self._refusal is None:
            if not self._unified:
                self._branch_refusal = "the context has no cells beside the text"
            elif reason := self._lib.knapspec_branch_refusal(self._pointer).decode():
                self._branch_refusal = f"architecture {self.model.architecture}: {reason}"

    def _find_head_refusal(self) -> str | None:
        if self._refusal is not None:
            return self._refusal
        reason = self._lib.knapspec_head_refusal(self._pointer).decode(errors="replace")
        return f"architecture {self.model.architecture}: {reason}" if reason else None

    def _find_cut_refusal(self) -> str | None:
        model = self.model
        name = model.architecture
        if not self._memory or not model.has_decoder:
            return f"architecture {name} does not generate text token by token"
        if model.is_diffusion:
            return f"architecture {name} does not generate text from left to right"
        if model.is_recurrent:
            return (
                f"architecture {name} keeps a recurrent state, which cannot be cut back to the "
                "accepted tokens"
            )
        return None

    def _find_refusal(self) -> str | None:
        model = self.model
        name = model.architecture
        if self._cut_refusal is not None and not model.is_recurrent:
            return self._cut_refusal
        try:
            self._sublayers = plans.read_sublayers(self._lib, self._pointer)
            self._traits = plans.read_traits(self._lib, self._pointer, len(self._sublayers))
        except PlanError as error:
            return f"the sublayers of architecture {name} are not recognised ({error})"
        return self._cut_refusal

    # lifetime

    def close(self) -> None:
        """Free the context. A computation in another thread is interrupted and waited for.

        A forked process frees nothing: llama.cpp would wait for threads that it does not have.
        """
        if os.getpid() != self._pid:
            self._pointer = None
            return
        self.interrupt()
        with self._computing:
            with self._freeing:
                pointer, self._pointer = self._pointer, None
            if pointer:
                self._free_grammar()
                self._lib.knapspec_sigint_guard(pointer, False)
                self._llama.llama_free(pointer)
                self.model.detach()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()

    @property
    def pointer(self) -> Any:
        """`llama_context *`. Raises ValueError after close()."""
        if not self._pointer:
            raise ValueError("the context is closed")
        return self._pointer

    # what it is

    @property
    def n_ctx(self) -> int:
        return self._n_ctx

    @property
    def n_vocab(self) -> int:
        return self.model.n_vocab

    @property
    def n_past(self) -> int:
        return self._n_past

    @property
    def max_verify_tokens(self) -> int:
        return self._max_verify

    @property
    def sublayers(self) -> tuple[SubLayer, ...]:
        return self._sublayers

    @property
    def traits(self) -> tuple[Traits, ...]:
        return self._traits

    @property
    def refusal(self) -> str | None:
        return self._refusal

    @property
    def head_sizes(self) -> tuple[int, ...]:
        return self._head_sizes

    @property
    def head_refusal(self) -> str | None:
        """Why the head cannot be shortened, or None."""
        return self._head_refusal

    def suggest_head(self, tokens: Sequence[int]) -> None:
        if self._head is None:
            self._head_suggested = tuple(tokens)

    def prepare_head(self, n_rows: int) -> None:
        with self._alone():
            self._short_head(n_rows)

    def lacked(
        self, tokens: Sequence[int], position: int, plan: Plan | None = None
    ) -> NDArray[np.bool_]:
        if plan is None or not plan.head_rows:
            return np.zeros(len(tokens), dtype=np.bool_)
        return self._short_head(plan.head_rows).lacked(tokens, position, plan.head_rows)

    def _short_head(self, n_rows: int) -> ShortHead:
        """The list of tokens. Raises PlanError where there can be none of so many rows."""
        if self._head is None or n_rows > self._head.sizes[-1]:
            if self._head_refusal is not None:
                raise PlanError(f"the head cannot be shortened: {self._head_refusal}")
            if not 0 < n_rows <= self.n_vocab:
                raise PlanError(f"a head of {n_rows} rows of {self.n_vocab} is impossible")
            sizes = sorted({*self._head_sizes, n_rows})
            self._head, self._plan = None, None
            self._head = ShortHead(self._lib, self.pointer, self.model, sizes, self._head_suggested)
        return self._head

    @property
    def cut_refusal(self) -> str | None:
        return self._cut_refusal

    def is_end(self, token: int) -> bool:
        return self.model.is_end(token)

    def graph_stats(self) -> dict[str, int]:
        """Graphs built, reused, evicted and kept, and the nodes of the latest one."""
        stats = bindings.GraphStats()
        self._lib.knapspec_get_graph_stats(self.pointer, ctypes.byref(stats))
        return {name: int(getattr(stats, name)) for name in bindings.GRAPH_STATS}

    def varying_weights(self) -> list[str]:
        """Names of the weights whose products may depend, bit for bit, on how many tokens are
        computed at once. Empty: those of all weights do not, up to 16 tokens; attention is not
        looked at."""
        count = self._lib.knapspec_n_varying_weights(self.pointer)
        names = [self._lib.knapspec_varying_weight(self.pointer, i) for i in range(count)]
        return [name.decode() for name in names]

    # the four verbs

    def check_sampling(self, sampling: Sampling) -> None:
        outside = next((t for t, _ in sampling.logit_bias if not 0 <= t < self.n_vocab), None)
        if outside is not None:
            raise UsageError(
                f"there is no token {outside} to put a bias on; this model's tokens are "
                f"0..{self.n_vocab - 1}"
            )
        if sampling.grammar is not None:
            with self._alone():
                self._grammar_for(sampling.grammar)

    def _grammar_for(self, grammar: Grammar | None) -> Any:
        """The native grammar, or None; the latest one is kept."""
        if grammar is None:
            return None
        if grammar != self._grammar_from or self._grammar is None:
            self._free_grammar()
            ends = sorted(grammar.ends)
            self._lib.knapspec_clear_error()
            self._grammar = self._lib.knapspec_grammar_init(
                self.model.pointer,
                grammar.text.encode(),
                grammar.root.encode(),
                (ctypes.c_int32 * len(ends))(*ends),
                len(ends),
            )
            if not self._grammar:
                reason = bindings.last_error(self._lib) or "no reason given"
                raise UsageError(f"the grammar cannot be read: {reason}")
            self._grammar_from = grammar
        return self._grammar

    def _free_grammar(self) -> None:
        grammar, self._grammar, self._grammar_from = self._grammar, None, None
        self._sampling_from = None
        if grammar:
            self._lib.knapspec_grammar_free(grammar)

    def prefill(
        self,
        tokens: Sequence[int],
        sampling: Sampling,
        progress: Callable[[int, int], None] | None = None,
    ) -> Pick:
        total = len(tokens)
        if not total:
            raise ValueError("there is nothing to prefill")
        self._check_room(total)
        self._answer_start = self._n_past + total
        self._sampling_from = None
        if self._head is not None:
            self._head.forget_from(self._n_past)
        self._note(tokens)
        done = 0
        while done < total:
            part = tokens[done : done + self._slice]
            last = done + len(part) == total
            self._evaluate(part, 1 if last else 0, sampling, None)
            done += len(part)
            if progress is not None:
                progress(done, total)
        return self._pick(0, sampling)

    def decode(self, token: int, sampling: Sampling, plan: Plan | None = None) -> Pick:
        self._check_room(1)
        self._note((token,))
        self._evaluate((token,), 1, sampling, plan)
        return self._pick(0, sampling if plan is None else None)

    def verify(self, tokens: Sequence[int], sampling: Sampling) -> list[Pick]:
        n = len(tokens)
        if not n:
            raise ValueError("there is nothing to verify")
        if n > self._max_verify:
            raise ValueError(f"{n} tokens exceed the widest verification, {self._max_verify}")
        self._check_room(n)
        self._note(tokens)
        self._evaluate(tokens, n, sampling, None)
        return [self._pick(i, sampling) for i in range(n)]

    def _note(self, tokens: Sequence[int]) -> None:
        """The text goes on with these."""
        if self._head is not None:
            with self._alone():
                self._head.note(tokens, self._n_past)

    def truncate(self, n_tokens: int) -> None:
        if not 0 <= n_tokens <= self._n_past:
            raise ValueError(f"cannot cut {self._n_past} tokens back to {n_tokens}")
        with self._alone():
            if not self._cut(n_tokens):
                raise RollbackError(
                    f"the KV cache could not be cut back to {n_tokens} tokens (architecture "
                    f"{self.model.architecture}); it was emptied"
                )
            window = self._window
            if n_tokens and window:
                first = self._llama.llama_memory_seq_pos_min(self._memory, 0)
                # -1: none of the sequence is left in that cache
                if first < 0 or first > max(0, n_tokens - window):
                    self._empty()
                    raise RollbackError(
                        f"the sliding-window cache no longer holds the {window} tokens before "
                        f"position {n_tokens}; it was emptied"
                    )

    def _cut(self, n_tokens: int) -> bool:
        """Remove everything from n_tokens on, also what a failed pass left; else empty the cache.

        A recurrent state cannot be cut, and going on from one that is ahead of the text would be
        wrong: whether it worked is looked up, not believed.
        """
        removed = self._llama.llama_memory_seq_rm(self._memory, 0, n_tokens, -1)
        last = self._llama.llama_memory_seq_pos_max(self._memory, 0)
        if not removed or last >= n_tokens:
            self._empty()
            return False
        self._n_past = n_tokens
        return True

    def _empty(self) -> None:
        # nothing is known about the cache any more: empty, it can be used again
        self._llama.llama_memory_clear(self._memory, True)
        self._n_past = 0

    # timing

    def append(self, tokens: Sequence[int], plan: Plan | None = None) -> None:
        self._check_room(len(tokens))
        self._evaluate(tokens, 0, GREEDY, plan)

    def fill(self, n_tokens: int) -> None:
        if n_tokens < self._n_past:
            raise ValueError(f"{self._n_past} tokens are in the cache already")
        self._check_room(n_tokens - self._n_past)
        with self._alone():
            before = self._n_past
            if self._lib.knapspec_fill(self.pointer, n_tokens - before, before):
                self._cut(before)
                raise ContextError(f"the KV cache has no room for {n_tokens} tokens: raise --ctx")
            self._n_past = n_tokens

    def set_threads(self, threads: int, threads_batch: int | None = None) -> None:
        wide = threads if threads_batch is None else threads_batch
        for number in (threads, wide):
            if not 1 <= number <= THREADS_MAX:
                raise UsageError(f"--threads must be in 1..{THREADS_MAX}, not {number}")
        with self._alone():
            self._threads = threads
            self._llama.llama_set_n_threads(self.pointer, threads, wide)
        self.settings.update(threads=threads, threads_batch=wide)

    # judging

    def evaluate(
        self, tokens: Sequence[int], plan: Plan | None = None
    ) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        n = len(tokens)
        self._check_room(n)
        picked = np.empty(n, dtype=np.int32)  # i32 [n]
        probabilities = np.empty(n, dtype=np.float32)  # f32 [n]
        for start in range(0, n, self._max_rows):
            part = tokens[start : start + self._max_rows]
            self._evaluate(part, len(part), GREEDY, plan)
            end = start + len(part)
            picked[start:end] = self._tokens_out[: len(part)]
            probabilities[start:end] = self._probs_out[: len(part)]
        return picked, probabilities

    def final_states(
        self, tokens: Sequence[int], plan: Plan | None = None
    ) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
        if self._refusal is not None:
            raise PlanError(f"there are no states to compare: {self._refusal}")
        n = len(tokens)
        self._check_room(n)
        states = np.empty((n, self.model.n_embd_out), dtype=np.float32)
        picked = np.empty(n, dtype=np.int32)  # i32 [n]
        with self._alone():
            # llama.cpp's "embeddings" of a model that generates text are these states
            self._llama.llama_set_embeddings(self._pointer, True)
            try:
                for start in range(0, n, self._max_rows):
                    part = tokens[start : start + self._max_rows]
                    end = start + len(part)
                    self._evaluate_alone(part, len(part), GREEDY, plan)
                    rows = self._llama.llama_get_embeddings(self._pointer)
                    if not rows:
                        raise NativeError("llama.cpp returns no states for this model")
                    shape = (len(part), states.shape[1])
                    states[start:end] = np.ctypeslib.as_array(rows, shape=shape)
                    picked[start:end] = self._tokens_out[: len(part)]
            finally:
                self._llama.llama_set_embeddings(self._pointer, False)
        return states, picked

    @property
    def max_beside_tokens(self) -> int:
        return self._max_beside if self._sublayers else 0

    def evaluate_beside(
        self,
        blocks: Sequence[tuple[int, Sequence[int]]],
        plan: Plan | None = None,
        sampling: Sampling = GREEDY,
        expected: Sequence[Sequence[int]] | None = None,
    ) -> list[Beside]:
        starts = [start for start, _ in blocks]
        lengths = [len(tokens) for _, tokens in blocks]
        total = sum(lengths)
        if not blocks or min(lengths) < 1:
            raise ValueError("there is nothing to evaluate")
        if total > self.max_beside_tokens:
            raise ValueError(f"{total} tokens exceed the {self.max_beside_tokens} that fit beside")
        for start, length in zip(starts, lengths, strict=True):
            if not 0 <= start <= self._n_past or start + length > self._n_ctx:
                raise ValueError(f"{length} tokens from {start} on do not lie in the context")
        if expected is None:
            wanted = None
        elif [len(tokens) for tokens in expected] != lengths or sampling.temperature > 0.0:
            raise ValueError("one token is expected per place, and picked greedily")
        else:
            wanted = (ctypes.c_int32 * total)(*(t for tokens in expected for t in tokens))
        with self._alone():
            self._prepare(sampling, plan)
            self._tokens_in[:total] = [token for _, tokens in blocks for token in tokens]
            code = self._lib.knapspec_beside(
                self._pointer,
                self._tokens_in,
                len(blocks),
                (ctypes.c_int32 * len(blocks))(*starts),
                (ctypes.c_int32 * len(blocks))(*lengths),
                wanted,
                self._sampling_ref,
                self._tokens_out,
                self._probs_out,
                self._margins_out,
            )
            self._last_rows = 0
            if code:
                self._raise(code, total, self._n_past)
            picks = np.array(self._tokens_out[:total], dtype=np.int32)
            probabilities = np.array(self._probs_out[:total], dtype=np.float32)
            margins = np.array(self._margins_out[:total], dtype=np.float32)
        ends = np.cumsum(lengths)[:-1]
        parts = (np.split(row, ends) for row in (picks, probabilities, margins))
        return [Beside(*part) for part in zip(*parts, strict=True)]

    # hidden states

    def hidden_states(self, tokens: Sequence[int], plan: Plan | None = None) -> NDArray[np.float32]:
        n = len(tokens)
        if not n:
            raise ValueError("there is nothing to evaluate")
        if not self._sublayers:
            raise PlanError(f"no hidden states can be read: {self._refusal}")
        self._check_room(n)
        shape = (len(self._sublayers), n, self._n_hidden)
        states = np.empty(shape, dtype=np.float32)  # f32 [sublayers, n, hidden]
        with self._alone():
            try:
                self._lib.knapspec_capture(self.pointer, True)
                for start in range(0, n, self._max_rows):
                    part = tokens[start : start + self._max_rows]
                    self._evaluate(part, len(part), GREEDY, plan)
                    taken = np.empty((shape[0], len(part), shape[2]), dtype=np.float32)
                    if self._lib.knapspec_captured(self.pointer, _floats(taken), len(part)):
                        raise NativeError(bindings.last_error(self._lib) or "no states were kept")
                    states[:, start : start + len(part)] = taken
            finally:
                self._lib.knapspec_capture(self.pointer, False)
        return states

    @property
    def branch_refusal(self) -> str | None:
        return self._branch_refusal

    @contextlib.contextmanager
    def branches(
        self, start: int, tokens: Sequence[int], n_branches: int
    ) -> Iterator[LlamaBranches]:
        n = len(tokens)
        if self._branch_refusal is not None:
            raise PlanError(f"no branches with this model: {self._branch_refusal}")
        if not 1 <= n <= self._max_rows:
            raise ValueError(f"a window has 1..{self._max_rows} tokens, not {n}")
        if n_branches < 1:
            raise ValueError(f"at least one branch is needed, not {n_branches}")
        if not 0 <= start <= self._n_past or start + n > self._n_ctx:
            raise ValueError(f"{n} tokens from {start} on do not lie in the context")
        with self._alone():
            # Ctrl-C may come between any two lines; to close what was never opened does nothing
            self._branching = True
            try:
                code = self._lib.knapspec_branch_begin(
                    self.pointer, start, (ctypes.c_int32 * n)(*tokens), n, n_branches
                )
                if code:
                    self._raise(code, n, start)
                yield LlamaBranches(self, n)
            finally:
                self._branching = False
                if self._pointer:
                    self._lib.knapspec_branch_end(self._pointer)

    def logits(self, row: int = -1) -> NDArray[np.float32]:
        index = row + self._last_rows if row < 0 else row
        if not 0 <= index < self._last_rows:
            raise IndexError(f"row {row} is outside the {self._last_rows} rows of the latest pass")
        with self._alone():
            if self._plan is not None and self._plan.head_rows:
                found = np.full(self.n_vocab, -np.inf, dtype=np.float32)
                rows = np.empty(self._plan.head_rows, dtype=np.float32)
                if self._lib.knapspec_head_logits(self.pointer, index, _floats(rows), len(rows)):
                    raise NativeError(bindings.last_error(self._lib) or "no logits were kept")
                found[self._short_head(len(rows)).tokens(len(rows))] = rows
                return found
            base = self._llama.llama_get_logits(self.pointer)
            rows = np.ctypeslib.as_array(base, shape=(self._last_rows, self.n_vocab))
            return np.array(rows[index], dtype=np.float32)

    def repairs(self) -> tuple[int, NDArray[np.float32]]:
        """How many tokens of verified text have been seen, and what drafts add where they skip a
        sublayer once these are enough: f32 [sublayers, hidden], zero where nothing is added."""
        vectors = np.zeros((len(self._sublayers), self._n_hidden), dtype=np.float32)
        with self._alone():
            if not self._sublayers:
                return 0, vectors
            return int(self._lib.knapspec_get_repair(self.pointer, _floats(vectors))), vectors

    # interruption

    def interrupt(self) -> None:
        """Make the running or the next native call raise Interrupted. Safe from any thread."""
        with self._freeing:
            if self._pointer:
                self._lib.knapspec_interrupt(self._pointer)

    def clear_interrupt(self) -> None:
        """Take back an `interrupt` that nothing has noticed yet."""
        with self._freeing:
            if self._pointer:
                self._lib.knapspec_interrupt_clear(self._pointer)

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """In here, Ctrl-C stops the native computation and raises Interrupted in the main thread.

        A second Ctrl-C before the first was noticed raises KeyboardInterrupt. Elsewhere than in
        the main thread this does nothing, since signals are not delivered there. Nested uses serve
        the innermost backend.
        """
        outer = _guarded[-1] if _guarded else None
        if (
            threading.current_thread() is not threading.main_thread()
            or outer is self
            # set by another language: Python could not put it back
            or signal.getsignal(signal.SIGINT) is None
        ):
            yield
            return
        self._presses = 0

        def on_press(_signal: int, _frame: FrameType | None) -> None:
            self._presses += 1
            if self._presses > 1:
                raise KeyboardInterrupt

        if outer is not None:
            outer._guard_signal(False)
        previous = signal.signal(signal.SIGINT, on_press)
        _guarded.append(self)
        # the native handler is put on top: it sets the flag at once, while Python cannot run
        self._guard_signal(True)
        try:
            yield
        finally:
            self._guard_signal(False)
            if self._pointer:
                self._lib.knapspec_interrupt_clear(self._pointer)
            _guarded.remove(self)
            signal.signal(signal.SIGINT, previous)
            if outer is not None:
                outer._guard_signal(True)

    def check_interrupted(self) -> None:
        """Raises Interrupted if the latest `interruptible` ended with a Ctrl-C that nothing native
        was left to notice."""
        pressed, self._presses = self._presses > 0, 0
        if pressed:
            raise Interrupted("interrupted")

    def _guard_signal(self, enable: bool) -> None:
        if self._pointer:
            self._lib.knapspec_sigint_guard(self._pointer, enable)

    # inside

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Native code works on the open context in here, in no other thread at the same time."""
        self._enter()
        try:
            yield
        finally:
            self._computing.release()

    def _enter(self) -> None:
        if os.getpid() != self._pid:
            raise ClosedError(
                "this context was opened in another process, whose threads a fork does not copy: "
                "open the model in this process"
            )
        if not self._computing.acquire(blocking=False):
            raise UsageError(
                "another thread is computing with this model's context: let one finish before the "
                "next begins, or open the model once per thread"
            )
        if not self._pointer or self._branching:
            self._computing.release()
            raise ValueError(
                "branches are open: close them first" if self._pointer else "the context is closed"
            )

    def _check_room(self, n: int) -> None:
        if self._n_past + n > self._n_ctx:
            raise ContextError(
                f"{self._n_past + n} tokens do not fit a context of {self._n_ctx}: raise --ctx"
            )

    def _pick(self, row: int, sampling: Sampling | None) -> Pick:
        """The pick of one row of the latest pass; `sampling` says what to report with it."""
        token = self._tokens_out[row]
        n_probs = None if sampling is None else sampling.n_probs
        if n_probs is None or token < 0:
            return Pick(token, self._probs_out[row], self._margins_out[row])
        n_most = min(n_probs, self.n_vocab)
        logprob = ctypes.c_float()
        tokens, logprobs = (ctypes.c_int32 * n_most)(), (ctypes.c_float * n_most)()
        with self._alone():
            n = self._lib.knapspec_logprobs(
                self._pointer, row, token, n_most, ctypes.byref(logprob), tokens, logprobs
            )
        if n < 0:
            raise NativeError(bindings.last_error(self._lib) or "no log-probabilities")
        return Pick(
            token,
            self._probs_out[row],
            self._margins_out[row],
            logprob.value,
            tuple(zip(tokens[:n], logprobs[:n], strict=True)),
        )

    def _set_plan(self, plan: Plan | None) -> None:
        if plan is not None and not self._sublayers:
            raise PlanError(f"no sublayer can be left out: {self._refusal}")
        rows = 0 if plan is None else plan.head_rows
        if rows:
            self._short_head(rows)
        plans.set_plan(self._lib, self.pointer, plan, len(self._sublayers))
        if self._lib.knapspec_use_head(self.pointer, rows):
            raise PlanError(bindings.last_error(self._lib) or "llama.cpp refused the short head")
        self._plan = plan

    def _evaluate(
        self, tokens: Sequence[int], n_outputs: int, sampling: Sampling, plan: Plan | None
    ) -> None:
        """Append tokens; on failure the cache is cut back to what it was, or emptied."""
        self._enter()
        try:
            self._evaluate_alone(tokens, n_outputs, sampling, plan)
        finally:
            self._computing.release()

    def _evaluate_alone(
        self, tokens: Sequence[int], n_outputs: int, sampling: Sampling, plan: Plan | None
    ) -> None:
        n = len(tokens)
        self._prepare(sampling, plan)
        if n == 1:
            self._tokens_in[0] = tokens[0]
        else:
            self._tokens_in[:n] = list(tokens)
        code = self._lib.knapspec_eval(
            self._pointer,
            self._tokens_in,
            n,
            self._n_past,
            n_outputs,
            self._sampling_ref,
            self._tokens_out,
            self._probs_out,
            self._margins_out,
        )
        if code == bindings.OK:
            self._n_past += n
            self._last_rows = n_outputs
            return
        self._last_rows = 0
        before = self._n_past
        self._cut(before)
        self._raise(code, n, before)

    def _prepare(self, sampling: Sampling, plan: Plan | None) -> None:
        """Make the next pass one under this plan that picks like this."""
        if plan is not self._plan:
            self._set_plan(plan)
        if sampling is not self._sampling_from:
            self._sampling.set(sampling)
            self._sampling.grammar = self._grammar_for(sampling.grammar)
            self._sampling.answer_start = self._answer_start
            self._sampling_from = sampling

    def _raise(self, code: int, n: int, before: int) -> NoReturn:
        """The error behind the return code of a pass over n tokens after `before` others."""
        if code == bindings.ABORTED:
            self._lib.knapspec_interrupt_clear(self.pointer)
            self._presses = 0
            raise Interrupted("interrupted")
        if code == bindings.NO_SLOT:
            raise ContextError(
                f"the KV cache has no room for {n} more tokens after {before}: raise --ctx"
            )
        reason = bindings.last_error(self._lib) or f"code {code}"
        if code == bindings.COMPLETE:
            raise CompleteError(f"the answer ends at position {before + n}: {reason}")
        if code in (bindings.BAD_LOGITS, bindings.DEAD_END):
            raise NoTokenError(f"the answer cannot go on at position {before + n}: {reason}")
        raise NativeError(f"llama.cpp failed at position {before}: {reason}")
