"""A file of JSON objects, one per line, that survives whatever ends the program.

Each record is on the disk before the next one is begun. One process writes at a time. What a killed
writer left of its last line is cut off when the file is opened again; a file that holds anything
else is refused and left as it is. Knows nothing of what the records say.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..closing import Closing
from ..errors import OutputError, UsageError
from ..models.storage import sync_folder
from .files import check_writable, target, temporary
from .report import counted, finite

Record = dict[str, Any]

# Line ends for some readers of text, though not for JSON.
_LINE_ENDS = {ord(c): f"\\u{ord(c):04x}" for c in "\x85\u2028\u2029"}
# What pipes and some file systems say, where nothing can be written to a disk now.
_CANNOT_SYNC = {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP}


def encode(record: Record) -> str:
    """The record as one line of JSON, without its end. Figures that JSON lacks become null."""
    text = json.dumps(finite(record), ensure_ascii=False, allow_nan=False).translate(_LINE_ENDS)
    try:
        text.encode()
    except UnicodeEncodeError:  # a file name that is no text
        text = json.dumps(finite(record), allow_nan=False)
    return text


def sync(descriptor: int) -> None:
    """Have what was written on the disk, where there is one."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC:
            raise


class RecordFile(Closing):
    """The records of one file, to be added to.

    `first_key` is the first key of every record, a string; by it a torn line is told from a line
    that somebody else wrote.
    """

    def __init__(self, path: Path, first_key: str, *, option: str = "-o") -> None:
        """`option`: by which the user named the file.

        Raises UsageError, one line, for a file that cannot be written, is in use, or holds
        something else; then nothing in it was changed.
        """
        check_writable(path, "the records to")
        self.path = path
        self.n_records = 0
        self.repaired: str | None = None  # what was done to the last line, for people
        self._key = first_key
        self._option = option
        self._real = target(path)
        self._end = 0  # bytes
        self._descriptor = -1
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._locked())
            self._created = not self._real.exists()
            end = self._check()
            self._open()
            self._repair(end)
            self._lock = stack.pop_all()

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            if self._created and self._end == 0:
                with contextlib.suppress(OSError):
                    self._real.unlink()
        self._lock.close()

    def __iter__(self) -> Iterator[Record]:
        """The records in order."""
        for _, line in self._lines():
            if line.strip():
                yield json.loads(line)

    def append(self, record: Record) -> None:
        """Add a record; it is on the disk afterwards. Raises OutputError; then the file ends where
        it ended before."""
        self._check_unchanged()
        data = (encode(record) + "\n").encode()
        left = memoryview(data)
        try:
            while left:
                left = left[os.write(self._descriptor, left) :]
            sync(self._descriptor)
        except OSError as error:
            self._cut()
            raise self._failure(error) from None
        except BaseException:  # Ctrl-C: a whole line is a record all the same
            if left:
                self._cut()
            else:
                self._added(len(data))
            raise
        self._added(len(data))

    def _check_unchanged(self) -> None:
        """Records must not go where nobody finds them, nor in between what others write."""
        if not self._is_unchanged():
            raise OutputError(
                f"{self.path} was removed, replaced or changed by another program: nothing more is "
                "written; the same command does what is missing in it"
            )

    def _is_unchanged(self) -> bool:
        try:
            there, here = os.stat(self._real), os.fstat(self._descriptor)
        except OSError:
            return False
        return os.path.samestat(there, here) and here.st_size == self._end

    def _added(self, n_bytes: int) -> None:
        self._end += n_bytes
        self.n_records += 1

    def _cut(self) -> None:
        """Remove what was written of a line."""
        with contextlib.suppress(OSError):
            os.ftruncate(self._descriptor, self._end)

    def keep(self, wanted: Callable[[int], bool]) -> bool:
        """Drop the records whose number (0-based) is not wanted. The file changes as a whole or,
        with False, not at all: what cannot be tidied up is still valid."""
        if not self._is_unchanged():
            return False
        new = temporary(self.path)
        try:
            with open(new, "xb") as stream:
                number = 0
                for _, line in self._lines():
                    if line.strip():
                        if wanted(number):
                            stream.write(line)
                        number += 1
                stream.flush()
                sync(stream.fileno())
            shutil.copymode(self._real, new)
            os.close(self._descriptor)  # an open file is not replaced everywhere
            self._descriptor = -1
            os.replace(new, self._real)
            sync_folder(self._real.parent)
        except OSError:
            with contextlib.suppress(OSError):
                new.unlink()
            replaced = False
        else:
            replaced = True
        if self._descriptor < 0:
            self._open()
        self.n_records = sum(1 for _ in self)
        return replaced

    # -- opening

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Keep other writers out. The lock file stays: removing it would let two writers in."""
        from filelock import FileLock, Timeout

        lock = FileLock(self._real.with_name(f".{self._real.name}.lock"), thread_local=False)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise UsageError(
                f"{self.path} is being written by another process: wait for it, or give another "
                f"file with {self._option}"
            ) from None
        except (OSError, NotImplementedError) as error:
            raise UsageError(
                f"{self.path} cannot be locked against other writers ({error}): give a file in "
                "another folder"
            ) from None
        try:
            yield
        finally:
            lock.release()

    def _open(self) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0)
        try:
            self._descriptor = os.open(self._real, flags, 0o666)
            self._end = os.fstat(self._descriptor).st_size
        except OSError as error:
            raise self._failure(error) from None
        if self._created:
            sync_folder(self._real.parent)

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        """(byte offset, line with its end); the last one may have none."""
        try:
            with open(self._real, "rb") as stream:
                at = 0
                for line in stream:
                    yield at, line
                    at += len(line)
        except FileNotFoundError:
            return
        except OSError as error:
            raise UsageError(f"cannot read {self.path}: {error.strerror or error}") from None

    def _check(self) -> int | None:
        """Look at every line. Where a torn last line begins, or None."""
        for number, (at, line) in enumerate(self._lines(), start=1):
            if not line.strip():
                continue
            if self._is_record(line):
                self.n_records += 1
            elif not line.endswith(b"\n") and self._is_torn(line):
                return at
            else:
                raise UsageError(
                    f"line {number} of {self.path} is no record of this command; nothing was "
                    f"changed: repair or remove that line, or give another file with {self._option}"
                )
        return None

    def _is_record(self, line: bytes) -> bool:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):  # also what is not UTF-8
            return False
        return isinstance(record, dict) and isinstance(record.get(self._key), str)

    def _is_torn(self, line: bytes) -> bool:
        """Whether it is the beginning of a record. After a power cut, zeros may stand for what was
        never written."""
        written = line.rstrip(b"\0")
        start = f'{{"{self._key}": "'.encode()
        return written.startswith(start) or start.startswith(written)

    def _repair(self, torn_at: int | None) -> None:
        """Have the file end with a whole line."""
        try:
            if torn_at is not None:
                n_bytes = self._end - torn_at
                os.ftruncate(self._descriptor, torn_at)
                sync(self._descriptor)
                self._end = torn_at
                self.repaired = (
                    f"{self.path}: the last record was cut off while it was being written "
                    f"({n_bytes} bytes); it was removed and is made again"
                )
            elif self._end and not self._ends_with_newline():
                os.write(self._descriptor, b"\n")
                self._end += 1
        except OSError as error:
            os.close(self._descriptor)
            self._descriptor = -1
            raise self._failure(error) from None

    def _ends_with_newline(self) -> bool:
        with open(self._real, "rb") as stream:
            stream.seek(-1, os.SEEK_END)
            return stream.read(1) == b"\n"

    def _failure(self, error: OSError) -> OutputError:
        return OutputError(
            f"cannot write {self.path}: {error.strerror or error}; it holds "
            f"{counted(self.n_records, 'whole record')}, and the same command goes on from there"
        )
