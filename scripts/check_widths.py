#!/usr/bin/env python3
"""What a pass over several tokens costs in steps of one: llama.cpp's CPU kernels against ours.

    python scripts/check_widths.py MODEL...
    python scripts/check_widths.py MODEL --contexts 64 6144 --widths 1 2 4 8 16 --products

In every round each side computes a pass of each width, in turn and in one process: llama.cpp's
kernels with flash attention on and off, and ours. Contexts are marked as filled, not computed. The
figures are medians; a wider pass is given in steps of one token, as the median over rounds. With
--products also each shape of weights by itself, over so many copies that they fit no cache. A
timing is never a pass or a fail: run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import _measuring as measuring  # noqa: E402
import gguf  # noqa: E402

from knapspec_edge.apps.bench.rows import quartiles  # noqa: E402
from knapspec_edge.errors import UsageError  # noqa: E402
from knapspec_edge.native import library  # noqa: E402
from knapspec_edge.native.threads import default_threads  # noqa: E402
from knapspec_edge.records import Sampling  # noqa: E402
from knapspec_edge.terminal import Terminal  # noqa: E402
from tests.native.products import TYPES, Cpu, Weights  # noqa: E402

Pass = Callable[[], None]
WARM_UP_ROUNDS = 1
MOST_WIDTH = 64


def timed(sides: dict[str, dict[int, Pass]], rounds: int) -> dict[str, dict[int, list[float]]]:
    """ms of every round, by side and width; the order of the sides turns."""
    found: dict[str, dict[int, list[float]]] = {
        name: {width: [] for width in passes} for name, passes in sides.items()
    }
    order = list(sides)
    for round_ in range(rounds + WARM_UP_ROUNDS):
        for width in next(iter(sides.values())):
            for name in order:
                started = time.perf_counter()
                sides[name][width]()
                elapsed = 1e3 * (time.perf_counter() - started)
                if round_ >= WARM_UP_ROUNDS:
                    found[name][width].append(elapsed)
        order = order[1:] + order[:1]
    return found


def cells(times: dict[int, list[float]]) -> list[str]:
    """Milliseconds of one token with quartiles, then every width in such steps."""
    ones = times[1]
    low, middle, high = quartiles(ones)
    line = [f"{middle:.4g} ({low:.4g}-{high:.4g})"]
    for width, values in times.items():
        if width > 1:
            pairs = zip(values, ones, strict=True)
            line.append(f"{statistics.median(v / one for v, one in pairs):.2f}")
    return line


@contextmanager
def kernels_of(ours: bool) -> Iterator[None]:
    lib = library.load()._lib
    before = lib.knapspec_get_kernels()
    lib.knapspec_set_kernels(ours)
    try:
        yield
    finally:
        lib.knapspec_set_kernels(before)


def step_sides(
    stack: ExitStack, options: argparse.Namespace, model: Any, context_tokens: int
) -> dict[str, dict[int, Pass]]:
    greedy = Sampling()

    def side(flash_attn: str, ours: bool) -> dict[int, Pass]:
        options.flash_attn = flash_attn
        room = context_tokens + max(options.widths)
        backend = stack.enter_context(measuring.open_context(options, model, room))
        backend.fill(context_tokens)

        def compute(width: int) -> None:
            with kernels_of(ours):
                backend.verify(tokens[:width], greedy)
            backend.truncate(context_tokens)

        random = np.random.default_rng(context_tokens)
        tokens = random.integers(5, backend.n_vocab - 5, max(options.widths)).tolist()
        return {width: lambda width=width: compute(width) for width in options.widths}

    sides = {"llama.cpp, flash attention on": side("on", False)}
    if options.kv_type == "f16":  # quantised values need flash attention
        sides["llama.cpp, off"] = side("off", False)
    sides["ours"] = side("on", True)
    return sides


def shapes_of(path: Path) -> dict[tuple[str, int, int], int]:
    """How many products a step computes with weights of each type, rows and columns."""
    found: dict[tuple[str, int, int], int] = {}
    tensors = {t.name: t for t in gguf.GGUFReader(path).tensors}
    for name, tensor in tensors.items():
        tied = name == "token_embd.weight" and "output.weight" not in tensors
        is_product = name.startswith("blk.") or name == "output.weight" or tied
        shape = [int(n) for n in tensor.shape]
        if is_product and len(shape) == 2 and tensor.tensor_type.name in TYPES:
            key = (tensor.tensor_type.name, shape[1], shape[0])
            found[key] = found.get(key, 0) + 1
    return found


def product_sides(
    stack: ExitStack, cpu: Cpu, key: tuple[str, int, int], options: argparse.Namespace
) -> tuple[dict[str, dict[int, Pass]], int]:
    """The passes over so many copies of the weights, and how many those are."""
    kind, rows, columns = key
    random = np.random.default_rng(rows)
    values = random.standard_normal((rows, columns), np.float32)
    blocks = values.astype(np.float16).view(np.uint8) if kind == "F16" else None
    if blocks is None:
        blocks = values.view(np.uint8) if kind == "F32" else cpu.quantize(kind, values)
    copies = max(1, min(options.pool * 1_000_000 // blocks.nbytes, 100))

    def copies_in(buffer: str) -> list[Weights]:
        return [
            stack.enter_context(closing(Weights(cpu, kind, blocks, columns, buffer)))
            for _ in range(copies)
        ]

    # as a loader does: the first buffer type that takes the weight
    for buffer in [*(b for b in cpu.buffer_types if b != "plain"), "plain"]:
        try:
            with closing(Weights(cpu, kind, None, columns, buffer, rows)) as probe:
                if not cpu.supports(probe):
                    continue
        except KeyError:
            continue
        break
    held = copies_in(buffer)
    sides: dict[str, dict[int, Pass]] = {}
    for name, ours in (("llama.cpp", False), ("ours", True)):
        passes: dict[int, Pass] = {}
        for width in options.widths:
            x = random.standard_normal((width, columns), np.float32)
            graph = stack.enter_context(cpu.chain(held, x))

            def compute(graph: Pass = graph, ours: bool = ours) -> None:
                with cpu.kernels(ours):
                    graph()

            passes[width] = compute
        sides[name] = passes
    return sides, copies


def report(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    print(*measuring.table(heads, lines), sep="\n")
    print(flush=True)


def body(options: argparse.Namespace, terminal: Terminal) -> None:
    measuring.check_settings(options)
    options.widths = sorted({1, *options.widths})
    if options.rounds < 2 or options.widths[0] < 1 or options.widths[-1] > MOST_WIDTH:
        raise UsageError(f"two rounds at least, and widths in 1..{MOST_WIDTH}")
    if min(options.contexts) < 1:
        raise UsageError("--contexts: at least 1 token each")
    wide = [str(width) for width in options.widths[1:]]
    for name in options.model:
        with measuring.opened_model(options, name, terminal) as (model, info):
            lines = []
            for context in options.contexts:
                terminal.progress(f"{info.path.name}, {context:,} tokens", 0.0)
                with ExitStack() as stack:
                    sides = step_sides(stack, options, model, context)
                    for side, times in timed(sides, options.rounds).items():
                        lines.append([f"{context:,}", side, *cells(times)])
            print(f"{info.path.name}: a step, ms, and passes of several tokens in steps")
            report(["context", "kernels", "1 token, ms", *wide], lines)
        if options.products:
            lines = []
            cpu = Cpu(options.threads or default_threads())
            for key, count in shapes_of(info.path).items():
                terminal.progress(f"{info.path.name}, {key[1]} x {key[2]}", 0.0)
                with ExitStack() as stack:
                    sides, copies = product_sides(stack, cpu, key, options)
                    for side, times in timed(sides, options.rounds).items():
                        each = {w: [ms / copies for ms in v] for w, v in times.items()}
                        shape = f"{count} × {key[0]} {key[1]} × {key[2]}"
                        lines.append([shape, side, *cells(each)])
            cpu.close()
            print(f"{info.path.name}: one product of each shape, ms")
            report(["number, type, rows × columns", "kernels", "1 token, ms", *wide], lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model", nargs="+", metavar="MODEL")
    parser.add_argument("--contexts", nargs="+", type=int, default=[64, 2048, 6144], metavar="N")
    parser.add_argument("--widths", nargs="+", type=int, default=[2, 4, 8, 16], metavar="B")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--products", action="store_true", help="each shape of weights by itself")
    parser.add_argument("--pool", type=int, default=200, metavar="MB", help="copies of weights")
    parser.add_argument("--kv-type", default="f16")
    parser.add_argument("--threads", type=int, help="default: one per physical core")
    options = parser.parse_args()
    options.gpu_layers = 0
    return measuring.run_guarded(lambda terminal: body(options, terminal))


if __name__ == "__main__":
    sys.exit(main())
