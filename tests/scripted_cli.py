"""The command line with a scripted model, to be run as a process of its own (pipes, terminals).

SCRIPTED_STEP_SECONDS slows each pass of the model down, SCRIPTED_CTX sets the context size.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from scripted import echo, fake_of, scripted_engine

from knapspec_edge import models
from knapspec_edge.cli import main
from knapspec_edge.engine import Engine


def open_scripted(path: Path, **options: Any) -> Engine:
    step_seconds = float(os.environ.get("SCRIPTED_STEP_SECONDS", "0"))
    engine = scripted_engine(echo, n_ctx=int(os.environ.get("SCRIPTED_CTX", "512")))
    engine.set_speculation(options["spec"])
    if step_seconds:
        fake_of(engine).on_call = lambda call: time.sleep(step_seconds)
    return engine


if __name__ == "__main__":
    Engine.open = open_scripted  # type: ignore[method-assign,assignment]
    models.obtain = lambda name, **_: Path(name)  # type: ignore[assignment]
    main()
