"""Completion: what is offered, and that the shells' scripts do it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner

from knapspec_edge import cli_completion
from knapspec_edge.cli import cli


def offered(*words: str) -> list[tuple[str, str]]:
    completing = ShellComplete(cli, {}, "knapspec-edge", cli_completion.VARIABLE)
    return [(i.type, i.value) for i in completing.get_completions(list(words[:-1]), words[-1])]


def plain(*words: str) -> list[str]:
    return [value for kind, value in offered(*words) if kind == "plain"]


def test_models_files_and_choices() -> None:
    assert plain("cha") == ["chat"]
    assert plain("chat", "smol") == ["smollm2-135m-instruct"]
    assert offered("chat", "./x") == [("gguf", "./x")]
    assert ("gguf", "") in offered("run", "")
    assert offered("run", "model.gguf", "") == []
    assert ("file", "") in offered("summarize", "model.gguf", "")
    assert plain("run", "--kv-type", "q8") == ["q8_0"]
    assert plain("run", "--spec", "") == ["auto", "on", "lookup", "off"]
    assert ("file", "p") in offered("run", "--spec", "p")
    assert offered("run", "-f", "x") == [("file", "x")]
    assert offered("bench", "--unpatched", "x") == [("dir", "x")]
    assert plain("bench", "--tasks", "c") == ["code", "chat"]
    assert plain("bench", "--tasks", "code,c") == ["code,chat"]
    assert "auto" in plain("bench", "--policies", "")
    assert plain("run", "--template", "ll") == ["llama2", "llama3"]
    assert plain("completion", "") == ["bash", "zsh", "fish"]
    assert plain("models", "get", "gem") == ["gemma3-270m"]
    assert "--min-p" in plain("run", "--min")


def test_nothing_heavy_is_imported_to_complete() -> None:
    code = (
        "import sys\n"
        "from knapspec_edge.cli import main\n"
        "try:\n"
        "    main()\n"
        "except SystemExit:\n"
        "    pass\n"
        "heavy = {'numpy', 'llama_cpp', 'rich', 'numba', 'gguf', 'prompt_toolkit', 'jinja2'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    environment = {
        **os.environ,
        "COMP_WORDS": "knapspec-edge chat smol",
        "COMP_CWORD": "2",
        cli_completion.VARIABLE: "bash_complete",
    }
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["plain,smollm2-135m-instruct", "gguf,smol"]


@pytest.mark.parametrize("shell", cli_completion.SHELLS)
def test_the_scripts_are_good_syntax(shell: str) -> None:
    result = CliRunner().invoke(cli, ["completion", shell])
    assert result.exit_code == 0
    assert "knapspec-edge completion" in result.output  # how to install it
    if shell == "zsh":
        assert result.output.startswith("#compdef knapspec-edge\n")
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"no {shell} here")
    done = subprocess.run([program, "-n"], input=result.output, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


BASH = """
eval "$(knapspec-edge completion bash)"
compopt() { :; }
COMP_WORDS=(%s); COMP_CWORD=$((${#COMP_WORDS[@]}-1)); COMPREPLY=()
_knapspec_edge_completion knapspec-edge
printf '%%s\\n' "${COMPREPLY[@]}"
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no bash")
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("knapspec-edge cha", ["chat"]),
        ("knapspec-edge chat m", ["models", "my model.gguf"]),
        ("knapspec-edge chat 'my\\ '", ["my model.gguf"]),
        ("knapspec-edge run --kv-type q8", ["q8_0"]),
        ("knapspec-edge run --kv-type = q8", ["q8_0"]),
        ("knapspec-edge run --kv-type =", ["f32", "f16", "bf16", "q8_0"]),
    ],
)
def test_bash_completes(tmp_path: Path, line: str, expected: list[str]) -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("no bash here")
    version = subprocess.run(
        [bash, "-c", "echo $((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1]))"],
        capture_output=True,
        text=True,
    )
    if int(version.stdout) < 404:
        pytest.skip("an old bash")
    program = tmp_path / "bin" / "knapspec-edge"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m knapspec_edge "$@"\n')
    program.chmod(0o755)
    here = tmp_path / "here"
    (here / "models").mkdir(parents=True)
    (here / "my model.gguf").touch()
    (here / "mine.txt").touch()
    environment = {**os.environ, "PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}"}
    root = str(Path(__file__).resolve().parent.parent)
    environment["PYTHONPATH"] = os.pathsep.join([root, environment.get("PYTHONPATH", "")])
    command = [bash, "--norc", "-c", BASH % line]
    done = subprocess.run(command, cwd=here, env=environment, capture_output=True, text=True)
    found = done.stdout.splitlines()
    assert found[: len(expected)] == expected, (done.stdout, done.stderr)
    if len(expected) < 4:
        assert found == expected
