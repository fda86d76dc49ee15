"""A model that says what a test wants, on top of the fake backend and the fake vocabulary.

In a ChatML conversation it answers with `reply(last user message)`; in a raw prompt it continues
with `continuation`. Skipped sublayers make a draft wrong now and then (`default_harm`). Grammars
are GBNF, and about the text, as in llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import naive_gbnf
import numpy as np
from fake_vocabulary import FakeVocabulary
from fakes import FakeBackend, ToyModel, chance
from numpy.typing import NDArray

from knapspec_edge.engine import Engine
from knapspec_edge.errors import UsageError
from knapspec_edge.records import Grammar, ModeKind, Plan, Sampling
from knapspec_edge.text.builtin_templates import BUILTIN

CHATML = BUILTIN["chatml"].source


def echo(question: str) -> str:
    return f"You said: {question}"


@dataclass
class ScriptedModel(ToyModel):
    vocabulary: FakeVocabulary = field(default_factory=lambda: FakeVocabulary(chat_template=CHATML))
    reply: Callable[[str], str] = echo
    continuation: str = " there was a hare. The end."

    def __post_init__(self) -> None:
        self.n_vocab = self.vocabulary.n_vocab
        self.end_tokens = frozenset(i for i in range(self.n_vocab) if self.vocabulary.is_end(i))

    def next_token(self, tokens: Sequence[int]) -> int:
        start = self.vocabulary.special.get("<|im_start|>", -1)
        end = self.vocabulary.special.get("<|im_end|>", self.vocabulary.special["</s>"])
        header = self.vocabulary.tokenize("assistant\n", parse_special=False)
        starts = [i for i, token in enumerate(tokens) if token == start]
        if len(starts) > 1 and list(tokens[starts[-1] + 1 :][: len(header)]) == header:
            said = tokens[starts[-1] + 1 + len(header) :]
            question = self._text(tokens[starts[-2] + 1 : starts[-1]]).removeprefix("user\n")
            script = self.vocabulary.tokenize(
                self.reply(question.removesuffix("\n")), parse_special=False
            )
            return [*script, end][min(len(said), len(script))]
        script = self.vocabulary.tokenize(self.continuation, parse_special=False)
        done = next(
            n for n in range(len(script), -1, -1) if list(tokens[-n:]) == script[:n] or not n
        )
        return script[done] if done < len(script) else self.vocabulary.special["</s>"]

    def logits(self, tokens: Sequence[int], plan: Plan | None) -> NDArray[np.float32]:
        values = np.zeros(self.n_vocab, dtype=np.float32)  # f32 [n_vocab]
        token = self.next_token(tokens)
        if plan is not None:
            for i, mode in enumerate(plan.modes):
                if mode.kind is ModeKind.FULL:
                    continue
                if chance("harm", len(tokens), i) < self.harm.get(i, self.default_harm):
                    token = (token + 1) % 256
        values[token] = 12.0
        return values

    def check_grammar(self, grammar: Grammar) -> None:
        try:
            _read_grammar(grammar.text)
        except (AssertionError, IndexError, KeyError) as error:
            raise UsageError(f"the grammar cannot be read: {error}") from None

    def allowed(
        self, tokens: Sequence[int], sampling: Sampling, answer_start: int
    ) -> NDArray[np.bool_] | None:
        if sampling.grammar is None or len(tokens) < answer_start:
            return None
        ends = self.end_tokens | sampling.grammar.ends
        answer = tokens[answer_start:]
        mask = np.ones(self.n_vocab, dtype=np.bool_)
        if ends & set(answer):
            return mask
        grammar = _read_grammar(sampling.grammar.text)
        state = _state_after(sampling.grammar.text, self._text(answer))
        for token in range(self.n_vocab):
            piece = self.vocabulary.token_bytes(token)
            if token in ends:
                mask[token] = () in state
            else:  # half characters never come in a test with a grammar
                text = piece.decode("utf-8", "ignore")
                mask[token] = text.encode() == piece != b"" and bool(grammar.after(state, text))
        return mask

    def _text(self, tokens: Sequence[int]) -> str:
        data = b"".join(self.vocabulary.token_bytes(t) for t in tokens)
        return data.decode("utf-8", "replace")


@lru_cache
def _read_grammar(text: str) -> naive_gbnf.Grammar:
    return naive_gbnf.Grammar.parse(text)


@lru_cache(maxsize=4096)
def _state_after(grammar: str, text: str) -> naive_gbnf.State:
    read = _read_grammar(grammar)
    return read.after(_state_after(grammar, text[:-1]), text[-1]) if text else read.start()


def scripted_engine(
    reply: Callable[[str], str] = echo,
    *,
    n_ctx: int = 512,
    template: str | None = None,
    vocabulary: FakeVocabulary | None = None,
    harm: float = 0.05,
    continuation: str = " there was a hare. The end.",
    **backend: Any,
) -> Engine:
    """An open engine that answers by `reply`."""
    vocab = vocabulary or FakeVocabulary(chat_template=CHATML)
    model = ScriptedModel(
        vocabulary=vocab, reply=reply, default_harm=harm, continuation=continuation
    )
    fake = FakeBackend(model, n_layer=2, n_ctx=n_ctx, **backend)
    return Engine(vocab, fake, template=template)  # type: ignore[arg-type]


def fake_of(engine: Engine) -> FakeBackend:
    assert isinstance(engine.backend, FakeBackend)
    return engine.backend
