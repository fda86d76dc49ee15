"""What is known about plans, by context, and what follows from it; and how it is kept on disk."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes import Costs as ToyCosts
from fakes import FakeBackend, ToyModel
from hypothesis import given
from hypothesis import strategies as st

from knapspec_edge.config import Config
from knapspec_edge.latency.drift import Correction
from knapspec_edge.latency.rounds import RoundTiming
from knapspec_edge.latency.store import INVALID, Store
from knapspec_edge.records import Mode, ModeKind, Plan
from knapspec_edge.search import plan_book, planner
from knapspec_edge.search.acceptance import Judgement
from knapspec_edge.search.buckets import bucket_of, context_of
from knapspec_edge.search.judged import Measured
from knapspec_edge.search.plan_book import PlanBook, upper_bound
from knapspec_edge.search.planner import Decision
from knapspec_edge.search.throughput import Window

CONFIG = Config(measure_budget_seconds=5.0, dp_measure_share=0.0)
CALIBRATION = [1 + (7 * i * i) % 22 for i in range(600)]
N_CTX = 4096
N = 12  # sublayers
# Attention is cheap in the beginning and the dearest of all in the end.
COSTS = ToyCosts(0.2, 0.3, attention_ms=0.3, attention_ms_per_1k=2.0, mlp_ms=1.0, per_token=0.05)
SHALLOW, DEEP, OTHER = (Plan.skipping(N, s) for s in ([1], [1, 2, 4, 6, 8], [3, 5]))


@pytest.fixture(scope="module")
def decision() -> Decision:
    model = ToyModel(end_tokens=frozenset(), default_harm=0.03)
    backend = FakeBackend(model, n_layer=N // 2, n_ctx=N_CTX, costs=COSTS)
    return planner.decide(backend, "toy", CALIBRATION, CONFIG, None, clock=backend.clock)


@pytest.fixture(scope="module")
def measured(decision: Decision) -> Measured:
    assert decision.measured is not None
    return decision.measured


def toy() -> FakeBackend:
    return FakeBackend(ToyModel(end_tokens=frozenset()), n_layer=N // 2, n_ctx=N_CTX, costs=COSTS)


def new_book(measured: Measured, config: Config = CONFIG) -> PlanBook:
    return PlanBook(measured.costs, measured.fidelity, toy().sublayers, N_CTX, config)


@pytest.fixture
def book(measured: Measured) -> PlanBook:
    return new_book(measured)


def window(agreement: float, n: int = 48, seed: int = 0) -> Window:
    dice = random.Random(seed)
    agree = tuple(dice.random() < agreement for _ in range(n))
    return Window(agree, tuple(round(dice.random(), 3) for _ in range(n)))


def judged(plan: Plan, agreement: float, n: int = 48, seed: int = 0) -> Judgement:
    return Judgement(plan, (window(agreement, n, seed),))


class TestBuckets:
    def test_borders(self) -> None:
        assert [bucket_of(n, 512) for n in (0, 1, 512, 513, 1024, 1025, 2048, 2049)] == [
            0, 0, 0, 1, 1, 2, 2, 3,
        ]  # fmt: skip

    @given(st.integers(1, 5000), st.integers(0, 2**20))
    def test_each_ends_at_twice_the_end_of_the_one_before(self, first: int, n: int) -> None:
        bucket = bucket_of(n, first)
        assert n <= first * 2**bucket
        assert bucket == 0 or n > first * 2 ** (bucket - 1)

    @given(st.integers(2, 5000), st.integers(2, 2**17), st.data())
    def test_what_stands_for_a_bucket_lies_in_it(self, first: int, n_ctx: int, data) -> None:
        bucket = data.draw(st.integers(0, bucket_of(n_ctx - 1, first)))
        stands = context_of(bucket, first, n_ctx)
        assert 1 <= stands <= n_ctx - 1
        assert bucket_of(stands, first) == bucket

    def test_beyond_the_context_its_end_stands_for_it(self) -> None:
        assert context_of(9, 512, 4096) == 4095
        assert context_of(0, 1, 2) == 1

    def test_nonsense_is_refused(self) -> None:
        with pytest.raises(ValueError, match="at least one"):
            bucket_of(5, 0)


class TestEstimates:
    def test_without_judged_text_it_is_the_product_of_single_sublayers(
        self, book: PlanBook, measured: Measured
    ) -> None:
        estimate = book.estimate(SHALLOW, 0)
        assert estimate is not None
        (single,) = (i for i in measured.fidelity.agreements(book.sublayers) if i.index == 1)
        assert estimate.acceptance == pytest.approx(math.exp(-single.loss))
        both = book.estimate(Plan.skipping(N, [1, 2]), 0)
        (second,) = (i for i in measured.fidelity.agreements(book.sublayers) if i.index == 2)
        assert both.acceptance == pytest.approx(math.exp(-single.loss - second.loss))
        assert (estimate.places, estimate.replay) == (0, None)
        assert estimate.context_tokens == book.context(0) == 256

    def test_judged_text_of_the_bucket_decides_else_that_of_the_nearest(
        self, book: PlanBook
    ) -> None:
        book.add(0, judged(DEEP, 1.0))
        book.add(3, judged(DEEP, 0.5))
        acceptance = {b: book.estimate(DEEP, b).acceptance for b in range(4)}
        assert acceptance[0] == acceptance[1] == 1.0
        assert acceptance[2] == acceptance[3] < 0.75
        book.add(2, judged(DEEP, 1.0, n=16))
        assert book.estimate(DEEP, 2).acceptance == 1.0
        assert book.estimate(DEEP, 2).places == 16

    def test_a_draft_that_is_right_is_worth_what_it_saves(self, book: PlanBook) -> None:
        """All right and none doubtful: γ + 1 tokens for γ draft steps and one pass."""
        book.add(0, Judgement(DEEP, (Window((True,) * 64, (1.0,) * 64),)))
        estimate = book.estimate(DEEP, 0, 256)
        step = COSTS.step_ms(book.sublayers, 256, None)
        draft = COSTS.step_ms(book.sublayers, 256, DEEP)
        rounds = {g: (g + 1) / (g * draft + step * (1 + 0.05 * g)) for g in range(1, 9)}
        assert estimate.ratio == pytest.approx(max(rounds.values()) * step, rel=0.02)
        assert estimate.rate == pytest.approx(max(rounds.values()), rel=0.02)

    def test_prices_follow_the_context(self, book: PlanBook) -> None:
        book.add(0, judged(DEEP, 0.95))
        near, far = book.estimate(DEEP, 0), book.estimate(DEEP, 3)
        assert far.prices.step_ms > 2 * near.prices.step_ms
        # it leaves out four attentions, which are what costs most there
        assert far.prices.draft_ms / far.prices.step_ms < near.prices.draft_ms / near.prices.step_ms
        assert far.ratio > near.ratio

    def test_what_rounds_took_scales_the_prices(self, book: PlanBook) -> None:
        step, draft = book.costs.step_ms(256), book.costs.draft_ms(DEEP, 256)
        verify = book.costs.verify_ms(256, 5)
        before = book.estimate(DEEP, 0, 256).prices
        # on a machine half as fast, where drafting takes a half more than the costs say
        book.add_timing(DEEP, 256, RoundTiming(4, 3.0 * draft, 2.0 * verify, 2.0 * step))
        after = book.estimate(DEEP, 0, 256).prices
        assert after.step_ms == pytest.approx(before.step_ms)
        assert after.draft_ms == pytest.approx(1.5 * before.draft_ms)
        assert after.verify_ms == pytest.approx(before.verify_ms)

    def test_drift_scales_them_by_kind_of_pass(self, book: PlanBook) -> None:
        book.add(0, judged(DEEP, 0.95))
        as_measured = book.estimate(DEEP, 0)
        slow = book.estimate(DEEP, 0, correction=Correction(2.0, 2.0, 2.0))
        assert slow.ratio == pytest.approx(as_measured.ratio)
        assert slow.rate == pytest.approx(as_measured.rate / 2)
        dear = book.estimate(DEEP, 0, correction=Correction(1.0, 1.0, 3.0))
        assert dear.ratio < as_measured.ratio

    def test_what_was_added_counts_at_once(self, book: PlanBook) -> None:
        book.add(0, judged(DEEP, 0.2))
        before = book.estimate(DEEP, 0)
        book.add(0, judged(DEEP, 1.0))
        assert book.estimate(DEEP, 0).acceptance > before.acceptance
        assert book.estimate(DEEP, 0).places == 96

    def test_the_calibration_is_that_of_the_judged_text(self, book: PlanBook) -> None:
        book.add(0, Judgement(DEEP, (Window((True, False) * 30, (0.95, 0.1) * 30),)))
        calibration = book.estimate(DEEP, 0).calibration
        assert calibration.acceptance(0.95) > 0.9
        assert calibration.acceptance(0.1) < 0.1

    @given(st.integers(0, 200), st.integers(1, 200))
    def test_the_upper_bound_is_wilsons(self, agreed: int, more: int) -> None:
        """The share whose lower bound at so many standard errors is what was seen."""
        total = agreed + more
        share, upper = agreed / total, upper_bound(agreed, total)
        assert share <= upper <= 1.0
        error = math.sqrt(upper * (1.0 - upper) / total)
        assert upper - share == pytest.approx(plan_book._QUANTILE * error, abs=1e-9)

    def test_the_more_was_judged_the_less_room_above(self, book: PlanBook) -> None:
        room = []
        for seed in range(4):
            book.add(0, judged(DEEP, 0.7, seed=seed))
            estimate = book.estimate(DEEP, 0)
            assert estimate.optimistic() > estimate.ratio
            room.append(estimate.optimistic() / estimate.ratio)
        assert room[0] > room[1] > room[3]

    def test_what_was_judged_long_ago_says_little(self, book: PlanBook) -> None:
        book.add(0, judged(DEEP, 0.3, n=200))
        estimate = book.estimate(DEEP, 0)
        rooms = [estimate.optimistic(weight) for weight in (1.0, 0.5, 0.1, 0.01, 1e-6)]
        assert rooms == sorted(rooms)
        assert rooms[0] < 1.05 < rooms[-1]

    def test_nothing_is_hoped_for_where_the_best_draft_would_not_pay(self) -> None:
        costs = replace(COSTS, per_token=1.5)
        backend = FakeBackend(ToyModel(end_tokens=frozenset()), n_layer=6, n_ctx=1024, costs=costs)
        found = planner.decide(backend, "toy", CALIBRATION, CONFIG, None, clock=backend.clock)
        assert found.measured is not None
        book = PlanBook(
            found.measured.costs, found.measured.fidelity, backend.sublayers, 1024, CONFIG
        )
        for plan in (SHALLOW, DEEP, Plan.skipping(N, list(range(N)))):
            assert book.estimate(plan, 0).optimistic(1e-6) < 1.0
            book.add(0, judged(plan, 0.9))
            assert book.estimate(plan, 0).optimistic(1e-6) < 1.0

    def test_no_estimate_where_nothing_can_be_verified(self, measured: Measured) -> None:
        config = replace(CONFIG, draft_max_tokens=0)
        assert new_book(measured, config).estimate(DEEP, 0) is None


class TestCandidates:
    def test_all_buckets_are_solved_ahead(
        self, book: PlanBook, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        book.solve_ahead()

        def never(*_: object) -> None:
            raise AssertionError("solved while decoding")

        monkeypatch.setattr(plan_book, "candidate_plans", never)
        found = [book.plans(book.bucket(n)) for n in (1, 512, 513, 2000, N_CTX - 1, N_CTX)]
        assert all(found)

    def test_at_longer_contexts_more_attentions_are_left_out(self, book: PlanBook) -> None:
        """They cost more there, and here they harm no more than an MLP does."""

        def attentions(bucket: int) -> float:
            plans = [p for p in book.plans(bucket) if not p.is_full]
            shares = [sum(i % 2 == 0 for i in p.skipped) / len(p.skipped) for p in plans]
            return sum(shares) / len(shares)

        assert attentions(3) > attentions(0)

    def test_what_was_judged_anywhere_stays_a_candidate(self, book: PlanBook) -> None:
        """Nearest first: a plan that was good in the bucket before is the first to be thought of,
        also where another was judged here already."""
        book.add(0, judged(DEEP, 0.9))
        book.add(1, judged(SHALLOW, 0.9))
        book.add(2, judged(OTHER, 0.9))
        assert book.plans(1)[:3] == (SHALLOW, DEEP, OTHER)
        assert book.plans(3)[:3] == (OTHER, SHALLOW, DEEP)
        assert len(set(book.plans(1))) == len(book.plans(1))

    def test_there_are_never_too_many_to_look_at(self, book: PlanBook) -> None:
        for bucket in range(4):
            for i in range(20):
                book.add(bucket, judged(Plan.skipping(N, [bucket, 4 + i % 8, i // 8]), 0.9))
        assert len(book.plans(2)) <= 3 * CONFIG.plan_shortlist

    def test_another_generator_may_propose(self, book: PlanBook) -> None:
        book.propose(1, [OTHER, OTHER])
        assert book.plans(1).count(OTHER) == 1


class TestForgetting:
    def test_only_so_much_is_kept(self, book: PlanBook) -> None:
        for seed in range(20):
            book.add(0, judged(DEEP, 0.9, seed=seed))
        kept = book.judgement(0, DEEP)
        assert len(kept.agree) <= CONFIG.plan_kept_places
        assert len(kept.agree) > CONFIG.plan_kept_places - 48
        assert kept.windows[-1] == window(0.9, seed=19)

    @pytest.mark.parametrize(("places", "windows"), [(0, 1), (16, 1), (17, 2), (40, 3), (999, 5)])
    def test_the_latest_windows_stay(self, book: PlanBook, places: int, windows: int) -> None:
        for seed in range(5):
            book.add(0, judged(DEEP, 0.9, n=16, seed=seed))
        book.forget(0, DEEP, places)
        assert book.judgement(0, DEEP).windows == tuple(
            window(0.9, 16, seed) for seed in range(5 - windows, 5)
        )

    def test_what_is_not_known_cannot_be_forgotten(self, book: PlanBook) -> None:
        book.forget(0, DEEP, 3)
        assert not book.changed


windows = st.lists(st.tuples(st.booleans(), st.integers(0, 1000)), min_size=1, max_size=20).map(
    lambda rows: Window(tuple(a for a, _ in rows), tuple(p / 1000 for _, p in rows))
)
plans = st.sets(st.integers(0, N - 1)).map(lambda s: Plan.skipping(N, s))
known = st.dictionaries(
    st.integers(0, 5),
    st.dictionaries(plans, st.lists(windows, min_size=1, max_size=3), max_size=3),
    max_size=3,
)


def spoilt(content: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The same with one thing wrong, by name."""

    def changed(change) -> dict[str, Any]:
        copy = json.loads(json.dumps(content))
        change(copy)
        return copy

    def set_window(name: str, value: object):
        def change(c: dict[str, Any]) -> None:
            c["buckets"][0]["judged"][0]["windows"][0][name] = value

        return change

    return {
        "no ranges": changed(lambda c: c.pop("first_tokens")),
        "no buckets": changed(lambda c: c.pop("buckets")),
        "buckets are a number": changed(lambda c: c.update(buckets=3)),
        "a bucket is a word": changed(lambda c: c["buckets"][0].update(bucket="near")),
        "a bucket is infinite": changed(lambda c: c["buckets"][0].update(bucket=math.inf)),
        "a bucket too far": changed(lambda c: c["buckets"][0].update(bucket=64)),
        "a bucket below none": changed(lambda c: c["buckets"][0].update(bucket=-1)),
        "a sublayer too many": changed(lambda c: c["buckets"][0]["judged"][0].update(skipped=[N])),
        "a sublayer in a shortlist": changed(lambda c: c["buckets"][0].update(shortlist=[[-1]])),
        "judged on nothing": changed(lambda c: c["buckets"][0]["judged"][0].update(windows=[])),
        "an empty window": changed(
            lambda c: c["buckets"][0]["judged"][0]["windows"][0].update(agree="", probability=[])
        ),
        "neither right nor wrong": changed(set_window("agree", "012")),
        "a probability missing": changed(set_window("probability", [0.5])),
        "a probability above 1": changed(set_window("probability", [1.5] * 48)),
        "no probability": changed(set_window("probability", [math.nan] * 48)),
        "words for probabilities": changed(set_window("probability", ["high"] * 48)),
    }


class TestOnDisk:
    @given(known)
    def test_round_trip(self, measured: Measured, content) -> None:
        book, again = new_book(measured), new_book(measured)
        for bucket, entries in content.items():
            for plan, own in entries.items():
                book.add(bucket, Judgement(plan, tuple(own)))
        again.read(json.loads(json.dumps(book.to_json())))
        for bucket, entries in content.items():
            for plan in entries:
                assert again.judgement(bucket, plan) == book.judgement(bucket, plan)
        assert again.to_json() == book.to_json()
        for bucket in range(4):
            assert again.plans(bucket) == book.plans(bucket)

    def test_reading_is_no_change(self, measured: Measured, book: PlanBook) -> None:
        book.solve_ahead()
        book.add(0, judged(DEEP, 0.9))
        again = new_book(measured)
        again.read(book.to_json())
        again.solve_ahead()
        assert not again.changed
        again.add(0, judged(DEEP, 0.9))
        assert again.changed

    def test_shortlists_hold_for_the_profile_they_were_solved_from(
        self, measured: Measured, book: PlanBook
    ) -> None:
        strange = Plan.skipping(N, [0, 3, 5, 7, 9, 10])
        book.propose(0, [strange])
        book.add(0, judged(DEEP, 0.9))
        content = book.to_json()
        same, other = new_book(measured), new_book(measured)
        same.read(content)
        assert strange in same.plans(0)
        other.read({**content, "latency_at": content["latency_at"] + 1.0})
        assert strange not in other.plans(0)
        assert other.judgement(0, DEEP) == book.judgement(0, DEEP), "text has no profile"

    def test_a_bucket_that_was_never_solved_is_solved_after_reading(
        self, measured: Measured, book: PlanBook
    ) -> None:
        book.add(2, judged(OTHER, 0.9))
        again = new_book(measured)
        again.read(book.to_json())
        assert len(again.plans(2)) > 1

    def test_other_ranges_are_judged_afresh(self, measured: Measured, book: PlanBook) -> None:
        book.add(0, judged(DEEP, 0.9))
        other = new_book(measured, replace(CONFIG, bucket_first_tokens=100))
        other.read(book.to_json())
        assert other.judgement(0, DEEP) is None

    def test_windows_and_short_heads_are_kept(self, measured: Measured, book: PlanBook) -> None:
        windowed = Plan((Mode(ModeKind.WINDOW, 4, 64), *SHALLOW.modes[1:]))
        for plan in (windowed, SHALLOW, replace(SHALLOW, head_rows=0)):
            book.add(0, judged(plan, 0.9))
        again = new_book(measured)
        again.read(json.loads(json.dumps(book.to_json())))
        for plan in (windowed, SHALLOW):
            assert again.judgement(0, plan) == book.judgement(0, plan)

    def test_a_head_that_costs_nothing_known_is_left_out(
        self, measured: Measured, book: PlanBook
    ) -> None:
        """It was kept on another machine, or short heads have been switched off since."""
        short = replace(SHALLOW, head_rows=40)
        book.add(0, judged(short, 0.9))
        content = json.loads(json.dumps(book.to_json()))
        assert content["buckets"][0]["judged"][0]["skipped"]["head"] == [40]
        again = new_book(measured)
        again.read(content)
        assert again.judgement(0, short) is None

    def content(self, measured: Measured) -> dict[str, Any]:
        book = new_book(measured)
        book.solve_ahead()
        book.add(0, judged(DEEP, 0.9))
        return book.to_json()

    def test_anything_else_is_refused_whole(self, measured: Measured) -> None:
        for name, wrong in spoilt(self.content(measured)).items():
            book = new_book(measured)
            with pytest.raises(INVALID):
                book.read(wrong)
            assert book.judgement(0, DEEP) is None, name
            assert book.to_json()["buckets"] == [], name

    def test_damage_costs_one_warning(
        self, measured: Measured, decision: Decision, tmp_path: Path
    ) -> None:
        key = planner.book_key(toy(), "toy")
        for wrong in spoilt(self.content(measured)).values():
            said: list[str] = []
            store = Store(tmp_path, warn=said.append)
            store.save(key, wrong)
            for _ in range(2):
                book = planner.open_book(toy(), decision, store, key, CONFIG)
            assert len(said) == 1
            assert "no valid measurement" in said[0]
            # what the decision rests on is there all the same
            for finalist in decision.finalists:
                assert book.judgement(0, finalist.judgement.plan) == finalist.judgement

    def test_an_opened_book_knows_what_was_decided_from_and_learned_since(
        self, decision: Decision, tmp_path: Path
    ) -> None:
        key = planner.book_key(toy(), "toy")
        said: list[str] = []
        store = Store(tmp_path, warn=said.append)
        book = planner.open_book(toy(), decision, store, key, CONFIG)
        assert book.changed, "plans of every bucket were solved"
        planner.save_book(store, key, book)
        assert not book.changed
        again = planner.open_book(toy(), decision, store, key, CONFIG)
        assert not again.changed, "nothing new"
        again.add(1, judged(DEEP, 0.6))
        planner.save_book(store, key, again)
        third = planner.open_book(toy(), decision, store, key, CONFIG)
        assert third.judgement(1, DEEP) == again.judgement(1, DEEP)
        assert third.plans(1) == again.plans(1)
        assert said == []

    def test_two_that_learn_leave_a_whole_file(self, decision: Decision, tmp_path: Path) -> None:
        """The latest wins; neither reads half of the other's."""
        key, store = planner.book_key(toy(), "toy"), Store(tmp_path)
        one, two = (planner.open_book(toy(), decision, store, key, CONFIG) for _ in range(2))
        one.add(3, judged(DEEP, 0.6))
        two.add(3, judged(OTHER, 0.6))
        planner.save_book(store, key, one)
        planner.save_book(store, key, two)
        after = planner.open_book(toy(), decision, store, key, CONFIG)
        assert after.judgement(3, OTHER) == two.judgement(3, OTHER)
        assert len(list(tmp_path.iterdir())) == 1

    def test_without_a_measurement_there_is_no_book(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="nothing was measured"):
            planner.open_book(toy(), Decision("off", "off"), Store(tmp_path), {}, CONFIG)
