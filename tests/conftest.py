"""Shared fixtures: no test reads or writes the user's own cache or history."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

# A busy machine is no failure; CI repeats the same examples, so that a red run can be repeated.
settings.register_profile("here", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("here")


@pytest.fixture(autouse=True)
def no_user_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the user's configuration file nor options that the user's environment sets."""
    monkeypatch.setenv("KNAPSPEC_EDGE_CONFIG", "")
    for name in os.environ:
        kept = ("LIBRARY", "NATIVE_LOG", "NUMBA", "SDIST", "PRISTINE_LIB", "TINY_MODELS")
        kept += ("CACHE", "CONFIG")
        if name.startswith("KNAPSPEC_EDGE_") and not name.endswith(kept):
            monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def user_cache(
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> Path | None:
    """An empty cache directory for each test. Tests marked `model` keep the shared one.

    Model files are large and verified by digest, so fetching them again for each test would only
    cost time.
    """
    if request.node.get_closest_marker("model") is not None:
        return None
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("KNAPSPEC_EDGE_CACHE", str(folder))
    monkeypatch.setenv("KNAPSPEC_EDGE_HISTORY", "off")
    return folder
