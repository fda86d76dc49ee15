"""Windows of attention as modes of a plan: their costs, what they keep, how they are chosen, kept,
shown, and switched off. That a window computes what it should is shown in native/test_windows.py.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from clockwork import Clockwork, Truth, attention, mlp
from fakes import Costs as ToyCosts
from fakes import FakeBackend, ToyModel

from knapspec_edge.apps import plan_report
from knapspec_edge.apps.plan import PlanReport
from knapspec_edge.config import DEFAULTS, Config, without_windows
from knapspec_edge.latency.costs import Costs
from knapspec_edge.latency.fidelity import (
    Fidelity,
    ItemCount,
    Losses,
    measure_fidelity,
    target_text,
)
from knapspec_edge.latency.profile import LatencyProfile
from knapspec_edge.latency.profiler import measure_latency
from knapspec_edge.latency.store import INVALID
from knapspec_edge.latency.windows import windows_at
from knapspec_edge.records import (
    FULL,
    GREEDY,
    SKIP,
    Kind,
    Mode,
    ModeKind,
    Plan,
    parse_mode,
)
from knapspec_edge.search import plan_file, planner
from knapspec_edge.search.acceptance import Judgement
from knapspec_edge.search.candidates import candidate_plans, cuts
from knapspec_edge.search.outlook import describe, outlook
from knapspec_edge.search.plan_book import PlanBook
from knapspec_edge.search.throughput import Window

NARROW, WIDE = Mode(ModeKind.WINDOW, 4, 256), Mode(ModeKind.WINDOW, 4, 1024)
# a step of 8.1 ms without any context; attention costs as much as an MLP at 4,000 tokens
TRUTH = Truth.alternating(
    4, attention(0.2, 2e-4, can_window=True), mlp(0.8), fixed_ms=0.4, head_ms=1.5
)
ATTENTION = tuple(i for i, s in enumerate(TRUTH.sublayers) if s.kind is Kind.ATTENTION)


def with_window(mode: Mode, indices: tuple[int, ...] = ATTENTION, n: int = TRUTH.n) -> Plan:
    return Plan(tuple(mode if i in indices else FULL for i in range(n)))


def measured(
    truth: Truth = TRUTH, n_ctx: int = 8192, config: Config = DEFAULTS, seconds: float = 60.0
) -> LatencyProfile:
    machine = Clockwork(truth, n_ctx)
    return measure_latency(machine, budget_seconds=seconds, config=config, clock=machine.clock)


@pytest.fixture(scope="module")
def profile() -> LatencyProfile:
    return measured()


@pytest.fixture(scope="module")
def costs(profile: LatencyProfile) -> Costs:
    return Costs(profile)


class TestModes:
    def test_words(self) -> None:
        assert str(NARROW) == "window:4+256"
        for mode in (FULL, SKIP, NARROW, WIDE, Mode(ModeKind.WINDOW, 0, 1)):
            assert parse_mode(str(mode)) == mode
        for text in ("window:4+0", "window:4", "window:-1+8", "window:4+1e3", "half", ""):
            with pytest.raises(ValueError, match="it has to be full, skip or window"):
                parse_mode(text)

    def test_a_plan_says_what_it_windows(self) -> None:
        plan = Plan((SKIP, FULL, NARROW, FULL))
        assert (plan.skipped, plan.windowed, plan.is_full) == ((0,), (2,), False)

    def test_only_where_most_of_the_context_is_left_out(self) -> None:
        machine = Clockwork(TRUTH, 8192)
        found = {n: dict(windows_at(machine, n, DEFAULTS)) for n in (256, 519, 520, 2056, 8000)}
        assert found[256] == found[519] == {}
        assert found[520] == {NARROW: ATTENTION}
        assert found[2056] == found[8000] == {NARROW: ATTENTION, WIDE: ATTENTION}

    def test_not_where_attention_slides_or_cannot_be_windowed(self) -> None:
        sliding = attention(0.2, 2e-4, window_cells=1024, can_window=True)
        plain = attention(0.2, 2e-4)
        able = attention(0.2, 2e-4, can_window=True)
        truth = Truth.alternating(3, sliding, mlp(), plain, mlp(), able, mlp())
        assert dict(windows_at(Clockwork(truth, 8192), 1024, DEFAULTS)) == {NARROW: (4,)}


class TestCosts:
    def test_a_window_is_timed_as_it_is(self, profile: LatencyProfile, costs: Costs) -> None:
        assert costs.window_modes == [WIDE, NARROW]
        for context in (2048, 5000, 8000):
            for mode in (NARROW, WIDE):
                if context < 2 * mode.window_tokens:
                    continue
                for indices in (ATTENTION, ATTENTION[:1]):
                    plan = with_window(mode, indices)
                    exact = TRUTH.ms(context, plan=plan)
                    assert costs.draft_ms(plan, context) == pytest.approx(exact, rel=0.01)
                saved = 2e-4 * (context - mode.window_tokens - 4)
                found = costs.saving_ms(ATTENTION[0], context, mode)
                assert found == pytest.approx(saved, rel=0.05)
        for sample in profile.samples:
            if sample.windowed:
                assert sample.context_tokens >= 2 * (sample.window.window_tokens + 4)

    def test_skips_and_steps_are_what_they_are_without_windows(self, costs: Costs) -> None:
        for context in (256, 3000, 8000):
            assert costs.step_ms(context) == pytest.approx(TRUTH.ms(context), rel=0.01)
            for i in (0, 1):
                exact = TRUTH.works[i].ms(context)
                assert costs.saving_ms(i, context) == pytest.approx(exact, rel=0.05)
        mixed = Plan((SKIP, SKIP, *with_window(NARROW).modes[2:]))
        exact = TRUTH.ms(6000, 1, (0, 1), plan=mixed)
        assert costs.draft_ms(mixed, 6000) == pytest.approx(exact, rel=0.01)

    def test_what_was_not_measured_saves_nothing(self, costs: Costs) -> None:
        assert costs.saving_ms(0, 256, NARROW) == 0.0
        assert costs.saving_ms(0, 1000, WIDE) == 0.0
        assert costs.saving_ms(0, 8000, Mode(ModeKind.WINDOW, 4, 300)) == 0.0
        assert costs.saving_ms(1, 8000, NARROW) == 0.0, "an MLP"
        assert costs.windows(0, 256) == costs.windows(1, 8000) == []
        assert costs.windows(0, 8000) == [WIDE, NARROW]

    def test_without_windows_none_is_measured(self) -> None:
        without = measured(config=without_windows(DEFAULTS), seconds=20.0)
        assert not any(s.windowed for s in without.samples)
        assert Costs(without).window_modes == []

    def test_even_a_short_budget_sees_each_window_once(self) -> None:
        assert Costs(measured(seconds=2.0)).window_modes == [WIDE, NARROW]

    def test_json(self, profile: LatencyProfile) -> None:
        assert LatencyProfile.from_json(json.loads(json.dumps(profile.to_json()))) == profile

    def test_a_profile_of_an_earlier_release_has_none(self, profile: LatencyProfile) -> None:
        data = json.loads(json.dumps(profile.to_json()))
        data["samples"] = [s for s in data["samples"] if s["window"] is None]
        for sample in data["samples"]:
            del sample["window"], sample["windowed"]
        old = LatencyProfile.from_json(data)
        assert Costs(old).window_modes == []
        assert Costs(old).step_ms(3000) == pytest.approx(TRUTH.ms(3000), rel=0.01)

    @pytest.mark.parametrize(
        "damage",
        [
            {"windowed": "fff"},  # a sublayer that does not exist
            {"windowed": "0"},  # a window on nothing
            {"window": None},
            {"window": "skip"},
            {"window": "window:4+x"},
            {"skipped": "1"},  # on what is left out
        ],
    )
    def test_damaged(self, profile: LatencyProfile, damage: dict[str, Any]) -> None:
        data = json.loads(json.dumps(profile.to_json()))
        next(s for s in data["samples"] if s["windowed"] != "0").update(damage)
        with pytest.raises(INVALID):
            LatencyProfile.from_json(data)


def counted(index: int, mode: Mode, agreed: int, total: int = 100) -> ItemCount:
    return ItemCount(index, str(mode), 2048, agreed, total)


class TestFidelity:
    SUBLAYERS = TRUTH.sublayers

    def test_windows_are_counted_like_skips(self) -> None:
        model = ToyModel(end_tokens=frozenset(), default_harm=0.0, harm={0: 0.2, 2: 0.2})
        backend = FakeBackend(model, n_layer=2, n_ctx=256, can_window=True)
        text = target_text(backend, list(range(1, 20)), 60)
        found = measure_fidelity(backend, text, [0], 16, windows=[(NARROW, (0, 2))])
        counts = {(c.index, c.mode): c for c in found.counts}
        assert set(counts) == {(0, "skip"), (0, str(NARROW)), (2, str(NARROW))}
        assert counts[0, "skip"].total == 60
        # both together, each with half of the misses
        assert counts[0, str(NARROW)].total == counts[2, str(NARROW)].total == 120
        agreed = counts[2, str(NARROW)].agreed - 60
        own = Plan((NARROW, FULL, NARROW, FULL))
        picks = [model.pick([*text.prompt, *text.window[: k + 1]], GREEDY, own) for k in range(60)]
        target = [
            model.pick([*text.prompt, *text.window[: k + 1]], GREEDY, None) for k in range(60)
        ]
        exact = sum(a.token == b.token for a, b in zip(picks, target, strict=True))
        assert 0 < agreed == exact < 60
        part = counts[2, str(NARROW)]
        assert (part.agreed / part.total) ** 2 == pytest.approx(1.0 - (60 - exact) / 60, abs=0.1)
        assert found.covers(0, 20, NARROW)
        assert not found.covers(0, 20, WIDE)
        again = Fidelity.from_json(json.loads(json.dumps(found.to_json())), 4)
        assert again.counts == found.counts

    def test_modes_do_not_mix(self) -> None:
        found = Fidelity((counted(0, SKIP, 50), counted(0, NARROW, 90), counted(0, WIDE, 99)))
        losses = Losses(found, self.SUBLAYERS)
        for mode, agreed in ((SKIP, 50), (NARROW, 90), (WIDE, 99)):
            assert losses.items(mode)[0].agreement == agreed / 100
        modes = [SKIP, FULL, NARROW, *[FULL] * 5]
        expected = losses.items(SKIP)[0].expected * losses.items(NARROW)[2].expected
        assert losses.agreement(Plan(tuple(modes))) == pytest.approx(expected)
        assert losses.agreement(Plan.full(8)) == 1.0

    def test_what_was_not_counted(self) -> None:
        """A wider window loses what a narrower one does, at most; a narrower one is not known."""
        found = Fidelity((counted(0, SKIP, 50), counted(0, NARROW, 90)))
        losses = Losses(found, self.SUBLAYERS)
        assert losses.items(WIDE) == losses.items(NARROW)
        assert losses.items(WIDE)[2].agreement == 0.9, "as its neighbours do"
        for unknown in (Mode(ModeKind.WINDOW, 4, 128), Mode(ModeKind.WINDOW, 0, 512)):
            item = losses.items(unknown)[0]
            assert (item.expected, item.probed) == (DEFAULTS.window_expected_agreement, False)
        # all of SmolLM2's together were seen to keep about 0.9
        assert 0.8 < DEFAULTS.window_expected_agreement**30 < 0.95

    def test_a_count_in_no_known_mode_is_refused(self) -> None:
        data = Fidelity((counted(0, NARROW, 90),)).to_json()
        data["counts"][0][1] = "window:none"
        with pytest.raises(INVALID):
            Fidelity.from_json(data, 8)


class TestKnapsack:
    def test_windows_where_the_context_is_long(self, costs: Costs) -> None:
        found = {}
        for context in (256, 1000, 8000):
            plans = candidate_plans(costs, Fidelity(), context, TRUTH.sublayers)
            found[context] = {str(m) for p in plans for m in p.modes} - {"full"}
        assert found[256] == set()
        assert found[1000] == {"window:4+256"}
        # a wide one costs more and nothing was counted that would speak for it
        assert found[8000] == {"window:4+256"}
        best = max(
            candidate_plans(costs, Fidelity(), 8000, TRUTH.sublayers), key=lambda p: len(p.windowed)
        )
        assert best.windowed == ATTENTION

    def test_each_item_takes_one_of_its_modes_and_no_choice_is_better(self, costs: Costs) -> None:
        """Against all 4^4 x 2^4 plans."""
        context = 8000
        counts = [counted(i, SKIP, 99 - 3 * i) for i in range(8)]
        for i in ATTENTION:
            counts += [counted(i, NARROW, 99 - i), counted(i, WIDE, 100 - i // 4)]
        fidelity = Fidelity(tuple(counts))
        losses = Losses(fidelity, TRUTH.sublayers)
        options = [(FULL, WIDE, NARROW, SKIP) if i in ATTENTION else (FULL, SKIP) for i in range(8)]
        found = cuts(costs, fidelity, context, TRUTH.sublayers)
        assert len({mode for cut in found for mode in cut.plan.modes}) == 4
        weights, unit_ms = costs.integer_weights(
            context, largest_error=DEFAULTS.plan_rounding_error
        )

        def units(i: int, mode: Mode) -> int:
            if mode == SKIP:
                return int(weights[i])
            return round(costs.saving_ms(i, context, mode) / unit_ms)

        best: dict[int, float] = {}
        for modes in itertools.product(*options):
            saved = sum(units(i, m) for i, m in enumerate(modes))
            best[saved] = max(best.get(saved, 0.0), losses.agreement(Plan(modes)))
        for cut in found:
            assert cut.saving_units == sum(units(i, m) for i, m in enumerate(cut.plan.modes))
            assert cut.agreement == pytest.approx(losses.agreement(cut.plan))
            assert cut.agreement == pytest.approx(
                max(a for s, a in best.items() if s >= cut.saving_units)
            )

    def test_switched_off(self, costs: Costs) -> None:
        config = without_windows(DEFAULTS)
        assert candidate_plans(costs, Fidelity(), 8000, TRUTH.sublayers, config) == []


class TestBook:
    PLAN = Plan((NARROW, SKIP, WIDE, FULL, NARROW, FULL, SKIP, FULL))

    def book(self, costs: Costs, config: Config = DEFAULTS) -> PlanBook:
        return PlanBook(costs, Fidelity(), TRUTH.sublayers, 8192, config)

    def judged(self, plan: Plan) -> Judgement:
        return Judgement(plan, (Window((True,) * 30 + (False,) * 2, (0.5,) * 32),))

    def test_windows_are_kept(self, costs: Costs) -> None:
        book = self.book(costs)
        book.add(4, self.judged(self.PLAN))
        book.propose(4, [self.PLAN, Plan.skipping(8, [1])])
        data = json.loads(json.dumps(book.to_json()))
        again = self.book(costs)
        again.read(data)
        assert again.judgement(4, self.PLAN) == self.judged(self.PLAN)
        assert set(again.plans(4)) == {self.PLAN, Plan.skipping(8, [1])}
        assert again.to_json() == book.to_json()

    def test_books_of_earlier_releases_are_read(self, costs: Costs) -> None:
        book = self.book(costs)
        data = book.to_json()
        windows = [{"agree": "11", "probability": [0.5, 0.5]}]
        judged = [{"skipped": [1, 3], "windows": windows}]
        data["buckets"] = [{"bucket": 0, "shortlist": [[1]], "judged": judged}]
        book.read(data)
        assert book.judgement(0, Plan.skipping(8, [1, 3])) is not None

    @pytest.mark.parametrize(
        "modes",
        [
            {"window:4+256": [8]},
            {"window:4+256": [0], "skip": [0]},
            {"window:4": [0]},
            {"skip": "x"},
            {"skip": 3},
        ],
    )
    def test_damaged(self, costs: Costs, modes: Any) -> None:
        book = self.book(costs)
        data = book.to_json()
        data["buckets"] = [{"bucket": 0, "shortlist": [modes], "judged": []}]
        with pytest.raises(INVALID):
            book.read(data)

    def test_switched_off_what_was_learned_is_not_used(self, costs: Costs) -> None:
        book = self.book(costs)
        book.add(4, self.judged(self.PLAN))
        book.plans(4)
        off = self.book(costs, without_windows(DEFAULTS))
        off.read(book.to_json())
        assert off.plans(4) == ()
        assert self.PLAN in self.book_read(book, costs).plans(4)

    def book_read(self, book: PlanBook, costs: Costs) -> PlanBook:
        again = self.book(costs)
        again.read(book.to_json())
        return again


# Attention takes most of a step; a window of it harms little, its absence much.
DEAR = ToyCosts(0.2, 0.3, attention_ms=0.05, attention_ms_per_1k=2.0, mlp_ms=0.3, per_token=0.05)
AT = 1200
CALIBRATION = [1 + (7 * i * i) % 22 for i in range(AT + 50)]


class Toy(ToyModel):
    """Windows do little harm, skips much."""

    def logits(self, tokens: Any, plan: Plan | None) -> Any:
        if plan is not None:
            skipped = Plan.skipping(len(plan.modes), list(plan.skipped))
            rare = Toy(**{**vars(self), "default_harm": 0.002})
            values = ToyModel.logits(
                rare,
                tokens,
                Plan(tuple(m if m.kind is ModeKind.WINDOW else FULL for m in plan.modes)),
            )
            return values if skipped.is_full else ToyModel.logits(self, tokens, skipped)
        return super().logits(tokens, plan)


def toy(can_window: bool = True) -> FakeBackend:
    model = Toy(end_tokens=frozenset(), default_harm=0.4)
    return FakeBackend(
        model, n_layer=4, n_ctx=2048, costs=DEAR, can_window=can_window, slice_tokens=256
    )


@pytest.fixture(scope="module")
def decided() -> tuple[FakeBackend, planner.Decision]:
    backend = toy()
    config = replace(planner.at_context(DEFAULTS, AT), dp_measure_share=0.0)
    decision = planner.decide(backend, "toy", CALIBRATION, config, None, clock=backend.clock)
    return backend, decision


class TestDecision:
    def test_windows_win_where_attention_is_most_of_a_step(
        self, decided: tuple[FakeBackend, planner.Decision]
    ) -> None:
        backend, decision = decided
        assert decision.state == "on", decision.reason
        assert decision.draft is not None
        plan = decision.draft.plan
        assert plan.windowed == (0, 2, 4, 6)
        assert plan.skipped == ()
        assert "a draft with 4 of 8 sublayers windowed" in decision.reason
        assert decision.predicted_ratio > 1.2
        measured = decision.measured
        assert measured is not None
        modes = {c.mode for c in measured.fidelity.counts}
        assert modes == {"skip", str(NARROW)}, "a window of 1,024 tokens has nothing to save yet"

    def test_it_is_shown(self, decided: tuple[FakeBackend, planner.Decision]) -> None:
        backend, decision = decided
        found = outlook(decision, backend.sublayers, backend.settings)
        assert [i.mode for i in found.items[:2]] == ["window:4+256", "full"]
        assert found.best is not None
        assert describe(found.best).startswith("a draft with 4 windowed, γ = ")
        data = json.loads(json.dumps(found.to_json()))
        assert data["plan"]["modes"] == {str(i): "window:4+256" for i in (0, 2, 4, 6)}
        assert data["judged"][0]["n_windowed"] == 4
        assert data["curve"][-1]["modes"]
        report = PlanReport(
            model="toy", path="toy.gguf", architecture="toy", fingerprint="f", device="CPU",
            settings_reason=None, outlook=found, certification=None, elapsed_seconds=1.0,
            shown_at=0.0, warnings=(),
        )  # fmt: skip
        picture = plan_report.picture(found)
        assert dict(picture.rows)["attention"] == plan_report.WINDOWED * 4
        text = str(plan_report.sections(report))
        assert "4 with window:4+256" in text
        assert "windowed" in text

    def test_it_is_written_to_a_plan_file_and_read(
        self, decided: tuple[FakeBackend, planner.Decision], tmp_path: Path
    ) -> None:
        backend, decision = decided
        assert decision.draft is not None
        plan_file.save(tmp_path / "p.json", decision.draft, backend.sublayers, "f")
        assert plan_file.load(tmp_path / "p.json", backend.sublayers, "f") == decision.draft
        data = json.loads((tmp_path / "p.json").read_text())
        assert data["sublayers"][0]["mode"] == "window:4+256"

    def test_switched_off(self) -> None:
        backend = toy()
        config = without_windows(replace(planner.at_context(DEFAULTS, AT), dp_measure_share=0.0))
        decision = planner.decide(backend, "toy", CALIBRATION, config, None, clock=backend.clock)
        assert not any(f.judgement.plan.windowed for f in decision.finalists)
        assert decision.state == "off"

    def test_a_model_that_cannot_is_not_asked(self) -> None:
        backend = toy(can_window=False)
        config = replace(planner.at_context(DEFAULTS, AT), dp_measure_share=0.0)
        decision = planner.decide(backend, "toy", CALIBRATION, config, None, clock=backend.clock)
        assert not any(f.judgement.plan.windowed for f in decision.finalists)
