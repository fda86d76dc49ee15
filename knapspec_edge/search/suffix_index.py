"""Where the end of a growing text stood before, and what followed it there.

Every pair of tokens knows its latest place and each place the one before it, so that appending a
token and cutting one off again are a few operations each. Places that the end of the text agrees
with are carried along from token to token, so that their matches grow instead of being looked for
again: of any length, at the cost of one comparison per place and token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# Tokens of a match that are looked at when a place is new; it grows beyond that by itself.
_LOOKED_BACK = 32
# Token ids are smaller, so that a pair of them is one number.
_ID_LIMIT = 1 << 31


@dataclass(frozen=True)
class Match:
    """A place that the end of the text agrees with."""

    place: int  # of what followed there, in the text
    length: int  # tokens before it that agree with the end, >= 2
    contested: bool  # as many tokens agree elsewhere, where another token followed


class SuffixIndex:
    """The text, and the places that its end agrees with.

    `most_places`: of those that stood behind a pair of tokens, so many of the latest are looked at.
    """

    def __init__(self, most_places: int = 16) -> None:
        self.text: list[int] = []
        self._most_places = most_places
        self._latest: dict[int, int] = {}  # pair -> latest place behind it
        self._earlier = [-1, -1]  # [place]: the one before it behind the same pair; -1: none
        self._matches: list[tuple[int, int]] | None = []  # (place, length); None: not looked for

    def extend(self, tokens: Sequence[int]) -> None:
        """Append many: matches are looked for when they are asked for."""
        if not tokens:
            return
        text, latest = self.text, self._latest
        first = max(2, len(text) + 1)  # place behind the first new pair
        text.extend(tokens)
        self._matches = None
        if len(text) < 2:
            return
        ids = np.array(text[first - 2 :], dtype=np.int64)
        pairs = ids[:-1] * _ID_LIMIT + ids[1:]  # i64 [new pairs], in order of their places
        order = np.argsort(pairs, kind="stable")
        ordered = pairs[order]
        same = ordered[1:] == ordered[:-1]  # as the one before it
        earlier = np.full(len(pairs), -1, dtype=np.int64)
        earlier[order[1:][same]] = first + order[:-1][same]
        opening = order[np.concatenate(([True], ~same))]  # places that are the first of their pair
        closing = order[np.concatenate((~same, [True]))]
        if latest:
            known = [latest.get(pair, -1) for pair in pairs[opening].tolist()]
            earlier[opening] = known
        self._earlier.extend(earlier.tolist())
        latest.update(zip(pairs[closing].tolist(), (first + closing).tolist(), strict=True))

    def push(self, token: int) -> None:
        """Append one; the matches that it continues grow."""
        matches, text = self.matches(), self.text
        grown = [(p + 1, n + 1) for p, n in matches if text[p] == token]
        text.append(token)
        end = len(text)
        if end < 2:
            return
        pair = text[-2] * _ID_LIMIT + token
        place = self._latest.get(pair, -1)
        self._earlier.append(place)
        self._latest[pair] = end
        if place >= 0:
            grown += self._found(place, {p for p, _ in grown})
        self._matches = grown

    def truncate(self, n_tokens: int) -> None:
        """Keep the first `n_tokens` tokens."""
        text, latest, earlier = self.text, self._latest, self._earlier
        if n_tokens >= len(text):
            return
        for place in range(len(text), max(1, n_tokens), -1):
            pair = text[place - 2] * _ID_LIMIT + text[place - 1]
            before = earlier.pop()
            if before < 0:
                del latest[pair]
            else:
                latest[pair] = before
        del text[n_tokens:]
        self._matches = None

    def follow(self, text: Sequence[int]) -> None:
        """Become the index of this text, keeping what both begin with."""
        shared = common_length(self.text, text)
        self.truncate(shared)
        self.extend(text[shared:])

    def matches(self) -> list[tuple[int, int]]:
        """(place, length) of the places that the end of the text agrees with, in no order."""
        if self._matches is None:
            text = self.text
            place = self._earlier[len(text)] if len(text) >= 2 else -1
            self._matches = self._found(place, set())
        return self._matches

    def _found(self, place: int, known: set[int]) -> list[tuple[int, int]]:
        """The latest places from this one back, but for the known ones."""
        text, earlier = self.text, self._earlier
        end = len(text)
        found = []
        for _ in range(self._most_places):
            if place < 0:
                break
            if place not in known:
                n = 2
                most = min(_LOOKED_BACK, place)
                while n < most and text[place - 1 - n] == text[end - 1 - n]:
                    n += 1
                found.append((place, n))
            place = earlier[place]
        return found

    def best(self) -> Match | None:
        """Of the longest matches one that what followed most often did; of these the latest."""
        matches = self.matches()
        if not matches:
            return None
        if len(matches) == 1:
            return Match(*matches[0], contested=False)
        length = max(n for _, n in matches)
        places = [p for p, n in matches if n == length]
        if len(places) == 1:
            return Match(places[0], length, contested=False)
        text = self.text
        votes: dict[int, int] = {}
        for p in places:
            votes[text[p]] = votes.get(text[p], 0) + 1
        place = max(places, key=lambda p: (votes[text[p]], p))
        return Match(place, length, contested=len(votes) > 1)

    def continuation(self, match: Match, n_tokens: int) -> list[int]:
        """What followed there; where that reaches the end of the text, it goes on with itself."""
        text, place = self.text, match.place
        found = text[place : place + n_tokens]
        period = len(found)
        while len(found) < n_tokens:
            found.append(found[len(found) - period])
        return found


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens both begin with."""
    low, high = 0, min(len(one), len(other))
    if one[:high] == other[:high]:
        return high
    while low < high:  # the first `low` agree, the first `high` do not
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
