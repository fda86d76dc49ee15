"""scripts/backends.py: what it calls missing, what it lets pass, and that no server stays."""

from __future__ import annotations

import importlib.util
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("backends", ROOT / "scripts" / "backends.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["backends"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


backends = _load()


# -- comparison


def test_difference_is_in_units_of_the_range() -> None:
    reference = np.array([[0.0, 10.0, 5.0], [0.0, 1.0, 0.5]], dtype=np.float32)
    other = reference.copy()
    assert backends.difference(reference, other) == 0.0
    other[1, 2] += 0.1
    assert backends.difference(reference, other) == pytest.approx(0.1, rel=1e-5)
    other[0, 0] = np.nan
    assert backends.difference(reference, other) == float("inf")
    assert backends.difference(reference, reference[:1]) == float("inf")


def test_first_difference() -> None:
    assert backends.first_difference([1, 2, 3], [1, 2, 3]) is None
    assert backends.first_difference([1, 2, 3], [1, 9, 3]) == 1
    assert backends.first_difference([1, 2, 3], [1, 2]) == 2
    assert backends.first_difference([], [1]) == 0


@pytest.mark.parametrize(("margin", "ok"), [(0.01, True), (0.5, False)])
def test_a_different_text_needs_a_close_call(margin: float, ok: bool) -> None:
    found = backends.compare_text("text", [1, 2, 3], [1, 9, 9], [5.0, margin, 5.0], 0.05)
    assert found.ok is ok
    assert "token 2 of 3 differs" in found.detail
    assert f"{margin}" in found.detail


def test_a_text_that_is_missing_or_shorter_fails() -> None:
    assert not backends.compare_text("text", [], [], [], 0.1).ok
    assert not backends.compare_text("text", [1, 2], [1], [5.0, 5.0], 0.1).ok


def side(**changes: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a worker reports about a device that does everything right."""
    logits = np.tile(np.linspace(-10.0, 10.0, 8, dtype=np.float32), (3, 1))
    facts = {
        "placement": {
            "offloaded_layers": 4, "n_layers": 4, "partial": False, "buffers": ["GPU0"],
        },
        "refusal": None,
        "n_sublayers": 8,
        "text": [3, 1, 4, 1],
        "margins": [2.0, 2.0, 2.0, 2.0],
        "verified": [1, 4, 1],
        "drafted_text": [3, 1, 4, 1],
        "n_drafted": 3,
        "n_accepted": 2,
        "n_nodes": 100,
        "n_nodes_plan": 90,
    }  # fmt: skip
    arrays = {"prompt_logits": logits, "draft_logits": logits[0]}
    for name, value in changes.items():
        (arrays if name in arrays else facts)[name] = value
    return facts, arrays


def failures(**changes: Any) -> list[str]:
    return [f.name for f in backends.compare(side(), side(**changes), 1e-3) if not f.ok]


def test_a_device_that_does_everything_right() -> None:
    assert failures() == []


@pytest.mark.parametrize(
    ("changes", "failed"),
    [
        ({"placement": {**side()[0]["placement"], "offloaded_layers": 0}}, ["offloaded"]),
        ({"placement": {**side()[0]["placement"], "offloaded_layers": None}}, ["offloaded"]),
        ({"refusal": "not recognised", "n_sublayers": 0}, ["recognised"]),
        ({"prompt_logits": side()[1]["prompt_logits"] + 0.1}, ["logits"]),
        ({"draft_logits": side()[1]["draft_logits"] + 0.1}, ["draft logits"]),
        (
            {"text": [3, 1, 5, 1], "drafted_text": [3, 1, 5, 1], "verified": [1, 5, 1]},
            ["text"],
        ),
        ({"verified": [1, 4, 2]}, ["one pass"]),
        ({"n_nodes_plan": 100}, ["plan honoured"]),
        ({"n_nodes_plan": 0}, ["plan honoured"]),
        ({"drafted_text": [3, 1, 4, 2]}, ["text drafted"]),
        ({"n_drafted": 0}, ["drafted"]),
    ],
)
def test_each_fault_is_found(changes: dict[str, Any], failed: list[str]) -> None:
    assert failures(**changes) == failed


def test_a_partial_offload_has_layers_on_both_sides() -> None:
    placement = {"offloaded_layers": 2, "n_layers": 4, "partial": True, "buffers": ["CPU", "GPU0"]}
    assert backends.placed("partial", placement, partial=True).ok
    assert not backends.placed("all", placement, partial=False).ok
    for changes in ({"offloaded_layers": 4}, {"offloaded_layers": 0}, {"partial": False}):
        assert not backends.placed("partial", {**placement, **changes}, partial=True).ok


def test_the_json_of_a_forced_plan_is_judged() -> None:
    plan = {"reduced": {"mlp 3": "skip"}}
    answer = {
        "text": "Because",
        "speculation": {"state": "on", "plan": plan},
        "timings": {"draft_n": 4},
    }
    assert backends.judge("plan", answer).ok
    assert not backends.judge("plan", {**answer, "timings": {"draft_n": 0}}).ok
    assert not backends.judge("plan", {**answer, "text": ""}).ok
    off = {"state": "off", "plan": None}
    assert not backends.judge("plan", {**answer, "speculation": off}).ok
    assert not backends.judge("profile", {}).ok


def test_the_verdict_is_the_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = backends.Finding("a", True, ""), backends.Finding("b", False, "")
    assert backends.verdict([good]) == 0
    assert backends.verdict([good, bad]) == 1
    assert "failed: b" in capsys.readouterr().out


# -- what is missing


def vulkan_headers(folder: Path, patch: int) -> Path:
    (folder / "vulkan").mkdir(parents=True, exist_ok=True)
    (folder / "vulkan" / "vulkan_core.h").write_text(
        f"#define VK_HEADER_VERSION {patch}\n"
        "#define VK_HEADER_VERSION_COMPLETE VK_MAKE_API_VERSION(0, 1, 3, VK_HEADER_VERSION)\n"
    )
    (folder / "vulkan" / "vulkan.hpp").write_text("")
    return folder


def test_missing_packages_are_named_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    line = backends.missing_for_vulkan(tmp_path / "include", tmp_path)
    packages = "mesa-vulkan-drivers libvulkan-dev glslc spirv-headers"
    assert line.endswith(f"sudo apt install {packages}")
    assert "\n" not in line

    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    (tmp_path / "share/vulkan/icd.d").mkdir(parents=True)
    (tmp_path / "share/vulkan/icd.d/lvp_icd.x86_64.json").write_text("{}")
    (tmp_path / "share/cmake/SPIRV-Headers").mkdir(parents=True)
    assert backends.missing_for_vulkan(tmp_path / "include", tmp_path).endswith("libvulkan-dev")

    old = vulkan_headers(tmp_path / "include", 239)
    assert backends.header_version(old) == (1, 3, 239)
    line = backends.missing_for_vulkan(old, tmp_path)
    assert "1.3.239" in line
    assert "--vulkan-headers" in line
    assert backends.missing_for_vulkan(vulkan_headers(old, 290), tmp_path) is None


def test_without_a_cuda_toolkit_one_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(backends.bootstrap, "CACHE", tmp_path)
    monkeypatch.setattr(backends, "cuda_toolkit", lambda: None)
    assert backends.main(["cuda"]) == 2
    error = capsys.readouterr().err
    assert "no CUDA toolkit" in error
    assert error.count("\n") == 1


def test_the_toolkit_in_the_cache_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends.bootstrap, "CACHE", tmp_path)
    monkeypatch.setattr(shutil, "which", lambda name: "/elsewhere/bin/nvcc")
    assert backends.cuda_toolkit() == Path("/elsewhere")
    own = tmp_path / "cuda" / "wheels" / "nvidia" / "cu13" / "bin"
    own.mkdir(parents=True)
    (own / "nvcc").write_text("")
    assert backends.cuda_toolkit() == own.parent


def test_bad_usage_is_no_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        backends.main(["metal"])
    assert stop.value.code == 2
    assert "invalid choice" in capsys.readouterr().err


def test_a_failing_process_is_one_line(tmp_path: Path) -> None:
    code = "import sys; print('first', file=sys.stderr); sys.exit('the last line')"
    with pytest.raises(backends.MissingError, match=r"ended with 1: the last line$"):
        backends.run([sys.executable, "-c", code], tmp_path, {})


@pytest.mark.skipif(sys.platform == "win32", reason="sends signals")
def test_a_crash_is_named(tmp_path: Path) -> None:
    code = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    with pytest.raises(backends.MissingError, match=r"ended with -9: SIGKILL$"):
        backends.run([sys.executable, "-c", code], tmp_path, {})


def test_devices_of_this_process_are_not_handed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GGML_VK_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("KNAPSPEC_EDGE_RPC_SERVERS", "a:1")
    environment = backends.environment(tmp_path, {})
    assert "GGML_VK_VISIBLE_DEVICES" not in environment
    assert "KNAPSPEC_EDGE_RPC_SERVERS" not in environment
    assert environment["KNAPSPEC_EDGE_LIBRARY"] == str(tmp_path)


# -- servers

# a server that listens and, like ggml's, never looks at anything else
LISTENER = """\
import os, socket, sys, threading
listener = socket.socket()
listener.bind(("127.0.0.1", int(sys.argv[3].rpartition(":")[2])))
listener.listen()
def end_with_parent():
    while os.read(0, 64): pass
    os._exit(0)
threading.Thread(target=end_with_parent, daemon=True).start()
while True:
    listener.accept()
"""


def is_listening(endpoint: str) -> bool:
    host, _, port = endpoint.rpartition(":")
    try:
        socket.create_connection((host, int(port)), 1.0).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize("error", [None, RuntimeError, KeyboardInterrupt])
def test_a_server_ends_with_its_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException] | None
) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text(LISTENER)
    monkeypatch.setattr(backends, "WORKER", worker)
    try:
        with backends.rpc_server(tmp_path, 1) as endpoint:
            assert is_listening(endpoint)
            if error is not None:
                raise error
    except (RuntimeError, KeyboardInterrupt):
        pass
    assert not is_listening(endpoint)


@pytest.mark.skipif(sys.platform == "win32", reason="sends signals")
def test_a_server_ends_with_a_killed_parent(tmp_path: Path) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text(LISTENER)
    script = (
        "import importlib.util, sys, time\n"
        f"sys.path.insert(0, {str(ROOT / 'scripts')!r})\n"
        "import backends\n"
        "from pathlib import Path\n"
        f"backends.WORKER = Path({str(worker)!r})\n"
        "with backends.rpc_server(Path('.'), 1) as endpoint:\n"
        "    print(endpoint, flush=True)\n"
        "    time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    endpoint = parent.stdout.readline().strip()
    assert is_listening(endpoint)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 20.0
    while is_listening(endpoint) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not is_listening(endpoint)


def test_a_server_that_cannot_start_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text("import sys; sys.exit('no such library')")
    monkeypatch.setattr(backends, "WORKER", worker)
    with (
        pytest.raises(backends.MissingError, match="the RPC server ended: no such library"),
        backends.rpc_server(tmp_path, 1),
    ):
        pass


@pytest.mark.parametrize(
    ("exit_code", "said", "n_kept", "ok"),
    [
        (1, "knapspec-edge: error: an RPC server (a:1) was lost: it crashed", 2, True),
        (-6, "an RPC server (a:1) was lost", 2, False),  # aborted
        (1, "an RPC server (a:1) was lost\n#1 0x7f1 in ggml_abort", 2, False),  # a backtrace
        (1, "knapspec-edge: error: something", 2, False),
        (1, "an RPC server (a:1) was lost", 0, False),  # nothing kept
        (0, "", 4, False),  # it was lost too late to show anything
    ],
)
def test_a_lost_server_is_judged(exit_code: int, said: str, n_kept: int, ok: bool) -> None:
    finding = backends.judge_loss("a:1", exit_code, said, n_kept, 4)
    assert finding.ok is ok
    assert f"{n_kept} of 4 documents kept" in finding.detail


# -- the worker


@pytest.mark.model
@pytest.mark.native
@pytest.mark.slow
def test_the_cpu_passes_for_a_device_but_for_its_place() -> None:
    from knapspec_edge.errors import DownloadError
    from knapspec_edge.native.library import library_file, library_folder

    if library_file("llama") is None:
        pytest.skip("the patched library is not installed; run scripts/test")
    try:
        _, f32 = backends.demo_models()
    except DownloadError as error:
        pytest.skip(f"the demo model cannot be fetched: {error}")
    side = backends.measure(library_folder(), f32, {}, gpu_layers=0, full=True)
    findings = backends.compare(side, side, 1e-9)
    assert [f.name for f in findings if not f.ok] == ["offloaded"]
    assert len(findings) == 9
