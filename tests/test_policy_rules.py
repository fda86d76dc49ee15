"""How each policy chooses, on cases worked by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from fake_vocabulary import FakeVocabulary
from fakes import FakeBackend, ToyModel, sublayers_of
from numpy.typing import NDArray
from test_policies import Bench, created, setting_of

from knapspec_edge import policies
from knapspec_edge.config import DEFAULTS
from knapspec_edge.decode.policy import FixedPolicy, Guess
from knapspec_edge.decode.session import Session
from knapspec_edge.errors import ContextError, Interrupted, ModelError, PlanError
from knapspec_edge.latency.store import Store
from knapspec_edge.policies import masked
from knapspec_edge.policies.asd import AttentionSimilarity, most_similar
from knapspec_edge.policies.clasp import skipped_layers
from knapspec_edge.policies.controller import ThresholdController
from knapspec_edge.policies.draft_model import DraftModel, check_vocabulary
from knapspec_edge.policies.draft_verify import optimise
from knapspec_edge.policies.dynamic_exit import DynamicExit, ShadowTokens, best_exit
from knapspec_edge.policies.lookup import NgramIndex
from knapspec_edge.policies.lookup_llama_cpp import LlamaCppLookup
from knapspec_edge.policies.random_plan import drawn
from knapspec_edge.policies.setting import Setting
from knapspec_edge.policies.swift import every_second_layer, most_valued
from knapspec_edge.records import GREEDY, Plan, RoundTimes


def round_of(drafted: int, accepted: int) -> RoundTimes:
    return RoundTimes(10, drafted, 1.0, 1.0, accepted=accepted, tokens=accepted + 1)


# ---------------------------------------------------------------------------------------------
# Exits


def test_an_exit_leaves_out_all_layers_behind_it() -> None:
    assert masked.exit_plan(sublayers_of(4), 1).skipped == (2, 3, 4, 5, 6, 7)
    assert masked.exit_plan(sublayers_of(4), 3).skipped == (6, 7)
    assert masked.exit_plan(sublayers_of(3, parallel=True), 2).skipped == (2,)


def fixed(name: str, n_layer: int) -> tuple[Plan, int, float]:
    policy = policies.create(name, Setting(FakeBackend(n_layer=n_layer)))
    assert isinstance(policy, FixedPolicy)
    draft = policy.draft(10)
    assert draft is not None
    return draft.plan, draft.max_tokens, draft.min_probability


def test_layerskip_exits_after_a_quarter_of_the_layers() -> None:
    plan, max_tokens, threshold = fixed("layerskip", 8)
    assert plan.skipped == tuple(range(4, 16))
    assert (max_tokens, threshold) == (6, 0.0)
    assert fixed("layerskip", 32)[0].skipped == tuple(range(16, 64))  # 8 of 32
    assert fixed("layerskip", 2)[0].skipped == (2, 3)
    with pytest.raises(PlanError, match="exits after layer 1, and this model has 1"):
        fixed("layerskip", 1)


def test_kangaroo_exits_after_two_layers_and_stops_by_confidence() -> None:
    plan, max_tokens, threshold = fixed("kangaroo", 8)
    assert plan.skipped == tuple(range(4, 16))
    assert (max_tokens, threshold) == (6, 0.6)
    policy = policies.create("kangaroo", Setting(FakeBackend(n_layer=8)))
    assert policy.go_on([])
    assert policy.go_on([0.2, 0.6])
    assert not policy.go_on([0.9, 0.59])
    with pytest.raises(PlanError, match="exits after layer 2, and this model has 2"):
        fixed("kangaroo", 2)


def test_del_takes_the_exit_of_the_most_tokens_per_layer() -> None:
    """Of 4 layers: plain 1/4. At exit 1, α = 0.5: γ = 1 gives 1.5/5 = 0.3, γ = 2 gives 1.75/6 =
    0.2917. At exit 2, α = 0.9: γ = 1 gives 1.9/6 = 0.3167, γ = 2 gives 2.71/8 = 0.3388, γ = 3 gives
    3.439/10 = 0.3439, γ = 4 gives 4.0951/12 = 0.3413. At exit 3, α = 0.9: 1.9/7 at best 0.271."""
    assert best_exit([0.5, 0.9, 0.9], 4, 17) == (2, 3)
    assert best_exit([0.5, 0.9, 0.9], 4, 2) == (2, 2)
    assert best_exit([0.5, 0.1, 0.1], 4, 17) == (1, 1)
    assert best_exit([0.2, 0.3, 0.6], 4, 17) is None  # 1.2/5, 1.3/6, 1.6/7: all below 1/4
    # equally good: 1.25/5 is 1/4
    assert best_exit([0.25, 0.0, 0.0], 4, 17) is None


def test_shadow_tokens_fade() -> None:
    """Decay 0.5, one exit right, wrong, right: 0.25 + 1 of 0.25 + 0.5 + 1."""
    shadow = ShadowTokens(2, 0.5)
    assert list(shadow.acceptance()) == [0.0, 0.0]
    right = np.array([[True, False, True], [False, False, False]])
    sure = np.array([[0.8, 0.4, 0.9], [0.3, 0.3, 0.3]], dtype=np.float32)
    shadow.add(right[:, :2], sure[:, :2])
    shadow.add(right[:, 2:], sure[:, 2:])
    assert shadow.acceptance() == pytest.approx([1.25 / 1.75, 0.0])
    # right ones were (0.25 x 0.8 + 0.9) / 1.25 = 0.88 sure, wrong ones 0.4
    assert shadow.threshold(0) == pytest.approx((0.88 + 0.4) / 2, abs=1e-6)
    assert shadow.threshold(1) == 1.0  # none was right: nothing is sure enough
    never_wrong = ShadowTokens(1, 0.5)
    never_wrong.add(np.array([[True]]), np.array([[0.7]], dtype=np.float32))
    assert never_wrong.threshold(0) == 0.0


def test_del_compares_exits_with_the_target_on_verified_tokens() -> None:
    """A model whose last two layers do nothing: the exit before them is always right."""
    model = ToyModel(end_tokens=frozenset(), default_harm=1.0)
    model.harm = dict.fromkeys(range(4, 8), 0.0)
    backend = FakeBackend(model, n_layer=4, n_ctx=128)
    policy = policies.create("del", Setting(backend, clock=backend.clock))
    assert isinstance(policy, DynamicExit)
    stats = list_of(backend, policy, 60)
    assert policy.shadow.acceptance()[1] == policy.shadow.acceptance()[2] == 1.0
    assert policy.shadow.acceptance()[0] < 0.5
    # E/(γ l + 4) with α = 1 grows with γ: (17 + 1) / (17 x 2 + 4)
    assert policy.plan == masked.exit_plan(backend.sublayers, 2)
    assert policy.max_tokens == DEFAULTS.del_max_draft
    assert stats.draft_n_accepted == stats.draft_n > 0
    # shadow tokens: the prompt's last ones first, then each verified one once
    windows = [w for w in backend.calls("branches")]
    assert windows[0] == (0, (3, 1, 4, 1, 5))
    ends = [start + len(tokens) for start, tokens in windows]
    assert all(start == end for (start, _), end in zip(windows[1:], ends, strict=False))


def list_of(backend: FakeBackend, policy: Any, n: int) -> Any:
    """Statistics of an answer."""
    session = Session(backend, clock=backend.clock)
    generation = session.generate([3, 1, 4, 1, 5], max_tokens=n, policy=policy)
    assert len(list(generation)) == n
    backend.check_ledger()
    return generation.stats


# ---------------------------------------------------------------------------------------------
# Similarity


def test_asd_leaves_out_the_most_similar_attention() -> None:
    assert most_similar({2: 0.9, 4: 0.99, 6: 0.95, 8: 0.7}, 0.5) == [4, 6]
    assert most_similar({2: 0.9, 4: 0.9, 6: 0.9}, 1 / 3) == [2]  # of equals the earlier
    assert most_similar({2: 0.9}, 0.0) == []


def test_asd_measures_attention_between_first_and_last_layer() -> None:
    """On the fake, a sublayer adds the more the more harm its absence does."""
    model = ToyModel(end_tokens=frozenset(), default_harm=0.3)
    model.harm = {2: 0.4, 4: 0.0, 6: 0.02, 8: 0.5, 5: 0.0, 7: 0.0}
    backend = FakeBackend(model, n_layer=6, n_ctx=128)
    policy = policies.create("asd", Setting(backend))
    assert isinstance(policy, AttentionSimilarity)
    assert policy.candidates == (2, 4, 6, 8)
    list_of(backend, policy, 40)
    assert policy.plan is not None
    assert policy.plan.skipped == (4, 6)
    assert policy.n_searches == 1
    with pytest.raises(PlanError, match="no attention sublayers of their own"):
        policies.create("asd", Setting(FakeBackend(n_layer=6, parallel=True)))


class Angles:
    """Branches on the plane: a sublayer turns a state by its angle, in degrees."""

    def __init__(self, turns: Sequence[float]) -> None:
        self._turns = turns
        self.calls: list[tuple[int, int]] = []

    def embed(self, last: int) -> NDArray[np.float32]:
        return self._at(sum(self._turns[: last + 1]))[np.newaxis]

    def _at(self, degrees: float) -> NDArray[np.float32]:
        a = math.radians(degrees)
        return np.array([math.cos(a), math.sin(a)], dtype=np.float32)

    def apply(self, sublayer: int, states: NDArray[np.float32]) -> NDArray[np.float32]:
        self.calls.append((sublayer, len(states)))
        a = math.radians(self._turns[sublayer])
        turn = np.array([[math.cos(a), math.sin(a)], [-math.sin(a), math.cos(a)]])
        return (states @ turn).astype(np.float32)

    def head(self, states: NDArray[np.float32]) -> Any:
        raise AssertionError("the dynamic programming looks at states only")


def test_clasp_leaves_out_what_keeps_the_direction() -> None:
    """Two sublayers per layer; layers turn by 10, 30, -25, 4, 9 degrees. After layer 1, one left
    out: 30 off. After layer 2, one left out: that one executed, still 30 off, or the target's state
    of layer 1 passed on, 25 off; two left out: 30 - 25 = 5 off. After layer 3, one left out: 4 off
    without that layer; two: the 5 executed, or 25 - 4 = 21 off passed on. After layer 4, two: the 5
    executed, or 4 + 9 = 13 off passed on. So layers 1 and 2 go, which turn most."""
    turns = [5, 5, 10, 20, -20, -5, 3, 1, 4, 5]
    layers = [(0, 1), (2, 3), (4, 5), (6, 7), (8, 9)]
    branches = Angles(turns)
    assert skipped_layers(branches, layers, 2) == [1, 2]
    # all states of a depth in one call, two calls per layer
    assert branches.calls == [
        (2, 1), (3, 1), (4, 2), (5, 2), (6, 3), (7, 3), (8, 3), (9, 3)
    ]  # fmt: skip
    assert skipped_layers(Angles(turns), layers, 1) == [3]  # the one that turns least
    assert skipped_layers(Angles(turns), layers, 4) == [1, 2, 3, 4]


def test_clasp_follows_the_text() -> None:
    """The layers that do no harm are left out, every so many rounds by the latest token."""
    model = ToyModel(end_tokens=frozenset(), default_harm=0.2)
    model.harm = dict.fromkeys((4, 5, 12, 13), 0.0)  # layers 2 and 6
    backend = FakeBackend(model, n_layer=8, n_ctx=256)
    config = replace(DEFAULTS, clasp_interval_rounds=4)
    policy = policies.create("clasp", Setting(backend, config))
    stats = list_of(backend, policy, 100)
    assert policy.plan.skipped == (4, 5, 12, 13)  # type: ignore[attr-defined]
    windows = backend.calls("branches")
    assert len(windows) == -(-stats.rounds // 4)
    assert windows[0] == (4, (5,))
    assert all(len(tokens) == 1 for _, tokens in windows)


# ---------------------------------------------------------------------------------------------
# Masks that are searched


def test_the_stop_threshold_follows_the_share_of_accepted_tokens() -> None:
    """Start 0.8, weight 0.1, step 0.01: it moves by 0.001."""
    controller = ThresholdController(DEFAULTS)
    assert controller.observe(round_of(0, 0), 8) == 0.8  # a plain step says nothing
    assert controller.observe(round_of(4, 4), 8) == pytest.approx(0.799)  # all right: go further
    assert controller.observe(round_of(8, 8), 8) == pytest.approx(0.799)  # it could not have
    assert controller.observe(round_of(4, 2), 8) == pytest.approx(0.800)  # (1 + 0.5) / 2 < 0.9
    assert controller.observe(round_of(4, 4), 8) == pytest.approx(0.801)  # 0.875
    assert controller.observe(round_of(4, 4), 8) == pytest.approx(0.800)  # 0.9375
    assert controller.matched == pytest.approx(0.9375)


class Listed:
    """Proposes these points in turn."""

    def __init__(self, points: list[list[float]]) -> None:
        self._points = points
        self.registered: list[tuple[list[float], float]] = []

    def suggest(self) -> list[float]:
        return self._points[len(self.registered) % len(self._points)]

    def register(self, point: list[float], score: float) -> None:
        self.registered.append((point, score))


def test_draft_verify_keeps_the_fastest_mask() -> None:
    """Above one half a sublayer is left out; the objective is measured speed."""
    speeds = {(): 10.0, (1,): 14.0, (0, 2): 12.0}
    points = [[0.5, 0.1, 0.2], [0.3, 0.51, 0.5], [0.9, 0.2, 0.6]]
    listed: Any = Listed(points)
    shares: list[float] = []
    found = optimise(listed, lambda s: speeds[tuple(s)], 3, lambda: 0.0, shares.append)
    assert found == (((1,), 14.0), 3)
    assert listed.registered == list(zip(points, [10.0, 14.0, 12.0], strict=True))
    assert shares == pytest.approx([1 / 3, 2 / 3, 1.0])
    # out of time: one at least
    assert optimise(listed, lambda s: 1.0, 99, lambda: 1.0)[1] == 1


def test_draft_verify_finds_what_does_no_harm_and_keeps_it(tmp_path: Any) -> None:
    pytest.importorskip("bayes_opt")
    bench = Bench()
    store = Store(tmp_path)
    setting = replace(
        setting_of(bench),
        config=replace(DEFAULTS, draft_verify_evaluations=12, draft_verify_new_tokens=16),
        store=store,
        model_key={"model": "toy"},
    )
    policy: Any = policies.create("draft-verify", setting)
    assert bench.backend.n_past == 0
    computed = bench.backend.n_computed
    again: Any = policies.create("draft-verify", setting)
    assert bench.backend.n_computed == computed  # from disk
    assert again.plan == policy.plan
    # a damaged record is searched again
    (file,) = (p for p in tmp_path.rglob("*.json"))
    file.write_text(file.read_text().replace('"skipped": [', '"skipped": [99, '))
    found: Any = policies.create("draft-verify", replace(setting, store=Store(tmp_path)))
    assert bench.backend.n_computed > computed
    assert found.plan == policy.plan  # the same seed, on a virtual clock
    fresh = replace(setting, store=Store(enabled=False))
    small, mute = replace(fresh, backend=FakeBackend(n_ctx=16)), replace(fresh, calibration=())
    with pytest.raises(ContextError, match="raise --ctx"):
        policies.create("draft-verify", small)
    with pytest.raises(PlanError, match="needs a text"):
        policies.create("draft-verify", mute)


def test_swift_begins_with_every_second_layer() -> None:
    layers = masked.layers(sublayers_of(6))
    assert every_second_layer(layers) == [2, 3, 6, 7]
    assert every_second_layer(masked.layers(sublayers_of(3))) == [2, 3]
    assert most_valued([2, 3, 4, 5], [0.1, 0.9, 0.9, 0.5], 2) == [3, 4]
    assert most_valued([2, 3, 4, 5], [0.7, 0.9, 0.7, 0.5], 2) == [2, 3]


def test_swift_keeps_the_mask_that_agrees_most_on_the_answers_first_tokens() -> None:
    """Candidates are scored on the answer's own first tokens, one a round, until one is good."""
    pytest.importorskip("bayes_opt")
    model = ToyModel(end_tokens=frozenset(), default_harm=0.6)
    harmless = {2, 3, 8, 9}
    model.harm = dict.fromkeys(harmless, 0.0)
    backend = FakeBackend(model, n_layer=6, n_ctx=512)
    config = replace(DEFAULTS, swift_window_tokens=20, swift_bayes_interval=10)
    policy: Any = policies.create("swift", Setting(backend, config))
    assert policy.plan.skipped == (2, 3, 6, 7)
    list_of(backend, policy, 300)
    judged = backend.calls("beside")
    assert judged[0].skipped == (2, 3, 6, 7)  # what the first one is worth
    assert all(len(plan.skipped) == 4 and set(plan.skipped) <= set(range(2, 10)) for plan in judged)
    assert policy.score == 1.0
    assert set(policy.plan.skipped) == harmless
    assert not policy.searching
    n = len(judged)
    list_of(backend, policy, 100)  # found: later answers keep it
    assert len(backend.calls("beside")) == n
    assert set(policy.plan.skipped) == harmless


def test_swift_gives_up_after_many_candidates() -> None:
    pytest.importorskip("bayes_opt")
    backend = FakeBackend(ToyModel(end_tokens=frozenset(), default_harm=0.9), n_layer=6, n_ctx=512)
    config = replace(DEFAULTS, swift_window_tokens=20, swift_patience=7, swift_candidates=12)
    policy: Any = policies.create("swift", Setting(backend, config))
    list_of(backend, policy, 200)
    assert policy.n_tried <= 12
    assert not policy.searching
    assert policy.n_tried < 12 or policy._n_idle < 7


# ---------------------------------------------------------------------------------------------
# Lookups


def test_lookup_takes_the_longest_match_and_of_these_the_latest() -> None:
    index = NgramIndex(1, 3)
    index.extend([1, 2, 3, 7, 8, 2, 3, 9, 5, 2, 3])
    assert index.continuation(2) == [9, 5]  # 2, 3 stood twice before: the latest place
    assert index.continuation(99) == [9, 5, 2, 3]
    index.extend([7])
    assert index.continuation(3) == [8, 2, 3]  # 2, 3, 7 stood at the beginning
    index.extend([4])
    assert index.continuation(3) == []  # 4 is new
    index.extend([3])
    assert index.continuation(1) == [7]  # the latest 3 was followed by 7
    # an end that overlaps its earlier place
    index = NgramIndex(2, 3)
    index.extend([6, 6, 6])
    assert index.continuation(5) == [6]
    index.extend([5])
    assert index.continuation(5) == []  # a match of one is none
    with pytest.raises(ValueError, match="one token or more"):
        NgramIndex(0, 2)


def test_lookup_sees_prompt_and_answer() -> None:
    policy: Any = policies.create("lookup", Setting(FakeBackend()))
    policy.begin(GREEDY, [1, 2, 3, 4, 5, 1, 2])
    assert policy.propose([3], 9) == [Guess(t, 1.0) for t in (4, 5, 1, 2, 3)]
    assert policy.propose([3], 2) == [Guess(4, 1.0), Guess(5, 1.0)]
    assert policy.propose([3, 9, 8, 3, 9], 4) == [Guess(t, 1.0) for t in (8, 3, 9)]
    policy.begin(GREEDY, [7, 7])
    assert policy.propose([3], 9) == []  # another answer, nothing of before


def test_the_lookup_of_llama_cpp_gets_the_whole_text() -> None:
    seen: list[list[int]] = []

    def find(text: NDArray[np.intc]) -> NDArray[np.intc]:
        assert text.dtype == np.intc
        seen.append(text.tolist())
        return np.array([4, 5, 6], dtype=np.intc)

    policy = LlamaCppLookup(find)
    policy.begin(GREEDY, [1, 2])
    assert policy.propose([3], 2) == [Guess(4, 1.0), Guess(5, 1.0)]
    assert policy.propose([3, 4, 5], 9) == [Guess(t, 1.0) for t in (4, 5, 6)]
    policy.begin(GREEDY, list(range(3000)))
    policy.propose([9], 1)
    assert seen == [[1, 2, 3], [1, 2, 3, 4, 5], [*range(3000), 9]]


# ---------------------------------------------------------------------------------------------
# A draft model


class Counting(ToyModel):
    """The next token is the last one plus one, and how sure it is a matter of its own."""

    sure = True

    def logits(self, tokens: Sequence[int], plan: Plan | None) -> Any:
        values = np.zeros(self.n_vocab, dtype=np.float32)
        values[(tokens[-1] + 1) % self.n_vocab] = 9.0 if self.sure else 0.1
        return values


def drafting(**options: Any) -> tuple[DraftModel, FakeBackend]:
    backend = FakeBackend(Counting(end_tokens=frozenset({0})), n_ctx=128)
    settings = {"n_vocab": 23, "max_tokens": 3, "min_probability": 0.75, **options}
    return DraftModel(backend, **settings), backend


def tokens_of(guesses: Sequence[Guess]) -> list[int]:
    return [guess.token for guess in guesses]


def test_a_draft_model_follows_the_text() -> None:
    policy, backend = drafting()
    policy.begin(GREEDY, [1, 2, 3])
    assert backend.tokens == (1, 2, 3)
    assert tokens_of(policy.propose([5], 9)) == [6, 7, 8]
    assert backend.tokens == (1, 2, 3, 5, 6, 7)
    # all accepted and one more: two tokens are missing, one pass brings them
    before = backend.n_computed
    assert tokens_of(policy.propose([5, 6, 7, 8, 9], 9)) == [10, 11, 12]
    assert backend.n_computed - before == 3
    # the first was right, then the target went another way
    assert tokens_of(policy.propose([5, 6, 7, 8, 9, 10, 20], 9)) == [21, 22, 0]
    assert backend.tokens == (1, 2, 3, 5, 6, 7, 8, 9, 10, 20, 21, 22)  # and 0 is an end
    # rounds in which it was not asked
    assert tokens_of(policy.propose([5, 6, 7, 8, 9, 10, 20, 4, 4, 4, 4, 4, 4], 1)) == [5]
    # the next question goes on where the texts agree
    policy.begin(GREEDY, [1, 2, 3, 5, 6, 9])
    assert backend.calls("prefill")[-1] == (9,)
    assert backend.tokens == (1, 2, 3, 5, 6, 9)
    backend.check_ledger()
    assert tokens_of(policy.propose([10], 1)) == [11]


def test_a_draft_model_stops_where_it_is_unsure() -> None:
    policy, backend = drafting()
    assert isinstance(backend.model, Counting)
    policy.begin(GREEDY, [1, 2, 3])
    backend.model.sure = False
    assert policy.propose([5], 9) == []
    backend.model.sure = True
    assert len(policy.propose([5, 7], 9)) == 3


def test_a_draft_model_proposes_no_token_that_the_target_has_not() -> None:
    policy, _ = drafting(n_vocab=8)
    policy.begin(GREEDY, [1, 2, 3])
    assert tokens_of(policy.propose([5], 9)) == [6, 7]


def test_a_draft_model_survives_what_breaks_off() -> None:
    policy, backend = drafting()
    policy.begin(GREEDY, [1, 2, 3])
    backend.fail_at[backend.n_computed + 1] = Interrupted("stopped")
    with pytest.raises(Interrupted):
        policy.propose([5], 9)
    policy.begin(GREEDY, [1, 2, 3, 5, 6])
    assert tokens_of(policy.propose([7], 9)) == [8, 9, 10]
    assert backend.tokens[:6] == (1, 2, 3, 5, 6, 7)


def test_a_draft_model_needs_the_same_tokens() -> None:
    vocabulary: Any = FakeVocabulary()
    check_vocabulary("small", vocabulary, FakeVocabulary())  # type: ignore[arg-type]

    class Other(FakeVocabulary):
        def token_text(self, token: int) -> str:
            return "x" if token == 70 else super().token_text(token)

    class Longer(FakeVocabulary):
        extra = 100

        @property
        def n_vocab(self) -> int:
            return super().n_vocab + self.extra

    check_vocabulary("small", Longer(), vocabulary)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="another vocabulary .*token 70 is 'x' in place of 'F'"):
        check_vocabulary("small", Other(), vocabulary)  # type: ignore[arg-type]
    Longer.extra = 500
    with pytest.raises(ModelError, match="tokens in place of") as error:
        check_vocabulary("small", Longer(), vocabulary)  # type: ignore[arg-type]
    assert "\n" not in str(error.value)


# ---------------------------------------------------------------------------------------------
# The control


def test_a_random_plan_costs_what_ours_does() -> None:
    savings = [9.0, 9.0, 1.0, 2.0, 1.0, 2.0, 0.0, 9.0]
    for seed in range(20):
        skipped = drawn(savings, [2, 3, 4, 5, 6], 3.0, seed)
        assert 6 not in skipped
        assert abs(sum(savings[i] for i in skipped) - 3.0) <= 1.0
    assert drawn(savings, [2, 3, 4, 5], 6.0, 1) == [2, 3, 4, 5]
    assert drawn(savings, [2, 3, 4, 5], 0.0, 1) == []
    assert len({tuple(drawn(savings, [2, 3, 4, 5], 3.0, seed)) for seed in range(20)}) > 2


def test_the_control_drafts_as_the_best_plan_does() -> None:
    bench = Bench()
    setting = setting_of(bench)
    assert setting.best is not None
    policy: Any = created("random", bench)
    draft = policy.draft(100)
    assert (draft.max_tokens, draft.min_probability) == (
        setting.best.max_tokens,
        setting.best.min_probability,
    )
    assert setting.costs is not None
    step = setting.costs.step_ms(1000)
    ours, theirs = (setting.costs.draft_ms(p, 1000) for p in (setting.best.plan, draft.plan))
    assert abs(ours - theirs) < 0.1 * step
    # without a best plan a share of a step
    other: Any = policies.create("random", replace(setting, best=None))
    saved = step - setting.costs.draft_ms(other.draft(100).plan, 1000)
    assert saved == pytest.approx(0.2 * step, abs=0.1 * step)
