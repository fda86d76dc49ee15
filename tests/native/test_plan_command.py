"""The `plan` command on tiny models: measured, kept, found again, saved and drafted with."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from knapspec_edge.apps import plan
from knapspec_edge.apps.plan import Options
from knapspec_edge.apps.plan_report import renderables, to_json
from knapspec_edge.cli import cli
from knapspec_edge.config import Config
from knapspec_edge.engine import Engine, Settings
from knapspec_edge.errors import Interrupted, PlanError, UsageError
from knapspec_edge.records import Draft, Plan

# The picks of models with random weights survive nothing; here any sublayer may be left out.
ANY = Config(plan_floor_agreement=0.0)
QUICK = Options(at_tokens=64, budget_seconds=2.0, threads=1)


def test_measured_once_and_found_again(
    patched_library: Path, tiny_models: Path, user_cache: Path
) -> None:
    model = tiny_models / "llama-dense.gguf"
    first = plan.run(model, QUICK, config=ANY)
    outlook = first.outlook
    assert outlook.context_tokens == 64
    assert not outlook.from_cache
    assert outlook.window_tokens == ANY.measure_window_tokens
    assert len(outlook.items) == len(outlook.sublayers) == 4
    assert {i.total for i in outlook.items} == {ANY.measure_window_tokens}
    assert outlook.judged
    assert outlook.settings["threads"] == 1
    again = plan.run(model, QUICK, config=ANY)
    assert again.outlook.from_cache
    # margins are kept rounded, so what is expected of items may differ in the last digits
    assert again.outlook.judged == outlook.judged
    assert [(i.agreed, i.total) for i in again.outlook.items] == [
        (i.agreed, i.total) for i in outlook.items
    ]
    assert again.outlook.why == outlook.why
    other = plan.run(model, replace(QUICK, at_tokens=100), config=ANY)
    assert not other.outlook.from_cache
    assert other.outlook.context_tokens == 100
    # the one at 64 tokens is still there
    assert plan.run(model, QUICK, config=ANY).outlook.judged == outlook.judged
    json.dumps(to_json(again), allow_nan=False)
    assert renderables(again, 80)


def test_what_a_busy_machine_said_is_measured_again_when_asked_again(
    patched_library: Path, tiny_models: Path, user_cache: Path
) -> None:
    model = tiny_models / "llama-dense.gguf"
    # every measurement counts as one of a busy machine
    busy = replace(plan.ASKED, plan_floor_agreement=0.0, measure_max_spread=-1.0)
    assert plan.run(model, QUICK, config=busy).outlook.disturbed
    patient = replace(busy, measure_retry_seconds=3600.0)
    assert plan.run(model, QUICK, config=patient).outlook.from_cache
    assert not plan.run(model, QUICK, config=busy).outlook.from_cache


def test_the_saved_plan_can_be_drafted_with(
    patched_library: Path, tiny_models: Path, user_cache: Path, tmp_path: Path
) -> None:
    model, path = tiny_models / "llama-dense.gguf", tmp_path / "plan.json"
    report = plan.run(model, QUICK, config=ANY)
    # which plan wins is a matter of this machine; that it is honoured is not
    outlook = report.outlook
    draft = outlook.draft or Draft(Plan.skipping(len(outlook.sublayers), [1]), 2, 0.0)
    plan.save(replace(report, outlook=replace(outlook, draft=draft)), path)
    with Engine.open(model, ctx=128, spec=path) as engine:
        assert engine.speculation.draft == draft
        answer = engine.generate([1, 2, 3], Settings(max_tokens=8))
        for _ in answer:
            pass
        assert answer.stats.draft_n > 0


def test_how_answers_are_drafted_stays_as_it_is(
    patched_library: Path, tiny_models: Path, user_cache: Path
) -> None:
    with Engine.open(
        tiny_models / "llama-dense.gguf", ctx=250, threads=1, spec="off", config=ANY
    ) as engine:
        before = engine.speculation
        text = [event.token for event in engine.generate([1, 2, 3], Settings(max_tokens=4))]
        outlook = engine.plan(32, budget_seconds=1.0)
        assert outlook.context_tokens == 32
        assert engine.speculation == before
        assert engine.backend.n_past == 0
        after = [event.token for event in engine.generate([1, 2, 3], Settings(max_tokens=4))]
        assert [t.token for t in after if t] == [t.token for t in text if t]
        with pytest.raises(UsageError, match="takes a context of 290, .* this one has"):
            engine.plan(240)
        with pytest.raises(UsageError, match="at least 2"):
            engine.plan(1)


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("qwen3moe-moe.gguf", {"attention", "mlp"}),
        ("phi2-dense.gguf", {"block"}),
        ("gpt2-dense.gguf", {"attention", "mlp"}),
    ],
)
def test_architectures(
    patched_library: Path, tiny_models: Path, user_cache: Path, name: str, kinds: set[str]
) -> None:
    report = plan.run(tiny_models / name, QUICK, config=ANY)
    assert {s.kind.value for s in report.outlook.sublayers} == kinds
    assert report.outlook.curve
    assert renderables(report, 60)


def test_a_recurrent_model_is_refused_by_name(
    patched_library: Path, tiny_models: Path, user_cache: Path
) -> None:
    result = CliRunner().invoke(
        cli, ["plan", str(tiny_models / "mamba-dense.gguf"), "--at", "64", "--json"]
    )
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert "cannot be planned for: " in result.stderr
    with pytest.raises(PlanError, match="cannot be planned for"):
        plan.run(tiny_models / "mamba-dense.gguf", QUICK)


def test_certificates_of_the_judged_plans(
    patched_library: Path, tiny_models: Path, user_cache: Path
) -> None:
    report = plan.run(tiny_models / "llama-dense.gguf", replace(QUICK, certify=True), config=ANY)
    found, outlook = report.certification, report.outlook
    assert found is not None
    assert report.uncertified is None
    assert [c.plan for c in found.plans] == [j.draft.plan for j in outlook.judged]
    assert found.context_tokens == 64
    assert found.positions == outlook.window_tokens
    assert all(c.loose <= c.tight <= c.agreed + c.broken for c in found.plans)
    assert to_json(report)["certificate"]["positions"] == found.positions


def test_interrupted_the_latencies_are_kept(
    patched_library: Path, tiny_models: Path, user_cache: Path
) -> None:
    model = tiny_models / "llama-dense.gguf"

    def stop(stage: str, share: float | None) -> None:
        # passes were timed, sublayers are being judged
        if stage == "measure" and share is not None and share > 0.45:
            raise Interrupted("interrupted")

    with pytest.raises(Interrupted):
        plan.run(model, QUICK, stop, config=ANY)
    kept = {path: path.stat().st_mtime_ns for path in user_cache.rglob("*.json")}
    assert kept
    report = plan.run(model, QUICK, config=ANY)
    assert not report.outlook.from_cache
    # what had been timed before was not timed again
    assert all(path.stat().st_mtime_ns == then for path, then in kept.items())


def test_the_command(patched_library: Path, tiny_models: Path, user_cache: Path) -> None:
    arguments = ["--at", "48", "--budget", "1", "--threads", "1", "--json"]
    result = CliRunner().invoke(cli, ["plan", str(tiny_models / "llama-dense.gguf"), *arguments])
    assert result.exit_code in (0, 1), result.stderr  # 1: the machine was busy
    assert result.stdout.count("\n") == 1
    data = json.loads(result.stdout)
    assert (result.exit_code == 1) == data["disturbed"]
    assert data["context_tokens"] == 48
    assert data["model"]["architecture"] == "llama"
