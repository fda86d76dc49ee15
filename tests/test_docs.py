"""Every Python example of the documentation runs and prints what stands below it."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from knapspec_edge import models
from knapspec_edge.native.library import library_file

ROOT = Path(__file__).resolve().parent.parent
_BLOCK = re.compile(r"^```(python|output)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_MARK = "--- end of example {} ---"


def examples(page: Path) -> list[tuple[str, str | None]]:
    """(code, what it prints or None where that is not said)."""
    found: list[tuple[str, str | None]] = []
    for kind, text in _BLOCK.findall(page.read_text(encoding="utf-8")):
        if kind == "python":
            found.append((text, None))
        else:
            code, before = found.pop()
            assert before is None, "two outputs of one example"
            found.append((code, text))
    return found


def test_the_examples_are_found() -> None:
    assert len(examples(ROOT / "docs" / "library.md")) >= 10
    assert len(examples(ROOT / "README.md")) >= 1
    for page in ("docs/library.md", "README.md"):
        for code, _ in examples(ROOT / page):
            ast.parse(code)
    assert "docs/library.md" in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.native
@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("page", ["docs/library.md", "README.md"])
def test_the_examples_do_what_they_say(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if library_file("llama") is None:
        pytest.skip("the patched library is not installed; run scripts/test")
    model = models.obtain(models.default_model().name)
    (tmp_path / "model.gguf").symlink_to(model)
    # what examples measure is nobody else's
    environment = {**os.environ, "KNAPSPEC_EDGE_CACHE": str(tmp_path / "cache")}
    found = examples(ROOT / page)
    program = "\n".join(f"{code}\nprint({_MARK.format(i)!r})" for i, (code, _) in enumerate(found))
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    rest = done.stdout
    for i, (code, expected) in enumerate(found):
        printed, mark, rest = rest.partition(f"{_MARK.format(i)}\n")
        assert mark, code
        if expected is not None:
            assert printed == expected, code


CONSUMER = """
from knapspec_edge import (
    Answer, BusyError, Engine, KnapspecError, Settings, Speculation, Stats, TextEvent, TokenEvent,
)

def ask(path: str) -> str:
    settings = Settings(temperature=0.7, stop=["x"], json_schema={"type": "string"})
    with Engine.open(path, ctx=512, spec="off") as engine:
        answer: Answer = engine.chat([{"role": "user", "content": "Hi"}], settings)
        parts: list[str] = []
        for event in answer:
            reveal_type(event)
            checked: TextEvent = event
            token: TokenEvent | None = event.token
            parts.append(checked.text)
        stats: Stats = answer.stats
        speculation: Speculation = answer.speculation
        engine.interrupt()
        reveal_type(engine.generate)
        reveal_type(engine.plan(100).step_ms)
        return "".join(parts) + str(stats.rounds) + speculation.reason

class Mine(KnapspecError):
    busy: type[BusyError] = BusyError
"""
WRONG = """
from knapspec_edge import Engine, Settings

Settings(temperature="hot")
Engine.open("x").generate(None)
"""


@pytest.mark.slow
def test_a_typed_user_of_the_library(tmp_path: Path) -> None:
    """As mypy sees the package from outside: py.typed, and no Any in what is public."""
    pytest.importorskip("mypy")
    environment = {**os.environ, "MYPYPATH": str(ROOT)}

    def check(text: str) -> subprocess.CompletedProcess[str]:
        file = tmp_path / "consumer.py"
        file.write_text(text, encoding="utf-8")
        command = [sys.executable, "-m", "mypy", "--strict", "--config-file", os.devnull]
        command += ["--follow-imports", "silent", "--ignore-missing-imports", str(file)]
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True
        )

    right = check(CONSUMER)
    assert right.returncode == 0, right.stdout + right.stderr
    assert 'Revealed type is "knapspec_edge.engine.TextEvent"' in right.stdout
    assert 'Revealed type is "float"' in right.stdout or "builtins.float" in right.stdout
    assert "Any" not in "".join(
        line for line in right.stdout.splitlines() if "Revealed type" in line
    )
    wrong = check(WRONG)
    assert wrong.returncode == 1
    assert "2 errors" in wrong.stdout or wrong.stdout.count("error:") == 2, wrong.stdout
    assert (ROOT / "knapspec_edge" / "py.typed").exists()


def test_all_that_is_public_is_there_and_documented() -> None:
    import knapspec_edge

    assert list(knapspec_edge.__all__) == sorted(knapspec_edge.__all__)
    for name in knapspec_edge.__all__:
        found = getattr(knapspec_edge, name)
        assert name == "__version__" or found.__doc__, name
        assert name in dir(knapspec_edge)
        if isinstance(found, type) and found.__module__.startswith("knapspec_edge"):
            for member, value in vars(found).items():
                if not member.startswith("_") and callable(value) and found.__name__ == "Engine":
                    assert value.__doc__, f"{name}.{member}"
    with pytest.raises(AttributeError):
        _ = knapspec_edge.nothing
