"""Prompts of bench: exact lengths, distinct, the same again, and the user's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fake_vocabulary import FakeVocabulary
from scripted import CHATML

from knapspec_edge.apps.bench import tasks, texts
from knapspec_edge.config import BENCH_TASKS
from knapspec_edge.errors import ContextError, UsageError
from knapspec_edge.text.fitting import TooShortError, fitted
from knapspec_edge.text.templates import ChatTemplate, choose_template

VOCABULARY = FakeVocabulary(chat_template=CHATML)


def template() -> ChatTemplate:
    found = choose_template(VOCABULARY)
    assert found is not None
    return found


def text_of(tokens: tuple[int, ...]) -> str:
    return b"".join(VOCABULARY.token_bytes(t, special=True) for t in tokens).decode(
        "utf-8", "replace"
    )


# -- exact lengths


def test_fitted_cuts_in_front_of_what_stands_behind() -> None:
    def render(text: str) -> list[int]:
        return [1, *text.encode(), 2, 3]

    tokens = fitted(render, iter(["abcdef", "ghi", "jkl"]), 10)
    assert tokens == [1, *b"abcdefg", 2, 3]


def test_fitted_says_what_it_needs() -> None:
    with pytest.raises(TooShortError) as error:
        fitted(lambda text: [1, *text.encode(), 2, 3], ["abcdef"], 3)
    assert error.value.needed == 4
    with pytest.raises(ValueError, match="fills 9 tokens, not 10"):
        fitted(lambda text: [1, *text.encode(), 2, 3], ["abcdef"], 10)


@pytest.mark.parametrize("task", BENCH_TASKS)
@pytest.mark.parametrize("n_tokens", [400, 401, 2048])
def test_a_prompt_has_exactly_the_length_asked_for(task: str, n_tokens: int) -> None:
    chat = tasks.build(VOCABULARY, template(), task, n_tokens, 0)
    plain = tasks.build(VOCABULARY, None, task, n_tokens, 0)
    assert len(chat.tokens) == len(plain.tokens) == n_tokens
    text = text_of(chat.tokens)
    # the format is whole, whatever was cut
    assert text.startswith("<|im_start|>")
    assert text.endswith("<|im_start|>assistant\n")
    assert text.count("<|im_start|>") == text.count("<|im_end|>") + 1
    assert "<|im_start|>" not in text_of(plain.tokens)


def test_prompts_of_32k_tokens() -> None:
    for task in ("summarize", "code", "qa"):
        assert len(tasks.build(VOCABULARY, None, task, 32768, 0).tokens) == 32768


def test_the_question_stands_behind_the_text() -> None:
    summary = text_of(tasks.build(VOCABULARY, template(), "summarize", 600, 0).tokens)
    assert "Here is a text." in summary
    assert summary.index("Summarize the text above") > summary.index("Here is a text.") + 100
    code = text_of(tasks.build(VOCABULARY, template(), "code", 600, 0).tokens)
    assert texts.source(texts.module_names()[0])[:80] in code
    problem = text_of(tasks.build(VOCABULARY, None, "reason", 900, 3).tokens)
    assert problem.endswith("\nSolution:")
    assert texts.problem(3_000_000).text in problem


def test_what_is_asked_about_stands_in_the_documentation() -> None:
    for repeat in (0, 1, 7):
        module = texts.documented_modules()[repeat]
        asked = texts.functions(module)[0]
        text = text_of(tasks.build(VOCABULARY, template(), "qa", 3000, repeat).tokens)
        assert asked.text.strip()[:300] in text
        assert f"what does {asked.name} do" in text


@pytest.mark.parametrize("task", BENCH_TASKS)
def test_prompts_are_distinct_and_the_same_again(
    task: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # few documents, so that repeats go round several times
    modules, topics = texts.documented_modules()[:4], texts.topics()[:3]
    for name, few in (
        ("module_names", modules),
        ("documented_modules", modules),
        ("topics", topics),
    ):
        monkeypatch.setattr(texts, name, lambda few=few: few)
    n = 24
    found = [tasks.build(VOCABULARY, template(), task, 500, repeat) for repeat in range(n)]
    assert len({prompt.tokens for prompt in found}) == n
    assert len({prompt.digest for prompt in found}) == n
    assert len({prompt.name for prompt in found}) == n
    assert tasks.build(VOCABULARY, template(), task, 500, 5) == found[5]


def test_a_length_without_room_for_the_question_is_said() -> None:
    with pytest.raises(
        UsageError, match=r"--contexts 40: the question of task qa .* at least \d+ tok"
    ):
        tasks.build(VOCABULARY, template(), "qa", 40, 0)


def test_without_sources_two_tasks_are_impossible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "module_names", lambda: ())
    monkeypatch.setattr(texts, "documented_modules", lambda: ())
    monkeypatch.setattr(texts, "topics", lambda: ())
    for task in ("code", "qa"):
        with pytest.raises(UsageError, match="without the sources of its standard library"):
            tasks.build(VOCABULARY, template(), task, 600, 0)
    assert len(tasks.build(VOCABULARY, template(), "summarize", 600, 0).tokens) == 600


def test_solutions_are_right() -> None:
    """The last number of each solution, computed anew from the numbers of its text."""
    import re

    for number in range(0, 600, 6):
        problem = texts.problem(number)
        n, price, extra, paid = map(int, re.findall(r"\d+", problem.text))
        assert int(re.findall(r"\d+", problem.solution)[-1]) == paid - n * price - extra >= 0
    for number in range(1, 600, 6):
        problem = texts.problem(number)
        hours, first, more, second = map(int, re.findall(r"\d+", problem.text))
        assert int(re.findall(r"\d+", problem.solution)[-1]) == hours * first + more * second
    for number in range(2, 600, 6):
        problem = texts.problem(number)
        age, gap, years = map(int, re.findall(r"\d+", problem.text))
        assert int(re.findall(r"\d+", problem.solution)[-1]) == age + (age + gap) + 2 * years
    for number in range(3, 600, 6):
        problem = texts.problem(number)
        total, friends = map(int, re.findall(r"\d+", problem.text))
        assert tuple(map(int, re.findall(r"\d+", problem.solution)[-2:])) == divmod(total, friends)
    for number in range(4, 600, 6):
        problem = texts.problem(number)
        start, weekly, weeks, spent = map(int, re.findall(r"\d+", problem.text))
        assert int(re.findall(r"\d+", problem.solution)[-1]) == start + weekly * weeks - spent
    for number in range(5, 600, 6):
        problem = texts.problem(number)
        length, width, price = map(int, re.findall(r"\d+", problem.text))
        assert int(re.findall(r"\d+", problem.solution)[-1]) == 2 * (length + width) * price


# -- what is written on the command line


def test_contexts_are_read() -> None:
    assert tasks.parse_contexts("6K,256, 2k,2048") == (256, 2048, 6144)
    for wrong in ("", "2M", "-1", "12", "1e3", "256,,512", "٣٢", "99999999K"):
        with pytest.raises(UsageError, match="--contexts"):
            tasks.parse_contexts(wrong)
    assert [tasks.shown_context(n) for n in (256, 2048, 6000, None)] == ["256", "2K", "6000", "own"]


# -- the user's own prompts


def write(path: Path, *lines: Any) -> Path:
    path.write_text(
        "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), "utf-8"
    )
    return path


def test_own_prompts_are_read(tmp_path: Path) -> None:
    file = write(
        tmp_path / "p.jsonl",
        {"prompt": "Hello"},
        "",
        {"messages": [{"role": "user", "content": "Hi"}], "name": "greeting", "task": "mine"},
    )
    first, second = tasks.read_prompts(file)
    assert (first.name, first.task, first.prompt, first.messages) == (
        "prompt-1",
        "prompts",
        "Hello",
        (),
    )
    assert (second.name, second.task, second.prompt) == ("greeting", "mine", None)
    asked = tasks.build_own(VOCABULARY, template(), first, 0, 500)
    assert text_of(asked.tokens).endswith("Hello<|im_end|>\n<|im_start|>assistant\n")
    assert (asked.context, asked.name) == (None, "prompt-1")
    assert text_of(tasks.build_own(VOCABULARY, None, first, 0, 500).tokens) == "Hello"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("nonsense", "line 2 is no JSON object"),
        ("[1]", "line 2 is no JSON object"),
        ("[" * 5000, "line 2 is no JSON object"),
        ({}, "line 2: give either prompt or messages"),
        ({"prompt": "a", "messages": []}, "line 2: give either prompt or messages"),
        ({"prompt": ""}, "line 2: prompt has to be a text"),
        ({"prompt": 3}, "line 2: prompt has to be a text"),
        ({"messages": []}, "line 2: messages has to be a list of"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "line 2: messages has to be a list of"),
        ({"messages": [{"role": "user"}]}, "line 2: messages has to be a list of"),
        ({"prompt": "a", "name": 3}, "line 2: name has to be a text"),
        ({"prompt": "a", "task": " "}, "line 2: task has to be a text"),
        ({"prompt": "a", "promt": "b"}, "line 2: 'promt' is not known"),
        ('{"prompt": "\\ud800"}', "line 2: it holds what is no text"),
        ({"prompt": "a", "name": "prompt-1"}, "two prompts have the name 'prompt-1'"),
    ],
)
def test_the_first_bad_line_is_named(tmp_path: Path, line: Any, said: str) -> None:
    file = write(tmp_path / "p.jsonl", {"prompt": "fine"}, line, {"prompt": "fine too"})
    with pytest.raises(UsageError) as error:
        tasks.read_prompts(file)
    assert said in str(error.value)
    assert str(file) in str(error.value)
    assert "\n" not in str(error.value)


def test_files_that_are_none(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.jsonl", tmp_path, write(tmp_path / "empty.jsonl", "", " ")):
        with pytest.raises(UsageError, match="--prompts"):
            tasks.read_prompts(path)
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "\xe9"}')
    with pytest.raises(UsageError, match="no UTF-8"):
        tasks.read_prompts(tmp_path / "latin.jsonl")


def test_own_prompts_that_cannot_be_answered() -> None:
    long = tasks.OwnPrompt("long", "prompts", "x" * 90, ())
    with pytest.raises(ContextError, match=r"prompt long has \d+ tokens.*room for 50.*raise --ctx"):
        tasks.build_own(VOCABULARY, template(), long, 0, 50)
    talk = tasks.OwnPrompt("talk", "prompts", None, ({"role": "user", "content": "Hi"},))
    with pytest.raises(UsageError, match="prompt talk has messages, and this model has no chat"):
        tasks.build_own(VOCABULARY, None, talk, 0, 500)
