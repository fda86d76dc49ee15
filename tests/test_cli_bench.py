"""bench on the command line: what it prints, what it refuses, what it keeps."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
from scripted import scripted_engine
from test_bench import ENVIRONMENT
from test_cli import Opened, invoke, one_line, opened

from knapspec_edge import policies
from knapspec_edge.apps.bench import runner

__all__ = ["opened"]


@pytest.fixture
def prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opened: Opened) -> Path:
    monkeypatch.setattr(runner, "environment", lambda _: ENVIRONMENT)
    opened.make = lambda: scripted_engine(lambda _: "The hare ran on and on and on.")
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "One?"}\n{"prompt": "Two?", "task": "mine", "name": "second"}\n')
    return file


def bench(prompts: Path, *arguments: str, code: int = 0) -> str:
    result = invoke("bench", "m.gguf", "--policies", "plain", "--prompts", str(prompts), *arguments)
    assert result.exit_code == code, result.stderr
    return result.stdout


def test_the_four_forms(prompts: Path, opened: Opened) -> None:
    table = bench(prompts)
    assert "| own | plain | no |" in table
    assert "2 prompts" in table
    data = json.loads(bench(prompts, "--format", "json"))
    assert data["complete"] is True
    assert [run["prompt"] for run in data["runs"]] == ["prompt-1", "second"]
    lines = bench(prompts, "--format", "jsonl").splitlines()
    records = [json.loads(line) for line in lines]
    assert [(r["side"], r["task"]) for r in records] == [("plain", "prompts"), ("plain", "mine")]
    assert all(r["library_digest"] == "library one" for r in records)
    found = list(csv.DictReader(io.StringIO(bench(prompts, "--format", "csv"))))
    assert [row["policy"] for row in found] == ["plain"] * 3
    assert opened.options["spec"] == "off"


def test_rows_are_kept_and_used_again(prompts: Path, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    bench(prompts, "--resume", str(file))
    before = file.read_text()
    assert len(before.splitlines()) == 2
    assert "2 of 2 rows were in" in bench(prompts, "--resume", str(file))
    assert file.read_text() == before
    assert "rows that do not count here: 2 of another --max-tokens" in bench(
        prompts, "--resume", str(file), "--max-tokens", "9"
    )


def test_the_context_is_as_large_as_is_needed(prompts: Path, opened: Opened) -> None:
    invoke("bench", "m.gguf", "--policies", "plain", "--contexts", "1K", "--max-tokens", "200")
    assert opened.options["ctx"] == 1280
    invoke("bench", "m.gguf", "--policies", "plain", "--contexts", "1K", "--ctx", "2000")
    assert opened.options["ctx"] == 2000


def test_sampled_comparisons(prompts: Path) -> None:
    text = bench(prompts, "--preset", "paper", "--seed", "3")
    assert "temperature 0.7" in text
    data = json.loads(bench(prompts, "--temp", "1.5", "--format", "json"))
    assert data["options"]["sampling"]["temperature"] == 1.5


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--policies", "fast"], "--policies 'fast': 'fast' is none of plain, auto, "),
        (["--policies", ""], "--policies ''"),
        (
            ["--tasks", "sing"],
            "--tasks 'sing': 'sing' is none of summarize, code, qa, chat",
        ),
        (["--contexts", "2G"], "--contexts '2G': give lengths in tokens"),
        (["--contexts", "8"], "--contexts 8: a length of at least 32 tokens"),
        (["--prompts", "missing.jsonl"], "--prompts missing.jsonl: No such file"),
        (["--peer", "missing"], "--peer missing: there is no such file or folder"),
        (["--unpatched", "missing"], "--unpatched missing: there is no libllama in this folder"),
        (["--plan", "missing.json"], "--plan missing.json: there is no such file"),
        (["--plan", "."], "--plan .: there is no such file"),
        (["--policies", "draft-model"], "--policies draft-model needs --draft-model MODEL"),
        (["--draft-model", "s.gguf"], "--draft-model is for the policy draft-model: add that"),
        (
            ["--policies", "lookup", "--draft-model", "s.gguf"],
            "--draft-model is for the policy draft-model: add that",
        ),
        (["--repeats", "0"], "Invalid value for '--repeats'"),
        (["--format", "xml"], "Invalid value for '--format'"),
        (["--temp", "nan"], "Invalid value for '--temp'"),
    ],
)
def test_what_is_wrong_is_said_before_a_model_is_opened(
    opened: Opened, arguments: list[str], said: str
) -> None:
    result = invoke("bench", "m.gguf", *arguments)
    assert result.exit_code == 2
    assert said in one_line(result)
    assert not opened.calls


def test_a_folder_for_plots_is_made_first(prompts: Path, tmp_path: Path, opened: Opened) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "file").write_text("")
    result = invoke("bench", "m.gguf", "--plot", str(tmp_path / "file"))
    assert result.exit_code == 2
    assert "cannot write plots into" in one_line(result)
    assert not opened.calls
    bench(prompts, "--plot", str(tmp_path / "plots"))
    names = {path.name for path in (tmp_path / "plots").iterdir()}
    assert names == {"speed-up.png", "acceptance.png", "rounds.png", "predicted.png"}


def test_the_help_names_all_policies() -> None:
    # lines are broken at hyphens as well
    text = "".join(invoke("bench", "--help").stdout.split())
    for name in policies.NAMES:
        assert name in text
