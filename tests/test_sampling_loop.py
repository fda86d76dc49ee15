"""Speculation under every sampling setting: the text, what comes with it, and the counters.

Penalties and grammars look at the text, so this is where drafted tokens could leak into it (cases
32, 33, 34, 42 and 43).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import naive
import naive_sampling
import numpy as np
import pytest
import toy_grammar
from fakes import FakeBackend, ToyModel, interrupted
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from stats_identity import check_stats

from knapspec_edge.decode.session import Generation, Session
from knapspec_edge.errors import NativeError, NoTokenError, RollbackError, UsageError
from knapspec_edge.records import Draft, Grammar, Pick, Plan, Sampling, Stats, TokenEvent

N_LAYER = 4
N_SUBLAYERS = 2 * N_LAYER
PROMPT = [3, 1, 4, 1, 5]
ENDLESS = ToyModel(end_tokens=frozenset())
# everything that is not a grammar at once
ALL = Sampling(
    0.9,
    min_p=0.02,
    seed=5,
    top_k=15,
    top_p=0.95,
    typical_p=0.97,
    repeat_penalty=1.4,
    presence_penalty=0.5,
    frequency_penalty=0.3,
    penalty_last_n=12,
    logit_bias=((7, 1.5), (9, -math.inf)),
    n_probs=3,
)


def draft_of(*skipped: int, gamma: int = 4, threshold: float = 0.0) -> Draft:
    return Draft(Plan.skipping(N_SUBLAYERS, list(skipped)), gamma, threshold)


USUAL = draft_of(1, 2, gamma=4)  # right mostly, wrong now and then


def check_events(model: ToyModel, prompt: Sequence[int], events: list[TokenEvent], n: int | None):
    """Log-probabilities are those of the whole model at their own place."""
    text = list(prompt)
    for event in events:
        if n is None:
            assert (event.logprob, event.top) == (None, ())
        else:
            expected = naive_sampling.log_probabilities(model.logits(text, None), event.token, n)
            assert (event.logprob, event.top) == expected
        assert event.position == len(text)
        text.append(event.token)


def read(session: Session, prompt: Sequence[int], **options: object) -> Read:
    return read_on(session, session.generate(prompt, **options), prompt)  # type: ignore[arg-type]


@dataclass
class Read:
    """What came of one generation."""

    events: list[TokenEvent]
    stats: Stats

    @property
    def tokens(self) -> list[int]:
        return [event.token for event in self.events]


def read_on(session: Session, generation: Generation, prompt: Sequence[int]) -> Read:
    """All of it, after checking what must always hold."""
    backend: FakeBackend = session._backend  # type: ignore[assignment]
    found = Read([], generation.stats)
    for event in generation:
        found.events.append(event)
        check_stats(generation.stats)
        assert generation.stats.completion_tokens == len(found.events)
    check_stats(generation.stats)
    backend.check_ledger()
    assert session.ids == backend.tokens == tuple([*prompt, *found.tokens][:-1])
    return found


# -- the text --------------------------------------------------------------------------------------

plans = st.lists(st.booleans(), min_size=N_SUBLAYERS, max_size=N_SUBLAYERS).map(
    lambda skip: Plan.skipping(N_SUBLAYERS, [i for i, s in enumerate(skip) if s])
)
drafts = st.builds(Draft, plans, st.integers(1, 12), st.sampled_from([0.0, 0.3, 0.9]))


@st.composite
def grammars(draw: st.DrawFn) -> Grammar:
    """Never a dead end: whatever can be used up has an end behind it."""
    allow = draw(st.lists(st.integers(1, 22), min_size=1, max_size=9, unique=True))
    statements = [f"allow {' '.join(map(str, allow))}"]
    if draw(st.booleans()):
        statements.append(f"end after {draw(st.integers(1, 30))}")
        if once := draw(st.lists(st.sampled_from(allow), unique=True)):
            statements.append(f"once {' '.join(map(str, once))}")
    return Grammar("; ".join(statements), ends=frozenset(draw(st.sets(st.just(0)))))


samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.3, 0.8, 1.5]),
    seed=st.integers(0, 3),
    temperature_first=st.booleans(),
    top_k=st.sampled_from([0, 0, 1, 4, 12]),
    typical_p=st.sampled_from([1.0, 1.0, 0.6, 0.95]),
    top_p=st.sampled_from([1.0, 1.0, 0.5, 0.9]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.5]),
    repeat_penalty=st.sampled_from([1.0, 1.3, 4.0]),
    presence_penalty=st.sampled_from([0.0, 1.0, -1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.5]),
    penalty_last_n=st.sampled_from([-1, 0, 1, 5, 64]),
    logit_bias=st.dictionaries(
        st.integers(1, 22), st.sampled_from([-math.inf, -2.0, 3.0]), max_size=4
    ).map(lambda found: tuple(found.items())),
    grammar=st.one_of(st.none(), grammars()),
    n_probs=st.sampled_from([None, 0, 1, 5, 50]),
)


class TestIdentity:
    """Text with speculation equals text without it, under all settings."""

    coverage: Counter[str] = Counter()

    @settings(max_examples=300, deadline=None)
    @given(
        draft=drafts,
        sampling=samplings,
        seed=st.integers(0, 10**6),
        harm=st.sampled_from([0.0, 0.05, 0.3]),
        prompt=st.lists(st.integers(0, 22), min_size=1, max_size=10),
        max_tokens=st.one_of(st.none(), st.integers(1, 40)),
        n_ctx=st.integers(12, 60),
        end_after=st.one_of(st.none(), st.integers(0, 30)),
        max_verify=st.integers(1, 16),
    )
    def test_any_plan_gives_the_plain_text(
        self, draft, sampling, seed, harm, prompt, max_tokens, n_ctx, end_after, max_verify
    ) -> None:
        model = ToyModel(
            seed=seed,
            default_harm=harm,
            end_at=None if end_after is None else len(prompt) + end_after,
        )
        if sampling.grammar is not None and not bias_leaves_a_way(sampling):
            sampling = replace(sampling, logit_bias=())
        backend = FakeBackend(model, n_layer=N_LAYER, n_ctx=n_ctx, max_verify_tokens=max_verify)
        limit = min(max_tokens or n_ctx, n_ctx - len(prompt))
        expected, finish = naive.plain(model, prompt, limit, sampling)
        twin = naive.speculative(model, prompt, limit, sampling, draft, max_verify)
        assert twin.tokens == expected

        found = read(
            Session(backend), prompt, sampling=sampling, draft=draft, max_tokens=max_tokens
        )
        stats = found.stats
        assert found.tokens == expected
        assert stats.finish_reason == finish
        assert (stats.rounds, stats.draft_n) == (len(twin.drafted), sum(twin.drafted))
        assert stats.draft_n_accepted == sum(twin.accepted)
        check_events(model, prompt, found.events, sampling.n_probs)
        self.note(model, prompt, limit, sampling, found, twin)

    def note(self, model, prompt, limit, sampling, found, twin) -> None:
        """What these examples were worth."""
        without = replace(sampling, grammar=None)
        if sampling.grammar is not None:
            grammar = toy_grammar.of(sampling.grammar, model.n_vocab)
            for n in range(1, len(found.tokens) + 1):
                assert grammar.accepts(found.tokens[:n], model.end_tokens)
            self.coverage["grammar decides"] += (
                naive.plain(model, prompt, limit, without)[0] != found.tokens
            )
            block = [e.drafted for e in found.events]
            ended = found.tokens[-1] in model.end_tokens and len(found.tokens) > 1
            self.coverage["grammar ends in a block"] += ended and (block[-1] or block[-2])
        free = replace(without, penalty_last_n=0)
        if naive.plain(model, prompt, limit, free) != naive.plain(model, prompt, limit, without):
            self.coverage["penalties decide"] += stats_of(twin)["accepted"] > 0
            self.coverage["penalties decide beside a rejection"] += stats_of(twin)["rejected"] > 0
        for case, n in stats_of(twin).items():
            self.coverage[case] += n
        self.coverage["cut"] += found.stats.cut_n > 0

    def test_all_of_that_really_happened(self) -> None:
        if not self.coverage:
            pytest.skip("the property test was deselected")
        for case in (
            "drafted", "accepted", "rejected", "fully accepted", "cut", "grammar decides",
            "grammar ends in a block", "penalties decide", "penalties decide beside a rejection",
        ):  # fmt: skip
            assert self.coverage[case] > 0, case

    @pytest.mark.parametrize("gamma", [1, 4, 7])
    @pytest.mark.parametrize("extra", ["1", "2", "gamma", "gamma+1", "64"])
    def test_exactly_as_many_as_asked(self, gamma: int, extra: str) -> None:
        wanted = {"gamma": gamma, "gamma+1": gamma + 1}.get(extra) or int(extra)
        backend = FakeBackend(ENDLESS)
        draft = draft_of(1, gamma=gamma)
        found = read(Session(backend), PROMPT, sampling=ALL, draft=draft, max_tokens=wanted)
        assert found.tokens == naive.plain(ENDLESS, PROMPT, wanted, ALL)[0]
        assert len(found.tokens) == wanted
        assert found.stats.finish_reason == "length"
        check_events(ENDLESS, PROMPT, found.events, 3)

    def test_a_bias_that_forbids_is_never_said(self) -> None:
        forbidden = {t: -math.inf for t in range(0, 23, 2)}
        sampling = Sampling(1.5, logit_bias=tuple(forbidden.items()))
        found = read(Session(FakeBackend(ENDLESS)), PROMPT, sampling=sampling, draft=USUAL)
        assert found.stats.draft_n_accepted > 0
        assert not forbidden.keys() & set(found.tokens)


def bias_leaves_a_way(sampling: Sampling) -> bool:
    """Whether no bias forbids what the grammar asks for."""
    assert sampling.grammar is not None
    forbidden = {t for t, bias in sampling.logit_bias if bias == -math.inf}
    return not forbidden & toy_grammar.of(sampling.grammar, 23).allow


def stats_of(twin: naive.Rounds) -> dict[str, int]:
    rounds = list(zip(twin.drafted, twin.accepted, strict=True))
    return {
        "drafted": sum(twin.drafted) > 0,
        "accepted": sum(twin.accepted) > 0,
        "rejected": any(accepted < drafted for drafted, accepted in rounds),
        "fully accepted": any(1 < drafted == accepted for drafted, accepted in rounds),
    }


# -- what penalties and grammar see ----------------------------------------------------------------


@dataclass
class Wishes(ToyModel):
    """At each position the target wants one token, and would take another."""

    wants: dict[int, int] | None = None
    instead: dict[int, int] | None = None
    drafts: dict[int, int] | None = None  # what a plan makes it want

    def logits(self, tokens: Sequence[int], plan: Plan | None) -> NDArray[np.float32]:
        values = np.zeros(self.n_vocab, dtype=np.float32)
        position = len(tokens)
        wanted = (self.wants or {}).get(position, 1)
        if plan is not None:
            wanted = (self.drafts or {}).get(position, wanted)
        values[wanted] = 10.0
        if position in (self.instead or {}):
            values[self.instead[position]] = 9.0
        return values


# After the prompt 1 2 and the first token 5, a fully accepted block 6 7 8 and the target's own 11;
# then a rejected draft of 13 where the target wants 12, and then the target does want 13.
CASE_42 = Wishes(
    end_tokens=frozenset(),
    wants={2: 5, 3: 6, 4: 7, 5: 6, 6: 7, 7: 12, 8: 13},
    instead={5: 8, 6: 11, 8: 14},
    drafts={7: 13},
)


class HearsRejected(FakeBackend):
    """The mistake of a state that drafts advance and nobody takes back."""

    def __init__(self, model: ToyModel) -> None:
        super().__init__(model)
        self.heard: list[int] = []

    def truncate(self, n_tokens: int) -> None:
        self.heard += self._tokens[n_tokens:]
        super().truncate(n_tokens)

    def history_of(self, text: Sequence[int]) -> Sequence[int]:
        return [*text[: self._answer_start], *self.heard, *text[self._answer_start :]]


class HearsBlockStart(FakeBackend):
    """The mistake of a state that stands still while a block is verified, then takes its last."""

    def verify(self, tokens: Sequence[int], sampling: Sampling):
        self.block = (self.n_past, self.n_past + len(tokens))
        return super().verify(tokens, sampling)

    block = (0, 0)

    def history_of(self, text: Sequence[int]) -> Sequence[int]:
        start, end = self.block
        if self.log[-1][0] == "verify":
            return text[: start + 1]
        return [*text[: start + 1], *text[end - 1 :]]


def drafting(backend: FakeBackend, sampling: Sampling, n: int, gamma: int = 3) -> Read:
    return read(
        Session(backend),
        [1, 2],
        sampling=sampling,
        draft=Draft(Plan.skipping(N_SUBLAYERS, [1]), gamma, 0.0),
        max_tokens=n,
    )


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(presence_penalty=2.0),
        Sampling(repeat_penalty=1.5),
        Sampling(frequency_penalty=2.0, penalty_last_n=-1),
        Sampling(0.01, presence_penalty=2.0, top_k=2),
    ],
    ids=["presence", "repeat", "frequency", "sampled"],
)
class TestPenaltiesSeeTheText:
    """Case 42: every accepted token counts, not only the last of a block; a rejected one never."""

    SAID = [5, 6, 7, 8, 11, 12, 13]  # noqa: RUF012

    def test_accepted_tokens_count_and_rejected_ones_do_not(self, sampling: Sampling) -> None:
        assert naive.plain(CASE_42, [1, 2], 7, sampling)[0] == self.SAID
        found = drafting(FakeBackend(CASE_42), sampling, 7)
        assert found.tokens == self.SAID
        # a round of three that is accepted whole, one whose only try is rejected
        assert found.stats.accepted_lengths == {3: 1, 0: 1}

    def test_without_penalties_all_of_that_would_be_said_again(self, sampling: Sampling) -> None:
        free = replace(sampling, penalty_last_n=0)
        assert drafting(FakeBackend(CASE_42), free, 7).tokens == [5, 6, 7, 6, 7, 12, 13]

    def test_a_rejected_token_that_counts_is_noticed(self, sampling: Sampling) -> None:
        assert drafting(HearsRejected(CASE_42), sampling, 7).tokens[-1] == 14

    def test_a_block_that_counts_too_late_is_noticed(self, sampling: Sampling) -> None:
        said = drafting(HearsBlockStart(CASE_42), sampling, 7).tokens
        assert said != self.SAID
        assert said[:3] == self.SAID[:3]


def test_mistakes_in_the_history_show_in_ordinary_texts_too() -> None:
    """What the property test above would make of them."""
    sampling = Sampling(0.8, seed=2, repeat_penalty=1.5, presence_penalty=1.0)
    wrong: Counter[str] = Counter()
    for seed in range(20):
        model = ToyModel(seed=seed, end_tokens=frozenset(), default_harm=0.2)
        expected = naive.plain(model, PROMPT, 40, sampling)[0]
        for backend in (FakeBackend, HearsRejected, HearsBlockStart):
            found = read(
                Session(backend(model)), PROMPT, sampling=sampling, draft=USUAL, max_tokens=40
            )
            wrong[backend.__name__] += found.tokens != expected
    assert wrong["FakeBackend"] == 0
    assert wrong["HearsRejected"] > 10
    assert wrong["HearsBlockStart"] > 10


class TestGrammar:
    """Case 43: never violated, whatever is drafted."""

    @pytest.mark.parametrize("sampling", [Sampling(), ALL], ids=["greedy", "all"])
    def test_an_end_inside_a_block_ends_the_answer(self, sampling: Sampling) -> None:
        inside = 0
        for n in range(1, 15):
            model = ToyModel(seed=n, end_at=10_000)  # of itself, the model never ends
            grammar = Grammar(f"allow 2 3 5 7 11 13; end after {n}")
            asked = replace(sampling, grammar=grammar)
            found = read(
                Session(FakeBackend(model)), PROMPT, sampling=asked, draft=USUAL, max_tokens=60
            )
            assert found.tokens == naive.plain(model, PROMPT, 60, asked)[0]
            assert set(found.tokens[:-1]) <= {2, 3, 5, 7, 11, 13}
            assert (len(found.tokens), found.tokens[-1]) == (n + 1, 0)
            assert found.stats.finish_reason == "stop"
            assert found.stats.draft_n > 0 or n == 1
            inside += found.events[-1].drafted
            check_events(model, PROMPT, found.events, asked.n_probs)
        assert inside > 2

    def test_a_rejected_token_is_not_used_up(self) -> None:
        """The draft says 13 once in vain; then it is still there to be said."""
        model = replace(CASE_42, end_tokens=frozenset({0}), wants={2: 5, 3: 6, 4: 7, 7: 12, 8: 13})
        grammar = Grammar("allow 5 6 7 8 11 12 13 14; once 5 6 7 8 11 12 13 14; end after 7")
        sampling = Sampling(grammar=grammar)
        expected = naive.plain(model, [1, 2], 20, sampling)[0]
        assert expected == [5, 6, 7, 8, 11, 12, 13, 0]
        found = drafting(FakeBackend(model), sampling, 20)
        assert found.tokens == expected
        assert 0 in found.stats.accepted_lengths
        mistaken = drafting(HearsRejected(model), sampling, 20)
        assert mistaken.tokens != expected

    def test_it_begins_with_the_answer(self) -> None:
        """Prompts are not asked, neither in a first turn nor in a later one."""
        sampling = Sampling(grammar=Grammar("allow 2 3 5; once 2 3 5; end after 4"))
        backend = FakeBackend(ToyModel(end_at=10_000))
        session = Session(backend)
        history = [9, 2, 3, 5, 22]
        for _ in range(3):
            found = read(session, history, sampling=sampling, draft=USUAL)
            assert sorted(found.tokens) == [0, 2, 3, 5]
            history += [*found.tokens, 8]

    def test_ends_that_the_grammar_names_are_ends(self) -> None:
        sampling = Sampling(grammar=Grammar("allow 2 3 5; end after 6", ends=frozenset({17})))
        found = read(
            Session(FakeBackend(ENDLESS)),
            PROMPT,
            sampling=sampling,
            draft=USUAL,
            is_end=lambda token: token == 17,
        )
        assert (len(found.tokens), found.tokens[-1]) == (7, 17)
        assert found.stats.finish_reason == "stop"

    @pytest.mark.parametrize(
        "text",
        ["", "allow", "allow x", "permit 3", "allow 3; allow 4", "allow 99", "allow 3; end after",
         "allow 3;"],
    )  # fmt: skip
    def test_what_cannot_be_read_is_refused_before_anything_is_computed(self, text: str) -> None:
        backend = FakeBackend()
        session = Session(backend)
        with pytest.raises(UsageError, match="grammar") as caught:
            session.generate(PROMPT, sampling=Sampling(grammar=Grammar(text)), draft=USUAL)
        assert "\n" not in str(caught.value)
        assert backend.n_computed == 0
        with pytest.raises(UsageError, match="bias on token 23"):
            session.generate(PROMPT, sampling=Sampling(logit_bias=((23, 1.0),)))


# -- every ending ----------------------------------------------------------------------------------


class TestNothingToPick:
    """Where no token can be picked behind drafted ones, that must not reach the text before it."""

    # both may be said once, in either order, and then nothing is left
    GRAMMAR = Sampling(0.9, seed=3, grammar=Grammar("allow 3 5 7; once 3 5 7"))

    @pytest.mark.parametrize("gamma", [1, 2, 3, 4, 8])
    @pytest.mark.parametrize("skipped", [(), (1, 2), (0, 1, 2, 3)])
    def test_a_dead_end_is_reached_where_plain_decoding_reaches_it(
        self, gamma: int, skipped: tuple[int, ...]
    ) -> None:
        said = []
        for draft in (None, draft_of(*skipped, gamma=gamma)):
            backend = FakeBackend(ENDLESS)
            session = Session(backend)
            generation = session.generate(PROMPT, sampling=self.GRAMMAR, draft=draft, max_tokens=20)
            tokens = []
            with pytest.raises(NoTokenError, match="allows no token"):
                tokens.extend(event.token for event in generation)
            check_stats(generation.stats)
            backend.check_ledger()
            assert session.ids == backend.tokens == tuple([*PROMPT, *tokens][:-1])
            said.append(tokens)
        assert sorted(said[0]) == [3, 5, 7]
        assert said[1] == said[0]

    @pytest.mark.parametrize("time", range(1, 12))
    def test_a_draft_network_that_fails_leaves_the_text_alone(self, time: int) -> None:
        """Such as one whose logits are no numbers."""
        backend = FakeBackend(ENDLESS)
        failed = 0

        class Failing(FakeBackend):
            n_drafted = 0

            def decode(self, token: int, sampling: Sampling, plan: Plan | None = None) -> Pick:
                nonlocal failed
                if plan is not None:
                    self.n_drafted += 1
                    if self.n_drafted % time == 0:
                        failed += 1
                        raise NoTokenError("no finite logit")
                return super().decode(token, sampling, plan)

        plain = read(Session(backend), PROMPT, sampling=ALL, max_tokens=40)
        found = read(Session(Failing(ENDLESS)), PROMPT, sampling=ALL, draft=USUAL, max_tokens=40)
        assert found.tokens == plain.tokens
        assert failed > 0


class TestEndings:
    """Tokens, what comes with them, counters and cache agree after every way to end."""

    def after(
        self,
        session: Session,
        events: list[TokenEvent],
        stats: Stats,
        reason: str | None,
        model: ToyModel = ENDLESS,
        *,
        lost: bool = False,
    ) -> None:
        """What holds after any ending, and that the next answer is as if nothing had happened.
        `lost`: the cache had to be emptied."""
        backend: FakeBackend = session._backend  # type: ignore[assignment]
        tokens = [event.token for event in events]
        check_stats(stats)
        assert stats.completion_tokens == len(tokens)
        assert stats.finish_reason == reason
        assert tokens == naive.plain(model, PROMPT, 60, ALL)[0][: len(tokens)]
        check_events(model, PROMPT, events, 3)
        backend.check_ledger()
        text = [*PROMPT, *tokens]
        # all but the last token; where a stop string was cut off behind it, that one too
        assert session.ids == backend.tokens == tuple(text[: len(session.ids)])
        assert lost or len(session.ids) >= len(text) - 1
        again = read(session, text, sampling=ALL, draft=USUAL, max_tokens=9)
        assert again.tokens == naive.plain(model, text, 9, ALL)[0]

    def test_end_token_at_the_edge_of_a_block_and_inside(self) -> None:
        inside = outside = 0
        for end_after in range(1, 20):
            model = ToyModel(end_at=len(PROMPT) + end_after)
            session = Session(FakeBackend(model))
            found = read(session, PROMPT, sampling=ALL, draft=USUAL, max_tokens=60)
            assert len(found.tokens) == end_after + 1
            # where the end was drafted, the target has picked a token behind it
            assert found.stats.cut_n == found.events[-1].drafted
            inside += found.events[-1].drafted
            outside += not found.events[-1].drafted
            self.after(session, found.events, found.stats, "stop", model)
        assert min(inside, outside) > 2

    def test_end_and_limit_at_once(self) -> None:
        model = ToyModel(end_at=len(PROMPT) + 6)
        for draft in (None, draft_of(gamma=9), USUAL):
            session = Session(FakeBackend(model))
            found = read(session, PROMPT, sampling=ALL, draft=draft, max_tokens=7)
            self.after(session, found.events, found.stats, "stop", model)

    @pytest.mark.parametrize("limit", range(1, 20))
    def test_limit(self, limit: int) -> None:
        session = Session(FakeBackend(ENDLESS))
        found = read(session, PROMPT, sampling=ALL, draft=USUAL, max_tokens=limit)
        assert len(found.tokens) == limit
        self.after(session, found.events, found.stats, "length")

    @pytest.mark.parametrize("n_ctx", range(6, 30))
    def test_the_context_is_full(self, n_ctx: int) -> None:
        session = Session(FakeBackend(ENDLESS, n_ctx=n_ctx))
        found = read(session, PROMPT, sampling=ALL, draft=USUAL)
        assert len(found.tokens) == n_ctx - len(PROMPT)
        assert found.stats.finish_reason == "length"
        check_events(ENDLESS, PROMPT, found.events, 3)

    @pytest.mark.parametrize("surplus", [0, 1, 3])
    def test_a_stop_string_or_a_reader_cuts_anywhere_in_a_block(self, surplus: int) -> None:
        """`surplus` of the tokens that were read made up the stop string."""
        inside = across = 0
        for n in range(surplus + 1, 30):
            session = Session(FakeBackend(ENDLESS))
            generation = session.generate(PROMPT, sampling=ALL, draft=USUAL, max_tokens=60)
            events = [next(generation) for _ in range(n)]
            inside += generation.stats.cut_n > 0
            across += len({event.round for event in events[n - surplus :]}) > 1
            reason = "stop" if surplus else None
            generation.close(reason, unread=surplus)
            self.after(session, events[: n - surplus], generation.stats, reason)
        assert inside > 5
        assert across > 5 or surplus < 2

    @pytest.mark.parametrize("error", [interrupted(), KeyboardInterrupt(), NativeError("broken")])
    @pytest.mark.parametrize("where", ["prefill", "draft", "verify", "plain"])
    @pytest.mark.parametrize("time", range(5))
    def test_interrupts_and_errors(self, where: str, error: BaseException, time: int) -> None:
        prompt = PROMPT if where != "prefill" else [*PROMPT, *range(1, 18)]
        backend = FakeBackend(ENDLESS, slice_tokens=4)
        draft = None if where == "plain" else USUAL
        backend.fail_at[nth_call(where, time, prompt, draft)] = error
        session = Session(backend)
        generation = session.generate(prompt, sampling=ALL, draft=draft, max_tokens=60)
        events: list[TokenEvent] = []
        with pytest.raises(type(error)):
            events.extend(generation)
        reason = "interrupted" if not isinstance(error, NativeError) else None
        if where == "prefill":
            check_stats(generation.stats)
            assert (events, generation.stats.finish_reason) == ([], reason)
            assert session.ids == backend.tokens == tuple(prompt[: 4 * time])
            backend.check_ledger()
            again = read(session, prompt, sampling=ALL, draft=USUAL, max_tokens=9)
            assert again.tokens == naive.plain(ENDLESS, prompt, 9, ALL)[0]
            assert again.stats.cached_tokens == 4 * time
        else:
            self.after(session, events, generation.stats, reason)

    @pytest.mark.parametrize("deaf", range(6))
    def test_a_cut_without_effect(self, deaf: int) -> None:
        backend = FakeBackend(ENDLESS)
        backend.deaf_truncations = {deaf}
        session = Session(backend)
        generation = session.generate(PROMPT, sampling=ALL, draft=USUAL, max_tokens=60)
        events: list[TokenEvent] = []
        with pytest.raises(RollbackError):
            events.extend(generation)
        assert session.ids == backend.tokens == ()
        self.after(session, events, generation.stats, None, lost=True)

    def test_a_cut_without_effect_while_the_reader_leaves(self) -> None:
        """Inside a block the rest of it is cut, behind a stop string that as well."""
        raised = emptied = 0
        for n in range(3, 20):
            backend = FakeBackend(ENDLESS)
            session = Session(backend)
            generation = session.generate(PROMPT, sampling=ALL, draft=USUAL, max_tokens=60)
            events = [next(generation) for _ in range(n)]
            backend.deaf_truncations = {backend._truncations}
            kept = events[:-2]
            try:
                generation.close("stop", unread=2)
            except RollbackError:
                # closing broke off, so what was read is still what counts
                kept, reason = events, None
                raised += 1
            else:
                reason = "stop"
            backend.deaf_truncations.clear()
            emptied += session.ids == ()
            self.after(session, kept, generation.stats, reason, lost=True)
        assert raised > 3
        assert emptied > raised

    def test_the_next_generation_starts(self) -> None:
        inside = 0
        for n in range(1, 20):
            session = Session(FakeBackend(ENDLESS))
            generation = session.generate(PROMPT, sampling=ALL, draft=USUAL, max_tokens=60)
            events = [next(generation) for _ in range(n)]
            inside += generation.stats.cut_n > 0
            next(session.generate([*PROMPT, *(e.token for e in events)], max_tokens=1))
            check_stats(generation.stats)
            assert generation.stats.completion_tokens == n
            assert list(generation) == []
            session.reset()
            self.after(session, events, generation.stats, None, lost=True)
        assert inside > 5


def nth_call(where: str, n: int, prompt: Sequence[int], draft: Draft | None) -> int:
    """Number, as `fail_at` counts, of the n-th computing call of a kind, by trying it out."""
    backend = FakeBackend(ENDLESS, slice_tokens=4)
    list(Session(backend).generate(prompt, sampling=ALL, draft=draft, max_tokens=60))
    computing = [c for c in backend.log if c[0] in ("prefill", "decode", "verify")]
    is_it: dict[str, Callable[[str, object], bool]] = {
        "prefill": lambda call, _: call == "prefill",
        "draft": lambda call, plan: call == "decode" and plan is not None,
        "verify": lambda call, _: call == "verify",
        "plain": lambda call, plan: call == "decode" and plan is None,
    }
    return [i for i, c in enumerate(computing) if is_it[where](*c)][n]


def test_the_identity_notices_every_miscount() -> None:
    """`check_stats` is only worth something if it fails."""
    backend = FakeBackend(ENDLESS)
    stats = read(Session(backend), PROMPT, draft=USUAL, max_tokens=40).stats
    assert len(stats.accepted_at) == 4
    wrong = [
        {name: getattr(stats, name) + 1}
        for name in ("completion_tokens", "rounds", "draft_n_accepted", "target_n", "cut_n")
    ]
    wrong += [
        {"draft_n": stats.draft_n_accepted - 1},
        {"draft_n": 0},
        {"cut_n": -1, "completion_tokens": stats.completion_tokens + stats.cut_n + 1},
        {"accepted_lengths": {**stats.accepted_lengths, 0: 10**6}},
        {"accepted_lengths": {4: stats.draft_n_accepted}},
        {"accepted_at": [n + 1 for n in stats.accepted_at]},
        {"accepted_at": stats.accepted_at[::-1]},
        {"tried_at": [n + 100 for n in stats.tried_at]},
        {"tried_at": [0] * len(stats.tried_at)},
        {"latest_draft": None},
        {"cached_tokens": stats.prompt_tokens + 1},
    ]
    check_stats(stats)
    for change in wrong:
        with pytest.raises(AssertionError):
            check_stats(replace(stats, **change))
