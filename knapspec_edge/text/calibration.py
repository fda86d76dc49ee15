"""The text on which a model is measured, in passages that take turns."""

from __future__ import annotations

from datetime import datetime
from functools import lru_cache
from importlib import resources

from ..errors import ModelError
from .fitting import PLACEHOLDER, frame_lengths
from .templates import ChatTemplate
from .vocabulary import Vocabulary, tokenize_prompt

# Everyday prose with some numbers, a list, code and dialogue: what people let models write.
PASSAGE = """\
The harbour town wakes before the sun does. By four in the morning the bakers have lit their \
ovens, and the smell of bread drifts down to the quay, where the night boats are coming in. A \
crate of herring sells for about twelve coins, a crate of mackerel for fifteen; on a good day \
forty crates change hands before breakfast.

"You are late again," said the harbour master, without looking up from her ledger.

"The fog was thick past the lighthouse," the young fisherman answered. "I could not see my own \
nets. I waited until I heard the bell, and then I followed the sound home."

She nodded, wrote the number 27 beside his name, and pointed to the scales. There were three \
rules in her harbour, and everybody knew them:

1. Weigh the catch before you sell it.
2. Pay the mooring fee on Friday, not on Monday.
3. Never leave a rope lying across the steps.

In the afternoon the market square belongs to the children. They play a counting game which one\
 of them, who likes computers, has written down:

def count(players, step):
    left = list(players)
    at = 0
    while len(left) > 1:
        at = (at + step - 1) % len(left)
        left.pop(at)
    return left[0]

The winner may ring the bell of the old chapel. Its sound carries far over the water, and the \
boats that are still outside turn slowly towards the shore, because it is also the signal that \
the weather is about to change. By evening the wind has come up from the west, the shutters are\
 closed, and the town talks about tomorrow: whether the fog will lift, what the price of salt \
is going to be, and who will mend the net that tore on the rocks.
"""
# Templates that write the date must not make a stored measurement look outdated tomorrow.
FIXED_DATE = datetime(2024, 1, 1)
QUESTION = "Retell this in your own words, then explain how the counting game works, step by step."
# For any other text. Asks for prose and for reasons, so that answers do not end early.
LONG_QUESTION = (
    "Retell this in your own words, in the order in which it is told, and then explain, step by "
    "step, what seems most important in it to you and why."
)
_SEPARATOR = "\n* * *\n"


@lru_cache(maxsize=1)
def passages() -> tuple[str, ...]:
    """PASSAGE and those of calibration.txt, each of some 400 tokens, ending in a newline."""
    file = resources.files(__package__).joinpath("calibration.txt")
    # as written, whatever line endings a checkout brought
    text = file.read_text(encoding="utf-8").replace("\r\n", "\n")
    return (PASSAGE, *(f"{part.strip()}\n" for part in text.split(_SEPARATOR)))


def calibration_tokens(
    vocabulary: Vocabulary, template: ChatTemplate | None, offset: int = 0
) -> list[int]:
    """A prompt of some 450 tokens, in the model's chat format where it has one.

    `offset` chooses the passage; they repeat after len(passages()).
    """
    text = passages()[offset % len(passages())]
    question = QUESTION if text == PASSAGE else LONG_QUESTION
    return _chat(template, f"{text}\n{question}") or _raw(vocabulary, text)


def long_calibration_tokens(
    vocabulary: Vocabulary, template: ChatTemplate | None, n_tokens: int, offset: int = 0
) -> list[int]:
    """A prompt of exactly n_tokens tokens, in the model's chat format where it has one.

    It starts `offset` passages into the text, so that runs with other offsets see other text, and
    goes round as often as it takes. What is cut off to fit lies in front of the question, not at
    the end of the prompt: the model still knows what to write. Raises ValueError for n_tokens < 1.
    """
    if n_tokens < 1:
        raise ValueError("a prompt has at least one token")
    every = passages()
    count = 1
    while True:
        text = "\n".join(every[(offset + i) % len(every)] for i in range(count))
        tokens = _chat(template, f"{text}\n{LONG_QUESTION}")
        is_chat = bool(tokens)
        tokens = tokens or _raw(vocabulary, text)
        if len(tokens) >= n_tokens:
            break
        if count > n_tokens:  # a vocabulary that knows nothing of this text
            return tokens
        count *= 2
    if not is_chat:
        return tokens[:n_tokens]
    # What every prompt of this format begins and ends with, the blank line before the question
    # included.
    head, tail = frame_lengths(tokens, _chat(template, f"{PLACEHOLDER}\n\n{LONG_QUESTION}"))
    if head + tail > n_tokens:
        head = min(head, n_tokens // 2)
        tail = n_tokens - head
    kept = n_tokens - tail
    return tokens[:kept] + tokens[len(tokens) - tail :]


def _chat(template: ChatTemplate | None, content: str) -> list[int]:
    """One user message; empty where there is no template or it takes none."""
    if template is None:
        return []
    try:
        return template.apply([{"role": "user", "content": content}], now=FIXED_DATE).tokens
    except ModelError:
        return []  # the text without a template serves as well


def _raw(vocabulary: Vocabulary, text: str) -> list[int]:
    return tokenize_prompt(vocabulary, text, parse_special=False)
