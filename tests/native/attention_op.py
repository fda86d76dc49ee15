"""One GGML_OP_FLASH_ATTN_EXT over one's own arrays, by ggml's CPU backend; its twin in F64."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, quants
from numpy.typing import NDArray

from knapspec_edge.native.library import library_file

F32, F16, Q8_0 = 0, 1, 8
_TYPES = {F16: GGMLQuantizationType.F16, Q8_0: GGMLQuantizationType.Q8_0}


class _Init(ctypes.Structure):
    """struct ggml_init_params"""

    _fields_ = [  # noqa: RUF012 - the form ctypes asks for
        ("mem_size", ctypes.c_size_t),
        ("mem_buffer", ctypes.c_void_p),
        ("no_alloc", ctypes.c_bool),
    ]


class _Plan(ctypes.Structure):
    """struct ggml_cplan"""

    _fields_ = [  # noqa: RUF012
        ("work_size", ctypes.c_size_t),
        ("work_data", ctypes.c_void_p),
        ("n_threads", ctypes.c_int),
        ("threadpool", ctypes.c_void_p),
        ("abort_callback", ctypes.c_void_p),
        ("abort_callback_data", ctypes.c_void_p),
        ("use_ref", ctypes.c_bool),
    ]


@cache
def ggml() -> Any:
    """The functions of libggml-base and libggml-cpu that an operation needs."""
    base, cpu = (ctypes.CDLL(str(library_file(name))) for name in ("ggml-base", "ggml-cpu"))
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64

    class Functions:
        pass

    found = Functions()
    for library, name, result, arguments in [
        (base, "ggml_init", pointer, [_Init]),
        (base, "ggml_free", None, [pointer]),
        (base, "ggml_new_tensor_4d", pointer, [pointer, ctypes.c_int, *[number] * 4]),
        (base, "ggml_view_4d", pointer, [pointer, pointer, *[number] * 4, *[size] * 4]),
        (base, "ggml_permute", pointer, [pointer, pointer, *[ctypes.c_int] * 4]),
        (base, "ggml_flash_attn_ext", pointer, [*[pointer] * 5, *[ctypes.c_float] * 3]),
        (base, "ggml_flash_attn_ext_add_sinks", None, [pointer, pointer]),
        (base, "ggml_get_data", pointer, [pointer]),
        (base, "ggml_new_graph_custom", pointer, [pointer, size, ctypes.c_bool]),
        (base, "ggml_build_forward_expand", None, [pointer, pointer]),
        (base, "ggml_backend_reg_get_proc_address", pointer, [pointer, ctypes.c_char_p]),
        (cpu, "ggml_backend_cpu_reg", pointer, []),
        (cpu, "ggml_graph_plan", _Plan, [pointer, ctypes.c_int, pointer]),
        (cpu, "ggml_graph_compute", ctypes.c_int, [pointer, ctypes.POINTER(_Plan)]),
    ]:
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
        setattr(found, name, function)
    return found


def _of_backend(name: bytes, result: Any, argument: Any) -> Any:
    g = ggml()
    address = g.ggml_backend_reg_get_proc_address(g.ggml_backend_cpu_reg(), name)
    return ctypes.CFUNCTYPE(result, argument)(address)


@cache
def switch() -> Any:
    return _of_backend(b"knapspec_cpu_set_enabled", None, ctypes.c_bool)


@cache
def _declines() -> Any:
    return _of_backend(b"knapspec_cpu_declines_attention", ctypes.c_char_p, ctypes.c_void_p)


@dataclass(frozen=True)
class Attention:
    """What goes into one operation, laid out as llama.cpp lays out its cache.

    q (streams, tokens, heads, width) F32; k, v (streams, cells, heads_kv, width) as numbers, stored
    as `type_k`, `type_v`; mask (streams, tokens, cells) or None, stored in F16.
    """

    q: NDArray[np.float32]
    k: NDArray[np.float32]
    v: NDArray[np.float32]
    mask: NDArray[np.float32] | None
    scale: float
    type_k: int = F16
    type_v: int = F16
    max_bias: float = 0.0
    softcap: float = 0.0
    sinks: NDArray[np.float32] | None = None
    # cells that the tensors have besides those of the view, with what must not be read
    spare_cells: int = 0
    spare_heads: int = 0

    def rows(self, stream: int, tokens: slice, cells: int) -> Attention:
        """The same with some tokens of one stream and the first `cells` cells."""
        one = slice(stream, stream + 1)
        return replace(
            self,
            q=self.q[one, tokens],
            k=self.k[one, :cells],
            v=self.v[one, :cells],
            mask=None if self.mask is None else self.mask[one, tokens, :cells],
        )


class Operation:
    """An operation in a context of ggml's; `repeat` computes it so many times in one graph, each
    time over keys and values of its own."""

    def __init__(self, a: Attention, *, repeat: int = 1) -> None:
        g = ggml()
        streams, tokens, heads, width = a.q.shape
        cells, heads_kv, width_v = a.k.shape[1], a.k.shape[2], a.v.shape[3]
        stored = [_stored(x, t, a) for x, t in ((a.k, a.type_k), (a.v, a.type_v))]
        bytes_needed = repeat * (sum(x.nbytes for x in stored) + a.q.nbytes * 4) + (4 << 20)
        bytes_needed += 2 * streams * tokens * cells + repeat * 4096
        self.context = g.ggml_init(_Init(bytes_needed, None, False))
        self._shape = (streams, tokens, heads, width_v)

        def tensor(kind: int, shape: tuple[int, ...], data: NDArray[Any]) -> int:
            made = g.ggml_new_tensor_4d(self.context, kind, *shape)
            data = np.ascontiguousarray(data)
            ctypes.memmove(g.ggml_get_data(made), data.ctypes.data, data.nbytes)
            return int(made)

        def cache_view(kind: int, data: NDArray[Any], d: int) -> int:
            whole = tensor(
                kind, (d, heads_kv + a.spare_heads, cells + a.spare_cells, streams), data
            )
            row = data.shape[-1]
            token = row * (heads_kv + a.spare_heads)
            part = g.ggml_view_4d(
                self.context, whole, d, heads_kv, cells, streams, row, token,
                token * (cells + a.spare_cells), 0,
            )  # fmt: skip
            return int(g.ggml_permute(self.context, part, 0, 2, 1, 3))

        q = tensor(F32, (width, heads, tokens, streams), a.q)
        q = g.ggml_permute(self.context, q, 0, 2, 1, 3)
        mask = None
        if a.mask is not None:
            mask = tensor(F16, (cells, tokens, 1, streams), a.mask.astype(np.float16))
        sinks = None
        if a.sinks is not None:
            sinks = tensor(F32, (heads, 1, 1, 1), a.sinks)
        self.graph = g.ggml_new_graph_custom(self.context, 16 * repeat, False)
        for _ in range(repeat):
            k = cache_view(a.type_k, stored[0], width)
            v = cache_view(a.type_v, stored[1], width_v)
            out = g.ggml_flash_attn_ext(self.context, q, k, v, mask, a.scale, a.max_bias, a.softcap)
            g.ggml_flash_attn_ext_add_sinks(out, sinks)
            g.ggml_build_forward_expand(self.graph, out)
        self._out = out

    def compute(self, *, threads: int = 2, kernels: bool = True, reference: bool = False) -> None:
        """`kernels` off: upstream's code. `reference`: its plainest."""
        g = ggml()
        switch()(kernels)
        try:
            plan = g.ggml_graph_plan(self.graph, threads, None)
            work = np.empty(plan.work_size + 64, dtype=np.uint8)
            plan.work_data, plan.use_ref = work.ctypes.data, reference
            assert g.ggml_graph_compute(self.graph, plan) == 0
        finally:
            switch()(True)

    def declined(self) -> str | None:
        """Why upstream's code computes it, or None."""
        reason = _declines()(self._out)
        return None if reason is None else reason.decode()

    def result(self) -> NDArray[np.float32]:
        """(streams, tokens, heads, width)"""
        data = ctypes.cast(ggml().ggml_get_data(self._out), ctypes.POINTER(ctypes.c_float))
        return np.ctypeslib.as_array(data, shape=self._shape).copy()

    def close(self) -> None:
        ggml().ggml_free(self.context)


def compute(a: Attention, **options: Any) -> NDArray[np.float32]:
    operation = Operation(a)
    try:
        operation.compute(**options)
        return operation.result()
    finally:
        operation.close()


def _stored(x: NDArray[np.float32], kind: int, a: Attention) -> NDArray[np.uint8]:
    """Bytes (streams, cells, heads_kv, row), spare ones set to what is no number."""
    with np.errstate(over="ignore"):
        data = quants.quantize(x.astype(np.float32), _TYPES[kind]).view(np.uint8)
    if a.spare_cells or a.spare_heads:
        streams, cells, heads, row = data.shape
        whole = np.full(
            (streams, cells + a.spare_cells, heads + a.spare_heads, row), 0xFF, dtype=np.uint8
        )
        whole[:, :cells, :heads] = data
        data = whole
    return data


def as_stored(x: NDArray[np.float32], kind: int) -> NDArray[np.float64]:
    """What the numbers are after being stored."""
    if kind == F16:
        return x.astype(np.float16).astype(np.float64)
    packed = quants.quantize(x.astype(np.float32), _TYPES[kind])
    return quants.dequantize(packed, _TYPES[kind]).astype(np.float64)


def naive(a: Attention) -> NDArray[np.float64]:
    """softmax(softcap(q k) + slope mask) v in F64, one row after the other."""
    streams, tokens, heads, _ = a.q.shape
    k, v = as_stored(a.k, a.type_k), as_stored(a.v, a.type_v)
    group = heads // k.shape[2]
    out = np.zeros((streams, tokens, heads, v.shape[3]))
    for stream, token, head in np.ndindex(streams, tokens, heads):
        logits = k[stream, :, head // group] @ a.q[stream, token, head].astype(np.float64) * a.scale
        if a.softcap:
            logits = a.softcap * np.tanh(logits / a.softcap)
        if a.mask is not None:
            bias = a.mask[stream, token].astype(np.float16).astype(np.float64)
            logits = logits + slope(a, head) * bias
            logits[np.isneginf(bias)] = -math.inf
        top = logits.max() if a.sinks is None else max(logits.max(), float(a.sinks[head]))
        if math.isinf(top):
            continue
        weights = np.exp(logits - top)
        total = weights.sum() + (0.0 if a.sinks is None else math.exp(a.sinks[head] - top))
        seen = weights > 0
        out[stream, token, head] = weights[seen] @ v[stream, seen, head // group] / total
    return out


def slope(a: Attention, head: int) -> float:
    """Press et al. 2022, section 3: a geometric sequence, with odd powers of its root for the heads
    beyond a power of two."""
    if not a.max_bias:
        return 1.0
    heads = a.q.shape[2]
    whole = 2 ** int(math.log2(heads))
    if head < whole:
        return float(2.0 ** (-a.max_bias / whole * (head + 1)))
    return float(2.0 ** (-a.max_bias / 2 / whole * (2 * (head - whole) + 1)))


def causal_mask(tokens: int, cells: int, first: int, window: int = 0) -> NDArray[np.float32]:
    """(1, tokens, cells) of 0 and -inf; token j sees the cells up to first + j, the last `window`
    of them if that is not 0."""
    position = first + np.arange(tokens)[:, None]
    cell = np.arange(cells)[None]
    seen = cell <= position
    if window:
        seen &= cell > position - window
    return np.where(seen, 0.0, -np.inf).astype(np.float32)[None]
