"""Set up .venv for scripts/run and scripts/test, once, and repair what a change made stale.

Everything here is Python's standard library: it runs before anything is installed. What was built
from which inputs stands in .venv/knapspec-edge.json, written last, so an interrupted set-up is
simply taken up again. The package is installed editable: a change of Python sources alone needs no
set-up.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STATE = VENV / "knapspec-edge.json"
CACHE = ROOT / ".cache"
LOG = CACHE / "setup.log"
PRISTINE = CACHE / "pristine"

BIN = VENV / ("Scripts" if os.name == "nt" else "bin")
PYTHON = BIN / ("python.exe" if os.name == "nt" else "python")
PROGRAM = BIN / ("knapspec-edge.exe" if os.name == "nt" else "knapspec-edge")

# what the installed package is made from, apart from Python sources
INPUTS = (
    "pyproject.toml",
    "CMakeLists.txt",
    "cmake/*",
    "patches/*.toml",
    "patches/series",
    "patches/*.patch",
    "patches/overlay/**/*",
    "models/manifest.toml",
)
PRISTINE_INPUTS = (
    "CMakeLists.txt",
    "cmake/*",
    "patches/UPSTREAM.toml",
    "tests/native/generator/*",
)


class SetupError(Exception):
    """What went wrong and what to do, for people."""


# ---------------------------------------------------------------------------------------------
# State


def fingerprint(patterns: Sequence[str], extra: str = "") -> str:
    """SHA-256 over the paths and contents of all files that match."""
    digest = hashlib.sha256(extra.encode())
    for pattern in patterns:
        for path in sorted(ROOT.glob(pattern)):
            if path.is_file() and path.suffix != ".pyc":
                digest.update(f"{path.relative_to(ROOT).as_posix()}\0".encode())
                digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def read_state(path: Path) -> dict[str, Any]:
    """An empty record where there is none, or an unreadable one."""
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return state if isinstance(state, dict) else {}


def write_state(path: Path, state: Mapping[str, Any]) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def cmake_args(state: Mapping[str, Any]) -> str:
    """CMAKE_ARGS of this call, else those of the set-up before: a GPU build stays one."""
    given = os.environ.get("CMAKE_ARGS")
    return str(state.get("cmake_args", "")) if given is None else given


@contextlib.contextmanager
def locked(say: Callable[[str], None]) -> Iterator[None]:
    """One set-up at a time per checkout. The lock goes with the process, however it ends."""
    CACHE.mkdir(exist_ok=True)
    with open(CACHE / "setup.lock", "a+b") as stream:
        waiting = False
        while True:
            try:
                _lock(stream.fileno())
                break
            except OSError:
                if not waiting:
                    say("Another set-up of this checkout is running; waiting for it ...")
                    waiting = True
                time.sleep(0.5)
        yield


def _lock(descriptor: int) -> None:
    if sys.platform == "win32":
        import msvcrt

        os.lseek(descriptor, 0, os.SEEK_SET)
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
    else:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


# ---------------------------------------------------------------------------------------------
# Progress


class Progress:
    """Phases with elapsed time on standard error; a moving line on a terminal."""

    def __init__(self, total: int, stream: TextIO | None = None) -> None:
        self.stream = stream or sys.stderr
        self.total = total
        self.number = 0
        self.terminal = self.stream.isatty()
        self.begun = time.monotonic()
        self.title = ""
        self.started = self.begun

    @contextlib.contextmanager
    def phase(self, title: str) -> Iterator[None]:
        self.number += 1
        self.title = title
        self.started = time.monotonic()
        if self.terminal:
            self.detail("")
        else:
            self.stream.write(f"[{self.number}/{self.total}] {title} ...\n")
            self.stream.flush()
        try:
            yield
        except BaseException:
            if self.terminal:
                self.stream.write("\n")
            raise
        seconds = time.monotonic() - self.started
        if self.terminal:
            self._line(f"[{self.number}/{self.total}] {title}: {_duration(seconds)}\n")
        elif seconds >= 1:
            self.stream.write(f"      {_duration(seconds)}\n")
        self.stream.flush()

    def detail(self, text: str) -> None:
        """What the running phase is doing; shown on a terminal only."""
        if not self.terminal:
            return
        width = shutil.get_terminal_size().columns - 1
        elapsed = _duration(time.monotonic() - self.started)
        line = f"[{self.number}/{self.total}] {self.title} ... {elapsed}  {text}"
        self._line(line[:width])
        self.stream.flush()

    def _line(self, text: str) -> None:
        self.stream.write(f"\r\x1b[K{text}")

    def say(self, text: str) -> None:
        self.stream.write(f"{text}\n")
        self.stream.flush()


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else f"{int(seconds) // 60} min {int(seconds) % 60} s"


# ---------------------------------------------------------------------------------------------
# Commands


def execute(
    command: Sequence[str | Path], progress: Progress, *, env: Mapping[str, str] | None = None
) -> str:
    """Run a command, its output into the log. Raises SetupError with the lines that matter."""
    words = [str(word) for word in command]
    environment = {**os.environ, **(env or {})}
    # The environment of another virtual environment must not leak into ours.
    for name in ("PYTHONHOME", "PYTHONPATH", "VIRTUAL_ENV", "PIP_REQUIRE_VIRTUALENV"):
        environment.pop(name, None)
    environment["PATH"] = os.pathsep.join([str(BIN), environment.get("PATH", "")])
    environment["PIP_DISABLE_PIP_VERSION_CHECK"] = "1"
    environment["PYTHONUNBUFFERED"] = "1"
    lines: list[str] = []
    last_shown = 0.0
    with open(LOG, "a", buffering=1, encoding="utf-8", errors="replace") as log:
        log.write(f"\n$ {' '.join(words)}\n")
        with subprocess.Popen(
            words,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            errors="replace",
        ) as process:
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    log.write(line)
                    lines.append(line.rstrip())
                    now = time.monotonic()
                    if now - last_shown > 0.1:
                        progress.detail(_activity(line))
                        last_shown = now
            except KeyboardInterrupt:
                process.terminate()
                raise
        log.flush()
    output = "\n".join(lines)
    if process.returncode != 0:
        raise SetupError(failure(output, words))
    return output


def _activity(line: str) -> str:
    """One line of output, in few words."""
    step = re.search(r"\[(\d+)/(\d+)\]", line)
    if step:
        return f"{step.group(1)} of {step.group(2)} files"
    action = re.match(r"\s*((?:Collecting|Downloading|Installing|Building)\s+\S+)", line)
    return action.group(1) if action else ""


_NETWORK = re.compile(
    r"Temporary failure in name resolution|Name or service not known|nodename nor servname"
    r"|Failed to establish a new connection|getaddrinfo failed|NewConnectionError"
    r"|Network is unreachable|ConnectTimeoutError|Read timed out|ProxyError|ConnectionResetError"
    r"|no network connection",
    re.IGNORECASE,
)
_NOISE = re.compile(
    r"^\s*$|note: This error originates|\[end of output\]|^\s*[│╰×─>]*\s*$|exit code:"
    r"|hint: See above|A new release of pip|To update, run|ninja: build stopped"
    r"|Failed building|Failed to build|Could not build wheels|subprocess-exited-with-error"
    r"|\*\*\* CMake|did not run successfully|See above for output|^\s*(full command|cwd): "
    r"|finished with status 'error'"
)


def failure(output: str, command: Sequence[str]) -> str:
    """The lines of a failed command's output that tell a person what to do."""
    reason = re.search(r"knapspec-edge cannot be built: (.*?)(?:\n\s*\n|\Z)", output, re.DOTALL)
    if reason:
        lines = [line.strip() for line in reason.group(1).splitlines()]
        return "\n  ".join(line.lstrip("│ ") for line in lines)
    ours = re.search(r"^patches\.py: (.*)", output, re.MULTILINE | re.DOTALL)
    if ours:
        return ours.group(1).strip()
    if _NETWORK.search(output):
        return (
            "there is no connection to the package index, and something needed is not here yet."
            "\n  Connect to the network (or check the proxy settings of pip) and run this again."
        )
    if "No space left on device" in output:
        return "the disk is full; about 2 GB are needed for the set-up."
    lines = output.splitlines()
    errors = [i for i, line in enumerate(lines) if re.search(r"\berror\b[:\s]", line, re.I)]
    real = [i for i in errors if not _NOISE.search(lines[i])]
    start = real[0] if real else max(0, len(lines) - 15)
    shown = [line.strip() for line in lines[start:] if not _NOISE.search(line)][:10]
    name = " ".join(Path(word).name for word in command[:3])
    return f"`{name}` stopped with\n  " + "\n  ".join(shown or ["(it gave no reason)"])


def pip(*arguments: str | Path) -> list[str | Path]:
    return [PYTHON, "-m", "pip", "--no-input", *arguments]


# ---------------------------------------------------------------------------------------------
# Steps


def require_compiler() -> None:
    """An early word, before anything is downloaded; CMake looks closer later."""
    if os.name == "nt":
        return  # Visual Studio is not on the path; CMake finds it
    hint = "on Debian and Ubuntu: `sudo apt install g++`; on Fedora: `sudo dnf install gcc-c++`"
    if sys.platform == "darwin":
        hint = "run `xcode-select --install`"
        selected = subprocess.run(["xcode-select", "-p"], capture_output=True)
        if selected.returncode != 0:
            raise SetupError(f"no C++ compiler was found; {hint}")
    named = os.environ.get("CXX")
    names = [named.split()[0]] if named else ["c++", "g++", "clang++"]
    if not any(shutil.which(name) for name in names):
        what = f"CXX names {named}, which was not found" if named else "no C++ compiler was found"
        raise SetupError(f"{what}, and llama.cpp is compiled on this machine; {hint}")


def make_environment(progress: Progress) -> None:
    for module in ("venv", "ensurepip"):
        if importlib.util.find_spec(module) is None:
            raise SetupError(
                f"this Python ({sys.executable}) has no module {module}; "
                "on Debian and Ubuntu: `sudo apt install python3-venv`"
            )
    if VENV.exists():
        shutil.rmtree(VENV)
    execute([sys.executable, "-m", "venv", VENV], progress)


def build_requirements() -> list[str]:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    match = re.search(r"^requires = (\[.*?\])", text, re.MULTILINE | re.DOTALL)
    if not match:
        raise SetupError("pyproject.toml names no build requirements")
    requirements = ast.literal_eval(match.group(1))
    return [str(requirement) for requirement in requirements]


def install_build_tools(progress: Progress) -> None:
    execute(pip("install", *build_requirements()), progress)
    # cmake and ninja, where the system's are missing or too old
    code = (
        "from scikit_build_core.build import *; print(*get_requires_for_build_wheel(), sep='\\n')"
    )
    output = execute([PYTHON, "-c", code], progress)
    missing = [line for line in output.splitlines() if re.match(r"(cmake|ninja)\b", line)]
    if missing:
        execute(pip("install", *missing), progress)


def install_bindings(progress: Progress) -> None:
    """The Python half of llama-cpp-python, without its own copy of llama.cpp.

    Not cached by pip, which would hand the wheel without a library to the user's other projects.
    """
    archive = execute([PYTHON, ROOT / "scripts" / "patches.py", "fetch", "--print-path"], progress)
    pinned = re.search(
        r'^bindings = "([^"]+)"', (ROOT / "patches" / "UPSTREAM.toml").read_text(), re.MULTILINE
    )
    assert pinned is not None
    code = (
        "from importlib import metadata as m\n"
        "try: print(m.version('llama-cpp-python'))\n"
        "except m.PackageNotFoundError: print('none')"
    )
    if execute([PYTHON, "-c", code], progress).split()[-1] == pinned.group(1):
        return
    execute(
        pip("install", "--no-cache-dir", "--no-build-isolation", archive.splitlines()[-1]),
        progress,
        env={"CMAKE_ARGS": "-DLLAMA_BUILD=OFF -DLLAVA_BUILD=OFF"},
    )


def forget_options(folder: Path) -> None:
    """Drop CMake's cached options, which outlive the CMAKE_ARGS they came from; keep objects."""
    for cache in folder.glob("CMakeCache.txt"):
        cache.unlink()


def install_package(progress: Progress, arguments: str) -> None:
    env = {"CMAKE_ARGS": arguments}
    execute(pip("install", "-v", "--no-build-isolation", "--editable", "."), progress, env=env)


def install_test_tools(progress: Progress) -> None:
    # the extras that tests need as well
    execute(pip("install", "knapspec-edge[dask,dev,documents,plot,policies]"), progress)


def set_up(*, tests: bool) -> dict[str, Any]:
    """Bring .venv up to date. Returns its state. Raises SetupError."""
    state = read_state(STATE)
    if _is_current(state, tests):
        return state
    with locked(lambda text: print(text, file=sys.stderr)):
        state = read_state(STATE)
        if _is_current(state, tests):
            return state
        arguments = cmake_args(state)
        wanted = fingerprint(INPUTS, arguments)
        fresh = not state or not PYTHON.exists()
        stale = fresh or state.get("inputs") != wanted or not PROGRAM.exists()
        with_tests = tests or bool(state.get("tests"))
        add_tests = with_tests and (stale or not state.get("tests"))
        progress = Progress(total=3 * fresh + stale + add_tests)
        LOG.write_text("", encoding="utf-8")
        if fresh:
            progress.say(f"Setting up knapspec-edge in {VENV} (a few minutes, once).")
        if stale:
            require_compiler()
        if fresh:
            with progress.phase("Making the Python environment"):
                make_environment(progress)
            with progress.phase("Installing the build tools"):
                install_build_tools(progress)
            with progress.phase("Fetching the llama.cpp sources and the bindings"):
                install_bindings(progress)
        if stale:
            if not fresh:
                # the pin or the build requirements may be what changed
                install_build_tools(progress)
                install_bindings(progress)
            if arguments != state.get("cmake_args"):
                for folder in (ROOT / "build").glob("py3-none-*"):
                    forget_options(folder)
            with progress.phase("Compiling llama.cpp and installing knapspec-edge"):
                install_package(progress, arguments)
            state = {"inputs": wanted, "cmake_args": arguments, "tests": False}
            write_state(STATE, state)
        if add_tests:
            with progress.phase("Installing the test tools"):
                install_test_tools(progress)
            state = {**state, "tests": True}
            write_state(STATE, state)
        seconds = time.monotonic() - progress.begun
        progress.say(f"Set-up done in {_duration(seconds)}.")
    return state


def _is_current(state: Mapping[str, Any], tests: bool) -> bool:
    if not state or not PYTHON.exists() or not PROGRAM.exists():
        return False
    if tests and not state.get("tests"):
        return False
    return bool(state.get("inputs") == fingerprint(INPUTS, cmake_args(state)))


# ---------------------------------------------------------------------------------------------
# The unpatched library, for comparisons


def build_pristine(arguments: str) -> dict[str, str]:
    """The same llama.cpp without our patches, and one tiny model per architecture.

    Returns the environment variables that tell the tests where they are: KNAPSPEC_EDGE_PRISTINE_LIB
    (folder of libraries) and KNAPSPEC_EDGE_TINY_MODELS (folder of GGUF files).
    """
    libraries = PRISTINE / "knapspec_edge" / "native" / "lib"
    models = PRISTINE / "tiny-models"
    where = {
        "KNAPSPEC_EDGE_PRISTINE_LIB": str(libraries),
        "KNAPSPEC_EDGE_TINY_MODELS": str(models),
    }
    marker = PRISTINE / "state.json"
    wanted = fingerprint(PRISTINE_INPUTS, arguments)

    def is_current() -> bool:
        there = libraries.is_dir() and models.is_dir()
        return there and bool(read_state(marker).get("inputs") == wanted)

    if is_current():
        return where
    with locked(lambda text: print(text, file=sys.stderr)):
        if is_current():
            return where
        progress = Progress(total=2)
        build = PRISTINE / "build"
        build.mkdir(parents=True, exist_ok=True)
        if read_state(marker).get("cmake_args") != arguments:
            forget_options(build)
        with progress.phase("Compiling llama.cpp without our patches, for comparison"):
            cmake = _tool("cmake")
            command: list[str | Path] = [cmake, "-S", ROOT, "-B", build]
            command += [f"-DPython_EXECUTABLE={PYTHON}", *arguments.split()]
            command += ["-DKNAPSPEC_EDGE_PRISTINE=ON", "-DKNAPSPEC_EDGE_TEST_TOOLS=ON"]
            if shutil.which("ninja", path=_path()):
                command += ["-G", "Ninja"]
            execute(command, progress)
            jobs = str(os.cpu_count() or 2)
            execute([cmake, "--build", build, "--config", "Release", "-j", jobs], progress)
            shutil.rmtree(libraries, ignore_errors=True)
            command = [cmake, "--install", build, "--prefix", PRISTINE, "--config", "Release"]
            execute([*command, "--component", "knapspec_edge"], progress)
        with progress.phase("Making a tiny model of every architecture"):
            make_tiny_models(build / "bin", models, progress)
        write_state(marker, {"inputs": wanted, "cmake_args": arguments})
    return where


def make_tiny_models(programs: Path, target: Path, progress: Progress) -> None:
    """Let upstream's generator write its models; replaces the folder as a whole."""
    name = "knapspec_edge_tiny_models" + (".exe" if os.name == "nt" else "")
    scratch = target.with_name(target.name + ".part")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    execute([programs / name, "-s", "7", "-o", scratch], progress)  # fixed weights
    if not any(scratch.glob("*.gguf")):
        raise SetupError(f"the generator {programs / name} wrote no model; see {LOG}")
    shutil.rmtree(target, ignore_errors=True)
    os.replace(scratch, target)


def _path() -> str:
    return os.pathsep.join([str(BIN), os.environ.get("PATH", "")])


def library_folder() -> Path:
    """The installed libraries; an editable package has its Python files elsewhere."""
    found = sorted(VENV.glob("lib*/python*/site-packages/knapspec_edge/native/lib"))
    return found[0] if found else VENV / "Lib/site-packages/knapspec_edge/native/lib"


def _tool(name: str) -> str:
    found = shutil.which(name, path=_path())
    if not found:
        raise SetupError(f"{name} is missing from {BIN}; delete {VENV} and run this again")
    return found


# ---------------------------------------------------------------------------------------------
# The two commands


def _has_log() -> bool:
    return LOG.exists() and LOG.stat().st_size > 0


def _guarded(action: Callable[[], int]) -> int:
    try:
        return action()
    except SetupError as error:
        detail = f"\nThe whole output is in {LOG}" if _has_log() else ""
        print(f"knapspec-edge: set-up failed: {error}{detail}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"knapspec-edge: set-up failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nknapspec-edge: interrupted; the next call goes on from here.", file=sys.stderr)
        return 130


def main_run(arguments: Sequence[str]) -> int:
    """Set up, then become knapspec-edge: same streams, same exit code."""

    def action() -> int:
        set_up(tests=False)
        os.environ.setdefault("KNAPSPEC_EDGE_LIBRARY", str(library_folder()))
        if os.name == "nt":
            # the child has the console and its own handling of Ctrl-C
            program = subprocess.Popen([PROGRAM, *arguments])
            while True:
                with contextlib.suppress(KeyboardInterrupt):
                    return program.wait()
        sys.stdout.flush()
        sys.stderr.flush()
        # through the interpreter: a long path would break the script's first line
        os.execv(PYTHON, [str(PYTHON), str(PROGRAM), *arguments])

    return _guarded(action)


def main_test(arguments: Sequence[str]) -> int:
    """Set up, build what the comparisons need, then lint, types and tests."""

    def action() -> int:
        state = set_up(tests=True)
        where = build_pristine(str(state.get("cmake_args", "")))
        environment = {**os.environ, **where, "PATH": _path()}
        environment.setdefault("KNAPSPEC_EDGE_LIBRARY", str(library_folder()))
        environment.pop("PYTHONPATH", None)
        failed: list[str] = []
        for title, command in (
            ("ruff check", ["ruff", "check", "."]),
            ("ruff format", ["ruff", "format", "--check", "--quiet", "."]),
            ("mypy", ["mypy"]),
        ):
            print(f"$ {' '.join(command)}", flush=True)
            result = subprocess.run([PYTHON, "-m", *command], cwd=ROOT, env=environment)
            if result.returncode != 0:
                failed.append(title)
        print("$ pytest", *arguments, flush=True)
        command = [str(PYTHON), "-m", "pytest", *arguments]
        code = subprocess.run(command, cwd=ROOT, env=environment).returncode
        if failed:
            print(f"Failed before the tests: {', '.join(failed)} (see above).", flush=True)
        return code or bool(failed)

    return _guarded(action)
