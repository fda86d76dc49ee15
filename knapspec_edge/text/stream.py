"""From token ids to text while they arrive, never showing half a character.

The text of a stream, joined, is the text of the same tokens decoded at once: bytes pass through an
incremental UTF-8 decoder, which waits for the rest of a character. A character that the end of the
answer cuts in two is left out of the text (its tokens are still reported); bytes that can never
become a character are shown as U+FFFD.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from .vocabulary import Vocabulary, adds_space_prefix


class StreamDecoder:
    """Incremental detokeniser of one answer.

    `starts_text`: the first token starts a text of its own (a chat answer), so the space that a
    SentencePiece tokenizer puts in front is taken away as llama.cpp's detokenize does. A raw
    completion continues its prompt and keeps the space. `special` shows control tokens.
    """

    def __init__(
        self, vocabulary: Vocabulary, *, starts_text: bool = True, special: bool = False
    ) -> None:
        self._vocabulary = vocabulary
        self._special = special
        self._strip_space = starts_text and adds_space_prefix(vocabulary)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """The text that became complete with this token, possibly empty."""
        data = self._vocabulary.token_bytes(token, special=self._special)
        if self._strip_space:
            # The first token only, whether or not it has text: what llama_detokenize does.
            self._strip_space = False
            data = data.removeprefix(b" ")
        return self._decoder.decode(data)

    @property
    def incomplete(self) -> bool:
        """Whether bytes of an unfinished character are waiting."""
        return bool(self._decoder.getstate()[0])


def detokenize(
    vocabulary: Vocabulary,
    tokens: Sequence[int],
    *,
    starts_text: bool = True,
    special: bool = False,
) -> str:
    """The text of all tokens at once: what a stream of them adds up to."""
    pieces = [vocabulary.token_bytes(token, special=special) for token in tokens]
    if pieces and starts_text and adds_space_prefix(vocabulary):
        pieces[0] = pieces[0].removeprefix(b" ")
    return codecs.getincrementaldecoder("utf-8")(errors="replace").decode(b"".join(pieces))
