"""From what was named on a command line to single inputs; nothing is read here but to tell text
from other files in a folder."""

from __future__ import annotations

import glob
import os
import stat
import unicodedata
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .encodings import looks_like_text

# taken from a folder whatever they hold
_PROSE = (".txt", ".text", ".md", ".markdown", ".rst", ".html", ".htm", ".xhtml")
_DOCUMENTS = frozenset((*_PROSE, ".pdf", ".docx", ".epub"))
# Text, but data rather than documents: left out of folders, read where they are named.
_DATA = frozenset([".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".svg", ".css", ".map", ".lock"])
_SNIFFED_BYTES = 4096
_JOINERS = "\u200c\u200d"  # within words of some scripts, and within emoji


@dataclass(frozen=True)
class Source:
    """One input. `name` is what people call it: the path as given, or below a folder as given."""

    name: str
    path: Path | None  # None: standard input


@dataclass(frozen=True)
class Found:
    """`problems`: (name, one line) of what was named and is not there; each is a failed input.
    `notes`: lines about what was left out of folders; no failures."""

    sources: tuple[Source, ...]
    problems: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]


def find(
    paths: Sequence[str | os.PathLike[str]], *, outputs: Collection[os.stat_result] = ()
) -> Found:
    """The inputs behind files, folders (recursively), glob patterns and "-" (standard input).

    In the order given, sorted within a folder or pattern, each file once. From a folder come
    documents by their ending and other files that look like text; hidden files and data (JSON, CSV
    and the like) do not. A file that is named is taken whatever it is, unless it is one of the
    `outputs`: a pattern that held for the last run also matches what that run wrote.
    """
    search = _Search({(output.st_dev, output.st_ino) for output in outputs})
    for path in paths:
        search.add(os.fspath(path))
    return Found(tuple(search.sources), tuple(search.problems), tuple(search.notes))


def printable(path: str) -> str:
    """A path as it can be shown on one line and encoded as UTF-8; another one for each path, since
    records are told apart by it. What is not text is escaped, and so is the backslash then."""
    data = os.fsencode(path) or b'""'
    if os.sep != "\\":
        data = data.replace(b"\\", rb"\\")
    return "".join(map(_shown, data.decode("utf-8", "backslashreplace")))


def _shown(character: str) -> str:
    if character.isprintable() or unicodedata.category(character) == "Zs" or character in _JOINERS:
        return character
    if character.isascii():
        return character.encode("unicode_escape").decode()
    # not \x85, which stands for a byte
    code = ord(character)
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def reason(error: OSError | ValueError) -> str:
    return str(getattr(error, "strerror", None) or error)


@dataclass
class _Search:
    outputs: set[tuple[int, int]]  # device and number of each file
    sources: list[Source] = field(default_factory=list)
    problems: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    _seen: set[str] = field(default_factory=set)

    def add(self, path: str) -> None:
        if path == "-":
            self._take(Source("-", None), "-")
            return
        try:
            if not os.path.lexists(path):
                if os.path.lexists(os.path.expanduser(path)):
                    path = os.path.expanduser(path)  # "~" that no shell expanded
                elif glob.has_magic(path):
                    self._add_pattern(path)
                    return
            self._add_named(path)
        except (OSError, ValueError) as error:  # ValueError: a NUL in the path
            self._fail(path, f"cannot read {printable(path)}: {reason(error)}")

    def _add_pattern(self, pattern: str) -> None:
        recursive = "**" in pattern
        matches = sorted(glob.glob(os.path.expanduser(pattern), recursive=True))
        if recursive:  # what the folders hold is matched as well
            matches = [match for match in matches if not os.path.isdir(match)]
        if not matches:
            self._fail(pattern, f"no file matches {printable(pattern)}")
        for match in matches:
            self._add_named(match)

    def _add_named(self, path: str) -> None:
        name = printable(path)
        try:
            mode = os.stat(path).st_mode
        except FileNotFoundError:
            broken = os.path.islink(path)
            what = "is a link that leads nowhere" if broken else "does not exist"
            self._fail(path, f"{name} {what}")
            return
        except OSError as error:
            self._fail(path, f"cannot read {name}: {reason(error)}")
            return
        if stat.S_ISDIR(mode):
            self._add_folder(path)
        elif stat.S_ISREG(mode) or stat.S_ISFIFO(mode):  # a pipe: what <(command) gives
            self._take(Source(name, Path(path)), path)
        else:
            self._fail(path, f"{name} is neither a file nor a folder")

    def _add_folder(self, folder: str) -> None:
        left_out: Counter[str] = Counter()
        n_documents = 0
        for path in self._walk(os.path.normpath(folder), left_out):
            n_documents += 1
            self._take(Source(printable(path), Path(path)), path)
        name = printable(os.path.normpath(folder))
        if left_out:
            listing = ", ".join(f"{n} {what}" for what, n in left_out.most_common())
            self.notes.append(f"left out in {name}: {listing}")
        if not n_documents:
            self._fail(folder, f"{name} holds no document")

    def _walk(self, top: str, left_out: Counter[str]) -> Iterator[str]:
        """The documents below a folder, its own before those of its folders."""
        visited: set[str] = set()  # links may lead in circles
        waiting = [top]
        while waiting:
            folder = waiting.pop()
            real = os.path.realpath(folder)
            if real in visited:
                continue
            visited.add(real)
            try:
                with os.scandir(folder) as scan:
                    entries = sorted(scan, key=lambda entry: entry.name)
            except OSError as error:
                self._fail(folder, f"cannot read {printable(folder)}: {reason(error)}")
                continue
            folders = []
            for entry in entries:
                path = entry.name if folder == os.curdir else entry.path
                if entry.name.startswith((".", "~$")):  # "~$": what an open Word document leaves
                    left_out["hidden"] += 1
                elif _is(entry, "dir"):
                    folders.append(path)
                elif not _is(entry, "file"):
                    left_out["not a file"] += 1
                elif other := _other_than_document(entry):
                    left_out[other] += 1
                else:
                    yield path
            waiting += reversed(folders)

    def _take(self, source: Source, path: str) -> None:
        key = path if source.path is None else os.path.normcase(os.path.realpath(path))
        if key in self._seen:
            return
        self._seen.add(key)
        if source.path is not None and self._is_output(path):
            self.notes.append(f"left out: {source.name}, where the records go")
        else:
            self.sources.append(source)

    def _is_output(self, path: str) -> bool:
        if not self.outputs:
            return False
        try:
            there = os.stat(path)
        except OSError:
            return False
        return (there.st_dev, there.st_ino) in self.outputs

    def _fail(self, path: str, message: str) -> None:
        problem = (printable(path), message)
        if problem not in self.problems:
            self.problems.append(problem)


def _is(entry: os.DirEntry[str], what: str) -> bool:
    """Links count as what they lead to; one that leads nowhere is nothing."""
    try:
        return entry.is_dir() if what == "dir" else entry.is_file()
    except OSError:  # a link to itself
        return False


def _other_than_document(entry: os.DirEntry[str]) -> str | None:
    """What to call a file that a folder is not read for; None for a document."""
    ending = os.path.splitext(entry.name)[1].lower()
    if ending in _DOCUMENTS:
        return None
    if ending not in _DATA:
        try:
            with open(entry.path, "rb") as stream:
                head = stream.read(_SNIFFED_BYTES)
        except OSError:
            return None  # reading it will say why not
        if not head.strip():
            return "empty"
        if looks_like_text(head):
            return None
    return printable(ending) if ending else "without an ending"
