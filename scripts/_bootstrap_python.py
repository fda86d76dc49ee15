"""Find a Python that is new enough. Written so that any Python can at least read it."""

import os
import subprocess
import sys

MINIMUM = (3, 10)
CANDIDATES = ("python3.13", "python3.12", "python3.11", "python3.10", "python3.14")


def ensure():
    """Return at once on a new enough Python; else start again with one, or say what to do."""
    if sys.version_info[:2] >= MINIMUM:
        return
    for name in CANDIDATES:
        try:
            code = "import sys; sys.exit(sys.version_info[:2] < (3, 10))"
            if subprocess.call([name, "-c", code], stderr=subprocess.PIPE) != 0:
                continue
        except OSError:
            continue
        sys.exit(subprocess.call([name] + sys.argv))
    version = ".".join(str(part) for part in sys.version_info[:3])
    sys.stderr.write(
        "knapspec-edge needs Python 3.10 or newer, and this is " + version + ".\n"
        "  Install a newer one and run: python3.12 " + os.path.relpath(sys.argv[0]) + "\n"
    )
    sys.exit(1)
