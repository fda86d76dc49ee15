"""Fixtures of the native tests: the two builds of llama.cpp and the tiny models.

`scripts/test` builds both and says where they are; without it these tests are skipped.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from knapspec_edge.native import library
from knapspec_edge.native.library import library_file, library_folder

from .oracle import Worker


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.native)


@pytest.fixture(scope="session")
def patched_library() -> Path:
    if library_file("llama") is None:
        pytest.skip("the patched library is not installed; run scripts/test")
    return library_folder()


@pytest.fixture(scope="session")
def pristine_library() -> Path:
    folder = os.environ.get("KNAPSPEC_EDGE_PRISTINE_LIB")
    if not folder:
        pytest.skip("no unpatched library (KNAPSPEC_EDGE_PRISTINE_LIB); run scripts/test")
    return Path(folder)


@pytest.fixture(scope="session")
def tiny_models() -> Path:
    folder = os.environ.get("KNAPSPEC_EDGE_TINY_MODELS")
    if not folder:
        pytest.skip("no tiny models (KNAPSPEC_EDGE_TINY_MODELS); run scripts/test")
    return Path(folder)


@pytest.fixture(scope="session")
def patched(patched_library: Path) -> Iterator[Worker]:
    with Worker(patched_library) as worker:
        yield worker


@pytest.fixture(scope="session")
def pristine(pristine_library: Path) -> Iterator[Worker]:
    with Worker(pristine_library) as worker:
        yield worker


@pytest.fixture
def upstream_kernels(patched_library: Path) -> Iterator[None]:
    """Only upstream's CPU kernels for a while, in this process; workers never use ours."""
    lib = library.load()._lib
    before = lib.knapspec_get_kernels()
    lib.knapspec_set_kernels(False)
    yield
    lib.knapspec_set_kernels(before)
