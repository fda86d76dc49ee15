"""Stop strings in a stream of token texts, across token and block borders.

Text is held back only while it could still become a stop string. The text ends before the stop
string that completes first; of several that complete with the same character the one that starts
first wins, so the outcome depends neither on how tokens fall nor on how they were grouped.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

from ..errors import UsageError


class StopFilter:
    """Passes text on until a stop string is complete.

    Feed one token's text at a time with `push` (empty text counts as a token, too); what it returns
    may be shown. After the last token, `flush` gives what was held back.
    """

    def __init__(self, stop: Iterable[str] = ()) -> None:
        self._stop = tuple(dict.fromkeys(stop))
        if "" in self._stop:
            raise UsageError("a stop string must not be empty")
        self._held = ""
        self._passed_chars = 0
        self._ends: list[int] = []  # characters of text after each token
        self.found: str | None = None  # the stop string that ended the text

    def push(self, text: str) -> str:
        """Take one token's text; return what is certain to stay, in order.

        Once `found` is set, nothing more comes out.
        """
        if self.found is not None:
            return ""
        fresh = len(self._held)
        self._held += text
        self._ends.append(self._passed_chars + len(self._held))
        match = self._first_match(fresh)
        if match is not None:
            start, self.found = match
            return self._pass(start, drop_rest=True)
        return self._pass(len(self._held) - self._waiting_chars())

    def flush(self) -> str:
        """The held-back text, at an end without a stop string."""
        return self._pass(len(self._held))

    @property
    def n_text_tokens(self) -> int:
        """How many of the pushed tokens the text is made of.

        All of them without a stop string; with one, the shortest run of tokens that covers the text
        before it, so tokens that belong to the stop string alone do not count.
        """
        if self.found is None:
            return len(self._ends)
        return bisect_left(self._ends, self._passed_chars) + 1 if self._passed_chars else 0

    def _pass(self, n_chars: int, *, drop_rest: bool = False) -> str:
        text, self._held = self._held[:n_chars], "" if drop_rest else self._held[n_chars:]
        self._passed_chars += len(text)
        return text

    def _first_match(self, fresh: int) -> tuple[int, str] | None:
        """(start, stop string) of the match that ends first; `fresh` chars were searched before."""
        best: tuple[int, int, str] | None = None
        for stop in self._stop:
            start = self._held.find(stop, max(0, fresh - len(stop) + 1))
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        return (best[1], best[2]) if best else None

    def _waiting_chars(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        for n in range(min(len(self._held), max(map(len, self._stop), default=1) - 1), 0, -1):
            if any(stop.startswith(self._held[-n:]) for stop in self._stop):
                return n
        return 0
