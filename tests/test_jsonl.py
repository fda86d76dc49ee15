"""Records in a file: whole lines whatever happens, one writer, nothing foreign touched (66)."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from knapspec_edge.apps import jsonl
from knapspec_edge.apps.jsonl import RecordFile, encode
from knapspec_edge.errors import OutputError, UsageError

A = {"input": "a.txt", "summary": "Alpha, “quoted” and ünïcode 日本.", "tokens": {"prompt": 3}}
B = {"input": "b.txt", "summary": None, "error": "no text in it"}


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write(path: Path, *records: dict[str, Any]) -> bytes:
    with RecordFile(path, "input") as file:
        for record in records:
            file.append(record)
    return path.read_bytes()


# -- a record is one line


def test_records_come_back_in_order(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    write(path, A, B)
    with RecordFile(path, "input") as file:
        assert list(file) == [A, B]
        assert file.n_records == 2
        assert file.repaired is None
        file.append(A)
    assert lines(path) == [A, B, A]


@given(st.dictionaries(st.text(max_size=4), st.text(max_size=12), max_size=4))
def test_a_record_is_one_line_for_every_reader(content: dict[str, str]) -> None:
    line = encode({"input": "x", "content": content})
    assert len(line.splitlines()) == 1
    assert json.loads(line.encode()) == {"input": "x", "content": content}


def test_what_json_has_no_word_for_is_null() -> None:
    assert encode({"input": "x", "speed": float("inf")}) == '{"input": "x", "speed": null}'


def test_a_name_that_is_no_text_can_be_written() -> None:
    name = os.fsdecode(b"caf\xe9.txt")
    assert json.loads(encode({"input": name}))["input"] == name


def test_each_record_is_synced_before_append_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[bytes] = []
    path = tmp_path / "out.jsonl"
    with RecordFile(path, "input") as file:
        monkeypatch.setattr(jsonl.os, "fsync", lambda number: synced.append(path.read_bytes()))
        for n, record in enumerate((A, B), start=1):
            file.append(record)
            assert len(synced) == n
            assert synced[-1].count(b"\n") == n


def test_a_pipe_cannot_be_synced_and_that_is_no_failure() -> None:
    reader, writer = os.pipe()
    try:
        jsonl.sync(writer)
    finally:
        os.close(reader)
        os.close(writer)


def test_a_disk_that_fails_to_sync_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(number: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    path = tmp_path / "out.jsonl"
    with RecordFile(path, "input") as file:
        file.append(A)
        monkeypatch.setattr(jsonl.os, "fsync", fails)
        with pytest.raises(OutputError, match="Input/output error; it holds 1 whole record"):
            file.append(B)
    assert lines(path) == [A]


# -- torn lines


def test_a_line_torn_at_any_byte_is_repaired(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    first = (encode(B) + "\n").encode()
    second = (encode(A) + "\n").encode()
    for n in range(1, len(second)):
        path.write_bytes(first + second[:n])
        with RecordFile(path, "input") as file:
            whole = n == len(second) - 1  # only the line end is missing
            assert list(file) == ([B, A] if whole else [B])
            if whole:
                assert file.repaired is None
            else:
                assert file.repaired is not None
                assert f"({n} bytes)" in file.repaired
            file.append(A)
        assert lines(path) == ([B, A, A] if whole else [B, A])


@pytest.mark.parametrize("n", [0, 1, 5, 40])
def test_zeros_of_a_power_cut_are_repaired(tmp_path: Path, n: int) -> None:
    path = tmp_path / "out.jsonl"
    start = (encode(B) + "\n").encode()
    path.write_bytes(start + encode(A).encode()[:n] + b"\0" * 700)
    with RecordFile(path, "input") as file:
        assert list(file) == [B]
    assert path.read_bytes() == start


def test_a_file_that_is_one_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(b'{"input": "a.t')
    with RecordFile(path, "input") as file:
        file.append(A)
    assert lines(path) == [A]


# -- what is not ours


@pytest.mark.parametrize(
    ("content", "number"),
    [
        (b"hello\n", 1),
        (b"hello", 1),  # not a beginning of a record: somebody's notes
        (b'{"input": "a"}\nhello\n{"input": "b"}\n', 2),
        (b'{"input": "a"}\n{"input": "b", "summ\n{"input": "c"}\n', 2),  # torn, then gone on
        (b'{"input": "a"}\n{"name": "b"}\n', 2),
        (b'{"input": 3}\n', 1),
        (b"[1, 2]\n", 1),
        (b'{"input": "\xff"}\n', 1),
        (b'{"input": "a"}\n\n \n{"other', 4),
        (b"\x89PNG\r\n\x1a\n", 1),
        (b"[" * 100_000 + b"\n", 1),
    ],
)
def test_a_foreign_line_is_named_and_nothing_is_changed(
    tmp_path: Path, content: bytes, number: int
) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=f"line {number} of .*nothing was changed"):
        RecordFile(path, "input")
    assert path.read_bytes() == content


def test_blank_lines_and_windows_line_ends_are_fine(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(b'{"input": "a"}\r\n\n{"input": "b"}')
    with RecordFile(path, "input") as file:
        file.append({"input": "c"})
        assert [record["input"] for record in file] == ["a", "b", "c"]


@pytest.mark.parametrize("kind", ["folder", "missing folder", "device", "read-only folder"])
def test_what_cannot_be_written_is_said_at_once(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "out.jsonl"
    if kind == "folder":
        path.mkdir()
    elif kind == "missing folder":
        path = tmp_path / "no" / "out.jsonl"
    elif kind == "device":
        path = Path("/dev/full")
    else:
        if os.geteuid() == 0:
            pytest.skip("nothing is read-only for this user")
        tmp_path.chmod(0o500)
    with pytest.raises(UsageError, match="cannot write"):
        RecordFile(path, "input")


def test_an_empty_new_file_does_not_stay(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    RecordFile(path, "input").close()
    assert not path.exists()
    path.touch()
    RecordFile(path, "input").close()
    assert path.exists()  # it was there before


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    real, link = tmp_path / "real.jsonl", tmp_path / "link.jsonl"
    write(real, A, B)
    link.symlink_to(real)
    with RecordFile(link, "input") as file:
        assert file.keep(lambda number: number == 1)
        file.append(A)
    assert link.is_symlink()
    assert lines(real) == [B, A]


# -- dropping records


def test_dropping_keeps_lines_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    content = [b'{"input":"a",  "x": 1.50}\n', b'{"input": "b"}\n', b'{"input": "c"}\n']
    path.write_bytes(b"".join(content))
    path.chmod(0o640)
    with RecordFile(path, "input") as file:
        assert file.keep(lambda number: number != 1)
        assert file.n_records == 2
        file.append(A)
    assert path.read_bytes() == content[0] + content[2] + (encode(A) + "\n").encode()
    assert path.stat().st_mode & 0o777 == 0o640
    assert {p.name for p in tmp_path.iterdir()} == {"out.jsonl", ".out.jsonl.lock"}


@pytest.mark.skipif(os.name == "nt", reason="open files cannot be moved there")
@pytest.mark.parametrize("how", ["removed", "rotated", "replaced", "emptied", "added to"])
def test_a_file_that_others_change_is_not_written_any_more(tmp_path: Path, how: str) -> None:
    path = tmp_path / "out.jsonl"
    with RecordFile(path, "input") as output:
        output.append({"input": "a"})
        if how in ("removed", "replaced"):
            path.unlink()
        elif how == "rotated":
            path.rename(tmp_path / "out.1")
        if how == "replaced":
            path.write_text('{"input": "theirs"}\n')
        elif how == "emptied":
            path.write_text("")
        elif how == "added to":
            with path.open("a") as stream:
                stream.write("theirs\n")
        before = path.read_bytes() if path.exists() else None
        with pytest.raises(OutputError, match="removed, replaced or changed"):
            output.append({"input": "b"})
        assert not output.keep(lambda number: False)
    assert (path.read_bytes() if path.exists() else None) == before


def test_a_failed_drop_leaves_the_file_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out.jsonl"
    before = write(path, A, B)

    def fails(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with RecordFile(path, "input") as file:
        with monkeypatch.context() as patch:
            patch.setattr(jsonl.os, "replace", fails)
            assert not file.keep(lambda number: number == 0)
        assert path.read_bytes() == before
        file.append(A)
    assert lines(path) == [A, B, A]
    assert {p.name for p in tmp_path.iterdir()} == {"out.jsonl", ".out.jsonl.lock"}


# -- one writer


def run_python(code: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_second_writer_is_refused_until_the_first_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    code = """
        import sys
        from pathlib import Path
        from knapspec_edge.apps.jsonl import RecordFile
        file = RecordFile(Path(sys.argv[1]), "input")
        file.append({"input": "theirs"})
        print("open", flush=True)
        sys.stdin.read()
    """
    with run_python(code, str(path)) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "open\n"
        before = path.read_bytes()
        with pytest.raises(UsageError, match="being written by another process"):
            RecordFile(path, "input")
        assert path.read_bytes() == before
        other.kill()  # no chance to clean up
    with RecordFile(path, "input") as file:
        assert [record["input"] for record in file] == ["theirs"]


def test_two_writers_in_one_process(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with RecordFile(path, "input"), pytest.raises(UsageError, match="another process"):
        RecordFile(path, "input")
    RecordFile(path, "input").close()


# -- full disks, killed writers


def test_a_full_disk_leaves_whole_records(tmp_path: Path) -> None:
    pytest.importorskip("resource")  # limits the size of a file like a small disk does
    path = tmp_path / "out.jsonl"
    code = """
        import resource, sys
        from pathlib import Path
        from knapspec_edge.apps.jsonl import RecordFile
        from knapspec_edge.errors import OutputError
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        with RecordFile(Path(sys.argv[1]), "input") as file:
            try:
                for n in range(100):
                    file.append({"input": str(n), "summary": "x" * 60})
            except OutputError as error:
                print(n, error, flush=True)
    """
    with run_python(code, str(path)) as other:
        said, _ = other.communicate(timeout=60)
    n, message = said.split(" ", 1)
    assert int(n) > 3
    assert f"it holds {n} whole records" in message
    assert [record["input"] for record in lines(path)] == [str(i) for i in range(int(n))]
    assert path.stat().st_size <= 1000
    with RecordFile(path, "input") as file:  # there is room again
        assert file.repaired is None
        file.append(A)
    assert len(lines(path)) == int(n) + 1


def test_a_torn_line_on_a_full_disk_is_cut_before_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out.jsonl"
    real_write = os.write

    def half(number: int, data: Any) -> int:
        if len(data) < 30:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real_write(number, data[:30])

    with RecordFile(path, "input") as file:
        file.append(B)
        monkeypatch.setattr(jsonl.os, "write", half)
        with pytest.raises(OutputError, match="No space left"):
            file.append(A)
        assert lines(path) == [B]


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_an_interrupted_write_leaves_no_half_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    path = tmp_path / "out.jsonl"
    real_write = os.write
    calls = []

    def interrupted(number: int, data: Any) -> int:
        calls.append(len(data))
        if len(calls) > 1:
            raise error
        return real_write(number, data[:10])

    with RecordFile(path, "input") as file:
        file.append(B)
        monkeypatch.setattr(jsonl.os, "write", interrupted)
        with pytest.raises((KeyboardInterrupt, OutputError)):
            file.append(A)
    assert len(calls) == 2
    assert lines(path) == [B]


def test_interrupted_while_it_syncs_the_record_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(number: int) -> None:
        raise KeyboardInterrupt

    path = tmp_path / "out.jsonl"
    with RecordFile(path, "input") as file:
        with monkeypatch.context() as patch:
            patch.setattr(jsonl.os, "fsync", interrupted)
            with pytest.raises(KeyboardInterrupt):
                file.append(A)
        assert file.n_records == 1
        file.append(B)
    assert lines(path) == [A, B]


def test_killed_at_any_moment_the_file_is_whole_lines_and_a_torn_one(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    code = """
        import sys
        from pathlib import Path
        from knapspec_edge.apps.jsonl import RecordFile
        with RecordFile(Path(sys.argv[1]), "input") as file:
            n = file.n_records
            while True:
                file.append({"input": str(n), "summary": "y" * 5000})
                n += 1
    """
    n_before = 0
    for _ in range(3):
        with run_python(code, str(path)) as other:
            least = n_before + 3
            wait_for(lambda n=least: path.exists() and path.read_bytes().count(b"\n") > n)
            other.send_signal(signal.SIGKILL)
        with RecordFile(path, "input") as file:
            names = [record["input"] for record in file]
        assert names == [str(n) for n in range(len(names))]
        assert len(names) > n_before
        n_before = len(names)
