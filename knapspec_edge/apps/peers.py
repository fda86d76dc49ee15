"""Other builds of llama.cpp to compare with, each in a worker process of its own (native/peer.py).

A peer is a folder of libraries, which our own bindings drive, or another Python, which has bindings
and libraries of its own.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import LibraryError, UsageError
from ..folders import expanded

if TYPE_CHECKING:
    from ..engine import Engine

UNPATCHED = "unpatched llama.cpp"
OURS = "ours"
WITHOUT_KERNELS = "ours without CPU kernels"
# of our process, for our bindings: not for those of another Python
OUR_VARIABLES = ("LLAMA_CPP_LIB_PATH", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
# where a virtual environment has its Python
PYTHONS = ("bin/python3", "bin/python", "Scripts/python.exe")
# of a backend's settings, those that another build has as well
SETTINGS = (
    "ctx_tokens", "slice_tokens", "max_rows", "threads", "threads_batch", "gpu_layers", "kv_type",
    "flash_attn",
)  # fmt: skip


@dataclass(frozen=True)
class Source:
    """Where another build is: `library` is a folder for our own bindings, or None where `python`
    has bindings and libraries itself. `given` is what errors call it."""

    name: str
    given: str
    python: Path
    library: Path | None
    variables: tuple[tuple[str, str], ...] = ()  # of its environment, beside ours


@dataclass(frozen=True)
class Answer:
    """Greedy tokens, the last of which may end the text; the first comes with the prompt."""

    tokens: list[int]
    prompt_ms: float
    predicted_ms: float  # after the first token


def has_library(folder: Path) -> bool:
    return any(folder.glob("*llama.*"))


def unpatched(folder: str | os.PathLike[str]) -> Source:
    """A folder of libraries. Raises UsageError."""
    path = expanded(folder).absolute()
    given = f"--unpatched {os.fspath(folder)}"
    if not has_library(path):
        raise UsageError(f"{given}: there is no libllama in this folder")
    return Source(UNPATCHED, given, Path(sys.executable), path)


def ours(*, kernels: bool) -> Source:
    """Our own libraries, with or without our CPU kernels. Raises LibraryError."""
    from ..native.library import library_folder

    name = OURS if kernels else WITHOUT_KERNELS
    switch = (("KNAPSPEC_EDGE_KERNELS", str(int(kernels))),)
    return Source(name, name, Path(sys.executable), Path(library_folder()), switch)


def parse(text: str) -> Source:
    """What --peer gives: [NAME=]WHERE, a folder of libraries, a Python, or the folder of a virtual
    environment. Without a name it is called by its path. Raises UsageError."""
    given = f"--peer {text}"
    match = re.fullmatch(r"([^/\\=]+)=(.*)", text, re.DOTALL)
    name, where = match.groups() if match else (text, text)
    if not where:
        raise UsageError(f"{given}: a Python or a folder of libraries belongs behind the =")
    # not resolved: the Python of a virtual environment is a link, and known by where that lies
    path = expanded(where).absolute()
    if path.is_file():
        return Source(name, given, path, None)
    if not path.is_dir():
        raise UsageError(f"{given}: there is no such file or folder")
    if has_library(path):
        return Source(name, given, Path(sys.executable), path)
    for python in PYTHONS:
        if (path / python).is_file():
            return Source(name, given, path / python, None)
    raise UsageError(f"{given}: this folder has no libllama and is no virtual environment")


def parse_all(texts: Iterable[str], folder: str | os.PathLike[str] | None = None) -> list[Source]:
    """Those of --peer, behind the one of --unpatched. Raises UsageError, also for two of a name."""
    found = [] if folder is None else [unpatched(folder)]
    for text in texts:
        source = parse(text)
        if any(source.name == other.name for other in found):
            raise UsageError(
                f"{source.given}: another peer has this name; give it one, as in --peer NAME=WHERE"
            )
        found.append(source)
    return found


class Peer:
    """The worker process of another build, with the model and the settings of ours.

    A context manager. What fails in it raises LibraryError, with the reason that it gave.
    """

    def __init__(
        self, source: Source, model: Path, settings: Mapping[str, Any], ends: Sequence[int] = ()
    ) -> None:
        """`settings` are those of a backend; `ends`: tokens behind which an answer ends."""
        from ..native import context as native

        self.source = source
        self.ends = list(ends)
        self.package = ""  # bindings and their version, once it runs
        self._script = Path(native.__file__).with_name("peer.py")
        self._opening = {
            **{name: settings[name] for name in SETTINGS},
            "model": os.fspath(model),
            "kv_type": native.KV_TYPES[settings["kv_type"]],
            "flash_attn": native.FLASH_ATTN[settings["flash_attn"]],
        }

    @classmethod
    def beside(cls, engine: Engine, source: Source) -> Peer:
        """With the model and the settings of an engine."""
        backend: Any = engine.backend
        ends = [t for t in range(engine.vocabulary.n_vocab) if backend.is_end(t)]
        return cls(source, backend.model.path, backend.settings, ends)

    def __enter__(self) -> Peer:
        environment = dict(os.environ)
        if self.source.library is not None:
            environment["LLAMA_CPP_LIB_PATH"] = os.fspath(self.source.library)
        else:
            for name in OUR_VARIABLES:
                environment.pop(name, None)
        environment.update(self.source.variables)
        # a file, since a pipe that nobody reads fills up
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  (closed in __exit__)
        try:
            self.process = subprocess.Popen(
                [os.fspath(self.source.python), os.fspath(self._script)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._said,
                encoding="utf-8",
                errors="replace",
                env=environment,
                # Ctrl-C is for this process, which then ends the worker
                start_new_session=True,
            )
        except OSError as error:
            self._said.close()
            raise UsageError(
                f"{self.source.given}: {self.source.python.name} cannot be started "
                f"({error.strerror}); name a Python or a folder of libraries"
            ) from error
        try:
            reply = self._ask(**self._opening)
            self.package = f"{reply['package']}, Python {reply['python']}"
        except BaseException:
            self.__exit__()
            raise
        return self

    def _ask(self, **request: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        line = ""
        with suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        try:
            reply = json.loads(line) if line.endswith("\n") else None
        except ValueError:
            reply = None
        if not isinstance(reply, dict):
            raise LibraryError(f"{self.source.given}: {self._why_no_answer(said=bool(line))}")
        if "error" in reply:
            raise LibraryError(f"{self.source.given}: {' '.join(str(reply['error']).split())}")
        return reply

    def _why_no_answer(self, *, said: bool) -> str:
        try:
            code = self.process.wait(0.0 if said else 10.0)
        except subprocess.TimeoutExpired:
            code = 0
        if code == 0:  # a worker ends only when it is told to
            return (
                f"{self.source.python.name} does not run a Python program; name a Python or a "
                "folder of libraries"
            )
        how = f"with exit code {code}"
        if code < 0:
            try:
                how = f"by {signal.Signals(-code).name}"
            except ValueError:
                how = f"by signal {-code}"
        if code < 0 and code != -signal.SIGABRT:  # killed from outside: what it said is no reason
            return f"it ended unexpectedly, {how}"
        self._said.seek(0)
        lines = [line.strip() for line in self._said.read().decode(errors="replace").splitlines()]
        # behind a failed assertion llama.cpp may print a stack; elsewhere the reason stands last
        reasons = [line for line in lines if "GGML_ASSERT" in line] or [x for x in lines if x]
        return f"it ended unexpectedly, {how}{': ' + reasons[-1] if reasons else ''}"

    def answer(self, prompt: Sequence[int], max_tokens: int) -> Answer:
        """Greedy answer. Nothing of an earlier prompt is reused."""
        return Answer(
            **self._ask(do="answer", prompt=list(prompt), max_tokens=max_tokens, ends=self.ends)
        )

    def fill(self, prompt: Sequence[int]) -> int:
        """Compute the prompt anew; the token picked behind it."""
        return int(self._ask(do="fill", prompt=list(prompt))["token"])

    def passes(self, tokens: Sequence[int], widths: Sequence[int]) -> list[float]:
        """ms of a pass over the first `width` of the tokens, for each width, each behind the one
        before. All their logits are computed and picked from."""
        reply = self._ask(do="passes", tokens=list(tokens), widths=list(widths))
        return [float(ms) for ms in reply["passes_ms"]]

    def surprisal(self, tokens: Sequence[int], first: int, width: int) -> list[float]:
        """Natural logarithms of 1/probability of tokens[first:], each given all before it, computed
        `width` tokens a pass."""
        reply = self._ask(do="surprisal", tokens=list(tokens), first=first, width=width)
        return [float(nats) for nats in reply["surprisal"]]

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self._said):
            if stream is not None:
                # what was not sent yet no longer matters
                with suppress(BrokenPipeError):
                    stream.close()


__all__ = [
    "OURS",
    "UNPATCHED",
    "WITHOUT_KERNELS",
    "Answer",
    "Peer",
    "Source",
    "ours",
    "parse",
    "parse_all",
    "unpatched",
]
