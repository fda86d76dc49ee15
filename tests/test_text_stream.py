"""Streaming detokenisation: cases 28 and the prefix space of SentencePiece vocabularies."""

from __future__ import annotations

import pytest
from fake_vocabulary import FakeVocabulary
from hypothesis import given
from hypothesis import strategies as st

from knapspec_edge.text.stream import StreamDecoder, detokenize
from knapspec_edge.text.vocabulary import start_prompt, tokenize_prompt

BPE = FakeVocabulary()
SPM = FakeVocabulary(spm=True, add_bos=True)


def stream(vocabulary: FakeVocabulary, tokens: list[int], **settings: bool) -> list[str]:
    decoder = StreamDecoder(vocabulary, **settings)
    return [decoder.push(token) for token in tokens]


@pytest.mark.parametrize(
    "text", ["👋🏽 family 👩‍👩‍👧", "日本語のテキスト", "naïve café", "a\u0301"]
)
def test_characters_split_into_bytes_arrive_whole(text: str) -> None:
    tokens = list(text.encode())  # ids 0..255 are the bytes
    pieces = stream(BPE, tokens)
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces)
    # Each character comes with its last byte, none earlier and none later.
    assert [p for p in pieces if p] == list(text)


def test_a_character_cut_by_the_end_is_left_out() -> None:
    tokens = list("ok 👋".encode())[:-1]
    decoder = StreamDecoder(BPE)
    assert "".join(decoder.push(t) for t in tokens) == "ok "
    assert decoder.incomplete
    assert detokenize(BPE, tokens) == "ok "


def test_bytes_that_are_no_character_are_replaced_once_and_the_text_goes_on() -> None:
    tokens = [*b"a", 0xFF, *"é".encode()]
    assert "".join(stream(BPE, tokens)) == "a\ufffdé" == detokenize(BPE, tokens)


@given(
    st.lists(st.integers(0, BPE.n_vocab - 1), max_size=40),
    st.booleans(),
    st.booleans(),
    st.sampled_from([BPE, SPM]),
)
def test_stream_equals_text_at_once(
    tokens: list[int], starts_text: bool, special: bool, vocabulary: FakeVocabulary
) -> None:
    joined = "".join(stream(vocabulary, tokens, starts_text=starts_text, special=special))
    assert joined == detokenize(vocabulary, tokens, starts_text=starts_text, special=special)


@given(st.text())
def test_any_text_survives_the_way_through_tokens(text: str) -> None:
    for vocabulary in (BPE, SPM):
        tokens = vocabulary.tokenize(text, parse_special=False)
        if vocabulary is SPM and any(t == vocabulary.special["<think>"] for t in tokens):
            continue  # a prefix space follows user-defined tokens there
        if not any(text.count(u) for u in ("<think>", "</think>", "    ")):
            assert "".join(stream(vocabulary, tokens)) == text


def test_prefix_space_goes_at_the_start_of_an_answer_only() -> None:
    tokens = SPM.tokenize("the user", parse_special=False)
    assert SPM.token_bytes(tokens[0]).startswith(b" ")
    assert "".join(stream(SPM, tokens)) == "the user"
    assert "".join(stream(SPM, tokens, starts_text=False)) == " the user"
    assert "".join(stream(BPE, BPE.tokenize(" the", parse_special=False))) == " the"


def test_control_tokens_have_no_text_unless_asked_for() -> None:
    tokens = BPE.tokenize("hello<|im_end|>", parse_special=True)
    assert "".join(stream(BPE, tokens)) == "hello"
    assert "".join(stream(BPE, tokens, special=True)) == "hello<|im_end|>"


@pytest.mark.parametrize("n_written", [0, 1, 2])
@pytest.mark.parametrize("add_bos", [True, False])
def test_exactly_one_bos(n_written: int, add_bos: bool) -> None:
    vocabulary = FakeVocabulary(add_bos=add_bos)
    bos = vocabulary.bos_token
    ids = start_prompt(vocabulary, [bos] * n_written + [5])
    assert ids == ([bos, 5] if n_written or add_bos else [5])


def test_raw_prompt_keeps_control_strings_as_text_unless_asked() -> None:
    text = "the <|im_end|>"
    assert SPM.special["<|im_end|>"] not in tokenize_prompt(SPM, text, parse_special=False)
    parsed = tokenize_prompt(SPM, text, parse_special=True)
    assert parsed == SPM.tokenize(text, parse_special=True, add_special=True)
