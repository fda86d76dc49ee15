"""Split text into pieces of at most so many tokens, at borders that people would choose.

The text is tokenized once, in blocks, which says about where each token begins; from that come all
choices of a border. A tokenizer may merge differently at the start of a piece than in the middle of
a text, so each piece is then tokenized by itself, and cut shorter in the rare case that it is too
long. That is two passes over the text, whatever its length.
"""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_left, bisect_right
from collections.abc import Iterator

from ..errors import ContextError
from .vocabulary import Vocabulary, adds_space_prefix

# Characters per tokenizer call: long enough that what merges across the ends does not count, short
# enough for tokenizers that are slow or recursive on long texts without spaces.
_BLOCK = 2048

# White space belongs to the piece before a border, indentation to the one after. Texts may be
# hostile: no pattern looks at a character more than a few times.
_PARAGRAPH_END = re.compile(r"\n(?:[^\S\n]*\n)+|\u2029")
_HEADING = re.compile(r"#{1,6} ")
_CLOSING = "\"'”’»)\\]」』）】》〉"
# Some scripts write no space after a sentence; a full stop with none is part of a number or name.
_SENTENCE_END = re.compile(
    rf"[.!?…؟۔][{_CLOSING}]*(?=\s)|[。！？｡।॥።။។][{_CLOSING}]*(?![。！？{_CLOSING}])"
)
_ABBREVIATION = re.compile(
    r"\b(?:Mr|Mrs|Ms|Dr|Prof|St|vs|cf|Fig|No|Nr|Bd|bzw|vgl|ca|e\.g|i\.e|z\.B|d\.h|[A-Z]|\d)\.$"
)
_LONGEST_ABBREVIATION = 6  # characters, one before it and the full stop included
_SPACE = re.compile(r"[^\S\n]*\n?")
_WORD_END = re.compile(r"\s+|[，、；：]")

# What a border costs beside its distance from where even pieces would end, in shares of a piece.
_SECTION, _PARAGRAPH, _SENTENCE, _LINE, _WORD, _TOKEN = 0.0, 0.1, 0.35, 0.5, 0.9, 1.5
_EXTRA_PIECE = 0.3  # where it makes one more piece than the text needs
_SHORTEST = 0.5  # of an even piece; only the last piece of a text may be shorter


def split(text: str, vocabulary: Vocabulary, max_tokens: int) -> list[str]:
    """Pieces whose concatenation is the text; [] for an empty one.

    Each piece tokenized by itself (`tokenize(piece, parse_special=False)`: no BOS, control tokens
    as plain text) has at most `max_tokens` tokens. Borders lie between sections or paragraphs where
    that leaves the pieces about even, else between sentences, lines, words, tokens; never inside a
    character. A piece is all white space only where the text has a piece's worth of it. Raises
    ContextError if not even one character fits.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1, not {max_tokens}")
    borders = _Borders(text, _token_starts(text, vocabulary))
    pieces = []
    start = 0
    while start < len(text):
        limit, cap = max_tokens, len(text)
        while True:
            end = borders.choose(start, limit, cap)
            piece = text[start:end]
            n_tokens = len(vocabulary.tokenize(piece, parse_special=False))
            if n_tokens <= max_tokens:
                break
            if end == start + 1:
                raise ContextError(
                    f"room for {max_tokens} tokens is too little for this text: its character "
                    f"{piece!r} alone takes {n_tokens}"
                )
            expected = min(limit, borders.count(start, end))
            shorter = expected - (n_tokens - max_tokens)
            if shorter >= 1:
                limit, cap = shorter, end - 1
            else:  # the estimate is far off
                limit, cap = max(limit // 2, 1), start + (end - start) // 2
        pieces.append(piece)
        start = end
    return pieces


def _token_starts(text: str, vocabulary: Vocabulary) -> list[int]:
    """For each token of the text the index of the character it begins in; ascending."""
    known: dict[int, int] = {}  # token -> bytes

    def n_bytes(token: int) -> int:
        if token not in known:
            known[token] = len(vocabulary.token_bytes(token, special=True))
        return known[token]

    prefixed = adds_space_prefix(vocabulary)
    starts: list[int] = []
    for begin, end in _blocks(text):
        block = text[begin:end]
        tokens = vocabulary.tokenize(block, parse_special=False)
        sizes = [n_bytes(token) for token in tokens]
        total = len(block.encode())
        surplus = sum(sizes) - total
        if sizes and prefixed and surplus == 1:
            sizes[0] -= 1
            surplus = 0
        if surplus:
            # The vocabulary cannot spell this text, or changes it first: evenly, then.
            n = max(len(tokens), 1)
            starts += [begin + i * len(block) // n for i in range(len(tokens))]
            continue
        characters = _character_of_byte(block) if total != len(block) else None
        at = 0
        for size in sizes:
            starts.append(begin + (characters[at] if characters and at < total else at))
            at += size
    # a token without bytes at the very end would lie behind the text
    while starts and starts[-1] >= len(text):
        starts[-1:] = []
    return starts


def _blocks(text: str) -> Iterator[tuple[int, int]]:
    """Consecutive ranges of at most _BLOCK characters, ending behind a line or word if possible."""
    begin = 0
    while begin < len(text):
        end = min(begin + _BLOCK, len(text))
        if end < len(text):
            half = begin + _BLOCK // 2
            line = text.rfind("\n", half, end) + 1
            # in front of a space: most tokenizers join it to the word behind it
            space = text.rfind(" ", half, end)
            end = line or (space if space > half else end)
        yield begin, end
        begin = end


def _character_of_byte(block: str) -> list[int]:
    """For each byte of the block's UTF-8 form the index of its character."""
    index: list[int] = []
    for i, character in enumerate(block):
        code = ord(character)
        size = 1 if code < 0x80 else 2 if code < 0x800 else 3 if code < 0x10000 else 4
        index += [i] * size
    return index


class _Borders:
    """The places where a text may be cut, by sort, and the choice among them.

    All positions are indices of characters: a cut in front of that character.
    """

    def __init__(self, text: str, starts: list[int]) -> None:
        """`starts`: of all tokens, ascending."""
        self._text = text
        self._starts = starts
        sections: list[int] = []
        paragraphs: list[int] = []
        for match in _PARAGRAPH_END.finditer(text):
            if _HEADING.match(text, match.end()):
                sections.append(match.end())
            elif not self._is_heading(match.start()):
                paragraphs.append(match.end())
        lines = [
            match.end() for match in re.finditer("\n", text) if not self._is_heading(match.start())
        ]
        # the best first
        self._sorts = (
            (_SECTION, sections),
            (_PARAGRAPH, paragraphs),
            (_SENTENCE, list(self._sentence_ends())),
            (_LINE, lines),
        )

    def _is_heading(self, end: int) -> bool:
        """Whether the line that ends there is one: it stays with what it stands above."""
        return bool(_HEADING.match(self._text, self._text.rfind("\n", 0, end) + 1))

    def _sentence_ends(self) -> Iterator[int]:
        text = self._text
        for match in _SENTENCE_END.finditer(text):
            begin = max(0, match.end() - _LONGEST_ABBREVIATION)
            if _ABBREVIATION.search(text[begin : match.end()]):
                continue
            space = _SPACE.match(text, match.end())
            end = space.end() if space else match.end()
            if not text[end : end + 1].islower():
                yield end

    def count(self, start: int, end: int) -> int:
        """About how many tokens a piece has."""
        return bisect_left(self._starts, end) - bisect_left(self._starts, start)

    def choose(self, start: int, limit: int, cap: int) -> int:
        """Where a piece from `start` should end: after about `limit` tokens, and at `cap`, at most.

        What follows is thought of as pieces of equal length, as few as possible.
        """
        starts = self._starts
        first = bisect_left(starts, start)
        remaining = len(starts) - first
        if remaining <= limit and cap == len(self._text):
            return cap
        n_pieces = max(-(-remaining // limit), 2)
        even = max(remaining / n_pieces, 1.0)  # tokens
        enough = remaining - (n_pieces - 1) * limit  # tokens; with fewer it takes another piece

        def position(tokens: float) -> int:
            index = first + int(tokens)
            found = starts[index] if index < len(starts) else len(self._text)
            return max(min(found, cap), start + 1)

        low, high = position(even * _SHORTEST), position(limit)
        best, best_cost = self._token_border(start, position(even)), _TOKEN
        for penalty, candidates in (*self._sorts, (_WORD, self._word_ends)):
            if penalty >= best_cost:
                break
            if callable(candidates):
                chosen = candidates(low, high)
            else:
                chosen = candidates[bisect_left(candidates, low) : bisect_right(candidates, high)]
            for at in chosen:
                tokens = bisect_left(starts, at, first) - first
                cost = penalty + abs(tokens - even) / even + _EXTRA_PIECE * (tokens < enough)
                if cost < best_cost:
                    best, best_cost = at, cost
        return best

    def _word_ends(self, low: int, high: int) -> list[int]:
        ends = [m.end() for m in _WORD_END.finditer(self._text, low, high) if m.end() > low]
        if ends and ends[-1] == high and self._text[high : high + 1].isspace():
            del ends[-1]  # the white space goes on
        return ends

    def _token_border(self, start: int, wanted: int) -> int:
        """The last border of tokens and of what is shown as one character, up to `wanted`."""
        starts = self._starts
        for index in range(bisect_right(starts, wanted) - 1, -1, -1):
            if starts[index] <= start:
                break
            if not _is_joined(self._text, starts[index]):
                return starts[index]
        return wanted


def _is_joined(text: str, at: int) -> bool:
    """Whether the characters on both sides are shown as one: accents, emoji sequences, flags."""
    before, after = text[at - 1], text[at]
    return (
        unicodedata.category(after).startswith("M")  # includes variation selectors
        or "\u200d" in (before, after)  # zero-width joiner
        or "\U0001f3fb" <= after <= "\U0001f3ff"  # skin tones
        or (min(before, after) >= "\U0001f1e6" and max(before, after) <= "\U0001f1ff")
        or (before, after) == ("\r", "\n")
    )
