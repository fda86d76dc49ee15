"""Where files are kept, and how they get there: whole or not at all, one writer at a time."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from ..errors import DownloadError, KnapspecError
from ..folders import cache_root

CHUNK_BYTES = 1 << 20
_LOCK_POLL_SECONDS = 0.2
_DISK_FULL = (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC))  # Windows has no quota error


def models_folder() -> Path:
    return cache_root() / "models"


def converted_folder() -> Path:
    """Where conversions of fetched models are kept."""
    return models_folder() / "converted"


def make_folder(folder: Path) -> None:
    """Raises DownloadError, with what to do, if the folder cannot be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise storage_error(error, folder) from None


@contextlib.contextmanager
def atomic_path(target: Path) -> Iterator[Path]:
    """A temporary path beside `target` that takes its place when the block ends without error.

    What the block wrote is on the disk before it gets its name, so not even a power cut leaves half
    a file under the final name. On any error, interruption included, it is removed.
    """
    temporary = target.with_name(f"{_temporary_prefix(target)}{secrets.token_hex(6)}.part")
    try:
        yield temporary
        with open(temporary, "rb+") as stream:
            os.fsync(stream.fileno())
        os.replace(temporary, target)
        sync_folder(target.parent)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def remove_leftovers(target: Path) -> None:
    """Remove what killed processes left of `target`. Only while holding its lock."""
    for leftover in target.parent.glob(f"{_temporary_prefix(target)}*"):
        with contextlib.suppress(OSError):
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()


def work_folder(target: Path) -> Path:
    """Make an empty folder beside `target`, named so that `remove_leftovers` finds it."""
    folder = target.with_name(f"{_temporary_prefix(target)}{secrets.token_hex(6)}.work")
    folder.mkdir()
    return folder


def _temporary_prefix(target: Path) -> str:
    return f".{target.name}."


@contextlib.contextmanager
def locked(target: Path, waiting: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold the lock of `target` among all processes of this machine and threads of this process.

    `waiting()` is called again and again while somebody else holds it.
    """
    from filelock import FileLock, Timeout

    # In a folder of its own: a lock file is never removed, so it should not lie among the models.
    make_folder(target.parent / ".locks")
    lock = FileLock(target.parent / ".locks" / f"{target.name}.lock", thread_local=False)
    while True:
        try:
            lock.acquire(timeout=_LOCK_POLL_SECONDS, poll_interval=_LOCK_POLL_SECONDS / 4)
            break
        except Timeout:
            if waiting is not None:
                waiting()
    try:
        yield
    finally:
        lock.release()


def sha256_of(path: Path, progress: Callable[[int], None] | None = None) -> str:
    """SHA-256 of a file in hexadecimal digits. `progress(done_bytes)` is called per MiB."""
    digest = hashlib.sha256()
    done_bytes = 0
    with open(path, "rb") as stream:
        while chunk := stream.read(CHUNK_BYTES):
            digest.update(chunk)
            done_bytes += len(chunk)
            if progress is not None:
                progress(done_bytes)
    return digest.hexdigest()


def require_space(folder: Path, needed_bytes: int, what: str) -> None:
    """Raises DownloadError if the disk has not that much left."""
    try:
        free_bytes = shutil.disk_usage(folder).free
    except OSError:
        return  # some file systems do not say; writing will tell
    if free_bytes < needed_bytes:
        raise DownloadError(
            f"not enough disk space for {what}: {megabytes(needed_bytes)} needed, "
            f"{megabytes(free_bytes)} free in {folder}; make room, or set KNAPSPEC_EDGE_CACHE to a "
            "folder on another disk"
        )


def storage_error(error: OSError, folder: Path) -> KnapspecError:
    """What to tell the user about a failure to write in the cache."""
    if error.errno in _DISK_FULL:
        return DownloadError(
            f"the disk is full: nothing was kept in {folder}; make room, or set "
            "KNAPSPEC_EDGE_CACHE to a folder on another disk"
        )
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return DownloadError(
            f"cannot write to {folder} ({error.strerror}); set KNAPSPEC_EDGE_CACHE to a folder "
            "that you may write to"
        )
    if isinstance(error, FileExistsError | NotADirectoryError):
        return DownloadError(
            f"cannot make the folder {folder}: there is a file of that name on the way; move it, "
            "or set KNAPSPEC_EDGE_CACHE to another folder"
        )
    return DownloadError(f"cannot use the folder {folder}: {error.strerror or error}")


def megabytes(n_bytes: int) -> str:
    """ "98.4 MB", as download sizes are usually given (10^6 bytes)."""
    return f"{n_bytes / 1e6:,.1f} MB"


def sync_folder(folder: Path) -> None:
    """A new name is on the disk only once its folder is."""
    if os.name == "nt":  # folders cannot be opened there, and renaming is journalled
        return
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
