"""scripts/check_perplexity.py and check_peers.py: arithmetic by hand, and what they print."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import pytest
from scripted_tools import load

perplexity = load("check_perplexity")
speed = load("check_peers")
# imported by both
sides = sys.modules["_sides"]


def test_perplexity_and_its_standard_error() -> None:
    # half of the tokens at 1/2, half at 1/8: the mean is ln 4
    found = perplexity.perplexity([math.log(2), math.log(8)] * 2)
    assert found.value == pytest.approx(4.0)
    # each lies ln 2 from the mean: sample variance 4/3 ln² 2, over 4 tokens
    assert found.error == pytest.approx(4.0 * math.log(2) / math.sqrt(3))


def test_the_difference_is_of_paired_tokens() -> None:
    base = [math.log(2), math.log(8)] * 2
    # every token 1 % less likely: no spread, however much the tokens differ among themselves
    found = perplexity.difference([x + math.log(1.01) for x in base], base)
    assert found.share == pytest.approx(0.01)
    assert found.share_error == pytest.approx(0.0, abs=1e-12)
    assert found.in_errors == pytest.approx(0.01 * math.sqrt(3) / math.log(2))
    assert not found.same
    # +2, 0, 0, 0 times ln 2: mean ln 2 / 2, sample deviation ln 2, over 4 tokens
    found = perplexity.difference([base[0] + 2 * math.log(2), *base[1:]], base)
    assert found.share == pytest.approx(math.sqrt(2) - 1)
    assert found.share_error == pytest.approx(math.sqrt(2) * math.log(2) / 2)


def test_the_same_bits_are_said_to_be_the_same() -> None:
    nats = [0.5, 1.5, 0.1]
    assert perplexity.difference(nats, list(nats)).same
    text = "\n".join(perplexity.lines_of({"ours": nats, "base": list(nats)}, "base"))
    assert "the same bits" in text
    with pytest.raises(ValueError, match="shorter"):
        perplexity.difference(nats, nats[:2])


class ScriptedPeer:
    """Notes what it is asked."""

    package = "bindings 1"

    def __init__(self, log: list[Any], name: str) -> None:
        self.log, self.name = log, name

    def surprisal(self, tokens: Sequence[int], first: int, width: int) -> list[float]:
        self.log.append((self.name, tokens[0], first, width))
        return [float(token) for token in tokens[first:]]

    def fill(self, tokens: Sequence[int]) -> int:
        self.log.append((self.name, "fill", len(tokens)))
        return 0

    def passes(self, tokens: Sequence[int], widths: Sequence[int]) -> list[float]:
        self.log.append(self.name)
        return [10.0 * len(self.log) * width for width in widths]


def test_second_halves_are_scored_by_the_sides_in_turn() -> None:
    log: list[Any] = []
    running = {name: ScriptedPeer(log, name) for name in ("a", "b")}
    chunks = [[1, 2, 3, 4], [5, 6, 7, 8]]
    found = perplexity.scored(running, chunks, 2, lambda share: None)
    assert found == {"a": [3.0, 4.0, 7.0, 8.0], "b": [3.0, 4.0, 7.0, 8.0]}
    # the second turn begins with b, and runs backwards
    assert log == [("a", 1, 2, 2), ("b", 1, 2, 2), ("a", 5, 2, 2), ("b", 5, 2, 2)]


def test_every_side_is_first_and_last() -> None:
    orders = [sides.rotated(["a", "b", "c"], turn) for turn in range(6)]
    assert {order[0] for order in orders} == {order[-1] for order in orders} == {"a", "b", "c"}
    assert all(sorted(order) == ["a", "b", "c"] for order in orders)


def test_passes_alternate_and_warm_up_rounds_do_not_count() -> None:
    log: list[Any] = []
    running = {name: ScriptedPeer(log, name) for name in ("ours", "x")}
    found = speed.measured(running, list(range(100)), 64, [1, 8], 3, lambda share: None)
    assert log[:2] == [("ours", "fill", 64), ("x", "fill", 64)]
    rounds = [log[i : i + 2] for i in range(2, len(log), 2)]
    assert len(rounds) == speed.WARM_UP_ROUNDS + 3
    assert all(sorted(names) == ["ours", "x"] for names in rounds)
    for times in found.values():
        assert [len(ms) for ms in times.ms.values()] == [3, 3]
        assert times.in_steps(8) == 8.0
        assert times.prompt_per_second > 0


def test_ratios_are_paired() -> None:
    ours = speed.Times(100.0, {1: [10.0, 20.0, 40.0], 8: [20.0, 40.0, 80.0]})
    other = speed.Times(50.0, {1: [20.0, 40.0, 40.0], 8: [40.0, 160.0, 160.0]})
    lines = speed.lines_of({"ours": ours, "other": other}, [1, 8])
    # median ms 20 and 40; ratios 0.5, 0.5, 1; wide passes 2, 4, 4 steps
    assert lines[2].startswith("| ours | 50.0 (33.3–66.7) | – | 20.00 | 2.00 | 100 |")
    assert lines[3].startswith("| other | 25.0 (25.0–33.3) | 0.50× | 40.00 | 4.00 | 50 |")


@pytest.mark.parametrize(
    ("program", "words", "message"),
    [
        (perplexity, ["--chunk", "4"], "--chunk must be at least 8"),
        (perplexity, ["--chunks", "0"], "--chunks must be at least 1"),
        (perplexity, ["--width", "0"], "--width must be at least 1"),
        (speed, ["--contexts", "0"], "must be at least 1"),
        (speed, ["--rounds", "1"], "--rounds must be at least 2"),
        (speed, ["--widths", "65"], "--widths goes to 64"),
        (speed, ["--peer", "x=/nowhere"], "there is no such file or folder"),
        (perplexity, ["--text", "/nowhere"], "--text /nowhere"),
    ],
)
def test_bad_options_are_one_line(
    program: Any,
    words: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def tokens(options: Any, *_: Any) -> Any:
        sides.read_text(options.text)
        return sides.gguf_check, [[1] * 10000]

    monkeypatch.setattr(sides, "text_tokens", tokens)
    assert program.main(["model.gguf", *words]) != 0
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert captured.err.count("\n") == 1


def test_the_default_text_is_long_and_real() -> None:
    text = sides.read_text(None)
    assert len(text) > 300_000
    assert "The assert statement" in text or "assert" in text
