"""A small vocabulary that tokenizes by llama.cpp's rules, written for obviousness.

Special tokens cut the text first, longest first (control tokens only where asked for, user-defined
ones always); what is left is matched greedily against the longest known word, so a token may span
the border between template text and content, as BPE merges do. Bytes are the fallback.
"""

from __future__ import annotations

from collections.abc import Mapping

CONTROLS = (
    "<s>",
    "</s>",
    "<|im_start|>",
    "<|im_end|>",
    "<|eot|>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
)
USER_DEFINED = ("<think>", "</think>", "    ")
WORDS = (
    "the", " the", "in", "\n\n", "\n\n\n", "user\n", "user", "system", "assistant\n", "ing",
    " hello", "hello", "lo", " [", "[INST", "INST]", "] ", "|>", "<|", " a", "  ", "n\n", ".\n",
    ": ", "?\n", "</", "s>", "é", "日", "本", "日本", "👋", "im_end", "| ", " |",
)  # fmt: skip


class FakeVocabulary:
    """`spm`: prefix space in front of every run of plain text. `rstrip` / `lstrip`: control
    tokens that swallow the white space after / before them."""

    def __init__(
        self,
        *,
        spm: bool = False,
        add_bos: bool = False,
        chat_template: str | None = None,
        controls: tuple[str, ...] = CONTROLS,
        rstrip: tuple[str, ...] = (),
        lstrip: tuple[str, ...] = (),
        ends: tuple[str, ...] = ("</s>", "<|im_end|>", "<|eot|>", "<end_of_turn>", "<|eot_id|>"),
    ) -> None:
        self._bytes = [bytes([i]) for i in range(256)]
        words = [w.encode() for w in WORDS]
        if spm:
            words += [b" " + w for w in words if not w.startswith(b" ")]
        self._bytes += list(dict.fromkeys(words))
        self._first_special = len(self._bytes)
        self._bytes += [text.encode() for text in (*controls, *USER_DEFINED)]
        self._ids: dict[bytes, int] = {}
        for i, data in enumerate(self._bytes[: self._first_special]):
            self._ids.setdefault(data, i)
        self.special = {
            text: self._first_special + i for i, text in enumerate((*controls, *USER_DEFINED))
        }
        self._controls = {self.special[text] for text in controls}
        self._rstrip = {self.special[text] for text in rstrip}
        self._lstrip = {self.special[text] for text in lstrip}
        self._ends = {self.special[text] for text in ends if text in self.special}
        self._spm = spm
        self._add_bos = add_bos
        self._template = chat_template
        self._longest = max(map(len, self._bytes))

    @property
    def n_vocab(self) -> int:
        return len(self._bytes)

    @property
    def metadata(self) -> Mapping[str, str]:
        return {"tokenizer.ggml.add_space_prefix": "true" if self._spm else "false"}

    @property
    def chat_template(self) -> str | None:
        return self._template

    @property
    def bos_token(self) -> int | None:
        return self.special.get("<s>")

    @property
    def eos_token(self) -> int | None:
        return self.special.get("</s>")

    @property
    def add_bos(self) -> bool:
        return self._add_bos

    @property
    def vocab_type(self) -> str:
        return "spm" if self._spm else "bpe"

    def is_control(self, token: int) -> bool:
        return token in self._controls

    def is_end(self, token: int) -> bool:
        return token in self._ends

    def token_bytes(self, token: int, *, special: bool = False) -> bytes:
        return b"" if token in self._controls and not special else self._bytes[token]

    def token_text(self, token: int) -> str:
        return self._bytes[token].decode("utf-8", "replace")

    def tokenize(self, text: str, *, parse_special: bool, add_special: bool = False) -> list[int]:
        fragments: list[bytes | int] = [text.encode()] if text else []
        for name in sorted(self.special, key=len, reverse=True):
            token = self.special[name]
            if token in self._controls and not parse_special:
                continue
            fragments = [out for f in fragments for out in self._cut(f, name.encode(), token)]
        ids = [self.special["<s>"]] if add_special and self._add_bos else []
        after_special = True
        for fragment in fragments:
            if isinstance(fragment, int):
                ids.append(fragment)
                after_special = True
            else:
                prefix = b" " if self._spm and after_special else b""
                ids += self._greedy(prefix + fragment)
                after_special = False
        return ids

    def _cut(self, fragment: bytes | int, name: bytes, token: int) -> list[bytes | int]:
        if isinstance(fragment, int):
            return [fragment]
        out: list[bytes | int] = []
        while (at := fragment.find(name)) >= 0:
            left, fragment = fragment[:at], fragment[at + len(name) :]
            if token in self._lstrip:
                left = left.rstrip(b" \t\n\v\f\r")
            if left:
                out.append(left)
            out.append(token)
            if token in self._rstrip:
                fragment = fragment.lstrip(b" \t\n\v\f\r")
        return [*out, fragment] if fragment else out

    def _greedy(self, data: bytes) -> list[int]:
        ids = []
        while data:
            for n in range(min(self._longest, len(data)), 0, -1):
                if data[:n] in self._ids:
                    ids.append(self._ids[data[:n]])
                    data = data[n:]
                    break
        return ids
