"""The command line with a scripted model, to be run as a process of its own (pipes, terminals).

SCRIPTED_STEP_SECONDS slows each pass of the model down, SCRIPTED_CTX sets the context size.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from scripted import echo, fake_of, scripted_engine

from knapspec_edge import gguf_check, models
from knapspec_edge.apps import summarize_job
from knapspec_edge.cli import main
from knapspec_edge.engine import Engine

MODEL_INFO = gguf_check.GgufInfo(
    path=Path("model.gguf"),
    version=3,
    architecture="toy",
    name="Toy",
    n_layers=2,
    context_length=0,
    embedding_length=0,
    n_vocab=0,
    n_experts=0,
    file_type="F32",
    n_tensors=1,
    n_params=1,
    tied_embeddings=False,
    has_chat_template=True,
    data_offset=0,
    size_bytes=0,
    paths=(Path("model.gguf"),),
)


def open_scripted(path: Path, **options: Any) -> Engine:
    step_seconds = float(os.environ.get("SCRIPTED_STEP_SECONDS", "0"))
    asked = options.get("ctx") or 512
    engine = scripted_engine(echo, n_ctx=int(os.environ.get("SCRIPTED_CTX", asked)))
    engine.set_speculation(options["spec"])
    if step_seconds:
        fake_of(engine).on_call = lambda call: time.sleep(step_seconds)
    return engine


if __name__ == "__main__":
    Engine.open = open_scripted  # type: ignore[method-assign,assignment]
    models.obtain = lambda name, **_: Path(name)  # type: ignore[assignment]
    gguf_check.inspect = lambda path: MODEL_INFO  # type: ignore[assignment]
    gguf_check.fingerprint = lambda info: "fingerprint"  # type: ignore[assignment]
    summarize_job.tokens_that_fit = lambda *_, **__: 0
    main()
