"""Prompts of an exact length: what is left out to fit lies in the middle of a text.

Both ends of a prompt stay: its chat format, the instruction in front of the text, and the question
behind it, so that the model still knows what to write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

# Stands in for the text where only what surrounds it is looked at.
PLACEHOLDER = "Here it is."


class TooShortError(ValueError):
    """What surrounds the text takes more than the whole prompt may have: `needed` tokens."""

    def __init__(self, needed: int) -> None:
        super().__init__(f"at least {needed} tokens")
        self.needed = needed


def frame_lengths(tokens: Sequence[int], frame: Sequence[int]) -> tuple[int, int]:
    """How many tokens at the beginning and at the end of a prompt are not its text: those that it
    shares with `frame`, the same prompt around another text."""
    head = common_length(tokens, frame)
    tail = common_length(tokens[head:][::-1], frame[head:][::-1])
    return head, tail


def fitted(
    render: Callable[[str], Sequence[int]], pieces: Iterable[str], n_tokens: int
) -> list[int]:
    """The prompt `render(text)` in exactly n_tokens tokens, with as many of the pieces joined as
    that takes; the end of the text is cut off.

    Raises TooShortError where there is no room for any text, ValueError where the pieces do not
    fill it.
    """
    frame = list(render(PLACEHOLDER))
    source = iter(pieces)
    text, n_chars = "", 4 * n_tokens
    while True:
        # a few characters per token: one rendering is enough for most texts
        grown = _read(source, text, n_chars)
        tokens = list(render(grown))
        if len(tokens) >= n_tokens:
            break
        if grown == text:
            raise ValueError(f"the text fills {len(tokens)} tokens, not {n_tokens}")
        text, n_chars = grown, 2 * n_chars
    head, tail = frame_lengths(tokens, frame)
    if head + tail >= n_tokens:
        raise TooShortError(head + tail + 1)
    return tokens[: n_tokens - tail] + tokens[len(tokens) - tail :]


def _read(source: Iterable[str], text: str, n_chars: int) -> str:
    """`text` with as many pieces behind it as it takes to have n_chars characters."""
    parts = [text]
    length = len(text)
    if length >= n_chars:
        return text
    for piece in source:
        parts.append(piece)
        length += len(piece)
        if length >= n_chars:
            break
    return "".join(parts)


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common beginning."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))
