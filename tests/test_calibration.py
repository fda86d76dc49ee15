"""The calibration text: exact lengths, the question at the end, other text at other offsets."""

from __future__ import annotations

import pytest
from fake_vocabulary import FakeVocabulary

from knapspec_edge.text.calibration import (
    LONG_QUESTION,
    PASSAGE,
    QUESTION,
    calibration_tokens,
    long_calibration_tokens,
    passages,
)
from knapspec_edge.text.templates import ChatTemplate, choose_template
from knapspec_edge.text.vocabulary import tokenize_prompt


def chat(vocabulary: FakeVocabulary) -> ChatTemplate:
    template = choose_template(vocabulary, "chatml")
    assert template is not None
    return template


def text_of(vocabulary: FakeVocabulary, tokens: list[int]) -> str:
    pieces = [vocabulary.token_bytes(token, special=True) for token in tokens]
    return b"".join(pieces).decode(errors="replace")


def test_the_passages_are_many_and_of_similar_length() -> None:
    found = passages()
    assert found[0] == PASSAGE
    assert len(found) >= 9
    assert len(set(found)) == len(found)
    assert 14_000 <= sum(len(text) for text in found) <= 20_000
    assert all(1000 <= len(text) <= 2500 for text in found), [len(text) for text in found]
    assert all(text.endswith("\n") and "\r" not in text and "* * *" not in text for text in found)


def test_the_first_passage_stays_what_stored_measurements_were_made_on() -> None:
    vocabulary = FakeVocabulary()
    template = chat(vocabulary)
    content = f"{PASSAGE}\n{QUESTION}"
    expected = template.apply([{"role": "user", "content": content}]).tokens
    assert calibration_tokens(vocabulary, template) == expected
    raw = tokenize_prompt(vocabulary, PASSAGE, parse_special=False)
    assert calibration_tokens(vocabulary, None) == raw


def test_offsets_choose_other_passages_and_go_round() -> None:
    vocabulary = FakeVocabulary()
    template = chat(vocabulary)
    n = len(passages())
    texts = [text_of(vocabulary, calibration_tokens(vocabulary, template, i)) for i in range(n)]
    assert len(set(texts)) == n
    for text, passage in zip(texts, passages(), strict=True):
        assert passage in text
    # a question about the counting game makes no sense behind another text
    assert [QUESTION in text for text in texts] == [True] + [False] * (n - 1)
    again = calibration_tokens(vocabulary, template, n)
    assert again == calibration_tokens(vocabulary, template)


@pytest.mark.parametrize("n_tokens", [1, 2, 7, 40, 300, 2000, 20_000, 60_000])
@pytest.mark.parametrize("with_template", [True, False])
def test_long_prompts_have_the_length_asked_for(n_tokens: int, with_template: bool) -> None:
    vocabulary = FakeVocabulary(add_bos=not with_template)
    template = chat(vocabulary) if with_template else None
    tokens = long_calibration_tokens(vocabulary, template, n_tokens)
    assert len(tokens) == n_tokens
    if not with_template:
        assert tokens[0] == vocabulary.bos_token
        assert tokens.count(tokens[0]) == 1


def test_a_long_chat_prompt_is_cut_in_front_of_the_question() -> None:
    vocabulary = FakeVocabulary()
    template = chat(vocabulary)
    text = text_of(vocabulary, long_calibration_tokens(vocabulary, template, 1500))
    assert text.startswith(f"<|im_start|>user\n{PASSAGE[:200]}")
    assert text.endswith(f"\n\n{LONG_QUESTION}<|im_end|>\n<|im_start|>assistant\n")
    assert text.count(LONG_QUESTION) == 1
    # shorter than the frame: still a beginning and an end
    short = text_of(vocabulary, long_calibration_tokens(vocabulary, template, 20))
    assert short.startswith("<|im_start|>")
    assert short.endswith("<|im_start|>assistant\n")


def test_a_long_prompt_starts_at_its_offset_and_repeats_what_is_exhausted() -> None:
    vocabulary = FakeVocabulary()
    for offset in (0, 3, len(passages()) - 1, len(passages()) + 3):
        text = text_of(vocabulary, long_calibration_tokens(vocabulary, None, 3000, offset))
        start = passages()[offset % len(passages())]
        following = passages()[(offset + 1) % len(passages())]
        assert text.startswith(f"{start}\n{following[:100]}"), offset
    longer = text_of(vocabulary, long_calibration_tokens(vocabulary, None, 30_000))
    assert longer.count(PASSAGE) == 2


def test_a_prompt_without_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        long_calibration_tokens(FakeVocabulary(), None, 0)
