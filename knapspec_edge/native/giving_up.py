"""What happens when ggml ends the process because it cannot go on: a lost RPC server, a GPU that
fails. It has no way to return an error then.

By default it prints a backtrace and aborts, which is what debuggers and test programs want. A
program for people asks for a reason instead, with `on_abort`, before the library is loaded.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from types import SimpleNamespace

from . import rpc

# void (*ggml_abort_callback_t)(const char * error_message);
_Callback = ctypes.CFUNCTYPE(None, ctypes.c_char_p)
_PLACE = re.compile(r"^\S.*?:\d+: ")  # file and line, which the message begins with

_handler: Callable[[str], None] | None = None
_installed: object = None  # what the library holds a pointer to


def on_abort(handler: Callable[[str], None] | None) -> None:
    """Have `handler` called with the reason, one line, in whatever thread it happens. It should end
    the process: otherwise ggml aborts it once it returns."""
    global _handler
    _handler = handler


def install(ggml: SimpleNamespace) -> None:
    """Tell the library, which has just been loaded."""
    global _installed
    if _handler is not None:
        _installed = _Callback(_on_abort)
        ggml.ggml_set_abort_callback(_installed)


def reason(message: str) -> str:
    """ggml's message as one line for people."""
    text = " ".join(_PLACE.sub("", message).split())
    if "RPC" in text:
        return f"an RPC server ({', '.join(rpc.servers()) or 'unknown'}) was lost: {text}"
    return f"llama.cpp cannot go on: {text}"


def _on_abort(message: bytes) -> None:
    if _handler is not None:
        _handler(reason(message.decode(errors="replace")))
