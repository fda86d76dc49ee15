"""The history of what was typed, and completion."""

from __future__ import annotations

import multiprocessing
import os
import stat
from pathlib import Path

import pytest
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document

from knapspec_edge.keyboard import CommandCompleter, KeptHistory
from knapspec_edge.repl import history_file

posix = pytest.mark.skipif(os.name == "nt", reason="permissions are other ones on Windows")


def kept(path: Path) -> list[str]:
    """What the next chat finds, the oldest first."""
    return list(KeptHistory(path).load_history_strings())[::-1]


def test_entries_come_back_whole(tmp_path: Path) -> None:
    path = tmp_path / "new" / "history"
    entries = [
        "hello",
        "two\nlines\n\n+ # odd ones",
        "日本 👋",
        "x" * 20_000,
        "half \udcff a character",
    ]
    history = KeptHistory(path)
    for entry in entries:
        history.store_string(entry)
    assert history.problem is None
    assert kept(path) == [*entries[:-1], "half ? of one"]


@posix
def test_only_its_owner_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "history"
    KeptHistory(path).store_string("hello")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    path.chmod(0o644)
    assert kept(path) == ["hello"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def _store(path: Path, name: str) -> None:
    history = KeptHistory(path)
    for i in range(20):
        history.store_string(f"{name} {i}\n" + f"{name}\n" * 3000)


def test_chats_at_the_same_time_do_not_tear_it(tmp_path: Path) -> None:
    path = tmp_path / "history"
    context = multiprocessing.get_context("spawn")
    chats = [context.Process(target=_store, args=(path, name)) for name in "abc"]
    for one in chats:
        one.start()
    for one in chats:
        one.join()
    entries = kept(path)
    assert sorted(entry.split("\n")[0] for entry in entries) == sorted(
        f"{name} {i}" for name in "abc" for i in range(20)
    )
    assert all(set(entry.split("\n")[1:-1]) == {entry[0]} for entry in entries)


def test_it_does_not_grow_for_ever(tmp_path: Path) -> None:
    path = tmp_path / "history"
    history = KeptHistory(path)
    for i in range(40):
        history.store_string(f"{i} " + "x" * 30_000)
    history.store_string("y" * 100_000)  # too much to remember
    assert path.stat().st_size > 1 << 20
    numbers = [int(entry.split()[0]) for entry in kept(path)]
    assert numbers == list(range(numbers[0], 40))
    assert 10 < len(numbers) < 30


def test_a_file_that_cannot_be_used_is_said_and_left_alone(tmp_path: Path) -> None:
    folder = KeptHistory(tmp_path)
    assert folder.problem is not None
    assert str(tmp_path) in folder.problem
    folder.store_string("hello")
    assert list(folder.load_history_strings()) == []
    if os.name != "nt":
        before = os.stat("/dev/null").st_mode
        assert KeptHistory(Path("/dev/null")).problem is not None
        assert os.stat("/dev/null").st_mode == before
    blocked = tmp_path / "file"
    blocked.touch()
    assert KeptHistory(blocked / "history").problem is not None


def test_damaged_bytes_are_no_reason_to_stop(tmp_path: Path) -> None:
    path = tmp_path / "history"
    path.write_bytes(b"\xff\x00 rubbish\n+a\xff\n\n# x\n+hello\n")
    assert kept(path)[-1] == "hello"


def test_where_it_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert history_file("off") is None
    assert history_file("") is None
    assert history_file(str(tmp_path / "h")) == tmp_path / "h"
    if os.name != "nt":
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    path = history_file(None)
    assert path is not None
    assert path.name == "chat-history"
    assert "knapspec-edge" in str(path)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("/s", ["/set", "/save"]),
        ("/set t", ["temp"]),
        ("/read let", ["letter.txt"]),
        ("/help x", []),
        ("hello /s", []),
        ("/s\n", []),
        ("", []),
    ],
)
def test_completion(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, found: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("letter.txt").touch()
    completer = CommandCompleter(["/set", "/save", "/read"], ["temp", "seed"], ["/read"])
    before = Document(text, len(text))
    shown = [c.display_text for c in completer.get_completions(before, CompleteEvent())]
    assert shown == found
