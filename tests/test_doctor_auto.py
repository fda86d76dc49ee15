"""What `doctor` says about speculation: figures and what follows from them."""

from __future__ import annotations

from knapspec_edge.apps.doctor import _auto
from knapspec_edge.search.outlook import Condition


def test_what_was_never_measured_names_the_command_that_measures() -> None:
    found = _auto(None, "my model.gguf")
    assert found["state"] == "unknown"
    assert "`knapspec-edge plan 'my model.gguf'`" in found["changes"][0]


def test_conditions_follow_from_the_figures() -> None:
    slow = Condition(256, 0.9, 0.7, 0.57, 1.7, 0.9 - 0.7, 0.7)
    cost, change = slow.sentences()
    assert "2 tokens costs 1.70 steps" in cost
    assert "α = 0.90" in cost
    assert "c + s = 1.27" in cost
    assert "with s below 0.20" in change
    hopeless = Condition(256, 0.9, 0.95, 0.57, 1.7, None, 0.5)
    assert "faster verification alone would not change that" in hopeless.sentences()[1]
    assert len(Condition(256, 0.9, 0.5, 0.3, 1.3, 0.4, 1.02).sentences()) == 1
