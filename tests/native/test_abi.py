"""The exported interface: names, number, and that everybody agrees on it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from knapspec_edge.native import bindings, library

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PATCHES = Path(__file__).parents[2] / "patches"
HEADER = (PATCHES / "overlay" / "knapspec.h").read_text()


def test_one_abi_number_everywhere() -> None:
    upstream = tomllib.loads((PATCHES / "UPSTREAM.toml").read_text())
    in_header = re.search(r"#define KNAPSPEC_ABI (\d+)", HEADER)
    assert in_header is not None
    assert int(in_header[1]) == upstream["abi"] == library.ABI


def test_every_function_of_the_header_is_bound() -> None:
    declared = set(re.findall(r"LLAMA_API [^;]*?\b(knapspec_\w+)\s*\(", HEADER))
    assert declared == set(bindings._FUNCTIONS)
    assert len(declared) > 10


def test_the_library_exports_them_with_our_number(patched_library: Path) -> None:
    lib = library.load()._lib
    assert all(hasattr(lib, name) for name in bindings._FUNCTIONS)
    assert lib.knapspec_abi() == library.ABI


def test_return_codes_match_the_header() -> None:
    codes = dict(re.findall(r"KNAPSPEC_(\w+)\s*=\s*(-?\d+)", HEADER))
    for name in ("OK", "NO_SLOT", "ABORTED", "BAD_ARGUMENT", "BAD_LOGITS"):
        assert getattr(bindings, name) == int(codes[name])


def test_an_unpatched_library_is_recognised(
    pristine_library: Path, patched_library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Unpatched:
        """Stands for a libllama without our functions; loading one would mix two builds."""

    from knapspec_edge.errors import LibraryError

    with pytest.raises(LibraryError, match=r"is not the patched one \(missing: knapspec_abi"):
        bindings.declare(Unpatched(), pristine_library)  # type: ignore[arg-type]
