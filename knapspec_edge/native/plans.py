"""Plans on any context of the patched library, also that of a stock `llama_cpp.Llama` object.

Import knapspec_edge before llama_cpp, so that llama-cpp-python loads the patched library:

    from knapspec_edge.native import plans
    from llama_cpp import Llama

    llama = Llama("model.gguf", verbose=False)
    skipped = plans.sublayers(llama)[20:24]
    with plans.plan(llama, [s.index for s in skipped]):
        ...  # every call on `llama` leaves these sublayers out

The plan holds for every pass, prompts included; drafting and verifying are the caller's business.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from ..errors import PlanError
from ..records import Kind, Plan, SubLayer
from . import bindings, library

# enum knapspec_kind
_KINDS = (Kind.ATTENTION, Kind.MLP, Kind.BLOCK, Kind.RECURRENT)


def read_sublayers(lib: ctypes.CDLL, context: Any) -> tuple[SubLayer, ...]:
    """The sublayers of a `llama_context *` in execution order.

    Raises PlanError with the reason where the architecture is not recognised.
    """
    count = lib.knapspec_n_sublayers(context)
    if count < 0:
        raise PlanError(lib.knapspec_refusal(context).decode(errors="replace"))
    layer, kind = ctypes.c_int32(), ctypes.c_int32()
    found = []
    for i in range(count):
        lib.knapspec_sublayer(context, i, ctypes.byref(layer), ctypes.byref(kind))
        found.append(SubLayer(i, layer.value, _KINDS[kind.value]))
    return tuple(found)


def _context_of(llama: Any) -> Any:
    """`llama_context *` of a llama_cpp.Llama object, or the pointer itself."""
    pointer = getattr(llama, "ctx", llama)
    if pointer is None:
        raise PlanError("this Llama object is closed")
    return pointer


def sublayers(llama: Any) -> tuple[SubLayer, ...]:
    """The sublayers of the model behind `llama`. Raises LibraryError, PlanError."""
    return read_sublayers(library.load()._lib, _context_of(llama))


@contextmanager
def plan(llama: Any, skipped: Iterable[int] | Plan) -> Iterator[None]:
    """In here, `llama` computes without these sublayers. Raises LibraryError, PlanError."""
    lib, context = library.load()._lib, _context_of(llama)
    count = len(read_sublayers(lib, context))
    try:
        chosen = skipped if isinstance(skipped, Plan) else Plan.skipping(count, list(skipped))
    except ValueError as error:
        raise PlanError(str(error)) from error
    set_plan(lib, context, chosen, count)
    try:
        yield
    finally:
        lib.knapspec_set_plan(context, None, 0)


def set_plan(lib: ctypes.CDLL, context: Any, chosen: Plan | None, count: int) -> None:
    """Set a plan (None: the full model) on a context of `count` sublayers. Raises PlanError."""
    if chosen is None or (chosen.is_full and len(chosen.modes) == count):
        lib.knapspec_set_plan(context, None, 0)
        return
    if len(chosen.modes) != count:
        raise PlanError(f"the plan is for {len(chosen.modes)} sublayers, the model has {count}")
    modes = (ctypes.c_int32 * count)()
    for i, mode in enumerate(chosen.modes):
        if mode.kind not in bindings.MODES:
            raise PlanError(f"mode {mode} of sublayer {i} is not supported by this build")
        modes[i] = bindings.MODES[mode.kind]
    if lib.knapspec_set_plan(context, modes, count):
        raise PlanError(bindings.last_error(lib) or "llama.cpp refused the plan")
