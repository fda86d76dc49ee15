"""The CPU kernels of the overlay: the switch, and what they compute."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SWITCH = """
from knapspec_edge.native import library
lib = library.load()._lib
states = [lib.knapspec_get_kernels()]
for wanted in (False, True):
    lib.knapspec_set_kernels(wanted)
    states.append(lib.knapspec_get_kernels())
print(states)
"""


@pytest.mark.parametrize(("setting", "first"), [(None, True), ("0", False), ("1", True)])
def test_the_switch_and_its_variable(
    patched_library: Path, setting: str | None, first: bool
) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "KNAPSPEC_EDGE_KERNELS"}
    if setting is not None:
        environment["KNAPSPEC_EDGE_KERNELS"] = setting
    done = subprocess.run(
        [sys.executable, "-c", SWITCH], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split("\n")[0] == str([first, False, True])
