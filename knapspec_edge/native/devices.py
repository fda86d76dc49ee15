"""Where the sublayers of an open model lie, in terms of devices and layers."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from ..records import SubLayer, Traits
from . import library

if TYPE_CHECKING:
    from .context import LlamaBackend

_BUFFER_ALIGNMENT_BYTES = 64


@lru_cache(maxsize=1)
def buffer_types() -> dict[str, bool]:
    """Names of the buffer types of all devices, each with whether the CPU computes on what lies
    there.

    That is so in host memory, mapped files and pinned memory included, and in the forms that the
    CPU backend rearranges weights into. Raises LibraryError.
    """
    library.load()
    ggml = library.ggml_library()
    found: dict[str, bool] = {}
    if ggml is None:
        return found
    for i in range(ggml.ggml_backend_dev_count()):
        device = ggml.ggml_backend_dev_get(i)
        of_cpu = library.DEVICE_TYPES.get(ggml.ggml_backend_dev_type(device)) == "CPU"
        types = [
            ggml.ggml_backend_dev_buffer_type(device),
            ggml.ggml_backend_dev_host_buffer_type(device),
            *_extra_buffer_types(ggml, device),
        ]
        for buffer_type in filter(None, types):
            name = ggml.ggml_backend_buft_name(buffer_type).decode(errors="replace")
            found[name] = of_cpu or bool(ggml.ggml_backend_buft_is_host(buffer_type))
    found[_mapped_type(ggml)] = True
    return found


def _extra_buffer_types(ggml: Any, device: int) -> list[int]:
    """What a device offers beside its usual buffers, such as weights rearranged for AVX-512."""
    address = ggml.ggml_backend_reg_get_proc_address(
        ggml.ggml_backend_dev_backend_reg(device), b"ggml_backend_dev_get_extra_bufts"
    )
    if not address:
        return []
    # ggml_backend_buffer_type_t * get_extra_bufts(ggml_backend_dev_t device), NULL-terminated
    function = ctypes.CFUNCTYPE(ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p)(address)
    listed = function(device)
    types: list[int] = []
    while listed and (buffer_type := listed[len(types)]):
        types.append(buffer_type)
    return types


def _mapped_type(ggml: Any) -> str:
    """Name of the buffer type of weights in a mapped file, which no device lists."""
    memory = ctypes.create_string_buffer(2 * _BUFFER_ALIGNMENT_BYTES)
    address = ctypes.addressof(memory)
    aligned = address + -address % _BUFFER_ALIGNMENT_BYTES
    buffer = ggml.ggml_backend_cpu_buffer_from_ptr(aligned, _BUFFER_ALIGNMENT_BYTES)
    name = ggml.ggml_backend_buft_name(ggml.ggml_backend_buffer_get_type(buffer))
    ggml.ggml_backend_buffer_free(buffer)  # not the memory, which is ours
    return str(name.decode(errors="replace"))


def place(
    sublayers: Sequence[SubLayer],
    traits: Sequence[Traits],
    types: Mapping[str, bool],
    devices: Sequence[Mapping[str, Any]],
    *,
    n_layers: int,
    gpu_layers: int,
) -> dict[str, Any]:
    """`placement` from its parts.

    `types` as `buffer_types` gives it, `devices` as `library.devices` does. `gpu_layers` is what
    was asked for; negative: all.
    """
    cpu = next((d["name"] for d in devices if d["type"] == "CPU"), "CPU")
    gpus = [d for d in devices if "GPU" in d["type"]]

    def device_of(buffer_type: str) -> str:
        # a type that no device lists is a GPU's own, for a mapped file or rows split over several
        if not buffer_type or types.get(buffer_type, not gpus):
            return str(cpu)
        owners = [str(d["name"]) for d in gpus if buffer_type.startswith(str(d["name"]))]
        return max(owners, key=len, default=buffer_type)

    by_layer: dict[int, list[str]] = {}
    for sublayer, trait in zip(sublayers, traits, strict=True):
        by_layer.setdefault(sublayer.layer, []).append(device_of(trait.device))
    places = [place for layer in by_layer.values() for place in layer]
    # llama.cpp counts the head as the last layer, and offloads from the end
    head_offloaded = bool(gpus) and gpu_layers != 0
    offloaded = sum(all(p != cpu for p in layer) for layer in by_layer.values())
    anything = head_offloaded or any(p != cpu for p in places)
    used = list(dict.fromkeys(places))
    return {
        "devices": used,
        "buffers": list(dict.fromkeys(t.device for t in traits)),
        "offloaded_layers": offloaded if by_layer else None,
        "n_layers": len(by_layer) or n_layers,
        "partial": anything and cpu in places,
        "unified_memory": any(d["unified_memory"] for d in gpus if d["name"] in used),
    }


def placement(backend: LlamaBackend) -> dict[str, Any]:
    """Where the sublayers of an open context lie, JSON-ready.

    devices           names of the devices that compute, in order of their first sublayer
    buffers           names of the buffer types that hold their weights
    offloaded_layers  layers that lie on a GPU as a whole; None where sublayers are not recognised
    n_layers          layers of the model; the head is not counted
    partial           whether a GPU computes a part of the model and the CPU another one
    unified_memory    whether one of those GPUs works in the memory of the CPU
    """
    return place(
        backend.sublayers,
        backend.traits,
        buffer_types(),
        library.devices(),
        n_layers=backend.model.n_layer,
        gpu_layers=backend.model.gpu_layers,
    )


def describe(placement: Mapping[str, Any]) -> str:
    """A placement in a few words: "CPU", or "30 of 32 layers on CUDA0, unified memory"."""
    offloaded, n_layers = placement["offloaded_layers"], placement["n_layers"]
    names = [str(name) for name in placement["devices"]]
    if not offloaded:
        return ", ".join(names) or "CPU"
    gpus = [name for name in names if not name.startswith("CPU")]
    text = f"{offloaded} of {n_layers} layers on {', '.join(gpus)}"
    return f"{text}, unified memory" if placement["unified_memory"] else text
