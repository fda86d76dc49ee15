"""Builds of llama.cpp to compare with: how they are named, and the worker that runs each."""

from __future__ import annotations

import ast
import math
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from knapspec_edge.apps import peers
from knapspec_edge.apps.peers import Answer, Peer, parse, parse_all
from knapspec_edge.errors import LibraryError, UsageError

SCRIPTED = Path(__file__).with_name("scripted_peer.py")
SETTINGS: dict[str, Any] = {
    "ctx_tokens": 64,
    "slice_tokens": 4,
    "max_rows": 4,
    "threads": 2,
    "threads_batch": 2,
    "gpu_layers": 0,
    "kv_type": "q8_0",
    "flash_attn": "on",
    "devices": ["CPU"],
}


@pytest.fixture
def python(tmp_path: Path) -> Callable[[str], Path]:
    """A Python whose bindings are scripted."""
    if os.name == "nt":
        pytest.skip("a program that is a script")

    def write(mode: str) -> Path:
        file = tmp_path / f"python-{mode}"
        words = shlex.join([sys.executable, str(SCRIPTED), mode])
        file.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
        file.chmod(0o755)
        return file

    return write


@pytest.fixture
def model(tmp_path: Path) -> Path:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF")
    return file


def scripted_answer(prompt: list[int], n: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(n):
        tokens.append((tokens[-1] + len(tokens) - 1) % 50)
    return tokens[len(prompt) :]


# ---------------------------------------------------------------------------------------------
# Names


def library(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "libllama.so").touch()
    return folder


def test_a_peer_is_a_folder_of_libraries_a_python_or_its_environment(tmp_path: Path) -> None:
    folder = library(tmp_path / "build" / "bin")
    source = parse(f"mine={folder}")
    assert (source.name, source.library) == ("mine", folder)
    assert source.python == Path(sys.executable)
    environment = tmp_path / "venv" / "bin"
    environment.mkdir(parents=True)
    (environment / "python3").symlink_to(sys.executable)
    for where in (environment.parent, environment / "python3"):
        source = parse(f"ik={where}")
        # where the link lies is what makes it the Python of that environment
        assert (source.name, source.python) == ("ik", environment / "python3")
        assert source.library is None


def test_without_a_name_it_is_called_by_its_path(tmp_path: Path) -> None:
    folder = library(tmp_path / "a=b")
    assert parse(str(folder)).name == str(folder)
    assert parse(str(folder)).library == folder


@pytest.mark.parametrize("where", ["", "x={}/missing", "x={}/file-in-no/folder", "x=", "x={}"])
def test_what_is_no_peer_is_refused_in_one_line(tmp_path: Path, where: str) -> None:
    with pytest.raises(UsageError, match=r"^--peer ") as raised:
        parse(where.format(tmp_path))
    assert "\n" not in str(raised.value)


def test_names_are_unique(tmp_path: Path) -> None:
    one, two = library(tmp_path / "1"), library(tmp_path / "2")
    names = [s.name for s in parse_all([f"a={one}", f"b={two}"], one)]
    assert names == [peers.UNPATCHED, "a", "b"]
    with pytest.raises(UsageError, match="another peer has this name"):
        parse_all([f"a={one}", f"a={two}"])
    with pytest.raises(UsageError, match="another peer has this name"):
        parse_all([f"{peers.UNPATCHED}={one}"], two)
    with pytest.raises(UsageError, match="there is no libllama"):
        parse_all([], tmp_path)


# ---------------------------------------------------------------------------------------------
# The worker


@pytest.mark.parametrize(
    ("mode", "package"),
    [
        ("new", "llama-cpp-python 9.9"),
        ("old", "llama-cpp-python 9.9"),
        ("ik", "ik-llama-cpp-python 9.9"),
    ],
)
def test_bindings_of_any_age_answer_alike(
    mode: str, package: str, python: Callable[[str], Path], model: Path
) -> None:
    prompt = [3, 1, 4, 1, 5, 9, 2]
    with Peer(parse(f"x={python(mode)}"), model, SETTINGS) as peer:
        assert peer.package.startswith(f"{package}, Python 3.")
        answer = peer.answer(prompt, 5)
        assert answer.tokens == scripted_answer(prompt, 5)
        assert answer.prompt_ms > 0
        assert answer.predicted_ms > 0
        assert peer.answer(prompt, 5).tokens == answer.tokens, "nothing of the first one is left"
        assert len(peer.answer(prompt, 1).tokens) == 1
    ends = [scripted_answer(prompt, 3)[-1]]
    with Peer(parse(f"x={python(mode)}"), model, SETTINGS, ends) as peer:
        assert peer.answer(prompt, 9).tokens == scripted_answer(prompt, 3)


def test_the_settings_are_those_of_the_engine_where_a_build_has_them(
    python: Callable[[str], Path], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "settings"
    monkeypatch.setenv("SCRIPTED_PEER_SETTINGS", str(file))

    def given(mode: str, flash_attn: str) -> dict[str, Any]:
        settings = {**SETTINGS, "flash_attn": flash_attn}
        with Peer(parse(f"x={python(mode)}"), model, settings):
            values: dict[str, Any] = ast.literal_eval(file.read_text())
            return values

    common = {
        "n_ctx": 64, "n_batch": 4, "n_ubatch": 4, "n_seq_max": 1, "n_threads": 2,
        "n_threads_batch": 2, "type_k": 8, "type_v": 8,
    }  # fmt: skip
    assert given("new", "on") == {**common, "flash_attn_type": 1, "n_outputs_max": 4}
    assert given("new", "auto") == {**common, "flash_attn_type": -1, "n_outputs_max": 4}
    assert given("ik", "on") == {**common, "flash_attn": True}
    assert given("ik", "auto") == {**common, "flash_attn": False}, "what it does by itself"


def test_another_python_sees_none_of_our_packages(
    python: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: Path
) -> None:
    seen = tmp_path / "seen"
    script = python("new")
    script.write_text(f"#!/bin/sh\nenv > {shlex.quote(str(seen))}\nexit 3\n")
    for name in ("PYTHONPATH", "LLAMA_CPP_LIB_PATH"):
        monkeypatch.setenv(name, "/ours")
    with (
        pytest.raises(LibraryError, match="with exit code 3"),
        Peer(parse(f"x={script}"), model, SETTINGS),
    ):
        pass
    assert "/ours" not in seen.read_text()


def test_surprisal_is_that_of_the_softmax(python: Callable[[str], Path], model: Path) -> None:
    right = math.log(math.exp(3) + 49) - 3
    wrong = math.log(math.exp(3) + 49)
    tokens = [7, *scripted_answer([7], 5)]
    tokens[4] = (tokens[4] + 1) % 50
    tokens[5] = (tokens[4] + 4) % 50
    for width in (1, 2, 4):
        with Peer(parse(f"x={python('new')}"), model, SETTINGS) as peer:
            found = peer.surprisal(tokens, 3, width)
        assert found == pytest.approx([right, wrong, right], rel=1e-6)


def test_passes_go_on_behind_the_prompt(python: Callable[[str], Path], model: Path) -> None:
    with Peer(parse(f"x={python('ik')}"), model, SETTINGS) as peer:
        assert peer.fill([3, 4, 5]) == scripted_answer([3, 4, 5], 1)[0]
        times = peer.passes([1, 2, 3, 4], [1, 4, 2])
        assert len(times) == 3
        assert all(ms > 0 for ms in times)
        # 10 of 64 cells are taken
        with pytest.raises(LibraryError, match="llama_decode returned 1"):
            peer.passes([1] * 4, [4] * 14)


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("none", "neither llama-cpp-python nor ik-llama-cpp-python; install one"),
        ("broken", "its llama-cpp-python does not load: libllama.so: no such file"),
        ("incomplete", "its llama-cpp-python lacks diskcache"),
        ("no-model", r"it cannot load .*m\.gguf"),
        ("no-context", "it cannot create the context"),
        ("full", "llama_decode returned 1"),
        ("abort", r"by SIGABRT: x\.cpp:7: GGML_ASSERT\(S > 0\) failed$"),
        ("killed", "it ended unexpectedly, by SIGKILL$"),
    ],
)
def test_a_failure_is_one_line_with_its_reason(
    mode: str, words: str, python: Callable[[str], Path], model: Path
) -> None:
    source = parse(f"x={python(mode)}")
    with pytest.raises(LibraryError, match=words) as raised, Peer(source, model, SETTINGS) as peer:
        peer.answer([1, 2], 4)
    assert str(raised.value).startswith("--peer x=")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("program", ["cat", "true", "ls"])
def test_a_program_that_is_no_python(program: str, model: Path) -> None:
    path = next((p for p in (Path("/bin") / program,) if p.is_file()), None)
    if path is None:
        pytest.skip("no such program here")
    with (
        pytest.raises(LibraryError, match="does not run a Python program"),
        Peer(parse(f"x={path}"), model, SETTINGS),
    ):
        pass


def test_a_file_that_cannot_be_started(model: Path) -> None:
    source = parse(f"x={model}")
    with pytest.raises(UsageError, match="cannot be started"), Peer(source, model, SETTINGS):
        pass


def test_the_worker_is_gone_afterwards(python: Callable[[str], Path], model: Path) -> None:
    with Peer(parse(f"x={python('new')}"), model, SETTINGS) as peer:
        assert isinstance(peer.answer([1], 2), Answer)
        process = peer.process
        assert process.poll() is None
    assert process.poll() is not None


# ---------------------------------------------------------------------------------------------
# As sides of a comparison


class ScriptedPeer:
    """Answers as plain decoding does, but for the last token where its name says so."""

    def __init__(self, source: peers.Source) -> None:
        self.source = source
        self.package = "bindings 1.0, Python 3.9"
        self.ends: list[int] = []

    def __enter__(self) -> ScriptedPeer:
        return self

    def __exit__(self, *_: object) -> None: ...

    def answer(self, prompt: Sequence[int], max_tokens: int) -> Answer:
        from scripted import scripted_engine

        session = scripted_engine().session
        events = session.generate(prompt, max_tokens=max_tokens, reuse=False)
        tokens = [event.token for event in events]
        if self.source.name == "wrong":
            tokens[-1] += 1
        return Answer(tokens, 1.0, 10.0 * len(tokens))


def test_bench_compares_the_text_of_a_peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from scripted import scripted_engine
    from test_bench import ENVIRONMENT

    from knapspec_edge.apps.bench import runner
    from knapspec_edge.apps.bench.options import Options
    from knapspec_edge.apps.bench.tasks import OwnPrompt

    folder = library(tmp_path / "lib")

    class Scripted:
        @staticmethod
        def beside(_engine: Any, source: peers.Source) -> ScriptedPeer:
            return ScriptedPeer(source)

    monkeypatch.setattr(runner, "Peer", Scripted)
    monkeypatch.setattr(runner, "environment", lambda engine: ENVIRONMENT)
    monkeypatch.setattr(runner, "explained_margin", lambda environment: 0.0)
    options = Options(
        policies=(),
        prompts=tuple(OwnPrompt(f"p{i}", "mine", f"Question {i}?", ()) for i in range(2)),
        max_tokens=12,
        peers=tuple(parse_all([f"right={folder}", f"wrong={folder}"])),
    )
    *_, report = runner.run(scripted_engine(), options)
    plain, right, wrong = report.sides
    assert [side.side for side in report.sides] == ["plain", "right", "wrong"]
    assert (right.identical, right.unexplained) == (2, 0)
    assert right.ratio is not None
    assert (wrong.identical, wrong.unexplained) == (0, 2)
    assert wrong.ratio is None
    assert "right: bindings 1.0, Python 3.9" in report.notes
    assert {r.prompt_ms for r in report.runs if r.side == "right"} == {1.0}
    with pytest.raises(UsageError, match="a side of the comparison has this name"):
        replace(options, peers=tuple(parse_all([f"plain={folder}"])))
