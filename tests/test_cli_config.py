"""Where the values of options come from, and what is said about wrong ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from knapspec_edge import models
from knapspec_edge.cli import cli
from knapspec_edge.engine import Engine
from knapspec_edge.errors import ModelError

Seen = dict[str, Any]


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "config.toml"
    monkeypatch.setenv("KNAPSPEC_EDGE_CONFIG", str(path))
    path.write_text("")
    return path


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """What a command opens its model with; then it ends."""
    seen: Seen = {}

    def obtain(name: str, **_: Any) -> Path:
        seen["model"] = name
        return Path(name)

    def open_(path: Path, **options: Any) -> Engine:
        seen.update(options)
        raise ModelError("seen")

    monkeypatch.setattr(models, "obtain", obtain)
    monkeypatch.setattr(Engine, "open", open_)
    return seen


def call(*arguments: str, code: int = 1) -> str:
    result = CliRunner().invoke(cli, list(arguments))
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return result.output


def test_command_line_before_environment_before_file_before_default(
    config: Path, opened: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    call("chat")
    assert opened["threads"] is None
    assert opened["model"] == models.default_model().name
    config.write_text('threads = 3\nmodel = "mine.gguf"\n')
    call("chat")
    assert opened["threads"] == 3
    assert opened["model"] == "mine.gguf"
    call("run", "Hello")
    assert opened["model"] == "mine.gguf"
    monkeypatch.setenv("KNAPSPEC_EDGE_THREADS", "4")
    monkeypatch.setenv("KNAPSPEC_EDGE_MODEL", "other.gguf")
    call("chat")
    assert (opened["threads"], opened["model"]) == (4, "other.gguf")
    call("run", "Hello")
    assert opened["model"] == "other.gguf"
    call("chat", "--threads", "5", "third.gguf")
    assert (opened["threads"], opened["model"]) == (5, "third.gguf")
    # an empty variable is none
    monkeypatch.setenv("KNAPSPEC_EDGE_THREADS", "")
    monkeypatch.setenv("KNAPSPEC_EDGE_MODEL", "")
    call("chat")
    assert (opened["threads"], opened["model"]) == (3, "mine.gguf")


def test_a_table_holds_for_its_command_alone(config: Path, opened: Seen) -> None:
    config.write_text('threads = 3\nkv_type = "q8_0"\n[run]\nthreads = 2\ngpu-layers = 7\n')
    call("chat")
    assert (opened["threads"], opened["kv_type"], opened["gpu_layers"]) == (3, "q8_0", None)
    call("run", "Hello")
    assert (opened["threads"], opened["kv_type"], opened["gpu_layers"]) == (2, "q8_0", 7)


def test_without_a_file_nothing_holds(
    opened: Seen, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "knapspec-edge"
    folder.mkdir()
    (folder / "config.toml").write_text("threads = 9")
    monkeypatch.setattr("platformdirs.user_config_dir", lambda *_, **__: str(folder))
    monkeypatch.delenv("KNAPSPEC_EDGE_CONFIG")
    call("chat")
    assert opened["threads"] == 9
    monkeypatch.setenv("KNAPSPEC_EDGE_CONFIG", "")
    call("chat")
    assert opened["threads"] is None


BROKEN = [
    ("temprature = 1", "line 1: there is no setting temprature; the nearest is temp"),
    ("threads = 2\n[chat]\ncontext = 5", "line 3: there is no setting context in [chat]; the"),
    ("[chta]\nctx = 5", "line 1: there is no setting chta; the nearest is chat"),
    ("chat = 5", "line 1: chat is a command: write [chat] on a line"),
    ('ctx = "big"', "line 1: ctx is 'big'; it has to be a whole number"),
    ("ctx = true", "line 1: ctx is true; it has to be a whole number"),
    ("ctx = 0", "line 1: ctx is 0; 0 is not in the range"),
    ("quiet = 1", "line 1: quiet is 1; it has to be true or false"),
    ("template = 3", "line 1: template is 3; it has to be a text in quotation marks"),
    ('kv-type = "q9"', "line 1: kv-type is 'q9'; 'q9' is not one of"),
    ("temp = [1, 2]", "line 1: temp is [1, 2]; it takes one value"),
    ('stop = ["a", 5]', "line 1: stop is ['a', 5]; it has to be a text"),
    ('logit-bias = ["x"]', "logit-bias: 'x' is not TOKEN+BIAS"),
    ("temp = 1979-05-27", "it has to be a number"),
    ("temp = nan", "nan is not a number"),
    ("threads =", "is not TOML: Invalid value (at end of document)"),
    ("threads = 1\nthreads = 2", "is not TOML: Cannot overwrite a value"),
    ("[models]\nctx = 5", "line 2: there is no setting ctx"),
    ("min_p = 0.1\nmin-p = 0.2", "line 1: min-p is given twice, as min_p and as min-p"),
    ("[chat]\nmin-p = 0.1\nmin_p = 0.2", "line 3: min-p is given twice"),
]


@pytest.mark.parametrize(("text", "said"), BROKEN)
def test_a_fault_in_the_file_is_one_line_that_says_where(
    config: Path, opened: Seen, text: str, said: str
) -> None:
    config.write_text(text)
    output = call("chat", code=2)
    assert output.count("\n") == 1
    assert output.startswith(f"knapspec-edge: error: {config}")
    assert said in output
    assert not opened
    # what helps to find it works, and says it
    assert said in call("config", code=2)
    assert any(said in line for line in json.loads(call("doctor", "--json"))["problems"])
    for arguments in (["--help"], ["chat", "--help"], ["--version"], ["completion", "bash"]):
        assert said not in call(*arguments, code=0)


def test_a_file_that_cannot_be_read(config: Path, opened: Seen) -> None:
    config.write_bytes(b"\xff\xfe\x00")
    assert "is not UTF-8 text" in call("chat", code=2)
    config.unlink()
    assert f"there is no configuration file {config}" in call("chat", code=2)
    config.mkdir()
    assert "cannot read the configuration file" in call("chat", code=2)


def test_a_wrong_value_names_its_place(
    config: Path, opened: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "Invalid value for '--ctx'" in call("chat", "--ctx", "x", code=2)
    monkeypatch.setenv("KNAPSPEC_EDGE_CTX", "x")
    assert "Invalid value for KNAPSPEC_EDGE_CTX: 'x'" in call("chat", code=2)
    monkeypatch.setenv("KNAPSPEC_EDGE_CTX", "")
    # right for one command, and wrong for another
    config.write_text("max-tokens = 1")
    call("chat")
    output = call("bench", code=2)
    assert f"Invalid value for max-tokens in {config}: 1 is not in the range" in output


def test_errors_that_come_later_name_the_place_too(
    config: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    missing = tmp_path / "missing.gguf"
    config.write_text(f"model = '{missing}'\n")
    assert f"not found: {missing} (see model in {config})" in call("chat")
    assert f"not found: {missing} (see model in {config})" in call("run", "Hello")
    monkeypatch.setenv("KNAPSPEC_EDGE_MODEL", str(missing))
    expected = f"not found: {missing} (model comes from KNAPSPEC_EDGE_MODEL)"
    assert expected in call("run", "Hello")
    assert "comes from" not in call("chat", str(tmp_path / "typed.gguf"))
    monkeypatch.setenv("KNAPSPEC_EDGE_GRAMMAR", "no-such.gbnf")
    assert "(grammar comes from KNAPSPEC_EDGE_GRAMMAR)" in call("chat", code=2)
    monkeypatch.setenv("KNAPSPEC_EDGE_GRAMMAR", "")
    monkeypatch.setenv("KNAPSPEC_EDGE_JSON_SCHEMA", "{")
    assert "(json-schema comes from KNAPSPEC_EDGE_JSON_SCHEMA)" in call("chat", code=2)
    monkeypatch.setenv("KNAPSPEC_EDGE_LOGIT_BIAS", "x")
    assert "Invalid value for KNAPSPEC_EDGE_LOGIT_BIAS: " in call("chat", code=2)
    monkeypatch.delenv("KNAPSPEC_EDGE_LOGIT_BIAS")
    monkeypatch.delenv("KNAPSPEC_EDGE_JSON_SCHEMA")
    monkeypatch.delenv("KNAPSPEC_EDGE_MODEL")
    config.write_text("model = '~/no-such-model.gguf'\n")  # shown as the path that it means
    assert f"no-such-model.gguf (see model in {config})" in call("chat")


def test_config_shows_what_holds_and_where_it_comes_from(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KNAPSPEC_EDGE_HISTORY")  # as tests set it
    assert "nothing is set" in call("config", code=0)
    config.write_text('[chat]\nsystem = "Be brief."\n')
    monkeypatch.setenv("KNAPSPEC_EDGE_TEMP", "0.5")
    monkeypatch.setenv("KNAPSPEC_EDGE_TEMPRATURE", "0.5")
    lines = call("config", code=0).splitlines()
    assert lines[0] == f"file: {config}"
    assert any(line.split() == ["system", "Be", "brief.", "the", "file", "chat"] for line in lines)
    assert any("temp" in line and "KNAPSPEC_EDGE_TEMP  " in line for line in lines)
    assert any("nothing reads the variable KNAPSPEC_EDGE_TEMPRATURE" in line for line in lines)
    report = json.loads(call("config", "run", "--json", code=0))
    rows = {row["name"]: row for row in report["settings"]}
    assert rows["temp"]["value"] == "0.5"
    assert rows["temp"]["source"] == "KNAPSPEC_EDGE_TEMP"
    assert rows["threads"]["source"] == "default (KNAPSPEC_EDGE_THREADS sets it)"
    assert "model" in rows
    monkeypatch.setenv("KNAPSPEC_EDGE_TEMP", "hot")
    assert "problem: KNAPSPEC_EDGE_TEMP: 'hot' is not" in call("config", code=2)
    assert "there is no command chatt; the nearest is chat" in call("config", "chatt", code=2)


def test_every_option_has_a_variable_and_a_key() -> None:
    from knapspec_edge import cli_config

    for command in cli_config._commands(cli):
        for key, param in cli_config.keys(command).items():
            assert (cli_config.variable(param) or "").startswith("KNAPSPEC_EDGE_"), (
                command.name,
                key,
            )
