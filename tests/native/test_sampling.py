"""Sampling on whole models: the distribution of what is said, and that speculation changes nothing.

The distribution is compared with its enumeration from the rows of logits (tests/naive_sampling.py),
so a mistake in the native filters, in the history that penalties see, in the race or in the second
race after a rejection by the grammar shows as a wrong frequency.
"""

from __future__ import annotations

import ctypes
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import naive_sampling
import numpy as np
import pytest
from numpy.typing import NDArray
from stats_identity import check_stats

from knapspec_edge.decode.session import Session
from knapspec_edge.errors import NoTokenError, UsageError
from knapspec_edge.native import bindings, open_context, open_model
from knapspec_edge.records import Draft, Grammar, Pick, Plan, Sampling, Stats, TokenEvent

from .picking import native_pick

EXACT = {"kv_type": "f32", "flash_attn": "off"}
# ends with what the model finds likely, so that penalties matter
PROMPT = [3, 6, 28, 98, 6, 14, 76]

# The vocabulary of the tiny models is made of the numbers 0..7f in hexadecimal digits. Answers
# under this grammar, finished or not, are what the expression matches.
GBNF = Grammar("root ::= [1-4] [0-9] ([a-f] [0-9]* | [0-3])*")
MATCHES = re.compile("(?:[1-4](?:[0-9](?:[a-f][0-9]*|[0-3])*)?)?")

# The logits of a tiny model differ by a few tenths: only a low temperature tells them apart.
SETTINGS = {
    "temperature": Sampling(0.1),
    "filters": Sampling(0.1, top_k=25, top_p=0.9, min_p=0.05),
    "typical": Sampling(0.1, typical_p=0.5, temperature_first=True),
    # negative ones make what stands in the window more probable, so that it does come
    "penalties": Sampling(
        0.1, repeat_penalty=1.4, presence_penalty=-0.4, frequency_penalty=0.1, penalty_last_n=5
    ),
    "bias": Sampling(0.1, logit_bias=((9, 0.5), (17, -0.3), (42, -float("inf")))),
    "paper": Sampling(0.7, top_k=50, top_p=0.95, temperature_first=True),
    "grammar": Sampling(0.2, grammar=GBNF),
    "all": Sampling(
        0.15,
        top_k=40,
        typical_p=0.95,
        top_p=0.9,
        min_p=0.02,
        temperature_first=True,
        repeat_penalty=1.5,
        frequency_penalty=0.1,
        penalty_last_n=-1,
        logit_bias=((50, 0.2),),
        grammar=GBNF,
    ),
}


@pytest.fixture(scope="module")
def llama(tiny_models: Path, patched_library: Path) -> Iterator[Any]:
    with (
        open_model(tiny_models / "llama-dense.gguf") as model,
        open_context(model, ctx_tokens=128, threads=1, **EXACT) as context,
    ):
        yield context


@lru_cache(maxsize=4096)
def fits(answer: str) -> bool:
    return MATCHES.fullmatch(answer) is not None


def allowed(sampling: Sampling, answer: Sequence[int], n_vocab: int) -> NDArray[np.bool_] | None:
    """bool [n_vocab]: what the grammar lets pass behind the tokens of an answer."""
    if sampling.grammar is None:
        return None
    said = "".join(f"{t:x}" for t in answer)
    return np.array([fits(f"{said}{t:x}") for t in range(n_vocab)])


def forced(context: Any, *skipped: int, gamma: int) -> Draft:
    return Draft(Plan.skipping(len(context.sublayers), list(skipped)), gamma, 0.0)


def said(
    session: Session, sampling: Sampling, n: int, draft: Draft | None, prompt: Sequence[int]
) -> tuple[list[TokenEvent], Stats]:
    generation = session.generate(prompt, sampling=sampling, draft=draft, max_tokens=n)
    events = list(generation)
    check_stats(generation.stats)
    return events, generation.stats


def two_tokens(context: Any, sampling: Sampling) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Probabilities f64 [n_vocab] of the first token of an answer and of its second, by summing
    over all first ones."""
    n_vocab = context.n_vocab
    context.truncate(0)
    context.prefill(PROMPT, Sampling())
    first = naive_sampling.distribution(
        context.logits(), sampling, PROMPT, allowed(sampling, [], n_vocab)
    )
    second = np.zeros(n_vocab)
    for token in np.flatnonzero(first > 1e-9).tolist():
        context.truncate(len(PROMPT))
        context.decode(token, Sampling())
        second += first[token] * naive_sampling.distribution(
            context.logits(), sampling, [*PROMPT, token], allowed(sampling, [token], n_vocab)
        )
    context.truncate(0)
    return first, second / second.sum()


@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_tokens_come_as_often_as_the_model_says(llama: Any, name: str) -> None:
    """With and without speculation, the second token drafted under a plan that is often wrong."""
    sampling = SETTINGS[name]
    expected = two_tokens(llama, sampling)
    n = 1200
    # a plan that leaves most of the network out
    draft = forced(llama, 0, 1, 2, gamma=2)
    for offset, used in ((0, None), (n, draft)):
        session = Session(llama)
        texts, accepted, drafted = [], 0, 0
        for seed in range(offset, offset + n):
            # with room for a draft of two behind the first token
            length = 2 if used is None else 4
            events, stats = said(session, replace(sampling, seed=seed), length, used, PROMPT)
            texts.append([event.token for event in events])
            accepted += stats.draft_n_accepted
            drafted += stats.draft_n
        for place in (0, 1):
            counts = Counter(text[place] for text in texts)
            assert naive_sampling.chi_square_excess(counts, expected[place]) <= 0, (place, used)
        assert 0 < accepted < drafted or used is None


@pytest.mark.parametrize(
    ("name", "forgotten"),
    [
        ("filters", {"top_k": 0, "top_p": 1.0, "min_p": 0.0}),
        ("filters", {"temperature_first": True}),
        ("typical", {"typical_p": 1.0}),
        ("bias", {"logit_bias": ()}),
        ("penalties", {"presence_penalty": 0.0}),
        ("penalties", {"frequency_penalty": 0.0}),
        ("penalties", {"repeat_penalty": 1.0}),
        ("penalties", {"penalty_last_n": 4}),
        ("penalties", {"penalty_last_n": 6}),
        ("typical", {"temperature_first": False}),
        ("grammar", {"grammar": None}),
    ],
    ids=str,
)
def test_the_comparison_notices_what_is_forgotten(
    llama: Any, name: str, forgotten: dict[str, Any]
) -> None:
    """What the test above would say if a setting were ignored, or a window off by one."""
    expected, _ = two_tokens(llama, SETTINGS[name])
    session = Session(llama)
    counts = Counter(
        said(session, replace(SETTINGS[name], **forgotten, seed=seed), 1, None, PROMPT)[0][0].token
        for seed in range(1200)
    )
    assert naive_sampling.chi_square_excess(counts, expected) > 0


# -- every pick ------------------------------------------------------------------------------------


class Checked:
    """A context whose picks are compared with the twin's, whatever was computed before."""

    def __init__(self, context: Any, sampling: Sampling) -> None:
        self.context, self.sampling = context, sampling
        self.text: list[int] = []
        self.start = 0  # of the answer
        self.tried = self.doubts = 0
        context.truncate(0)

    def allowed(self, n: int | None = None) -> NDArray[np.bool_] | None:
        """What may follow the first n tokens of the text."""
        return allowed(self.sampling, self.text[self.start : n], self.context.n_vocab)

    def follow(self, random: np.random.Generator, n: int) -> list[int]:
        """Add n tokens of anybody's choice that keep to the grammar."""
        added = []
        for _ in range(n):
            mask = self.allowed()
            fitting = np.arange(self.context.n_vocab) if mask is None else np.flatnonzero(mask)
            added.append(int(random.choice(fitting)))
            self.text.append(added[-1])
        return added

    def prefill(self, tokens: list[int]) -> None:
        self.text += tokens
        self.start = len(self.text)
        self._check([self.context.prefill(tokens, self.sampling)])

    def decode(self, random: np.random.Generator, plan: Plan | None) -> None:
        (token,) = self.follow(random, 1)
        self._check([self.context.decode(token, self.sampling, plan)])

    def verify(self, random: np.random.Generator, n: int) -> None:
        self._check(self.context.verify(self.follow(random, n), self.sampling))

    def cut(self, n: int) -> None:
        del self.text[n:]
        self.context.truncate(n)

    def _check(self, picks: list[Pick]) -> None:
        for i, pick in enumerate(picks):
            end = len(self.text) - len(picks) + 1 + i
            expected = naive_sampling.outcomes(
                self.context.logits(i), self.sampling, end, self.text[:end], self.allowed(end)
            )
            self.tried += 1
            if naive_sampling.doubtful(expected, self.sampling):
                self.doubts += 1
            else:
                assert pick.token == expected[0].token, (end, pick, expected[0])


@pytest.mark.parametrize("name", sorted(SETTINGS))
@pytest.mark.parametrize("greedy", [False, True], ids=["sampled", "greedy"])
def test_a_pick_depends_on_the_text_alone(
    llama: Any, name: str, greedy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not on how the text came to be in the cache: prompts in slices, drafts, blocks, cuts."""
    monkeypatch.setattr(llama, "_slice", 3)
    random = np.random.default_rng(5)
    plan = Plan.skipping(len(llama.sublayers), [1, 2])
    tried = doubts = 0
    for seed in range(6):
        sampling = replace(SETTINGS[name], seed=seed)
        if greedy:
            sampling = replace(sampling, temperature=0.0)
        checked = Checked(llama, sampling)
        checked.prefill(PROMPT[: 2 + seed])
        for _ in range(6):
            kept = len(checked.text)
            for _ in range(int(random.integers(0, 4))):
                checked.decode(random, plan)
            checked.cut(kept)
            checked.verify(random, int(random.integers(1, 6)))
            checked.cut(int(random.integers(kept, len(checked.text) + 1)))
            checked.decode(random, None)
            if random.random() < 0.2:  # another turn
                checked.prefill([int(t) for t in random.integers(0, llama.n_vocab, 5)])
        tried += checked.tried
        doubts += checked.doubts
    assert doubts <= 0.02 * tried + 1
    llama.truncate(0)


@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_passes_beside_the_text_look_back_on_their_own_past(llama: Any, name: str) -> None:
    """Each block on the text before it, then on its own tokens; penalties and grammar included."""
    random = np.random.default_rng(6)
    same = far = 0
    for seed in range(4):
        checked = Checked(llama, replace(SETTINGS[name], seed=seed))
        checked.prefill(PROMPT)
        checked.verify(random, 20)
        # behind the first 2 tokens of the prompt, across its end, and in the answer
        blocks = [(n, checked.text[n : n + 5]) for n in (2, 5, 7, 13, 20)]
        # other tokens than the text's, as a draft might have them
        kept = list(checked.text)
        del checked.text[16:]
        blocks.append((16, checked.follow(random, 4)))
        checked.text = kept
        for plan in (None, Plan.skipping(len(llama.sublayers), [1])):
            found = llama.evaluate_beside(blocks, plan, checked.sampling)
            for (start, tokens), beside in zip(blocks, found, strict=True):
                llama.truncate(start)
                for token, ours in zip(tokens, beside.tokens, strict=True):
                    pick = llama.decode(token, checked.sampling, plan)
                    same += pick.token == ours
                    far += pick.token != ours and pick.margin > 0.01
                llama.truncate(start)
                llama.append(kept[start:])
            # passes beside leave the text as it was
            checked.cut(len(PROMPT) + 18)
            checked.verify(random, 2)
            kept = list(checked.text)
    assert far == 0
    assert same > 150
    llama.truncate(0)


# -- the same text ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "architecture", ["llama-dense", "gemma3-dense", "qwen3moe-moe", "phi2-dense"]
)
def test_speculation_changes_no_text(
    architecture: str, tiny_models: Path, patched_library: Path
) -> None:
    """F32 throughout: a difference needs a margin that rounding can bridge."""
    happened: Counter[str] = Counter()
    with (
        open_model(tiny_models / f"{architecture}.gguf") as model,
        open_context(model, ctx_tokens=128, threads=1, **EXACT) as context,
    ):
        session = Session(context)
        last = len(context.sublayers) - 1
        greedy = {
            f"greedy {name}": replace(sampling, temperature=0.0, temperature_first=False)
            for name, sampling in SETTINGS.items()
        }
        for name, chosen in (SETTINGS | greedy).items():
            sampling = replace(chosen, seed=7, n_probs=2)
            plain, stats = said(session, sampling, 64, None, PROMPT)
            assert stats.draft_n == 0
            for draft in (
                forced(context, last, gamma=4),
                forced(context, 0, 1, gamma=1),
                forced(context, gamma=7),
            ):
                found, stats = said(session, sampling, 64, draft, PROMPT)
                assert len(found) == len(plain)
                for i, (ours, theirs) in enumerate(zip(found, plain, strict=True)):
                    if ours.token != theirs.token:
                        # log-times of sampled tokens are differences of logits over T
                        scale = sampling.temperature or 1.0
                        assert theirs.margin is not None
                        assert theirs.margin * scale < 1e-4, (name, draft, i)
                        happened["bridged"] += 1
                        break
                    assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
                    assert ours.probability == pytest.approx(theirs.probability, rel=0.02)
                happened["accepted"] += stats.draft_n_accepted > 0
                happened["rejected"] += stats.draft_n_accepted < stats.draft_n
                happened["whole"] += stats.accepted_lengths.get(draft.max_tokens, 0) > 0
                if sampling.grammar is not None:
                    assert fits("".join(f"{event.token:x}" for event in found))
    assert happened["bridged"] <= 2, happened
    assert min(happened[what] for what in ("accepted", "rejected", "whole")) >= 10, happened


# -- single picks under a grammar ------------------------------------------------------------------


class Pieces:
    """A native grammar for single picks."""

    def __init__(self, context: Any, grammar: Grammar) -> None:
        self.lib = context._lib
        self.handle = self.lib.knapspec_grammar_init(
            context.model.pointer, grammar.text.encode(), grammar.root.encode(), None, 0
        )
        assert self.handle

    def pick(
        self,
        logits: NDArray[np.float32],
        sampling: Sampling,
        position: int,
        history: Sequence[int],
        n_answer: int,
    ) -> tuple[int, int, float, float]:
        """(code, token, probability, margin); the last n_answer tokens are the answer's."""
        return native_pick(
            logits,
            sampling,
            position,
            history,
            grammar=self.handle,
            answer_start=position - n_answer,
        )

    def __enter__(self) -> Pieces:
        return self

    def __exit__(self, *_: object) -> None:
        self.lib.knapspec_grammar_free(self.handle)


ANSWERS = [[], [0x20], [0x30, 0x1A], [0x20, 0xA], [0x4], [0x1, 0x2, 0x0, 0xB], [0x10, 0xA, 0x17]]


@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("filters", [
    {}, {"min_p": 0.2}, {"top_k": 5}, {"top_p": 0.6}, {"typical_p": 0.5},
    {"top_k": 30, "typical_p": 0.9, "top_p": 0.8, "min_p": 0.05},
    {"typical_p": 0.7, "temperature_first": True, "repeat_penalty": 1.5},
    {"top_p": 0.5, "presence_penalty": 1.0, "logit_bias": ((0x10, 2.0), (0x1F, -float("inf")))},
], ids=str)  # fmt: skip
def test_a_pick_under_a_grammar_equals_the_twin(
    llama: Any, temperature: float, filters: dict[str, Any]
) -> None:
    """Above all the second race: who keeps a time, and who starts anew."""
    random = np.random.default_rng(11)
    tried = rejected = doubts = 0
    with Pieces(llama, GBNF) as grammar:
        for seed in range(150):
            logits = random.normal(0.0, 2.0, llama.n_vocab).astype(np.float32)
            answer = ANSWERS[seed % len(ANSWERS)]
            history = [*PROMPT, *answer]
            sampling = Sampling(temperature, seed=seed, **filters)
            mask = allowed(replace(sampling, grammar=GBNF), answer, llama.n_vocab)
            position = len(history)
            expected = naive_sampling.outcomes(logits, sampling, position, history, mask)
            tried += 1
            if naive_sampling.doubtful(expected, sampling):
                doubts += 1
                continue
            code, token, probability, margin = grammar.pick(
                logits, sampling, position, history, len(answer)
            )
            assert (code, token) == (0, expected[0].token), (seed, expected[0])
            assert 0.0 < probability <= 1.0
            if expected[0].rejected is None:
                assert any(probability == pytest.approx(p.probability, rel=1e-3) for p in expected)
                assert any(margin == pytest.approx(p.margin, rel=1e-3, abs=1e-4) for p in expected)
            rejected += expected[0].rejected is not None
    assert doubts <= 0.02 * tried + 1
    assert 20 < rejected < tried


def test_the_grammar_allows_what_the_expression_does(llama: Any) -> None:
    rejected = 0
    with Pieces(llama, GBNF) as grammar:
        for answer in ANSWERS:
            mask = allowed(Sampling(grammar=GBNF), answer, llama.n_vocab)
            assert mask is not None
            assert mask.any()
            rejected += int((~mask).sum())
            for token in range(llama.n_vocab):
                found = grammar.lib.knapspec_grammar_allows(
                    grammar.handle, (ctypes.c_int32 * len(answer))(*answer), len(answer), token
                )
                assert found == mask[token], (answer, token)
    assert rejected > 100


def test_nothing_allowed_is_an_error_of_its_own(llama: Any) -> None:
    logits = np.zeros(llama.n_vocab, dtype=np.float32)
    for filters in ({}, {"top_k": 5}, {"typical_p": 0.5}):
        for temperature in (0.0, 1.0):
            with Pieces(llama, Grammar('root ::= "g"')) as grammar:
                sampling = Sampling(temperature, **filters)
                assert grammar.pick(logits, sampling, 3, [1, 2, 3], 0)[0] == bindings.DEAD_END


@pytest.mark.parametrize("temperature", [0.0, 0.5])
@pytest.mark.parametrize("gamma", [1, 2, 5])
def test_a_complete_answer_ends_without_an_end_token(
    llama: Any, temperature: float, gamma: int
) -> None:
    """This vocabulary has no token that ends a text."""
    assert not any(llama.is_end(token) for token in range(llama.n_vocab))
    sampling = Sampling(temperature, seed=4, grammar=Grammar('root ::= [1-4] [0-9] "a" [0-9]'))
    texts = []
    for draft in (None, forced(llama, 1, gamma=gamma)):
        session = Session(llama)
        generation = session.generate(PROMPT, sampling=sampling, draft=draft, max_tokens=20)
        tokens = [event.token for event in generation]
        assert generation.stats.finish_reason == "stop"
        check_stats(generation.stats)
        assert session.ids == tuple([*PROMPT, *tokens][:-1])
        texts.append(tokens)
    assert re.fullmatch("[1-4][0-9]a[0-9]", "".join(f"{t:x}" for t in texts[0]))
    assert texts[1] == texts[0]


@pytest.mark.parametrize("temperature", [0.0, 0.5])
@pytest.mark.parametrize("gamma", [1, 2, 5])
def test_a_dead_end_is_where_plain_decoding_has_it(
    llama: Any, temperature: float, gamma: int
) -> None:
    sampling = Sampling(temperature, grammar=Grammar('root ::= [1-4] [0-9] "a" [0-9] [0-9] "g"'))
    texts = []
    for draft in (None, forced(llama, 1, gamma=gamma)):
        generation = Session(llama).generate(
            PROMPT, sampling=replace(sampling, seed=4), draft=draft, max_tokens=20
        )
        tokens: list[int] = []
        with pytest.raises(NoTokenError, match="allows no token") as caught:
            tokens.extend(event.token for event in generation)
        assert "\n" not in str(caught.value)
        check_stats(generation.stats)
        texts.append(tokens)
    assert re.fullmatch("[1-4][0-9]a[0-9][0-9]", "".join(f"{t:x}" for t in texts[0]))
    assert texts[1] == texts[0]


# -- log-probabilities -----------------------------------------------------------------------------


@pytest.mark.parametrize("n", [0, 1, 5, 128, 1000])
def test_log_probabilities_are_those_of_the_model(llama: Any, n: int) -> None:
    llama.truncate(0)
    sampling = replace(SETTINGS["all"], seed=3, n_probs=n)
    picks = [llama.prefill(PROMPT, sampling)]
    rows = [llama.logits()]
    picks += [llama.decode(9, sampling)]
    rows.append(llama.logits())
    block = [8, 7, 6]
    picks += llama.verify(block, sampling)
    rows += [llama.logits(i - len(block)) for i in range(len(block))]
    for pick, row in zip(picks, rows, strict=True):
        logprob, top = naive_sampling.log_probabilities(row, pick.token, n)
        assert pick.logprob == pytest.approx(logprob, abs=1e-5)
        assert [t for t, _ in pick.top] == [t for t, _ in top]
        assert [p for _, p in pick.top] == pytest.approx([p for _, p in top], abs=1e-5)
    # a draft is not asked, and nobody is unless the settings say so
    assert llama.decode(5, sampling, Plan.skipping(len(llama.sublayers), [1])).logprob is None
    llama.truncate(0)
    pick = llama.prefill(PROMPT, replace(sampling, n_probs=None))
    assert (pick.logprob, pick.top) == (None, ())
    llama.truncate(0)


# -- grammars that are much work -------------------------------------------------------------------

# each rule begins in twice as many ways as the one below
DOUBLING = "".join(f'r{i} ::= r{i + 1} | r{i + 1} "x"\n' for i in range(40)) + 'r40 ::= "1"'
CHAIN = "root ::= r0\n" + "".join(f"r{i} ::= r{i + 1}\n" for i in range(99_999)) + "r99999 ::= [1]"


@pytest.mark.parametrize(
    "text",
    [
        CHAIN,
        f"root ::= {'(' * 900}[12]{')' * 900}",
        'root ::= ((("1"*)*)*)* "2"',  # nothing may be repeated, and then nothing again
        f"root ::= {' | '.join(chr(34) + str(10_000 + i) + chr(34) for i in range(10_000))}",
    ],
    ids=["a long chain", "deep groups", "repetitions of nothing", "many values"],
)
def test_large_grammars_are_taken(llama: Any, text: str) -> None:
    """The text of a token of this model is its number, in hexadecimal digits."""
    sampling = Sampling(grammar=Grammar(text))
    (first,), _ = said(Session(llama), sampling, 1, None, PROMPT)
    assert first.token in (1, 2, *range(0x10, 0x1A))


def test_a_text_that_can_be_read_in_too_many_ways_is_refused(llama: Any) -> None:
    """Every character doubles the ways: the answer ends in one line, in bounded time."""
    sampling = Sampling(grammar=Grammar('root ::= x\nx ::= [0-9a-f] x "b" | [0-9a-f] x "c" | "z"'))
    session = Session(llama)
    with pytest.raises(NoTokenError, match="too many ways to read the text"):
        list(session.generate(PROMPT, sampling=sampling, max_tokens=30))
    assert said(session, Sampling(), 3, None, PROMPT)[0]


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        (Sampling(logit_bias=((128, 1.0),)), "no token 128"),
        (Sampling(logit_bias=((-1, 1.0),)), "no token -1"),
        (Sampling(grammar=Grammar("")), "no rules"),
        (Sampling(grammar=Grammar("root ::= (")), "grammar cannot be read"),
        (Sampling(grammar=Grammar("root ::= other")), "other is used and not defined"),
        (Sampling(grammar=Grammar('other ::= "a"')), "grammar cannot be read"),
        (Sampling(grammar=Grammar('root ::= root "a"')), "root begins with nothing but itself"),
        (Sampling(grammar=Grammar('root ::= e root "a" | "b"\ne ::= n n\nn ::= "z"?')), "itself"),
        (Sampling(grammar=Grammar('root ::= "a" x\nx ::= e x\ne ::= n n\nn ::= ""')), "itself"),
        (Sampling(grammar=Grammar(f"root ::= {'(' * 100_000}")), "nested too deeply"),
        (Sampling(grammar=Grammar(f"root ::= r0\n{DOUBLING}")), "too many ways"),
        (Sampling(grammar=Grammar(f'root ::= "{"a" * 100_000}"{{2000}}')), "repetitions are too"),
        (Sampling(grammar=Grammar('root ::= "a"{99999999999999999999999}')), "too l"),
        (Sampling(grammar=Grammar("root ::= <[99999999999999999999999]>")), "number in it is too"),
        (Sampling(grammar=Grammar("root\r\n")), "expecting ::="),
    ],
    ids=lambda value: str(value)[-60:],
)
def test_what_this_model_cannot_be_asked_for(llama: Any, sampling: Sampling, message: str) -> None:
    session = Session(llama)
    with pytest.raises(UsageError, match=message) as caught:
        session.generate(PROMPT, sampling=sampling)
    assert "\n" not in str(caught.value)
    assert said(session, Sampling(), 3, None, PROMPT)[0]
