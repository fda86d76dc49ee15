"""The text on which a model is measured when it is first used."""

from __future__ import annotations

from datetime import datetime

from ..errors import ModelError
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
_DATE = datetime(2024, 1, 1)
QUESTION = "Retell this in your own words, then explain how the counting game works, step by step."


def calibration_tokens(vocabulary: Vocabulary, template: ChatTemplate | None) -> list[int]:
    """A prompt of some 450 tokens, in the model's chat format where it has one."""
    if template is not None:
        try:
            content = f"{PASSAGE}\n{QUESTION}"
            return template.apply([{"role": "user", "content": content}], now=_DATE).tokens
        except ModelError:
            pass  # the text without a template serves as well
    return tokenize_prompt(vocabulary, PASSAGE, parse_special=False)
