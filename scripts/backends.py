#!/usr/bin/env python3
"""Check the builds for GPUs on a machine without one.

    python scripts/backends.py vulkan    # Vulkan, on a driver that computes in software
    python scripts/backends.py rpc       # a device in another process: the quick stand-in, then
                                         # lost in the middle of a job
    python scripts/backends.py cuda      # whether the CUDA build configures; --compile norm.cu

Run it with the project's Python. Each builds the patched libraries in a kept folder of its own
(.cache/vulkan, .cache/rpc, .cache/cuda). `vulkan` and `rpc` then compare the F32 demo model on that
device with the CPU: layers are really offloaded, logits and text agree, plans are honoured, a
partial offload works, and the commands profile and plan there. Exit code 0 says that everything
held, 1 that something did not, 2 that something is missing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import _bootstrap as bootstrap  # noqa: E402

WORKER = ROOT / "scripts" / "_backend_worker.py"
PROMPT = "The sky is blue because sunlight is scattered by the air, and"
MAX_TOKENS = 16
SECONDS = 900  # of any one process; the software driver computes a step in about a second
# Largest difference of two logits in units of the range of a row: about five times what was seen on
# Mesa 22's software driver, whose exponentials are approximate. RPC runs the CPU's own code.
TOLERANCES = {"vulkan": 2e-3, "rpc": 1e-5}
# ggml's Vulkan backend uses VK_EXT_layer_settings
VULKAN_HEADERS = (1, 3, 272)
# Versions that belong together, with nvcc itself in a wheel (13 and newer)
CUDA_WHEELS = ("nvidia-cuda-nvcc", "nvidia-cuda-runtime", "nvidia-cuda-cccl", "nvidia-cublas")
CUDA_ARCHITECTURE = "80"


class MissingError(Exception):
    """What is not there, and how to get it, in one line."""


@dataclass(frozen=True)
class Finding:
    """One thing that was checked."""

    name: str
    ok: bool
    detail: str

    def __str__(self) -> str:
        return f"{'ok  ' if self.ok else 'FAIL'}  {self.name:<16}  {self.detail}"


# ---------------------------------------------------------------------------------------------
# Builds


def build(name: str, options: Sequence[str], jobs: int) -> Path:
    """The patched libraries with these CMake options, up to date. Returns their folder.

    Raises bootstrap.SetupError.
    """
    target = bootstrap.CACHE / name
    folder = target / "knapspec_edge" / "native" / "lib"
    marker = target / "state.json"
    wanted = bootstrap.fingerprint(bootstrap.INPUTS, " ".join(options))
    with bootstrap.locked(say):
        state = bootstrap.read_state(marker)
        if state.get("inputs") == wanted and folder.is_dir():
            return folder
        if state.get("options") not in (None, list(options)):
            bootstrap.forget_options(target / "build")
        progress = bootstrap.Progress(total=1)
        with progress.phase(f"Compiling llama.cpp with {' '.join(options)}"):
            cmake = configure(target / "build", options, progress)
            command: list[str | Path] = [cmake, "--build", target / "build"]
            bootstrap.execute([*command, "--config", "Release", "-j", str(jobs)], progress)
            shutil.rmtree(folder, ignore_errors=True)
            command = [cmake, "--install", target / "build", "--prefix", target]
            bootstrap.execute([*command, "--component", "knapspec_edge"], progress)
        bootstrap.write_state(marker, {"inputs": wanted, "options": list(options)})
    return folder


def configure(folder: Path, options: Sequence[str], progress: bootstrap.Progress) -> str:
    """Configure a build of the patched libraries. Returns the cmake program."""
    cmake = shutil.which("cmake", path=bootstrap._path())
    if not cmake:
        raise MissingError("cmake is missing: run scripts/test first, or install it")
    folder.mkdir(parents=True, exist_ok=True)
    command: list[str | Path] = [cmake, "-S", ROOT, "-B", folder]
    command += [f"-DPython_EXECUTABLE={sys.executable}", *options]
    if shutil.which("ninja", path=bootstrap._path()):
        command += ["-G", "Ninja"]
    bootstrap.execute(command, progress)
    return cmake


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# ---------------------------------------------------------------------------------------------
# What a build needs


def header_version(include: Path) -> tuple[int, int, int] | None:
    """Version of the Vulkan headers in a folder of headers, or None where there are none."""
    try:
        text = (include / "vulkan" / "vulkan_core.h").read_text(encoding="utf-8")
    except OSError:
        return None
    version = re.search(
        r"VK_HEADER_VERSION_COMPLETE VK_MAKE_API_VERSION\(0, (\d+), (\d+), VK_HEADER", text
    )
    patch = re.search(r"#define VK_HEADER_VERSION (\d+)", text)
    if not version or not patch or not (include / "vulkan" / "vulkan.hpp").is_file():
        return None
    return int(version[1]), int(version[2]), int(patch[1])


def missing_for_vulkan(include: Path, prefix: Path = Path("/usr")) -> str | None:
    """What keeps Vulkan from being built and run in software, in one line; None: nothing."""
    drivers = prefix / "share" / "vulkan" / "icd.d"
    packages = {
        "mesa-vulkan-drivers": any(drivers.glob("lvp_icd*.json")),
        "libvulkan-dev": header_version(include) is not None,
        "glslc": shutil.which("glslc") is not None,
        "spirv-headers": any(prefix.glob("**/SPIRV-HeadersConfig.cmake"))
        if not (prefix / "share/cmake/SPIRV-Headers").is_dir()
        else True,
    }
    absent = [name for name, there in packages.items() if not there]
    if absent:
        return f"{', '.join(absent)} missing: sudo apt install {' '.join(absent)}"
    version = header_version(include)
    assert version is not None
    if version < VULKAN_HEADERS:
        shown, needed = (".".join(map(str, v)) for v in (version, VULKAN_HEADERS))
        return (
            f"the Vulkan headers in {include} are {shown}, and {needed} or newer are needed "
            "(Debian 13 has them): unpack newer ones and name their folder with --vulkan-headers"
        )
    return None


def cuda_toolkit() -> Path | None:
    """The CUDA toolkit: in .cache/cuda where --toolkit put it, else the one whose nvcc is found."""
    own = sorted((bootstrap.CACHE / "cuda" / "wheels" / "nvidia").glob("cu*/bin/nvcc"))
    found = str(own[-1]) if own else shutil.which("nvcc")
    if found is None and (Path("/usr/local/cuda/bin") / "nvcc").is_file():
        found = "/usr/local/cuda/bin/nvcc"
    return Path(found).resolve().parents[1] if found else None


def install_cuda_toolkit() -> None:
    """Install the compiler and libraries from wheels, about 1 GB, into .cache/cuda."""
    if platform.system() != "Linux":
        raise MissingError("the wheels are for Linux: install the CUDA toolkit of NVIDIA")
    target = bootstrap.CACHE / "cuda" / "wheels"
    with bootstrap.locked(say):
        progress = bootstrap.Progress(total=1)
        with progress.phase(f"Installing {', '.join(CUDA_WHEELS)} (about 1 GB)"):
            shutil.rmtree(target, ignore_errors=True)
            command = [sys.executable, "-m", "pip", "--no-input", "install", "--no-cache-dir"]
            bootstrap.execute([*command, "--target", target, *CUDA_WHEELS], progress)
    # wheels hold libcudart.so.13 only; linkers look for libcudart.so
    for library in target.glob("nvidia/cu*/lib/lib*.so.*"):
        plain = library.with_name(library.name.split(".so.")[0] + ".so")
        if not plain.exists():
            plain.symlink_to(library.name)


# ---------------------------------------------------------------------------------------------
# Comparison


def difference(reference: Any, other: Any) -> float:
    """Largest difference of two arrays of logits [..., vocabulary], in units of the range of the
    reference's row. Infinite where the shapes differ or a number is not finite."""
    import numpy as np

    if reference.shape != other.shape or not np.isfinite(other).all():
        return float("inf")
    spread = reference.max(axis=-1, keepdims=True) - reference.min(axis=-1, keepdims=True)
    return float((np.abs(reference - other) / spread).max())


def first_difference(reference: Sequence[int], other: Sequence[int]) -> int | None:
    """Index of the first token that differs, or of the end of the shorter; None: all the same."""
    for i, (a, b) in enumerate(zip(reference, other, strict=False)):
        if a != b:
            return i
    return None if len(reference) == len(other) else min(len(reference), len(other))


def compare_text(
    name: str,
    reference: Sequence[int],
    other: Sequence[int],
    margins: Sequence[float],
    explained: float,
) -> Finding:
    """Two greedy texts. The first difference is rounding if the two best logits of the reference
    were at most `explained` apart there; what follows it is another text."""
    at = first_difference(reference, other)
    if at is None:
        return Finding(name, bool(reference), f"{len(reference)} tokens, all the same")
    margin = margins[at] if at < len(margins) else float("inf")
    return Finding(
        name,
        margin <= explained,
        f"token {at + 1} of {len(reference)} differs, where the two best logits are {margin:.3g} "
        f"apart (rounding explains {explained:.3g})",
    )


def compare(
    cpu: tuple[Mapping[str, Any], Mapping[str, Any]],
    device: tuple[Mapping[str, Any], Mapping[str, Any]],
    tolerance: float,
) -> list[Finding]:
    """Everything about one device, from (facts, arrays) of both sides (`_backend_worker`)."""
    (reference, reference_arrays), (facts, arrays) = cpu, device
    findings = [placed("offloaded", facts["placement"], partial=False)]
    recognised = facts["refusal"] is None and facts["n_sublayers"] == reference["n_sublayers"]
    detail = f"{facts['n_sublayers']} sublayers of {reference['n_sublayers']}"
    findings.append(Finding("recognised", recognised, facts["refusal"] or detail))

    logits = reference_arrays["prompt_logits"]
    findings.append(close("logits", logits, arrays["prompt_logits"], tolerance))
    # both of two logits may be off, in opposite directions
    spread = float((logits.max(axis=-1) - logits.min(axis=-1)).max())
    explained = 2.0 * tolerance * spread
    margins = reference["margins"]
    text = reference["text"]
    findings.append(compare_text("text", text, facts["text"], margins, explained))
    own, own_margins = facts["text"], facts["margins"]
    passed = facts["verified"]
    findings.append(
        compare_text("one pass", own[1 : len(passed) + 1], passed, own_margins[1:], explained)
    )
    if not recognised:
        return findings
    nodes, fewer = facts["n_nodes"], facts["n_nodes_plan"]
    findings += [
        Finding("plan honoured", 0 < fewer < nodes, f"{fewer} nodes instead of {nodes}"),
        close("draft logits", reference_arrays["draft_logits"], arrays["draft_logits"], tolerance),
        compare_text("text drafted", own, facts["drafted_text"], own_margins, explained),
        Finding(
            "drafted",
            facts["n_drafted"] > 0,
            f"{facts['n_drafted']} tokens, {facts['n_accepted']} accepted",
        ),
    ]
    return findings


def close(name: str, reference: Any, other: Any, tolerance: float) -> Finding:
    found = difference(reference, other)
    detail = f"largest difference {found:.1e} of the range (allowed {tolerance:.0e})"
    return Finding(name, found <= tolerance, detail)


def placed(name: str, placement: Mapping[str, Any], *, partial: bool) -> Finding:
    """Whether layers lie on a GPU: all of them, or (partial) some."""
    n_layers = placement["n_layers"]
    offloaded = placement["offloaded_layers"] or 0
    ok = 0 < offloaded < n_layers and placement["partial"] if partial else offloaded == n_layers
    where = ", ".join(placement["buffers"]) or "unknown"
    return Finding(name, bool(ok), f"{offloaded} of {n_layers} layers; weights in {where}")


# ---------------------------------------------------------------------------------------------
# Processes


def environment(libraries: Path, more: Mapping[str, str]) -> dict[str, str]:
    """That of this process, for children that load other libraries and see other devices."""
    kept = {
        k: v for k, v in os.environ.items() if not k.startswith(("GGML_VK_", "KNAPSPEC_EDGE_R"))
    }
    paths = [str(ROOT), *filter(None, [kept.get("PYTHONPATH")])]
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join(paths),
        "KNAPSPEC_EDGE_LIBRARY": str(libraries),
        **more,
    }


def measure(
    libraries: Path, model: Path, more: Mapping[str, str], *, gpu_layers: int | None, full: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(facts, arrays) of one side, computed in a process of its own. Raises MissingError."""
    import numpy as np

    request = {
        "model": str(model),
        "gpu_layers": gpu_layers,
        "prompt": PROMPT,
        "max_tokens": MAX_TOKENS,
        "full": full,
    }
    with tempfile.TemporaryDirectory() as scratch:
        run([sys.executable, WORKER, "measure", json.dumps(request), scratch], libraries, more)
        facts = json.loads((Path(scratch) / "facts.json").read_text(encoding="utf-8"))
        with np.load(Path(scratch) / "arrays.npz") as stored:
            arrays = {name: stored[name] for name in stored.files}
    return facts, arrays


def run(command: Sequence[str | Path], libraries: Path, more: Mapping[str, str]) -> str:
    """Standard output of a command. Raises MissingError with its last line if it fails."""
    words = [str(word) for word in command]
    try:
        result = subprocess.run(
            words,
            env=environment(libraries, more),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise MissingError(f"{' '.join(words[1:4])} took longer than {SECONDS} s") from None
    if result.returncode:
        last = (result.stderr.strip().splitlines() or [_signal_name(result.returncode)])[-1]
        raise MissingError(f"{' '.join(words[1:4])} ended with {result.returncode}: {last}")
    return result.stdout


def _signal_name(code: int) -> str:
    try:
        return signal.Signals(-code).name
    except ValueError:
        return "no reason given"


def check_command(
    name: str, arguments: Sequence[str], libraries: Path, more: Mapping[str, str]
) -> Finding:
    """Run `knapspec-edge` on the device and judge its JSON."""
    try:
        output = run([sys.executable, "-m", "knapspec_edge", *arguments], libraries, more)
        return judge(name, json.loads(output))
    except (MissingError, ValueError) as error:
        return Finding(name, False, str(error))


def judge(name: str, answer: Mapping[str, Any]) -> Finding:
    """What a command's JSON says: a profile holds something, a forced plan drafted."""
    if name == "profile":
        return Finding(name, bool(answer), f"{len(json.dumps(answer))} characters of JSON")
    drafted = answer["timings"].get("draft_n", 0)
    speculation = answer["speculation"]
    ok = speculation["state"] == "on" and drafted > 0 and bool(answer["text"])
    detail = f"speculation {speculation['state']}, {drafted} tokens drafted"
    if speculation["plan"]:
        detail += f", {len(speculation['plan']['reduced'])} sublayers left out"
    return Finding(name, ok, detail)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def rpc_server(libraries: Path, threads: int) -> Iterator[str]:
    """A server on the loopback interface; yields its host:port. It ends with this block, and with
    this process however that ends (`_backend_worker.serve`). Raises MissingError."""
    endpoint = f"127.0.0.1:{free_port()}"
    command = [sys.executable, str(WORKER), "serve", str(libraries), endpoint, str(threads)]
    server = subprocess.Popen(
        command,
        env=environment(libraries, {}),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    try:
        wait_for(endpoint, server)
        yield endpoint
    finally:
        assert server.stdin is not None
        with contextlib.suppress(OSError):
            server.stdin.close()
        try:
            server.wait(timeout=5)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
        assert server.stderr is not None
        server.stderr.close()


def wait_for(endpoint: str, server: subprocess.Popen[bytes], seconds: float = 30.0) -> None:
    """Until the server accepts connections. Raises MissingError if it ends or stays silent."""
    host, _, port = endpoint.rpartition(":")
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if server.poll() is not None:
            assert server.stderr is not None
            reason = server.stderr.read().decode(errors="replace").strip().splitlines()
            raise MissingError(f"the RPC server ended: {(reason or ['no reason given'])[-1]}")
        with contextlib.suppress(OSError):
            socket.create_connection((host, int(port)), 1.0).close()
            return
        time.sleep(0.1)
    raise MissingError(f"the RPC server does not listen at {endpoint} after {seconds:.0f} s")


# ---------------------------------------------------------------------------------------------
# The checks


def demo_models() -> tuple[Path, Path]:
    """The demo model as it is shipped, and in F32."""
    from knapspec_edge import models
    from knapspec_edge.quantize import converted

    name = models.default_model().name
    return models.obtain(name), converted(name, "F32")


def check_device(
    name: str, libraries: Path, more: Mapping[str, str], *, skipped: Sequence[str]
) -> list[Finding]:
    """All findings about one device, printed as they come."""
    findings: list[Finding] = []

    def report(*found: Finding) -> None:
        findings.extend(found)
        for finding in found:
            print(finding, flush=True)

    shipped, f32 = demo_models()
    tolerance = TOLERANCES[name]
    cpu = measure(libraries, f32, {}, gpu_layers=0, full=True)
    device = measure(libraries, f32, more, gpu_layers=None, full=True)
    report(*compare(cpu, device, tolerance))

    half = cpu[0]["placement"]["n_layers"] // 2
    facts, arrays = measure(libraries, f32, more, gpu_layers=half, full=False)
    report(placed("partial offload", facts["placement"], partial=True))
    report(close("partial logits", cpu[1]["prompt_logits"], arrays["prompt_logits"], tolerance))
    with tempfile.TemporaryDirectory() as cache:
        # measured anew, and nothing of it kept for the user's own runs
        more = {**more, "KNAPSPEC_EDGE_CACHE": cache}
        common = [str(shipped), "--ctx", "1024", "--json"]
        if "profile" not in skipped:
            command = ["profile", *common, "--budget", "10"]
            report(check_command("profile", command, libraries, more))
        if "plan" not in skipped:
            command = ["run", *common, "--spec", "on", "--max-tokens", "8", "Why is the sky blue?"]
            report(check_command("plan", command, libraries, more))
    return findings


def verdict(findings: Sequence[Finding]) -> int:
    failed = [finding.name for finding in findings if not finding.ok]
    print(f"failed: {', '.join(failed)}" if failed else f"all {len(findings)} checks hold")
    return 1 if failed else 0


def check_vulkan(options: argparse.Namespace) -> int:
    include = options.vulkan_headers or Path("/usr/include")
    missing = missing_for_vulkan(include)
    if missing:
        raise MissingError(missing)
    cmake_options = ["-DGGML_VULKAN=ON"]
    if options.vulkan_headers:
        cmake_options.append(f"-DVulkan_INCLUDE_DIR={options.vulkan_headers.resolve()}")
    libraries = build("vulkan", cmake_options, options.jobs)
    devices = {
        # ggml passes over drivers that compute on the CPU unless one is named
        "GGML_VK_VISIBLE_DEVICES": os.environ.get("GGML_VK_VISIBLE_DEVICES", "0"),
        # else the factors of products of F32 matrices are rounded to 16 bits
        "GGML_VK_DISABLE_F16": "1",
    }
    return verdict(check_device("vulkan", libraries, devices, skipped=options.skip))


def check_rpc(options: argparse.Namespace) -> int:
    libraries = build("rpc", ["-DGGML_RPC=ON"], options.jobs)
    with rpc_server(libraries, options.jobs) as endpoint:
        servers = {"KNAPSPEC_EDGE_RPC_SERVERS": endpoint}
        findings = check_device("rpc", libraries, servers, skipped=options.skip)
    findings.append(lose_server(libraries, demo_models()[0], options.jobs))
    print(findings[-1], flush=True)
    return verdict(findings)


def lose_server(libraries: Path, model: Path, threads: int) -> Finding:
    """A server ends in the middle of a job with several documents."""
    with tempfile.TemporaryDirectory() as folder:
        documents = [Path(folder, f"{number}.txt") for number in range(4)]
        for document in documents:
            document.write_text(f"{document.name}: {PROMPT} " * 20, encoding="utf-8")
        output = Path(folder, "summaries.jsonl")
        with rpc_server(libraries, threads) as endpoint:
            command = [sys.executable, "-m", "knapspec_edge", "summarize", model, *documents]
            command += ["--rpc", endpoint, "-o", output, "--spec", "off", "--max-tokens", "16"]
            job = subprocess.Popen(
                list(map(str, command)),
                env=environment(libraries, {}),
                stderr=subprocess.PIPE,
                text=True,
                encoding="utf-8",
            )
            deadline = time.monotonic() + SECONDS
            while job.poll() is None and not n_lines(output) and time.monotonic() < deadline:
                time.sleep(0.01)
        try:
            _, said = job.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            job.kill()
            _, said = job.communicate()
        return judge_loss(endpoint, job.returncode, said, n_lines(output), len(documents))


def n_lines(file: Path) -> int:
    return file.read_bytes().count(b"\n") if file.exists() else 0


def judge_loss(endpoint: str, exit_code: int, said: str, n_kept: int, n_documents: int) -> Finding:
    """One line that names the server, and nothing finished is lost."""
    lines = said.splitlines()
    ok = exit_code == 1 and len(lines) == 1 and endpoint in lines[0] and 0 < n_kept < n_documents
    shown = lines[-1] if lines else "nothing"
    detail = f"exit code {exit_code}, {n_kept} of {n_documents} documents kept; said {shown}"
    return Finding("server lost", ok, detail)


def check_cuda(options: argparse.Namespace) -> int:
    if options.toolkit:
        install_cuda_toolkit()
    toolkit = cuda_toolkit()
    if toolkit is None:
        raise MissingError(
            "there is no CUDA toolkit (nvcc): install it, or let --toolkit fetch the compiler from "
            "wheels into .cache/cuda (about 1 GB)"
        )
    folder = bootstrap.CACHE / "cuda" / "build"
    cmake_options = [
        "-DGGML_CUDA=ON",
        f"-DCMAKE_CUDA_COMPILER={toolkit / 'bin' / 'nvcc'}",
        f"-DCUDAToolkit_ROOT={toolkit}",
        f"-DCMAKE_CUDA_ARCHITECTURES={options.architecture}",
    ]
    if not list(toolkit.glob("**/stubs/libcuda.so")):
        cmake_options.append("-DGGML_CUDA_NO_VMM=ON")  # needs the driver's library to link
    with bootstrap.locked(say):
        progress = bootstrap.Progress(total=1 + bool(options.compile))
        bootstrap.forget_options(folder)
        with progress.phase("Configuring with -DGGML_CUDA=ON"):
            cmake = configure(folder, cmake_options, progress)
        print(
            Finding("configure", True, f"CUDA toolkit {toolkit.name} for sm_{options.architecture}")
        )
        if options.compile:
            object_file = compile_one(cmake, folder, options.compile, progress)
            print(
                Finding("compile", True, f"{options.compile}, {object_file.stat().st_size} bytes")
            )
    return 0


def compile_one(cmake: str, folder: Path, name: str, progress: bootstrap.Progress) -> Path:
    """Compile one source of the CUDA backend. Returns its object file."""
    if not (folder / "build.ninja").is_file():
        raise MissingError("--compile needs ninja: pip install ninja")
    if not (folder / "llama.cpp-src" / "ggml" / "src" / "ggml-cuda" / name).is_file():
        raise MissingError(f"there is no ggml-cuda/{name}")
    relative = f"llama.cpp/ggml/src/ggml-cuda/CMakeFiles/ggml-cuda.dir/{name}.o"
    with progress.phase(f"Compiling ggml-cuda/{name}"):
        bootstrap.execute([cmake, "--build", folder, "--target", relative], progress)
    return folder / relative


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = result.add_subparsers(dest="command", required=True)
    jobs = os.cpu_count() or 1
    for name, function, text in (
        ("vulkan", check_vulkan, "Vulkan on a driver that computes in software"),
        ("rpc", check_rpc, "a device in another process, through llama.cpp's RPC backend"),
        ("cuda", check_cuda, "whether a build with CUDA configures"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(function=function)
        if name == "cuda":
            command.add_argument(
                "--toolkit", action="store_true", help="fetch the compiler from wheels (1 GB)"
            )
            command.add_argument(
                "--compile", metavar="FILE", help="also compile one source, such as norm.cu"
            )
            command.add_argument(
                "--architecture", default=CUDA_ARCHITECTURE, metavar="SM", help="default: 80"
            )
            continue
        command.add_argument("--jobs", "-j", type=int, default=jobs, help="default: all CPUs")
        command.add_argument(
            "--skip",
            action="append",
            default=[],
            choices=["profile", "plan"],
            help="leave out a command that takes long on a slow device; repeatable",
        )
        if name == "vulkan":
            command.add_argument(
                "--vulkan-headers",
                type=Path,
                metavar="FOLDER",
                help="folder with vulkan/vulkan.hpp, where the system's is too old",
            )
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    from knapspec_edge.errors import KnapspecError

    begun = time.monotonic()
    try:
        code: int = options.function(options)
    except (MissingError, bootstrap.SetupError, KnapspecError, OSError) as error:
        say(f"backends.py: {error}")
        return 2
    except KeyboardInterrupt:
        say("\nbackends.py: interrupted")
        return 130
    say(f"{time.monotonic() - begun:.0f} s")
    return code


if __name__ == "__main__":
    sys.exit(main())
