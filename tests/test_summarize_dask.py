"""`summarize --dask` with real schedulers and workers, each a process of its own (cases 65, 66)."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from knapspec_edge.apps import summarize_dask, summarize_job
from knapspec_edge.apps.summarize_dask import Cluster
from knapspec_edge.apps.summarize_prompts import Request
from knapspec_edge.cli import cli
from knapspec_edge.config import DEFAULTS
from knapspec_edge.errors import ClusterError, UsageError
from knapspec_edge.native import threads
from knapspec_edge.text.documents import find

pytest.importorskip("distributed")
if not hasattr(os, "fork"):
    pytest.skip("workers are forked here", allow_module_level=True)

HERE = Path(__file__).parent
PATIENCE_SECONDS = 60.0
WITH_PATHS = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")]),
}


def wait_for(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (found := condition()):
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.02)
    return found


class Program:
    """A scheduler or worker."""

    def __init__(self, pid: int, folder: Path) -> None:
        self.pid = pid
        self._file = folder / f"address-{pid}"

    @property
    def address(self) -> str:
        """Once it is there."""
        wait_for(self._file.exists)
        return self._file.read_text()

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


class Nursery:
    """Starts programs; see scripted_worker."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "scripted_worker.py")],
            env=WITH_PATHS,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def start(self, kind: str, folder: Path, *arguments: str) -> Program:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\t".join((kind, str(folder), *arguments)) + "\n")
        self._process.stdin.flush()
        return Program(int(self._process.stdout.readline()), folder)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    programs = Nursery()
    yield programs
    programs.close()


class Place:
    """A scheduler, and workers as a test wants them. Documents lie in the working folder."""

    def __init__(self, folder: Path, nursery: Nursery) -> None:
        self.folder = folder
        self.programs: list[Program] = []
        self._nursery = nursery
        self.start_scheduler()

    def start_scheduler(self) -> None:
        self.scheduler = self._start("scheduler")

    @property
    def address(self) -> str:
        return self.scheduler.address

    def _start(self, kind: str, *arguments: str) -> Program:
        program = self._nursery.start(kind, self.folder, *arguments)
        self.programs.append(program)
        return program

    def workers(self, *faults: str, n_threads: int = 1) -> list[Program]:
        started = [self._start("worker", self.address, str(n_threads), fault) for fault in faults]
        for worker in started:
            assert worker.address
        return started

    def write(self, *names: str, said: str = "") -> None:
        for name in names:
            text = f"A hare [{name}] hid. {said}\n"
            (self.folder / f"{name}.txt").write_text(text, encoding="utf-8")

    def summarize(self, *arguments: str) -> Result:
        paths = [path.name for path in sorted(self.folder.glob("*.txt"))]
        options = ["--dask", self.address, "-o", "out.jsonl", "--spec", "off", *arguments]
        return CliRunner().invoke(cli, ["summarize", "model.gguf", *paths, *options])

    def records(self) -> dict[str, dict[str, Any]]:
        """By input; each occurs once."""
        lines = (self.folder / "out.jsonl").read_text(encoding="utf-8").splitlines()
        found = [json.loads(line) for line in lines]
        assert len({record["input"] for record in found}) == len(found)
        return {record["input"]: record for record in found}

    def prompts(self, worker: Program) -> list[str]:
        """What the worker was asked so far."""
        file = self.folder / f"prompts-{worker.pid}"
        return file.read_text().splitlines() if file.exists() else []

    def n_opened(self, worker: Program) -> int:
        return len(list(self.folder.glob(f"opened-{worker.pid}-*")))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nursery: Nursery) -> Iterator[Place]:
    monkeypatch.chdir(tmp_path)
    there = Place(tmp_path, nursery)
    yield there
    for program in there.programs:
        program.kill()


def in_background(action: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=action)
    thread.start()
    return thread


def error_line(result: Result) -> str:
    assert result.stderr, repr(result.exception)
    *warnings, line = result.stderr.splitlines()
    assert all(line.startswith("knapspec-edge: warning: ") for line in warnings), result.stderr
    assert line.startswith("knapspec-edge: error: "), result.stderr
    return line


def good(records: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Summaries by input."""
    for name, record in records.items():
        assert record["error"] is None, record
        assert record["summary"].startswith(f"About [{Path(name).stem}]"), record
    return {name: record["summary"] for name, record in records.items()}


# -- who does what


def test_each_worker_opens_the_model_once_and_has_one_document_at_a_time(place: Place) -> None:
    names = [f"d{i}" for i in range(8)]
    place.write(*names, said="[slow]")
    one, many = *place.workers(""), *place.workers("", n_threads=4)
    result = place.summarize()
    assert result.exit_code == 0, result.stderr
    assert result.stderr == ""
    assert result.stdout == ""
    records = place.records()
    assert sorted(good(records)) == sorted(f"{name}.txt" for name in names)
    for worker in (one, many):
        assert place.n_opened(worker) == 1
        mine = [name for name, r in records.items() if r["worker"] == worker.address]
        assert len(place.prompts(worker)) == len(mine) >= 2
    assert all(set(r["settings"]) == set(records["d0.txt"]["settings"]) for r in records.values())

    again = place.summarize("-v")
    assert again.exit_code == 0
    assert "8 finished before" in again.stderr
    assert place.records() == records


def test_a_worker_that_is_killed_loses_no_document(place: Place) -> None:
    place.write(*(f"d{i}" for i in range(6)), said="[slow]")
    victim, other = place.workers("", "")

    def kill() -> None:
        wait_for(lambda: len(place.prompts(victim)) == 2)
        victim.kill()

    killer = in_background(kill)
    result = place.summarize()
    killer.join()
    assert result.exit_code == 0, result.stderr
    records = place.records()
    assert len(good(records)) == 6
    lost = re.findall(r"worker (\S+) was lost while it had (d\d\.txt)", result.stderr)
    assert [address for address, _ in lost] == [victim.address]
    assert records[lost[0][1]]["worker"] == other.address
    assert len(place.prompts(victim)) + len(place.prompts(other)) == 7


def test_a_worker_that_comes_later_takes_part(place: Place) -> None:
    place.write(*(f"d{i}" for i in range(10)), said="[slow]")
    (first,) = place.workers("")
    late: list[Program] = []

    def join() -> None:
        wait_for(lambda: place.prompts(first))
        late.extend(place.workers("", "other-model"))

    joining = in_background(join)
    result = place.summarize()
    joining.join()
    assert result.exit_code == 0, result.stderr
    records = place.records()
    assert len(good(records)) == 10
    fine, foreign = late
    assert {record["worker"] for record in records.values()} == {first.address, fine.address}
    assert f"worker {foreign.address} is not used: " in result.stderr
    assert "is not the file that the other workers have" in result.stderr


def open_cluster(address: str, warnings: list[str], **changes: Any) -> Cluster:
    order = summarize_dask.order(
        "model.gguf", Request(), {"kv_type": "f16", "gpu_layers": None, "spec": "off"}
    )
    config = replace(DEFAULTS, dask_poll_seconds=0.1, **changes)
    return Cluster(address, order, warn=warnings.append, config=config)


class Kept:
    """An output in memory."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []

    def append(self, record: dict[str, Any]) -> None:
        self.records.append(record)


def do_job(place: Place, cluster: Cluster, steps: list[Any] | None = None) -> list[dict[str, Any]]:
    output = Kept()
    job = summarize_job.Job(find(["*.txt"]), {}, output)
    seen = [] if steps is None else steps
    job.run(cluster.work(job, {"ctx": 512}, seen.append))
    return output.records


def test_a_document_that_kills_its_workers_is_given_up(place: Place) -> None:
    place.write("a", "b", "c", said="[slow]")
    place.write("bad", said="[deadly]")
    place.workers("", "", "")
    warnings: list[str] = []
    steps: list[Any] = []
    with open_cluster(place.address, warnings, dask_losses=1) as cluster:
        cluster.examine()
        records = {record["input"]: record for record in do_job(place, cluster, steps)}
    assert len(records) == 4
    assert records.pop("bad.txt")["error"] == "2 workers were lost over it"
    good(records)
    assert len(warnings) == 2
    details = [step.detail for step in steps]
    assert any(re.fullmatch(r"\d workers?, [123] opening the model", text) for text in details)
    assert "1 worker" in details


def test_without_any_worker_it_ends_after_a_while(place: Place) -> None:
    place.write("a", "b", said="[slow]")
    waits: list[None] = []
    with (
        open_cluster(place.address, [], dask_wait_seconds=0.5) as cluster,
        pytest.raises(ClusterError, match=f"{place.address} has no workers: start some with"),
    ):
        cluster.examine(lambda: waits.append(None))
    assert waits
    (worker,) = place.workers("")
    with open_cluster(place.address, [], dask_wait_seconds=0.5) as cluster:
        cluster.examine()
        killer = in_background(lambda: (wait_for(lambda: place.prompts(worker)), worker.kill()))
        with pytest.raises(ClusterError, match="no worker of .* is left; the same command goes on"):
            do_job(place, cluster)
        killer.join()


def test_a_fault_over_one_document_is_its_record(place: Place) -> None:
    place.write("a", "c")
    place.write("b", said="[buggy]")
    (worker,) = place.workers("")
    result = place.summarize()
    assert result.exit_code == 1
    records = place.records()
    error = records.pop("b.txt")["error"]
    assert error == f"worker {worker.address} failed: ZeroDivisionError: a fault of ours"
    assert len(good(records)) == 2


# -- workers that cannot do it


def test_workers_that_cannot_do_it_are_named_and_left_out(place: Place) -> None:
    place.write("a", "b", "c", said="[slow]")
    fine, no_model, version, package = place.workers("", "no-model", "other-version", "no-package")
    result = place.summarize()
    assert result.exit_code == 0, result.stderr
    assert {record["worker"] for record in place.records().values()} == {fine.address}
    lines = {
        match[1]: match[2]
        for match in re.finditer(r"warning: worker (\S+) is not used: (.*)", result.stderr)
    }
    assert len(lines) == result.stderr.count("\n") == 3
    assert "model.gguf cannot be opened" in lines[no_model.address]
    assert "knapspec-edge 0.0.1 is installed there" in lines[version.address]
    assert "pip install 'knapspec-edge[dask]'" in lines[package.address]


def test_nobody_who_can_do_it_is_one_line(place: Place) -> None:
    place.write("a")
    one, other = place.workers("other-version", "other-version")
    result = place.summarize()
    assert result.exit_code == 1
    line = error_line(result)
    assert result.stderr.count("\n") == 1
    assert f"worker {min(one.address, other.address)}: knapspec-edge 0.0.1" in line
    assert "and 1 other worker cannot do it either" in line
    assert not (place.folder / "out.jsonl").exists()


def test_different_models_at_one_path_are_refused(place: Place) -> None:
    place.write("a")
    workers = place.workers("", "other-model")
    result = place.summarize()
    assert result.exit_code == 1
    line = error_line(result)
    assert all(worker.address in line for worker in workers)
    assert "different files at" in line


# -- the scheduler


def test_a_scheduler_that_is_lost_leaves_what_is_finished(place: Place) -> None:
    place.write(*(f"d{i}" for i in range(4)), said="[slow]")
    (worker,) = place.workers("")
    killer = in_background(
        lambda: (wait_for(lambda: len(place.prompts(worker)) == 2), place.scheduler.kill())
    )
    result = place.summarize()
    killer.join()
    assert result.exit_code == 1
    assert "the connection to the scheduler at" in error_line(result)
    assert "the same command goes on" in error_line(result)
    assert len(good(place.records())) == 1

    worker.kill()
    place.start_scheduler()
    place.workers("")
    assert place.summarize().exit_code == 0
    assert len(good(place.records())) == 4


def test_no_scheduler_at_the_address_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("A hare hid.")
    arguments = ["summarize", "model.gguf", "a.txt", "--spec", "off", "--dask"]
    result = CliRunner().invoke(cli, [*arguments, "fax://somewhere:1"])
    assert result.exit_code == 1
    assert "no Dask scheduler answers at fax://somewhere:1 (" in error_line(result)
    with socket.create_server(("127.0.0.1", 0)) as server:
        free = f"127.0.0.1:{server.getsockname()[1]}"
    with pytest.raises(ClusterError, match=f"no Dask scheduler answers at {free}"):
        open_cluster(free, [], dask_connect_seconds=0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:  # takes connections, and says nothing
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(ClusterError, match=f"no Dask scheduler answers at {address}"):
            open_cluster(address, [], dask_connect_seconds=0.5)


def test_a_workers_address_is_no_scheduler(place: Place) -> None:
    place.write("a")
    (worker,) = place.workers("")
    result = place.summarize("--dask", worker.address)
    assert result.exit_code == 1
    assert error_line(result).endswith(f"{worker.address} is no Dask scheduler, but a worker")


def test_ctrl_c_ends_the_work_everywhere(place: Place) -> None:
    place.write(*(f"d{i}" for i in range(5)), said="[slow]")
    (worker,) = place.workers("")
    paths = [f"d{i}.txt" for i in range(5)]
    command = [sys.executable, "-m", "knapspec_edge", "summarize", "model.gguf", *paths, "-v"]
    with subprocess.Popen(
        [*command, "--dask", place.address, "-o", "out.jsonl", "--spec", "off"],
        env=WITH_PATHS,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        wait_for(lambda: len(place.prompts(worker)) == 3)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 130
    assert "Traceback" not in stderr
    assert "interrupted, 3 left" in stderr
    assert len(good(place.records())) == 2
    result = place.summarize()
    assert result.exit_code == 0
    assert len(good(place.records())) == 5
    # it did not go on with what nobody waited for, and opened the model anew for the second job
    assert len(place.prompts(worker)) == 6
    assert place.n_opened(worker) == 2


# -- without a cluster


def test_local_workers_are_started_and_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("A hare hid.")
    result = CliRunner().invoke(cli, ["summarize", "none.gguf", "a.txt", "--dask", "local:1"])
    assert result.exit_code == 1
    line = error_line(result)
    assert re.search(r"worker \S+: .*none\.gguf", line), line
    assert str(tmp_path / "none.gguf") in line


def test_ctrl_c_while_local_workers_start_ends_them(monkeypatch: pytest.MonkeyPatch) -> None:
    import distributed

    happened: list[str] = []

    class Started:
        def __init__(self, **_: Any) -> None:
            happened.append("begun")
            signal.raise_signal(signal.SIGINT)
            happened.append("started")

        def close(self) -> None:
            happened.append("closed")

    monkeypatch.setattr(distributed, "LocalCluster", Started)
    monkeypatch.setattr(distributed, "Client", None)
    order = summarize_dask.order("none.gguf", Request(), {"spec": "auto", "template": None})
    usual = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        Cluster("local:1", order, warn=happened.append)
    assert happened == ["begun", "started", "closed"]
    assert signal.getsignal(signal.SIGINT) is usual


@pytest.mark.parametrize("wrong", ["", "local:", "local:0", "local:x", "local:100000"])
def test_addresses_that_make_no_sense(wrong: str) -> None:
    with pytest.raises(UsageError, match="--dask"):
        summarize_dask.local_workers(wrong)


def test_addresses_and_local_workers_are_told_apart() -> None:
    assert summarize_dask.local_workers("local:3") == 3
    assert summarize_dask.local_workers("localhost:8786") is None


def test_local_workers_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "default_threads", lambda: 8)
    order = summarize_dask.order("m.gguf", Request(), {"threads": None})
    assert [summarize_dask.share_threads(order, n).options["threads"] for n in (1, 3, 16)] == [
        8,
        2,
        1,
    ]
    asked = summarize_dask.order("m.gguf", Request(), {"threads": 5})
    assert summarize_dask.share_threads(asked, 2).options["threads"] == 5


def test_without_the_extra_it_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "distributed", None)
    Path("a.txt").write_text("A hare hid.")
    result = CliRunner().invoke(cli, ["summarize", "m.gguf", "a.txt", "--dask", "localhost:1"])
    assert result.exit_code == 2
    assert "pip install 'knapspec-edge[dask]'" in error_line(result)


def test_devices_of_workers_are_not_chosen_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KNAPSPEC_EDGE_RPC_SERVERS", "")
    Path("a.txt").write_text("A hare hid.")
    arguments = ["summarize", "m.gguf", "a.txt", "--dask", "local:1", "--rpc", "a:1"]
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 2
    assert "--rpc and --dask exclude each other" in error_line(result)


def test_files_among_the_options_travel_with_their_contents(tmp_path: Path) -> None:
    plan, template = tmp_path / "plan.json", tmp_path / "chat.jinja"
    plan.write_text("{}")
    template.write_text("{{ messages }}")
    order = summarize_dask.order(
        "smollm2-135m-instruct", Request(), {"spec": str(plan), "template": str(template)}
    )
    assert order.files == {"spec": b"{}", "template": b"{{ messages }}"}
    assert order.model == "smollm2-135m-instruct"  # a name means the same everywhere
    order = summarize_dask.order("m.gguf", Request(), {"spec": "auto", "template": "chatml"})
    assert order.files == {}
    assert os.path.isabs(order.model)
