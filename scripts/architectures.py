#!/usr/bin/env python3
"""Write the table of architectures (patches/ARCHITECTURES.md) from the oracle's verdicts.

Run it after scripts/test has built both libraries and the tiny models:

    .venv/bin/python scripts/architectures.py
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.native.oracle import Verdict, judge_folder  # noqa: E402

PRISTINE = ROOT / ".cache" / "pristine"
TARGET = ROOT / "patches" / "ARCHITECTURES.md"

HEADER = """\
# Architectures

Written by `scripts/architectures.py`; do not edit. For every architecture that upstream's own
generator of tiny models makes, each sublayer was left out in turn, and the logits were compared
bit for bit with those of the unpatched library on a file in which that sublayer's output
projection is zero (`tests/native/oracle.py`).

* **speculates**: every sublayer proved, and the KV cache can be cut back to the accepted tokens.
* **plain only**: every sublayer proved, but a recurrent state cannot be cut back: these models
  decode plainly.
* **refused**: the sublayers are not recognised, or text is not generated token by token. These
  models decode plainly where llama.cpp can; `--spec on` is refused with the reason.

"""


def sublayers_of(verdict: Verdict) -> str:
    """The sublayers of one layer in words: "attention + mlp" where all layers are alike."""
    layers: dict[int, list[str]] = {}
    for layer, kind in verdict.sublayers:
        layers.setdefault(layer, []).append(kind)
    shapes = Counter(" + ".join(kinds) for kinds in layers.values())
    return "; ".join(shapes)


def state_of(verdict: Verdict) -> str:
    if not verdict.sublayers:
        return "refused"
    if not verdict.works:
        return "**faulty**"
    return "plain only" if verdict.recurrent else "speculates"


def table(verdicts: list[Verdict]) -> str:
    counts = Counter(state_of(v) for v in verdicts)
    lines = [
        HEADER
        + f"{len(verdicts)} models: "
        + ", ".join(f"{n} {s}" for s, n in counts.items())
        + ".",
        "",
        "| model | sublayers of a layer | result | reason |",
        "| --- | --- | --- | --- |",
    ]
    for v in verdicts:
        faults = "; ".join([*v.wrong, *v.crashed, *v.unproved, v.full_differs]).strip("; ")
        reason = faults or (
            v.refusal if not v.sublayers else "recurrent state" if v.recurrent else ""
        )
        lines.append(f"| {v.name} | {sublayers_of(v)} | {state_of(v)} | {reason} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    from knapspec_edge.native.library import library_folder

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--patched", type=Path, default=library_folder())
    parser.add_argument(
        "--pristine",
        type=Path,
        default=os.environ.get("KNAPSPEC_EDGE_PRISTINE_LIB", PRISTINE / "knapspec_edge/native/lib"),
    )
    parser.add_argument(
        "--models",
        type=Path,
        default=os.environ.get("KNAPSPEC_EDGE_TINY_MODELS", PRISTINE / "tiny-models"),
    )
    arguments = parser.parse_args()
    for folder in (arguments.patched, arguments.pristine, arguments.models):
        if not Path(folder).is_dir():
            parser.error(f"{folder} does not exist; run scripts/test first")
    verdicts = []
    with tempfile.TemporaryDirectory() as scratch:
        for verdict in judge_folder(
            arguments.models, arguments.patched, arguments.pristine, Path(scratch)
        ):
            verdicts.append(verdict)
            print(f"\r{len(verdicts)} {verdict.name:40}", end="", file=sys.stderr)
    print(file=sys.stderr)
    TARGET.write_text(table(verdicts))
    faulty = [v.name for v in verdicts if v.sublayers and not v.works or v.crashed]
    print(f"{TARGET.relative_to(ROOT)}: {sum(v.works for v in verdicts)} of {len(verdicts)} proved")
    if faulty:
        print(f"faulty: {', '.join(faulty)}", file=sys.stderr)
    return 1 if faulty else 0


if __name__ == "__main__":
    sys.exit(main())
