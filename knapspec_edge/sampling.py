"""How an answer is generated, as people ask for it: presets, ranges, and the backend's record.

`Settings` is what applications and library users hold; `Settings.sampling` turns it into the
`records.Sampling` that a pick is made by. Names shown to people are those of the command line.
"""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from numbers import Integral, Real
from typing import Any

from . import arguments
from .errors import UsageError
from .records import Grammar, Sampling

MAX_SEED = 2**63 - 1
MAX_LOGPROBS = 100
MAX_COUNT = 2**31 - 1  # what llama.cpp can count

PRESETS: dict[str, Sampling] = {
    "greedy": Sampling(),
    # llama.cpp's own defaults
    "llama.cpp": Sampling(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05),
    # what the published method was evaluated with; transformers applies the temperature first
    "paper": Sampling(temperature=0.7, temperature_first=True, top_k=50, top_p=0.95),
}
DEFAULT_PRESET = "greedy"


@dataclass(frozen=True)
class Value:
    """One number of the sampler: its name on the command line, and the range it has to be in."""

    name: str
    low: float
    high: float
    whole: bool = False

    def check(self, value: Any) -> None:
        """Raises UsageError, one line, for what is no number or outside the range."""
        is_number = isinstance(value, Integral if self.whole else Real)
        is_number = is_number and not isinstance(value, bool)
        if not is_number or not self.low <= value <= self.high:  # nan is in no range
            kind = "whole number" if self.whole else "number"
            high = MAX_COUNT if self.high == MAX_COUNT else f"{self.high:g}"
            within = f"between {self.low:g} and {high}"
            raise UsageError(
                f"{self.name} is {arguments.shown(value)}; it has to be a {kind} {within}"
            )

    def plain(self, value: Any) -> float:
        """A checked value as Python's own number, for native code and JSON."""
        return int(value) if self.whole else float(value)


# By field of Settings, in the order in which llama.cpp applies them.
VALUES: dict[str, Value] = {
    "repeat_penalty": Value("repeat-penalty", 0.01, 100.0),
    "presence_penalty": Value("presence-penalty", -100.0, 100.0),
    "frequency_penalty": Value("frequency-penalty", -100.0, 100.0),
    "repeat_last_n": Value("repeat-last-n", -1, MAX_COUNT, whole=True),
    "top_k": Value("top-k", 0, MAX_COUNT, whole=True),
    "typical_p": Value("typical", 0.0, 1.0),
    "top_p": Value("top-p", 0.0, 1.0),
    "min_p": Value("min-p", 0.0, 1.0),
    "temperature": Value("temp", 0.0, 100.0),
}
# where Settings and Sampling name a thing differently
_RECORD_FIELD = {"repeat_last_n": "penalty_last_n"}
# By field of Settings, what switches it off.
OFF: dict[str, float] = {
    **{name: getattr(Sampling(), name) for name in VALUES if name not in _RECORD_FIELD},
    "repeat_last_n": 0,
}
# beyond it, a bias means no more than "always" or "never", and sums leave the range of floats
_MAX_BIAS = 1e6
_LOGPROBS = Value("logprobs", 0, MAX_LOGPROBS, whole=True)
_PENALTIES = ("repeat_penalty", "presence_penalty", "frequency_penalty")
# what only thins out the less probable tokens, of which argmax takes none anyway
_WITHOUT_EFFECT_WHEN_GREEDY = ("top_k", "top_p", "min_p")


@dataclass(frozen=True)
class Settings:
    """How an answer is generated. What is None is taken from the preset.

    `seed` None or -1 with a temperature means a random one. `logit_bias` maps token ids to what is
    added to their logits; -inf forbids a token. `grammar` (GBNF, root rule "root") or `json_schema`
    (text or the schema itself; an empty one is any JSON value) is the form of the answer, not both.
    `logprobs`: report log-probabilities, and so many of the most probable tokens with each.
    `think`: whether to think before answering, for chat templates with a switch for it.
    """

    temperature: float | None = None
    min_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None  # None: until the model ends, or the context does
    stop: str | Sequence[str] = ()  # the answer ends before the first of these texts
    preset: str = DEFAULT_PRESET
    top_k: int | None = None  # 0: off
    top_p: float | None = None  # 1: off
    typical_p: float | None = None  # 1: off
    temperature_first: bool | None = None
    repeat_penalty: float | None = None  # 1: off
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repeat_last_n: int | None = None  # tokens that penalties see; -1: all
    logit_bias: Mapping[int, float] | None = None
    grammar: str | None = None
    json_schema: str | Mapping[str, Any] | bool | None = None
    logprobs: int | None = None
    think: bool | None = None  # None: as the chat template does by itself

    def sampling(self) -> Sampling:
        """The sampler's record, with the seed that is really used.

        Raises UsageError, one line, for a value out of its range and for a form that cannot be
        read, as far as that shows without a model.
        """
        if not isinstance(self.preset, str) or self.preset not in PRESETS:
            raise UsageError(
                f"there is no preset {arguments.shown(self.preset)}; choose one of "
                f"{', '.join(PRESETS)}"
            )
        for name, value in VALUES.items():
            if getattr(self, name) is not None:
                value.check(getattr(self, name))
        arguments.whole_or_none("the seed", self.seed)
        if self.seed is not None and not -1 <= self.seed <= MAX_SEED:
            raise UsageError(f"the seed is {self.seed}; it has to be -1 or a number up to 2^63-1")
        arguments.whole_or_none("max-tokens", self.max_tokens)
        if self.max_tokens is not None and self.max_tokens < 1:
            raise UsageError(f"max-tokens is {self.max_tokens}; it has to be at least 1")
        arguments.flag_or_none("temperature-first", self.temperature_first)
        arguments.flag_or_none("think", self.think)
        for text in self.stop_texts():
            arguments.text("a stop text", text)
            if not text:
                raise UsageError("a stop string must not be empty")
        arguments.text_or_none("the grammar", self.grammar)
        if self.logprobs is not None:
            _LOGPROBS.check(self.logprobs)
        chosen = replace(
            PRESETS[self.preset],
            **self._given(),
            logit_bias=self._biases(),
            grammar=self._form()[0],
            n_probs=self.logprobs,
        )
        seed = self.seed
        if seed is None or seed == -1:
            # Greedy decoding uses no random numbers, so no seed needs to be remembered.
            seed = secrets.randbelow(2**32) if chosen.temperature > 0.0 else 0
        return replace(chosen, seed=int(seed))  # NumPy's whole numbers are narrower

    def stop_texts(self) -> tuple[str, ...]:
        """The texts that end the answer. Raises UsageError where `stop` holds none."""
        if isinstance(self.stop, str):
            return (self.stop,)
        try:
            return tuple(self.stop)
        except TypeError:
            raise UsageError(
                f"stop is {arguments.shown(self.stop)}; give a text or several"
            ) from None

    def notices(self) -> tuple[str, ...]:
        """What was asked for and has no effect, one line each. Raises as `sampling`."""
        found = []
        if self.sampling().temperature == 0.0:
            idle = [
                VALUES[name].name
                for name in _WITHOUT_EFFECT_WHEN_GREEDY
                if getattr(self, name) not in (None, OFF[name])
            ]
            if idle:
                verb = "changes" if len(idle) == 1 else "change"
                found.append(
                    f"{_listed(idle)} {verb} nothing at temperature 0, which takes the most "
                    "probable token; give a temperature"
                )
        unenforced = self._form()[1]
        if unenforced:
            verb = "is" if len(unenforced) == 1 else "are"
            found.append(f"of the JSON schema, {_listed(unenforced)} {verb} not enforced")
        return tuple(found)

    def _given(self) -> dict[str, Any]:
        """What overrides the preset, by field of the record."""
        names = (*VALUES, "temperature_first")
        values = {name: getattr(self, name) for name in names}
        return {
            _RECORD_FIELD.get(name, name): VALUES[name].plain(value) if name in VALUES else value
            for name, value in values.items()
            if value is not None
        }

    def _biases(self) -> tuple[tuple[int, float], ...]:
        if self.logit_bias is not None and not isinstance(self.logit_bias, Mapping):
            raise UsageError(
                f"logit-bias is {arguments.shown(self.logit_bias)}; give {{token id: bias}}"
            )
        for token, bias in (self.logit_bias or {}).items():
            if not isinstance(token, Integral) or token < 0:
                raise UsageError(f"logit-bias: {arguments.shown(token)} is no token id")
            is_number = isinstance(bias, Real)
            if not is_number or not (abs(bias) <= _MAX_BIAS or bias == -math.inf):
                raise UsageError(
                    f"logit-bias of token {token} is {arguments.shown(bias)}; it has to be a "
                    f"number between {-_MAX_BIAS:g} and {_MAX_BIAS:g}, or -inf, which forbids the "
                    "token"
                )
        return tuple(sorted((int(t), float(b)) for t, b in (self.logit_bias or {}).items()))

    def _form(self) -> tuple[Grammar | None, tuple[str, ...]]:
        """The grammar, and which parts of a JSON schema it does not hold to."""
        if self.grammar is not None and self.json_schema is not None:
            raise UsageError("give a grammar or a JSON schema, not both")
        if self.grammar is None and self.json_schema is None:
            return None, ()
        from .text.grammar import check_grammar, grammar_of_schema

        if self.grammar is not None:
            return Grammar(check_grammar(self.grammar)), ()
        assert self.json_schema is not None
        text, unenforced = grammar_of_schema(self.json_schema)
        return Grammar(text), unenforced


def parse_bias(text: str) -> tuple[int, float]:
    """(token, bias) from TOKEN+BIAS or TOKEN-BIAS, as in llama.cpp; -inf or "false" forbids.

    Raises UsageError, one line.
    """
    match = re.fullmatch(r"\s*(\d+)\s*=?\s*([+-].*|false)\s*", text, re.ASCII | re.IGNORECASE)
    try:
        if match is None:
            raise ValueError
        value = match[2].strip().lower()
        bias = -math.inf if value == "false" else float(value)
    except ValueError:
        raise UsageError(
            f"logit-bias: {text!r} is not TOKEN+BIAS or TOKEN-BIAS, such as 15043+1.5, or "
            "15043-inf, which forbids token 15043"
        ) from None
    return int(match[1]), bias


def differences(sampling: Sampling) -> list[tuple[str, str]]:
    """(name, value) of what is not switched off, in order of application; the temperature always,
    seed and form never."""
    rows = []
    if sampling.logit_bias:
        pairs = (f"{token}{bias:+g}" for token, bias in sampling.logit_bias)
        rows.append(("logit-bias", " ".join(pairs)))
    penalized = any(getattr(sampling, name) != OFF[name] for name in _PENALTIES)
    order = list(VALUES)
    if sampling.temperature_first:
        order.remove("temperature")
        order.insert(order.index("top_k"), "temperature")
    for name in order:
        now = getattr(sampling, _RECORD_FIELD.get(name, name))
        shown = penalized if name == "repeat_last_n" else now != OFF[name]
        if shown or name == "temperature":
            text = str(now) if VALUES[name].whole else f"{now:g}"
            first = name == "temperature" and sampling.temperature_first
            rows.append((VALUES[name].name, f"{text} before the filters" if first else text))
    return rows


def to_json(settings: Settings, sampling: Sampling) -> dict[str, Any]:
    """Everything a pick depended on, by field of Settings, ready for JSON."""
    record_names = {ours: theirs for theirs, ours in _RECORD_FIELD.items()}
    left_out = ("grammar", "n_probs", "seed", "logit_bias")
    values = {
        record_names.get(field.name, field.name): getattr(sampling, field.name)
        for field in fields(sampling)
        if field.name not in left_out
    }
    form = None
    if sampling.grammar is not None:
        form = "grammar" if settings.json_schema is None else "json_schema"
    return {
        "preset": settings.preset,
        **values,
        # JSON has no infinity; "false" is llama.cpp's word for a token that is forbidden
        "logit_bias": {str(t): b if math.isfinite(b) else False for t, b in sampling.logit_bias},
        "form": form,
        **({} if settings.think is None else {"think": settings.think}),
    }


def _listed(names: list[str] | tuple[str, ...]) -> str:
    return " and ".join((", ".join(names[:-1]), names[-1]) if len(names) > 1 else names)
