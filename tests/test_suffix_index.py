"""The index of earlier places against a search through the whole text."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from knapspec_edge.search.suffix_index import Match, SuffixIndex, common_length

TEXTS = st.lists(st.integers(0, 3), max_size=40)


def naive_matches(text: Sequence[int]) -> dict[int, int]:
    """All places before the end whose two tokens or more before them agree with the end."""
    found = {}
    for place in range(2, len(text)):
        n = 0
        while n < place and text[place - 1 - n] == text[len(text) - 1 - n]:
            n += 1
        if n >= 2:
            found[place] = n
    return found


def index_of(text: Sequence[int], most_places: int = 99) -> SuffixIndex:
    index = SuffixIndex(most_places)
    index.extend(text)
    return index


@given(st.lists(st.tuples(st.sampled_from(["extend", "push", "truncate", "follow"]), TEXTS)))
def test_however_the_text_came_about_the_matches_are_all_there_are(
    changes: list[tuple[str, list[int]]],
) -> None:
    index, text = SuffixIndex(most_places=999), list[int]()
    for change, tokens in changes:
        if change == "extend":
            index.extend(tokens)
            text += tokens
        elif change == "push":
            for token in tokens:
                index.push(token)
            text += tokens
        elif change == "truncate":
            index.truncate(len(tokens))
            del text[len(tokens) :]
        else:
            index.follow(tokens)
            text = list(tokens)
        assert index.text == text
        # a length that was looked at goes up to 32 tokens, and grows from there
        expected = naive_matches(text)
        found = dict(index.matches())
        assert found.keys() == expected.keys()
        for place, n in found.items():
            assert n == expected[place] or 32 <= n <= expected[place]


@given(TEXTS, st.integers(1, 3))
def test_fewer_places_are_the_latest_and_those_that_were_known(text: list[int], most: int) -> None:
    few, pushed, every = SuffixIndex(most), SuffixIndex(most), naive_matches(text)
    few.extend(text)
    for token in text:
        pushed.push(token)
    assert dict(few.matches()) == {p: every[p] for p in sorted(every)[-most:]}
    assert dict(few.matches()).items() <= dict(pushed.matches()).items()
    assert dict(pushed.matches()).items() <= every.items()


def test_the_best_is_the_longest_then_the_most_frequent_then_the_latest() -> None:
    assert index_of([1, 2, 9, 5, 1, 2, 8, 7, 1, 2]).best() == Match(6, 2, contested=True)
    assert index_of([1, 2, 9, 5, 1, 2, 9, 5, 1, 2]).best() == Match(6, 6, contested=False)
    # 9 followed twice, 8 once and later
    text = [3, 1, 2, 9, 4, 1, 2, 9, 5, 1, 2, 8, 6, 1, 2]
    assert index_of(text).best() == Match(7, 2, contested=True)
    assert index_of([7, 1, 2, 9, 0, 1, 2, 8, 7, 1, 2]).best() == Match(3, 3, contested=False)
    assert index_of([1, 2, 3]).best() is None
    assert index_of([]).best() is None
    assert index_of([1]).best() is None


def test_what_followed_goes_on_with_itself() -> None:
    index = index_of([1, 2, 3, 1, 2])
    match = index.best()
    assert match == Match(2, 2, contested=False)
    assert index.continuation(match, 2) == [3, 1]
    assert index.continuation(match, 8) == [3, 1, 2, 3, 1, 2, 3, 1]
    index = index_of([6, 6, 6])
    match = index.best()
    assert match is not None
    assert index.continuation(match, 3) == [6, 6, 6]


@given(TEXTS, TEXTS)
def test_a_common_beginning(one: list[int], other: list[int]) -> None:
    n = common_length(one, other)
    assert one[:n] == other[:n]
    assert n == min(len(one), len(other)) or one[n] != other[n]
