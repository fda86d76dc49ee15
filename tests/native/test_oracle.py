"""Every sublayer of every architecture against the unpatched library (see oracle.py)."""

from __future__ import annotations

from pathlib import Path

import pytest

from .oracle import Verdict, Worker, judge

# Refused by name, with the reason: hyper-connections and other mixtures of several residual
# streams, loops over shared layers, diffusion models, and a fixture without its experts.
REFUSED = {
    "deepseek4-moe",
    "dream-dense",
    "glm5-next-moe",
    "hrm_text-dense",
    "hy_v4-moe",
    "kimi-k3-moe",
    "llada-dense",
    "llada-moe-moe",
    "minimax-01-moe",
    "qwen4exp-moe",
    "refact-moe",
    "rnd1-moe",
}


@pytest.fixture(scope="module")
def verdicts(
    tiny_models: Path,
    patched: Worker,
    pristine: Worker,
    tmp_path_factory: pytest.TempPathFactory,
) -> list[Verdict]:
    scratch = tmp_path_factory.mktemp("zeroed")
    return [
        judge(model, patched, pristine, scratch) for model in sorted(tiny_models.glob("*.gguf"))
    ]


def test_none_crashes(verdicts: list[Verdict]) -> None:
    assert {v.name: v.crashed for v in verdicts if v.crashed} == {}


def test_none_answers_wrongly(verdicts: list[Verdict]) -> None:
    assert {v.name: v.wrong for v in verdicts if v.wrong} == {}


def test_every_item_is_judged(verdicts: list[Verdict]) -> None:
    assert {v.name: v.unproved for v in verdicts if v.unproved} == {}


def test_an_empty_plan_is_the_unpatched_library(verdicts: list[Verdict]) -> None:
    assert {v.name: v.full_differs for v in verdicts if v.full_differs} == {}


def test_the_rest_is_refused_by_name(verdicts: list[Verdict]) -> None:
    refused = {v.name for v in verdicts if not v.sublayers}
    assert refused == REFUSED
    assert all(v.refusal for v in verdicts if not v.sublayers)


def test_at_least_a_hundred_work(verdicts: list[Verdict]) -> None:
    assert len(verdicts) >= 128
    assert sum(v.works for v in verdicts) == len(verdicts) - len(REFUSED) >= 100
