"""What the text layer asks of a vocabulary; `native.Model` provides it, tests fake it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class Vocabulary(Protocol):
    """The tokenizer of one model."""

    @property
    def metadata(self) -> Mapping[str, str]:
        """The GGUF's scalar metadata as text."""
        ...

    @property
    def n_vocab(self) -> int: ...

    @property
    def chat_template(self) -> str | None: ...

    @property
    def bos_token(self) -> int | None: ...

    @property
    def eos_token(self) -> int | None: ...

    @property
    def add_bos(self) -> bool:
        """Whether a prompt of this model starts with the BOS token."""
        ...

    @property
    def vocab_type(self) -> str:
        """The tokenizer family: "spm", "bpe", "wpm", "ugm", ..."""
        ...

    def tokenize(
        self, text: str, *, parse_special: bool, add_special: bool = False
    ) -> list[int]: ...

    def token_bytes(self, token: int, *, special: bool = False) -> bytes:
        """The bytes a token stands for; empty for a control token unless `special`."""
        ...

    def token_text(self, token: int) -> str: ...

    def is_control(self, token: int) -> bool: ...

    def is_end(self, token: int) -> bool: ...


def adds_space_prefix(vocabulary: Vocabulary) -> bool:
    """Whether the tokenizer puts a space in front of a text, which detokenising takes away again.

    The rule of llama.cpp's vocabulary loader: the metadata key decides, and without it only
    SentencePiece-style vocabularies do.
    """
    stated = vocabulary.metadata.get("tokenizer.ggml.add_space_prefix")
    if stated is not None:
        return stated.strip().lower() in ("true", "1")
    return vocabulary.vocab_type in ("spm", "ugm")


def start_prompt(vocabulary: Vocabulary, tokens: list[int]) -> list[int]:
    """The prompt with exactly one BOS where one belongs.

    A template may write BOS while the tokenizer would add one too; either way one is left.
    """
    bos = vocabulary.bos_token
    if bos is None:
        return tokens
    n_bos = 0
    while n_bos < len(tokens) and tokens[n_bos] == bos:
        n_bos += 1
    if n_bos or vocabulary.add_bos:
        return [bos, *tokens[n_bos:]]
    return tokens


def tokenize_prompt(vocabulary: Vocabulary, text: str, *, parse_special: bool) -> list[int]:
    """Token ids of a raw prompt, BOS included where the model wants it."""
    return start_prompt(vocabulary, vocabulary.tokenize(text, parse_special=parse_special))
