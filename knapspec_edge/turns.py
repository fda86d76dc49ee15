"""Who may use an engine at the moment: one call at a time, in the process that opened it.

A call that comes while another one runs is told so at once: waiting could last as long as an
answer, or for ever where the call comes from a function that the other one called.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from types import TracebackType

from .errors import BusyError, ClosedError

_CLOSE_POLL_SECONDS = 0.02  # an interruption may come between two passes and miss both


class Turns:
    """A lock that never waits, as a context manager. Raises BusyError, ClosedError on entry."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holder: int | None = None  # thread that is inside
        self._pid = os.getpid()
        self._closed = False

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def forked(self) -> bool:
        """Whether this process is not the one that the engine was opened in."""
        return os.getpid() != self._pid

    @property
    def taken(self) -> bool:
        return self._lock.locked()

    def check(self) -> None:
        """Raises ClosedError, one line, where the engine cannot be used any more, or not here."""
        if self.forked:
            raise ClosedError(
                "this engine was opened in another process, whose threads a fork does not copy: "
                'open the model in this process, or start it with multiprocessing\'s "spawn"'
            )
        if self._closed:
            raise ClosedError("the engine is closed; open the model again")

    def __enter__(self) -> None:
        self.check()
        if not self._lock.acquire(blocking=False):
            raise _busy()
        self._holder = threading.get_ident()
        if self._closed:  # meanwhile
            self._release()
            self.check()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._release()

    def _release(self) -> None:
        self._holder = None
        self._lock.release()

    def end(self, interrupt: Callable[[], None]) -> bool:
        """No call gets in from now on; one that is inside is interrupted and waited for.

        False if that was so already. Raises BusyError where the call that is inside called this.
        """
        if self._holder == threading.get_ident():
            raise _busy()
        if self._closed:
            return False
        self._closed = True
        while not self._lock.acquire(timeout=_CLOSE_POLL_SECONDS):
            interrupt()
        self._lock.release()
        return True


def _busy() -> BusyError:
    return BusyError(
        "an answer or a measurement is being computed right now, in another thread or around this "
        "call: wait for it, or end it with interrupt()"
    )
