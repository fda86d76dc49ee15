"""Settings of an answer: presets, ranges, and what becomes of them in the engine (cases 32, 33, 34,
40, 43, 56)."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest
from fake_vocabulary import FakeVocabulary
from scripted import CHATML, fake_of, scripted_engine

from knapspec_edge.apps.summary import answer_json, logprobs_json, statistics_table
from knapspec_edge.decode.policy import FixedPolicy
from knapspec_edge.engine import Answer, Engine, Settings, Speculation
from knapspec_edge.errors import UsageError
from knapspec_edge.records import Draft, Plan, Sampling
from knapspec_edge.sampling import OFF, PRESETS, VALUES, differences, parse_bias

ASK = [{"role": "user", "content": "hello"}]
PERSON = {
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "maximum": 120}},
    "required": ["name", "age"],
}
YES_OR_NO = 'root ::= "yes" | "no"'


def force(engine: Engine, draft_tokens: int) -> Engine:
    """Draft under a plan that skips one sublayer; 0: not at all."""
    if draft_tokens:
        draft = Draft(Plan.skipping(len(engine.backend.sublayers), [1]), draft_tokens, 0.0)
        engine.speculation = Speculation("on", "forced by the test", "file", draft)
        engine._policy = FixedPolicy(draft)
    return engine


def text_of(answer: Answer) -> str:
    return "".join(event.text for event in answer)


# -- the record


def test_presets() -> None:
    assert Settings().sampling() == Sampling()
    llama = Settings(preset="llama.cpp", seed=1).sampling()
    assert llama == Sampling(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05, seed=1)
    paper = Settings(preset="paper", seed=1).sampling()
    assert paper == Sampling(temperature=0.7, temperature_first=True, top_k=50, top_p=0.95, seed=1)


def test_what_is_given_overrides_the_preset() -> None:
    settings = Settings(preset="llama.cpp", temperature=0.0, top_k=0, repeat_last_n=-1, min_p=0.0)
    expected = dataclasses.replace(
        PRESETS["llama.cpp"], temperature=0.0, top_k=0, penalty_last_n=-1, min_p=0.0
    )
    assert settings.sampling() == expected
    assert Settings(preset="paper", temperature_first=False, seed=1).sampling() == (
        dataclasses.replace(PRESETS["paper"], temperature_first=False, seed=1)
    )


def test_everything_reaches_the_record() -> None:
    settings = Settings(
        temperature=0.5, min_p=0.1, seed=3, top_k=4, top_p=0.5, typical_p=0.6,
        temperature_first=True, repeat_penalty=1.1, presence_penalty=0.2, frequency_penalty=0.3,
        repeat_last_n=7, logit_bias={9: 1.5, 2: -math.inf}, grammar=YES_OR_NO, logprobs=5,
    )  # fmt: skip
    made = settings.sampling()
    assert made.grammar is not None
    assert made.grammar.text == YES_OR_NO
    assert dataclasses.replace(made, grammar=None) == Sampling(
        temperature=0.5, min_p=0.1, seed=3, top_k=4, top_p=0.5, typical_p=0.6,
        temperature_first=True, repeat_penalty=1.1, presence_penalty=0.2, frequency_penalty=0.3,
        penalty_last_n=7, logit_bias=((2, -math.inf), (9, 1.5)), n_probs=5,
    )  # fmt: skip
    assert hash(made) == hash(settings.sampling())


@pytest.mark.parametrize("name", VALUES)
def test_ranges_and_their_ends(name: str) -> None:
    value = VALUES[name]
    kind = int if value.whole else float
    for allowed in (value.low, value.high, OFF[name]):
        Settings(**{name: kind(allowed)}, seed=1).sampling()
    refused: list[Any] = [value.low - 1, value.high + 1, math.nan, math.inf, -math.inf, "1"]
    for wrong in refused:
        with pytest.raises(UsageError, match=f"^{value.name} is ") as caught:
            Settings(**{name: wrong}).sampling()
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (Settings(preset="hot"), "no preset 'hot'; choose one of greedy, llama.cpp, paper"),
        (Settings(top_k=1.5), "top-k is 1.5; it has to be a whole number between 0 and 2147483647"),  # type: ignore[arg-type]
        (Settings(top_k=2**31), "top-k is 2147483648; it has to be a whole number between 0 and 2"),
        (Settings(temperature=101.0), "temp is 101.0; it has to be a number between 0 and 100"),
        (Settings(logprobs=101), "logprobs is 101"),
        (Settings(logprobs=-1), "logprobs is -1"),
        (Settings(logit_bias={-1: 1.0}), "-1 is no token id"),
        (Settings(logit_bias={3: math.nan}), "logit-bias of token 3 is nan"),
        (Settings(logit_bias={3: math.inf}), "logit-bias of token 3 is inf"),
        (Settings(logit_bias={3: 1e39}), "or -inf, which forbids"),
        (Settings(grammar=YES_OR_NO, json_schema={}), "not both"),
        (Settings(grammar=" "), "the grammar is empty"),
        (Settings(json_schema="{"), "is no JSON"),
    ],
)
def test_what_is_out_of_range_is_one_line(settings: Settings, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        settings.sampling()
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("15043+1", (15043, 1.0)),
        ("15043-1.5", (15043, -1.5)),
        ("3-inf", (3, -math.inf)),
        (" 3 = false ", (3, -math.inf)),
        ("3False", (3, -math.inf)),
        ("7+1e-3", (7, 0.001)),
    ],
)
def test_biases_as_they_are_written(text: str, expected: tuple[int, float]) -> None:
    assert parse_bias(text) == expected


@pytest.mark.parametrize("text", ["", "x+1", "3", "3+", "3+x", "+1", "-3+1", "3*2", "٣+1"])
def test_biases_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match="is not TOKEN"):
        parse_bias(text)


def test_only_what_is_on_is_shown_in_order_of_application() -> None:
    assert differences(Sampling()) == [("temp", "0")]
    assert [name for name, _ in differences(PRESETS["llama.cpp"])] == [
        "top-k", "top-p", "min-p", "temp",
    ]  # fmt: skip
    assert differences(PRESETS["paper"])[0] == ("temp", "0.7 before the filters")
    everything = differences(
        Sampling(presence_penalty=0.5, logit_bias=((3, -math.inf),), temperature_first=True)
    )
    assert everything == [
        ("logit-bias", "3-inf"),
        ("presence-penalty", "0.5"),
        ("repeat-last-n", "64"),
        ("temp", "0 before the filters"),
    ]


def test_filters_that_do_nothing_are_said() -> None:
    assert Settings(preset="llama.cpp").notices() == ()
    assert Settings(preset="llama.cpp", temperature=0.0).notices() == ()  # nobody asked for them
    assert Settings(top_k=40, temperature=0.5).notices() == ()
    (notice,) = Settings(top_k=40, top_p=0.5, min_p=0.0).notices()
    assert notice.startswith("top-k and top-p change nothing at temperature 0")
    (notice,) = scripted_engine().chat(ASK, Settings(min_p=0.1)).notices
    assert notice.startswith("min-p changes nothing")
    (notice,) = Settings(json_schema={"type": "array", "uniqueItems": True}).notices()
    assert notice == "of the JSON schema, uniqueItems is not enforced"


# -- forms


@pytest.mark.parametrize("draft_tokens", [0, 1, 3, 8])
@pytest.mark.parametrize("temperature", [0.0, 6.0])
def test_a_schema_holds_whatever_is_drafted(draft_tokens: int, temperature: float) -> None:
    settings = Settings(json_schema=PERSON, temperature=temperature, seed=5, max_tokens=200)
    reply = '{"name": "Bob the user", "age": 300, "more": [1]} and so on'
    plain = scripted_engine(lambda _: reply).chat(ASK, settings)
    expected = text_of(plain)
    engine = force(scripted_engine(lambda _: reply, harm=0.4), draft_tokens)
    answer = engine.chat(ASK, settings)
    assert text_of(answer) == expected
    assert answer.token_ids == plain.token_ids
    if answer.finish_reason == "stop":
        found = json.loads(expected)
        assert isinstance(found["name"], str)
        assert found["age"] <= 120
        assert engine.vocabulary.is_end(answer.token_ids[-1])
    if not temperature:
        assert expected == '{"name": "Bob the user", "age": 30 }'
    if draft_tokens:
        assert answer.stats.draft_n > 0
    fake_of(engine).check_ledger()


def test_a_grammar_ends_where_the_template_ends_an_answer() -> None:
    # of the end tokens, the vocabulary knows "</s>" alone
    vocabulary = FakeVocabulary(chat_template=CHATML, ends=("</s>",))
    engine = scripted_engine(lambda _: "no", vocabulary=vocabulary, template="chatml")
    answer = engine.chat(ASK, Settings(grammar=YES_OR_NO))
    assert text_of(answer) == "no"
    assert answer.sampling.grammar is not None
    assert answer.sampling.grammar.ends == {vocabulary.special["<|im_end|>"],
                                            vocabulary.special["<|im_start|>"]}  # fmt: skip
    assert answer.token_ids[-1] == vocabulary.special["<|im_end|>"]


def test_a_form_holds_for_raw_completion_too() -> None:
    answer = scripted_engine().generate("once", Settings(grammar='root ::= " there" [^.]+ "!"'))
    assert text_of(answer).startswith(" there was a hare")
    assert "." not in answer.text


def test_the_text_is_the_one_that_the_grammar_saw() -> None:
    spm = FakeVocabulary(chat_template=CHATML, spm=True)
    answer = scripted_engine(lambda _: "hello", vocabulary=spm).chat(
        ASK, Settings(grammar='root ::= " hello"')
    )
    assert text_of(answer) == " hello"
    assert text_of(scripted_engine(lambda _: "hello", vocabulary=spm).chat(ASK)) == "hello"


def test_an_end_of_turn_within_json_is_text() -> None:
    vocabulary = FakeVocabulary(controls=("<s>", "</s>"))
    reply = '{"name": "<end_of_turn>", "age": 3}'

    def ask(settings: Settings) -> str:
        engine = scripted_engine(
            vocabulary=vocabulary, template="gemma", continuation=reply + "<end_of_turn>"
        )
        return text_of(engine.chat(ASK, settings))

    assert ask(Settings(json_schema=PERSON)) == reply
    assert ask(Settings()) == '{"name": "'
    # a stop string of one's own ends JSON as it ends everything
    assert ask(Settings(json_schema=PERSON, stop=('", ',))) == '{"name": "<end_of_turn>'


def test_a_grammar_that_cannot_be_read_is_one_line_and_costs_no_turn() -> None:
    engine = scripted_engine()
    with pytest.raises(UsageError, match="the grammar cannot be read"):
        engine.chat(ASK, Settings(grammar="root ::= missing"))
    with pytest.raises(UsageError, match="bias on token 99999"):
        engine.chat(ASK, Settings(logit_bias={99999: 1.0}))
    assert text_of(engine.chat(ASK)) == "You said: hello"


# -- penalties and bias


def test_a_forbidden_token_never_comes() -> None:
    engine = scripted_engine(lambda _: "x" * 8)
    (x,) = engine.vocabulary.tokenize("x", parse_special=False)
    answer = force(engine, 3).chat(ASK, Settings(logit_bias={x: -math.inf}, max_tokens=12))
    text_of(answer)
    assert x not in answer.token_ids
    assert "x" * 8 in text_of(scripted_engine(lambda _: "x" * 8).chat(ASK))


@pytest.mark.parametrize("draft_tokens", [1, 4])
def test_penalties_hold_whatever_is_drafted(draft_tokens: int) -> None:
    settings = Settings(frequency_penalty=4.0, repeat_last_n=-1, max_tokens=40)
    plain = scripted_engine(lambda _: "x" * 30).chat(ASK, settings)
    expected = text_of(plain)
    assert expected.count("x") < 10
    engine = force(scripted_engine(lambda _: "x" * 30, harm=0.2), draft_tokens)
    answer = engine.chat(ASK, settings)
    assert text_of(answer) == expected
    assert answer.stats.draft_n > 0


# -- log-probabilities


ALPHABET = "A B C D E F G H I J K L M N O P Q R S T"


@pytest.mark.parametrize("draft_tokens", [0, 1, 3, 8])
def test_log_probabilities_are_cut_with_the_tokens(draft_tokens: int) -> None:
    engine = force(scripted_engine(lambda _: ALPHABET, harm=0.2), draft_tokens)
    answer = engine.chat(ASK, Settings(stop=("O P Q",), logprobs=2))
    assert text_of(answer) == "A B C D E F G H I J K L M N "
    content = logprobs_json(answer, engine.vocabulary)["content"]
    assert [entry["id"] for entry in content] == answer.token_ids
    assert len(content) == answer.stats.completion_tokens
    assert b"".join(bytes(entry["bytes"]) for entry in content).decode() == answer.text
    for entry, event in zip(content, answer.tokens, strict=True):
        assert entry["logprob"] == event.logprob
        assert -1.0 < entry["logprob"] < 0.0
        top = entry["top_logprobs"]
        assert len(top) == 2
        assert top[0]["logprob"] >= top[1]["logprob"]
        assert top[0]["id"] == entry["id"]  # greedy


def test_log_probabilities_of_an_end_and_of_half_characters() -> None:
    engine = scripted_engine(lambda _: "🎉")
    answer = engine.chat(ASK, Settings(logprobs=0))
    assert text_of(answer) == "🎉"
    content = logprobs_json(answer, engine.vocabulary)["content"]
    assert bytes(b for entry in content[:-1] for b in entry["bytes"]).decode() == "🎉"
    assert content[-1]["token"] == "<|im_end|>"
    assert all(entry["top_logprobs"] == [] for entry in content)
    json.dumps(content, allow_nan=False)


def test_impossible_tokens_have_a_number_in_json_too() -> None:
    answer = scripted_engine(lambda _: "a").chat(ASK, Settings(logprobs=1))
    text_of(answer)
    answer.tokens[0] = dataclasses.replace(answer.tokens[0], logprob=-math.inf)
    (first, *_) = logprobs_json(answer, scripted_engine().vocabulary)["content"]
    assert first["logprob"] == -9999.0


def test_without_asking_there_are_none() -> None:
    engine = scripted_engine()
    answer = engine.chat(ASK)
    events = list(answer)
    assert all(e.token is None or (e.token.logprob is None and e.token.top == ()) for e in events)


# -- ends and limits, with everything on


@pytest.mark.parametrize("draft_tokens", [0, 1, 4])
@pytest.mark.parametrize("limit", [1, 2, 4, 5, 64])
def test_exactly_so_many_tokens(draft_tokens: int, limit: int) -> None:
    engine = force(scripted_engine(lambda _: "x" * 200, harm=0.3), draft_tokens)
    answer = engine.chat(ASK, Settings(max_tokens=limit, logprobs=0, preset="llama.cpp", seed=1))
    text_of(answer)
    assert len(answer.tokens) == answer.stats.completion_tokens == limit
    assert answer.finish_reason == "length"


@pytest.mark.parametrize("draft_tokens", [0, 1, 4, 8])
def test_an_end_within_a_block_wins_over_the_limit(draft_tokens: int) -> None:
    reply = "x" * 9
    n = len(reply) + 1  # and the end token
    engine = force(scripted_engine(lambda _: reply, harm=0.0), draft_tokens)
    answer = engine.chat(ASK, Settings(max_tokens=n))
    assert text_of(answer) == reply
    assert answer.finish_reason == "stop"
    assert len(answer.token_ids) == answer.stats.completion_tokens == n
    assert engine.session.ids[answer.stats.prompt_tokens :] == tuple(answer.token_ids[:-1])


# -- what is reported


def test_what_was_used_is_reported() -> None:
    settings = Settings(preset="llama.cpp", top_k=7, logit_bias={3: -math.inf, 4: 1.0},
                        json_schema={})  # fmt: skip
    engine = force(scripted_engine(lambda _: "[1, 2]"), 3)
    answer = engine.chat(ASK, settings)
    text_of(answer)
    data = answer_json(answer, engine.backend.sublayers)
    assert data["sampling"] == {
        "preset": "llama.cpp", "temperature": 0.8, "top_k": 7, "top_p": 0.95, "min_p": 0.05,
        "typical_p": 1.0, "temperature_first": False, "repeat_penalty": 1.0,
        "presence_penalty": 0.0, "frequency_penalty": 0.0, "repeat_last_n": 64,
        "logit_bias": {"3": False, "4": 1.0}, "form": "json_schema",
    }  # fmt: skip
    assert data["timings"]["acceptance_by_place"]
    json.dumps(data, allow_nan=False)
    table = dict(statistics_table(answer))
    assert table["preset"] == "llama.cpp"
    assert table["top-k"] == "7"
    assert table["form"] == "JSON schema"
    assert table["seed"] == str(answer.sampling.seed) == str(data["seed"])
    assert table["accepted by place"]


def test_a_run_without_speculation_reports_no_drafts() -> None:
    engine = scripted_engine()
    answer = engine.chat(ASK, Settings(max_tokens=1))
    text_of(answer)
    data = answer_json(answer, engine.backend.sublayers)
    assert data["timings"]["draft_n"] == 0
    assert data["timings"]["acceptance_by_place"] == []
    assert data["sampling"]["form"] is None
    assert "accepted by place" not in dict(statistics_table(answer))
