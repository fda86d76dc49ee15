"""Products of a weight matrix with a few columns, computed by ggml's CPU backend, one node a graph.

Bound with ctypes below what the package itself uses, so that tests reach kernels without a model.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from knapspec_edge.native import library

# enum ggml_type
TYPES = {
    "F32": 0,
    "F16": 1,
    "Q4_0": 2,
    "Q4_1": 3,
    "Q5_0": 6,
    "Q5_1": 7,
    "Q8_0": 8,
    "Q3_K": 11,
    "Q4_K": 12,
    "Q5_K": 13,
    "Q6_K": 14,
    "IQ4_NL": 20,
    "BF16": 30,
}

_p, _i64, _size = ctypes.c_void_p, ctypes.c_int64, ctypes.c_size_t

# name -> (result, arguments), from ggml.h, ggml-backend.h and ggml-alloc.h
_FUNCTIONS: dict[str, tuple[object, list[object]]] = {
    "ggml_init": (_p, None),
    "ggml_free": (None, [_p]),
    "ggml_tensor_overhead": (_size, []),
    "ggml_graph_overhead": (_size, []),
    "ggml_row_size": (_size, [ctypes.c_int, _i64]),
    "ggml_quantize_chunk": (_size, [ctypes.c_int, _p, _p, _i64, _i64, _i64, _p]),
    "ggml_new_tensor_2d": (_p, [_p, ctypes.c_int, _i64, _i64]),
    "ggml_new_tensor_3d": (_p, [_p, ctypes.c_int, _i64, _i64, _i64]),
    "ggml_new_tensor_4d": (_p, [_p, ctypes.c_int, _i64, _i64, _i64, _i64]),
    "ggml_view_4d": (_p, [_p, _p, _i64, _i64, _i64, _i64, _size, _size, _size, _size]),
    "ggml_permute": (_p, [_p, _p, *[ctypes.c_int] * 4]),
    "ggml_view_3d": (_p, [_p, _p, _i64, _i64, _i64, _size, _size, _size]),
    "ggml_mul_mat": (_p, [_p, _p, _p]),
    "ggml_new_graph": (_p, [_p]),
    "ggml_build_forward_expand": (None, [_p, _p]),
    "ggml_backend_reg_by_name": (_p, [ctypes.c_char_p]),
    "ggml_backend_reg_dev_get": (_p, [_p, _size]),
    "ggml_backend_reg_get_proc_address": (_p, [_p, ctypes.c_char_p]),
    "ggml_backend_dev_supports_op": (ctypes.c_bool, [_p, _p]),
    "ggml_backend_dev_init": (_p, [_p, _p]),
    "ggml_backend_dev_buffer_type": (_p, [_p]),
    "ggml_backend_buft_name": (ctypes.c_char_p, [_p]),
    "ggml_backend_free": (None, [_p]),
    "ggml_backend_alloc_ctx_tensors": (_p, [_p, _p]),
    "ggml_backend_alloc_ctx_tensors_from_buft": (_p, [_p, _p]),
    "ggml_backend_buffer_free": (None, [_p]),
    "ggml_backend_tensor_set": (None, [_p, _p, _size, _size]),
    "ggml_backend_tensor_get": (None, [_p, _p, _size, _size]),
    "ggml_backend_graph_compute": (ctypes.c_int, [_p, _p]),
}


class _Parameters(ctypes.Structure):
    """struct ggml_init_params { size_t mem_size; void * mem_buffer; bool no_alloc; };"""

    _fields_ = [("size", _size), ("buffer", _p), ("no_alloc", ctypes.c_bool)]  # noqa: RUF012


class Weights:
    """A quantised matrix in one of the CPU's buffer types."""

    def __init__(
        self,
        cpu: Cpu,
        type_name: str,
        blocks: np.ndarray | None,
        columns: int,
        buffer: str,
        rows: int = 0,
    ) -> None:
        """`blocks` as Cpu.quantize returns them; None for `rows` rows that are never read."""
        self.cpu, self.rows, self.columns = cpu, rows if blocks is None else len(blocks), columns
        self.context = cpu.context()
        ggml = cpu.ggml
        self.tensor = ggml["ggml_new_tensor_2d"](self.context, TYPES[type_name], columns, self.rows)
        self.buffer = ggml["ggml_backend_alloc_ctx_tensors_from_buft"](
            self.context, cpu.buffer_types[buffer]
        )
        if blocks is None:
            return
        blocks = np.ascontiguousarray(blocks)
        ggml["ggml_backend_tensor_set"](self.tensor, blocks.ctypes.data, 0, blocks.nbytes)

    def close(self) -> None:
        self.cpu.ggml["ggml_backend_buffer_free"](self.buffer)
        self.cpu.ggml["ggml_free"](self.context)


class Cpu:
    """One CPU backend; the switch of our kernels is the process's."""

    def __init__(self, n_threads: int = 2) -> None:
        library.load()
        files = [f for name in ("ggml", "ggml-base") if (f := library.library_file(name))]
        loaded = [ctypes.CDLL(str(f)) for f in files]
        self.ggml: dict[str, Callable[..., Any]] = {}
        for name, (result, arguments) in _FUNCTIONS.items():
            function = next(f for lib in loaded if (f := getattr(lib, name, None)))
            function.restype = result
            function.argtypes = [_Parameters] if arguments is None else arguments
            self.ggml[name] = function
        self.registry = self.ggml["ggml_backend_reg_by_name"](b"CPU")
        device = self.device = self.ggml["ggml_backend_reg_dev_get"](self.registry, 0)
        self.backend = self.ggml["ggml_backend_dev_init"](device, None)
        self.call("ggml_backend_set_n_threads", None, [_p, ctypes.c_int])(self.backend, n_threads)
        self.buffer_types = {"plain": self.ggml["ggml_backend_dev_buffer_type"](device)}
        extra = self.call("ggml_backend_dev_get_extra_bufts", ctypes.POINTER(_p), [_p])(device)
        for i in range(8):
            if not extra or not extra[i]:
                break
            name = self.ggml["ggml_backend_buft_name"](extra[i]).decode()
            self.buffer_types[name] = extra[i]

    def call(self, name: str, result: Any, arguments: list[Any]) -> Callable[..., Any]:
        """A function of the backend that only its registry knows."""
        address = self.ggml["ggml_backend_reg_get_proc_address"](self.registry, name.encode())
        assert address, name
        return ctypes.CFUNCTYPE(result, *arguments)(address)

    @contextmanager
    def kernels(self, enable: bool) -> Iterator[None]:
        get = self.call("knapspec_cpu_get_enabled", ctypes.c_bool, [])
        put = self.call("knapspec_cpu_set_enabled", None, [ctypes.c_bool])
        before = get()
        put(enable)
        yield
        put(before)

    @contextmanager
    def reference(self) -> Iterator[None]:
        put = self.call("ggml_backend_cpu_set_use_ref", None, [_p, ctypes.c_bool])
        put(self.backend, True)
        yield
        put(self.backend, False)

    def context(self) -> Any:
        size = 16 * self.ggml["ggml_tensor_overhead"]() + self.ggml["ggml_graph_overhead"]()
        return self.ggml["ggml_init"](_Parameters(size, None, True))

    def quantize(self, type_name: str, values: np.ndarray) -> np.ndarray:
        """Blocks u8 [rows, bytes] of values f32 [rows, columns]."""
        values = np.ascontiguousarray(values, dtype=np.float32)
        rows, columns = values.shape
        out = np.zeros((rows, self.ggml["ggml_row_size"](TYPES[type_name], columns)), np.uint8)
        self.ggml["ggml_quantize_chunk"](
            TYPES[type_name], values.ctypes.data, out.ctypes.data, 0, rows, columns, None
        )
        return out

    def product(self, weights: Weights, x: np.ndarray, gap: int = 0) -> np.ndarray:
        """f32 [..., columns of x, rows] of x f32 [..., columns, K], whose columns lie `gap` values
        apart in memory."""
        ggml = self.ggml
        context = self.context()
        planes = x[None] if x.ndim == 2 else x.reshape(-1, *x.shape[-2:])
        n_planes, n, k = planes.shape
        held = ggml["ggml_new_tensor_3d"](context, TYPES["F32"], k + gap, n, n_planes)
        strides = (4 * (k + gap), 4 * (k + gap) * n)
        part = ggml["ggml_view_3d"](context, held, k, n, n_planes, *strides, 0)
        result = ggml["ggml_mul_mat"](context, weights.tensor, part if gap else held)
        graph = ggml["ggml_new_graph"](context)
        ggml["ggml_build_forward_expand"](graph, result)
        if not x.size:  # a buffer is made for something
            ggml["ggml_new_tensor_2d"](context, TYPES["F32"], 1, 1)
        buffer = ggml["ggml_backend_alloc_ctx_tensors"](context, self.backend)
        padded = np.full((n_planes, n, k + gap), np.nan, np.float32)
        padded[:, :, :k] = planes
        ggml["ggml_backend_tensor_set"](held, padded.ctypes.data, 0, padded.nbytes)
        assert ggml["ggml_backend_graph_compute"](self.backend, graph) == 0
        out = np.empty((n_planes, n, weights.rows), np.float32)
        ggml["ggml_backend_tensor_get"](result, out.ctypes.data, 0, out.nbytes)
        ggml["ggml_backend_buffer_free"](buffer)
        ggml["ggml_free"](context)
        return out.reshape(*x.shape[:-1], weights.rows)

    def any_product(
        self,
        type_name: str,
        values: np.ndarray,
        x: np.ndarray,
        *,
        x_type: str = "F32",
        rows: slice | None = None,
        k: int | None = None,
        swapped: bool = False,
    ) -> np.ndarray:
        """f32 [c, d, columns, rows] of weights made of f32 [a, b, rows, K] and x f32 [c, d,
        columns, K], a and b dividing c and d: the shapes of any graph, weights and x being nodes
        of it. `rows` and `k`: only these weights, as a view, and the first `k` of x. `swapped`:
        weights and x lie in memory as [a, rows, b, K], and are permuted."""
        ggml = self.ggml
        context = self.context()
        tensors = []
        for kind, array in ((type_name, values), (x_type, x)):
            laid = array.swapaxes(1, 2) if swapped else array
            tensor = ggml["ggml_new_tensor_4d"](context, TYPES[kind], *laid.shape[::-1])
            tensors.append((tensor, kind, np.ascontiguousarray(laid, dtype=np.float32)))
        left, right = tensors[0][0], tensors[1][0]
        if swapped:
            left, right = (ggml["ggml_permute"](context, t, 0, 2, 1, 3) for t in (left, right))
        if rows is not None or k is not None:
            most_rows, most_k = values.shape[2:]
            first, last, _ = (rows or slice(None)).indices(most_rows)
            k = k or most_k
            width = ggml["ggml_row_size"](TYPES[type_name], most_k)
            planes = values.shape[1], values.shape[0]
            strides = width, width * most_rows, width * most_rows * planes[0]
            left = ggml["ggml_view_4d"](
                context, left, k, last - first, *planes, *strides, first * width
            )
            ends = ggml["ggml_row_size"](TYPES[x_type], x.shape[3])
            strides = ends, ends * x.shape[2], ends * x.shape[2] * x.shape[1]
            right = ggml["ggml_view_4d"](context, right, k, *x.shape[2::-1], *strides, 0)
            n_rows = last - first
        else:
            n_rows = values.shape[2]
        result = ggml["ggml_mul_mat"](context, left, right)
        graph = ggml["ggml_new_graph"](context)
        ggml["ggml_build_forward_expand"](graph, result)
        buffer = ggml["ggml_backend_alloc_ctx_tensors"](context, self.backend)
        for tensor, kind, array in tensors:
            flat = array.reshape(-1, array.shape[-1])
            data = flat if kind == "F32" else self.quantize(kind, flat)
            ggml["ggml_backend_tensor_set"](tensor, data.ctypes.data, 0, data.nbytes)
        assert ggml["ggml_backend_graph_compute"](self.backend, graph) == 0
        out = np.empty((*x.shape[:3], n_rows), np.float32)
        ggml["ggml_backend_tensor_get"](result, out.ctypes.data, 0, out.nbytes)
        ggml["ggml_backend_buffer_free"](buffer)
        ggml["ggml_free"](context)
        return out

    def supports(self, weights: Weights) -> bool:
        """Whether the backend takes weights that lie like these; a loader asks that."""
        context = self.context()
        x = self.ggml["ggml_new_tensor_2d"](context, TYPES["F32"], weights.columns, 1)
        node = self.ggml["ggml_mul_mat"](context, weights.tensor, x)
        supported = bool(self.ggml["ggml_backend_dev_supports_op"](self.device, node))
        self.ggml["ggml_free"](context)
        return supported

    def close(self) -> None:
        self.ggml["ggml_backend_free"](self.backend)
