#!/usr/bin/env python3
"""Perplexity of long real text with our CPU kernels, without them, and by other builds.

    python scripts/check_perplexity.py MODEL... --unpatched FOLDER
    python scripts/check_perplexity.py MODEL... --text FILE --width 4 --peer ik=/opt/ik

The text is cut into chunks; the second half of each is scored, every token given all of its chunk
before it, as llama.cpp's own tool does. Passes are as wide as those that verify drafts, so that the
kernels for few tokens compute them. Standard errors are over tokens: of each perplexity, and of the
difference between two sides of the same text, which is far smaller. Fails where ours differs from
unpatched llama.cpp (without --unpatched: from ours without kernels) by more than one standard error
of the perplexity. Prints Markdown and, as the last line, one line of JSON.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import _measuring as measuring  # noqa: E402
import _sides as sides  # noqa: E402

from knapspec_edge.apps import peers  # noqa: E402
from knapspec_edge.errors import UsageError  # noqa: E402
from knapspec_edge.terminal import Terminal  # noqa: E402

CHUNK_TOKENS = 512
CHUNKS = 16
WIDTH = 16  # the widest pass that the kernels serve for every type


@dataclass(frozen=True)
class Perplexity:
    value: float
    error: float  # standard error


@dataclass(frozen=True)
class Difference:
    """Of one side from another on the same tokens."""

    share: float  # of the perplexity
    share_error: float  # its standard error, of paired tokens
    in_errors: float  # in standard errors of the perplexity
    same: bool  # every token has the same probability, to the last bit


def perplexity(nats: Sequence[float]) -> Perplexity:
    """Of surprisals, two at least, in natural logarithms."""
    value = math.exp(statistics.fmean(nats))
    return Perplexity(value, value * statistics.stdev(nats) / math.sqrt(len(nats)))


def difference(nats: Sequence[float], others: Sequence[float]) -> Difference:
    """`nats` against `others`, token by token."""
    change = [a - b for a, b in zip(nats, others, strict=True)]
    share = math.expm1(statistics.fmean(change))
    error = statistics.stdev(change) / math.sqrt(len(change))
    base = perplexity(others)
    return Difference(
        share, (1.0 + share) * error, share * base.value / base.error, not any(change)
    )


def scored(
    running: Mapping[str, peers.Peer],
    chunks: Sequence[Sequence[int]],
    width: int,
    show: Any,
) -> dict[str, list[float]]:
    """Surprisals of the second half of every chunk, by side."""
    found: dict[str, list[float]] = {name: [] for name in running}
    for number, chunk in enumerate(chunks):
        for name in sides.rotated(list(running), number):
            found[name] += running[name].surprisal(chunk, len(chunk) // 2, width)
        show((number + 1) / len(chunks))
    return found


def lines_of(found: Mapping[str, Sequence[float]], base: str) -> list[str]:
    heads = ["side", "perplexity (± standard error)", f"against {base}", "standard errors apart"]
    rows = []
    for name, nats in found.items():
        one, change = perplexity(nats), difference(nats, found[base])
        against, apart = "–", "–"
        if name != base:
            apart = f"{change.in_errors:+.3f}"
            against = f"{100 * change.share:+.3f} % (± {100 * change.share_error:.3f} %)"
            if change.same:
                against, apart = "the same bits", "0"
        rows.append([name, f"{one.value:.4f} (± {one.error:.4f})", against, apart])
    return measuring.table(heads, rows)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sides.add_sides(parser)
    add = parser.add_argument
    add("--chunk", type=int, default=CHUNK_TOKENS, metavar="TOKENS", help=f"default {CHUNK_TOKENS}")
    add("--chunks", type=int, default=CHUNKS, metavar="N", help=f"at most; default {CHUNKS}")
    add("--width", type=int, default=WIDTH, metavar="B", help=f"of a pass; default {WIDTH}")
    return parser


def _check_options(options: argparse.Namespace) -> None:
    measuring.check_settings(options)
    if options.chunk < 8:
        raise UsageError("--chunk must be at least 8: its second half is scored")
    if options.chunks < 1:
        raise UsageError("--chunks must be at least 1")
    if not 1 <= options.width <= options.chunk:
        raise UsageError("--width must be at least 1 and no more than --chunk")


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    failures: list[str] = []

    def body(terminal: Terminal) -> None:
        _check_options(options)
        results = []
        for name in options.models:
            info, chunks = sides.text_tokens(options, name, terminal, options.chunks, options.chunk)
            settings = sides.settings_of(options, options.chunk, options.width)
            chosen = {
                source.name: (source, settings)
                for source in sides.sources_of(options, without_kernels=True)
            }
            base = peers.UNPATCHED if peers.UNPATCHED in chosen else peers.WITHOUT_KERNELS
            with sides.workers(chosen, info.path) as running:
                packages = {side: peer.package for side, peer in running.items()}
                found = scored(
                    running, chunks, options.width,
                    lambda share, label=info.path.name: terminal.progress(label, share),
                )  # fmt: skip
            n = len(found[base])
            terminal.text(
                f"Model {info.path.name} ({info.file_type}), {len(chunks)} chunks of "
                f"{options.chunk} tokens, {n:,} of them scored, {options.width} a pass, "
                f"{settings['threads']} threads, flash attention {options.flash_attn}, "
                f"{options.kv_type} keys and values.\n\n"
            )
            terminal.text("\n".join([*lines_of(found, base), "", ""]))
            apart = difference(found[peers.OURS], found[base]).in_errors
            if abs(apart) > 1.0:
                failures.append(f"{info.path.name}: ours is {apart:+.2f} standard errors off")
            results.append(
                {
                    "model": info.path.name,
                    "model_type": info.file_type,
                    "settings": settings,
                    "chunks": len(chunks),
                    "tokens": n,
                    "width": options.width,
                    "sides": {
                        side: {
                            "package": packages[side],
                            **asdict(perplexity(nats)),
                            "difference": asdict(difference(nats, found[base])),
                        }
                        for side, nats in found.items()
                    },
                }
            )
        terminal.text(measuring.json_line({"models": results, "failures": failures}) + "\n")
        for line in failures:
            terminal.error(line)

    return measuring.run_guarded(body) or int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
