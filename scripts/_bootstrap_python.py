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
    sys.stderr.write(
        "knapspec-edge needs Python 3.10 or newer; this is %d.%d (%s). Install a newer one and run\n"
        "  python3.12 %s\n"
        % (sys.version_info[0], sys.version_info[1], sys.executable, os.path.relpath(sys.argv[0]))
    )
    sys.exit(1)
