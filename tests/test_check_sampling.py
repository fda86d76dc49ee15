"""scripts/check_sampling.py on the toy backend: what it finds, must not miss, and says."""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import naive_sampling
import numpy as np
import pytest
from fake_vocabulary import FakeVocabulary
from fakes import FakeBackend, ToyModel, chance
from hypothesis import given
from hypothesis import strategies as st
from scripted_tools import load

from knapspec_edge.native.library import library_file
from knapspec_edge.records import Draft, Pick, Plan, Sampling

check = load("check_sampling")
# imported by it
cost = sys.modules["_pick_cost"]
law = sys.modules["_distributions"]
sampled = sys.modules["_sampled"]

N_LAYER = 6
PROMPTS = [[1 + (7 * n + 3 * i) % 20 for i in range(9 + n)] for n in range(6)]
SEEDS = (1, 2, 3)
SETTINGS = {
    "greedy": Sampling(),
    "t1.0": Sampling(1.0),
    "paper": Sampling(0.7, top_k=5, top_p=0.95, temperature_first=True),
    "penalised": Sampling(0.8, top_k=8, repeat_penalty=1.5),
}
PLANS = {
    "few": Plan.skipping(2 * N_LAYER, [4]),
    "many": Plan.skipping(2 * N_LAYER, [2, 3, 5, 6, 7, 9]),
}
DRAFTS = {"few": Draft(PLANS["few"], 5, 0.0), "many": Draft(PLANS["many"], 2, 0.0)}


def hush(_stage: str, _share: float) -> None:
    pass


def pick(
    row: np.ndarray, sampling: Sampling, position: int, history: Sequence[int]
) -> naive_sampling.Picked:
    return naive_sampling.pick(row, sampling, position, history)


@dataclass
class RoundingModel(ToyModel):
    """Rounds differently where several tokens are computed together."""

    size: float = 0.0
    together: bool = False

    def logits(self, tokens: Sequence[int], plan: Plan | None) -> np.ndarray:
        values = super().logits(tokens, plan)
        if self.together and plan is None:
            noise = [chance("rounding", tuple(tokens), t) - 0.5 for t in range(len(values))]
            values += np.array(noise, dtype=np.float32) * np.float32(self.size)
        return values


class Rounding(FakeBackend):
    """`trace`: drafts do to the next pass what belongs to no draft."""

    def __init__(self, size: float = 0.3, *, trace: bool = False, **model: Any) -> None:
        super().__init__(RoundingModel(size=size, **model), n_layer=N_LAYER)
        self.trace = trace
        self.drafted = False

    def decode(self, token: int, sampling: Sampling, plan: Plan | None = None) -> Pick:
        self.model.together = False
        self.drafted = plan is not None
        return super().decode(token, sampling, plan)

    def prefill(self, tokens: Sequence[int], sampling: Sampling, progress: Any = None) -> Pick:
        self.model.together = self.drafted = False
        return super().prefill(tokens, sampling, progress)

    def verify(self, tokens: Sequence[int], sampling: Sampling) -> list[Pick]:
        self.model.together = self.drafted if self.trace else True
        self.drafted = False
        return super().verify(tokens, sampling)


def toy(**model: Any) -> FakeBackend:
    return FakeBackend(ToyModel(**model), n_layer=N_LAYER)


def compared(backend: FakeBackend, settings: dict[str, Sampling] = SETTINGS) -> list[Any]:
    return check.compared(backend, pick, PROMPTS, SEEDS, settings, DRAFTS, 24, hush)


def differences(found: Sequence[Any]) -> list[Any]:
    return [d for i in found for d in i.differences]


# ---------------------------------------------------------------------------------------------
# Distributions


rows = st.lists(st.sampled_from([-3.0, -0.5, 0.0, 0.1, 1.0, 1.25, 4.0, -math.inf]), min_size=1,
                max_size=25).filter(lambda values: max(values) > -math.inf)  # fmt: skip
laws = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.5, 0.7, 1.0]),
    top_k=st.sampled_from([0, 1, 3, 40]),
    top_p=st.sampled_from([0.37, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.07, 0.5]),
    typical_p=st.sampled_from([0.41, 1.0]),
    temperature_first=st.booleans(),
    repeat_penalty=st.sampled_from([1.0, 1.3]),
    frequency_penalty=st.sampled_from([0.0, 0.2]),
    presence_penalty=st.sampled_from([0.0, -0.3]),
    penalty_last_n=st.sampled_from([0, 2, -1]),
    logit_bias=st.sampled_from([(), ((0, 0.75),), ((0, 1.5),)]),
)


@given(rows, laws, st.lists(st.integers(0, 24), max_size=6))
def test_distributions_are_those_of_the_twin(values, sampling, history):
    row = np.array(values, dtype=np.float32)
    history = [t for t in history if t < len(row)]
    # sums that meet the border of a filter exactly may fall to either side
    adjusted = naive_sampling.adjusted(row, sampling, history)
    nudges = naive_sampling.nudges(sampling)
    shifted = [naive_sampling.candidates(adjusted, sampling, nudge) for nudge in nudges]
    if len({tuple(s) for s in shifted}) > 1:
        return
    expected = naive_sampling.distribution(row, sampling, history)
    assert law.distribution(row, sampling, history) == pytest.approx(expected, abs=1e-12)


shares = st.lists(st.sampled_from([0, 0, 1, 1, 2, 5, 30]), min_size=2, max_size=12)


@given(shares, shares)
def test_agreement_is_that_of_the_formula(a, b):
    n = min(len(a), len(b))
    p, q = np.array(a[:n], dtype=float), np.array(b[:n], dtype=float)
    if not p.sum() or not q.sum():
        return
    p, q = p / p.sum(), q / q.sum()
    gumbel = sum(
        1.0 / sum(max(p[i] / p[j], q[i] / q[j]) for i in range(n))
        for j in range(n)
        if p[j] and q[j]
    )
    found = law.agreement(p, q)
    assert found.gumbel == pytest.approx(gumbel)
    assert found.maximal == pytest.approx(np.minimum(p, q).sum())
    assert found.independent == pytest.approx((p * q).sum())
    assert found.gumbel <= found.maximal + 1e-12


def test_agreement_is_how_often_shared_noise_agrees():
    p = np.array([0.5, 0.3, 0.2, 0.0])
    q = np.array([0.2, 0.3, 0.1, 0.4])
    tokens = np.arange(4)
    n = 4000
    with np.errstate(divide="ignore"):
        same = sum(
            int(np.argmin(e / p)) == int(np.argmin(e / q))
            for seed in range(n)
            for e in [naive_sampling.exponentials(seed, 3, tokens)]
        )
    expected = law.agreement(p, q).gumbel
    assert abs(same - n * expected) < 4 * math.sqrt(n * expected * (1 - expected))
    assert law.agreement(p, p) == (pytest.approx(1.0), pytest.approx(1.0), pytest.approx(0.38))


# ---------------------------------------------------------------------------------------------
# Identity


def test_the_first_difference():
    assert check.first_difference([1, 2, 3], [1, 2, 3]) is None
    assert check.first_difference([1, 2, 3], [1, 4, 3]) == 1
    assert check.first_difference([1, 2], [1, 2, 3]) == 2


def test_texts_are_the_same_and_that_is_proved():
    backend = toy()
    found = compared(backend)
    assert not differences(found)
    assert check.unproved(found) == check.broken(found, strict=True) == []
    answers = Counter()
    for i in found:
        assert i.identical == i.answers > 0
        answers[i.setting] += i.answers
    # greedy answers know no seed: once under each plan
    assert answers == {"greedy": 12, "t1.0": 18, "paper": 18, "penalised": 18}
    backend.check_ledger()


def test_counts_are_those_of_the_rounds():
    session = sampled.primed(toy(), PROMPTS[0])
    answer = sampled.answered(session, PROMPTS[0], Sampling(1.0, seed=4), DRAFTS["many"], 24)
    stats = answer.stats
    # drafts at the limit are shorter
    whole = stats.accepted_lengths[DRAFTS["many"].max_tokens]
    assert whole <= answer.whole_rounds <= whole + 1
    # a draft ends with its first rejected token
    assert answer.rejected == sum(stats.accepted_lengths.values()) - answer.whole_rounds
    number, row = answer.row_of(10)
    assert answer.rounds[10] == number
    assert answer.rounds[10 - row] == number != answer.rounds[10 - row - 1]


@pytest.mark.parametrize(
    ("harm", "words"),
    [(0.0, "none was rejected"), (1.0, "no drafted token was accepted and no draft")],
)
def test_drafts_that_are_never_tried_prove_nothing(harm, words):
    found = compared(toy(default_harm=harm), {"greedy": SETTINGS["greedy"]})
    (line,) = check.unproved(found)
    assert words in line


def test_what_batch_shapes_do_is_explained():
    backend = Rounding()
    found = compared(backend)
    seen = differences(found)
    assert {d.setting for d in seen} == set(SETTINGS)
    assert {d.cause for d in seen} == {check.RACE, check.FILTER}
    assert check.broken(found, strict=False) == []
    for d in seen:
        assert d.trace == 0.0
        assert 0.0 < d.change <= 0.15 + 1e-6
        assert d.plain != d.drafted
        if d.cause == check.RACE and SETTINGS[d.setting].top_k == 0:
            # what the two scores moved is more than what was between them
            assert d.margin <= d.score_change + 1e-5
    # but wide margins are no rounding of single precision
    assert len(check.broken(found, strict=True)) == sum(d.margin >= 1e-4 for d in seen) > 0
    backend.check_ledger()


def test_a_trace_of_the_draft_is_found():
    found = compared(Rounding(trace=True), {"t1.0": SETTINGS["t1.0"]})
    assert {d.cause for d in differences(found)} == {check.TRACE}
    assert len(check.broken(found, strict=False)) == len(differences(found)) > 0


def test_a_pick_that_its_row_does_not_give_is_found():
    class Forgetful(FakeBackend):
        """Penalties of a verification see the text of its first row."""

        def verify(self, tokens: Sequence[int], sampling: Sampling) -> list[Pick]:
            start = self.n_past
            self.history_of = lambda text: text[: start + 1]
            try:
                return super().verify(tokens, sampling)
            finally:
                del self.history_of

    backend = Forgetful(ToyModel(), n_layer=N_LAYER)
    found = compared(backend, {"penalised": SETTINGS["penalised"]})
    assert {d.cause for d in differences(found)} == {check.NOT_PICKED}
    assert "not what its row gives" in check.broken(found, strict=False)[0]


def test_a_run_that_cannot_be_repeated_is_found():
    class Moody(FakeBackend):
        calls = 0

        def verify(self, tokens: Sequence[int], sampling: Sampling) -> list[Pick]:
            self.calls += 1
            picks = super().verify(tokens, sampling)
            if self.calls % 7 == 0:
                picks[0] = replace(picks[0], token=(picks[0].token + 1) % 20 + 1)
            return picks

    found = compared(Moody(ToyModel(), n_layer=N_LAYER), {"t1.0": SETTINGS["t1.0"]})
    assert check.NOT_REPEATED in {d.cause for d in differences(found)}
    assert check.broken(found, strict=False)


def test_the_noise_of_batch_shapes_is_measured():
    backend = Rounding(end_tokens=frozenset())
    noise = check.batch_noise(backend, PROMPTS[0])
    assert noise.shape == (check.NOISE_TOKENS - 1, 2)
    assert 0.0 < np.median(noise) < noise.max() <= 0.15 + 1e-6
    assert not check.batch_noise(toy(end_tokens=frozenset()), PROMPTS[0]).any()
    assert backend.n_past == 0


def test_plans_leave_out_what_does_the_least_harm():
    harmless = (3, 8)
    backend = toy(harm={i: 0.0 if i in harmless else 0.8 for i in range(2 * N_LAYER)})
    plans = sampled.plans_by_harm(backend, PROMPTS[0], lambda _: None)
    assert {name: len(plan.skipped) for name, plan in plans.items()} == {
        "few": 1,
        "some": 2,
        "many": 4,
    }
    assert plans["some"].skipped == harmless
    assert backend.n_past == 0


def test_the_tables_of_the_identity(capsys):
    found = compared(Rounding())
    lines = check.identity_table(found)
    assert len({line.count("|") for line in lines}) == 1
    assert len(lines) == 2 + len(found)
    lines = check.difference_table(found, str)[1:]
    assert len({line.count("|") for line in lines}) == 1
    assert len(lines) == 2 + len(differences(found))
    assert check.difference_table(compared(toy()), str) == []
    data = json.loads(check.measuring.json_line([check.asdict(i) for i in found]))
    assert data[0]["differences"][0]["cause"]


# ---------------------------------------------------------------------------------------------
# Acceptance


def acceptance(backend: FakeBackend, settings: dict[str, Sampling] = SETTINGS) -> list[Any]:
    return check.accepted(backend, PROMPTS, range(1, 6), settings, PLANS, 24, hush)


def test_drafts_match_as_often_as_shared_noise_lets_expect():
    backend = toy(default_harm=0.2)
    found = acceptance(backend)
    assert {(a.setting, a.plan) for a in found} == {(s, p) for s in SETTINGS for p in PLANS}
    for a in found:
        match, gumbel = a.mean(lambda p: p.match), a.mean(lambda p: p.gumbel)
        if a.setting == "greedy":
            assert match == gumbel == a.mean(lambda p: p.maximal) == a.mean(lambda p: p.best)
        else:
            assert abs(a.deviations) < 4.0
            assert a.mean(lambda p: p.independent) < gumbel
            assert gumbel < a.mean(lambda p: p.maximal) + 1e-12
            assert 0.0 < a.error(lambda p: p.match) < 0.1
        assert {p.offset for p in a.places} == set(range(check.BLOCK_TOKENS))
    few, many = (a for a in found if a.setting == "t1.0")
    assert few.mean(lambda p: p.match) > many.mean(lambda p: p.match)
    backend.check_ledger()


def test_drafts_with_noise_of_their_own_are_noticed():
    class Apart(FakeBackend):
        def decode(self, token: int, sampling: Sampling, plan: Plan | None = None) -> Pick:
            if plan is not None:
                sampling = replace(sampling, seed=sampling.seed + 1000)
            return super().decode(token, sampling, plan)

    found = acceptance(Apart(ToyModel(), n_layer=N_LAYER), {"t1.0": SETTINGS["t1.0"]})
    few = found[0]
    assert few.deviations < -5.0
    assert few.mean(lambda p: p.match) == pytest.approx(few.mean(lambda p: p.independent), abs=0.1)


def test_a_draft_that_changes_nothing_is_always_right():
    found = acceptance(toy(default_harm=0.0), {"paper": SETTINGS["paper"]})
    for a in found:
        assert a.mean(lambda p: p.match) == a.mean(lambda p: p.gumbel) == pytest.approx(1.0)
        assert a.deviations == 0.0
        assert a.in_loop == 1.0


def test_acceptance_in_the_loop_counts_what_was_tried():
    own = check.Acceptance("t1.0", "few", 3, [], [10, 6, 0, 0], [6, 3, 0, 0])
    assert own.in_loop == 9 / 16
    assert math.isnan(check.Acceptance("t1.0", "few", 3).in_loop)


def test_the_table_of_acceptance():
    found = acceptance(toy(), {"t1.0": SETTINGS["t1.0"]})
    lines = check.acceptance_table(found)
    assert len({line.count("|") for line in lines}) == 1
    data = json.loads(check.measuring.json_line([check.acceptance_json(a) for a in found]))
    assert data[0]["places"] == len(found[0].places)
    assert data[0]["match"] == found[0].mean(lambda p: p.match)


# ---------------------------------------------------------------------------------------------
# Cost


def test_cases_take_turns_and_the_first_does_not_count():
    now, order = 0.0, []

    def call(name: str, seconds: float) -> Any:
        def run() -> None:
            nonlocal now
            # the first one of a name is slow, as graphs and caches are
            now += seconds * (1 if name in order else 100)
            order.append(name)

        return run

    cases = [[call("a", 1e-6), call("b", 2e-6)], [call("c", 5e-6)]]
    found = cost.timed(cases, 0.0, clock=lambda: now)
    assert order[:6] == ["a", "b", "c", "a", "b", "c"]
    assert [[len(turns) for turns in case] for case in found] == [[5, 5], [5]]
    assert found[0][1] == pytest.approx([2.0] * 5)
    assert len(cost.timed(cases, 8e-5, clock=lambda: now)[1][0]) >= 9


def test_shares_count_what_the_picks_of_a_round_would_take():
    # 1 ms with 9 greedy picks of 10 us: 910 us are left, to which 9 of 100 us come
    assert cost.share_of_round(100.0, 10.0, 1.0) == pytest.approx(900 / 1810)
    assert cost.share_of_round(0.0, 10.0, 1.0) == 0.0


def test_rows_of_other_sizes_are_made_of_real_ones():
    own = [np.arange(5, dtype=np.float32) + 10 * i for i in range(3)]
    assert [list(r) for r in cost.of_length(own, 3)] == [[0, 1, 2], [10, 11, 12], [20, 21, 22]]
    assert list(cost.of_length(own, 12)[2]) == [20, 21, 22, 23, 24, 0, 1, 2, 3, 4, 10, 11]
    assert [list(r) for r in cost.of_length(own, 5)] == [list(r) for r in own]
    flat = cost.flat_rows(1000, 2)
    assert all(0.05 < r.std() < 0.2 for r in flat)


def test_rows_are_those_of_the_places_of_an_answer():
    backend = toy()
    found = cost.rows_of(backend, PROMPTS[1], Sampling(1.0, seed=3), 4)
    session = sampled.primed(backend, PROMPTS[1])
    answer = list(session.generate(PROMPTS[1], sampling=Sampling(1.0, seed=3),
                                   is_end=lambda _: False, max_tokens=4))  # fmt: skip
    text = list(PROMPTS[1])
    for row, event in zip(found, answer, strict=True):
        assert list(row) == list(backend.model.logits(text, None))
        text.append(event.token)


def timings() -> Any:
    found = cost.Found(20, (9.0, 10.0, 12.0), {20: cost.Time(1.0, 2.0, 3.0)},
                       cost.Time(0.5, 1.0, 2.0), tokens_per_round=3.0)  # fmt: skip
    for name, us in (("greedy", 10.0), ("slow", 50.0)):
        share = cost.share_of_round(us, 10.0, 10.0)
        for n_vocab, own in ((20, share), (99, None)):
            found.costs.append(cost.Cost(n_vocab, "of an answer", name, cost.Time(us, us, us), own))
    return found


def test_what_a_grammar_adds_is_told_apart():
    without = [[13.0] * 3, [13.0] * 3, [13.0] * 3, [13.0] * 3]
    with_it = [[15.0] * 3, [15.0] * 3, [113.0, 213.0, 113.0], [13.0, 17.0, 17.0]]
    added = cost._grammar_cost("t", without, with_it, [False, False, True, False], 10.0, timings())
    assert (added.places, added.rejected) == (4, 1)
    assert added.plain.median == 10.0  # without copy and call
    assert added.test.median == 2.0
    assert added.rejection.median == added.worst_us == 100.0
    # as often as here: (2 + 2 + 100 + 4) / 4 on top of the pick
    assert added.share == pytest.approx(cost.share_of_round(37.0, 10.0, 10.0))
    never = cost._grammar_cost("t", without, with_it, [False] * 4, 10.0, timings())
    assert never.rejection is None


def test_the_report_of_costs():
    found = timings()
    found.grammars.append(cost.GrammarCost("slow", 4, 1, found.call, found.call, None, None, 0.5))
    found.logprobs = {0: found.call, 10: found.call}
    found.python = {"loop": 100.0}
    lines = cost.report(found)
    tables = "\n".join(lines).split("\n\n")
    for part in tables:
        if part.startswith("|"):
            assert len({line.count("|") for line in part.split("\n")}) == 1
    assert "| slow | 50.0 (50.0–50.0) | 4.3 % | 50.0 (50.0–50.0) |" in lines
    assert "| loop | 100 | 3.0 % |" in lines
    assert lines[-1] == ("Above 3 % of a round: slow (4.3 %), JSON grammar, slow (50 %).")
    assert json.loads(check.measuring.json_line(cost.to_json(found)))["costs"][1]["share"] is None
    good = replace(found, costs=found.costs[:1], grammars=[])
    assert cost.report(good)[-1] == "Every setting stays below 3 % of a round."


def test_python_is_timed_without_computing():
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 1.0
        return now

    vocabulary = FakeVocabulary()
    tokens = vocabulary.tokenize("abc", parse_special=False)
    found = cost.python_costs(toy().sublayers, PLANS["few"], vocabulary, tokens, clock)
    assert set(found) == {
        "loop, plain", "loop, 4 drafted and all accepted", "detokeniser", "2 stop strings",
    }  # fmt: skip
    # a second for each body and none for its tokens
    assert set(found.values()) == {1e6 / cost.PYTHON_TOKENS}


def test_everything_that_costs_is_timed_in_each_setting():
    for sampling in (*(s for _, s, _ in cost.CASES), *cost.GRAMMAR_CASES.values()):
        row = np.array([0.3, 2.0, -1.0], dtype=np.float32)
        assert 0 <= naive_sampling.pick(row, sampling, 4, [1, 2]).token < 3


@pytest.mark.skipif(library_file("llama") is None, reason="no patched library")
def test_the_native_pick_is_asked_as_the_loop_asks_it():
    row = np.random.default_rng(1).normal(0.0, 3.0, 300).astype(np.float32)
    native = sampled.NativePick()
    for sampling in SETTINGS.values():
        for position in range(20):
            history = [(3 * i) % 300 for i in range(position)]
            found = native(row, sampling, position, history)
            expected = naive_sampling.pick(row, sampling, position, history)
            assert found.token == expected.token
            assert found.margin == pytest.approx(expected.margin, rel=1e-3, abs=1e-4)


# ---------------------------------------------------------------------------------------------
# The program


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["identity", "m.gguf", "--settings", "warm"], "--settings"),
        (["identity", "m.gguf", "--plans", "few,none"], "--plans"),
        (["identity", "m.gguf", "--prompts", "0"], "--prompts"),
        (["identity", "m.gguf", "--prompts", "999"], "--prompts"),
        (["identity", "m.gguf", "--max-tokens", "1"], "--max-tokens"),
        (["acceptance", "m.gguf", "--seeds", "0"], "--seeds"),
        (["acceptance", "m.gguf", "--threads", "0"], "--threads"),
        (["cost", "m.gguf", "--budget", "nan"], "--budget"),
        (["cost", "m.gguf", "--vocab", "3"], "--vocab"),
        (["cost", "m.gguf", "--ctx", "64"], "--ctx"),
    ],
)
def test_bad_options_get_one_line(arguments, words, capsys):
    assert check.main(arguments) == 2
    shown = capsys.readouterr()
    assert words in shown.err
    assert shown.err.count("\n") == 1
    assert shown.out == ""


@pytest.mark.parametrize("command", ["identity", "acceptance", "cost"])
def test_a_missing_model_gets_one_line(command, capsys, tmp_path):
    assert check.main([command, str(tmp_path / "none.gguf")]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_what_is_broken_fails_the_program(capsys, monkeypatch):
    def find(_options: Any, _terminal: Any, failures: list[str]) -> Any:
        failures.append("m.gguf: greedy, prompt 0: not what its row gives")
        return {"models": []}

    monkeypatch.setitem(check._COMMANDS, "identity", find)
    assert check.main(["identity", "m.gguf"]) == 1
    shown = capsys.readouterr()
    assert "not what its row gives" in shown.err
    assert json.loads(shown.out)["command"] == "identity"
