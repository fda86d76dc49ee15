"""`knapspec-edge profile`: what it asks for, what goes where, and how it ends."""

from __future__ import annotations

import io
import json
import os
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result
from rich.text import Text
from sample_report import profile_report

from knapspec_edge import models, terminal
from knapspec_edge.apps import plots, profile
from knapspec_edge.apps.profile import Options, ProfileReport
from knapspec_edge.cli import cli
from knapspec_edge.config import Config
from knapspec_edge.errors import Interrupted, ModelError
from knapspec_edge.latency.store import Store
from knapspec_edge.native import library
from knapspec_edge.terminal import Terminal, remaining_seconds


class Measured:
    """Stands in for apps.profile.run."""

    def __init__(self) -> None:
        self.calls: list[tuple[Path, Options]] = []
        self.report: ProfileReport = profile_report()
        self.failure: BaseException | None = None

    def __call__(
        self,
        path: Path,
        options: Options,
        progress: Callable[[str, float | None], None],
        *,
        warn: Callable[[str], None],
    ) -> ProfileReport:
        self.calls.append((path, options))
        for warning in self.report.warnings:
            warn(warning)
        progress("load", None)
        progress("profile", 0.5)
        progress("fidelity", 0.9)
        if self.failure is not None:
            raise self.failure
        return self.report


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Measured:
    fake = Measured()
    monkeypatch.setattr(profile, "run", fake)
    monkeypatch.setattr(models, "obtain", lambda name, **_: Path(f"obtained-{name}"))
    return fake


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["profile", *arguments])


def one_line(result: Result) -> str:
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("knapspec-edge: error: ")
    return result.stderr


def test_the_table_goes_to_standard_output_and_nothing_else(measured: Measured) -> None:
    result = invoke("m.gguf")
    assert result.exit_code == 0
    assert result.stderr == ""
    assert result.stdout.startswith("What passes cost on this machine\nmodel ")
    assert "\nFlash attention on, f16 keys and values, 4 threads (8 for several" in result.stdout
    assert "\x1b" not in result.stdout
    assert not any(line.endswith(" ") for line in result.stdout.split("\n"))
    assert measured.calls == [(Path("obtained-m.gguf"), Options())]


def test_options_reach_the_measurement(measured: Measured) -> None:
    arguments = (
        "m.gguf --ctx 8192 --budget 12.5 --threads 3 --gpu-layers 7 --kv-type auto --flash-attn on"
    )
    assert invoke(*arguments.split()).exit_code == 0
    assert measured.calls[-1][1] == Options(8192, 12.5, 3, 7, "auto", "on")


def test_options_from_the_environment(measured: Measured, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "MODEL": "mine.gguf",
        "CTX": "512",
        "BUDGET": "5",
        "THREADS": "2",
        "KV_TYPE": "q8_0",
        "FLASH_ATTN": "off",
    }.items():
        monkeypatch.setenv(f"KNAPSPEC_EDGE_{name}", value)
    assert invoke().exit_code == 0
    path, options = measured.calls[-1]
    assert path == Path("obtained-mine.gguf")
    assert options == Options(512, 5.0, 2, None, "q8_0", "off")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--budget", "0"],
        ["--budget", "nan"],
        ["--budget", "inf"],
        ["--ctx", "0"],
        ["--threads", "513"],
        ["--kv-type", "f8"],
        ["--flash-attn", "maybe"],
        ["--gpu-layers", "-1"],
    ],
)
def test_values_out_of_range_are_usage_errors(measured: Measured, arguments: list[str]) -> None:
    result = invoke("m.gguf", *arguments)
    assert result.exit_code == 2
    assert arguments[0] in one_line(result)
    assert not measured.calls


def test_json_is_one_object(measured: Measured) -> None:
    result = invoke("m.gguf", "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.count("\n") == 1
    assert json.loads(result.stdout)["expected_tokens"] == 1024


def test_warnings_go_to_standard_error_unless_quiet(measured: Measured) -> None:
    measured.report = replace(measured.report, warnings=("cannot keep it", "second"))
    result = invoke("m.gguf", "--json")
    assert result.stderr == (
        "knapspec-edge: warning: cannot keep it\nknapspec-edge: warning: second\n"
    )
    assert json.loads(result.stdout)["warnings"] == ["cannot keep it", "second"]
    assert invoke("m.gguf", "--quiet").stderr == ""


def test_an_interrupted_measurement_is_shown_and_ends_with_130(
    measured: Measured, tmp_path: Path
) -> None:
    measured.report = replace(measured.report, interrupted=True)
    result = invoke("m.gguf", "--verbose")
    assert result.exit_code == 130
    assert "(interrupted: from what was measured until then)" in result.stdout
    assert "interrupted" in result.stderr
    result = invoke("m.gguf", "--json")
    assert result.exit_code == 130
    assert json.loads(result.stdout)["interrupted"] is True


def test_a_warning_comes_before_the_minutes_it_is_about(measured: Measured) -> None:
    measured.report = replace(measured.report, warnings=("longer than it was trained for",))
    measured.failure = Interrupted("interrupted")
    result = invoke("m.gguf")
    assert result.exit_code == 130
    assert result.stderr == "knapspec-edge: warning: longer than it was trained for\n"


@pytest.mark.parametrize("failure", [Interrupted("interrupted"), KeyboardInterrupt()])
def test_nothing_measured_nothing_shown(measured: Measured, failure: BaseException) -> None:
    measured.failure = failure
    result = invoke("m.gguf")
    assert (result.exit_code, result.stdout, result.stderr.strip()) == (130, "", "")


def test_a_model_that_cannot_be_profiled_is_one_line(measured: Measured) -> None:
    measured.failure = ModelError("x cannot be profiled: recurrent")
    result = invoke("m.gguf")
    assert result.exit_code == 1
    assert one_line(result) == "knapspec-edge: error: x cannot be profiled: recurrent\n"


# -- plots


def test_a_plot_is_written_besides_the_table(measured: Measured, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="plots are an extra")
    path = tmp_path / "plot.svg"
    result = invoke("m.gguf", "--plot", str(path), "--verbose")
    assert result.exit_code == 0, result.stderr
    assert "A step of one token" in result.stdout
    assert f"drawn into {path}" in result.stderr
    assert b"<svg" in path.read_bytes()


@pytest.mark.parametrize("name", ["plot.pdf", "none/plot.png", "plot"])
def test_what_cannot_be_drawn_is_said_before_measuring(
    measured: Measured, tmp_path: Path, name: str
) -> None:
    if name.endswith(".png"):
        pytest.importorskip("matplotlib", reason="plots are an extra")
    result = invoke("m.gguf", "--plot", str(tmp_path / name))
    assert result.exit_code == 2
    assert "plot" in one_line(result)
    assert not measured.calls


def test_without_matplotlib_nothing_is_measured(
    measured: Measured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = invoke("m.gguf", "--plot", str(tmp_path / "plot.png"))
    assert result.exit_code == 2
    assert "pip install 'knapspec-edge[plot]'" in one_line(result)
    assert not measured.calls


def test_a_full_disk_loses_the_plot_but_not_the_table(
    measured: Measured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib", reason="plots are an extra")
    path = tmp_path / "plot.png"

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(plots.os, "fsync", full)
    result = invoke("m.gguf", "--plot", str(path))
    assert result.exit_code == 1
    assert "A step of one token" in result.stdout
    assert result.stderr.count("\n") == 1
    assert f"cannot write the plot {path}: No space left on device" in result.stderr
    assert os.listdir(tmp_path) == []


# -- the terminal


class FakeTty(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_remaining_time_is_estimated_from_the_share_that_is_done() -> None:
    assert remaining_seconds(0.25, 10.0) == pytest.approx(30.0)
    assert remaining_seconds(0.99, 99.0) == pytest.approx(1.0)
    assert remaining_seconds(1.0, 5.0) == 0.0
    assert remaining_seconds(1.5, 5.0) == 0.0
    # too early to tell
    assert remaining_seconds(0.0, 60.0) is None
    assert remaining_seconds(0.5, 0.1) is None


def test_the_progress_line_counts_down_between_two_reports() -> None:
    now = [100.0]
    line = terminal._ProgressLine(FakeTty(), clock=lambda: now[0])
    try:
        line.update("measuring", 0.0)
        assert line.left() == ""
        now[0] += 20.0
        line.update("measuring", 0.1)
        assert line.left() == "3:00 min left"
        now[0] += 120.0
        assert line.left() == "60 s left"
        now[0] += 100.0
        assert line.left() == "1 s left"
        line.update("measuring", None)
        assert line.left() == ""
        # another stage has a time of its own
        now[0] += 10.0
        line.update("next", 0.5)
        assert line.left() == ""
    finally:
        line.clear()


def test_the_progress_line_shows_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "PROGRESS_DELAY_SECONDS", 0.0)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    now = [0.0]
    stream = FakeTty()
    line = terminal._ProgressLine(stream, clock=lambda: now[0])
    line.update("measuring passes", 0.0)
    now[0] = 10.0
    line.update("measuring passes", 0.5)
    line._show("measuring passes")  # at once, whether or not the timer was first
    line._bar.refresh()
    line.clear()
    assert "measuring passes" in stream.getvalue()
    assert "10 s left" in stream.getvalue()


@pytest.mark.parametrize("columns", [120, 100, 60, 40, 25])
def test_the_progress_line_is_one_line_and_leaves_the_cursor(
    monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setattr(terminal, "PROGRESS_DELAY_SECONDS", 1e6)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(columns))
    now = [0.0]
    stream = FakeTty()
    line = terminal._ProgressLine(stream, clock=lambda: now[0])
    line.update("job", 0.5, "3 of 20 · 12.3/min · licences/[GPL].txt", 125.0)
    line._show("job")
    line._bar.refresh()
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())
    last = shown.split("\r")[-1].rstrip()
    assert "\x1b[?25l" not in stream.getvalue()
    line.clear()
    assert "\n" not in last
    assert len(last) <= columns
    assert last.startswith("3 of 20 · 12.3/min")
    assert "50%" in last
    assert ("min left" in last) == (columns >= 60 + 5)
    assert ("━" in last) == (columns >= 100)


def test_stages_of_a_profile_have_names() -> None:
    assert terminal._STAGES["profile"] == "measuring passes"
    assert terminal._STAGES["fidelity"] == "measuring what sublayers contribute"


def test_colours_only_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "60")
    bold = [Text("heading", style="bold")]
    tty, file = FakeTty(), io.StringIO()
    Terminal(out=tty, err=io.StringIO()).show(bold)
    assert "\x1b[1mheading" in tty.getvalue()
    Terminal(out=file, err=io.StringIO()).show(bold)
    assert file.getvalue() == "heading\n"
    monkeypatch.setenv("TERM", "dumb")
    dumb = FakeTty()
    Terminal(out=dumb, err=io.StringIO()).show(bold)
    assert dumb.getvalue() == "heading\n"


def test_a_file_has_a_width_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert Terminal(out=io.StringIO(), err=io.StringIO()).columns == 100
    monkeypatch.setenv("COLUMNS", "72")
    assert Terminal(out=io.StringIO(), err=io.StringIO()).columns == 72
    assert Terminal(out=FakeTty(), err=io.StringIO()).columns == 72


def test_help_has_examples() -> None:
    result = CliRunner().invoke(cli, ["profile", "--help"])
    assert result.exit_code == 0
    assert "knapspec-edge profile model.gguf --ctx 32768" in result.stdout
    assert "--plot FILE" in result.stdout


def test_json_of_unusual_numbers_stays_json(measured: Measured) -> None:
    results: tuple[Any, ...] = tuple(
        replace(r, plain_ms=float("nan"), speculation_ms=float("inf"))
        for r in measured.report.results
    )
    measured.report = replace(measured.report, results=results)
    result = invoke("m.gguf", "--json")
    assert json.loads(result.stdout)["settings"][0]["plain_ms"] is None
    shown = invoke("m.gguf")
    assert shown.exit_code == 0
    assert "nan" not in shown.stdout


GIB = 2**30
RAM = {"type": "CPU", "total_bytes": 64 * GIB, "free_bytes": 60 * GIB}
# keys and values of a Llama 3 8B: 128 KiB per token
LLAMA_8B = {
    "llama.block_count": "32",
    "llama.attention.head_count": "32",
    "llama.attention.head_count_kv": "8",
    "llama.embedding_length": "4096",
}


@pytest.mark.parametrize(
    ("gpu", "gpu_layers", "at_least", "at_most"),
    [
        (None, -1, 32768, 32768),
        # a quarter of 8 GiB, whatever the memory beside it
        ({"type": "GPU", "total_bytes": 8 * GIB, "free_bytes": 5 * GIB}, -1, 16000, 16384),
        # the weights left 1 GiB
        ({"type": "integrated GPU", "total_bytes": 8 * GIB, "free_bytes": GIB}, -1, 4000, 4096),
        ({"type": "GPU", "total_bytes": 8 * GIB, "free_bytes": 5 * GIB}, 0, 32768, 32768),
    ],
)
def test_the_context_that_nobody_asked_for_fits_where_the_layers_lie(
    monkeypatch: pytest.MonkeyPatch,
    gpu: dict[str, Any] | None,
    gpu_layers: int,
    at_least: int,
    at_most: int,
) -> None:
    devices = [RAM] if gpu is None else [gpu, RAM]
    monkeypatch.setattr(library, "devices", lambda: devices)
    model = SimpleNamespace(
        n_ctx_train=131072, metadata=LLAMA_8B, architecture="llama", gpu_layers=gpu_layers
    )
    run = profile._Run(
        model,  # type: ignore[arg-type]
        Options(),
        lambda *_: None,
        lambda _: None,
        Config(),
        Store(enabled=False),
        0.0,
    )
    assert at_least <= run._context_size("f16") <= at_most
    assert len(run.notes) == 1
