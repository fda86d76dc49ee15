"""Stop strings: cases 30 and 32."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from knapspec_edge.errors import UsageError
from knapspec_edge.text.stop import StopFilter


def naive(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Grow the text by one character at a time; the first stop string at its end ends it."""
    for n in range(len(text) + 1):
        ending = [s for s in stops if text[:n].endswith(s)]
        if ending:
            longest = max(ending, key=len)
            return text[: n - len(longest)], longest
    return text, None


def run(pieces: list[str], stops: list[str]) -> tuple[list[str], StopFilter]:
    stop = StopFilter(stops)
    shown = [stop.push(piece) for piece in pieces]
    shown.append("" if stop.found is not None else stop.flush())
    return shown, stop


def test_stop_string_over_several_tokens() -> None:
    letters = list("A B C D E F G H I J K L M N O P Q R S T")
    shown, stop = run(letters, ["O P Q"])
    assert "".join(shown) == "A B C D E F G H I J K L M N "
    assert stop.found == "O P Q"
    assert stop.n_text_tokens == len("A B C D E F G H I J K L M N ")


def test_only_what_could_become_a_stop_string_is_held_back() -> None:
    stop = StopFilter(["END"])
    assert stop.push("the E") == "the "
    assert stop.push("N") == ""
    assert stop.push("T") == "ENT"
    assert stop.push(" E") == " "
    assert stop.flush() == "E"
    assert stop.found is None
    assert stop.n_text_tokens == 4


def test_a_token_that_holds_text_and_stop_string_counts() -> None:
    shown, stop = run(["Hello", " you\nUser", ": hi"], ["\nUser:"])
    assert "".join(shown) == "Hello you"
    assert stop.n_text_tokens == 2


def test_stop_string_at_the_very_start_leaves_nothing() -> None:
    shown, stop = run(["", "###", " x"], ["###"])
    assert "".join(shown) == ""
    assert stop.n_text_tokens == 0


def test_nothing_comes_out_after_the_stop_string() -> None:
    stop = StopFilter(["x"])
    assert stop.push("axb") == "a"
    assert stop.push("more") == ""
    assert stop.flush() == ""


def test_empty_stop_string_is_refused() -> None:
    with pytest.raises(UsageError, match="empty"):
        StopFilter(["a", ""])


@given(
    st.lists(st.text("ab", max_size=4), max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
)
def test_same_as_naive_however_the_text_is_cut(pieces: list[str], stops: list[str]) -> None:
    text, found = naive("".join(pieces), stops)
    shown, stop = run(pieces, stops)
    assert "".join(shown) == text
    assert stop.found == found
    # What was shown at any time is the start of the final text.
    so_far = ""
    for piece in shown:
        so_far += piece
        assert text.startswith(so_far)
    # The counted tokens cover the text, and one fewer would not.
    n = stop.n_text_tokens
    if found is None:
        assert n == len(pieces)
    else:
        assert len("".join(pieces[:n])) >= len(text)
        assert n == 0 or len("".join(pieces[: n - 1])) < len(text)


@given(st.text("ab", max_size=20), st.lists(st.text("ab", min_size=1, max_size=5), max_size=3))
def test_held_back_text_is_always_the_start_of_a_stop_string(text: str, stops: list[str]) -> None:
    stop = StopFilter(stops)
    shown = ""
    for i, letter in enumerate(text):
        shown += stop.push(letter)
        if stop.found is not None:
            return
        held = text[len(shown) : i + 1]
        assert not held or any(s.startswith(held) and s != held for s in stops)
