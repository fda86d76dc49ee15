"""A scheduler or a worker of Dask with a scripted model, to be run as a process of its own.

    scripted_worker.py scheduler PORT
    scripted_worker.py worker ADDRESS N_THREADS [FAULT]

Each prints its address when it is there. FAULT: "no-model" cannot open it, "other-version" is of
another version, "other-model" has another file, "no-package" lacks this package. What a document
says decides how its summary goes: "[slow]" takes its time, "[deadly]" kills the
process, "[buggy]" raises an unexpected exception. Each opened model leaves a file
opened-PID-N in the working folder, each prompt begun a line in prompts-PID.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any


def name_of(question: str) -> str:
    names = re.findall(r"\[\w+\]", question)
    return f"About {' '.join(dict.fromkeys(names))}." if names else "About nothing."


def script_the_model(fault: str) -> None:
    from scripted import fake_of, scripted_engine
    from scripted_cli import MODEL_INFO

    from knapspec_edge import gguf_check, models
    from knapspec_edge.apps import summarize_job, summarize_worker
    from knapspec_edge.engine import Engine
    from knapspec_edge.errors import Interrupted, ModelError

    opened: list[Engine] = []
    in_use: list[str] = []  # documents whose summary is being made: one at a time

    def open_scripted(path: Path, **options: Any) -> Engine:
        if fault == "no-model":
            raise ModelError(f"{path} cannot be opened")
        engine = scripted_engine(name_of, n_ctx=options["ctx"])
        Path(f"opened-{os.getpid()}-{len(opened)}").touch()
        opened.append(engine)
        stopped: list[bool] = []
        engine.backend.interrupt = lambda: stopped.append(True)  # type: ignore[attr-defined]
        chat = engine.chat
        slow: list[bool] = []

        def telling(messages: Any, *arguments: Any, **more: Any) -> Any:
            question = messages[-1]["content"]
            assert not in_use, "two documents at a time in one engine"
            in_use.append(question)
            slow[:] = [True] * ("[slow]" in question)
            with Path(f"prompts-{os.getpid()}").open("a") as file:
                file.write(name_of(question) + "\n")
            if "[deadly]" in question:
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                if "[buggy]" in question:
                    raise ZeroDivisionError("a fault of ours")
                return chat(messages, *arguments, **more)
            finally:
                in_use.clear()

        def on_call(call: Any) -> None:
            if slow:
                time.sleep(0.04)
            if stopped:
                raise Interrupted("interrupted")

        engine.chat = telling  # type: ignore[method-assign]
        fake_of(engine).on_call = on_call
        return engine

    Engine.open = open_scripted  # type: ignore[method-assign,assignment]
    models.obtain = lambda name, **_: Path(name)  # type: ignore[assignment]
    gguf_check.inspect = lambda path: MODEL_INFO  # type: ignore[assignment]
    other = "another" if fault == "other-model" else "fingerprint"
    gguf_check.fingerprint = lambda info: other  # type: ignore[assignment]
    summarize_job.tokens_that_fit = lambda *_, **__: 0
    if fault == "other-version":
        ours = summarize_worker.versions()
        summarize_worker.versions = lambda: {**ours, "knapspec-edge": "0.0.1"}  # type: ignore


async def scheduler(port: int) -> None:
    from distributed import Scheduler

    async with Scheduler(host="127.0.0.1", port=port, dashboard=False) as there:
        print(there.address, flush=True)
        await there.finished()


async def worker(address: str, n_threads: int) -> None:
    from distributed import Worker

    async with Worker(address, nthreads=n_threads, memory_limit=0, host="127.0.0.1") as there:
        print(there.address, flush=True)
        await there.finished()


class Absent:
    """Hides the package as if it were not installed."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.split(".")[0] == "knapspec_edge":
            raise ModuleNotFoundError("No module named 'knapspec_edge'", name="knapspec_edge")


if __name__ == "__main__":
    import logging

    logging.getLogger("distributed").setLevel(logging.CRITICAL)
    if sys.argv[1] == "scheduler":
        sys.meta_path.insert(0, Absent())  # type: ignore[arg-type]
        asyncio.run(scheduler(int(sys.argv[2])))
    else:
        fault = sys.argv[4] if len(sys.argv) > 4 else ""
        if fault == "no-package":
            sys.meta_path.insert(0, Absent())  # type: ignore[arg-type]
        else:
            script_the_model(fault)
        asyncio.run(worker(sys.argv[2], int(sys.argv[3])))
