"""Convert the demo model (or another of the manifest) to other types, for tests and benchmarks.

    python scripts/convert_demo.py                # all types
    python scripts/convert_demo.py F32 Q8_0       # some
    python scripts/convert_demo.py --model gemma3-270m F16

Run it with the project's Python. Prints one path per line; what exists already is kept.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from knapspec_edge.errors import KnapspecError  # noqa: E402
from knapspec_edge.quantize import CONVERSIONS, converted  # noqa: E402


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("types", nargs="*", metavar="TYPE", help=f"of {', '.join(CONVERSIONS)}")
    parser.add_argument("--model", default="demo", help="name in the manifest (default: demo)")
    options = parser.parse_args(arguments)
    try:
        for file_type in options.types or CONVERSIONS:
            if sys.stderr.isatty():
                print(f"{options.model} to {file_type} ...", file=sys.stderr)
            print(converted(options.model, file_type), flush=True)
    except KnapspecError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
