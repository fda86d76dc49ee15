"""Every policy on the fake backend: the text is the plain one, whatever it drafts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import naive
import pytest
from click.testing import CliRunner
from fake_vocabulary import FakeVocabulary
from fakes import FakeBackend, ToyModel, interrupted
from scripted import CHATML, ScriptedModel
from stats_identity import check_stats
from test_online import CALIBRATION, GOOD, PROMPT, Bench, TurningModel

from knapspec_edge import policies
from knapspec_edge.apps.summary import answer_json
from knapspec_edge.cli import cli
from knapspec_edge.config import DEFAULTS
from knapspec_edge.decode.policy import FixedPolicy, Guess, Policy
from knapspec_edge.decode.session import Session
from knapspec_edge.engine import Engine
from knapspec_edge.errors import (
    ContextError,
    Interrupted,
    KnapspecError,
    NativeError,
    PlanError,
    UsageError,
)
from knapspec_edge.policies.draft_model import DraftModel
from knapspec_edge.policies.lookup import PromptLookup, Proposing
from knapspec_edge.policies.lookup_llama_cpp import LlamaCppLookup
from knapspec_edge.policies.setting import Setting
from knapspec_edge.records import GREEDY, Draft, Plan, Sampling, Stats

# Fewer tries and tokens than as published, so that a test of some hundred tokens sees all of it.
CONFIG = replace(
    DEFAULTS,
    swift_window_tokens=12,
    swift_bayes_interval=6,
    draft_verify_evaluations=4,
    draft_verify_new_tokens=12,
    dp_paper_interval_rounds=16,
    clasp_interval_rounds=8,
)
OPTIONAL = {"draft-verify", "swift"}
SAMPLED = Sampling(temperature=0.8, seed=3)


def setting_of(bench: Bench, **options: Any) -> Setting:
    return Setting(
        bench.backend,
        CONFIG,
        costs=bench.book.costs,
        book=bench.book,
        drift=bench.drift,
        best=bench.decision.draft,
        forced=True,
        calibration=CALIBRATION,
        clock=bench.backend.clock,
        **options,
    )


def created(name: str, bench: Bench) -> Policy:
    if name in OPTIONAL:
        pytest.importorskip("bayes_opt")
    if name == "draft-model":
        # another model, that picks otherwise now and then
        other = ToyModel(end_tokens=frozenset(), default_harm=GOOD)
        drafter = FakeBackend(Wavering(other), n_layer=2, n_ctx=bench.backend.n_ctx)
        return DraftModel(drafter, bench.backend.n_vocab, 4, 0.0)
    if name == "lookup-llama-cpp":
        return LlamaCppLookup(last_pair)
    return policies.create(name, setting_of(bench))


class Wavering(ToyModel):
    """Another model's picks, but for every seventh position."""

    def __init__(self, model: ToyModel) -> None:
        super().__init__(model.n_vocab, model.order, model.seed, model.end_tokens)

    def logits(self, tokens: Sequence[int], plan: Plan | None) -> Any:
        values = super().logits(tokens, plan)
        if len(tokens) % 7 == 0:
            values[int(values.argmax())] -= 9.0
        return values


def last_pair(text: Any) -> Any:
    """A twin of upstream's rule, found by comparing all places one by one."""
    ids = [int(t) for t in text]
    for n in (2, 1):
        for i in range(len(ids) - n):
            if ids[i : i + n] == ids[-n:]:
                return text[i + n : i + n + 10]
    return text[:0]


def read(bench: Bench, policy: Policy, n: int, sampling: Sampling) -> Stats:
    """One answer, after checking that it is the plain one and all that must always hold."""
    generation = bench.session.generate(PROMPT, sampling=sampling, max_tokens=n, policy=policy)
    tokens = []
    for event in generation:
        tokens.append(event.token)
        check_stats(generation.stats)
    bench.backend.check_ledger()
    assert tokens == naive.plain(bench.model, PROMPT, n, sampling)[0]
    assert bench.session.ids == (*PROMPT, *tokens[:-1])
    return generation.stats


class Loopy(TurningModel):
    """Text that repeats itself, with a twist now and then: something for lookups to find."""

    def logits(self, tokens: Sequence[int], plan: Plan | None) -> Any:
        values = super().logits(tokens[-2:], plan)
        # the toy's own rule says little about what came before; a cycle does
        values[(tokens[-1] * 3 + 1 + len(tokens) // 40) % self.n_vocab] += 12.0
        return values


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", policies.NAMES)
def test_the_text_is_the_plain_one(name: str, sampling: Sampling) -> None:
    """Some tokens accepted and some rejected, or there was nothing to see."""
    bench = Bench(harm=GOOD)
    if "lookup" in name:
        bench.backend.model = Loopy(end_tokens=frozenset())
    bench.model.default_harm = 0.1  # more than was measured, or the best plans are always right
    policy = created(name, bench)
    assert bench.backend.n_past == 0
    stats = [read(bench, policy, 150, s) for s in (sampling, sampling)]
    if name == "plain":
        assert not any(s.draft_n for s in stats)
        return
    drafted, accepted = (sum(s.draft_n for s in stats), sum(s.draft_n_accepted for s in stats))
    assert 0 < accepted < drafted
    if name == "draft-model":
        policy._backend.check_ledger()  # type: ignore[attr-defined]


def test_every_policy_is_described() -> None:
    assert policies.NAMES[0] == "plain"
    assert policies.DEFAULT in policies.NAMES
    for name in policies.NAMES:
        found = policies.describe(name)
        assert found.title
        assert found.rule
        assert (found.longest_draft is None) == (name == "plain")
        if found.longest_draft is not None:
            assert getattr(DEFAULTS, found.longest_draft) >= 1
    with pytest.raises(UsageError, match="--policy nothing is unknown"):
        policies.describe("nothing")
    with pytest.raises(UsageError, match="unknown"):
        policies.create("nothing", setting_of(Bench()))


def test_the_page_says_of_each_what_its_description_says() -> None:
    page = (Path(__file__).parent.parent / "docs" / "policies.md").read_text(encoding="utf-8")
    rows = {line.split("`")[1]: line for line in page.splitlines() if line.startswith("| `")}
    assert tuple(name for name in rows if name in policies.NAMES) == policies.NAMES
    for name in policies.NAMES:
        found = policies.describe(name)
        training = "" if found.training == "none" else found.training
        for words in (found.title, found.rule, found.differs, training):
            assert words in rows[name], (name, words)
        assert found.search == "none" or found.search in rows[name]


@pytest.mark.parametrize("name", [n for n in policies.NAMES if n != "plain"])
def test_a_model_that_cannot_speculate_is_refused(name: str) -> None:
    backend = FakeBackend(refusal="it keeps a recurrent state")
    with pytest.raises(KnapspecError, match="recurrent state|needs|measurement") as error:
        policies.create(name, Setting(backend, draft_model="x.gguf"))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["del", "asd", "clasp", "knapspec-paper"])
def test_a_model_without_branches_is_refused(name: str) -> None:
    bench = Bench()
    bench.backend.branch_refusal = "no cells beside the text"
    with pytest.raises(PlanError, match=f"--policy {name} cannot be honoured: no cells beside"):
        policies.create(name, setting_of(bench))


@pytest.mark.parametrize("error", [ContextError("no cells"), NativeError("no finite logit")])
@pytest.mark.parametrize("name", ["del", "asd", "clasp"])
def test_a_search_that_fails_ends_searching_not_the_answer(
    name: str, error: KnapspecError, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench()
    policy = created(name, bench)
    asked = 0

    def branches(*_: Any) -> Any:
        nonlocal asked
        asked += 1
        raise error

    monkeypatch.setattr(type(bench.backend), "branches", branches)
    assert read(bench, policy, 60, GREEDY).draft_n == 0
    assert asked == 1
    monkeypatch.undo()
    assert read(bench, policy, 60, GREEDY).draft_n > 0  # the next answer tries again


def test_without_the_optimiser_one_line_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "bayes_opt", None)
    for name in sorted(OPTIONAL):
        said = rf"the policy {name} needs .*knapspec-edge\[policies\]"
        with pytest.raises(PlanError, match=said):
            policies.create(name, setting_of(Bench()))


# ---------------------------------------------------------------------------------------------
# Tokens that a policy proposes


class Scripted(Proposing):
    """Proposes what it is told to, round by round."""

    def __init__(self, proposals: Iterator[list[int]]) -> None:
        self._proposals = proposals
        self.asked: list[tuple[int, int]] = []  # (emitted, most)
        self.right: list[tuple[bool, ...]] = []

    def propose(self, emitted: Sequence[int], most: int) -> list[Guess]:
        self.asked.append((len(emitted), most))
        return [Guess(t, 0.5) for t in next(self._proposals, [])]

    def observe(self, times: Any) -> None:
        self.right.append(times.right)


def plain(n: int, model: ToyModel) -> list[int]:
    return naive.plain(model, PROMPT, n, GREEDY)[0]


def proposing(
    proposals: list[list[int]], n: int, model: ToyModel, **options: Any
) -> tuple[Scripted, Stats, list[int], FakeBackend]:
    backend = FakeBackend(model, n_ctx=256, **options)
    session = Session(backend, clock=backend.clock)
    policy = Scripted(iter(proposals))
    generation = session.generate(PROMPT, max_tokens=n, policy=policy)
    tokens = [event.token for event in generation]
    check_stats(generation.stats)
    backend.check_ledger()
    return policy, generation.stats, tokens, backend


def test_proposals_are_verified_like_drafts() -> None:
    model = ToyModel(end_tokens=frozenset())
    text = plain(12, model)
    wrong = (text[6] + 1) % model.n_vocab
    # all right; right, then wrong; nothing: a plain step; wrong at once
    proposals = [text[1:4], [text[5], wrong, text[7]], [], [(text[8] + 1) % model.n_vocab]]
    policy, stats, tokens, backend = proposing(proposals, 12, model)
    assert tokens == text
    assert policy.right[:4] == [(True, True, True), (True, False), (), (False,)]
    assert (stats.draft_n, stats.draft_n_accepted) == (7, 4)
    assert stats.accepted_lengths == {3: 1, 1: 1, 0: 1}
    assert (stats.tried_at, stats.accepted_at) == ([3, 2, 1], [2, 1, 1])
    assert stats.latest_draft is None
    # asked with what was emitted before each round
    assert [emitted for emitted, _ in policy.asked[:4]] == [1, 5, 7, 8]
    assert backend.calls("verify")[0] == (text[0], *text[1:4])


def test_proposals_end_at_limits() -> None:
    """Of the answer, of the context and of a verification pass."""
    model = ToyModel(end_tokens=frozenset())
    text = plain(30, model)
    policy, stats, tokens, backend = proposing([text[1:]], 8, model, max_verify_tokens=6)
    assert tokens == text[:8]
    assert policy.asked == [(1, 5), (7, 0)][:1]  # at the last token nothing is asked
    assert max(len(batch) for batch in backend.calls("verify")) == 6


def test_nothing_is_proposed_behind_an_end_token() -> None:
    model = ToyModel(end_at=len(PROMPT) + 5)
    text = plain(40, model)
    assert text[-1] in model.end_tokens
    assert len(text) == 6
    policy, stats, tokens, backend = proposing([[*text[1:], 3, 4, 5]], 40, model)
    assert tokens == text
    assert stats.finish_reason == "stop"
    assert stats.draft_n == stats.draft_n_accepted == 5
    # an end token that is not the target's is no end
    policy, stats, tokens, backend = proposing([[0, 7, 7]], 40, model)
    assert tokens == text
    assert (stats.draft_n, stats.draft_n_accepted) == (1, 0)


def test_where_nothing_is_proposed_the_plan_drafts() -> None:
    """A cascade: lookup first, else a part of the target."""

    class Cascade(FixedPolicy):
        def __init__(self, draft: Draft, lookup: PromptLookup) -> None:
            super().__init__(draft)
            self._lookup = lookup

        def begin(self, sampling: Sampling, prompt: Sequence[int]) -> None:
            self._lookup.begin(sampling, prompt)

        def propose(self, emitted: Sequence[int], most: int) -> list[Guess]:
            return self._lookup.propose(emitted, most)

    bench = Bench(harm=GOOD)
    draft = Draft(Plan.skipping(len(bench.backend.sublayers), [4, 5]), 3, 0.0)
    stats = read(bench, Cascade(draft, PromptLookup(2, 4, 8)), 200, GREEDY)
    assert stats.latest_draft == draft
    under_plan = sum(plan is not None for plan in bench.backend.calls("decode"))
    assert 0 < under_plan < stats.draft_n  # the others were found


def test_time_to_propose_is_drafting_and_time_to_begin_is_the_prompts() -> None:
    model = ToyModel(end_tokens=frozenset())
    backend = FakeBackend(model)

    class Slow(Scripted):
        def begin(self, sampling: Sampling, prompt: Sequence[int]) -> None:
            assert list(prompt) == PROMPT
            backend.now_ms += 1000.0

        def propose(self, emitted: Sequence[int], most: int) -> list[Guess]:
            backend.now_ms += 100.0
            return super().propose(emitted, most)

    policy = Slow(iter([plain(4, model)[1:3]]))
    session = Session(backend, clock=backend.clock)
    generation = session.generate(PROMPT, max_tokens=4, policy=policy)
    assert [event.token for event in generation] == plain(4, model)
    assert 1000.0 <= generation.stats.prompt_ms < 1100.0
    assert generation.stats.draft_ms == pytest.approx(100.0)  # once; then one token was left


@pytest.mark.parametrize("place", ["begin", "propose"])
def test_an_interrupted_policy_leaves_a_session_in_order(place: str) -> None:
    model = ToyModel(end_tokens=frozenset())
    backend = FakeBackend(model)
    session = Session(backend)
    assert len(list(session.generate(PROMPT, max_tokens=9))) == 9

    class Stopping(Scripted):
        def begin(self, sampling: Sampling, prompt: Sequence[int]) -> None:
            if place == "begin":
                raise interrupted()

        def propose(self, emitted: Sequence[int], most: int) -> list[Guess]:
            raise interrupted()

    generation = session.generate(PROMPT[:7], max_tokens=9, policy=Stopping(iter([])))
    with pytest.raises(Interrupted):
        list(generation)
    assert generation.stats.finish_reason == "interrupted"
    assert session.ids == backend.tokens == tuple(PROMPT[: len(session.ids)])
    backend.check_ledger()
    assert [e.token for e in session.generate(PROMPT, max_tokens=9)] == plain(9, model)


# ---------------------------------------------------------------------------------------------
# In an engine


def engine(policy: str, *, harm: float = 0.05, **options: Any) -> Engine:
    vocabulary = FakeVocabulary(chat_template=CHATML)
    model = ScriptedModel(vocabulary=vocabulary, reply=lambda _: REPLY, default_harm=harm)
    fake = FakeBackend(model, n_layer=4, n_ctx=1024)
    return Engine(vocabulary, fake, policy=policy, clock=fake.clock, **options)  # type: ignore[arg-type]


REPLY = "One hare, two hares, three hares. One hare, two hares, four hares; that is all."
QUESTION = [{"role": "user", "content": "Count hares, please."}]


@pytest.mark.parametrize("name", ["layerskip", "kangaroo", "del", "asd", "clasp", "lookup"])
def test_an_engine_answers_by_any_policy(name: str) -> None:
    with engine(name) as opened:
        speculation = opened.set_speculation("auto")
        assert (speculation.state, speculation.policy) == ("on", name)
        assert speculation.reason == f"--policy {name}: always on"
        for spec in ("auto", "on"):
            opened.set_speculation(spec)
            answer = opened.chat(QUESTION)
            list(answer)
            assert answer.text == REPLY
            assert answer.stats.draft_n > answer.stats.draft_n_accepted > 0
            assert answer.speculation.policy == name
            shown = answer_json(answer, opened.backend.sublayers)["speculation"]
            assert (shown["state"], shown["policy"]) == ("on", name)
            assert (shown["plan"] is None) == (name == "lookup")
        opened.set_speculation("off")
        answer = opened.chat(QUESTION)
        list(answer)
        assert (answer.text, answer.stats.draft_n) == (REPLY, 0)


def test_a_policy_that_needs_costs_measures_them_once() -> None:
    with engine("random") as opened:
        assert opened.set_speculation("auto").policy == "random"
        computed = opened.backend.n_computed  # type: ignore[attr-defined]
        opened.set_speculation("auto")
        assert opened.backend.n_computed == computed  # type: ignore[attr-defined]
        answer = opened.chat(QUESTION)
        list(answer)
        assert answer.text == REPLY
        assert answer.stats.draft_n > 0
        assert answer.speculation.baseline_per_second is not None


def test_plain_as_a_policy_drafts_nothing() -> None:
    with engine("plain") as opened:
        assert opened.set_speculation("auto").state == "off"
        with pytest.raises(UsageError, match="plain never drafts"):
            opened.set_speculation("on")
        answer = opened.chat(QUESTION)
        list(answer)
        assert (answer.text, answer.stats.draft_n) == (REPLY, 0)


def test_an_engine_gives_any_policy_for_a_comparison() -> None:
    with engine("knapspec") as opened:
        for name in ("plain", "clasp", "lookup", "random", "knapspec", "knapspec-masks"):
            policy = opened.create_policy(name, forced=True)
            tokens = opened.require_template().apply(QUESTION).tokens
            generation = opened.session.generate(tokens, policy=policy)
            text = b"".join(opened.vocabulary.token_bytes(e.token) for e in generation)
            assert text.decode().startswith(REPLY)
            assert (generation.stats.draft_n > 0) == (name != "plain")
        with pytest.raises(UsageError, match="--policy draft-model needs --draft-model"):
            opened.create_policy("draft-model")
        with pytest.raises(UsageError, match="--policy x is unknown"):
            opened.create_policy("x")


def test_policies_of_a_comparison_learn_apart() -> None:
    with engine("knapspec") as opened:
        opened.set_speculation("on")
        assert opened.costs is not None
        kept = opened._book
        one, other = (opened.create_policy("knapspec-masks", forced=True) for _ in range(2))
        books = [one._book, other._book, kept]  # type: ignore[attr-defined]
        assert len({id(book) for book in books}) == 3
        tokens = opened.require_template().apply(QUESTION).tokens
        list(opened.session.generate(tokens, policy=one))
        one.settle()  # type: ignore[attr-defined]
        assert books[0].changed
        assert not books[1].changed
        assert not books[2].changed


def test_what_a_policy_holds_open_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []

    class Holding(Proposing):
        def propose(self, emitted: Sequence[int], most: int) -> list[Guess]:
            return []

        def close(self) -> None:
            closed.append("closed")

    monkeypatch.setattr(policies, "create", lambda name, setting: Holding())
    opened = engine("lookup")
    opened.set_speculation("auto")
    assert not closed
    opened.set_speculation("auto")
    assert len(closed) == 1
    opened.set_speculation("off")
    assert len(closed) == 2
    opened.set_speculation("auto")
    opened.close()
    assert len(closed) == 3


def test_an_engine_refuses_what_cannot_be_honoured() -> None:
    opened = engine("clasp")
    opened.backend.branch_refusal = "no cells beside the text"  # type: ignore[misc]
    with opened:
        for spec in ("auto", "on"):
            with pytest.raises(PlanError, match="--policy clasp cannot be honoured: no cells"):
                opened.set_speculation(spec)
        assert opened.speculation.state == "off"  # what held before still holds


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--policy", "draft-model"], "--policy draft-model needs --draft-model"),
        (["--policy", "plain", "--spec", "on"], "plain never drafts"),
        (["--policy", "nonsense"], "'nonsense' is not one of"),
        (["--draft-model", "x.gguf"], "--draft-model goes with --policy draft-model"),
    ],
)
def test_the_command_line_says_what_does_not_go_together(
    arguments: list[str], words: str, tmp_path: Path
) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes(b"GGUF")
    result = CliRunner().invoke(cli, ["run", str(model), "Hi", *arguments])
    assert result.exit_code == 2
    assert words in result.output
    assert "Traceback" not in result.output
