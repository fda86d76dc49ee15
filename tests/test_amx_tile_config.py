"""The header that keeps GCC from dropping most of a tile configuration; needs no CPU with AMX."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MARKER = 0x5EED
SOURCE = f"""
#include <immintrin.h>
void configure(void) {{
    _Alignas(64) unsigned short config[32] = {{1}};
    config[31] = {MARKER};
    _tile_loadconfig(config);
}}
"""


@pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64") or shutil.which("gcc") is None,
    reason="needs GCC for x86",
)
def test_all_of_the_configuration_is_stored(tmp_path: Path) -> None:
    source = tmp_path / "configure.c"
    source.write_text(SOURCE)
    command = ["gcc", "-O3", "-mamx-tile", "-mno-avx", "-S", "-o", "-", source.name]
    header = ["-include", str(ROOT / "cmake" / "amx_tile_config.h")]
    done = subprocess.run(
        [*command, *header], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    if "unrecognized" in done.stderr:
        pytest.skip("this GCC does not know AMX")
    assert done.returncode == 0, done.stderr
    assert "ldtilecfg" in done.stdout
    assert str(MARKER) in done.stdout
