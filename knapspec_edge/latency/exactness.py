"""Whether verification equals plain decoding bit for bit, found out by comparing them.

The claim is about a model with its settings on this machine: the row of logits behind a token, and
the keys and values that the token leaves, do not depend on how many tokens are computed in the same
pass. Then no plan can change a text. Kernels decide it, so nothing is assumed about them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..backend import Backend
from ..config import Config
from ..decode.rollback import rewind
from ..records import GREEDY
from .store import INVALID, Store

# Grows when a stored record means something else than before.
_VERSION = 1


@dataclass(frozen=True)
class Exactness:
    """The result: `holds` for passes over 1..tokens tokens; otherwise `reason` says where it fails,
    in one line."""

    holds: bool
    tokens: int
    reason: str = ""


def examine(
    backend: Backend,
    tokens: Sequence[int],
    config: Config,
    progress: Callable[[float], None] | None = None,
) -> Exactness:
    """Compare passes over 2..config.exact_verify_tokens tokens with as many passes over one.

    At the beginning, across a boundary at which the padded cache grows, and at the end of the
    context, where the cells before are only marked as filled. `tokens` is the text, at least one
    token; it is repeated as needed. Empties the cache before and after. Raises what passes raise.
    """
    widest = min(config.exact_verify_tokens, backend.max_verify_tokens, backend.n_ctx - 1)
    if widest < 2:
        return Exactness(False, 1, "the context has no room for two tokens at once")
    last = backend.n_ctx - widest - 1
    starts = sorted({min(start, last) for start in (*config.exact_context_tokens, last)})
    text = list(tokens) * (1 + (starts[-1] + widest + 1) // len(tokens))
    try:
        for i, start in enumerate(starts):
            few = config.exact_long_widths if start > config.exact_context_tokens[-1] else ()
            widths = [w for w in few or range(2, widest + 1) if w <= widest]
            rewind(backend, 0)
            if few:
                backend.fill(start)
            elif start:
                backend.prefill(text[:start], GREEDY)
            window = text[start : start + widest + 1]
            alone = [_digests(backend, [token])[0] for token in window]
            for j, width in enumerate(widths):
                rewind(backend, start)
                together = _digests(backend, window[:width])
                # what the next token sees is what the pass has left in the cache
                together += _digests(backend, window[width : width + 1])
                if together != alone[: width + 1]:
                    return Exactness(
                        False,
                        1,
                        f"a pass over {width} tokens gives other logits than passes over one, "
                        f"behind {start} tokens of context",
                    )
                if progress is not None:
                    progress((i + (j + 1) / len(widths)) / len(starts))
    finally:
        rewind(backend, 0)
    return Exactness(True, widest)


def exactness(
    backend: Backend,
    model_key: str | Mapping[str, Any],
    tokens: Sequence[int],
    config: Config,
    store: Store,
    progress: Callable[[float], None] | None = None,
    *,
    prepare: Callable[[], None] = lambda: None,
) -> Exactness:
    """What `examine` finds, kept: it depends on the model, the machine and the settings only.

    `prepare` is called before a comparison, which empties the cache; what is kept takes none.
    """
    key = {
        "exactness": _VERSION,
        "model": model_key if isinstance(model_key, str) else dict(model_key),
        "settings": dict(getattr(backend, "settings", {})),
        "tokens": min(config.exact_verify_tokens, backend.max_verify_tokens),
    }
    content = store.load(key)
    if content is not None:
        try:
            return _from_json(content)
        except INVALID:
            store.ignore(key)
    prepare()
    found = examine(backend, tokens, config, progress)
    store.save(key, {"holds": found.holds, "tokens": found.tokens, "reason": found.reason})
    return found


def _from_json(content: Mapping[str, Any]) -> Exactness:
    holds, tokens, reason = content["holds"], content["tokens"], content["reason"]
    if not isinstance(holds, bool) or type(tokens) is not int or not isinstance(reason, str):
        raise ValueError("not an exactness")
    return Exactness(holds, tokens, reason)


def _digests(backend: Backend, tokens: Sequence[int]) -> list[bytes]:
    """Append tokens in one pass; one digest of the logits per row."""
    backend.evaluate(tokens)
    return [
        hashlib.blake2b(backend.logits(row).tobytes(), digest_size=16).digest()
        for row in range(len(tokens))
    ]
