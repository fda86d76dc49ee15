"""`knapspec-edge plan`: what it asks for, what goes where, and how it ends."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from sample_plan import plan_report, sample_outlook

from knapspec_edge import models
from knapspec_edge.apps import plan, plots
from knapspec_edge.apps.plan import Options, PlanReport, context_size
from knapspec_edge.cli import cli
from knapspec_edge.config import Config
from knapspec_edge.errors import Interrupted, PlanError, UsageError
from knapspec_edge.search import plan_file, planner
from knapspec_edge.terminal import Terminal


class Planned:
    """Stands in for apps.plan.run."""

    def __init__(self) -> None:
        self.calls: list[tuple[Path, Options]] = []
        self.report: PlanReport = plan_report()
        self.failure: BaseException | None = None

    def __call__(
        self,
        path: Path,
        options: Options,
        progress: Callable[[str, float | None], None],
        *,
        warn: Callable[[str], None],
    ) -> PlanReport:
        self.calls.append((path, options))
        for warning in self.report.warnings:
            warn(warning)
        progress("load", None)
        progress("measure", 0.5)
        if self.failure is not None:
            raise self.failure
        return self.report


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> Planned:
    fake = Planned()
    monkeypatch.setattr(plan, "run", fake)
    monkeypatch.setattr(models, "obtain", lambda name, **_: Path(f"obtained-{name}"))
    return fake


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["plan", *arguments])


def one_line(result: Result) -> str:
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("knapspec-edge: error: ")
    return result.stderr


def test_the_report_goes_to_standard_output_and_nothing_else(planned: Planned) -> None:
    result = invoke("m.gguf")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.startswith("The plan at 512 tokens of context\nmodel ")
    assert "\nattention  █·······\nMLP        █······█\n" in result.stdout
    assert "\x1b" not in result.stdout
    assert not any(line.endswith(" ") for line in result.stdout.split("\n"))
    assert planned.calls == [(Path("obtained-m.gguf"), Options())]


def test_without_a_model_it_is_the_demo(planned: Planned) -> None:
    assert invoke().exit_code == 0
    assert planned.calls[0][0] == Path(f"obtained-{models.default_model().name}")


def test_options_reach_the_planner(planned: Planned) -> None:
    arguments = (
        "m.gguf --at 3000 --ctx 8192 --budget 12.5 --threads 3 --gpu-layers 7 --kv-type q8_0 "
        "--flash-attn on --template chatml --policy knapspec --certify --no-windows"
    )
    assert invoke(*arguments.split()).exit_code == 0
    assert planned.calls[-1][1] == Options(
        3000, 8192, 12.5, 3, 7, "q8_0", "on", "chatml", "knapspec", True, False
    )


def test_options_from_the_environment(planned: Planned, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"MODEL": "mine.gguf", "AT": "700", "THREADS": "2", "CTX": "900"}.items():
        monkeypatch.setenv(f"KNAPSPEC_EDGE_{name}", value)
    assert invoke().exit_code == 0
    assert planned.calls == [(Path("obtained-mine.gguf"), Options(700, 900, threads=2))]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--at", "0"],
        ["--at", "1"],
        ["--at", "-5"],
        ["--at", "many"],
        ["--at", "2147483648"],
        ["--budget", "0"],
        ["--policy", "magic"],
        ["--kv-type", "f8"],
    ],
)
def test_values_out_of_range_are_usage_errors(planned: Planned, arguments: list[str]) -> None:
    result = invoke("m.gguf", *arguments)
    assert result.exit_code == 2
    assert arguments[0] in one_line(result)
    assert not planned.calls


def test_json_is_one_object(planned: Planned) -> None:
    result = invoke("m.gguf", "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.count("\n") == 1
    data = json.loads(result.stdout)
    assert data["context_tokens"] == 512
    assert data["state"] == "on"
    assert len(data["curve"]) > 20


def test_warnings_go_to_standard_error_unless_quiet(planned: Planned) -> None:
    planned.report = plan_report(warnings=("beyond what it was trained for",))
    result = invoke("m.gguf", "--json")
    assert result.stderr == "knapspec-edge: warning: beyond what it was trained for\n"
    assert json.loads(result.stdout)["warnings"] == ["beyond what it was trained for"]
    assert invoke("m.gguf", "--quiet").stderr == ""


@pytest.mark.parametrize("failure", [Interrupted("interrupted"), KeyboardInterrupt()])
def test_interrupted_while_measuring(planned: Planned, failure: BaseException) -> None:
    planned.failure = failure
    result = invoke("m.gguf", "--json")
    assert (result.exit_code, result.stdout, result.stderr.strip()) == (130, "", "")


def test_a_model_that_is_not_recognised_is_one_line(planned: Planned) -> None:
    planned.failure = PlanError("x cannot be planned for: its layers are recurrent")
    result = invoke("m.gguf")
    assert result.exit_code == 1
    assert one_line(result).endswith("x cannot be planned for: its layers are recurrent\n")


def test_a_busy_machine_is_one_line_after_what_it_measured(
    planned: Planned, tmp_path: Path
) -> None:
    reason = "the machine was too busy to measure (a step took 5.0 to 19.0 ms)"
    outlook = sample_outlook(disturbed=True, state="off", reason=f"off: {reason}", why=reason)
    planned.report = plan_report(outlook)
    path = tmp_path / "plan.json"
    result = invoke("m.gguf", "--json", "--save", str(path))
    assert result.exit_code == 1
    assert json.loads(result.stdout)["disturbed"] is True
    assert result.stderr == f"knapspec-edge: error: {reason}\n"
    assert not path.exists(), "a plan that rests on noise"


def test_what_could_not_be_certified_is_one_line_after_the_plan(planned: Planned) -> None:
    planned.report = plan_report(
        uncertified="no certificate for this model: something lies between"
    )
    result = invoke("m.gguf", "--certify")
    assert result.exit_code == 1
    assert "Judged plans" in result.stdout
    assert "cosine" not in result.stdout
    assert result.stderr == (
        "knapspec-edge: error: no certificate for this model: something lies between\n"
    )


# -- files


def test_a_saved_plan_is_the_one_that_was_shown(planned: Planned, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    result = invoke("m.gguf", "--save", str(path), "--verbose")
    assert result.exit_code == 0
    assert f"--spec {path}" in result.stderr
    outlook = planned.report.outlook
    loaded = plan_file.load(path, outlook.sublayers, planned.report.fingerprint, "llama")
    assert loaded == outlook.draft


def test_a_plan_is_saved_also_where_plain_decoding_won(planned: Planned, tmp_path: Path) -> None:
    planned.report = plan_report(sample_outlook(pays=False))
    path = tmp_path / "plan.json"
    assert invoke("m.gguf", "--save", str(path)).exit_code == 0
    assert path.exists()


def test_no_draft_no_file(planned: Planned, tmp_path: Path) -> None:
    reason = "no sublayer can be left out"
    planned.report = plan_report(
        sample_outlook(draft=None, judged=(), state="off", reason=f"off: {reason}", why=reason)
    )
    result = invoke("m.gguf", "--save", str(tmp_path / "plan.json"))
    assert result.exit_code == 1
    assert result.stderr == (f"knapspec-edge: error: there is no plan to save: {reason}\n")
    assert "What sublayers cost" in result.stdout
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", ["none/plan.json", ".", "x" * 300])
def test_what_cannot_be_saved_is_said_before_measuring(
    planned: Planned, tmp_path: Path, name: str
) -> None:
    result = invoke("m.gguf", "--save", str(tmp_path / name))
    assert result.exit_code == 2
    assert "cannot write the plan" in one_line(result)
    assert not planned.calls


def test_a_plot_is_written_besides_the_report(planned: Planned, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="plots are an extra")
    path = tmp_path / "plan.svg"
    result = invoke("m.gguf", "--plot", str(path), "--verbose")
    assert result.exit_code == 0, result.stderr
    assert "Judged plans" in result.stdout
    assert f"drawn into {path}" in result.stderr
    assert b"<svg" in path.read_bytes()


@pytest.mark.parametrize("name", ["plot.pdf", "none/plot.png", "plot"])
def test_what_cannot_be_drawn_is_said_before_measuring(
    planned: Planned, tmp_path: Path, name: str
) -> None:
    if name.endswith(".png"):
        pytest.importorskip("matplotlib", reason="plots are an extra")
    result = invoke("m.gguf", "--plot", str(tmp_path / name))
    assert result.exit_code == 2
    assert "plot" in one_line(result)
    assert not planned.calls


def test_without_matplotlib_nothing_is_measured(
    planned: Planned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = invoke("m.gguf", "--plot", str(tmp_path / "plot.png"))
    assert result.exit_code == 2
    assert "pip install 'knapspec-edge[plot]'" in one_line(result)
    assert not planned.calls


def test_a_full_disk_loses_the_plot_but_not_the_report(
    planned: Planned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib", reason="plots are an extra")

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(plots.os, "fsync", full)
    result = invoke("m.gguf", "--plot", str(tmp_path / "plot.png"))
    assert result.exit_code == 1
    assert "Judged plans" in result.stdout
    assert "No space left on device" in result.stderr
    assert os.listdir(tmp_path) == []


# -- the size of the context


def test_the_context_has_room_for_the_text_that_plans_are_judged_on() -> None:
    config = Config()
    window, fresh = config.measure_window_tokens, config.plan_fresh_tokens
    # as usual where that is enough
    assert context_size(1024, None, 8192) == config.ctx_tokens
    assert context_size(6000, None, 8192) == 6000 + window + 2 + fresh
    # as much as the model was trained for where that is all there is
    assert context_size(8192 - window - 2, None, 8192) == 8192
    assert context_size(100, None, None) == config.ctx_tokens
    assert context_size(100, None, 256) == 256
    # what was asked for stays
    assert context_size(1000, 1050, 8192) == 1050
    assert context_size(20_000, 32_768, 8192) == 32_768


@pytest.mark.parametrize(
    ("at", "ctx", "trained", "words"),
    [
        (1024, 1024, 8192, "--at 1024 does not fit: .* takes 1074 tokens, and --ctx is 1024"),
        (9000, 4096, 8192, "--at 9000 does not fit: .* --ctx is 4096"),
        (9000, None, 8192, "this model was trained for 8192; --ctx N goes beyond"),
    ],
)
def test_what_does_not_fit(at: int, ctx: int | None, trained: int, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        context_size(at, ctx, trained)


def test_the_least_room_is_what_the_planner_takes() -> None:
    assert context_size(500, planner.room_tokens(500), 8192) == planner.room_tokens(500)


# -- the terminal


def test_blocks_only_where_the_terminal_has_them() -> None:
    class Tty(io.TextIOWrapper):
        def isatty(self) -> bool:
            return True

    def shows(encoding: str) -> bool:
        out = Tty(io.BytesIO(), encoding=encoding)
        return Terminal(out=out, err=io.StringIO()).can_show("█·α")

    assert shows("utf-8")
    assert not shows("ascii")
    assert not shows("latin-1")
    assert Terminal(out=io.StringIO(), err=io.StringIO()).can_show("█·α")


def test_an_ascii_terminal_gets_ascii(planned: Planned, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Terminal, "can_show", lambda self, characters: False)
    result = invoke("m.gguf")
    assert result.exit_code == 0
    assert result.stdout.isascii()
    assert "\nattention  #.......\n" in result.stdout


def test_help_has_examples() -> None:
    result = CliRunner().invoke(cli, ["plan", "--help"])
    assert result.exit_code == 0
    assert "knapspec-edge plan model.gguf --at 4096" in result.stdout
    for option in ("--at N", "--save FILE", "--plot FILE", "--json", "--policy"):
        assert option in result.stdout
