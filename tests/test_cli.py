"""The command line: exit codes, and what goes to which stream (cases 1, 10, 15, 20, 40, 60-62)."""

from __future__ import annotations

import errno
import io
import json
import math
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from fake_vocabulary import FakeVocabulary
from fakes import interrupted
from scripted import fake_of, scripted_engine

import knapspec_edge.engine
from knapspec_edge import models
from knapspec_edge.cli import cli
from knapspec_edge.engine import Engine, Settings
from knapspec_edge.errors import ModelError, UsageError
from knapspec_edge.records import GREEDY, Draft, Plan
from knapspec_edge.repl import _plain_lines
from knapspec_edge.search import plan_file

HERE = Path(__file__).parent


class Opened:
    """Stands in for Engine.open: records what was asked for, hands out scripted engines."""

    def __init__(self) -> None:
        self.calls: list[tuple[Path, dict[str, Any]]] = []
        self.make = scripted_engine

    def __call__(self, path: Path, **options: Any) -> Engine:
        self.calls.append((path, options))
        engine = self.make()
        engine.set_speculation(options["spec"])
        return engine

    @property
    def options(self) -> dict[str, Any]:
        return self.calls[-1][1]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Opened:
    fake = Opened()
    monkeypatch.setattr(knapspec_edge.engine.Engine, "open", fake)
    monkeypatch.setattr(models, "obtain", lambda name, **_: Path(f"obtained-{name}"))
    monkeypatch.setenv("KNAPSPEC_EDGE_SPEC", "off")
    return fake


def invoke(*arguments: str, pipe: str | bytes | None = None) -> Result:
    return CliRunner().invoke(cli, list(arguments), input=pipe)


def one_line(result: Result) -> str:
    """The single error line; nothing else was written."""
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("knapspec-edge: error: ")
    return result.stderr


# -- run: what is the model, what is the prompt


DEMO = models.default_model().name


@pytest.mark.parametrize(
    ("arguments", "pipe", "model", "prompt"),
    [
        (["hello"], None, DEMO, "hello"),
        (["why is x.gguf large?"], None, DEMO, "why is x.gguf large?"),
        (["m.gguf", "hello"], None, "m.gguf", "hello"),
        (["m.gguf"], "hello\n", "m.gguf", "hello"),
        (["M.GGUF"], "hello", "M.GGUF", "hello"),
        (["demo"], "hello", "demo", "hello"),
        ([DEMO], "hello\r\n", DEMO, "hello"),
        ([], "hello\n", DEMO, "hello"),
        (["Translate:"], "hello\n\nthe\n", DEMO, "Translate:\n\nhello\n\nthe"),
        (["m.gguf", "Translate:"], "hello\n", "m.gguf", "Translate:\n\nhello"),
        (["m.gguf", "hello"], "", "m.gguf", "hello"),
        (["README.md"], None, DEMO, "README.md"),
        ([], "\ufeffhello", DEMO, "hello"),
    ],
)
def test_model_and_prompt(
    opened: Opened, arguments: list[str], pipe: str | None, model: str, prompt: str
) -> None:
    result = invoke("run", *arguments, pipe=pipe)
    assert result.exit_code == 0, result.stderr
    assert result.stdout == f"You said: {prompt}\n"
    assert opened.calls[-1][0] == Path(f"obtained-{model}")


def test_existing_file_with_spaces_in_its_name_is_the_model(opened: Opened, tmp_path: Path) -> None:
    file = tmp_path / "my model.gguf"
    file.touch()
    assert invoke("run", str(file), pipe="hello").exit_code == 0
    assert opened.calls[-1][0] == Path(f"obtained-{file}")


def test_model_from_the_environment(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KNAPSPEC_EDGE_MODEL", "mine.gguf")
    assert invoke("run", "hello").stdout == "You said: hello\n"
    assert opened.calls[-1][0] == Path("obtained-mine.gguf")
    invoke("chat", pipe="hello\n")
    assert opened.calls[-1][0] == Path("obtained-mine.gguf")


def test_content_from_a_file(opened: Opened, tmp_path: Path) -> None:
    file = tmp_path / "letter.txt"
    file.write_text("hello\nthe\n", encoding="utf-8")
    result = invoke("run", "Read:", "-f", str(file), pipe="ignored")
    assert result.stdout == "You said: Read:\n\nhello\nthe\n"
    assert invoke("run", "Read:", "-f", "-", pipe="piped").stdout == "You said: Read:\n\npiped\n"


def test_no_prompt_at_all_is_a_usage_error(opened: Opened) -> None:
    for arguments in (["run"], ["run", "demo"], ["run", " "]):
        result = invoke(*arguments, pipe="")
        assert result.exit_code == 2
        assert "there is no prompt" in one_line(result)
    assert opened.calls == []


def test_unreadable_content_is_one_line(opened: Opened, tmp_path: Path) -> None:
    missing = invoke("run", "-f", str(tmp_path / "none.txt"))
    assert missing.exit_code == 2
    assert "none.txt" in one_line(missing)
    folder = invoke("run", "-f", str(tmp_path))
    assert folder.exit_code == 2
    one_line(folder)
    binary = invoke("run", pipe=b"\xff\xfe")
    assert binary.exit_code == 2
    assert "not UTF-8" in one_line(binary)
    assert opened.calls == []


# -- run: streams and results


def test_only_the_text_goes_to_standard_output(opened: Opened) -> None:
    result = invoke("run", "hello 👋")
    assert result.stdout == "You said: hello 👋\n"
    assert result.stderr == ""
    watched = invoke("run", "hello", "--verbose")
    assert watched.stdout == "You said: hello\n"
    assert "speculation off: --spec off" in watched.stderr
    assert invoke("run", "hello", "--verbose", "--quiet").stderr == ""


def test_json_has_every_field_of_the_contract(opened: Opened) -> None:
    result = invoke("run", "hello", "--json", "--temp", "0.5", "--seed", "7")
    data = json.loads(result.stdout)
    assert result.stdout.count("\n") == 1
    assert data["text"] == "You said: hello"
    assert data["finish_reason"] == "stop"
    assert data["seed"] == 7
    assert data["usage"]["completion_tokens"] == len(data["token_ids"]) > 0
    assert data["usage"]["prompt_tokens"] > 0
    assert {"state", "reason", "policy", "plan"} <= set(data["speculation"])
    assert data["speculation"]["state"] == "off"
    assert {
        "prompt_ms",
        "predicted_ms",
        "predicted_per_second",
        "draft_n",
        "draft_n_accepted",
        "rounds",
        "draft_ms",
        "verify_ms",
        "plan_ms",
    } <= set(data["timings"])
    assert data["timings"]["draft_n"] == 0


def test_json_of_a_speculated_answer_holds_the_plan(opened: Opened, tmp_path: Path) -> None:
    sublayers = scripted_engine().backend.sublayers
    file = tmp_path / "plan.json"
    plan_file.save(file, Draft(Plan.skipping(len(sublayers), [1]), 3, 0.25), sublayers, "")
    data = json.loads(invoke("run", "hello", "--json", "--spec", str(file)).stdout)
    assert data["speculation"]["state"] == "on"
    assert data["speculation"]["plan"] == {
        "reduced": {str(sublayers[1]): "skip"},
        "head_rows": 0,
        "n_sublayers": len(sublayers),
        "draft_max_tokens": 3,
        "draft_min_probability": 0.25,
    }
    assert data["timings"]["draft_n"] > 0
    assert data["text"] == "You said: hello"


def test_random_seed_is_shown_and_reproduces(opened: Opened) -> None:
    hot = ("run", "hello", "--json", "--temp", "9", "--max-tokens", "30")
    first = json.loads(invoke(*hot).stdout)
    second = json.loads(invoke(*hot, "--seed", "-1").stdout)
    again = json.loads(invoke(*hot, "--seed", str(first["seed"])).stdout)
    assert first["seed"] != second["seed"]
    assert first["token_ids"] != second["token_ids"]
    assert first["token_ids"] == again["token_ids"]
    assert (
        f"seed {first['seed']}"
        in invoke(
            "run", "hello", "-v", "--temp", "9", "--max-tokens", "9", "--seed", str(first["seed"])
        ).stderr
    )


def test_limits_and_stop_strings(opened: Opened) -> None:
    limited = json.loads(invoke("run", "hello", "--json", "--max-tokens", "3").stdout)
    assert limited["finish_reason"] == "length"
    assert len(limited["token_ids"]) == 3
    assert invoke("run", "the hello", "--stop", "lo", "--stop", "he").stdout == "You said: t\n"
    assert invoke("run", "a\nb", "--stop", "\\nb").stdout == "You said: a\n"


def test_stop_strings_from_the_environment_may_hold_spaces(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KNAPSPEC_EDGE_STOP", "lo wo\nsai")
    assert invoke("run", "hello world").stdout == "You \n"
    monkeypatch.setenv("KNAPSPEC_EDGE_STOP", "lo wo")
    assert invoke("run", "hello world").stdout == "You said: hel\n"


def test_system_prompt_is_sent(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    original = Engine.chat
    monkeypatch.setattr(
        Engine,
        "chat",
        lambda self, messages, *a, **k: (
            (seen.append(messages), 0)[1] or original(self, messages, *a, **k)
        ),
    )
    assert invoke("run", "hello", "--system", "be brief").exit_code == 0
    assert seen == [
        [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    ]


def test_base_model_completes_in_run_and_is_refused_in_chat(opened: Opened) -> None:
    opened.make = lambda: scripted_engine(vocabulary=FakeVocabulary())
    assert invoke("run", "once").stdout == " there was a hare. The end.\n"
    refused = invoke("chat", pipe="hello\n")
    assert refused.exit_code == 1
    assert "--template" in one_line(refused)
    system = invoke("run", "once", "--system", "x")
    assert system.exit_code == 2
    assert "chat template" in one_line(system)


def test_raw_leaves_the_template_away(opened: Opened) -> None:
    assert invoke("run", "--raw", "once").stdout == " there was a hare. The end.\n"


def test_broken_template_is_one_line(opened: Opened) -> None:
    opened.make = lambda: scripted_engine(vocabulary=FakeVocabulary(chat_template="{% x %}"))
    result = invoke("run", "hello")
    assert result.exit_code == 1
    assert "--template" in one_line(result)
    assert invoke("run", "--raw", "once").exit_code == 0


def test_prompt_that_does_not_fit(opened: Opened) -> None:
    opened.make = lambda: scripted_engine(n_ctx=32)
    result = invoke("run", "x" * 100)
    assert result.exit_code == 1
    assert "32" in one_line(result)
    assert "--ctx" in result.stderr


@pytest.mark.parametrize("as_json", [False, True])
def test_interrupted_answer_keeps_its_text(opened: Opened, as_json: bool) -> None:
    def make() -> Engine:
        engine = scripted_engine()
        fake = fake_of(engine)
        calls = 0

        def press(call: str) -> None:
            nonlocal calls
            calls += call == "decode"
            if calls == 4:
                raise interrupted()

        fake.on_call = press
        return engine

    opened.make = make
    result = invoke("run", "hello", *(["--json"] if as_json else []))
    assert result.exit_code == 130
    if as_json:
        data = json.loads(result.stdout)
        assert data["finish_reason"] == "interrupted"
        assert data["text"] == "You "
    else:
        assert result.stdout == "You \n"
    assert "Traceback" not in result.stderr


# -- options


def test_options_reach_the_engine_and_so_does_the_environment(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    invoke(
        "run", "hello", "--ctx", "99", "--threads", "3", "--gpu-layers", "7",
        "--kv-type", "q8_0", "--flash-attn", "on", "--template", "chatml",
        "--policy", "draft-model", "--draft-model", "small.gguf", "--no-lookup",
    )  # fmt: skip
    expected = {
        "ctx": 99,
        "threads": 3,
        "gpu_layers": 7,
        "kv_type": "q8_0",
        "flash_attn": "on",
        "spec": "off",
        "policy": "draft-model",
        "draft_model": "small.gguf",
        "exact": "default",
        "lookup": False,
        "template": "chatml",
        "needs_template": False,
        "expected_tokens": 1 + 256,  # of the prompt, and of an answer that nobody limits
    }
    assert {k: v for k, v in opened.options.items() if k != "progress"} == expected
    del expected["needs_template"], expected["expected_tokens"]
    for name, value in expected.items():
        monkeypatch.setenv(f"KNAPSPEC_EDGE_{name.upper()}", str(value))
    invoke("run", "hello")
    assert opened.options.items() >= expected.items()
    invoke("run", "hello", "--gpu-layers", "auto")
    assert opened.options["gpu_layers"] is None
    monkeypatch.setenv("KNAPSPEC_EDGE_MAX_TOKENS", "3")
    assert len(json.loads(invoke("run", "hello", "--json").stdout)["token_ids"]) == 3


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "--nonsense"],
        ["run", "a", "b", "c"],
        ["run", "x", "--ctx", "0"],
        ["run", "x", "--ctx", "many"],
        ["run", "x", "--gpu-layers", "-1"],
        ["run", "x", "--kv-type", "q3"],
        ["run", "x", "--temp", "-1"],
        ["run", "x", "--temp", "nan"],
        ["run", "x", "--min-p", "2"],
        ["run", "x", "--seed", "-5"],
        ["run", "x", "--max-tokens", "0"],
        ["run", "x", "--spec", "sometimes"],
        ["chat", "--temp", "nan"],
        ["chat", "a", "b"],
        ["models", "fetch"],
        ["nonsense"],
        ["--nonsense"],
    ],
)
def test_usage_errors_are_one_line_and_exit_2(opened: Opened, arguments: list[str]) -> None:
    result = invoke(*arguments, pipe="")
    assert result.exit_code == 2
    one_line(result)


@pytest.mark.parametrize(
    "command", [[], ["chat"], ["run"], ["bench"], ["profile"], ["doctor"], ["models"]]
)
def test_help_has_examples(command: list[str]) -> None:
    result = invoke(*command, "--help")
    assert result.exit_code == 0
    if command and command != ["models"]:
        assert f"knapspec-edge {command[0]}" in result.stdout


def test_version() -> None:
    result = invoke("--version")
    assert result.exit_code == 0
    assert result.stdout.startswith("knapspec-edge ")


def test_damaged_model_is_one_line(tmp_path: Path) -> None:
    page = tmp_path / "page.gguf"
    page.write_text("<!DOCTYPE html><html>404</html>", encoding="utf-8")
    for command in ("run", "chat"):
        result = invoke(command, str(page), pipe="hello")
        assert result.exit_code == 1
        assert "<!DOCTYPE" in one_line(result)
    result = invoke("run", str(tmp_path / "none.gguf"), "hello")
    assert result.exit_code == 1
    assert "none.gguf" in one_line(result)


def test_debug_shows_the_traceback(
    opened: Opened, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail() -> Engine:
        raise ModelError("broken")

    opened.make = fail
    assert invoke("run", "x").exit_code == 1
    monkeypatch.setenv("KNAPSPEC_EDGE_DEBUG", "1")
    assert isinstance(invoke("run", "x").exception, ModelError)
    monkeypatch.setenv("KNAPSPEC_EDGE_DEBUG", "0")
    assert "broken" in one_line(invoke("run", "x"))


def test_keyboard_interrupt_anywhere_exits_130(opened: Opened) -> None:
    def press() -> Engine:
        raise KeyboardInterrupt

    opened.make = press
    result = invoke("run", "x")
    assert result.exit_code == 130
    assert "Traceback" not in result.stderr


# -- run: sampling and form


def settings_of(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Settings:
    """What the engine is asked for by these options."""
    seen: list[Settings] = []
    original = Engine.chat

    def chat(self: Engine, messages: Any, settings: Settings, **rest: Any) -> Any:
        seen.append(settings)
        return original(self, messages, settings, **rest)

    monkeypatch.setattr(Engine, "chat", chat)
    result = invoke("run", "hello", *arguments)
    assert result.exit_code == 0, result.stderr
    return seen[-1]


def test_sampling_options_reach_the_engine_and_so_does_the_environment(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {
        "preset": "llama.cpp", "temp": 0.5, "top-k": 7, "top-p": 0.9, "min-p": 0.1, "typical": 0.8,
        "repeat-penalty": 1.1, "presence-penalty": 0.2, "frequency-penalty": -0.3,
        "repeat-last-n": -1,
    }  # fmt: skip
    expected = Settings(
        preset="llama.cpp", temperature=0.5, top_k=7, top_p=0.9, min_p=0.1, typical_p=0.8,
        repeat_penalty=1.1, presence_penalty=0.2, frequency_penalty=-0.3, repeat_last_n=-1,
    )  # fmt: skip
    options = [word for name, value in values.items() for word in (f"--{name}", str(value))]
    assert settings_of(monkeypatch, *options) == expected
    for name, value in values.items():
        monkeypatch.setenv(f"KNAPSPEC_EDGE_{name.replace('-', '_').upper()}", str(value))
    assert settings_of(monkeypatch) == expected
    biased = settings_of(monkeypatch, "--logit-bias", "5+1.5", "--logit-bias", "7-inf")
    assert biased.logit_bias == {5: 1.5, 7: -math.inf}
    assert settings_of(monkeypatch, "--preset", "paper").preset == "paper"


def test_nothing_asked_for_is_greedy(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    assert settings_of(monkeypatch).sampling() == GREEDY


@pytest.mark.parametrize("spec", ["off", "plan"])
def test_an_answer_keeps_to_a_schema(opened: Opened, tmp_path: Path, spec: str) -> None:
    opened.make = lambda: scripted_engine(lambda _: '{"b": 1, "a": 2}', harm=0.3)
    file = tmp_path / "schema.json"
    file.write_text('{"properties": {"b": {"type": "integer"}}, "required": ["b"]}')
    if spec == "plan":
        sublayers = scripted_engine().backend.sublayers
        spec = str(tmp_path / "plan.json")
        plan_file.save(Path(spec), Draft(Plan.skipping(len(sublayers), [1]), 3, 0.0), sublayers, "")
    result = invoke("run", "hello", "--json", "--json-schema", str(file), "--spec", spec)
    data = json.loads(result.stdout)
    assert json.loads(data["text"]) == {"b": 1}
    assert data["sampling"]["form"] == "json_schema"
    assert (data["timings"]["draft_n"] > 0) == (spec != "off")
    inline = invoke("run", "hello", "--json-schema", '{"const": 7}', "--spec", spec)
    assert inline.stdout == "7\n"


def test_an_answer_keeps_to_a_grammar(opened: Opened, tmp_path: Path) -> None:
    file = tmp_path / "g.gbnf"
    file.write_text('root ::= "You" | "I"\n')
    assert invoke("run", "hello", "--grammar", str(file)).stdout == "You\n"
    file.write_text("root ::= nothing\n")
    result = invoke("run", "hello", "--grammar", str(file))
    assert result.exit_code == 2
    assert "the grammar cannot be read" in one_line(result)


def test_log_probabilities_in_json(opened: Opened) -> None:
    data = json.loads(invoke("run", "hello", "--json", "--logprobs", "2", "--stop", "hello").stdout)
    content = data["logprobs"]["content"]
    assert [entry["id"] for entry in content] == data["token_ids"]
    assert "".join(entry["token"] for entry in content) == data["text"] == "You said: "
    assert all(len(entry["top_logprobs"]) == 2 for entry in content)
    assert set(content[0]) == {"id", "token", "bytes", "logprob", "top_logprobs"}
    assert "logprobs" not in json.loads(invoke("run", "hello", "--json").stdout)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 64])
def test_exactly_so_many_tokens_are_drafted_or_not(opened: Opened, tmp_path: Path, n: int) -> None:
    opened.make = lambda: scripted_engine(lambda _: "x" * 100, harm=0.2)
    sublayers = scripted_engine().backend.sublayers
    file = tmp_path / "plan.json"
    plan_file.save(file, Draft(Plan.skipping(len(sublayers), [1]), 3, 0.0), sublayers, "")
    for spec in ("off", str(file)):
        result = invoke("run", "hello", "--json", "--max-tokens", str(n), "--spec", spec)
        data = json.loads(result.stdout)
        assert len(data["token_ids"]) == data["usage"]["completion_tokens"] == n
        assert data["finish_reason"] == "length"
        assert data["text"] == "x" * n


def test_the_seed_that_is_shown_repeats_a_preset(opened: Opened) -> None:
    hot = ("run", "hello", "--json", "--preset", "llama.cpp", "--temp", "50", "--min-p", "0")
    hot += ("--top-p", "1", "--top-k", "0", "--max-tokens", "30")
    first = json.loads(invoke(*hot).stdout)
    assert first["sampling"]["preset"] == "llama.cpp"
    again = json.loads(invoke(*hot, "--seed", str(first["seed"])).stdout)
    other = json.loads(invoke(*hot, "--seed", "-1").stdout)
    assert again["token_ids"] == first["token_ids"] != other["token_ids"]
    assert other["seed"] != first["seed"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--logprobs", "3"], "add --json"),
        (["--logprobs", "101", "--json"], "--logprobs"),
        (["--preset", "hot"], "--preset"),
        (["--top-k", "-1"], "--top-k"),
        (["--top-k", "1.5"], "--top-k"),
        (["--top-k", "2147483648"], "top-k is 2147483648"),
        (["--top-p", "nan"], "--top-p"),
        (["--typical", "1.5"], "--typical"),
        (["--repeat-penalty", "0"], "--repeat-penalty"),
        (["--presence-penalty", "inf"], "--presence-penalty"),
        (["--repeat-last-n", "-2"], "--repeat-last-n"),
        (["--temp", "inf"], "--temp"),
        (["--logit-bias", "x"], "logit-bias: 'x' is not TOKEN"),
        (["--logit-bias", "3+nan"], "logit-bias of token 3 is nan"),
        (["--grammar", "missing.gbnf"], "cannot read the grammar missing.gbnf: No such file"),
        (["--grammar", "."], "cannot read the grammar .:"),
        (["--json-schema", "missing.json"], "cannot read the JSON schema missing.json"),
        (["--json-schema", "{"], "the JSON schema is no JSON"),
        (["--json-schema", "[1]"], "has to be an object"),
        (["--json-schema", '{"$ref": "https://example.org/x"}'], "only references within it"),
        (["--grammar", "tests/none", "--json-schema", "json"], "cannot read the grammar"),
    ],
)
def test_bad_sampling_options_are_one_line_before_anything_is_loaded(
    opened: Opened, arguments: list[str], message: str
) -> None:
    result = invoke("run", "hello", *arguments)
    assert result.exit_code == 2
    assert message in one_line(result)
    assert opened.calls == []


def test_a_grammar_and_a_schema_are_too_much(opened: Opened, tmp_path: Path) -> None:
    file = tmp_path / "g.gbnf"
    file.write_text('root ::= "a"')
    result = invoke("run", "hello", "--grammar", str(file), "--json-schema", "json")
    assert result.exit_code == 2
    assert "not both" in one_line(result)


def test_filters_without_effect_and_keywords_without_are_said(opened: Opened) -> None:
    schema = '{"type": "array", "uniqueItems": true}'
    result = invoke("run", "hello", "-v", "--top-k", "3", "--json-schema", schema)
    assert "top-k changes nothing at temperature 0" in result.stderr
    assert "of the JSON schema, uniqueItems is not enforced" in result.stderr
    assert result.exit_code == 0


def test_an_answer_cut_before_its_form_was_complete_is_said(opened: Opened) -> None:
    opened.make = lambda: scripted_engine(lambda _: f'"{"x" * 50}"')
    form = ("run", "hello", "-v", "--json-schema", '{"type": "string"}')
    cut = "cut before it was all that the JSON schema asks for"
    assert cut in invoke(*form, "--max-tokens", "9").stderr
    assert cut not in invoke(*form).stderr
    assert cut not in invoke("run", "hello", "-v", "--max-tokens", "3").stderr
    talk = ("chat", "-v", "--json-schema", '{"type": "string"}', "--max-tokens", "9")
    assert cut in invoke(*talk, pipe="a").stderr


def test_chat_takes_the_same_options(opened: Opened) -> None:
    result = invoke("chat", "--json-schema", '{"enum": ["x", "y"]}', "--preset", "paper", pipe="a")
    assert result.exit_code == 0
    assert result.stdout in ('"x"\n', '"y"\n')
    assert invoke("chat", "--logprobs", "1", pipe="a").exit_code == 2


# -- chat from a pipe


def test_chat_reads_lines_from_a_pipe(opened: Opened) -> None:
    result = invoke("chat", pipe="hello\nagain\n/exit\nnever\n")
    assert result.exit_code == 0
    assert result.stdout == "You said: hello\nYou said: again\n"
    assert result.stderr == ""
    last = invoke("chat", pipe="no newline at the end")
    assert last.stdout == "You said: no newline at the end\n"
    assert invoke("chat", pipe=b"hello\n\xff\n").exit_code == 2
    assert invoke("chat", pipe="/nonsense\n").exit_code == 2


def test_chat_goes_on_from_a_file_and_keeps_it(opened: Opened, tmp_path: Path) -> None:
    file = str(tmp_path / "talk.json")
    assert invoke("chat", "--save", file, "--system", "the", pipe="hello\n").exit_code == 0
    again = invoke("chat", "--save", file, pipe="in\n")
    assert again.exit_code == 2
    assert "--load" in one_line(again)
    went_on = invoke("chat", "--load", file, "--save", file, "-v", pipe="in\n/regen\n/edit user\n")
    assert went_on.exit_code == 0
    assert went_on.stdout == "You said: in\n" * 2 + "You said: user\n"
    assert "loaded 1 turn" in went_on.stderr
    saved = json.loads(Path(file).read_text(encoding="utf-8"))
    assert [m["content"] for m in saved["messages"]] == [
        "hello", "You said: hello", "user", "You said: user",
    ]  # fmt: skip
    assert saved["system"] == "the"


@pytest.mark.parametrize("option", ["--load", "--save"])
def test_what_is_wrong_with_a_file_is_said_before_the_model_is_opened(
    opened: Opened, tmp_path: Path, option: str
) -> None:
    file = tmp_path / "letter.txt"
    file.write_text("mine", encoding="utf-8")
    result = invoke("chat", option, str(file), pipe="hello\n")
    assert result.exit_code == 2
    assert "is no saved conversation" in one_line(result)
    assert file.read_text(encoding="utf-8") == "mine"
    assert opened.calls == []


def test_chat_says_no_to_what_its_template_cannot(opened: Opened) -> None:
    for command in (["chat"], ["run", "hello"]):
        result = invoke(*command, "--no-think", pipe="")
        assert result.exit_code == 2
        assert "no switch for thinking" in one_line(result)
    raw = invoke("run", "--raw", "hello", "--think")
    assert raw.exit_code == 2


def test_overflow_and_history_come_from_the_environment(
    opened: Opened, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KNAPSPEC_EDGE_OVERFLOW", "drop")
    assert "overflow    drop" in invoke("chat", "-v", pipe="/set\n").stderr
    assert invoke("chat", "--overflow", "maybe", pipe="").exit_code == 2


def test_edit_in_a_pipe_takes_its_text_along(opened: Opened) -> None:
    result = invoke("chat", pipe="hello\n/edit\n")
    assert result.exit_code == 2
    assert (
        result.stderr
        == "knapspec-edge: error: /edit: give the text of the question, as in /edit Why?\n"
    )


# -- doctor


def test_doctor_reports_a_missing_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code = "from knapspec_edge.cli import main; main()"
    empty = {"KNAPSPEC_EDGE_LIBRARY": str(tmp_path), "KNAPSPEC_EDGE_CACHE": str(tmp_path)}
    result = subprocess.run(
        [sys.executable, "-c", code, "doctor", "--json"],
        env={**_environment(), **empty},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1
    report = json.loads(result.stdout)
    assert report["library"]["loaded"] is False
    assert len(report["problems"]) == 1
    assert "correct KNAPSPEC_EDGE_LIBRARY" in report["problems"][0]
    assert report["folders"]["cache"] == {
        "path": str(tmp_path),
        "writable": True,
        "free_bytes": report["folders"]["cache"]["free_bytes"],
    }
    assert report["packages"]["numpy"]


def test_doctor_says_what_the_search_runs_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KNAPSPEC_EDGE_NUMBA", "0")
    report = json.loads(invoke("doctor", "--json").stdout)
    assert report["search"] == {"kernels": "numpy", "reason": "KNAPSPEC_EDGE_NUMBA=0"}
    assert (
        "searching for plans is slower without numba: KNAPSPEC_EDGE_NUMBA=0" in (report["remarks"])
    )
    monkeypatch.delenv("KNAPSPEC_EDGE_NUMBA")
    report = json.loads(invoke("doctor", "--json").stdout)
    works = report["search"]["kernels"] == "numba"
    assert works == (not report["search"]["reason"])
    assert works == (not any("without numba" in line for line in report["remarks"]))


def test_doctor_on_a_bad_model_says_why(tmp_path: Path) -> None:
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"GGUF")
    result = invoke("doctor", str(bad))
    assert result.exit_code == 1
    assert "problem: " in result.stdout
    assert "bad.gguf" in result.stdout


# -- models


def test_models_list_and_path() -> None:
    listed = invoke("models", "list")
    assert listed.exit_code == 0
    assert DEMO in listed.stdout
    rows = json.loads(invoke("models", "list", "--json").stdout)
    assert {row["name"] for row in rows} == {m.name for m in models.catalogue()}
    missing = invoke("models", "path", DEMO)
    assert missing.exit_code == 1
    assert "models get" in one_line(missing)
    unknown = invoke("models", "get", "nonsense")
    assert unknown.exit_code == 1
    assert DEMO in one_line(unknown)
    assert invoke("models", "rm", DEMO).exit_code == 1


def test_licence_needs_a_flag_where_nobody_can_be_asked() -> None:
    gated = next(m for m in models.catalogue() if m.licence.confirm)
    result = invoke("models", "get", gated.name)
    assert result.exit_code == 1
    assert "--accept-licence" in one_line(result)


# -- as a process


def _environment() -> dict[str, str]:
    root = str(HERE.parent)
    path = os.pathsep.join(filter(None, (root, str(HERE), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, "PYTHONUTF8": "1"}


def test_start_up_imports_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from knapspec_edge.cli import cli\n"
        "try: cli.main(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'numpy', 'numba', 'llama_cpp', 'rich', 'prompt_toolkit', 'gguf', 'jinja2'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], env=_environment(), capture_output=True, text=True, check=True
    )
    assert result.stderr.strip() == "[]"


def test_output_that_nobody_reads_ends_quietly() -> None:
    reader = subprocess.Popen(
        [sys.executable, str(HERE / "scripted_cli.py"), "run", "a\n" * 40, "--max-tokens", "70"],
        env=_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
    )
    assert reader.stdout is not None
    assert reader.stderr is not None
    assert reader.stdout.readline() == b"You said: a\n"
    reader.stdout.close()
    errors = reader.stderr.read()
    reader.stderr.close()
    assert reader.wait() in (0, 1)
    assert errors == b""


def test_redirected_output_holds_the_text_only(tmp_path: Path) -> None:
    file = tmp_path / "out.txt"
    with file.open("wb") as out:
        result = subprocess.run(
            [sys.executable, str(HERE / "scripted_cli.py"), "run"],
            env=_environment(),
            input="hello 👋\n".encode(),
            stdout=out,
            stderr=subprocess.PIPE,
            check=False,
        )
    assert result.returncode == 0
    assert result.stderr == b""
    assert file.read_bytes() == "You said: hello 👋\n".encode()


# -- streams that cannot be used, text that is none, sizes out of range


def _in_shell(command: str, *, stdin: bytes | None = None) -> subprocess.CompletedProcess[bytes]:
    """Run a shell line; $CLI is the command line with the scripted model."""
    environment = _environment()
    environment["CLI"] = (
        f"{shlex.quote(sys.executable)} {shlex.quote(str(HERE / 'scripted_cli.py'))}"
    )
    environment["KNAPSPEC_EDGE_SPEC"] = "off"
    return subprocess.run(
        ["sh", "-c", f'eval "set -- $CLI"; {command}'],
        env=environment,
        input=stdin,
        capture_output=True,
        check=False,
    )


full_disk = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
posix = pytest.mark.skipif(os.name != "posix", reason="needs a POSIX shell")


@full_disk
@pytest.mark.parametrize(
    "command", ["run hello", "run hello --json", "chat m.gguf", "models list", "doctor", "--help"]
)
def test_output_on_a_full_disk_is_one_line_and_a_failure(command: str) -> None:
    result = _in_shell(f'"$@" {command} >/dev/full', stdin=b"hello\n")
    assert result.returncode == 1
    assert result.stderr == b"knapspec-edge: error: cannot write: No space left on device\n"


@posix
@pytest.mark.parametrize("command", ["run hello", "run hello --json", "models list"])
def test_closed_output_is_one_line_and_a_failure(command: str) -> None:
    result = _in_shell(f'"$@" {command} >&-', stdin=b"")
    assert result.returncode == 1
    assert result.stderr.count(b"\n") == 1
    assert b"standard output is closed" in result.stderr


@full_disk
@pytest.mark.parametrize("where", ["2>/dev/full", "2>&-"])
def test_notices_that_cannot_be_written_cost_no_answer(where: str) -> None:
    result = _in_shell(f'"$@" run hello --verbose {where}', stdin=b"")
    assert (result.returncode, result.stdout) == (0, b"You said: hello\n")
    result = _in_shell(f'"$@" run a b c {where}', stdin=b"")
    assert (result.returncode, result.stdout) == (2, b"")


@posix
def test_chat_without_input_ends() -> None:
    result = _in_shell('"$@" chat m.gguf <&-')
    assert (result.returncode, result.stdout, result.stderr) == (0, b"", b"")


def test_chat_says_when_its_input_breaks_off(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(io.RawIOBase):
        def readable(self) -> bool:
            return True

        def readinto(self, buffer: object) -> int:
            raise OSError(errno.EIO, "Input/output error")

    stream = io.TextIOWrapper(io.BufferedReader(Broken()))
    with pytest.raises(UsageError, match="cannot read standard input: Input/output error"):
        _plain_lines(stream)()


@posix
def test_files_opened_later_do_not_take_the_place_of_closed_streams() -> None:
    code = (
        "import os, sys\n"
        "from knapspec_edge.cli import _occupy_standard_streams\n"
        "_occupy_standard_streams()\n"
        "sys.exit(0 if os.open(os.devnull, os.O_RDONLY) > 2 else 1)"
    )
    result = _in_shell(f"{shlex.quote(sys.executable)} -c {shlex.quote(code)} <&- 2>&-")
    assert result.returncode == 0


@posix
@pytest.mark.parametrize(
    ("option", "name"),
    [("--system=\udcff", "--system"), ("--stop=\udcff", "--stop"), ("a\udcff", "the prompt")],
)
def test_arguments_that_are_no_text_are_refused(opened: Opened, option: str, name: str) -> None:
    result = invoke("run", "m.gguf", "x", option) if "=" in option else invoke("run", option)
    assert result.exit_code == 2
    assert one_line(result) == f"knapspec-edge: error: {name} is not UTF-8 text\n"
    assert not opened.calls


@pytest.mark.parametrize(
    "option", ["--ctx=2147483648", "--ctx=4294967360", "--threads=513", "--threads=4294967297"]
)
def test_sizes_that_would_wrap_around_or_crash_are_refused(opened: Opened, option: str) -> None:
    result = invoke("run", "m.gguf", "hello", option)
    assert result.exit_code == 2
    assert "is not in the range" in one_line(result)
    assert not opened.calls


def test_rpc_servers_are_known_when_the_model_is_opened(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KNAPSPEC_EDGE_RPC_SERVERS", "")  # put back afterwards
    assert invoke("run", "m.gguf", "hi").exit_code == 0
    assert os.environ["KNAPSPEC_EDGE_RPC_SERVERS"] == ""
    assert invoke("run", "m.gguf", "hi", "--rpc", "a:1,b:2").exit_code == 0
    assert os.environ["KNAPSPEC_EDGE_RPC_SERVERS"] == "a:1,b:2"
    result = invoke("run", "m.gguf", "hi", "--rpc", "a:1,b")
    assert result.exit_code == 1
    assert "--rpc (KNAPSPEC_EDGE_RPC_SERVERS): 'b' is not host:port" in result.stderr
    assert len(opened.calls) == 2


def test_any_number_of_gpu_layers_above_those_there_are_means_all(opened: Opened) -> None:
    assert invoke("run", "m.gguf", "hello", "--gpu-layers", "9" * 20).exit_code == 0
    assert opened.options["gpu_layers"] == 2**31 - 1


@pytest.mark.parametrize("name", ["a" * 5000, "", "/dev/null", "a\0b"])
def test_a_plan_file_that_cannot_be_one_is_a_usage_error(name: str) -> None:
    with pytest.raises(UsageError, match="give auto, on, lookup, off, or the path of a plan file"):
        scripted_engine().set_speculation(name)


@pytest.mark.parametrize("arguments", [[], ["models"]])
def test_a_group_without_command_shows_its_commands(arguments: list[str]) -> None:
    result = invoke(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "error" not in result.stderr
    assert "\nCommands:\n" in result.stderr


def test_measuring_is_announced_before_anything_slow() -> None:
    stages: list[tuple[str, float | None]] = []
    scripted_engine().set_speculation("auto", progress=lambda *step: stages.append(step))
    assert stages[0] == ("measure", 0.0)


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "hello", "--temp", "nan"],
        ["run", "hello", "--min-p", "nan"],
        ["bench", "--cooldown", "nan"],
        ["bench", "--cooldown", "inf"],
        ["bench", "--cooldown", "1e300"],
    ],
)
def test_numbers_that_are_none_are_usage_errors(opened: Opened, arguments: list[str]) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert f"Invalid value for '{arguments[-2]}'" in one_line(result)
    assert not opened.calls
