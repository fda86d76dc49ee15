#!/usr/bin/env python3
"""Speed of a step and of wider passes, ours against other builds of llama.cpp, alternating.

    python scripts/check_peers.py MODEL... --unpatched FOLDER --peer ik=/opt/ik
    python scripts/check_peers.py MODEL --contexts 64 6144 --widths 8 --other-flash-attn auto off

Every side computes the same tokens in a worker process of its own, driven by the same program. A
round is one pass of each width by every side in turn, the order rotated. Milliseconds are medians
with their quartiles; a wider pass is given in steps of the same side and round. Prompts are timed
once, as they are filled in. Prints Markdown and, as the last line, one line of JSON. A timing is
never a pass or a fail: run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import _measuring as measuring  # noqa: E402
import _sides as sides  # noqa: E402

from knapspec_edge.apps import peers  # noqa: E402
from knapspec_edge.apps.bench.rows import quartiles  # noqa: E402
from knapspec_edge.errors import UsageError  # noqa: E402
from knapspec_edge.native.context import FLASH_ATTN  # noqa: E402
from knapspec_edge.terminal import Terminal  # noqa: E402

CONTEXTS = (64, 6144)
WIDTHS = (1, 8)
ROUNDS = 15
WARM_UP_ROUNDS = 2
# threads of the side before may still wait busily for more to do
PAUSE_SECONDS = 0.01


@dataclass
class Times:
    """Of one side at one context."""

    prompt_per_second: float
    ms: dict[int, list[float]] = field(default_factory=dict)  # by width, a value a round

    def in_steps(self, width: int) -> float:
        """Median of the ratios to the single token of the same round."""
        pairs = zip(self.ms[width], self.ms[1], strict=True)
        return statistics.median(wide / one for wide, one in pairs)


def measured(
    running: Mapping[str, peers.Peer],
    tokens: Sequence[int],
    context: int,
    widths: Sequence[int],
    rounds: int,
    show: Any,
) -> dict[str, Times]:
    found = {}
    for number, (name, peer) in enumerate(running.items()):
        started = time.perf_counter()
        peer.fill(tokens[:context])
        found[name] = Times(context / (time.perf_counter() - started), {w: [] for w in widths})
        show((number + 1) / (2 * len(running)))
    for turn in range(WARM_UP_ROUNDS + rounds):
        for name in sides.rotated(list(running), turn):
            time.sleep(PAUSE_SECONDS)
            times = running[name].passes(tokens[: max(widths)], widths)
            if turn >= WARM_UP_ROUNDS:
                for width, ms in zip(widths, times, strict=True):
                    found[name].ms[width].append(ms)
        show(0.5 + 0.5 * (turn + 1) / (WARM_UP_ROUNDS + rounds))
    return found


def lines_of(found: Mapping[str, Times], widths: Sequence[int]) -> list[str]:
    wider = [width for width in widths if width != 1]
    heads = ["side", "tokens/s (quartiles)", "of ours", "one token, ms"]
    heads += [*(f"{width} tokens, steps" for width in wider), "prompt, tokens/s"]
    rows = []
    for name, times in found.items():
        low, middle, high = quartiles(times.ms[1])
        ratio = statistics.median(
            our / other for our, other in zip(found[peers.OURS].ms[1], times.ms[1], strict=True)
        )
        rows.append(
            [
                name,
                f"{1e3 / middle:.1f} ({1e3 / high:.1f}–{1e3 / low:.1f})",
                "–" if name == peers.OURS else f"{ratio:.2f}×",
                f"{middle:.2f}",
                *(f"{times.in_steps(width):.2f}" for width in wider),
                f"{times.prompt_per_second:,.0f}",
            ]
        )
    return measuring.table(heads, rows)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sides.add_sides(parser)
    add = parser.add_argument
    add("--contexts", type=int, nargs="+", default=CONTEXTS, metavar="TOKENS")
    add("--widths", type=int, nargs="+", default=WIDTHS, metavar="B", help="of passes, beside 1")
    add("--rounds", type=int, default=ROUNDS, help=f"default {ROUNDS}")
    add("--other-flash-attn", nargs="+", choices=list(FLASH_ATTN), metavar="SETTING",
        help="of the other builds, each a side of its own; default: as --flash-attn")  # fmt: skip
    add("--without-kernels", action="store_true", help="ours without its CPU kernels as well")
    return parser


def _check_options(options: argparse.Namespace) -> None:
    measuring.check_settings(options)
    if min(options.contexts) < 1 or min(options.widths) < 1:
        raise UsageError("--contexts and --widths must be at least 1")
    if options.rounds < 2:
        raise UsageError("--rounds must be at least 2: the spread is shown")
    if max(options.widths) > 64:
        raise UsageError("--widths goes to 64: wider passes are prompts")


def _chosen(options: argparse.Namespace, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Sides by name, with their settings."""
    chosen: dict[str, Any] = {}
    own = (peers.OURS, peers.WITHOUT_KERNELS)
    for source in sides.sources_of(options, without_kernels=options.without_kernels):
        chosen_settings = options.other_flash_attn or [options.flash_attn]
        for flash_attn in [options.flash_attn] if source.name in own else chosen_settings:
            name = source.name
            if len(chosen_settings) > 1 and name not in own:
                name += f", flash attention {flash_attn}"
            chosen[name] = (source, {**settings, "flash_attn": flash_attn})
    return chosen


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)

    def body(terminal: Terminal) -> None:
        _check_options(options)
        widths = [1, *sorted(set(options.widths) - {1})]
        behind = (WARM_UP_ROUNDS + options.rounds) * sum(widths)
        results = []
        for name in options.models:
            length = max(*options.contexts, max(widths)) + 1
            info, (tokens, *_) = sides.text_tokens(options, name, terminal, 1, length)
            settings = sides.settings_of(options, max(options.contexts) + behind, max(widths))
            chosen = _chosen(options, settings)
            terminal.text(
                f"Model {info.path.name} ({info.file_type}), {settings['threads']} threads, "
                f"{options.kv_type} keys and values, {options.rounds} rounds.\n"
            )
            with sides.workers(chosen, info.path) as running:
                terminal.text(f"{sides.packages(running)}.\n")
                for context in options.contexts:
                    label = f"{info.path.name}, {context:,} tokens"
                    found = measured(
                        running, tokens, context, widths, options.rounds,
                        lambda share, label=label: terminal.progress(label, share),
                    )  # fmt: skip
                    terminal.text(f"\nBehind {context:,} tokens:\n\n")
                    terminal.text("\n".join([*lines_of(found, widths), "", ""]))
                    results += [
                        {
                            "model": info.path.name,
                            "model_type": info.file_type,
                            "side": side,
                            "package": running[side].package,
                            "settings": dict(chosen[side][1]),
                            "context": context,
                            "prompt_per_second": times.prompt_per_second,
                            "ms": times.ms,
                        }
                        for side, times in found.items()
                    ]
        terminal.text(measuring.json_line({"results": results}) + "\n")

    return measuring.run_guarded(body)


if __name__ == "__main__":
    sys.exit(main())
