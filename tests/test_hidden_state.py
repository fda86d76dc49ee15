"""The search over hidden states: against its naive twin, and what it does when it is stopped."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import naive_dp
import numpy as np
import pytest
from fakes import FakeBackend, ToyModel, interrupted, sublayers_of
from hypothesis import given
from hypothesis import strategies as st

from knapspec_edge.config import Config
from knapspec_edge.errors import Interrupted, PlanError
from knapspec_edge.records import GREEDY, Plan
from knapspec_edge.search import hidden_state
from knapspec_edge.search.acceptance import judge_beside
from knapspec_edge.search.hidden_state import (
    Reference,
    Settings,
    latest_reference,
    movable_indices,
    paper_weights,
    search,
)


class RandomNet:
    """A residual network of random attentions and MLPs behind the seam; only branches work."""

    def __init__(self, seed: int, n_layer: int, *, parallel: bool = False, hidden: int = 6) -> None:
        rng = np.random.default_rng(seed)
        self.sublayers = sublayers_of(n_layer, parallel=parallel)
        self.n_vocab = 11
        self._embedding = rng.normal(size=(self.n_vocab, hidden)).astype(np.float32)
        shape = (len(self.sublayers), hidden, hidden)
        scale = rng.uniform(0.1, 1.5, size=(len(self.sublayers), 1, 1))
        self._weights = (scale * rng.normal(size=shape)).astype(np.float32)
        self.text = [int(t) for t in rng.integers(0, self.n_vocab, 20)]
        self.calls: list[str] = []

    def stream(self, tokens: Sequence[int]) -> np.ndarray:
        return self._embedding[list(tokens)]

    def sublayer(self, i: int, states: np.ndarray) -> np.ndarray:
        """One branch, f32 [tokens, hidden]; attention looks at all tokens up to its own."""
        if self.sublayers[i].kind.value == "mlp":
            return states + np.tanh(states @ self._weights[i])
        seen = np.cumsum(states, axis=0) / np.arange(1, len(states) + 1, dtype=np.float32)[:, None]
        return states + np.tanh(seen @ self._weights[i])

    def run(self, start: int, tokens: Sequence[int], skipped: frozenset[int]) -> np.ndarray:
        """From the first sublayer on; attention over the window alone (start is 0 in a window)."""
        states, rows = self.stream(tokens), []
        for i in range(len(self.sublayers)):
            if i not in skipped:
                states = self.sublayer(i, states)
            rows.append(states)
        return np.stack(rows)

    @contextlib.contextmanager
    def branches(self, start: int, tokens: Sequence[int], n_branches: int) -> Iterator[Any]:
        def embed(last: int) -> np.ndarray:
            self.calls.append("embed")
            return self.run(start, tokens, frozenset())[last]

        def apply(i: int, states: np.ndarray) -> np.ndarray:
            self.calls.append("apply")
            return np.stack([self.sublayer(i, branch) for branch in states])

        def head(states: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            self.calls.append("head")
            logits = states @ self._embedding.T
            picks = logits.argmax(axis=2).astype(np.int32)
            return picks, np.full(picks.shape, 0.5, dtype=np.float32)

        yield SimpleNamespace(embed=embed, apply=apply, head=head)


@given(data=st.data())
def test_the_naive_twin_finds_the_same(data: st.DataObject) -> None:
    parallel = data.draw(st.booleans())
    n_layer = data.draw(st.integers(2, 6))
    net = RandomNet(data.draw(st.integers(0, 10**6)), n_layer, parallel=parallel)
    n = len(net.sublayers)
    weights = data.draw(st.lists(st.integers(0, 4), min_size=n, max_size=n))
    settings = Settings(
        data.draw(st.integers(1, 6)),
        data.draw(st.sampled_from([-1.0, 0.3, 0.5, 0.8])),
        data.draw(st.sampled_from([0.0, 0.3, 0.5, 1.0])),
        data.draw(st.sampled_from([None, 2, 3, 5])),
    )
    tokens = net.text[: settings.window_tokens]
    picks = net.text[1 : 1 + settings.window_tokens]
    movable = movable_indices(net.sublayers)
    expected = naive_dp.search(
        lambda skipped: net.run(0, tokens, skipped),
        1 if parallel else 2,
        weights,
        movable,
        min_cosine=settings.min_cosine,
        budget_share=settings.budget_share,
        max_branches=settings.max_branches,
    )
    found = search(net, Reference(0, tuple(tokens), tuple(picks)), weights, settings)  # type: ignore[arg-type]
    assert [s.skipped_units for s in found.survivors] == list(expected)
    for survivor in found.survivors:
        skipped, cosine = expected[survivor.skipped_units]
        assert frozenset(survivor.plan.skipped) == skipped
        assert sum(weights[i] for i in skipped) == survivor.skipped_units
        assert survivor.cosine == pytest.approx(cosine, abs=1e-5)
        logits = net.run(0, tokens, skipped)[-1] @ net._embedding.T
        agree = tuple(bool(a == b) for a, b in zip(logits.argmax(axis=1), picks, strict=True))
        assert survivor.judgement.agree == agree
    limit = settings.max_branches
    assert found.cost.peak_branches <= (limit or 10**6)
    assert len(net.calls) == found.cost.calls


def test_one_call_per_depth() -> None:
    net = RandomNet(3, 6)
    found = search(net, Reference(0, (1, 2, 3), (2, 3, 4)), [1] * 12, Settings(3, -1.0, 0.5, None))  # type: ignore[arg-type]
    assert net.calls == ["embed", *["apply"] * 10, "head"]
    assert found.cost.peak_branches > 3
    assert found.cost.head_rows == 3 * len(found.survivors)


def test_evaluations_are_those_of_the_recurrence() -> None:
    """Without pruning, row i holds min(i, limit) savings beside the target, for equal weights."""
    net = RandomNet(1, 6)
    found = search(net, Reference(0, (1, 2), (2, 3)), [1] * 12, Settings(2, -1.0, 0.5, None))  # type: ignore[arg-type]
    alive = [min(i, 6) for i in range(9)]  # before the 8 movable sublayers, and before the end
    branches = 2 + sum(1 + a for a in [*alive[:8], alive[8], alive[8]])
    assert found.cost.evaluations == 2 * branches
    assert found.cost.forward_tokens == pytest.approx(found.cost.evaluations / 12)


def test_nothing_movable_and_nothing_affordable() -> None:
    net = RandomNet(1, 2)
    reference = Reference(0, (1, 2), (2, 3))
    settings = Settings(2, -1.0, 0.5, None)
    assert search(net, reference, [1] * 4, settings).survivors == ()  # type: ignore[arg-type]
    deep = RandomNet(1, 4)
    assert search(deep, reference, [0] * 8, settings).survivors == ()  # type: ignore[arg-type]
    none = Settings(2, -1.0, 0.0, None)
    assert search(deep, reference, [1] * 8, none).survivors == ()  # type: ignore[arg-type]
    assert "head" not in deep.calls


def test_movable_sublayers_can_be_chosen() -> None:
    net = RandomNet(1, 4)
    reference, settings = Reference(0, (1, 2), (2, 3)), Settings(2, -1.0, 1.0, None)
    found = search(net, reference, [1] * 8, settings, movable={3, 7})  # type: ignore[arg-type]
    assert {s.plan.skipped for s in found.survivors} <= {(3,), (7,), (3, 7)}
    assert found.survivors[-1].plan.skipped == (3, 7)
    for wrong in ({1}, {8}, {-1}):
        with pytest.raises(ValueError, match="first layer or does not exist"):
            search(net, reference, [1] * 8, settings, movable=wrong)  # type: ignore[arg-type]


def test_wrong_arguments_are_refused() -> None:
    net = RandomNet(1, 3)
    for weights in ([1] * 5, [1] * 7, [1, 1, -1, 1, 1, 1]):
        with pytest.raises(ValueError, match="6 weights of 0 or more"):
            search(net, Reference(0, (1,), (2,)), weights, Settings(1, 0.5, 0.5, None))  # type: ignore[arg-type]
    for start, inputs, picks in ((0, (), ()), (0, (1,), ()), (-1, (1,), (2,))):
        with pytest.raises(ValueError, match="window"):
            Reference(start, inputs, picks)
    for wrong in ((0, 0.5, 0.5, None), (1, 1.5, 0.5, None), (1, 0.5, 1.5, None), (1, 0.5, 0.5, 1)):
        with pytest.raises(ValueError, match="window|cosine|room"):
            Settings(*wrong)
    assert net.calls == []


def test_the_latest_reference_is_the_end_of_the_text() -> None:
    reference = latest_reference([5, 6, 7, 8, 9], 4, 3)
    assert reference == Reference(1, (6, 7, 8), (7, 8, 9))
    assert latest_reference([5, 6], 1, 30) == Reference(0, (5,), (6,))
    with pytest.raises(ValueError, match="pick after the last"):
        latest_reference([5, 6], 2, 1)
    with pytest.raises(ValueError, match="at least one token"):
        latest_reference([5, 6], 0, 4)


def test_weights_of_the_paper() -> None:
    assert paper_weights([0.2, 0.5, 0.31, 0.0, 2.0]).tolist() == [1, 2, 2, 0, 10]
    assert paper_weights([0.2, 0.5, 2.0], 5).tolist() == [1, 2, 5]
    assert paper_weights([0.0, 0.0]).tolist() == [0, 0]
    assert paper_weights([]).tolist() == []
    with pytest.raises(ValueError, match="not a number"):
        paper_weights([1.0, float("nan")])


def test_both_settings_come_from_the_configuration() -> None:
    config = Config(dp_window_tokens=5, dp_max_branches=4, dp_min_cosine=0.25)
    assert Settings.bounded(config) == Settings(5, 0.25, 0.5, 4)
    assert Settings.paper(config) == Settings(55, 0.25, 0.5, None)


def test_a_spread_keeps_the_ends_and_fills_up() -> None:
    savings = np.array([1, 2, 3, 4, 40])
    scores = np.array([0.9, 0.95, 0.8, 0.7, 0.1], dtype=np.float32)
    assert savings[hidden_state.spread(savings, scores, 2)].tolist() == [2, 40]
    assert savings[hidden_state.spread(savings, scores, 4)].tolist() == [1, 2, 3, 40]
    assert hidden_state.spread(savings, scores, 5).tolist() == [0, 1, 2, 3, 4]


def test_a_state_of_zeros_has_no_cosine() -> None:
    states = np.zeros((1, 2, 4), dtype=np.float32)
    target = np.ones((2, 4), dtype=np.float32)
    assert hidden_state.mean_cosine(states, target).tolist() == [0.0]
    assert hidden_state.mean_cosine(target[None], target).tolist() == pytest.approx([1.0])


# on the fake backend, whose states know their plan


def text_behind(backend: FakeBackend, n: int) -> list[int]:
    prompt = [1, 2, 3, 4, 5]
    pick = backend.prefill(prompt, GREEDY)
    text = [*prompt, pick.token]
    while backend.n_past < n:
        text.append(backend.decode(text[-1], GREEDY).token)
    return text


def test_agreement_is_what_judging_the_plan_says() -> None:
    model = ToyModel(seed=4, harm={4: 0.4, 7: 0.3}, default_harm=0.05)
    backend = FakeBackend(model, n_layer=6)
    text = text_behind(backend, 40)
    reference = latest_reference(text, backend.n_past, 16)
    found = search(backend, reference, [2, 1] * 6, Settings(16, 0.5, 0.5, 8), clock=backend.clock)
    assert 3 <= len(found.survivors) <= 7
    assert found.cost.ms > 0.0
    agreements = set()
    for survivor in found.survivors:
        window = [*reference.inputs, reference.picks[-1]]
        own = judge_beside(backend, reference.start, window, survivor.plan, len(window))
        assert survivor.judgement.agree == own.agree
        agreements.add(survivor.judgement.agreement)
    assert len(agreements) > 1
    assert backend.n_past == 40
    backend.check_ledger()


def test_sublayers_that_do_harm_stay() -> None:
    harm = {i: (0.9 if i in (3, 5, 8) else 0.0) for i in range(12)}
    backend = FakeBackend(ToyModel(seed=4, harm=harm), n_layer=6)
    reference = latest_reference(text_behind(backend, 30), 30, 8)
    found = search(backend, reference, [1] * 12, Settings(8, 0.5, 0.4, None))
    assert len(found.survivors) == 4
    for survivor in found.survivors:
        assert not {3, 5, 8} & set(survivor.plan.skipped)
        assert survivor.judgement.agreement == 1.0


@pytest.mark.parametrize("call", range(12))
def test_an_interrupt_leaves_nothing_open(call: int) -> None:
    backend = FakeBackend(n_layer=6)
    text = text_behind(backend, 20)
    backend.fail_at[backend.n_computed + call] = interrupted()
    reference = latest_reference(text, 20, 8)
    settings = Settings(8, -1.0, 0.5, 4)
    with pytest.raises(Interrupted):
        search(backend, reference, [1] * 12, settings)
    assert not backend.branching
    assert backend.n_past == 20
    backend.check_ledger()
    assert search(backend, reference, [1] * 12, settings).survivors


def test_report_can_stop_it() -> None:
    backend = FakeBackend(n_layer=4)
    reference = latest_reference(text_behind(backend, 20), 20, 4)
    seen = 0

    def report() -> None:
        nonlocal seen
        seen += 1
        if seen == 3:
            raise TimeoutError

    with pytest.raises(TimeoutError):
        search(backend, reference, [1] * 8, Settings(4, 0.5, 0.5, 4), report=report)
    assert not backend.branching


def test_a_model_without_branches_is_refused() -> None:
    backend = FakeBackend(n_layer=4)
    reference = latest_reference(text_behind(backend, 10), 10, 4)
    backend.branch_refusal = "it reads too much"
    with pytest.raises(PlanError, match="it reads too much"):
        search(backend, reference, [1] * 8, Settings(4, 0.5, 0.5, 4))


def test_hidden_states_of_the_fake_agree_with_its_branches() -> None:
    backend = FakeBackend(n_layer=3)
    text = text_behind(backend, 12)
    plan = Plan.skipping(6, [2, 3])
    with backend.branches(8, text[8:12], 1) as branches:
        states = branches.embed(1)[None]
        for i in (4, 5):
            states = branches.apply(i, states)
        with pytest.raises(PlanError):
            branches.apply(1, states)
    backend.truncate(8)
    assert np.array_equal(backend.hidden_states(text[8:12], plan)[-1], states[0])
