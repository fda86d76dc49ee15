"""Every Python example of the documentation runs and prints what stands below it."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest

from knapspec_edge import models
from knapspec_edge.cli import cli
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


def pages() -> list[str]:
    """Those with Python examples, as paths from the root."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    return [page.relative_to(ROOT).as_posix() for page in found if examples(page)]


def pieces_of_messages() -> list[str]:
    """What stands fixed in any text of the program, white space as one space."""
    pieces: list[str] = []
    for folder in ("knapspec_edge", "scripts"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    pieces.append(node.value)
    pieces += [path.read_text(encoding="utf-8") for path in (ROOT / "cmake").glob("*.cmake")]
    return [" ".join(piece.split()) for piece in pieces]


def test_what_the_readme_quotes_is_what_the_program_says() -> None:
    """Of each message under "When something goes wrong", all between the dots."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    section = text.partition("## When something goes wrong")[2].partition("\n## ")[0]
    quotes = re.findall(r'\*"([^"]+)"\*', section)
    assert len(quotes) > 20
    pieces = pieces_of_messages()

    def said(quote: str) -> bool:
        parts = [" ".join(part.split()) for part in quote.split("…")]
        return all(any(part in piece for piece in pieces) for part in parts)

    assert [quote for quote in quotes if not said(quote)] == []
    assert not said("is in the old … format that nobody remembers")


def commands_in(text: str) -> list[list[str]]:
    """Words behind each `knapspec-edge` or `scripts/run` that begins a command in a code block, or
    in the examples of --help."""
    found = []
    joined = re.sub(r"\\\n\s+", " ", text)
    for line in joined.splitlines():
        match = re.match(r"\s*(?:\$ )?(?:.*\| )?(?:knapspec-edge|scripts/run) (\S.*)", line)
        if match is None or line.lstrip().startswith("knapspec-edge:"):
            continue
        try:
            found.append(shlex.split(match[1], comments=True))
        except ValueError:  # a quotation that goes on in the next line
            found.append(match[1].partition("'")[0].split())
    return found


def unknown_words(words: list[str]) -> list[str]:
    """The command, if there is none of that name, and options that it does not have."""
    command: click.Command = cli
    while isinstance(command, click.Group) and words:
        inner = command.commands.get(words[0])
        if inner is None:
            return [words[0]] if not words[0].startswith("-") else []
        command, words = inner, words[1:]
    known = {name for param in command.params for name in (*param.opts, *param.secondary_opts)}
    known |= {"--help", "-h"}
    return [w for w in words if re.match(r"--?[a-z]", w) and w.partition("=")[0] not in known]


def test_commands_in_pages_and_help_have_the_options_that_they_use() -> None:
    texts = [
        "\n".join(re.findall(r"^ *```\n(.*?)^ *```$", page.read_text("utf-8"), re.M | re.S))
        for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))
    ]
    waiting: list[click.Command] = [cli]
    for command in waiting:
        waiting += command.commands.values() if isinstance(command, click.Group) else ()
        with click.Context(command) as context:
            texts.append(command.get_help(context).partition("Example")[2].partition("Options:")[0])
    found = [words for text in texts for words in commands_in(text)]
    assert len(found) > 45
    assert [(words, wrong) for words in found if (wrong := unknown_words(words))] == []
    assert unknown_words(["run", "hello", "--no-such"]) == ["--no-such"]
    assert unknown_words(["sing"]) == ["sing"]


def test_links_between_pages_lead_somewhere() -> None:
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        text = page.read_text(encoding="utf-8")
        for target in re.findall(
            r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", text, flags=re.DOTALL)
        ):
            if target.startswith("https://"):
                continue
            name, _, anchor = target.partition("#")
            file = (page.parent / name) if name else page
            assert file.exists(), f"{page.name}: {target}"
            if anchor:
                headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
                found = {re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in headings}
                assert anchor in found, f"{page.name}: {target}"


def test_the_examples_are_found() -> None:
    assert len(examples(ROOT / "docs" / "library.md")) >= 10
    assert len(examples(ROOT / "README.md")) >= 1
    for page in pages():
        for code, _ in examples(ROOT / page):
            ast.parse(code)
    assert "docs/library.md" in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.native
@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("page", pages())
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
