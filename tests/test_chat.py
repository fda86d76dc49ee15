"""The conversation behind `chat`: history, key reuse, slash commands (cases 24, 25, 57)."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from fake_vocabulary import FakeVocabulary
from fakes import interrupted
from scripted import fake_of, scripted_engine

from knapspec_edge.apps.chat import SETTING_NAMES, CommandResult, Commands
from knapspec_edge.apps.conversation import Conversation
from knapspec_edge.engine import Settings
from knapspec_edge.errors import ContextError, Interrupted, ModelError, UsageError
from knapspec_edge.repl import converse
from knapspec_edge.terminal import Terminal


def say(conversation: Conversation, text: str) -> str:
    return "".join(event.text for event in conversation.say(text))


def command(conversation: Conversation, line: str) -> str:
    result = Commands(conversation).run(line)
    assert isinstance(result, CommandResult)
    return result.text


class FakeTty(io.StringIO):
    def isatty(self) -> bool:
        return True


def chat(
    conversation: Conversation, lines: Iterable[str | BaseException], *, interactive: bool = True
) -> tuple[int, str, str]:
    """Exit code, standard output, standard error of a conversation with these lines."""
    waiting = iter(lines)

    def read(begun: str = "") -> str:
        line = next(waiting, EOFError())
        if isinstance(line, BaseException):
            raise line
        return line

    out, err = io.StringIO(), FakeTty() if interactive else io.StringIO()
    code = converse(conversation, Terminal(out=out, err=err), read, interactive=interactive)
    return code, out.getvalue(), err.getvalue()


def test_history_is_sent_and_keys_are_reused() -> None:
    conversation = Conversation(scripted_engine(), system="the user")
    assert say(conversation, "hello") == "You said: hello"
    assert say(conversation, "again") == "You said: again"
    assert [m["role"] for m in conversation.messages] == [
        "system",
        "user",
        "assistant",
        "user",
        "assistant",
    ]
    assert conversation.last is not None
    assert conversation.last.stats.cached_tokens > 0
    fresh = Conversation(scripted_engine(), system="the user")
    say(fresh, "hello")
    fresh.engine.session.reset()
    assert say(fresh, "again") == "You said: again"
    assert fresh.last is not None
    assert fresh.last.token_ids == conversation.last.token_ids


def test_base_model_is_refused_at_the_start() -> None:
    with pytest.raises(ModelError, match="--template"):
        Conversation(scripted_engine(vocabulary=FakeVocabulary()))


def test_stopped_answer_stays_in_the_history_and_the_next_turn_is_right() -> None:
    conversation = Conversation(scripted_engine(lambda q: f"A B C D E F G {q}"))
    backend = fake_of(conversation.engine)
    shown = ""

    def press_after_c() -> None:
        nonlocal shown
        for event in conversation.say("hello"):
            shown += event.text
            if shown.endswith("C"):
                backend.fail_at[backend._calls] = interrupted()

    with pytest.raises(Interrupted):
        press_after_c()
    assert shown == "A B C"
    assert conversation.messages[-1] == {"role": "assistant", "content": "A B C"}
    assert say(conversation, "the") == "A B C D E F G the"
    fake_of(conversation.engine).check_ledger()


def test_stop_while_the_prompt_is_read_drops_the_question() -> None:
    conversation = Conversation(scripted_engine())
    say(conversation, "hello")
    before = conversation.messages
    backend = fake_of(conversation.engine)
    backend.fail_at[backend._calls + 1] = interrupted()
    with pytest.raises(Interrupted):
        say(conversation, "a long question " * 4)
    assert conversation.messages == before
    assert say(conversation, "again") == "You said: again"


def test_reader_leaving_early_keeps_what_was_read() -> None:
    conversation = Conversation(scripted_engine())
    events = conversation.say("hello")
    text = "".join(next(events).text for _ in range(3))
    events.close()  # type: ignore[attr-defined]
    assert conversation.messages[-1] == {"role": "assistant", "content": text}


def test_full_context_says_both_numbers_and_loses_nothing() -> None:
    conversation = Conversation(scripted_engine(lambda _: "x" * 30, n_ctx=120))
    say(conversation, "hello")
    before = conversation.messages
    with pytest.raises(
        ContextError,
        match=r"is full.* 145 tokens.* 120; /clear.*--ctx.*/set overflow drop",
    ):
        say(conversation, "y" * 100)
    assert conversation.messages == before
    command(conversation, "/clear")
    assert say(conversation, "hello") == "x" * 30


def test_answer_cut_by_the_context_is_announced() -> None:
    conversation = Conversation(scripted_engine(lambda _: "x" * 300, n_ctx=100))
    say(conversation, "hello")
    (notice,) = conversation.notices()
    assert "100 tokens" in notice
    assert "/clear" in notice
    assert "--ctx" in notice


def test_system_prompt_notice_is_given_once() -> None:
    drops = (
        "{% for m in messages if m['role'] != 'system' %}"
        "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
        "{{ '<|im_start|>assistant\n' }}"
    )
    conversation = Conversation(
        scripted_engine(vocabulary=FakeVocabulary(chat_template=drops)), system="the user"
    )
    say(conversation, "hello")
    assert len(conversation.notices()) == 1
    say(conversation, "hello")
    assert conversation.notices() == []


# -- commands


def test_help_lists_every_command() -> None:
    conversation = Conversation(scripted_engine())
    text = command(conversation, "/help")
    for name in ("/help", "/clear", "/set", "/stats", "/exit"):
        assert name in text
        assert name in Commands(conversation).names


def test_clear_forgets_all_but_the_system_prompt() -> None:
    conversation = Conversation(scripted_engine(), system="the user")
    say(conversation, "hello")
    command(conversation, "/clear")
    assert conversation.messages == [{"role": "system", "content": "the user"}]


def test_set_changes_and_shows() -> None:
    conversation = Conversation(scripted_engine())
    command(conversation, "/set temp 0.7")
    command(conversation, "/set min-p 0.1")
    command(conversation, "/set seed 5")
    command(conversation, "/set max-tokens 3")
    command(conversation, '/set stop "the end" END')
    assert conversation.settings == Settings(0.7, 0.1, 5, 3, ("the end", "END"))
    shown = command(conversation, "/set")
    assert "0.7" in shown
    assert "'the end' END" in shown
    command(conversation, "/set max-tokens none")
    command(conversation, "/set seed -1")
    command(conversation, "/set stop none")
    assert conversation.settings == Settings(0.7, 0.1, None, None, ())
    assert "off" in command(conversation, "/set spec off")


@pytest.mark.parametrize(
    "line",
    [
        "/nonsense",
        "/set",
        "/set temp",
        "/set temp hot",
        "/set temp -1",
        "/set temp 1 2",
        "/set min-p 2",
        "/set max-tokens 0",
        "/set seed x",
        "/set spec maybe",
        "/set colour red",
        '/set stop "open',
    ],
)
def test_bad_commands_are_one_line_and_change_nothing(line: str) -> None:
    conversation = Conversation(scripted_engine())
    before = conversation.settings
    if line == "/set":
        assert "temp" in command(conversation, line)
    else:
        with pytest.raises(UsageError) as caught:
            Commands(conversation).run(line)
        assert "\n" not in str(caught.value)
    assert conversation.settings == before


def test_two_slashes_say_one() -> None:
    assert Commands(Conversation(scripted_engine())).run("//etc/hosts") == "/etc/hosts"
    assert Commands(Conversation(scripted_engine())).run("hello") == "hello"


def test_stats_after_and_before_an_answer() -> None:
    conversation = Conversation(scripted_engine())
    assert "nothing" in command(conversation, "/stats")
    say(conversation, "hello")
    text = command(conversation, "/stats")
    assert "tokens/s" in text
    assert "speculation" in text


# -- the loop at the keyboard


def test_answers_go_to_standard_output_and_the_rest_to_standard_error() -> None:
    code, out, err = chat(Conversation(scripted_engine()), ["hello", "", "  ", "/stats", "again"])
    assert code == 0
    assert out == "You said: hello\nYou said: again\n"
    assert err.count("speculation off") == 2
    assert "prompt tokens" in err


def test_nothing_but_answers_where_nobody_watches() -> None:
    conversation = Conversation(scripted_engine())
    code, out, err = chat(conversation, ["hello", "/help", "/exit", "never"], interactive=False)
    assert (code, out, err) == (0, "You said: hello\n", "")


def test_error_costs_a_turn_at_the_keyboard_and_ends_a_script() -> None:
    lines = ["x" * 200, "hello"]
    code, out, err = chat(Conversation(scripted_engine(n_ctx=100)), lines)
    assert code == 0
    assert out == "You said: hello\n"
    assert "knapspec-edge: error: the message is too long: the prompt has 206" in err
    assert "Traceback" not in err
    with pytest.raises(ContextError):
        chat(Conversation(scripted_engine(n_ctx=100)), lines, interactive=False)


@pytest.mark.parametrize("interactive", [True, False])
def test_interrupt_stops_the_answer_and_the_talk_goes_on(interactive: bool) -> None:
    engine = scripted_engine(lambda q: f"A B C D {q}")
    conversation = Conversation(engine)
    backend = fake_of(engine)
    decodes = 0

    def press(call: str) -> None:
        nonlocal decodes
        decodes += call == "decode"
        if decodes == 4:
            decodes += 1
            raise KeyboardInterrupt

    backend.on_call = press
    code, out, err = chat(conversation, ["hello", "the"], interactive=interactive)
    if interactive:
        assert code == 0
        assert out == "A B \nA B C D the\n"
        assert "stopped" in err
    else:
        assert code == 130
        assert out == "A B \n"
    assert conversation.messages[1]["content"] == "A B "


def test_a_second_press_before_the_first_was_noticed_leaves() -> None:
    engine = scripted_engine(lambda q: f"A B C D {q}")
    conversation = Conversation(engine)
    backend = fake_of(engine)
    backend.interruptible = nullcontext  # type: ignore[attr-defined]  # a first press: Interrupted
    decodes = 0

    def press(call: str) -> None:
        nonlocal decodes
        decodes += call == "decode"
        if decodes == 4:
            raise KeyboardInterrupt

    backend.on_call = press
    assert chat(conversation, ["hello", "the"])[:2] == (130, "A B \n")
    assert conversation.messages[1]["content"] == "A B "


def test_interrupt_at_the_prompt_leaves_with_130() -> None:
    code, out, err = chat(Conversation(scripted_engine()), [KeyboardInterrupt()])
    assert (code, out, err) == (130, "", "")


def test_the_model_cannot_drive_the_terminal() -> None:
    out = FakeTty()
    Terminal(out=out, err=io.StringIO()).text("a\x1b[31mb\rc\td\n")
    assert out.getvalue() == "a[31mbc\td\n"
    plain = io.StringIO()
    Terminal(out=plain, err=io.StringIO()).text("a\x1b[31mb\r")
    assert plain.getvalue() == "a\x1b[31mb\r"


# -- every setting of the sampler


@pytest.mark.parametrize(
    ("line", "changed"),
    [
        ("/set temperature 0.5", {"temperature": 0.5}),
        ("/set top-k 40", {"top_k": 40}),
        ("/set top_k 40", {"top_k": 40}),
        ("/set top-p 0.9", {"top_p": 0.9}),
        ("/set typical 0.9", {"typical_p": 0.9}),
        ("/set repeat-penalty 1.1", {"repeat_penalty": 1.1}),
        ("/set presence-penalty -0.5", {"presence_penalty": -0.5}),
        ("/set frequency-penalty 0.5", {"frequency_penalty": 0.5}),
        ("/set repeat-last-n -1", {"repeat_last_n": -1}),
        ("/set logit-bias 5+1 7-inf", {"logit_bias": {5: 1.0, 7: -math.inf}}),
        ("/set json-schema json", {"json_schema": "json"}),
        ('/set json-schema {"type": "null"}', {"json_schema": '{"type": "null"}'}),
        ('/set json-schema \'{"type": "null"}\'', {"json_schema": '{"type": "null"}'}),
    ],
)
def test_settings_have_the_names_of_the_command_line(line: str, changed: dict[str, Any]) -> None:
    conversation = Conversation(scripted_engine())
    command(conversation, line)
    assert conversation.settings == Settings(**changed)


def test_a_preset_resets_the_numbers_and_leaves_the_rest() -> None:
    conversation = Conversation(scripted_engine())
    command(conversation, "/set top-k 7")
    command(conversation, "/set seed 5")
    shown = command(conversation, "/set preset paper")
    assert conversation.settings == Settings(preset="paper", seed=5)
    assert "0.7 before the filters" in shown
    assert "50" in shown
    command(conversation, "/set top-p off")
    assert conversation.settings.sampling().top_p == 1.0
    assert "top-p" not in command(conversation, "/set")


def test_only_what_is_on_is_shown() -> None:
    conversation = Conversation(scripted_engine())
    names = [line.split()[0] for line in command(conversation, "/set").splitlines()]
    assert names == [
        "preset",
        "temp",
        "seed",
        "max-tokens",
        "stop",
        "spec",
        "system",
        "overflow",
        "context",
    ]
    shown = command(conversation, "/set repeat-penalty 1.3")
    assert "repeat-penalty  1.3" in shown
    assert "repeat-last-n   64" in shown


def test_a_form_is_set_replaced_and_taken_away(tmp_path: Path) -> None:
    file = tmp_path / "a b.gbnf"
    file.write_text('root ::= "yes" | "no"\n', encoding="utf-8")
    conversation = Conversation(scripted_engine(lambda _: "nothing"))
    shown = command(conversation, f"/set grammar '{file}'")
    assert "grammar" in shown
    assert say(conversation, "hello") == "no"
    command(conversation, '/set json-schema {"type": "null"}')
    assert conversation.settings.grammar is None
    assert say(conversation, "hello") == "null"
    assert "form" in command(conversation, "/stats")
    command(conversation, "/set json-schema off")
    assert say(conversation, "hello") == "nothing"


@pytest.mark.parametrize(
    "line",
    [
        "/set top-k -1", "/set top-k 1.5", "/set top-p 1.1", "/set top-p nan", "/set typical 2",
        "/set repeat-penalty 0", "/set repeat-last-n -2", "/set presence-penalty inf",
        "/set logit-bias x", "/set logit-bias 99999+1", "/set preset hot", "/set preset a b",
        "/set grammar missing.gbnf", "/set json-schema {", "/set json-schema missing.json",
        '/set json-schema {"type": "thing"}',
    ],
)  # fmt: skip
def test_bad_sampling_settings_are_one_line_and_change_nothing(line: str) -> None:
    conversation = Conversation(scripted_engine())
    before = conversation.settings
    with pytest.raises(UsageError) as caught:
        Commands(conversation).run(line)
    assert "\n" not in str(caught.value)
    assert conversation.settings == before


def test_a_grammar_that_cannot_be_read_is_refused_when_it_is_set(tmp_path: Path) -> None:
    file = tmp_path / "bad.gbnf"
    file.write_text("root ::= missing", encoding="utf-8")
    conversation = Conversation(scripted_engine())
    with pytest.raises(UsageError, match="the grammar cannot be read"):
        command(conversation, f"/set grammar {file}")
    assert conversation.settings.grammar is None


def test_what_has_no_effect_is_said_once() -> None:
    conversation = Conversation(scripted_engine())
    assert "top-k changes nothing at temperature 0" in command(conversation, "/set top-k 5")
    assert "nothing at temp" not in command(conversation, "/set seed 3")
    say(conversation, "hello")
    assert conversation.notices() == []


def test_help_names_every_setting() -> None:
    text = command(Conversation(scripted_engine()), "/help")
    for name in SETTING_NAMES:
        assert name in text
    assert all(len(line) <= 80 for line in text.splitlines())
