"""Every error a user can cause, under one root.

The message is one line that says what is wrong and what to do. The command line prints it and exits
with `exit_code`; nothing else is caught there, so any other exception is a fault of ours.
"""

from __future__ import annotations


class KnapspecError(Exception):
    """Root of all errors this package raises on purpose."""

    exit_code = 1


class UsageError(KnapspecError):
    """The request itself is not well formed (an option value, a plan file)."""

    exit_code = 2


class BusyError(UsageError):
    """The engine is in use: by a call in another thread or around this one, or by an answer that
    another thread has neither read to its end nor closed."""


class ClosedError(UsageError):
    """The engine was closed, or belongs to the process that this one was forked from."""


class ModelError(KnapspecError):
    """A model file is missing, damaged, or not what this program reads."""


class DownloadError(KnapspecError):
    """A model could not be fetched or did not match its recorded digest."""


class LibraryError(KnapspecError):
    """The patched llama.cpp is missing, of the wrong version, or shadowed by another copy."""


class DocumentError(KnapspecError):
    """An input is missing, damaged, protected, or holds no text that can be read."""


class OutputError(KnapspecError):
    """A result could not be written, such as on a full disk."""


class ContextError(KnapspecError):
    """The prompt or the conversation does not fit the context."""


class PlanError(KnapspecError):
    """A plan cannot be honoured for this model."""


class RollbackError(KnapspecError):
    """The KV cache could not be cut back to the accepted tokens."""


class NativeError(KnapspecError):
    """llama.cpp reported a failure; the message carries its last error line."""


class NoTokenError(NativeError):
    """A pass gave nothing to pick: no logit is a number, or the grammar allows no token there."""


class ClusterError(KnapspecError):
    """The machines that were to share a job are not there, or were lost."""


class CompleteError(NoTokenError):
    """The answer is all that its grammar asks for, and the vocabulary has no token that ends it."""


class Interrupted(KnapspecError):
    """The user interrupted a native computation. The KV cache holds only accepted tokens."""

    exit_code = 130
