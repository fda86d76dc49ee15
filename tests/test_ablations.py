"""scripts/ablations.py on the toy backend, and its verdicts on cases worked by hand."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from typing import Any

import pytest
from scripted_tools import load
from test_check_search import check, hush, place_at

from knapspec_edge.records import Draft, Plan
from knapspec_edge.search.acceptance import Judgement
from knapspec_edge.search.throughput import Window

ablations = load("ablations")

CONFIRMED, NOT_CONFIRMED = ablations.CONFIRMED, ablations.NOT_CONFIRMED
NOT_TESTABLE = ablations.NOT_TESTABLE


def row(
    part: str, variant: str, ratios: tuple[float, ...] = (), context: int = 256, **more: Any
) -> Any:
    return ablations.Row(part, context, variant, ratios=ratios, **more)


def found(*rows: Any, **more: Any) -> Any:
    return ablations.Found(rows=list(rows), **more)


# -- verdicts


def test_whole_layers_against_sublayers() -> None:
    """Differences 0.15, 0.25, 0.05, 0.10, 0.20: quartiles 0.10, 0.15, 0.20."""
    rows = (
        row("layers", "sublayers", (1.25, 1.35, 1.10, 1.20, 1.30)),
        row("layers", "whole layers", (1.10, 1.10, 1.05, 1.10, 1.10)),
    )
    faster, much = ablations.decoupling(found(*rows))
    assert (faster.verdict, much.verdict) == (CONFIRMED, CONFIRMED)
    assert "+0.150 (+0.100 to +0.200) in 5 pairs" in faster.found
    little = (replace(rows[0], ratios=(1.12, 1.13, 1.06, 1.12, 1.12)), rows[1])
    assert [v.verdict for v in ablations.decoupling(found(*little))] == [CONFIRMED, NOT_CONFIRMED]
    worse = (replace(rows[0], ratios=(1.0, 1.13, 1.06, 1.0, 1.0)), rows[1])
    assert [v.verdict for v in ablations.decoupling(found(*worse))] == [NOT_CONFIRMED] * 2
    few = (replace(rows[0], ratios=(1.5,) * 4), rows[1])
    judged = ablations.decoupling(found(*few))
    assert [(v.verdict, v.found) for v in judged] == [(NOT_TESTABLE, "4 visits; it takes 5")] * 2
    elsewhere = (rows[0], replace(rows[1], context_tokens=512))
    assert [v.verdict for v in ablations.decoupling(found(*elsewhere))] == [NOT_TESTABLE] * 2


def test_the_objectives() -> None:
    def case(acceptance: float) -> Any:
        return ablations.best_objective(
            found(
                row("objectives", ablations.TPT, (1.0,) * 5),
                row("objectives", ablations.PAPER_TPT, (1.5,) * 5),  # of the same kind
                row("objectives", ablations.PER_LAYER, (0.9,) * 5),
                row("objectives", ablations.ACCEPTANCE, (acceptance,) * 5),
            )
        ).verdict

    assert case(1.01) == CONFIRMED
    assert case(1.03) == NOT_CONFIRMED
    assert ablations.best_objective(found()).verdict == NOT_TESTABLE


def test_pruning() -> None:
    def case(ms: float, ratio: float) -> Any:
        return ablations.pruning(
            found(
                row("threshold", "none", search_tokens=100.0, predicted_ratio=0.9),
                row("threshold", "τ = 0.5", search_tokens=ms, predicted_ratio=ratio),
            )
        ).verdict

    assert case(90.0, 0.9) == CONFIRMED
    assert case(97.0, 0.9) == NOT_CONFIRMED
    assert case(50.0, 0.87) == NOT_CONFIRMED
    assert case(50.0, math.nan) == NOT_TESTABLE


def test_the_window() -> None:
    def case(ratio: float) -> Any:
        rows = (
            row("window", "32 tokens", predicted_ratio=ratio),
            row("window", "55 tokens", predicted_ratio=0.9),
        )
        return ablations.reference(found(*rows)).verdict

    assert [case(0.89), case(0.95), case(0.87), case(math.nan)] == [
        CONFIRMED, CONFIRMED, NOT_CONFIRMED, NOT_TESTABLE,
    ]  # fmt: skip


def test_intervals() -> None:
    rows = (
        row("interval", "every 64 rounds", (0.9, 0.8, 0.9, 0.8, 0.85), plan_share=0.04),
        row("interval", "every 256 rounds", (1.0, 0.95, 1.0, 0.95, 0.95), plan_share=0.01),
    )
    assert ablations.overhead(found(*rows)).verdict == CONFIRMED
    assert ablations.seldom(found(*rows)).verdict == CONFIRMED
    assert ablations.faster(found(*rows)).verdict == NOT_CONFIRMED
    assert "256: 0.85×" in ablations.faster(found(*rows)).found
    dear = replace(rows[0], plan_share=0.2, ratios=(1.1, 1.2, 1.1, 1.2, 1.2))
    assert ablations.overhead(found(dear, rows[1])).verdict == NOT_CONFIRMED
    assert ablations.seldom(found(dear, rows[1])).verdict == NOT_CONFIRMED
    assert ablations.faster(found(dear)).verdict == CONFIRMED
    for verdict in (ablations.overhead, ablations.seldom, ablations.faster):
        assert verdict(found()).verdict == NOT_TESTABLE


def test_sampling_keeps_a_gain_only_where_there_is_one() -> None:
    def case(greedy: float, warm: float) -> Any:
        rows = (
            row("sampling", "greedy", (greedy,) * 5),
            row("sampling", "temperature 0.7", (warm,) * 5),
        )
        return ablations.under_sampling(found(*rows)).verdict

    assert [case(1.2, 1.15), case(1.2, 1.05), case(1.05, 0.99), case(0.8, 0.8)] == [
        CONFIRMED, NOT_CONFIRMED, NOT_CONFIRMED, NOT_TESTABLE,
    ]  # fmt: skip


def forced(paper: float, acceptance: float, measured: float) -> Any:
    quartiles = (1.0, 1.0, 1.0)
    return check.Forced(
        256, "random", (1,), 2, 0.0, acceptance, acceptance, 1.0, 1.0, paper, measured, 1.0, 1.0,
        quartiles, 1, 1, 1, quartiles,
    )  # fmt: skip


def test_what_tells_throughput() -> None:
    rng = random.Random(1)
    plans = [forced(x, rng.random(), 2.0 * x + 1.0) for x in range(12)]
    better, well = ablations.predictors(found(forced=plans))
    assert (better.verdict, well.verdict) == (CONFIRMED, CONFIRMED)
    assert well.found == "1.000"
    turned = [replace(f, paper=f.acceptance, acceptance=f.paper) for f in plans]
    better, well = ablations.predictors(found(forced=turned))
    assert (better.verdict, well.verdict) == (NOT_CONFIRMED, NOT_CONFIRMED)
    same = [replace(f, acceptance=0.5) for f in plans]
    assert [v.verdict for v in ablations.predictors(found(forced=same))] == [NOT_TESTABLE] * 2
    assert [v.verdict for v in ablations.predictors(found())] == [NOT_TESTABLE] * 2


def share(context: int, attention: float, mlp: float) -> Any:
    kinds = {"attention": attention, "mlp": mlp}
    return check.Share(context, kinds, kinds, kinds, 0.1, 0.9, 2, 0.9, ())


def test_what_is_left_out_as_the_context_grows() -> None:
    rising = [share(256, 0.1, 0.2), share(1024, 0.2, 0.25), share(4096, 0.4, 0.2)]
    assert [v.verdict for v in ablations.growing(found(shares=rising))] == [CONFIRMED] * 2
    falling = [share(256, 0.4, 0.2), share(1024, 0.2, 0.4), share(4096, 0.1, 0.2)]
    assert [v.verdict for v in ablations.growing(found(shares=falling))] == [NOT_CONFIRMED] * 2
    assert [v.verdict for v in ablations.growing(found(shares=rising[:2]))] == [NOT_TESTABLE] * 2


def test_every_statement_has_a_verdict_and_a_rule() -> None:
    judged = ablations.verdicts(found())
    assert len(judged) == 13
    assert {v.verdict for v in judged} == {NOT_TESTABLE}
    lines = ablations.verdict_table(judged)
    assert all(line.count("|") == 5 for line in lines)


# -- what is measured, on the toy model


def asked(seconds: float = 4.0, **model: Any) -> Any:
    place = place_at(**model)
    return ablations.Asked(place, seconds, hush, random.Random(0), ablations.Found())


def judgement(plan: Plan, agree: str) -> Judgement:
    window = Window(tuple(c == "1" for c in agree), (0.99,) * len(agree))
    return Judgement(plan, (window,))


def test_tokens_per_layer_by_hand() -> None:
    """α = 0.5, γ = 1: 1.5 tokens; 4 sublayers, one of them left out: 3 + 4."""
    assert ablations.per_layer(Plan.skipping(4, [1]), 0.5, 1) == pytest.approx(1.5 / 7.0)


def test_groups_are_left_out_together() -> None:
    place = asked(default_harm=0.02).place
    fidelity = place.fidelity(5.0)
    pairs = ablations.layer_groups(place)
    assert pairs[0] == [0, 1]
    plans = ablations.grouped_plans(place, fidelity, pairs, ablations.SAVINGS)
    assert plans
    assert len(set(plans)) == len(plans)
    for plan in plans:
        assert all((2 * i in plan.skipped) == (2 * i + 1 in plan.skipped) for i in range(6))
    single = ablations.grouped_plans(place, fidelity, ablations.single_groups(place), (0.05,))
    assert len(single[0].skipped) < 2 or place.saving(single[0]) < 0.12


def test_each_objective_chooses_its_own() -> None:
    place = asked().place
    n = len(place.sublayers)
    sure = judgement(Plan.skipping(n, [1]), "1" * 24)
    deep = judgement(Plan.skipping(n, list(range(n))), "110" * 8)
    chosen = ablations.by_objective(place, [deep, sure])
    assert chosen[ablations.ACCEPTANCE][0] is sure
    # a draft of nothing costs nothing per layer
    assert chosen[ablations.PER_LAYER][0] is deep


@pytest.mark.parametrize("part", ["layers", "objectives", "sampling"])
def test_parts_measure_ratios(part: str) -> None:
    question = asked(default_harm=0.02)
    ablations.PARTS[part][0](question)
    rows = question.found.rows
    assert len(rows) >= 2
    assert all(r.ratios and 0.0 < r.ratio < 10.0 for r in rows)
    assert all(r.context_tokens == 96 for r in rows)
    lines = ablations.rows_table(rows)
    assert len(lines) == len(rows) + 2
    assert len({line.count("|") for line in lines}) == 1


def test_intervals_are_those_of_the_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def policy(backend: Any, costs: Any, config: Any) -> Any:
        seen.append(config.dp_paper_interval_rounds)
        return ablations.FixedPolicy(None)

    monkeypatch.setattr(ablations, "PaperPolicy", policy)
    monkeypatch.setattr(ablations, "LONG_ANSWER_TOKENS", 20)
    question = asked(seconds=1e-9)
    ablations.interval(question)
    assert seen == [16, 64, 256]
    assert [r.variant for r in question.found.rows] == [
        "every 16 rounds", "every 64 rounds", "every 256 rounds",
    ]  # fmt: skip


def test_whole_answers_alternate_with_plain_ones() -> None:
    question = asked(seconds=1e-9, default_harm=0.02)
    n = len(question.place.sublayers)
    draft = Draft(Plan.skipping(n, [1]), 2, 0.0)
    rows = ablations._whole_answers(
        question,
        "sampling",
        30,
        {
            "plain": (lambda: ablations.FixedPolicy(None), ablations.GREEDY),
            "forced": (lambda: ablations.FixedPolicy(draft), ablations.GREEDY),
        },
    )
    assert rows["plain"].ratios == (pytest.approx(1.0),)
    assert len(rows["forced"].ratios) == 1
    assert rows["forced"].alpha > 0.5
    assert math.isnan(rows["plain"].alpha)


def test_wrong_options_are_said_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert ablations.main(["model.gguf", "--budget", "0"]) == 2
    assert "--budget must be a number of seconds above 0" in capsys.readouterr().err
    assert ablations.main(["model.gguf", "--contexts", "1,2"]) == 2
    assert "--contexts" in capsys.readouterr().err


def test_records_are_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = (row("layers", "sublayers", (1.0,)), forced(1.0, 0.5, 1.0))

    def measure(options: Any, terminal: Any, into: Any) -> dict[str, Any]:
        into.rows.append(shown[0])
        into.forced.append(shown[1])
        if options.budget == 1.0:
            raise KeyboardInterrupt
        return {"model": "m"}

    monkeypatch.setattr(ablations, "measure", measure)
    # what was measured is not lost when it is interrupted
    for budget, code in (("900", 0), ("1", 130)):
        assert ablations.main(["model.gguf", "--budget", budget]) == code
        data = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
        assert data["command"] == "ablations"
        assert data["rows"][0]["alpha"] is None
        assert len(data["verdicts"]) == 13
        assert bool(data["notes"]) == (code == 130)


def test_every_part_has_a_table() -> None:
    shown = found(
        *(row(part, "a", (1.0,)) for part in ablations.PARTS),
        forced=[forced(1.0, 0.5, 1.0)],
        shares=[share(256, 0.1, 0.2)],
    )
    for part in ablations.PARTS:
        assert len(ablations.part_table(part, shown)) == 3
        assert ablations.part_table(part, found()) == []
