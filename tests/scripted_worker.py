"""Schedulers and workers of Dask with a scripted model, each a process of its own.

Run as a program it starts one for each line of standard input, and prints its process id:

    scheduler FOLDER
    worker FOLDER ADDRESS N_THREADS [FAULT]

They are forked from here, where all that is slow to import is imported already. Each writes its
address into the file address-PID of its working folder. FAULT: "no-model" cannot open it,
"other-version" is of another version, "other-model" has another file, "no-package" lacks this
package. What a document says decides how its summary goes: "[slow]" takes its time, "[deadly]"
kills the process, "[buggy]" raises an unexpected exception. Each opened model leaves a file
opened-PID-N, each prompt begun a line in prompts-PID.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

from distributed import Scheduler, Worker
from scripted import fake_of, scripted_engine
from scripted_cli import MODEL_INFO

from knapspec_edge import gguf_check, models
from knapspec_edge.apps import summarize_job, summarize_worker
from knapspec_edge.engine import Engine
from knapspec_edge.errors import Interrupted, ModelError


def name_of(question: str) -> str:
    names = re.findall(r"\[\w+\]", question)
    return f"About {' '.join(dict.fromkeys(names))}." if names else "About nothing."


def script_the_model(fault: str) -> None:
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
                time.sleep(0.02)
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


def tell(address: str) -> None:
    new = Path(f"new-{os.getpid()}")
    new.write_text(address)
    new.rename(f"address-{os.getpid()}")  # whole or not at all


async def scheduler() -> None:
    here = "127.0.0.1"
    async with Scheduler(host=here, port=0, dashboard_address=f"{here}:0") as there:
        tell(there.address)
        await there.finished()


async def worker(address: str, n_threads: int) -> None:
    async with Worker(
        address, nthreads=n_threads, memory_limit=0, host="127.0.0.1", local_directory="dask"
    ) as there:
        tell(there.address)
        await there.finished()


class Absent:
    """Hides the package as if it were not installed."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.split(".")[0] == "knapspec_edge":
            raise ModuleNotFoundError("No module named 'knapspec_edge'", name="knapspec_edge")


def remove_the_package() -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "knapspec_edge"]:
        del sys.modules[name]
    sys.meta_path.insert(0, Absent())  # type: ignore[arg-type]


def run(kind: str, folder: str, *arguments: str) -> None:
    os.chdir(folder)
    if kind == "scheduler":
        remove_the_package()  # the scheduler need not have it
        asyncio.run(scheduler())
        return
    address, n_threads, *faults = arguments
    fault = "".join(faults)
    if fault == "no-package":
        remove_the_package()
    else:
        script_the_model(fault)
    asyncio.run(worker(address, int(n_threads)))


if __name__ == "__main__":
    logging.getLogger("distributed").setLevel(logging.CRITICAL)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    for line in sys.stdin:
        if (pid := os.fork()) == 0:
            try:
                run(*line.rstrip("\n").split("\t"))
            finally:
                os._exit(0)
        print(pid, flush=True)
