"""What the model is asked while it summarizes: one instruction that all prompts begin with, then
the text, then the task of this prompt.

The instruction comes first and is the same in every prompt of a run, so its keys stay in the cache;
the task comes last, where small models heed it most.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ..config import DEFAULTS, Config
from ..errors import UsageError
from ..records import Sampling
from ..sampling import Settings
from ..text.templates import Message

INSTRUCTION = (
    "You summarize texts. Say only what the text says, the most important things first. Answer "
    "with the summary alone, without introduction or remarks."
)


@dataclass(frozen=True)
class Style:
    """`form` completes "Summarize the text ..."; `words` is the length where none is asked for."""

    form: str
    words: int


STYLES = {
    "paragraph": Style("in one paragraph of about {words} words", 100),
    "bullets": Style(
        'as a list of short points, each on a line of its own that starts with "- ", with about '
        "{words} words in all",
        100,
    ),
    "headline": Style("as a single headline of at most {words} words", 12),
    "keypoints": Style(
        "as a numbered list of its key statements, each one full sentence, with about {words} "
        "words in all",
        150,
    ),
}
DEFAULT_STYLE = "paragraph"
# Of a task, so that an answer limited in tokens is rarely cut: a word takes 1.3 tokens in English,
# two and more in other languages.
_TOKENS_PER_WORD = 3
_SPARE_TOKENS = 32


@dataclass(frozen=True)
class Request:
    """What is wanted of every document. `instruction` is the user's own, in place of the style."""

    style: str = DEFAULT_STYLE
    words: int | None = None  # None: what suits the style
    language: str | None = None  # None: the model's choice, mostly that of the text
    instruction: str | None = None
    system: str | None = None
    settings: Settings = field(default_factory=Settings)

    def __post_init__(self) -> None:
        if self.style not in STYLES:
            raise UsageError(f"there is no style {self.style}; choose one of {', '.join(STYLES)}")
        if self.words is not None and self.words < 1:
            raise UsageError(f"a summary of {self.words} words cannot be written; give 1 or more")
        if self.instruction is not None and not self.instruction.strip():
            raise UsageError("the instruction is empty")

    @property
    def n_words(self) -> int:
        return self.words or STYLES[self.style].words

    @property
    def max_tokens(self) -> int:
        """The longest final summary."""
        return self.settings.max_tokens or tokens_for(self.n_words)

    def part_words(self, config: Config = DEFAULTS) -> int:
        """How long the summary of a part should be: a headline of each part would lose too much."""
        return max(self.n_words, config.summarize_part_words)

    def identity(self) -> dict[str, Any]:
        """All that decides about the summary of a given text beside the model, as JSON has it."""
        asked = self.settings
        # by what they come to: a preset may say the same as single options
        law = asdict(asked.sampling().law)
        usual = asdict(Sampling())
        sampling = {name: value for name, value in law.items() if value != usual[name]}
        if law["temperature"] > 0.0 and asked.seed not in (None, -1):
            sampling["seed"] = asked.seed
        sampling |= {"max_tokens": asked.max_tokens} if asked.max_tokens else {}
        sampling |= {"stop": asked.stop} if asked.stop else {}
        wording = [message["content"] for task in _TASKS for message in self.messages(task)]
        found = {
            "style": None if self.instruction is not None else self.style,
            "words": self.words if self.instruction is not None else self.n_words,
            "language": self.language,
            # also changes with the wording of later versions
            "prompt": hashlib.sha256("\0".join(wording).encode()).hexdigest()[:16],
            "sampling": sampling,
        }
        plain: dict[str, Any] = json.loads(json.dumps(found, default=_plain))
        return plain

    # -- prompts

    def messages(self, task: Task) -> list[Message]:
        """The conversation that asks for one summary."""
        parts = [self.instruction.strip() if self.instruction is not None else INSTRUCTION]
        if heading := task.heading():
            parts.append(heading)
        parts.append(task.text)
        if closing := self._closing(task):
            parts.append(closing)
        user: Message = {"role": "user", "content": "\n\n".join(parts)}
        if self.system:
            return [{"role": "system", "content": self.system}, user]
        return [user]

    def _closing(self, task: Task) -> str:
        """What the text is followed by."""
        sentences = []
        if self.instruction is not None:
            if self.words is not None:
                sentences.append(f"Write about {self.words} words.")
        elif task.is_final:
            form = STYLES[self.style].form.format(words=self.n_words)
            whole = "the text above" if isinstance(task, Whole) else "the whole text"
            sentences.append(f"Summarize {whole} {form}.")
        else:
            what = "this part" if isinstance(task, Part) else "these parts together"
            form = STYLES[DEFAULT_STYLE].form.format(words=self.part_words())
            sentences.append(f"Summarize {what} {form}.")
        if self.language:
            sentences.append(f"Write in {self.language}.")
        return " ".join(sentences)


@dataclass(frozen=True)
class Task:
    """One text to be summarized."""

    text: str

    is_final = True  # gives the summary of the document

    def heading(self) -> str:
        raise NotImplementedError


@dataclass(frozen=True)
class Whole(Task):
    """A document that fits."""

    def heading(self) -> str:
        return "Text:"


@dataclass(frozen=True)
class Part(Task):
    """One of several parts of a document."""

    number: int = 1
    n_parts: int = 1

    is_final = False

    def heading(self) -> str:
        return f"Part {self.number} of {self.n_parts} of a text:"


@dataclass(frozen=True)
class Merge(Task):
    """Summaries of some neighbouring parts, to become one."""

    is_final = False

    def heading(self) -> str:
        return "Summaries of consecutive parts of a text, in order:"


@dataclass(frozen=True)
class Final(Task):
    """Summaries of all parts."""

    def heading(self) -> str:
        return "Summaries of all parts of one text, in order:"


_TASKS: Sequence[Task] = (Whole(""), Part(""), Merge(""), Final(""))


def tokens_for(words: int) -> int:
    """Room for an answer of so many words."""
    return words * _TOKENS_PER_WORD + _SPARE_TOKENS


def _plain(value: Any) -> Any:
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    return str(value)
