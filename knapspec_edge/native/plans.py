"""Plans on any context of the patched library, also that of a stock `llama_cpp.Llama` object.

Import knapspec_edge before llama_cpp, so that llama-cpp-python loads the patched library:

    from knapspec_edge.native import plans
    from llama_cpp import Llama

    llama = Llama("model.gguf", verbose=False)
    skipped = plans.sublayers(llama)[20:24]
    with plans.plan(llama, [s.index for s in skipped]):
        ...  # every call on `llama` leaves these sublayers out

The plan holds for every pass, prompts included; drafting and verifying are the caller's business.
A skipped attention writes no keys, so what was computed under a plan must not be continued without
it: after the `with`, a Llama object starts its next prompt afresh. Whoever drafts sets
`llama.n_tokens` back to what the full model had computed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from .. import arguments
from ..errors import PlanError
from ..records import Kind, Plan, SubLayer, Traits
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
    """`llama_context *` of a llama_cpp.Llama object, or the pointer itself.

    Raises PlanError for anything else, as far as that can be told: any number may be a pointer.
    """
    pointer = getattr(llama, "ctx", llama)
    if pointer is None:
        raise PlanError("this Llama object is closed")
    is_address = type(pointer) is int and 0 < pointer < 2 ** (8 * ctypes.sizeof(ctypes.c_void_p))
    if not is_address and not isinstance(pointer, ctypes.c_void_p | ctypes._Pointer):
        raise PlanError(f"{type(llama).__name__} is no llama_cpp.Llama object")
    return pointer


def sublayers(llama: Any) -> tuple[SubLayer, ...]:
    """The sublayers of the model behind `llama`. Raises LibraryError, PlanError."""
    return read_sublayers(library.load()._lib, _context_of(llama))


# Plans in force by the address of their context, innermost last.
_in_force: dict[int, list[Plan]] = {}


@contextmanager
def plan(llama: Any, skipped: Iterable[int] | Plan) -> Iterator[None]:
    """In here, `llama` computes without these sublayers. Raises LibraryError, PlanError.

    The innermost plan holds; after it the one around it holds again. Closing `llama` in here is
    allowed.
    """
    lib, context = library.load()._lib, _context_of(llama)
    count = len(read_sublayers(lib, context))
    try:
        chosen = skipped if isinstance(skipped, Plan) else Plan.skipping(count, list(skipped))
    except ValueError as error:
        raise PlanError(str(error)) from error
    except TypeError:
        raise PlanError(
            f"the sublayers to skip are {arguments.shown(skipped)}; give their indices"
        ) from None
    set_plan(lib, context, chosen, count)
    stack = _in_force.setdefault(_address(context), [])
    stack.append(chosen)
    passes = _passes(lib, context)
    try:
        yield
    finally:
        # by identity: generators may leave in another order than they entered
        del stack[next(i for i in reversed(range(len(stack))) if stack[i] is chosen)]
        if not stack:
            _in_force.pop(_address(context), None)
        if getattr(llama, "ctx", llama) == context:  # not closed meanwhile
            set_plan(lib, context, stack[-1] if stack else None, count)
            if not chosen.is_full and _passes(lib, context) > passes and hasattr(llama, "reset"):
                llama.reset()


def read_traits(lib: ctypes.CDLL, context: Any, count: int) -> tuple[Traits, ...]:
    """What each of the `count` sublayers of a `llama_context *` works on."""
    read = bindings.Traits()
    found = []
    for i in range(count):
        lib.knapspec_sublayer_traits(context, i, ctypes.byref(read))
        found.append(
            Traits(
                signature=read.signature,
                weight_bytes=read.weight_bytes,
                cell_bytes=read.cell_bytes,
                n_cells=read.n_cells,
                n_experts=read.n_experts,
                n_experts_used=read.n_experts_used,
                device=read.device.decode(errors="replace"),
                can_window=not lib.knapspec_window_refusal(context, i),
            )
        )
    return tuple(found)


def _address(context: Any) -> int:
    return ctypes.cast(context, ctypes.c_void_p).value or 0


def _passes(lib: ctypes.CDLL, context: Any) -> int:
    """Graphs computed by this context so far."""
    stats = bindings.GraphStats()
    lib.knapspec_get_graph_stats(context, ctypes.byref(stats))
    return int(stats.n_builds + stats.n_reuses)


def set_plan(lib: ctypes.CDLL, context: Any, chosen: Plan | None, count: int) -> None:
    """Set a plan (None: the full model) on a context of `count` sublayers. Raises PlanError."""
    if chosen is None or (chosen.is_full and len(chosen.modes) == count):
        lib.knapspec_set_plan(context, None, 0, None)
        return
    if len(chosen.modes) != count:
        raise PlanError(f"the plan is for {len(chosen.modes)} sublayers, the model has {count}")
    modes = (ctypes.c_int32 * count)(*(bindings.MODES[mode.kind] for mode in chosen.modes))
    windows = (bindings.Window * count)(
        *(bindings.Window(mode.sink_tokens, mode.window_tokens) for mode in chosen.modes)
    )
    lib.knapspec_clear_error()
    if lib.knapspec_set_plan(context, modes, count, windows):
        raise PlanError(bindings.last_error(lib) or "llama.cpp refused the plan")
