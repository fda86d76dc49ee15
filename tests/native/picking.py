"""Single picks from rows of one's own, by the native sampler."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from knapspec_edge.native import bindings
from knapspec_edge.native.library import load
from knapspec_edge.records import Sampling


def native_pick(
    logits: NDArray[np.float32],
    sampling: Sampling,
    position: int = 0,
    history: Sequence[int] = (),
    *,
    grammar: Any = None,
    answer_start: int = 0,
) -> tuple[int, int, float, float]:
    """(code, token, probability, margin); `grammar` is a native one, about what begins at
    `answer_start`."""
    row = np.ascontiguousarray(logits, dtype=np.float32)
    token, probability, margin = ctypes.c_int32(-1), ctypes.c_float(), ctypes.c_float()
    native = bindings.Sampling()
    native.set(sampling)
    native.grammar, native.answer_start = grammar, answer_start
    code = load()._lib.knapspec_pick(
        row.ctypes.data_as(ctypes.POINTER(ctypes.c_float)),
        len(row),
        native,
        position,
        (ctypes.c_int32 * len(history))(*history),
        len(history),
        token,
        probability,
        margin,
    )
    return code, token.value, probability.value, margin.value
