"""Bit exactness is found out by comparing passes; a backend that has it not is always noticed."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes import FakeBackend
from numpy.typing import NDArray
from scripted import ScriptedModel, fake_of, scripted_engine

from knapspec_edge.config import DEFAULTS
from knapspec_edge.engine import Engine
from knapspec_edge.errors import Interrupted, PlanError, UsageError
from knapspec_edge.latency.exactness import Exactness, exactness, examine
from knapspec_edge.latency.store import Store
from knapspec_edge.records import Draft, Plan
from knapspec_edge.search import plan_file

TEXT = list(range(1, 12))
CONFIG = replace(DEFAULTS, exact_context_tokens=(5, 30), exact_verify_tokens=8)


class Rounding(FakeBackend):
    """Logits that are one last bit away where a rule of (position, row, width) says so."""

    def __init__(self, rule: Any, **settings: Any) -> None:
        super().__init__(**settings)
        self.rule = rule
        self.widths: list[int] = []  # of the pass that computed each position in the cache

    def evaluate(
        self, tokens: Sequence[int], plan: Plan | None = None
    ) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        del self.widths[self.n_past :]
        self.widths += [0] * (self.n_past - len(self.widths)) + [len(tokens)] * len(tokens)
        return super().evaluate(tokens, plan)

    def logits(self, row: int = -1) -> NDArray[np.float32]:
        values = super().logits(row)
        _, n, _ = self._latest
        position = self.n_past - n + row
        if self.rule(position, row, n, self.widths):
            values[0] = np.nextafter(values[0], np.float32(np.inf))
        return values


def never(position: int, row: int, width: int, widths: list[int]) -> bool:
    return False


def test_passes_that_agree_hold() -> None:
    backend = Rounding(never)
    assert examine(backend, TEXT, CONFIG) == Exactness(True, 8)
    assert backend.n_past == 0


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        pytest.param(lambda p, r, n, w: n > 1, "over 2 tokens", id="every wider pass"),
        pytest.param(lambda p, r, n, w: n == 7, "over 7 tokens", id="one width"),
        pytest.param(lambda p, r, n, w: n == 8 and r == 7, "over 8 tokens", id="the last row"),
        pytest.param(lambda p, r, n, w: n > 1 and p >= 36, "behind 30", id="from a position on"),
        pytest.param(
            lambda p, r, n, w: n > 2 and p >= 250, "behind 247 tokens", id="the end of the context"
        ),
        # the rows are right, but what they leave in the cache is not
        pytest.param(
            lambda p, r, n, w: n == 1 and p > 0 and w[p - 1] == 6, "over 6 tokens", id="keys"
        ),
    ],
)
def test_a_difference_of_one_bit_is_found(rule: Any, words: str) -> None:
    found = examine(Rounding(rule), TEXT, CONFIG)
    assert not found.holds
    assert words in found.reason


def test_a_context_too_short_for_the_usual_places() -> None:
    assert examine(Rounding(never, n_ctx=12), TEXT, CONFIG) == Exactness(True, 8)
    assert examine(Rounding(never, n_ctx=5), TEXT, CONFIG) == Exactness(True, 4)
    assert not examine(Rounding(never, n_ctx=2), TEXT, CONFIG).holds


def test_it_is_kept_per_setting(tmp_path: Path) -> None:
    store = Store(tmp_path)
    found = exactness(Rounding(lambda p, r, n, w: n == 3), "m", TEXT, CONFIG, store)
    assert not found.holds
    again = Rounding(never)
    assert exactness(again, "m", TEXT, CONFIG, store) == found
    assert not again.log
    again.settings["threads"] = 3
    assert exactness(again, "m", TEXT, CONFIG, store).holds
    assert exactness(Rounding(never), "another", TEXT, CONFIG, store).holds


@pytest.mark.parametrize("content", [{}, {"holds": 1, "tokens": 8, "reason": ""}, {"holds": True}])
def test_a_damaged_record_is_compared_again(tmp_path: Path, content: dict[str, Any]) -> None:
    warnings: list[str] = []
    store = Store(tmp_path, warn=warnings.append)
    exactness(Rounding(never), "m", TEXT, CONFIG, store)
    path = next(tmp_path.glob("*.json"))
    record = json.loads(path.read_text())
    record["content"] = content
    path.write_text(json.dumps(record))
    assert exactness(Rounding(never), "m", TEXT, CONFIG, store).holds
    assert len(warnings) == 1


def test_interrupting_leaves_an_empty_cache_and_keeps_nothing(tmp_path: Path) -> None:
    backend = Rounding(never)
    backend.fail_at = {9: Interrupted("stopped")}
    with pytest.raises(Interrupted):
        exactness(backend, "m", TEXT, CONFIG, Store(tmp_path))
    assert backend.n_past == 0
    assert not list(tmp_path.iterdir())


# -- the engine


def wide_passes_differ(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the logits of passes over several tokens another last bit."""
    backend = fake_of(engine)
    plain = backend.logits

    def logits(row: int = -1) -> NDArray[np.float32]:
        values = plain(row)
        if backend._latest[1] > 1:
            values[0] = np.nextafter(values[0], np.float32(np.inf))
        return values

    monkeypatch.setattr(backend, "logits", logits)


@pytest.fixture
def engine() -> Engine:
    engine = scripted_engine()
    engine.exact = "strict"
    return engine


@pytest.mark.parametrize("spec", ["on", "auto"])
def test_strict_asks_for_bits(engine: Engine, monkeypatch: pytest.MonkeyPatch, spec: str) -> None:
    wide_passes_differ(engine, monkeypatch)
    if spec == "on":
        with pytest.raises(PlanError, match=r"--exact strict cannot be honoured: .*over 2 tokens"):
            engine.set_speculation(spec)
    else:
        chosen = engine.set_speculation(spec)
        assert chosen.state == "off"
        assert chosen.reason.startswith("--exact strict: a pass over 2 tokens gives other logits")
    answer = engine.generate("Once upon a time")
    list(answer)
    assert answer.stats.draft_n == 0


def test_plain_decoding_is_strict_without_a_look(engine: Engine) -> None:
    before = len(fake_of(engine).log)
    assert engine.set_speculation("off").bit_exact is None
    assert len(fake_of(engine).log) == before


@pytest.fixture
def plan(engine: Engine, tmp_path: Path) -> Callable[[int], Path]:
    """A plan file whose drafts are so long."""

    def save(draft_tokens: int) -> Path:
        sublayers = engine.backend.sublayers
        draft = Draft(Plan.skipping(len(sublayers), [1]), draft_tokens, 0.0)
        plan_file.save(tmp_path / "plan.json", draft, sublayers, "")
        return tmp_path / "plan.json"

    return save


@pytest.mark.parametrize("exact", ["default", "strict"])
def test_what_was_found_is_said(engine: Engine, plan: Callable[[int], Path], exact: str) -> None:
    engine.exact = exact
    assert engine.set_speculation(plan(3)).bit_exact is True
    # wider passes than were compared
    assert engine.set_speculation(plan(16)).bit_exact is False


def test_what_is_kept_costs_no_keys(engine: Engine, plan: Callable[[int], Path]) -> None:
    engine.set_speculation(plan(3))
    list(engine.generate("Once upon a time"))
    cached = engine.session.ids
    assert cached
    engine._exactness = None  # as in the next process
    assert engine.set_speculation(plan(3)).bit_exact is True
    assert engine.session.ids == cached


def test_by_default_a_difference_is_only_said(
    engine: Engine, plan: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    wide_passes_differ(engine, monkeypatch)
    with pytest.raises(PlanError, match="--exact strict"):
        engine.set_speculation(plan(3))
    engine.exact = "default"
    assert engine.set_speculation(plan(3)).bit_exact is False
    answer = engine.generate("Once upon a time")
    list(answer)
    assert answer.stats.draft_n > 0


def test_an_unknown_word_is_refused() -> None:
    with pytest.raises(UsageError, match="--exact bits is unknown: choose one of default, strict"):
        Engine.open("no-file.gguf", exact="bits")


def test_scripted_models_are_exact() -> None:
    backend = FakeBackend(ScriptedModel())
    assert examine(backend, TEXT, CONFIG).holds
