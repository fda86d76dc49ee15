"""Splitting a text by tokens: nothing lost, nothing too long, borders that people would choose."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from fake_vocabulary import FakeVocabulary
from hypothesis import example, given
from hypothesis import strategies as st

from knapspec_edge import models
from knapspec_edge.errors import ContextError, DownloadError
from knapspec_edge.native.library import library_file
from knapspec_edge.native.model import Model
from knapspec_edge.text.splitting import split
from knapspec_edge.text.vocabulary import Vocabulary


class Spoiling(FakeVocabulary):
    """Changes the text before it tokenizes: the bytes of its tokens do not add up to the text."""

    def tokenize(self, text: str, *, parse_special: bool, add_special: bool = False) -> list[int]:
        changed = text.lower().replace("é", "e").replace("  ", " ")
        return super().tokenize(changed, parse_special=parse_special, add_special=add_special)


class Counting(FakeVocabulary):
    """Adds up how many characters went through the tokenizer."""

    n_characters = 0

    def tokenize(self, text: str, *, parse_special: bool, add_special: bool = False) -> list[int]:
        self.n_characters += len(text)
        return super().tokenize(text, parse_special=parse_special, add_special=add_special)


FAMILY = "👨\u200d👩\u200d👧"  # one sign of five code points
PLAIN = FakeVocabulary()
VOCABULARIES = [PLAIN, FakeVocabulary(spm=True, add_bos=True), Spoiling()]


def n_tokens(vocabulary: Vocabulary, text: str) -> int:
    return len(vocabulary.tokenize(text, parse_special=False))


def checked(text: str, vocabulary: Vocabulary, max_tokens: int) -> list[str]:
    pieces = split(text, vocabulary, max_tokens)
    assert "".join(pieces) == text
    assert all(pieces)
    counts = [n_tokens(vocabulary, piece) for piece in pieces]
    assert max(counts, default=0) <= max_tokens
    return pieces


WORDS = st.sampled_from(
    ["the", " hello", "Lo", "ing", " ", "  ", "\n", "\n\n", " \n", "\r\n", ". ", ".", "! ", "é",
     "e\u0301", "日本", "。", "」", "👋🏽", "🇩🇪", FAMILY, "<s>", "<|im_end|>", "# ", "\t",
     "\x00", "x" * 30]
)  # fmt: skip
TEXTS = st.lists(WORDS, max_size=60).map("".join) | st.text(
    st.characters(exclude_categories=["Cs"]), max_size=80
)


@pytest.mark.parametrize("vocabulary", VOCABULARIES, ids=["bpe", "spm", "spoiling"])
@given(text=TEXTS, max_tokens=st.integers(5, 40))
@example(text="日" * 50, max_tokens=5)
@example(text=" " * 200, max_tokens=5)
def test_nothing_is_lost_and_nothing_too_long(vocabulary, text, max_tokens):
    checked(text, vocabulary, max_tokens)


@given(text=TEXTS, max_tokens=st.integers(1, 4))
def test_only_a_character_that_does_not_fit_is_an_error(text, max_tokens):
    if max((n_tokens(PLAIN, character) for character in text), default=0) > max_tokens:
        with pytest.raises(ContextError, match=f"room for {max_tokens} tokens"):
            split(text, PLAIN, max_tokens)
    else:
        checked(text, PLAIN, max_tokens)


def test_one_character_too_wide():
    with pytest.raises(ContextError, match="'🚀' alone takes 4"):
        split("to the 🚀", PLAIN, 3)
    with pytest.raises(ValueError, match="at least 1"):
        split("text", PLAIN, 0)


def test_what_fits_stays_whole():
    assert split("", PLAIN, 5) == []
    text = "One. Two.\n\nThree."
    assert split(text, PLAIN, n_tokens(PLAIN, text)) == [text]
    assert len(split(text, PLAIN, n_tokens(PLAIN, text) - 1)) == 2


@given(
    st.lists(st.integers(3, 40), min_size=10, max_size=60),
    st.integers(60, 200),
)
def test_pieces_are_about_even(lengths, max_tokens):
    text = "\n\n".join("word " * length + "end." for length in lengths)
    counts = [n_tokens(PLAIN, piece) for piece in checked(text, PLAIN, max_tokens)]
    fewest = -(-n_tokens(PLAIN, text) // max_tokens)
    assert len(counts) <= 2 * fewest
    assert min(counts[:-1], default=max_tokens) >= max_tokens / 2 / 2


# ---------------------------------------------------------------------------------------------
# Borders


def paragraph(n: int, sentence: str = "Some words make a sentence here. ") -> str:
    return (sentence * n).strip()


def test_paragraphs_come_first():
    text = "\n\n".join([paragraph(4)] * 10)
    pieces = checked(text, PLAIN, n_tokens(PLAIN, paragraph(4)) * 5 // 2)
    assert len(pieces) == 5
    assert all(piece.endswith("\n\n") for piece in pieces[:-1])


def test_indentation_stays_with_its_line():
    block = "    def f():\n        return 1\n\n"
    for piece in checked(block * 30, PLAIN, n_tokens(PLAIN, block) * 4):
        assert piece.startswith("    def")


def test_a_heading_goes_with_what_it_stands_above():
    section = f"## Title\n\n{paragraph(3)}\n\n{paragraph(3)}\n\n"
    pieces = checked(section * 12, PLAIN, n_tokens(PLAIN, section) * 16 // 5)
    assert len(pieces) == 4
    assert all(piece.startswith("## Title\n\n") for piece in pieces)


def test_sentences_come_next():
    pieces = checked(paragraph(40), PLAIN, 200)
    assert len(pieces) > 2
    assert all(piece.endswith("here. ") for piece in pieces[:-1])


@pytest.mark.parametrize(
    "sentence",
    [
        "Here Dr. Jones and E. Smith met, e.g. in No. 5 of St. James, vs. cf. 12.5 in all! ",
        'She asked, "is it so?" then v1.2.3 of example.org came up… ',
        "He left (it was 5 p.m. or so.) ",
        "Это предложение, т.е. строка. ",
        "这是一个句子,里面有3.14和其他词语。",
        "「そうです。」",
        "这是什么？！",
        "यह एक वाक्य है। ",
        "أين هو؟ ",
    ],
)
def test_ends_of_sentences(sentence):
    text = sentence * 40
    pieces = checked(text, PLAIN, n_tokens(PLAIN, sentence) * 5 // 2)
    assert len(pieces) > 2
    for piece in pieces:
        assert piece.count(sentence) * len(sentence) == len(piece), piece


def test_lines_before_words_and_words_before_letters():
    line = "one,two,three four,five six\n"
    assert all(p.endswith("\n") for p in checked(line * 40, PLAIN, n_tokens(PLAIN, line) * 3))
    assert all(p.endswith(" ") for p in checked("abcdefg " * 80, PLAIN, 50))
    assert [len(p) for p in checked("q" * 100, PLAIN, 50)] == [50, 50]


@pytest.mark.parametrize("shown", ["e\u0301", "👋🏽", FAMILY, "❤\ufe0f", "🇩🇪 ", "\r\n"])
def test_what_is_shown_as_one_character_stays_whole(shown):
    for piece in checked(shown * 40, PLAIN, n_tokens(PLAIN, shown) * 5 // 2):
        assert piece == shown * (len(piece) // len(shown))


# ---------------------------------------------------------------------------------------------
# Effort

HOSTILE = {
    "one word": "x" * 50_000,
    "spaces": " " * 50_000,
    "blank lines": "\n" * 50_000,
    "full stops": "." * 50_000,
    "full stops and spaces": "." + " " * 50_000,
    "quotes": ".)" * 25_000,
    "headings": "# \n\n" * 12_000,
    "prose": ("\n\n".join([paragraph(5)] * 300)),
}


@pytest.mark.parametrize("what", HOSTILE)
@pytest.mark.parametrize("max_tokens", [50, 3000])
def test_two_passes_through_the_tokenizer(what, max_tokens):
    vocabulary = Counting()
    text = HOSTILE[what]
    split(text, vocabulary, max_tokens)
    assert vocabulary.n_characters <= 2.5 * len(text)


# ---------------------------------------------------------------------------------------------
# A real tokenizer


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    if library_file("llama") is None:
        pytest.skip("the patched library is not installed; run scripts/test")
    try:
        path = models.obtain(models.default_model().name)
    except DownloadError as error:
        pytest.skip(f"the demo model cannot be fetched: {error}")
    with Model(path) as opened:
        yield opened


@pytest.mark.model
@pytest.mark.native
@pytest.mark.parametrize("max_tokens", [16, 200, 2000])
def test_real_text_with_a_real_tokenizer(model, max_tokens):
    assert os.__file__ is not None
    with open(os.__file__, encoding="utf-8") as stream:
        source = stream.read()
    text = source + "名前はまだ無い。どこで生れたか。" * 50 + FAMILY * 30 + "\x06" * 40
    pieces = checked(text, model, max_tokens)
    fewest = -(-n_tokens(model, text) // max_tokens)
    assert fewest <= len(pieces) <= 1.6 * fewest + 1
