"""What people see where ggml ends the process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from knapspec_edge.native import giving_up, rpc

LOST = "Remote RPC server crashed or returned malformed response"
# As a command does: its last word is that native code gives up, in the main thread or another one.
SCRIPT = """
import ctypes, sys, threading
import click
from knapspec_edge import cli
from knapspec_edge.native import library

@cli.cli.command()
@click.option("--thread", is_flag=True)
def fail(thread):
    library.load()
    # void ggml_abort(const char * file, int line, const char * fmt, ...);
    ggml = ctypes.CDLL(str(library.library_file("ggml-base")))
    print("a partial answer", end="")
    fail = lambda: ggml.ggml_abort(b"/some/where.cpp", 7, sys.argv[-1].encode())
    if thread:
        threading.Thread(target=fail).start()
        threading.Event().wait(60)
    fail()

sys.argv, message = sys.argv[:-1], sys.argv[-1]
sys.argv.append(message)
cli.cli.main(sys.argv[1:-1])
"""


def fail(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, "fail", *arguments],
        env={**os.environ, "GGML_NO_BACKTRACE": "1", **environment},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("thread", [[], ["--thread"]])
def test_one_line_and_a_failing_exit_code(patched_library: Path, thread: list[str]) -> None:
    result = fail(*thread, "no memory left")
    assert result.returncode == 1
    assert result.stdout == "a partial answer"
    assert result.stderr == "knapspec-edge: error: llama.cpp cannot go on: no memory left\n"


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_who_looks_for_faults_gets_the_abort(patched_library: Path) -> None:
    result = fail("no memory left", KNAPSPEC_EDGE_DEBUG="1")
    assert result.returncode < 0
    assert "/some/where.cpp:7: no memory left" in result.stderr


def test_a_lost_server_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(rpc.SERVERS, "a:1,b:2")
    line = giving_up.reason(f"/src/ggml-rpc.cpp:354: {LOST}\n")
    assert line == f"an RPC server (a:1, b:2) was lost: {LOST}"
    assert giving_up.reason("C:\\x y\\ggml.c:7: two\nlines") == "llama.cpp cannot go on: two lines"
