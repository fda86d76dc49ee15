"""Certifying plans on the toy model: its states are its logits, its head is the unit matrix."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import naive_certificate as naive
import numpy as np
import pytest
from fakes import FakeBackend, ToyModel, chance, interrupted
from numpy.typing import NDArray

from knapspec_edge.apps.certify import certify
from knapspec_edge.errors import Interrupted, ModelError, PlanError
from knapspec_edge.latency.fidelity import Text, target_text
from knapspec_edge.records import Plan
from knapspec_edge.search.certificate import DenseHead

N_SUBLAYERS = 8


class Blurred(ToyModel):
    """Every skip moves every logit a little: cosines lie on both sides of what is required."""

    def logits(self, tokens: Sequence[int], plan: Plan | None) -> NDArray[np.float32]:
        values = super().logits(tokens, None)
        skipped = () if plan is None else plan.skipped
        blur = [0.05 * chance(tuple(tokens), i, skipped) for i in range(self.n_vocab)]
        return np.asarray(values + len(skipped) * np.array(blur, dtype=np.float32))


def unit_head(n: int = 23) -> DenseHead:
    return DenseHead(np.eye(n, dtype=np.float32))


def plans() -> list[Plan]:
    return [
        Plan.full(N_SUBLAYERS),
        Plan.skipping(N_SUBLAYERS, [3]),
        Plan.skipping(N_SUBLAYERS, [1, 2, 5]),
    ]


def text_of(backend: FakeBackend, n_tokens: int = 50) -> Text:
    text = target_text(backend, [1, 2, 3, 4, 5], n_tokens)
    backend.truncate(0)
    return text


def test_counts_are_those_of_a_naive_count() -> None:
    model = Blurred()
    backend = FakeBackend(model)
    text = text_of(backend)
    found = certify(backend, unit_head(), plans(), text, block_tokens=8)
    assert backend.n_past == 0
    assert (found.positions, found.context_tokens, found.head_agreement) == (50, 5, 1.0)
    assert (found.n_embd, found.n_vocab) == (23, 23)
    rows = np.eye(23).tolist()
    for plan, result in zip(plans(), found.plans, strict=True):
        tight = loose = agreed = 0
        for i in range(len(text.window)):
            tokens = [*text.prompt, *text.window[: i + 1]]
            state, draft = model.logits(tokens, None).tolist(), model.logits(tokens, plan).tolist()
            token, _, least_loose, least_tight = naive.required(state, rows)
            cosine = naive.cosine(state, draft)
            tight += cosine > least_tight
            loose += cosine > least_loose
            agreed += naive.argmax(draft) == token
        assert (result.plan, result.positions) == (plan, 50)
        assert (result.agreed, result.tight, result.loose) == (agreed, tight, loose)
        assert result.loose <= result.tight <= result.agreed
        assert result.broken == 0
    full, one, several = found.plans
    assert full.tight == full.loose == full.agreed == 50
    assert full.cosine == pytest.approx(1.0)
    assert 0 < several.tight < several.agreed <= one.agreed <= 50
    assert several.tight < one.tight < one.agreed
    assert found.room_tight > found.room_loose > 0.0


def test_the_record_is_json() -> None:
    backend = FakeBackend()
    text = text_of(backend, 10)
    found = json.loads(json.dumps(certify(backend, unit_head(), plans(), text).to_json()))
    assert found["vocabulary"] == found["dimension"] == 23
    assert found["plans"][1]["modes"] == [*["full"] * 3, "skip", *["full"] * 4]
    assert found["plans"][0]["guaranteed_tight"] == found["plans"][0]["agreement"] == 1.0


def test_drafts_see_keys_of_the_target() -> None:
    """The backend's ledger checks every pass; a block's draft is cut before its target pass."""
    backend = FakeBackend()
    text = text_of(backend, 20)
    shares: list[float] = []
    certify(backend, unit_head(), plans(), text, block_tokens=6, progress=shares.append)
    assert backend.calls("evaluate").count(None) == 4  # blocks of 6, 6, 6, 2
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


def test_a_head_of_another_model_is_refused() -> None:
    backend = FakeBackend()
    text = text_of(backend, 20)
    turned = DenseHead(np.roll(np.eye(23, dtype=np.float32), 1, axis=0))
    with pytest.raises(ModelError, match="only 0 % of its picks"):
        certify(backend, turned, plans(), text)
    with pytest.raises(ModelError, match="23 numbers, its head takes 22"):
        certify(backend, unit_head(22), plans(), text)
    assert backend.n_past == 0


def test_what_cannot_be_pruned_is_refused() -> None:
    text = text_of(FakeBackend(), 10)
    with pytest.raises(PlanError, match="no plan can be certified: for a reason"):
        certify(FakeBackend(refusal="for a reason"), unit_head(), [], text)
    backend = FakeBackend()
    for bad in (replace(text, prompt=()), replace(text, window=())):
        with pytest.raises(ValueError, match="a prompt and a window"):
            certify(backend, unit_head(), plans(), bad)


def test_an_interrupted_certification_leaves_an_empty_cache() -> None:
    backend = FakeBackend()
    text = text_of(backend, 20)
    backend.fail_at = {backend.n_computed + 4: interrupted()}
    with pytest.raises(Interrupted):
        certify(backend, unit_head(), plans(), text)
    assert backend.n_past == 0
