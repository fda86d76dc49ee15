"""Asking again, editing, documents, overflow, thoughts and files of a conversation (cases 14, 17,
18, 24, 25, 57)."""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_vocabulary import FakeVocabulary
from fakes import interrupted
from scripted import fake_of, scripted_engine

from knapspec_edge.apps import conversation_file
from knapspec_edge.apps.chat import CommandResult, Commands
from knapspec_edge.apps.conversation import Conversation
from knapspec_edge.apps.conversation_file import Saved
from knapspec_edge.engine import Engine, Settings
from knapspec_edge.errors import (
    ContextError,
    Interrupted,
    KnapspecError,
    NativeError,
    OutputError,
    UsageError,
)

# After Qwen3's: thoughts of earlier answers are dropped; without thinking the prompt has an empty
# one.
THINKING = (
    "{% for m in messages %}{% set content = m['content'] %}"
    "{% if m['role'] == 'assistant' and '</think>' in content %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and enable_thinking is false %}"
    "{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
# After DeepSeek-R1's: the prompt opens the thought.
OPENS_THOUGHT = THINKING.split("{% if enable")[0] + "{{ '<think>\n' }}{% endif %}"
NO_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    + THINKING
)


def say(conversation: Conversation, text: str) -> str:
    return "".join(event.text for event in conversation.say(text))


def again(conversation: Conversation, question: str | None = None) -> str:
    return "".join(event.text for event in conversation.again(question))


def command(conversation: Conversation, line: str) -> str:
    result = Commands(conversation).run(line)
    assert isinstance(result, CommandResult)
    return result.text


def counting() -> Callable[[str], str]:
    """Another answer each time a question is asked afresh."""
    numbers = itertools.count(1)
    return lambda question: f"{question} {next(numbers)}"


def changing_engine(answers: list[str], **more: Any) -> Engine:
    """`answers[0]` is what is said now."""
    return scripted_engine(lambda question: f"{answers[0]} {question}", **more)


def cached(conversation: Conversation) -> tuple[int, int]:
    assert conversation.last is not None
    stats = conversation.last.stats
    return stats.prompt_tokens, stats.cached_tokens


# -- asking again


def test_regen_replaces_the_answer_and_computes_one_token() -> None:
    answers = ["A"]
    conversation = Conversation(changing_engine(answers))
    say(conversation, "hello")
    say(conversation, "the")
    answers[0] = "B"
    assert again(conversation) == "B the"
    assert [m["content"] for m in conversation.messages] == ["hello", "A hello", "the", "B the"]
    prompt, from_cache = cached(conversation)
    assert from_cache == prompt - 1  # the last token's logits are needed afresh
    assert conversation.notices() == []
    fake_of(conversation.engine).check_ledger()


def test_regen_says_why_the_answer_stays_the_same() -> None:
    conversation = Conversation(scripted_engine())
    say(conversation, "hello")
    again(conversation)
    assert conversation.notices() == [
        "at temperature 0 the answer stays the same; /set temp 0.8 lets it vary"
    ]
    command(conversation, "/set temp 0.01")
    command(conversation, "/set seed 7")
    again(conversation)
    assert conversation.notices() == [
        "the seed 7 gives the same answer again; /set seed off frees it"
    ]


def test_regen_draws_another_seed_unless_one_is_set() -> None:
    conversation = Conversation(scripted_engine(), Settings(temperature=0.01))
    seeds = set()
    say(conversation, "hello")
    for _ in range(4):
        again(conversation)
        assert conversation.last is not None
        seeds.add(conversation.last.sampling.seed)
    assert len(seeds) > 1


@pytest.mark.parametrize("error", [NativeError("failed"), interrupted()])
@pytest.mark.parametrize("after", [0, 3])
def test_a_failed_regen_keeps_the_answer_and_a_stopped_one_what_was_said(
    error: KnapspecError, after: int
) -> None:
    answers = ["A B C D"]
    conversation = Conversation(changing_engine(answers))
    say(conversation, "hello")
    before = conversation.messages
    answers[0] = "X Y Z"
    backend = fake_of(conversation.engine)
    backend.fail_at[backend._calls + after] = error
    with pytest.raises(type(error)):
        again(conversation)
    if after and isinstance(error, Interrupted):
        assert conversation.messages[-1]["content"] == "X Y"[:after]
    else:
        assert conversation.messages == before
    backend.fail_at.clear()
    assert say(conversation, "the") == "X Y Z the"
    backend.check_ledger()


def test_edit_asks_another_question_in_place_of_the_last() -> None:
    conversation = Conversation(scripted_engine(), system="the user")
    say(conversation, "hello")
    say(conversation, "again")
    result = Commands(conversation).run("/edit")
    assert result == CommandResult(again=True, question="again", opened=True)
    result = Commands(conversation).run("/edit  in the ")
    assert result == CommandResult(again=True, question="in the")
    assert again(conversation, "in the") == "You said: in the"
    contents = [m["content"] for m in conversation.messages]
    assert contents == ["the user", "hello", "You said: hello", "in the", "You said: in the"]
    prompt, from_cache = cached(conversation)
    # all up to the question is shared
    shared = conversation.count(conversation.turns[:1])
    assert shared - len("<assistant\n") < from_cache < prompt


@pytest.mark.parametrize("line", ["/regen", "/edit", "/edit hello"])
def test_there_has_to_be_a_last_turn(line: str) -> None:
    with pytest.raises(UsageError, match="nothing has been answered"):
        Commands(Conversation(scripted_engine())).run(line)


# -- the system prompt


def test_system_shows_sets_and_removes() -> None:
    conversation = Conversation(scripted_engine())
    assert command(conversation, "/system") == "there is no system prompt"
    assert command(conversation, '/system Be "brief" & kind.') == "the system prompt is set"
    assert command(conversation, "/system") == 'Be "brief" & kind.'
    assert "already" in command(conversation, '/system Be "brief" & kind.')
    say(conversation, "hello")
    said = command(conversation, "/system Be\nlong.")
    assert "1 turn, " in said
    assert "read again" in said
    assert conversation.messages[0] == {"role": "system", "content": "Be\nlong."}
    assert len(conversation.messages) == 3
    say(conversation, "again")
    assert cached(conversation)[1] < 12  # no more than the beginning is shared
    assert "removed" in command(conversation, "/system off")
    assert conversation.messages[0]["role"] == "user"


def test_system_prompt_that_does_not_fit_changes_nothing() -> None:
    conversation = Conversation(scripted_engine(n_ctx=100), system="the")
    with pytest.raises(ContextError, match=r"1\d\d tokens.* 100; --ctx"):
        command(conversation, "/system " + "x" * 99)
    assert conversation.system == "the"


def test_a_template_without_the_role_gets_it_in_front_of_the_first_message() -> None:
    engine = scripted_engine(vocabulary=FakeVocabulary(chat_template=NO_SYSTEM))
    conversation = Conversation(engine)
    assert "takes no system prompt" in command(conversation, "/system the user")
    assert say(conversation, "hello") == "You said: the user\n\nhello"
    assert conversation.notices() == []  # it was said


# -- thinking models


def thinking(
    reply: Callable[[str], str], template: str = THINKING, settings: Settings | None = None
) -> Conversation:
    return Conversation(
        scripted_engine(reply, vocabulary=FakeVocabulary(chat_template=template)), settings
    )


def test_old_thoughts_are_dropped_and_only_what_differs_is_computed() -> None:
    conversation = thinking(lambda q: f"<think>\nthe user said {q}\n</think>\n\nSo: {q}")
    say(conversation, "hello")
    assert "the user said" in conversation.messages[-1]["content"]
    say(conversation, "again")
    prompt, from_cache = cached(conversation)
    first = conversation.engine.require_template().apply([conversation.turns[0].message]).tokens
    # up to the thought: the first question and the head of its answer
    assert from_cache == len(first)
    shown = conversation.engine.require_template().apply(conversation.messages)
    assert "the user said" not in shown.text
    assert shown.text.count("So: ") == 2
    fresh = thinking(lambda q: f"<think>\nthe user said {q}\n</think>\n\nSo: {q}")
    say(fresh, "hello")
    fresh.engine.session.reset()
    say(fresh, "again")
    assert fresh.last is not None
    assert conversation.last is not None
    assert fresh.last.token_ids == conversation.last.token_ids
    assert prompt == fresh.last.stats.prompt_tokens


def test_a_thought_that_was_cut_is_closed_in_the_history() -> None:
    conversation = thinking(lambda q: f"<think>\nthe user said {q}\n</think>\n\nSo: {q}")
    events = conversation.say("hello")
    for _ in range(5):
        next(events)
    events.close()  # type: ignore[attr-defined]
    said = conversation.messages[-1]["content"]
    assert said.startswith("<think>\nthe")
    assert said.endswith("\n</think>\n\n")
    assert "<think>" not in conversation.engine.require_template().apply(conversation.messages).text


def test_a_thought_that_the_prompt_opens_belongs_to_the_answer() -> None:
    conversation = thinking(lambda q: f"<think>\nthe user\n</think>\n\nSo: {q}", OPENS_THOUGHT)
    say(conversation, "hello")
    assert conversation.last is not None
    assert conversation.last.opening == "<think>\n"
    assert conversation.messages[-1]["content"] == "<think>\nthe user\n</think>\n\nSo: hello"


def test_thinking_is_switched_where_the_template_can() -> None:
    conversation = thinking(lambda q: q, settings=Settings(think=False))
    assert not conversation.engine.require_template().apply(conversation.turns or [
        {"role": "user", "content": "x"}]).text.endswith("</think>\n\n")  # fmt: skip
    n_without = conversation.count([], _turn("hello"))
    assert "think" in command(conversation, "/set")
    command(conversation, "/set think on")
    assert conversation.count([], _turn("hello")) < n_without
    command(conversation, "/set think auto")
    assert conversation.settings == Settings()
    with pytest.raises(UsageError, match="on, off or auto"):
        command(conversation, "/set think hard")


def _turn(text: str) -> Any:
    from knapspec_edge.apps.conversation import Turn

    return Turn(text, "")


def test_thinking_is_refused_where_the_template_cannot() -> None:
    with pytest.raises(UsageError, match="no switch for thinking"):
        Conversation(scripted_engine(), Settings(think=True))
    conversation = Conversation(scripted_engine())
    with pytest.raises(UsageError, match="no switch for thinking"):
        command(conversation, "/set think off")
    assert conversation.settings == Settings()


# -- a full context


def full(overflow: str, *, n_ctx: int = 200, **more: Any) -> Conversation:
    conversation = Conversation(
        scripted_engine(n_ctx=n_ctx), Settings(), system="the user", overflow=overflow, **more
    )
    for i in range(4):
        say(conversation, f"{i}" * 10)
        conversation.notices()
    return conversation


def test_dropping_is_opt_in_keeps_the_system_prompt_and_is_told() -> None:
    conversation = full("drop", n_ctx=400)
    asked = [str(i) * 10 for i in range(4)]
    dropped: list[bool] = []
    while len(dropped) < 12:
        asked.append(chr(ord("a") + len(dropped)) * 10)
        say(conversation, asked[-1])
        notices = conversation.notices()
        dropped.append(bool(notices))
        for notice in notices:
            assert re.search(r" 3\d\d tokens .* 400: dropped the \d oldest turns", notice)
            assert "system prompt stays" in notice
        messages = conversation.messages
        assert messages[0] == {"role": "system", "content": "the user"}
        # whole turns, and the oldest went
        questions = [m["content"] for m in messages[1::2]]
        assert questions == asked[-len(questions) :]
        assert [m["role"] for m in messages[1:]] == ["user", "assistant"] * len(questions)
        assert dropped[-1] or len(questions) > 1
    # seldom, since what stays has to be computed again
    assert 2 <= sum(dropped) <= 4
    fake_of(conversation.engine).check_ledger()


def test_files_have_the_turns_that_were_dropped(tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    conversation = full("drop", file=file)
    asked = [*(str(i) * 10 for i in range(4)), "x" * 10, "y" * 10]
    for question in asked[4:]:
        say(conversation, question)
    conversation.keep()
    assert len(conversation.turns) < len(asked)
    questions = [m["content"] for m in conversation_file.load(file).messages[::2]]
    assert questions == asked
    again = Conversation(scripted_engine(n_ctx=200))
    again.restore(conversation_file.load(file))
    assert len(again.turns) == len(asked)
    assert say(again, "hello") == "You said: hello"


def test_stop_says_both_numbers_and_set_overflow_helps() -> None:
    conversation = full("stop")
    before = conversation.messages
    with pytest.raises(ContextError, match=r"\d{3} tokens .* 200; /clear .*--ctx N.*/set overflow"):
        say(conversation, "x" * 99)
    assert conversation.messages == before
    assert "drop" in command(conversation, "/set overflow drop")
    assert say(conversation, "x" * 60).startswith("You said: xxx")
    with pytest.raises(UsageError, match="stop or drop"):
        command(conversation, "/set overflow maybe")


def test_what_never_fits_is_said_whatever_may_be_dropped() -> None:
    conversation = full("drop")
    before = conversation.messages
    with pytest.raises(ContextError, match=r"message is too long.* 2\d\d tokens.* 200"):
        say(conversation, "x" * 250)
    assert conversation.messages == before


def test_nothing_is_dropped_for_an_answer_that_did_not_come() -> None:
    conversation = full("drop")
    before = conversation.messages
    backend = fake_of(conversation.engine)
    backend.fail_at[backend._calls] = interrupted()
    with pytest.raises(Interrupted):
        say(conversation, "x" * 40)
    assert conversation.messages == before
    assert conversation.notices() == []


# -- documents


def test_a_document_goes_in_front_of_the_next_message(tmp_path: Path) -> None:
    file = tmp_path / "my letter.txt"
    file.write_text("the hello\n", encoding="utf-8")
    conversation = Conversation(scripted_engine())
    said = command(conversation, f"/read {file}")
    assert said.startswith("my letter.txt: 3 tokens, 1% of the context of 512; ")
    assert "my letter.txt" in command(conversation, "/read")
    say(conversation, "What?")
    assert conversation.messages[0]["content"] == "my letter.txt:\n\nthe hello\n\nWhat?"
    assert command(conversation, "/read") == "nothing was read for the next message"
    say(conversation, "again")
    assert conversation.messages[2]["content"] == "again"


@pytest.mark.parametrize("form", ['"{}"', "'{}'", "{escaped}", "{}"])
def test_names_of_files_as_people_type_them(tmp_path: Path, form: str) -> None:
    if os.name == "nt" and "escaped" in form:
        pytest.skip("a backslash stands between folders there")
    file = tmp_path / "a (b) c.txt"
    file.write_text("the", encoding="utf-8")
    escaped = str(file).replace(" ", "\\ ").replace("(", "\\(").replace(")", "\\)")
    conversation = Conversation(scripted_engine())
    assert "1 tokens" in command(conversation, "/read " + form.format(file, escaped=escaped))


def test_documents_stay_until_they_were_answered_and_go_along_with_edits(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("the", encoding="utf-8")
    conversation = Conversation(scripted_engine())
    command(conversation, f"/read {file}")
    backend = fake_of(conversation.engine)
    backend.fail_at[backend._calls] = interrupted()
    with pytest.raises(Interrupted):
        say(conversation, "What?")
    assert len(conversation.documents) == 1
    say(conversation, "What?")
    assert Commands(conversation).run("/edit") == CommandResult(
        again=True, question="What?", opened=True
    )
    again(conversation, "Who?")
    assert conversation.messages[0]["content"] == "a.txt:\n\nthe\n\nWho?"
    command(conversation, f"/read {file}")
    again(conversation, "Why?")
    assert conversation.messages[0]["content"] == "a.txt:\n\nthe\n\nWhy?"
    assert len(conversation.documents) == 1  # for the next message
    command(conversation, "/read off")
    assert conversation.documents == ()


def test_a_document_that_does_not_fit_is_refused_with_both_numbers(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("x" * 90, encoding="utf-8")
    conversation = Conversation(scripted_engine(n_ctx=120))
    say(conversation, "hello")
    with pytest.raises(ContextError, match=r"a.txt has 90 tokens.* has 1\d\d tokens.* 120; --ctx"):
        command(conversation, f"/read {file}")
    assert conversation.documents == ()
    file.write_text("x" * 5000, encoding="utf-8")
    with pytest.raises(ContextError, match=r"5,000 tokens.* 120; --ctx"):
        command(conversation, f"/read {file}")


@pytest.mark.parametrize("name", ["missing.txt", "empty.txt", "model.gguf", "-", ".", "'"])
def test_what_cannot_be_read_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty.txt").touch()
    Path("model.gguf").write_bytes(b"GGUF\x03\x00\x00\x00")
    conversation = Conversation(scripted_engine())
    with pytest.raises(KnapspecError) as caught:
        command(conversation, f"/read {name}")
    assert "\n" not in str(caught.value)
    assert conversation.documents == ()


# -- files


@pytest.mark.parametrize("bias", [None, {}, {5: 1.5}])
def test_what_was_saved_can_be_loaded_and_saved_again(
    tmp_path: Path, bias: dict[int, float] | None
) -> None:
    file = tmp_path / "talk.json"
    conversation = Conversation(scripted_engine(), Settings(logit_bias=bias))
    say(conversation, "hello")
    command(conversation, f"/save {file}")
    command(conversation, f"/save {file}")
    assert (conversation_file.load(file).settings.logit_bias or {}) == (bias or {})


def test_a_saved_conversation_goes_on_where_it_was(tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    settings = Settings(
        temperature=0.01, seed=7, stop=("END",), logit_bias={5: 1.25, 7: float("-inf")},
        json_schema=None, max_tokens=90,
    )  # fmt: skip
    conversation = Conversation(scripted_engine(), settings, system="the 日本 👋", overflow="drop")
    say(conversation, "hello\n\nthe")
    say(conversation, "again")
    assert command(conversation, f"/save {file}") == f"saved the conversation as {file}"
    data = json.loads(file.read_text(encoding="utf-8"))
    assert data["format"] == "knapspec-edge conversation"
    assert data["version"] == 1
    assert data["saved_at"][:2] == "20"
    assert data["messages"][0] == {"role": "user", "content": "hello\n\nthe"}
    assert data["settings"]["logit_bias"] == ["5+1.25", "7-inf"]
    other = Conversation(scripted_engine())
    say(other, "the")
    said = command(other, f"/load {file}")
    assert "loaded 2 turns" in said
    assert "takes the place of the 1 turn before" in said
    assert other.messages == conversation.messages
    assert other.settings == conversation.settings
    assert other.overflow == "drop"
    assert say(other, "in") == say(conversation, "in")


def test_loading_reuses_what_is_in_the_cache(tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    conversation = Conversation(scripted_engine())
    say(conversation, "hello")
    command(conversation, f"/save {file}")
    say(conversation, "the")
    command(conversation, f"/load {file}")
    assert say(conversation, "in") == "You said: in"
    prompt, from_cache = cached(conversation)
    assert 0 < prompt - from_cache < 12  # the new question alone
    fake_of(conversation.engine).check_ledger()


def good(**changes: Any) -> dict[str, Any]:
    turn = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    whole = {
        "format": conversation_file.FORMAT, "version": 1, "settings": {}, "system": None,
        "messages": turn,
    }  # fmt: skip
    return {**whole, **changes}


BAD = {
    "no JSON": "{",
    "another kind": '{"messages": []}',
    "a list": "[1]",
    "nested": "[" * 100000,
    "a later version": json.dumps(good(version=2)),
    "no messages": json.dumps(good(messages=None)),
    "no answer": json.dumps(good(messages=[{"role": "user", "content": "a"}])),
    "wrong order": json.dumps(good(messages=good()["messages"][::-1])),
    "a tool": json.dumps(good(messages=[{"role": "tool", "content": "a"}])),
    "no text": json.dumps(good(messages=[{"role": "user", "content": 3}])),
    "half a character": json.dumps(good(messages=[{"role": "user", "content": "\ud800"}])),
    "system": json.dumps(good(system=["x"])),
    "settings": json.dumps(good(settings=[])),
    "temperature": json.dumps(good(settings={"temperature": -1})),
    "temperature as text": json.dumps(good(settings={"temperature": "hot"})),
    "seed": json.dumps(good(settings={"seed": "x"})),
    "stop": json.dumps(good(settings={"stop": "x"})),
    "empty stop": json.dumps(good(settings={"stop": [""]})),
    "bias": json.dumps(good(settings={"logit_bias": ["x"]})),
    "bias of no token": json.dumps(good(settings={"logit_bias": ["99999+1"]})),
    "preset": json.dumps(good(settings={"preset": "hot"})),
    "preset list": json.dumps(good(settings={"preset": []})),
    "schema": json.dumps(good(settings={"json_schema": {"type": "thing"}})),
    "think": json.dumps(good(settings={"think": True})),
    "overflow": json.dumps(good(overflow="maybe")),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_a_damaged_or_foreign_file_is_one_line_and_changes_nothing(
    tmp_path: Path, what: str
) -> None:
    file = tmp_path / "talk.json"
    file.write_text(BAD[what], encoding="utf-8")
    conversation = Conversation(scripted_engine(), system="the")
    say(conversation, "hello")
    before = conversation.messages, conversation.settings
    with pytest.raises(KnapspecError) as caught:
        command(conversation, f"/load {file}")
    assert "\n" not in str(caught.value)
    assert (conversation.messages, conversation.settings) == before
    assert say(conversation, "again") == "You said: again"


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "a\udcffb").parent.mkdir(exist_ok=True)
    for name in ("missing", "binary", "", "x" * 999, "a\0b"):
        with pytest.raises(UsageError) as caught:
            conversation_file.load(tmp_path / name)
        assert "\n" not in str(caught.value)


def test_the_smallest_file_loads(tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    least = {key: good()[key] for key in ("format", "version", "messages")}
    file.write_text("\ufeff" + json.dumps({**least, "more": 1}), encoding="utf-8")
    assert conversation_file.load(file) == Saved(
        ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})
    )


def test_saving_replaces_a_conversation_and_nothing_else(tmp_path: Path) -> None:
    conversation = Conversation(scripted_engine())
    say(conversation, "hello")
    commands = Commands(conversation)
    with pytest.raises(UsageError, match="give the name"):
        commands.run("/save")
    file = tmp_path / "talk.json"
    commands.run(f"/save {file}")
    if os.name != "nt":
        file.chmod(0o640)
    say(conversation, "the")
    commands.run("/save")
    assert len(json.loads(file.read_text(encoding="utf-8"))["messages"]) == 4
    if os.name != "nt":
        assert file.stat().st_mode & 0o777 == 0o640
    other = tmp_path / "letter.txt"
    other.write_text("mine", encoding="utf-8")
    with pytest.raises(UsageError, match="not overwritten"):
        commands.run(f"/save {other}")
    assert other.read_text(encoding="utf-8") == "mine"
    for path in (tmp_path, tmp_path / "missing" / "talk.json"):
        with pytest.raises(UsageError, match="cannot write the conversation"):
            commands.run(f"/save {path}")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["letter.txt", "talk.json"]


def test_a_full_disk_leaves_the_file_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "talk.json"
    conversation = Conversation(scripted_engine(), file=file)
    say(conversation, "hello")
    conversation.keep()
    before = file.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    say(conversation, "the")
    with monkeypatch.context() as patched:
        patched.setattr(conversation_file, "sync", full)
        with pytest.raises(OutputError, match="No space left"):
            conversation.keep()
    assert file.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["talk.json"]
    conversation.keep()  # what was not written is tried again
    assert len(conversation_file.load(file).messages) == 4


def test_clear_lets_the_kept_conversation_be(tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    conversation = Conversation(scripted_engine(), file=file)
    say(conversation, "hello")
    conversation.keep()
    assert "keeps the one before" in command(conversation, "/clear")
    say(conversation, "the")
    conversation.keep()
    assert conversation_file.load(file).messages[0]["content"] == "hello"


def test_another_model_and_a_small_context_are_said(tmp_path: Path) -> None:
    messages = good()["messages"] * 20
    saved = Saved(tuple(messages), model_name="Other", fingerprint="f")
    conversation = Conversation(scripted_engine(n_ctx=100))
    notices = conversation.restore(saved)
    assert "Other" in notices[0]
    assert "100" in notices[1]
    assert "overflow drop" in notices[1]


def test_what_is_asked_for_takes_the_place_of_what_was_saved(tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    old = Settings(temperature=0.5, top_k=3, seed=9, grammar='root ::= "a"')
    conversation_file.save(file, Saved((), "the", old, "drop"))
    begun = conversation_file.begin(file, file, Settings())
    assert (begun.settings, begun.system, begun.overflow) == (old, "the", "drop")
    asked = Settings(temperature=0.0, json_schema="json")
    begun = conversation_file.begin(file, None, asked, system="", overflow="stop")
    assert begun.settings == Settings(temperature=0.0, top_k=3, seed=9, json_schema="json")
    assert (begun.system, begun.overflow) == (None, "stop")
    begun = conversation_file.begin(file, None, Settings(preset="paper"))
    assert begun.settings == Settings(preset="paper", seed=9, grammar='root ::= "a"')
    with pytest.raises(UsageError, match="--load"):
        conversation_file.begin(None, file, Settings())


def test_control_c_while_a_conversation_is_loaded_leaves_the_one_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    conversation = Conversation(scripted_engine(), system="Be brief.")
    list(conversation.say("hello"))
    before = conversation.messages

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    saved = conversation_file.Saved(
        ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})
    )
    with monkeypatch.context() as patched:
        patched.setattr(conversation._template, "apply", interrupted)
        with pytest.raises(KeyboardInterrupt):
            conversation.restore(saved)
        with pytest.raises(KeyboardInterrupt):
            conversation.set_system("Another one.")
    assert conversation.messages == before


def test_no_biases_are_saved_and_loaded_in_either_form(tmp_path: Path) -> None:
    """The command line gives an empty mapping where there are none."""
    file = tmp_path / "talk.json"
    conversation = Conversation(scripted_engine(), Settings(logit_bias={}))
    list(conversation.say("hello"))
    conversation.save(file)
    data = json.loads(file.read_text(encoding="utf-8"))
    assert "logit_bias" not in data["settings"]
    assert conversation_file.load(file).settings == Settings()
    data["settings"]["logit_bias"] = []
    file.write_text(json.dumps(data), encoding="utf-8")
    assert conversation_file.load(file).settings == Settings()
    Conversation(scripted_engine()).restore(conversation_file.load(file))
