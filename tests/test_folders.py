"""Paths as people write them."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from knapspec_edge.cli import cli
from knapspec_edge.folders import cache_root, config_file, expanded, read_at_most

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


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="no device without an end here")
@pytest.mark.parametrize(
    "arguments",
    [
        ["chat", "model.gguf", "--load", "/dev/zero"],
        ["chat", "/dev/zero"],
        ["run", "model.gguf", "hello", "--spec", "/dev/zero"],
        ["run", "model.gguf", "hello", "--grammar", "/dev/zero"],
        ["run", "model.gguf", "hello", "--json-schema", "/dev/zero"],
        ["run", "model.gguf", "--file", "/dev/zero"],
        ["summarize", "model.gguf", "a.txt", "--prompt-file", "/dev/zero"],
    ],
)
def test_a_device_without_an_end_is_one_line(arguments: list[str]) -> None:
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code in (1, 2), result.output
    assert isinstance(result.exception, SystemExit), result.exception
    assert "Traceback" not in result.output


def test_no_more_is_read_than_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(range(256)) * 4096 * 2)
    assert read_at_most(file, 2 << 20) == file.read_bytes()
    with pytest.raises(OSError, match="it has more than 1 MiB, the most that is read"):
        read_at_most(file, 1 << 20)
