"""Split text into pieces of at most so many tokens, at borders that people would choose."""

from __future__ import annotations

from .vocabulary import Vocabulary


def split(text: str, vocabulary: Vocabulary, max_tokens: int) -> list[str]:
    """Pieces whose concatenation is the text; [] for an empty one.

    Each piece tokenized by itself (`tokenize(piece, parse_special=False)`: no BOS, control tokens
    as plain text) has at most `max_tokens` tokens. Borders lie between sections or paragraphs where
    that leaves the pieces about even, else between sentences, lines, words, tokens. Raises
    ContextError if not even one character fits.
    """
    raise NotImplementedError
