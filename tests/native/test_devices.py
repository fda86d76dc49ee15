"""Devices and the place of a model's layers: on the CPU library, and on made-up GPUs."""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from knapspec_edge.apps import doctor
from knapspec_edge.errors import LibraryError
from knapspec_edge.native import library, open_context, open_model, rpc
from knapspec_edge.native.devices import buffer_types, describe, place, placement
from knapspec_edge.native.threads import choose_threads
from knapspec_edge.records import Kind, SubLayer, Traits

CPU = {"name": "CPU", "type": "CPU", "unified_memory": False}
CUDA = {"name": "CUDA0", "type": "GPU", "unified_memory": False}
METAL = {"name": "MTL0", "type": "GPU", "unified_memory": True}
TYPES = {"CPU": True, "CPU_Mapped": True, "CPU_REPACK": True, "CUDA_Host": True, "CUDA0": False}


def located(buffers: list[str], devices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """Placement of a model with one attention and one MLP per layer; a buffer type for each."""
    kinds = (Kind.ATTENTION, Kind.MLP)
    sublayers = [SubLayer(i, i // 2, kinds[i % 2]) for i in range(len(buffers))]
    traits = [Traits(signature=1, weight_bytes=1, device=name) for name in buffers]
    settings = {"n_layers": len(buffers) // 2, "gpu_layers": -1, **more}
    return place(sublayers, traits, TYPES, devices, **settings)


@pytest.mark.parametrize(
    ("buffers", "devices", "text"),
    [
        (["CPU", "CPU_Mapped"], [CPU], "CPU"),
        (["CUDA0"] * 4, [CPU, CUDA], "2 of 2 layers on CUDA0"),
        (["CPU", "CPU", "CUDA0", "CUDA0"], [CPU, CUDA], "1 of 2 layers on CUDA0"),
        (["MTL0"] * 2, [CPU, METAL], "1 of 1 layers on MTL0, unified memory"),
        ([], [CPU], "CPU"),
    ],
)
def test_in_a_few_words(buffers: list[str], devices: list[dict[str, Any]], text: str) -> None:
    assert describe(located(buffers, devices, gpu_layers=-1 if len(devices) > 1 else 0)) == text


# -- the real library


def test_cpu_device_and_its_buffer_types(patched_library: Path) -> None:
    cpu = next(d for d in library.devices() if d["type"] == "CPU")
    assert cpu["backend"] == "CPU"
    assert cpu["description"]
    assert 0 < cpu["free_bytes"] <= cpu["total_bytes"]
    assert cpu["unified_memory"] is False
    types = buffer_types()
    assert types["CPU"]
    assert types["CPU_Mapped"]
    assert all(types[name] for name in types if name.startswith("CPU"))


@pytest.mark.parametrize("gpu_layers", [0, None])
def test_a_model_on_the_cpu(
    patched_library: Path, tiny_models: Path, gpu_layers: int | None
) -> None:
    if gpu_layers is None and any("GPU" in d["type"] for d in library.devices()):
        pytest.skip("this build offloads")
    with (
        open_model(tiny_models / "llama-dense.gguf", gpu_layers=gpu_layers) as model,
        open_context(model, ctx_tokens=64) as backend,
    ):
        found = placement(backend)
        assert found["devices"] == ["CPU"]
        assert set(found["buffers"]) <= set(buffer_types())
        assert found["offloaded_layers"] == 0
        assert found["n_layers"] == model.n_layer > 0
        assert found["partial"] is False
        assert found["unified_memory"] is False


def test_a_model_whose_sublayers_are_not_recognised(
    patched_library: Path, tiny_models: Path
) -> None:
    for file in sorted(tiny_models.glob("*.gguf")):
        with open_model(file, gpu_layers=0) as model, open_context(model, ctx_tokens=64) as backend:
            if backend.sublayers:
                continue
            found = placement(backend)
            assert found["offloaded_layers"] is None
            assert found["devices"] == []
            assert found["n_layers"] == model.n_layer
            return
    pytest.fail("every architecture is recognised: take the case out")


# -- made-up GPUs


def test_all_layers_offloaded() -> None:
    found = located(["CUDA0"] * 8, [CUDA, CPU])
    assert found["devices"] == ["CUDA0"]
    assert found["offloaded_layers"] == found["n_layers"] == 4
    assert not found["partial"]


@pytest.mark.parametrize("host", ["CPU_Mapped", "CUDA_Host", "CPU_REPACK", ""])
def test_partial_offload(host: str) -> None:
    found = located([host] * 6 + ["CUDA0"] * 2, [CUDA, CPU], gpu_layers=2)
    assert found["devices"] == ["CPU", "CUDA0"]
    assert found["buffers"] == [host, "CUDA0"]
    assert found["offloaded_layers"] == 1
    assert found["n_layers"] == 4
    assert found["partial"]


def test_a_layer_in_two_places_is_not_offloaded() -> None:
    found = located(["CUDA0", "CPU"] * 3, [CUDA, CPU])
    assert found["offloaded_layers"] == 0
    assert found["partial"]


def test_the_head_alone_is_a_partial_offload() -> None:
    assert located(["CPU"] * 4, [CUDA, CPU], gpu_layers=1)["partial"]
    assert not located(["CPU"] * 4, [CUDA, CPU], gpu_layers=0)["partial"]
    # nothing to offload to
    assert not located(["CPU"] * 4, [CPU], gpu_layers=-1)["partial"]


def test_buffer_types_that_no_device_lists() -> None:
    # a mapped file on Apple's GPU, and a device whose name another one begins with
    found = located(["MTL0_Mapped"] * 4, [METAL, CPU])
    assert found["devices"] == ["MTL0"]
    assert found["unified_memory"]
    assert found["offloaded_layers"] == 2
    servers = [{**CUDA, "name": "RPC1"}, {**CUDA, "name": "RPC10"}, CPU]
    assert located(["RPC10[127.0.0.1:1]"] * 4, servers)["devices"] == ["RPC10"]
    # rows split over several GPUs belong to none of them alone
    assert located(["CUDA_Split"] * 4, [CUDA, CPU])["offloaded_layers"] == 2
    # without a GPU it can only be the CPU's
    assert located(["CPU_NEW"] * 4, [CPU])["devices"] == ["CPU"]


def test_unified_memory_counts_only_where_it_is_used() -> None:
    assert not located(["CPU"] * 4, [METAL, CPU], gpu_layers=0)["unified_memory"]


@pytest.mark.parametrize(
    ("kind", "backend", "machine", "expected"),
    [
        ("integrated GPU", "Vulkan", "x86_64", True),
        ("integrated GPU", "CUDA", "aarch64", True),
        ("GPU", "CUDA", "aarch64", False),
        ("GPU", "MTL", "arm64", True),
        ("GPU", "MTL", "x86_64", False),
        ("CPU", "CPU", "arm64", False),
    ],
)
def test_unified_memory(kind: str, backend: str, machine: str, expected: bool) -> None:
    assert library.has_unified_memory(kind, backend, machine) is expected


# -- what doctor says


def test_doctor_shows_where_a_model_lies(patched_library: Path, tiny_models: Path) -> None:
    report = doctor.examine(str(tiny_models / "llama-dense.gguf"))
    assert report["platform"]["threads"] == {
        "count": choose_threads().threads,
        "reason": choose_threads().reason,
    }
    placed = report["model"]["placement"]
    assert placed["n_layers"] > 0
    rows = dict(doctor.lines(report))
    assert rows["threads"].startswith(f"{choose_threads().threads} (")
    assert rows["model devices"].startswith(placed["devices"][0])
    shown = f"{placed['offloaded_layers']} of {placed['n_layers']}"
    assert rows["model offloaded layers"] == shown
    assert "model placement" not in rows


def test_doctor_names_a_partial_offload_and_an_unknown_one() -> None:
    partial = located(["CPU_Mapped"] * 6 + ["CUDA0"] * 2, [CUDA, CPU])
    assert dict(doctor.placement_rows(partial)) == {
        "model devices": "CPU, CUDA0 (weights in CPU_Mapped, CUDA0)",
        "model offloaded layers": "1 of 4, the CPU computes the others",
    }
    unknown = located([], [CUDA, CPU], n_layers=4)
    assert dict(doctor.placement_rows(unknown)) == {
        "model devices": "unknown",
        "model offloaded layers": "unknown of 4",
    }


# -- RPC servers


def test_named_servers() -> None:
    assert rpc.named_servers("") == []
    assert rpc.named_servers(" a:1, 10.0.0.2:50052 ,") == ["a:1", "10.0.0.2:50052"]
    for wrong in ("host", "host:", ":1", "host:0", "host:65536", "host:x", "a:1,b"):
        with pytest.raises(LibraryError, match="is not host:port"):
            rpc.named_servers(wrong)


def test_a_build_without_rpc_says_so(patched_library: Path) -> None:
    if rpc_is_built():
        pytest.skip("this build has the RPC backend")
    code = "from knapspec_edge.native import library; library.load()"
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, rpc.SERVERS: "127.0.0.1:1"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 1
    assert "this build has no RPC backend" in result.stderr


def rpc_is_built() -> bool:
    library.load()
    ggml = library.ggml_library()
    return ggml is not None and bool(ggml.ggml_backend_reg_by_name(b"RPC"))


class Registry:
    """Stands for ggml's registry with an RPC backend whose servers offer a device or none."""

    def __init__(self, answer: int) -> None:
        self.registered: list[int] = []
        self.asked: list[bytes] = []

        def add_server(endpoint: bytes) -> int:
            self.asked.append(endpoint)
            return answer

        self._function = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_char_p)(add_server)
        self._address = ctypes.cast(self._function, ctypes.c_void_p).value

    def ggml_backend_reg_by_name(self, name: bytes) -> int:
        return 1 if name == b"RPC" else 0

    def ggml_backend_reg_get_proc_address(self, registry: int, name: bytes) -> Any:
        return self._address

    def ggml_backend_register(self, registry: int) -> None:
        self.registered.append(registry)


def test_servers_are_registered_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        endpoint = f"127.0.0.1:{listener.getsockname()[1]}"
        monkeypatch.setenv(rpc.SERVERS, f"{endpoint},{endpoint}")
        registry = Registry(answer=7)
        rpc.add_servers(registry)  # type: ignore[arg-type]
        assert registry.registered == [7]
        assert registry.asked == [endpoint.encode()]
        with pytest.raises(LibraryError, match="offers no device"):
            rpc.add_servers(Registry(answer=0))  # type: ignore[arg-type]
    # nobody listens there any more: ggml itself would end the process
    silent = Registry(answer=7)
    with pytest.raises(LibraryError, match="does not answer"):
        rpc.add_servers(silent)  # type: ignore[arg-type]
    assert silent.asked == []


def test_without_servers_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(rpc.SERVERS, raising=False)
    rpc.add_servers(None)  # type: ignore[arg-type]
