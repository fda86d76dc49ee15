"""The wheel that users install: what it holds, and that each library in it loads once."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

pytestmark = [pytest.mark.native, pytest.mark.slow]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package unpacked from a wheel, built from the objects of the build before."""
    if not list(ROOT.glob("build/py3-none-*/llama.cpp-src.stamp.json")):
        pytest.skip("nothing was built in this checkout: run scripts/test")
    if importlib.util.find_spec("scikit_build_core") is None:
        pytest.skip("the build tools are not in this environment: run scripts/test")
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    result = subprocess.run(
        [*command, "--wheel-dir", str(folder), str(ROOT)], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    (file,) = folder.glob("knapspec_edge-*.whl")
    unpacked = folder / "unpacked"
    with zipfile.ZipFile(file) as archive:
        archive.extractall(unpacked)
    return unpacked


def test_it_holds_what_the_package_needs(wheel):
    names = {path.relative_to(wheel).as_posix() for path in wheel.rglob("*") if path.is_file()}
    for name in (
        "knapspec_edge/py.typed",
        "knapspec_edge/cli.py",
        "knapspec_edge/data/manifest.toml",
        "knapspec_edge/text/calibration.txt",
        "knapspec_edge/native/LICENSE.llama.cpp",
        "knapspec_edge/native/lib/_build_info.json",
    ):
        assert name in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    sources = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "knapspec_edge").rglob("*.py")
        if "__pycache__" not in path.parts
    }
    assert sources <= names
    assert not [name for name in names if name.startswith(("tests/", "scripts/", "include/"))]


def test_each_library_has_one_name(wheel):
    folder = wheel / "knapspec_edge" / "native" / "lib"
    info = json.loads((folder / "_build_info.json").read_text())
    libraries = [path.name for path in folder.iterdir() if path.suffix != ".json"]
    assert not [path for path in folder.iterdir() if path.is_symlink()]
    assert len(libraries) == len(info["libraries"])
    for target in info["libraries"]:
        assert [name for name in libraries if name.split(".")[0].removeprefix("lib") == target]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_each_library_is_mapped_once_from_our_folder(wheel):
    code = (
        "import os, knapspec_edge.native.library as library\n"
        "library.load()\n"
        "lines = [line.split(maxsplit=5) for line in open('/proc/self/maps')]\n"
        "files = {parts[5].strip() for parts in lines if len(parts) == 6}\n"
        "ours = [f for f in files if os.path.basename(f).startswith(('libllama', 'libggml'))]\n"
        "print(*ours, sep='\\n')\n"
    )
    environment = {k: v for k, v in os.environ.items() if k != "KNAPSPEC_EDGE_LIBRARY"}
    # first on the path, so that this copy is imported and not an installed one
    environment["PYTHONPATH"] = str(wheel)
    result = subprocess.run(
        [sys.executable, "-S", "-c", f"import site, sys\n{_LATE_SITE}{code}"],
        env=environment,
        cwd=wheel,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    mapped = [Path(line) for line in result.stdout.split("\n") if line]
    folder = wheel / "knapspec_edge" / "native" / "lib"
    assert {path.parent for path in mapped} == {folder}
    names = [path.name.split(".")[0] for path in mapped]
    assert len(names) == len(set(names))
    assert {"libllama", "libggml", "libggml-base"} <= set(names)


# An editable install puts a finder before everything else; without site it is not there, and the
# dependencies are added by hand.
_LATE_SITE = f"sys.path += {[path for path in sys.path if path.endswith('-packages')]!r}\n"
