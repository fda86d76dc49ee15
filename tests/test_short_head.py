"""Short heads in costs, fidelity, the knapsack, judging and files; the native side has its own."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes import Costs as Truth
from fakes import FakeBackend, ToyModel

from knapspec_edge.config import DEFAULTS
from knapspec_edge.errors import UsageError
from knapspec_edge.latency.costs import Costs
from knapspec_edge.latency.fidelity import Fidelity, Text, count_heads
from knapspec_edge.latency.profile import LatencyProfile
from knapspec_edge.latency.profiler import measure_latency
from knapspec_edge.records import GREEDY, Draft, Plan
from knapspec_edge.search import plan_file
from knapspec_edge.search.acceptance import judge, judge_beside
from knapspec_edge.search.candidates import candidate_plans, cuts

N_VOCAB = 64
SIZES = (16, 32)
N = 8
CONTEXT = 40


def backend(head_ms: float = 6.0, sizes: tuple[int, ...] = SIZES) -> FakeBackend:
    return FakeBackend(
        ToyModel(n_vocab=N_VOCAB, head_sizes=sizes),
        costs=Truth(head_ms=head_ms, n_vocab=N_VOCAB),
    )


def profiled(machine: FakeBackend, **settings: Any) -> LatencyProfile:
    return measure_latency(machine, budget_seconds=5.0, clock=machine.clock, **settings)


def counted(shares: dict[int, float], total: int = 100) -> Fidelity:
    """Every skip keeps 0.95 of the picks, each head its share of the tokens."""
    counts = [[i, "skip", CONTEXT, 95, total, 0.0, 0] for i in range(N)]
    counts += [
        [N, f"head:{rows}", CONTEXT, round(share * total), total, 0.0, 0]
        for rows, share in shares.items()
    ]
    data = {"counts": counts, "margins": [], "batch_agreed": 0, "batch_total": 0}
    return Fidelity.from_json({**data, "runs": 1, "notes": []}, N)


def test_the_profile_finds_what_shorter_heads_save() -> None:
    machine = backend()
    costs = Costs(profiled(machine))
    assert costs.short_heads == SIZES
    for rows in SIZES:
        assert costs.head_saving_ms(rows) == pytest.approx(6.0 * (1.0 - rows / N_VOCAB), rel=0.01)
    assert costs.head_saving_ms(24) == pytest.approx(3.75, rel=0.01)
    assert costs.head_saving_ms(0) == 0.0
    for plan in (Plan.skipping(N, [], 16), Plan.skipping(N, [0, 3], 32), Plan.skipping(N, [5])):
        truth = machine.costs.step_ms(machine.sublayers, CONTEXT, plan)
        assert costs.draft_ms(plan, CONTEXT) == pytest.approx(truth, rel=0.02)


def test_profiles_are_kept_with_their_heads_and_older_ones_are_read() -> None:
    profile = profiled(backend())
    data = json.loads(json.dumps(profile.to_json()))
    assert LatencyProfile.from_json(data) == profile
    older = profiled(backend(sizes=()))
    data = json.loads(json.dumps(older.to_json()))
    for sample in data["samples"]:
        sample.pop("head_rows")
    assert Costs(LatencyProfile.from_json(data)).short_heads == ()
    data["samples"][0]["head_rows"] = -1
    with pytest.raises(ValueError, match="impossible"):
        LatencyProfile.from_json(data)


def test_switched_off_none_is_measured() -> None:
    profile = profiled(backend(), config=replace(DEFAULTS, short_head=False))
    assert not any(s.head_rows for s in profile.samples)


def test_the_agreement_of_a_head_is_the_share_of_tokens_it_had() -> None:
    found = count_heads(backend(), Text((1, 2), (3, 40, 15, 16, 31, 32, 8, 9)), SIZES)
    assert found.head_agreement(16) == (0.5, 8)
    assert found.head_agreement(32) == (0.75, 8)
    assert found.head_loss(0) == 0.0
    assert found.head_loss(16) == pytest.approx(-math.log(4.5 / 9.0))
    assert found.head_loss(20) == found.head_loss(16)  # of the next smaller one
    assert found.head_loss(8) == math.inf
    both = found.plus(found)
    assert both.head_agreement(16) == (0.5, 16)
    assert Fidelity.from_json(json.loads(json.dumps(both.to_json())), N) == both


def test_the_knapsack_weighs_heads_as_it_does_sublayers() -> None:
    """A head that saves more and loses less than a skip comes first."""
    machine = backend()
    costs = Costs(profiled(machine))
    found = cuts(costs, counted({16: 0.80, 32: 0.99}), CONTEXT, machine.sublayers)
    rows = {cut.plan.head_rows for cut in found}
    assert rows == {0, 16, 32} or rows == {16, 32}
    for cut in found:
        # half a hit and half a miss are added to each count
        expected = (95.5 / 101) ** len(cut.plan.skipped)
        expected *= {0: 1.0, 16: 80.5 / 101, 32: 99.5 / 101}[cut.plan.head_rows]
        assert cut.agreement == pytest.approx(expected)
    # one of 0.99 that saves 3 ms is taken before any skip of 0.95 that saves less
    assert all(cut.plan.head_rows for cut in found if len(cut.plan.skipped) > 1)
    plans = candidate_plans(costs, counted({16: 0.80, 32: 0.99}), CONTEXT, machine.sublayers)
    assert Plan.skipping(N, [], 32) in plans


@pytest.mark.parametrize(
    ("head_ms", "shares", "change"),
    [
        (6.0, {16: 0.99, 32: 0.99}, {"short_head": False}),
        (6.0, {16: 0.5, 32: 0.6}, {}),  # lose too much
        (6.0, {}, {}),  # nothing is known about them
        (0.2, {16: 0.99, 32: 0.99}, {}),  # not worth while
    ],
    ids=["off", "poor", "unknown", "cheap"],
)
def test_heads_that_are_not_offered(
    head_ms: float, shares: dict[int, float], change: dict[str, Any]
) -> None:
    machine = backend(head_ms)
    costs = Costs(profiled(machine))
    config = replace(DEFAULTS, **change)
    found = cuts(costs, counted(shares), CONTEXT, machine.sublayers, config)
    assert found
    assert not any(cut.plan.head_rows for cut in found)


def test_what_the_list_lacked_was_not_drafted() -> None:
    """The text's tokens are in the list by the time a plan is judged on them."""

    class Learnt(FakeBackend):
        def decode(self, token: int, sampling: Any, plan: Plan | None = None) -> Any:
            return super().decode(token, sampling, None)

        def evaluate_beside(self, blocks: Any, plan: Any = None, *rest: Any, **more: Any) -> Any:
            return super().evaluate_beside(blocks, None, *rest, **more)

    machine = Learnt(ToyModel(n_vocab=N_VOCAB, head_sizes=SIZES))
    text = [int(machine.prefill([1, 2, 3], GREEDY).token)]
    while len(text) < 20:
        text.append(machine.decode(text[-1], GREEDY).token)
    machine.truncate(3)
    plan = Plan.skipping(N, [], 16)
    expected = [t < 16 for t in text[1:]]
    assert 0 < sum(expected) < len(expected)
    (found,) = judge(machine, text, [plan], 8)
    assert list(found.agree) == expected
    machine.evaluate(text)
    assert list(judge_beside(machine, 3, text, plan, 8).agree) == expected


def test_plan_files_carry_the_head_and_older_ones_are_read(tmp_path: Path) -> None:
    machine = backend()
    path = tmp_path / "plan.json"
    draft = Draft(Plan.skipping(N, [2], 32), 4, 0.5)
    plan_file.save(path, draft, machine.sublayers, "print")
    assert plan_file.load(path, machine.sublayers, "print") == draft
    data = json.loads(path.read_text())
    data.pop("head_rows")
    path.write_text(json.dumps(data))
    older = plan_file.load(path, machine.sublayers, "print")
    assert older == replace(draft, plan=Plan.skipping(N, [2]))
    for wrong in (-1, 1.5, True, "32"):
        path.write_text(json.dumps({**data, "head_rows": wrong}))
        with pytest.raises(UsageError, match="head_rows"):
            plan_file.load(path, machine.sublayers, "print")


def test_only_the_whole_head_is_a_full_plan() -> None:
    assert Plan.full(3).is_full
    assert not Plan.skipping(3, [], 16).is_full
    assert Plan.skipping(3, [1], 16) != Plan.skipping(3, [1])


def test_reports_show_what_a_shorter_head_takes() -> None:
    from knapspec_edge.apps import profile_report

    costs = Costs(profiled(backend()))
    table = profile_report._cost_table(costs, [])
    assert {"16 rows\nof it, ms", "32 rows\nof it, ms"} <= set(table.columns)
    assert all(len(row) == len(table.columns) for row in table.rows)
