"""What programs that run several builds of llama.cpp on one model share: text, sides, workers."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import _measuring as measuring

from knapspec_edge import gguf_check
from knapspec_edge.apps import peers
from knapspec_edge.config import DEFAULTS
from knapspec_edge.errors import ModelError
from knapspec_edge.native.threads import default_threads
from knapspec_edge.terminal import Terminal
from knapspec_edge.text.vocabulary import start_prompt


def add_sides(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("models", nargs="+", metavar="MODEL", help="paths, or names of the manifest")
    add("--unpatched", metavar="FOLDER", help="libraries of another build of llama.cpp")
    add("--peer", action="append", default=[], dest="peers", metavar="[NAME=]WHERE",
        help="as in `knapspec-edge bench`; repeatable")  # fmt: skip
    add("--text", type=Path, metavar="FILE", help="default: Python's own reference, from pydoc")
    measuring.add_settings(parser)


def read_text(path: Path | None) -> str:
    """Raises ModelError."""
    if path is None:
        from pydoc_data.topics import topics

        return "\n\n".join(topics[name] for name in sorted(topics))
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ModelError(f"--text {path}: {error}") from error


def text_tokens(
    options: argparse.Namespace, name: str, terminal: Terminal, count: int, length: int
) -> tuple[gguf_check.GgufInfo, list[list[int]]]:
    """Up to `count` stretches of the text, one behind the other, of `length` tokens with what the
    model wants in front. Raises KnapspecError, also for a text too short for one."""
    text = read_text(options.text)
    # about four letters a token: a long text need not be read to its end
    text = text[: 12 * count * length]
    with measuring.opened_model(options, name, terminal) as (model, info):
        tokens = model.tokenize(text, parse_special=False)
        front = len(start_prompt(model, []))
        body = length - front
        found = [
            start_prompt(model, tokens[at : at + body])
            for at in range(0, min(len(tokens), count * body), body)
        ]
    found = [stretch for stretch in found if len(stretch) == length]
    if not found:
        raise ModelError(f"the text has {len(tokens):,} tokens, fewer than {length:,}")
    return info, found


def settings_of(options: argparse.Namespace, ctx_tokens: int, max_rows: int) -> dict[str, Any]:
    """As a backend has them."""
    threads = options.threads or default_threads()
    return {
        "ctx_tokens": ctx_tokens,
        "slice_tokens": min(DEFAULTS.prefill_slice_tokens, ctx_tokens),
        "max_rows": max_rows,
        "threads": threads,
        "threads_batch": threads,
        "gpu_layers": options.gpu_layers or 0,
        "kv_type": options.kv_type,
        "flash_attn": options.flash_attn,
    }


def sources_of(options: argparse.Namespace, *, without_kernels: bool) -> list[peers.Source]:
    """Ours, ours without CPU kernels where asked for, then the others. Raises UsageError."""
    others = peers.parse_all(options.peers, options.unpatched)
    return [
        peers.ours(kernels=True),
        *([peers.ours(kernels=False)] if without_kernels else []),
        *others,
    ]


@contextmanager
def workers(
    sources: Mapping[str, tuple[peers.Source, Mapping[str, Any]]], model: Path
) -> Iterator[dict[str, peers.Peer]]:
    """Running workers by name, each with its settings. Raises LibraryError."""
    with ExitStack() as stack:
        yield {
            name: stack.enter_context(peers.Peer(source, model, settings))
            for name, (source, settings) in sources.items()
        }


def packages(running: Mapping[str, peers.Peer]) -> str:
    """What the sides are, for people."""
    return "; ".join(f"{name}: {peer.package}" for name, peer in running.items())


def rotated(names: Sequence[str], turn: int) -> list[str]:
    """Another first every turn, and every other turn backwards: what runs behind what matters."""
    at = turn % len(names)
    order = [*names[at:], *names[:at]]
    return order[::-1] if turn % 2 else order
