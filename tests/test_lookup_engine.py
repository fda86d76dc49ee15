"""Lookup first in an open engine, and on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from fake_vocabulary import FakeVocabulary
from fakes import FakeBackend
from scripted import CHATML, ScriptedModel
from stats_identity import check_stats

from knapspec_edge.apps.summary import answer_json, statistics_line, statistics_table
from knapspec_edge.cli import cli
from knapspec_edge.engine import Answer, Engine
from knapspec_edge.errors import PlanError, UsageError
from knapspec_edge.search.lookup_first import LookupFirst, PlainSteps
from knapspec_edge.search.online import OnlinePlanner

REPLY = (
    "One hare, two hares, three hares. One hare, two hares, four hares. "
    "One hare, two hares, three hares; that is all of the hares."
)
QUESTION = [{"role": "user", "content": "Count hares, please."}]


def engine(*, harm: float = 0.5, refusal: str | None = None, **options: Any) -> Engine:
    """Plans do so much harm that none pays."""
    vocabulary = FakeVocabulary(chat_template=CHATML)
    model = ScriptedModel(vocabulary=vocabulary, reply=lambda _: REPLY, default_harm=harm)
    fake = FakeBackend(model, n_layer=4, n_ctx=1024, refusal=refusal)
    fake.cut_refusal = None
    return Engine(vocabulary, fake, clock=fake.clock, **options)  # type: ignore[arg-type]


def asked(opened: Engine) -> Answer:
    answer = opened.chat(QUESTION)
    list(answer)
    check_stats(answer.stats)
    assert answer.text == REPLY
    return answer


def test_lookup_alone() -> None:
    with engine() as opened:
        said = opened.set_speculation("lookup")
        assert (said.state, said.policy, said.draft) == ("on", "lookup-by-value", None)
        assert said.reason == "--spec lookup: what repeats the text is proposed where that pays"
        assert said.baseline_per_second is not None
        assert isinstance(opened.policy, LookupFirst)
        assert isinstance(opened.policy.otherwise, PlainSteps)
        answer = asked(opened)
        assert 0 < answer.stats.proposed_n_accepted <= answer.stats.proposed_n
        assert answer.stats.proposed_n == answer.stats.draft_n
        shown = answer_json(answer, opened.backend.sublayers)
        assert shown["speculation"]["policy"] == "lookup-by-value"
        assert shown["speculation"]["plan"] is None
        assert shown["speculation"]["lookup"]
        assert shown["timings"]["proposed_n_accepted"] == answer.stats.proposed_n_accepted
        found = answer.stats.proposed_n_accepted
        assert f", {found} looked up)" in statistics_line(answer)
        assert ("looked up", f"{answer.stats.proposed_n}, accepted {found}") in statistics_table(
            answer
        )


def test_auto_looks_up_where_no_plan_pays() -> None:
    with engine() as opened:
        said = opened.set_speculation("auto")
        assert said.state == "off"
        assert said.lookup
        assert isinstance(opened.policy, LookupFirst)
        assert isinstance(opened.policy.otherwise, OnlinePlanner)
        answer = asked(opened)
        assert answer.stats.proposed_n_accepted > 0
        assert (answer.speculation.state, answer.speculation.policy) == ("on", "lookup-by-value")
        assert answer.speculation.reason.startswith("what repeats the text is looked up; no plan: ")


@pytest.mark.parametrize("spec", ["auto", "on"])
def test_without_lookup_nothing_is_proposed(spec: str) -> None:
    with engine(lookup=False, harm=0.01) as opened:
        assert not opened.set_speculation(spec).lookup
        assert isinstance(opened.policy, OnlinePlanner)
        assert asked(opened).stats.proposed_n == 0


def test_plans_alone_as_a_policy() -> None:
    with engine(policy="knapspec-masks", harm=0.01) as opened:
        opened.set_speculation("auto")
        assert isinstance(opened.policy, OnlinePlanner)
        stats = asked(opened).stats
        assert stats.draft_n > stats.proposed_n == 0


@pytest.mark.parametrize("spec", ["auto", "lookup"])
def test_sublayers_that_nobody_knows_are_no_hindrance(spec: str) -> None:
    with engine(refusal="the sublayers of this are not recognised") as opened:
        said = opened.set_speculation(spec)
        assert said.lookup
        assert said.state == ("on" if spec == "lookup" else "off")
        assert asked(opened).stats.proposed_n_accepted > 0
        with pytest.raises(PlanError, match="not recognised"):
            opened.set_speculation("on")


def test_a_cache_that_cannot_be_cut_back_is_one() -> None:
    opened = engine(refusal="it keeps a recurrent state")
    opened.backend.cut_refusal = "it keeps a recurrent state"  # type: ignore[misc]
    with opened:
        said = "--spec lookup cannot be honoured: it keeps a recurrent state"
        with pytest.raises(PlanError, match=said):
            opened.set_speculation("lookup")
        assert not opened.set_speculation("auto").lookup
        assert asked(opened).stats.draft_n == 0


def test_strict_exactness_holds_for_lookups_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    from knapspec_edge.latency.exactness import Exactness

    for holds in (True, False):
        with engine(exact="strict") as opened:
            opened._exactness = Exactness(holds, 16, "" if holds else "passes differ")
            if holds:
                assert opened.set_speculation("lookup").bit_exact
            else:
                with pytest.raises(PlanError, match="--exact strict cannot be honoured: passes"):
                    opened.set_speculation("lookup")
            assert opened.set_speculation("auto").lookup == holds
            assert (asked(opened).stats.proposed_n > 0) == holds


def test_what_does_not_go_together() -> None:
    with (
        engine(policy="clasp") as opened,
        pytest.raises(UsageError, match="--spec lookup and --policy clasp do not go together"),
    ):
        opened.set_speculation("lookup")


def test_a_conversation_grows_the_index() -> None:
    with engine() as opened:
        opened.set_speculation("lookup")
        first = asked(opened)
        messages = [*QUESTION, {"role": "assistant", "content": first.text}, *QUESTION]
        second = opened.chat(messages)
        list(second)
        # all of it stood there before
        assert second.text == REPLY
        assert second.stats.proposed_n_accepted > first.stats.proposed_n_accepted
        assert second.stats.rounds < first.stats.rounds
        again = opened.chat(QUESTION)  # as /regen and /clear do
        list(again)
        assert again.text == REPLY


def test_the_command_line_names_it(tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes(b"GGUF")
    result = CliRunner().invoke(cli, ["run", str(model), "Hi", "--spec", "look"])
    assert result.exit_code == 2
    assert "give auto, on, lookup, off, or the path of a plan file" in result.output
    for command in ("run", "chat", "summarize"):
        shown = CliRunner().invoke(cli, [command, "--help"]).output
        assert "--no-lookup" in shown
        assert "auto|on|lookup|off|FILE" in shown
