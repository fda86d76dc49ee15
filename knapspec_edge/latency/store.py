"""Keeps measurements in the user's cache folder, one JSON file per key.

The store knows nothing about what it keeps. A file that is damaged, of another version or of
another key counts as absent, with one warning line; so does a folder that cannot be written.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from ..folders import cache_root

FORMAT = "knapspec-edge measurement"
VERSION = 1

Warn = Callable[[str], None]

_LOCK_SECONDS = 5.0  # an update takes milliseconds

# What reading a record raises that holds something else than it should; an infinite number, which
# JSON has no word for but Python's reader accepts, overflows where a whole one is expected.
INVALID = (KeyError, TypeError, ValueError, AttributeError, OverflowError)
# Nothing that is kept counts further, in tokens for instance; larger numbers fit no array.
MAX_COUNT = 2**31 - 1


def default_folder() -> Path:
    """`measurements` below the user's cache folder of this program."""
    return cache_root() / "measurements"


class Store:
    """Measurements by key. A key is a flat mapping of what the result depends on."""

    def __init__(
        self, folder: Path | None = None, *, warn: Warn | None = None, enabled: bool = True
    ) -> None:
        """`enabled` False keeps nothing and knows nothing."""
        self.folder = folder if folder is not None else default_folder()
        self._warn = warn or logging.getLogger(__name__).warning
        self._enabled = enabled
        self._failed = False  # said once, not for every measurement
        self._said: set[Path] = set()  # files that were complained about, once each

    def path(self, key: Mapping[str, Any]) -> Path:
        digest = hashlib.sha256(_canonical(key).encode()).hexdigest()
        return self.folder / f"{digest[:32]}.json"

    def load(self, key: Mapping[str, Any]) -> dict[str, Any] | None:
        """What was saved under this key, or None."""
        if not self._enabled:
            return None
        path = self.path(key)
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):  # nothing was ever kept there
            return None
        except OSError as error:
            self._say(path, f"cannot read {path} ({error.strerror}); measuring again")
            return None
        except (ValueError, RecursionError):
            self._say(path, f"{path} is damaged; measuring again")
            return None
        if (
            not isinstance(data, dict)
            or data.get("format") != FORMAT
            or data.get("version") != VERSION
            or data.get("key") != json.loads(_canonical(key))
            or not isinstance(data.get("content"), dict)
        ):
            self._say(
                path, f"{path} is not a measurement of this model and setting; measuring again"
            )
            return None
        content: dict[str, Any] = data["content"]
        return content

    def ignore(self, key: Mapping[str, Any]) -> None:
        """Warn that what `load` returned for this key makes no sense."""
        path = self.path(key)
        self._say(path, f"{path} holds no valid measurement; measuring again")

    def _say(self, path: Path, warning: str) -> None:
        if path not in self._said:
            self._said.add(path)
            self._warn(warning)

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Keep other processes from updating meanwhile, so that what they add is not lost.

        Where no lock can be had, the update goes on without.
        """
        from filelock import FileLock

        with ExitStack() as stack:
            if self._enabled:
                # beside the folder, which holds measurements only
                path = self.folder.with_name(f".{self.folder.name}.lock")
                with suppress(OSError, NotImplementedError):  # a file system without locks
                    self.folder.mkdir(parents=True, exist_ok=True)
                    stack.enter_context(FileLock(path, timeout=_LOCK_SECONDS))
            yield

    def save(self, key: Mapping[str, Any], content: Mapping[str, Any]) -> bool:
        """Write atomically; False with one warning where that is not possible."""
        if not self._enabled:
            return False
        path = self.path(key)
        known = json.loads(_canonical(key))
        data = {"format": FORMAT, "version": VERSION, "key": known, "content": dict(content)}
        temporary: str | None = None
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=self.folder, prefix=".new-", suffix=".json")
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(data, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
            self._said.discard(path)
        except OSError as error:
            if temporary is not None:
                with suppress(OSError):
                    os.unlink(temporary)
            if not self._failed:
                self._failed = True
                self._warn(
                    f"cannot keep the measurement in {self.folder} ({error.strerror}); "
                    "it will be repeated next time"
                )
            return False
        return True


def _canonical(key: Mapping[str, Any]) -> str:
    return json.dumps(dict(key), sort_keys=True, separators=(",", ":"), default=str)
