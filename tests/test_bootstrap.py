"""scripts/_bootstrap.py: what it takes for stale, and what it says when something fails."""

from __future__ import annotations

import importlib.util
import io
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent


def _load() -> ModuleType:
    path = ROOT / "scripts" / "_bootstrap.py"
    spec = importlib.util.spec_from_file_location("knapspec_edge_bootstrap", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def setup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module, working on an empty checkout. Commands are recorded, not run."""
    module = _load()
    venv = tmp_path / ".venv"
    names = {
        "ROOT": tmp_path,
        "VENV": venv,
        "STATE": venv / "knapspec-edge.json",
        "CACHE": tmp_path / ".cache",
        "LOG": tmp_path / ".cache" / "setup.log",
        "PRISTINE": tmp_path / ".cache" / "pristine",
        "BIN": venv / "bin",
        "PYTHON": venv / "bin" / "python",
        "PROGRAM": venv / "bin" / "knapspec-edge",
    }
    for name, value in names.items():
        monkeypatch.setattr(module, name, value)
    (tmp_path / "patches" / "overlay").mkdir(parents=True)
    (tmp_path / "patches" / "UPSTREAM.toml").write_text('bindings = "0.3.36"\n')
    (tmp_path / "pyproject.toml").write_text('requires = ["scikit-build-core>=0.10", "pip"]\n')
    (tmp_path / "CMakeLists.txt").write_text("project(x)\n")
    module.commands = []

    def execute(command, progress, *, env=None):
        words = [str(word) for word in command]
        module.commands.append((" ".join(words), dict(env or {})))
        if "venv" in words:
            module.PYTHON.parent.mkdir(parents=True)
            module.PYTHON.write_text("")
        if "--install" in words:
            (module.PRISTINE / "knapspec_edge" / "native" / "lib").mkdir(parents=True)
        if words[0].endswith("knapspec_edge_tiny_models"):
            (Path(words[-1]) / "llama.gguf").write_text("GGUF")
        if module.fail_at and module.fail_at in " ".join(words):
            raise module.SetupError("stopped here")
        if "--editable" in words:
            module.PROGRAM.write_text("")
        return "archive.tar.gz"

    module.fail_at = ""
    monkeypatch.setattr(module, "execute", execute)
    monkeypatch.setattr(module, "require_compiler", lambda: None)
    monkeypatch.delenv("CMAKE_ARGS", raising=False)
    return module


def ran(module: ModuleType) -> str:
    text = "\n".join(command for command, _ in module.commands)
    module.commands.clear()
    return text


def test_the_first_call_sets_up_and_the_second_does_nothing(setup):
    setup.set_up(tests=False)
    first = ran(setup)
    assert "-m venv" in first
    assert "--editable ." in first
    assert "knapspec-edge[dev]" not in first
    setup.set_up(tests=False)
    assert ran(setup) == ""


def test_the_bindings_come_without_their_own_llama_and_uncached(setup):
    setup.set_up(tests=False)
    (command,) = [(c, e) for c, e in setup.commands if "archive.tar.gz" in c]
    assert command[1] == {"CMAKE_ARGS": "-DLLAMA_BUILD=OFF -DLLAVA_BUILD=OFF"}
    assert "--no-cache-dir" in command[0]


def test_tests_add_their_tools_to_an_existing_environment(setup):
    setup.set_up(tests=False)
    ran(setup)
    setup.set_up(tests=True)
    added = ran(setup)
    assert "knapspec-edge[dask,dev,documents,plot,policies]" in added
    assert "--editable" not in added
    setup.set_up(tests=False)
    assert ran(setup) == ""


def test_python_sources_do_not_make_it_stale_but_native_ones_do(setup):
    setup.set_up(tests=False)
    ran(setup)
    (setup.ROOT / "knapspec_edge").mkdir()
    (setup.ROOT / "knapspec_edge" / "new.py").write_text("")
    setup.set_up(tests=False)
    assert ran(setup) == ""
    (setup.ROOT / "patches" / "overlay" / "x.cpp").write_text("int x;")
    setup.set_up(tests=False)
    again = ran(setup)
    assert "--editable ." in again
    assert "-m venv" not in again


def test_cmake_args_are_kept_and_a_change_builds_again(setup, monkeypatch):
    monkeypatch.setenv("CMAKE_ARGS", "-DGGML_VULKAN=on")
    build = setup.ROOT / "build" / "py3-none-any"
    build.mkdir(parents=True)
    (build / "CMakeCache.txt").write_text("GGML_CUDA=ON")
    setup.set_up(tests=False)
    assert ("--editable .", "-DGGML_VULKAN=on") in [
        (command[-12:], env.get("CMAKE_ARGS")) for command, env in setup.commands
    ]
    assert not (build / "CMakeCache.txt").exists()
    ran(setup)
    monkeypatch.delenv("CMAKE_ARGS")
    setup.set_up(tests=False)
    assert ran(setup) == ""
    monkeypatch.setenv("CMAKE_ARGS", "")
    setup.set_up(tests=False)
    assert "--editable ." in ran(setup)


@pytest.mark.parametrize("place", ["-m venv", "scikit-build-core", "patches.py", "--editable"])
def test_a_set_up_that_stopped_anywhere_is_repaired_by_the_next_call(setup, place):
    setup.fail_at = place
    with pytest.raises(setup.SetupError):
        setup.set_up(tests=False)
    assert not setup.STATE.exists()
    setup.fail_at = ""
    ran(setup)
    setup.set_up(tests=False)
    assert "--editable ." in ran(setup)
    assert setup.STATE.exists()


def test_the_comparison_build_is_made_once_and_again_for_other_options(setup, monkeypatch):
    monkeypatch.setattr(setup, "_tool", lambda name: name)
    where = setup.build_pristine("-DGGML_NATIVE=OFF")
    first = ran(setup)
    assert "-DKNAPSPEC_EDGE_PRISTINE=ON" in first
    assert "-DGGML_NATIVE=OFF" in first
    assert Path(where["KNAPSPEC_EDGE_PRISTINE_LIB"]).is_dir()
    models = Path(where["KNAPSPEC_EDGE_TINY_MODELS"])
    assert [path.name for path in models.iterdir()] == ["llama.gguf"]
    assert setup.build_pristine("-DGGML_NATIVE=OFF") == where
    assert ran(setup) == ""
    setup.build_pristine("")
    assert "--build" in ran(setup)
    (models / "llama.gguf").unlink()
    models.rmdir()
    setup.build_pristine("")
    assert "tiny_models -s 7 -o" in ran(setup)


def test_a_generator_that_writes_nothing_is_a_failure(setup, tmp_path):
    setup.CACHE.mkdir()
    progress = setup.Progress(1, io.StringIO())
    setup.execute = lambda command, progress, **more: ""
    with pytest.raises(setup.SetupError, match="wrote no model"):
        setup.make_tiny_models(tmp_path, tmp_path / "models", progress)


def test_a_package_that_was_taken_out_is_put_back(setup):
    setup.set_up(tests=False)
    ran(setup)
    setup.PROGRAM.unlink()
    setup.set_up(tests=False)
    again = ran(setup)
    assert "--editable ." in again
    assert "-m venv" not in again


def test_a_damaged_state_counts_as_none(setup):
    setup.set_up(tests=False)
    ran(setup)
    setup.STATE.write_text("[half")
    setup.set_up(tests=False)
    assert "-m venv" in ran(setup)


def test_a_second_set_up_waits_for_the_first(setup):
    said: list[str] = []
    entered = threading.Event()

    def second() -> None:
        with setup.locked(said.append):
            entered.set()

    with setup.locked(said.append):
        thread = threading.Thread(target=second)
        thread.start()
        deadline = time.monotonic() + 10
        while not said and time.monotonic() < deadline:
            time.sleep(0.01)
        assert "Another set-up" in said[0]
        assert not entered.is_set()
    thread.join(10)
    assert entered.is_set()


def test_build_requirements_are_those_of_pyproject():
    module = _load()
    requirements = module.build_requirements()
    assert any(text.startswith("scikit-build-core") for text in requirements)
    assert any(text.startswith("pip") for text in requirements)


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (
            "*** CMake configuration failed\n\n"
            "  knapspec-edge cannot be built: no working C++ compiler was found. Do this.\n\n"
            "  [end of output]\nERROR: Failed building wheel",
            "no working C++ compiler was found. Do this.",
        ),
        ("patches.py: SHA-256 mismatch: x\n  expected 1\n  found 2", "SHA-256 mismatch: x"),
        (
            "WARNING: Retrying: Failed to establish a new connection\nERROR: No matching "
            "distribution found for numba",
            "there is no connection to the package index",
        ),
        ("x.cpp:1:2: fatal error: y.h: No such file\nninja: build stopped", "x.cpp:1:2: fatal"),
        ("g++: fatal: write: No space left on device", "the disk is full"),
        ("", "(it gave no reason)"),
    ],
)
def test_a_failure_is_told_by_the_lines_that_matter(output, expected):
    text = _load().failure(output, ["pip", "install"])
    assert expected in text
    assert "ERROR: Failed building wheel" not in text
    assert "build stopped" not in text


def test_a_missing_compiler_is_noticed_before_anything_is_downloaded(monkeypatch, tmp_path):
    module = _load()
    if sys.platform in ("win32", "darwin"):
        pytest.skip("the compiler is found in another way there")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(module.SetupError, match=r"no C\+\+ compiler was found.*apt install g\+\+"):
        module.require_compiler()
    monkeypatch.setenv("CXX", "no-such-compiler -O2")
    with pytest.raises(module.SetupError, match="CXX names no-such-compiler"):
        module.require_compiler()


def test_an_environment_module_that_debian_splits_off_is_named(setup, monkeypatch):
    monkeypatch.setattr(setup.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(setup.SetupError, match="apt install python3-venv"):
        setup.make_environment(setup.Progress(1, io.StringIO()))


def test_progress_on_a_terminal_moves_and_elsewhere_prints_lines():
    module = _load()

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for stream, moving in ((Terminal(), True), (io.StringIO(), False)):
        progress = module.Progress(2, stream)
        with progress.phase("Compiling"):
            progress.detail("3 of 9 files")
        assert ("\r" in stream.getvalue()) is moving
        assert ("3 of 9 files" in stream.getvalue()) is moving
        assert "[1/2] Compiling" in stream.getvalue()


def test_an_old_python_is_told_what_to_do(tmp_path):
    code = (
        "import sys\n"
        f"sys.path.insert(0, {str(ROOT / 'scripts')!r})\n"
        "sys.version_info = (3, 8, 1)\n"
        "sys.argv = ['scripts/run']\n"
        "import _bootstrap_python as b\n"
        "b.CANDIDATES = ('no-such-python',)\n"
        "b.ensure()\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 1
    assert "needs Python 3.10 or newer, and this is 3.8.1" in result.stderr
    assert "Traceback" not in result.stderr
