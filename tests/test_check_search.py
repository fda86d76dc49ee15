"""scripts/check_search.py on the toy backend: what it measures, how it computes, what it says."""

from __future__ import annotations

import csv
import json
import math
import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from fakes import Costs as ToyCosts
from fakes import FakeBackend, ToyModel, sublayers_of
from hypothesis import given
from hypothesis import strategies as st
from scripted_tools import load

from knapspec_edge.config import DEFAULTS
from knapspec_edge.decode.session import Session
from knapspec_edge.errors import PlanError, UsageError
from knapspec_edge.latency.costs import Costs
from knapspec_edge.latency.profiler import measure_latency
from knapspec_edge.records import Draft, Kind, Plan
from knapspec_edge.search.acceptance import Judgement
from knapspec_edge.search.throughput import Window
from knapspec_edge.terminal import Terminal

check = load("check_search")
rounds = sys.modules["_rounds"]  # imported by it

N_LAYER = 6


def hush(_stage: str, _share: float) -> None:
    pass


def prompts(n_tokens: int, offset: int) -> list[int]:
    """Prompts that begin alike and end differently."""
    return [1 + (i * 7) % 20 for i in range(n_tokens - 8)] + [1 + (offset * 5 + i) % 20
                                                              for i in range(8)]  # fmt: skip


def place_at(context: int = 96, **model: Any) -> Any:
    # no token of the toy language ends a text by itself
    toy = ToyModel(**{"end_tokens": frozenset(), **model})
    backend = FakeBackend(toy, n_layer=N_LAYER, n_ctx=512, costs=ToyCosts(attention_ms_per_1k=1.0))
    profile = measure_latency(backend, budget_seconds=20.0, clock=backend.clock)
    session = Session(backend, clock=backend.clock)
    return rounds.Place(backend, session, prompts, Costs(profile), context, clock=backend.clock)


# ---------------------------------------------------------------------------------------------
# Statistics


@given(st.lists(st.sampled_from([0.0, 1.0, 2.0, 2.5, 7.0]), min_size=1, max_size=20))
def test_ranks_are_those_of_the_obvious(values):
    expected = [
        1 + sum(v < x for v in values) + (sum(v == x for v in values) - 1) / 2 for x in values
    ]
    assert list(rounds.ranks(values)) == pytest.approx(expected)


def test_correlations_see_lines_and_order():
    x = [1.0, 2.0, 3.0, 4.0]
    assert rounds.pearson(x, [2 * v + 1 for v in x]) == pytest.approx(1.0)
    assert rounds.pearson(x, [-v for v in x]) == pytest.approx(-1.0)
    assert rounds.spearman(x, [v**5 for v in x]) == pytest.approx(1.0)
    assert rounds.pearson(x, [v**5 for v in x]) < 0.95
    assert math.isnan(rounds.pearson(x, [1.0] * 4))
    assert math.isnan(rounds.spearman([1.0], [1.0]))


def test_the_bound_is_above_one_only_where_a_draft_can_pay():
    """method: S > 1 for some length if and only if α > c + s."""
    for alpha, c, s in [(0.9, 0.5, 0.1), (0.6, 0.5, 0.1), (0.61, 0.5, 0.1), (0.3, 0.5, 0.0)]:
        curve = {gamma: 1.0 + s * gamma for gamma in range(1, 40)}
        speed, gamma = rounds.bound(alpha, c, curve)
        assert (speed > 1.0) == (gamma > 0) == (alpha > c + s)
    # three sure tokens at a tenth of a step each, verified for one and a half
    assert rounds.bound(1.0, 0.1, {3: 1.5}) == (pytest.approx(4 / 1.8), 3)


def test_precision_and_recall():
    assert check.compared([1, 2, 3, 4], [3, 4, 5]) == (0.5, pytest.approx(2 / 3))
    assert check.compared([], [3]) == (1.0, 0.0)
    assert check.compared([3], []) == (0.0, 1.0)


def test_what_json_has_no_word_for_is_null():
    from _measuring import json_line

    assert (
        json_line({"a": [math.nan, 1.5, (math.inf,)], 3: None})
        == '{"a":[null,1.5,[null]],"3":null}'
    )


# ---------------------------------------------------------------------------------------------
# Measuring


def test_a_visit_counts_whole_rounds_after_the_warm_up():
    place = place_at(default_harm=0.0)
    plan = Plan.skipping(2 * N_LAYER, [3, 4])
    seen = rounds.visit(place.session, place.prompt(4), Draft(plan, 3, 0.0), 5, 1000)
    # nothing is ever rejected
    assert (seen.rounds, seen.drafted, seen.accepted, seen.tokens) == (5, 15, 15, 20)
    plain = rounds.visit(place.session, place.prompt(4), None, 6, 6)
    assert (plain.rounds, plain.drafted, plain.tokens) == (6, 0, 6)
    step = place.backend.costs.step_ms(place.sublayers, place.context_tokens + 4, None)
    assert plain.ms_per_token == pytest.approx(step, rel=0.01)
    place.backend.check_ledger()


def test_a_visit_ends_with_the_round_that_reaches_its_tokens():
    place = place_at(default_harm=0.0)
    draft = Draft(Plan.skipping(2 * N_LAYER, [3]), 4, 0.0)
    seen = rounds.visit(place.session, place.prompt(4), draft, 100, 12)
    assert (seen.rounds, seen.tokens) == (3, 15)


def test_an_end_token_does_not_end_a_visit():
    place = place_at(end_tokens=frozenset({0}), end_at=100)
    seen = rounds.visit(place.session, place.prompt(4), None, 10, 10)
    assert seen.tokens == 10


def test_a_context_without_room_is_said():
    place = place_at(context=510)
    with pytest.raises(UsageError, match="no room"):
        rounds.visit(place.session, place.prompt(4), None)


def test_timing_is_relative_to_the_plain_steps_around():
    """A machine that gets slower and slower changes no ratio."""
    ratios = []
    for growth in (0.0, 0.002):
        place = place_at(default_harm=0.0)
        backend = place.backend
        compute = backend._compute

        def slower(call: str, tokens: Sequence[int], plan: Any, b: Any = backend,
                   compute: Any = compute, growth: float = growth) -> None:  # fmt: skip
            before = b.now_ms
            compute(call, tokens, plan)
            b.now_ms = before + (b.now_ms - before) * (1.0 + growth * b.n_computed)

        backend._compute = slower
        drafts = [Draft(Plan.skipping(2 * N_LAYER, [i]), 3, 0.0) for i in (2, 5)]
        timed = place.time(drafts, 0.0, hush)
        assert [len(t.visits) for t in timed] == [1, 1]
        ratios.append([t.ratio for t in timed])
    assert ratios[1] == pytest.approx(ratios[0], rel=0.02)


def test_more_time_means_more_answers():
    place = place_at()
    timed = place.time([Draft(Plan.skipping(2 * N_LAYER, [2]), 3, 0.0)], 5.0, hush)
    assert len(timed[0].visits) > 3
    assert len(timed[0].visits) == len(timed[0].plain_ms) == len(timed[0].ratios)


def test_plans_are_judged_on_other_answers_than_those_that_are_timed():
    place = place_at()
    asked: list[int] = []
    inner = place._prompts
    place._prompts = lambda n, offset: asked.append(offset) or inner(n, offset)
    plan = Plan.skipping(2 * N_LAYER, [2, 7])
    place.fidelity(100.0)
    fitted, asked[:] = set(asked), []
    (judgement,) = place.judge([plan], 100.0, hush)
    judged, asked[:] = set(asked), []
    place.time([Draft(plan, 3, 0.0)], 100.0, hush)
    assert judged == set(rounds.JUDGED_OFFSETS)
    assert set(asked) == set(rounds.TIMED_OFFSETS)
    assert judged.isdisjoint(asked)
    assert fitted.isdisjoint(judged | set(asked))
    assert [len(w.agree) for w in judgement.windows] == [rounds.JUDGED_TOKENS] * 3


def test_judging_stops_early_where_time_is_short():
    place = place_at()
    (judgement,) = place.judge([Plan.skipping(2 * N_LAYER, [2])], 0.0, hush)
    assert len(judgement.windows) == 1


def test_predictions_hold_in_a_world_without_noise():
    place = place_at(context=128, default_harm=0.02)
    rng = random.Random(3)
    forced = check.correlate_at(place, 12, 100.0, rng, hush)
    assert len(forced) == 12
    assert {f.family for f in forced} == {"knapsack", "harmless", "random"}
    assert len({f.skipped for f in forced}) == 12
    (found,) = check.correlations(forced)
    # what is left is the difference between two samples of text
    assert found.pearson["predicted"] > 0.9
    assert found.ratio_error < 0.1
    assert found.pearson["predicted"] > found.pearson["alpha"]


# ---------------------------------------------------------------------------------------------
# Plans


def test_the_best_draft_is_short_where_nothing_is_accepted():
    place = place_at()
    plan = Plan.skipping(2 * N_LAYER, [2, 3, 4, 5])

    def judged(agree: bool) -> Judgement:
        return Judgement(plan, (Window((agree,) * 40, (0.99,) * 40),))

    good, fast = place.best_draft(judged(True))
    bad, slow = place.best_draft(judged(False))
    assert good.max_tokens > bad.max_tokens == 1
    assert fast > 1.0 > slow


def test_the_tpt_of_the_paper_knows_sublayers_only():
    place = place_at()
    plan = Plan.skipping(2 * N_LAYER, [2, 3])
    ms = [place.costs.saving_ms(i, place.context_tokens + 20) for i in range(2 * N_LAYER)]
    kept = sum(ms) - ms[2] - ms[3]
    tokens = 1 + 0.5 + 0.25
    assert place.paper(plan, 0.5, 2) == pytest.approx(tokens / (2 * kept + sum(ms)))
    draft, verify = place.draft_ms(plan), place.verify_ms(3)
    assert place.geometric(plan, 0.5, 2) == pytest.approx(tokens / (2 * draft + verify))
    assert draft > kept  # head and rest


def test_generators_give_plans_of_about_equal_cost():
    place = place_at(default_harm=0.01)
    fidelity = place.fidelity(100.0)
    rng = random.Random(0)
    for name in ("knapsack", "random"):
        plans = check.GENERATORS[name](place, fidelity, (0.15, 0.3), rng)
        assert [place.saving(p) for p in plans] == pytest.approx([0.15, 0.3], abs=0.06), name
    last = 2 * N_LAYER - 2
    for plan in check.random_equal_plans(place, fidelity, (0.1, 0.4), rng):
        assert all(1 < i < last for i in plan.skipped)


def test_the_knapsack_ladder_leaves_out_what_does_no_harm():
    place = place_at(harm={i: 0.5 for i in range(2 * N_LAYER) if i not in (4, 7)},
                     default_harm=0.0)  # fmt: skip
    ladder = check.knapsack_ladder(place, place.fidelity(100.0))
    # only what no other plan beats in both saving and loss
    assert {p.skipped for p in ladder} <= {(4,), (7,), (4, 7)}
    assert ladder[-1].skipped == (4, 7)


def test_shares_are_of_each_kind():
    sublayers = sublayers_of(4)
    assert rounds.shares(Plan.skipping(8, [0, 2, 3]), sublayers) == {
        Kind.ATTENTION: 0.5,
        Kind.MLP: 0.25,
    }


def test_generators_are_compared():
    place = place_at(default_harm=0.03)
    names = ["knapsack", "hidden-state", "random"]
    found = check.generators_at(place, names, 2, 50.0, random.Random(1), hush, [])
    lines = check.generator_table(found)
    assert {g.generator for g in found} == set(names)
    assert len({line.count("|") for line in lines}) == 1
    assert any("random (2)" in line for line in lines)
    for g in found:
        assert g.predicted_ratio == pytest.approx(g.measured_ratio, rel=0.5)


def test_a_generator_that_is_impossible_is_said_and_left_out():
    place = place_at(default_harm=0.03)
    notes: list[str] = []

    def refuse(*_: Any) -> Any:
        raise PlanError("no branches here")

    place.backend.branches = refuse
    names = ["hidden-state", "random"]
    found = check.generators_at(place, names, 1, 5.0, random.Random(1), hush, notes)
    assert {g.generator for g in found} == {"random"}
    assert notes == ["hidden-state at 96 tokens: no branches here"]


def test_attention_shares_follow_what_attention_costs(tmp_path):
    found = [
        check.share_at(place_at(context, default_harm=0.03), 8, 50.0, hush) for context in (80, 400)
    ]
    for s in found:
        assert set(s.best) == {"attention", "mlp"}
        assert 0.0 < s.saving < 1.0
    assert found[1].step_share["attention"] > found[0].step_share["attention"]
    lines = check.share_table(found)
    assert len({line.count("|") for line in lines}) == 1
    assert len(lines) == 4
    path = tmp_path / "share.csv"
    check.write_csv(found, path)
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert [int(r["context_tokens"]) for r in rows] == [80, 400]
    assert float(rows[1]["best_attention"]) == pytest.approx(found[1].best["attention"], abs=1e-4)


def test_a_model_of_which_nothing_can_be_left_out_is_said():
    with pytest.raises(PlanError, match="no sublayer can be left out"):
        check.share_at(place_at(default_harm=1.0), 8, 50.0, hush)


def share(context: int, best: float, equal: float) -> Any:
    return check.Share(context, {"attention": best}, {"attention": equal}, {"attention": 0.5},
                       0.3, 0.9, 3, 1.1, (2,))  # fmt: skip


def test_the_trend_is_told_in_words():
    found = [share(256, 0.1, 0.3), share(1024, 0.2, 0.3), share(4096, 0.3, 0.3)]
    words = check.trend(found, "attention")
    assert "best plan: rises (rank correlation 1.00)" in words
    assert "equal saving: stays" in words
    falling = [share(256, 0.3, 0.4), share(1024, 0.1, 0.5)]
    assert "best plan: falls" in check.trend(falling, "attention")
    assert check.trend(found[:1], "attention") == ""


def test_a_plot_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    target = tmp_path / "share.png"
    check.write_plot([share(256, 0.1, 0.3), share(1024, 0.2, 0.3)], target, "a model")
    assert target.read_bytes().startswith(b"\x89PNG")


# ---------------------------------------------------------------------------------------------
# Planted models


def record_of(*indices: int) -> Any:
    planted = tuple(
        check.plant_model.Planted(i, i // 2, "attention" if i % 2 == 0 else "mlp", i // 2, False)
        for i in indices
    )
    return check.plant_model.Record("toy.gguf", "s.gguf", "F16", 1e-4, N_LAYER, 2 * N_LAYER, (),
                                    planted)  # fmt: skip


def test_the_planner_finds_what_was_planted():
    harmless = (3, 4, 6, 9)
    place = place_at(harm={i: 0.6 for i in range(2 * N_LAYER) if i not in harmless},
                     default_harm=0.0)  # fmt: skip
    place.session.reset()
    decision = check.planner.decide(
        place.backend, "toy", prompts(96, 0), DEFAULTS, clock=place.backend.clock
    )
    place = rounds.Place(place.backend, Session(place.backend, clock=place.backend.clock), prompts,
                        place.costs, 96, clock=place.backend.clock)  # fmt: skip
    result = check.planted_at(place, record_of(*harmless), decision, 20.0, hush)
    assert result.found == result.planted == harmless
    assert (result.precision, result.recall, result.alpha) == (1.0, 1.0, 1.0)
    assert result.measured_ratio == pytest.approx(result.predicted_ratio, rel=0.1)
    # sure of everything, the bound of the planted plan is what its real rounds reach
    assert result.right_ratio == pytest.approx(result.right_bound, rel=0.1)
    (line,) = check.planted_table([result])[2:]
    assert line.startswith("| toy.gguf | 4 | 4 | 1.00 | 1.00 | 1.00 |")


def test_a_model_without_a_draft_is_said():
    place = place_at()
    decision = check.planner.Decision("off", "off: nothing helps")
    with pytest.raises(PlanError, match="nothing helps"):
        check.planted_at(place, record_of(2), decision, 1.0, hush)


# ---------------------------------------------------------------------------------------------
# Texts and the program


class Words:
    """A vocabulary of one token per word."""

    chat_template = None

    def tokenize(self, text: str, *, parse_special: bool, add_special: bool = False) -> list[int]:
        return [len(word) for word in text.split()]

    bos_token = None
    eos_token = None
    add_bos = False
    vocab_type = "spm"


def test_prompts_of_a_length_differ_in_their_end_only():
    repeated: set[int] = set()
    prompt = rounds.prompts_of(Words(), None, repeated)
    long = [prompt(1000, offset) for offset in (1, 4)]
    assert [len(p) for p in long] == [1000, 1000]
    common = 1000 - rounds.TAIL_TOKENS
    assert long[0][:common] == long[1][:common]
    assert long[0][common:] != long[1][common:]
    assert prompt(100, 1)[:50] != prompt(100, 4)[:50]
    assert not repeated
    prompt(100_000, 1)
    assert repeated == {100_000}


def test_contexts_are_read():
    assert check.parse_contexts("1024,256,256") == [256, 1024]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["correlate", "m.gguf", "--contexts", "x"], "--contexts"),
        (["correlate", "m.gguf", "--contexts", "3"], "--contexts"),
        (["correlate", "m.gguf", "--plans", "1"], "--plans"),
        (["correlate", "m.gguf", "--budget", "0"], "--budget"),
        (["generators", "m.gguf", "--profile-budget", "inf"], "--profile-budget"),
        (["generators", "m.gguf", "--threads", "0"], "--threads"),
        (["attention-share", "m.gguf", "--plot", "x.doc"], "--plot"),
        (["attention-share", "m.gguf", "--csv", "missing/x.csv"], "no folder"),
        (["planted", "m.gguf", "--at", "1"], "--at"),
    ],
)
def test_bad_options_get_one_line(arguments, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert check.main(arguments) == 2
    shown = capsys.readouterr()
    assert words in shown.err
    assert shown.err.count("\n") == 1
    assert shown.out == ""


@pytest.mark.parametrize("command", ["correlate", "generators", "attention-share", "planted"])
def test_a_missing_model_gets_one_line(command, capsys, tmp_path):
    assert check.main([command, str(tmp_path / "none.gguf")]) == 1
    shown = capsys.readouterr()
    assert shown.err.count("\n") == 1


def test_the_report_is_a_table_and_one_line_of_json(capsys):
    place = place_at(default_harm=0.03)
    forced = check.correlate_at(place, 6, 20.0, random.Random(0), hush)
    forced += [replace(f, context_tokens=200) for f in forced]
    found = check.correlations(forced)
    assert [c.context_tokens for c in found] == [96, 200, None]
    for lines in (check.correlation_table(found), check.plain_table(forced)):
        assert len({line.count("|") for line in lines}) == 1
    Terminal().text(check.measuring.json_line([check.asdict(f) for f in forced]) + "\n")
    assert len(json.loads(capsys.readouterr().out)) == 12
