"""The build back end: scikit-build-core, with the cause of a failure as its last lines.

CMake writes the reason of a failure that a user can mend into a file; a wall of CMake output would
otherwise stand between the user and it.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scikit_build_core import build as _core
from scikit_build_core.build import *  # noqa: F403  (all other hooks stay as they are)

REASON = "KNAPSPEC_EDGE_REASON_FILE"


def _explained(hook: Callable[..., str], *arguments: Any) -> str:
    with tempfile.TemporaryDirectory() as folder:
        reason = Path(folder) / "reason"
        os.environ[REASON] = str(reason)
        try:
            return hook(*arguments)
        except BaseException:
            if reason.is_file():
                sys.stdout.flush()
                text = reason.read_text(encoding="utf-8", errors="replace").strip()
                print(f"\nknapspec-edge cannot be built: {text}\n", file=sys.stderr, flush=True)
            raise
        finally:
            del os.environ[REASON]


def build_wheel(
    wheel_directory: str,
    config_settings: dict[str, Any] | None = None,
    metadata_directory: str | None = None,
) -> str:
    return _explained(_core.build_wheel, wheel_directory, config_settings, metadata_directory)


def build_editable(
    wheel_directory: str,
    config_settings: dict[str, Any] | None = None,
    metadata_directory: str | None = None,
) -> str:
    return _explained(_core.build_editable, wheel_directory, config_settings, metadata_directory)
