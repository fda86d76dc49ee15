#!/usr/bin/env python3
"""What attention costs for few query rows, upstream's kernel against ours, alternating.

    python scripts/check_attention.py
    python scripts/check_attention.py --shape 32 8 128 --keys 2048 6144 --rows 1 4 8 --type q8_0

Each figure is the time of one layer's operation in ms: the median over rounds, in each of which
both kernels compute a graph of so many layers that their keys and values fit no cache. Largest
errors are against F64. Run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from _measuring import table  # noqa: E402

from tests.native.attention_op import (  # noqa: E402
    F16,
    Q8_0,
    Attention,
    Operation,
    causal_mask,
    naive,
)

MOST_LAYERS = 400


def attention(
    shape: tuple[int, int, int], keys: int, rows: int, kind: int, window: int
) -> Attention:
    heads, heads_kv, width = shape
    random = np.random.default_rng(keys + rows)
    cells = -(-keys // 256) * 256
    return Attention(
        q=random.standard_normal((1, rows, heads, width), dtype=np.float32),
        k=random.standard_normal((1, cells, heads_kv, width), dtype=np.float32),
        v=random.standard_normal((1, cells, heads_kv, width), dtype=np.float32),
        mask=causal_mask(rows, cells, keys - rows, window),
        scale=width**-0.5,
        type_k=kind,
        type_v=kind,
    )


def measure(a: Attention, rounds: int, threads: int, pool_bytes: int) -> dict[bool, list[float]]:
    """ms per layer of each round, by whether the kernels are ours."""
    bytes_per_layer = (a.k.size + a.v.size) * 2
    layers = max(1, min(MOST_LAYERS, pool_bytes // bytes_per_layer))
    operation = Operation(a, repeat=layers)
    found: dict[bool, list[float]] = {False: [], True: []}
    try:
        for round_ in range(rounds + 1):
            for kernels in (False, True):
                start = time.perf_counter()
                operation.compute(threads=threads, kernels=kernels)
                if round_:  # the first one warms up
                    found[kernels].append((time.perf_counter() - start) * 1e3 / layers)
    finally:
        operation.close()
    return found


def largest_error(a: Attention, threads: int) -> dict[bool, float]:
    operation = Operation(a)
    try:
        truth = naive(a)
        found = {}
        for kernels in (False, True):
            operation.compute(threads=threads, kernels=kernels)
            found[kernels] = float(np.abs(operation.result() - truth).max())
        return found
    finally:
        operation.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--shape",
        nargs=3,
        type=int,
        default=[9, 3, 64],
        metavar="N",
        help="query heads, heads of keys, width (default: the demo model's)",
    )
    parser.add_argument("--keys", nargs="+", type=int, default=[64, 512, 2048, 6144], metavar="N")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 2, 4, 8, 16], metavar="B")
    parser.add_argument("--type", choices=["f16", "q8_0"], default="f16")
    parser.add_argument("--window", type=int, default=0, help="keys that a row sees; 0: all")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--pool", type=int, default=192, metavar="MB", help="keys and values")
    parser.add_argument("--errors", action="store_true", help="compare with F64 as well; slow")
    options = parser.parse_args()
    if options.rounds < 2 or min(options.keys + options.rows + options.shape) < 1:
        parser.error("two rounds at least, and numbers above 0")
    if max(options.rows) > min(options.keys):
        parser.error("no more rows than keys: each row is one of the last tokens")
    kind = {"f16": F16, "q8_0": Q8_0}[options.type]
    heads = ["keys", "rows", "upstream ms", "ours ms", "ratio", "ours, quartiles"]
    if options.errors:
        heads += ["error upstream", "error ours"]
    print(f"{options.type}, {options.shape} heads, heads of keys, width; {options.threads} threads")
    lines = []
    for keys in options.keys:
        for rows in options.rows:
            a = attention(tuple(options.shape), keys, rows, kind, options.window)
            found = measure(a, options.rounds, options.threads, options.pool << 20)
            before, after = (statistics.median(found[kernels]) for kernels in (False, True))
            low, _, high = statistics.quantiles(found[True], n=4)
            line = [str(keys), str(rows), f"{before:.4f}", f"{after:.4f}", f"{before / after:.2f}",
                    f"{low:.4f}-{high:.4f}"]  # fmt: skip
            if options.errors:
                error = largest_error(a, options.threads)
                line += [f"{error[False]:.1e}", f"{error[True]:.1e}"]
            lines.append(line)
            print(*line, file=sys.stderr, flush=True)
    print(*table(heads, lines), sep="\n")


if __name__ == "__main__":
    main()
