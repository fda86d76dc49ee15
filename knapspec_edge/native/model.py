"""The weights and the vocabulary of one GGUF file."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from types import FrameType
from typing import Any

from ..closing import Closing
from ..config import GPU_LAYERS_MAX
from ..errors import Interrupted, ModelError, UsageError
from . import bindings, library

# enum llama_token_attr: unknown, unused, control, byte
_NO_TEXT = 1 | 2 | 8 | 32
_VOCAB_TYPES = {0: "none", 1: "spm", 2: "bpe", 3: "wpm", 4: "ugm", 5: "rwkv", 6: "plamo2"}


@contextlib.contextmanager
def hold_interrupts() -> Iterator[Callable[[], bool]]:
    """While inside, Ctrl-C is only noted; yields what tells whether it was pressed.

    Python raises KeyboardInterrupt wherever it happens to be. In a callback from native code that
    may be before its first line, where no handler stands: it is then printed and lost. Does nothing
    outside the main thread, or where the program handles Ctrl-C itself.
    """
    count = 0

    def note(_signal: int, _frame: FrameType | None) -> None:
        nonlocal count
        count += 1

    ours = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )
    if ours:
        signal.signal(signal.SIGINT, note)
    try:
        yield lambda: count > 0
    finally:
        if ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)


class Model(Closing):
    """A loaded model. Its weights stay in memory until it and all its contexts are closed."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        gpu_layers: int | None = None,
        progress: Callable[[float], bool] | None = None,
    ) -> None:
        """Raises LibraryError, ModelError if it cannot be loaded, Interrupted if cancelled."""
        if gpu_layers is not None and not 0 <= gpu_layers <= GPU_LAYERS_MAX:
            raise UsageError(f"--gpu-layers must be in 0..{GPU_LAYERS_MAX}, not {gpu_layers}")
        self.path = Path(path)
        self._llama = library.load()
        self._pid = os.getpid()
        self._pointer: Any = None
        self._closed = False
        self._n_contexts = 0
        # finalizers of contexts run in any thread, also in the middle of a method here
        self._counting = threading.RLock()
        parameters = self._llama.llama_model_default_params()
        self.gpu_layers = -1 if gpu_layers is None else gpu_layers  # -1: as many as fit
        parameters.n_gpu_layers = self.gpu_layers

        cancelled = False
        failure: BaseException | None = None

        def report(fraction: float, _: object) -> bool:
            # an exception must not cross the native frames
            nonlocal cancelled, failure
            if pressed():
                return False
            try:
                cancelled = progress is not None and not progress(fraction)
            except BaseException as error:
                failure = error
            return not cancelled and failure is None

        callback = self._llama.llama_progress_callback(report)
        parameters.progress_callback = callback
        self._llama._lib.knapspec_clear_error()
        with hold_interrupts() as pressed:
            self._pointer = self._llama.llama_model_load_from_file(
                os.fsencode(self.path), parameters
            )
        if pressed() and failure is None:
            failure = KeyboardInterrupt()
        if failure is not None:
            self.close()
            raise failure
        if cancelled:
            self.close()
            raise Interrupted(f"loading {self.path.name} was cancelled")
        if not self._pointer:
            reason = bindings.first_error(self._llama._lib) or "no reason given"
            raise ModelError(f"llama.cpp cannot load {self.path}: {reason}")
        self._piece = ctypes.create_string_buffer(256)

    # lifetime

    def close(self) -> None:
        """Free the weights, or leave that to the last context that is still open."""
        self._closed = True
        if os.getpid() == self._pid:  # a fork has not got the threads that freeing may wait for
            self._free_if_unused()

    def attach(self) -> None:
        """A context of this model was opened."""
        with self._counting:
            self._n_contexts += 1

    def detach(self) -> None:
        """A context of this model was freed."""
        with self._counting:
            self._n_contexts -= 1
        self._free_if_unused()

    def _free_if_unused(self) -> None:
        # The garbage collector finalizes a model and its contexts in any order, and freeing a
        # context reads its model.
        with self._counting:
            if not self._closed or self._n_contexts:
                return
            pointer, self._pointer = self._pointer, None
        if pointer:
            self._llama.llama_model_free(pointer)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()

    @property
    def pointer(self) -> Any:
        """`llama_model *`. Raises ValueError after close()."""
        if self._closed:
            raise ValueError("the model is closed")
        return self._pointer

    @property
    def _vocab(self) -> Any:
        return self._llama.llama_model_get_vocab(self.pointer)

    # what it is

    @cached_property
    def metadata(self) -> dict[str, str]:
        """All scalar GGUF metadata as text."""
        result = {}
        get_key = self._llama.llama_model_meta_key_by_index
        get_value = self._llama.llama_model_meta_val_str_by_index
        for i in range(self._llama.llama_model_meta_count(self.pointer)):
            key, value = self._read_text(get_key, i), self._read_text(get_value, i)
            if key is not None and value is not None:
                result[key] = value
        return result

    def _read_text(self, function: Callable[..., int], index: int) -> str | None:
        size = 1024
        while True:
            buffer = ctypes.create_string_buffer(size)
            length = function(self.pointer, index, buffer, size)
            if length < 0:
                return None
            if length < size:
                return buffer.value.decode(errors="replace")
            size = length + 1

    @property
    def architecture(self) -> str:
        return self.metadata.get("general.architecture", "unknown")

    @property
    def description(self) -> str:
        buffer = ctypes.create_string_buffer(256)
        self._llama.llama_model_desc(self.pointer, buffer, len(buffer))
        return buffer.value.decode(errors="replace")

    @property
    def n_layer(self) -> int:
        return int(self._llama.llama_model_n_layer(self.pointer))

    @property
    def n_embd_out(self) -> int:
        """Numbers in a state at the input of the head."""
        return int(self._llama.llama_model_n_embd_out(self.pointer))

    @property
    def n_ctx_train(self) -> int:
        """Context length the model was trained with, tokens."""
        return int(self._llama.llama_model_n_ctx_train(self.pointer))

    @property
    def n_swa(self) -> int:
        """Width of the sliding window, tokens; 0 without one."""
        return int(self._llama.llama_model_n_swa(self.pointer))

    @property
    def n_params(self) -> int:
        return int(self._llama.llama_model_n_params(self.pointer))

    @property
    def size_bytes(self) -> int:
        return int(self._llama.llama_model_size(self.pointer))

    @property
    def is_recurrent(self) -> bool:
        """Whether any layer keeps a state that cannot be cut back token by token."""
        return bool(
            self._llama.llama_model_is_recurrent(self.pointer)
            or self._llama.llama_model_is_hybrid(self.pointer)
        )

    @property
    def has_decoder(self) -> bool:
        return bool(self._llama.llama_model_has_decoder(self.pointer))

    @property
    def has_encoder(self) -> bool:
        return bool(self._llama.llama_model_has_encoder(self.pointer))

    @property
    def is_diffusion(self) -> bool:
        return bool(self._llama.llama_model_is_diffusion(self.pointer))

    @property
    def chat_template(self) -> str | None:
        """Jinja source of the default chat template, or None for a base model."""
        text = self._llama.llama_model_chat_template(self.pointer, None)
        return text.decode(errors="replace") if text else None

    # vocabulary

    @cached_property
    def n_vocab(self) -> int:
        return int(self._llama.llama_vocab_n_tokens(self._vocab))

    @property
    def vocab_type(self) -> str:
        """Tokenizer family: "spm", "bpe", "wpm", "ugm", ..."""
        return _VOCAB_TYPES.get(self._llama.llama_vocab_type(self._vocab), "unknown")

    @property
    def bos_token(self) -> int | None:
        token = int(self._llama.llama_vocab_bos(self._vocab))
        return token if token >= 0 else None

    @property
    def eos_token(self) -> int | None:
        token = int(self._llama.llama_vocab_eos(self._vocab))
        return token if token >= 0 else None

    @property
    def add_bos(self) -> bool:
        """Whether a prompt of this model starts with the beginning-of-sequence token."""
        return bool(self._llama.llama_vocab_get_add_bos(self._vocab))

    def tokenize(self, text: str, *, parse_special: bool, add_special: bool = False) -> list[int]:
        """Token ids of `text`. With parse_special, control-token strings become control tokens.

        Raises UsageError for text that is not valid Unicode.
        """
        try:
            raw = text.encode()
        except UnicodeEncodeError as error:
            raise UsageError(f"the text holds a broken character at {error.start}") from error
        size = len(raw) + 2
        while True:
            tokens = (ctypes.c_int32 * size)()
            n = self._llama.llama_tokenize(
                self._vocab, raw, len(raw), tokens, size, add_special, parse_special
            )
            if n >= 0:
                return list(tokens[:n])
            size = -n

    def token_bytes(self, token: int, *, special: bool = False) -> bytes:
        """Bytes of a token; control tokens are empty unless `special`."""
        self._check_token(token)
        size = len(self._piece)
        n = self._llama.llama_token_to_piece(self._vocab, token, self._piece, size, 0, special)
        if n < 0:
            self._piece = ctypes.create_string_buffer(-n)
            n = self._llama.llama_token_to_piece(self._vocab, token, self._piece, -n, 0, special)
        return self._piece.raw[:n]

    def token_text(self, token: int) -> str:
        """The token as the vocabulary spells it."""
        self._check_token(token)
        text = self._llama.llama_vocab_get_text(self._vocab, token)
        return text.decode(errors="replace") if text else ""

    def is_control(self, token: int) -> bool:
        self._check_token(token)
        return bool(self._llama.llama_vocab_is_control(self._vocab, token))

    def is_end(self, token: int) -> bool:
        """Whether a generation ends with this token."""
        self._check_token(token)
        return bool(self._llama.llama_vocab_is_eog(self._vocab, token))

    @cached_property
    def end_tokens(self) -> tuple[int, ...]:
        """All tokens that a generation ends with, ascending."""
        is_end, vocab = self._llama.llama_vocab_is_eog, self._vocab
        return tuple(t for t in range(self.n_vocab) if is_end(vocab, t))

    def text_tokens(self, n: int) -> list[int]:
        """The first n tokens, or as many as there are, that texts are made of: no control, unused
        or single-byte ones."""
        attributes, vocab = self._llama.llama_vocab_get_attr, self._vocab
        usual = (t for t in range(self.n_vocab) if not attributes(vocab, t) & _NO_TEXT)
        return list(itertools.islice(usual, n))

    def _check_token(self, token: int) -> None:
        # the native functions trust their argument
        if not 0 <= token < self.n_vocab:
            raise ValueError(f"token {token} is outside 0..{self.n_vocab - 1}")
