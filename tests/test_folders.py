"""Paths as people write them."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from knapspec_edge.cli import cli
from knapspec_edge.folders import cache_root, config_file, expanded

NOBODY = "~nobody-by-this-name/x"


def test_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    assert expanded("~/a b") == tmp_path / "a b"
    assert expanded("a~") == Path("a~")
    assert expanded(NOBODY) == Path(NOBODY)
    monkeypatch.setenv("KNAPSPEC_EDGE_CACHE", "~/cache")
    monkeypatch.setenv("KNAPSPEC_EDGE_CONFIG", "~/config.toml")
    assert cache_root() == tmp_path / "cache"
    assert config_file() == tmp_path / "config.toml"


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", NOBODY, "hello"],
        ["chat", "model.gguf", "--load", NOBODY],
        ["chat", "model.gguf", "--save", NOBODY],
        ["run", "model.gguf", "hello", "--spec", NOBODY],
        ["run", "model.gguf", "hello", "--template", NOBODY],
        ["run", "model.gguf", "hello", "--grammar", NOBODY],
        ["run", "model.gguf", "hello", "--json-schema", NOBODY],
        ["run", "model.gguf", "--file", NOBODY],
        ["plan", "model.gguf", "--save", NOBODY],
        ["profile", "model.gguf", "--plot", f"{NOBODY}.svg"],
        ["doctor", NOBODY],
        ["summarize", "model.gguf", NOBODY],
        ["summarize", "model.gguf", "a.txt", "-o", NOBODY],
    ],
)
def test_the_home_of_nobody_is_one_line(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code in (1, 2), result.output
    assert isinstance(result.exception, SystemExit), result.exception
    assert "Traceback" not in result.output
