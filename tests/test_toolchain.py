"""What the build says before it compiles anything, by CMake on a pretended Mac (case 74)."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROJECT = """
cmake_minimum_required(VERSION 3.19)
project(pretended LANGUAGES NONE)
include("{root}/cmake/fail.cmake")
set(APPLE TRUE)
include("{root}/cmake/toolchain.cmake")
message(STATUS "the toolchain was accepted")
"""


def configure(folder: Path, arm64: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Configures on a Mac whose processor is an Apple one or not."""
    (folder / "CMakeLists.txt").write_text(PROJECT.format(root=ROOT.as_posix()), encoding="utf-8")
    tools = folder / "tools"
    tools.mkdir()
    sysctl = tools / "sysctl"
    sysctl.write_text(f"#!/bin/sh\necho {arm64}\n", encoding="utf-8")
    sysctl.chmod(0o755)
    return subprocess.run(
        ["cmake", "-S", str(folder), "-B", str(folder / "build"),
         f"-DPython_EXECUTABLE={sys.executable}", *arguments],
        env={**os.environ, "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip


@pytest.mark.skipif(
    shutil.which("cmake") is None or platform.machine() == "arm64" or os.name == "nt",
    reason="needs CMake and a Python that is no arm64 one",
)
@pytest.mark.parametrize(
    ("arm64", "arguments", "refused"),
    [
        (1, (), True),
        (0, (), False),
        (1, ("-DKNAPSPEC_EDGE_ALLOW_ROSETTA=ON",), False),
        (1, ("-DCMAKE_OSX_ARCHITECTURES=arm64",), False),
    ],
)
def test_an_emulated_python_is_explained(
    tmp_path: Path, arm64: int, arguments: tuple[str, ...], refused: bool
) -> None:
    done = configure(tmp_path, arm64, *arguments)
    said = " ".join(done.stderr.split())
    assert ("emulated on Apple Silicon" in said) == refused, done.stderr
    if refused:
        assert done.returncode != 0
        assert "Install an arm64 Python" in said
        assert platform.machine() in said
    else:
        assert "the toolchain was accepted" in done.stdout, done.stderr
