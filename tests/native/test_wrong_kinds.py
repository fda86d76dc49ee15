"""Public functions called with arguments of every kind: only a KnapspecError may come out, and one
line of it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import fields
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from knapspec_edge import Engine, KnapspecError, Settings
from knapspec_edge.native import plans

# More than a message of one line has room for.
MOST_CHARACTERS = 600


class NoPath:
    def __fspath__(self) -> int:
        return 5


def odd() -> list[Any]:
    numbers = [True, 0, -1, 2**70, 1.5, float("nan"), float("inf"), Fraction(1, 2), Decimal(1)]
    arrays = [np.int64(3), np.float32(1), np.bool_(True), np.arange(2), np.eye(3)]
    texts = ["", "x", "\0", "\ud800", "x" * 100_000, "a\nb", "~nobody/x", b"x", bytearray(b"x")]
    lists = [[], ["a"], [1], (2,), [[1]], [None], [-1], [2**70], [float("nan")], set(), range(3)]
    others = [None, {}, {"a": 1}, {1: "a"}, object(), NoPath(), Path("/"), iter(["a"]), Settings()]
    return [*numbers, *arrays, *texts, *lists, *others]


def check(call: Callable[[Any], Any]) -> None:
    accepted = 0
    for value in odd():
        try:
            result = call(value)
            accepted += 1
        except KnapspecError as error:
            lines = str(error).splitlines()
            assert len(lines) == 1, value
            assert len(lines[0]) <= MOST_CHARACTERS, value
        except BaseException as error:
            raise AssertionError(f"{value!r:.80}") from error
        else:
            if isinstance(result, Engine):
                result.close()
    assert accepted < len(odd())  # something is wrong for every argument


@pytest.fixture(scope="module")
def model(tiny_models: Path, patched_library: Path) -> Path:
    return tiny_models / "llama-dense.gguf"


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Engine]:
    with Engine.open(model, ctx=128, spec="off", template="chatml", threads=1) as opened:
        yield opened


def read(answer: Any) -> None:
    with answer:
        for _ in answer:
            pass


SHORT = Settings(max_tokens=2)
HELLO = [{"role": "user", "content": "hello"}]
OPTIONS = [name for name in inspect.signature(Engine.open).parameters if name != "model"]


@pytest.mark.parametrize("name", OPTIONS)
def test_open(model: Path, name: str) -> None:
    check(lambda value: Engine.open(model, **{"ctx": 64, "spec": "off", name: value}))


def test_open_model(patched_library: Path) -> None:
    check(lambda value: Engine.open(value if value is not None else "", spec="off", ctx=64))


@pytest.mark.parametrize("name", [field.name for field in fields(Settings)])
def test_settings(engine: Engine, name: str) -> None:
    check(lambda value: read(engine.generate("hello", Settings(**{"max_tokens": 2, name: value}))))


CALLS: dict[str, Callable[[Engine, Any], Any]] = {
    "prompt": lambda engine, value: read(engine.generate(value, SHORT)),
    "settings": lambda engine, value: read(engine.generate("a", value)),
    "parse_special": lambda engine, value: read(engine.generate("a", SHORT, parse_special=value)),
    "progress": lambda engine, value: read(engine.generate("a", SHORT, progress=value)),
    "messages": lambda engine, value: read(engine.chat(value, SHORT)),
    "message": lambda engine, value: read(engine.chat([value], SHORT)),
    "role": lambda engine, value: read(engine.chat([{**HELLO[0], "role": value}], SHORT)),
    "content": lambda engine, value: read(engine.chat([{**HELLO[0], "content": value}], SHORT)),
    "chat settings": lambda engine, value: read(engine.chat(HELLO, value)),
    "spec": lambda engine, value: engine.set_speculation(value),
    "spec progress": lambda engine, value: engine.set_speculation("off", progress=value),
    "plan context": lambda engine, value: engine.plan(_large(value), budget_seconds=0.1),
    "plan budget": lambda engine, value: engine.plan(10_000, budget_seconds=value),
    "plan policy": lambda engine, value: engine.plan(10_000, policy=value),
    "plan progress": lambda engine, value: engine.plan(10_000, progress=value),
    "profile progress": lambda engine, value: engine.profile(-1.0, progress=value),
}


def _large(value: Any) -> Any:
    return 10_000 if value is None or type(value) is np.int64 else value


@pytest.mark.parametrize("name", CALLS)
def test_calls(engine: Engine, name: str) -> None:
    check(lambda value: CALLS[name](engine, value))
    read(engine.generate("hello", SHORT))  # and it is usable still


def test_profile_budget(engine: Engine) -> None:
    def profile(value: Any) -> None:
        is_long = isinstance(value, int | float) and not isinstance(value, bool) and value > 1.0
        engine.profile(value if not is_long else 0.1)

    check(profile)


def test_plans_on_what_is_no_llama_object(patched_library: Path) -> None:
    # any other whole number may be the address of a context
    check(lambda value: plans.sublayers(None if type(value) is int else value))


def test_plans_of_wrong_kinds(model: Path, patched_library: Path) -> None:
    from llama_cpp import Llama

    llama = Llama(str(model), n_ctx=64, n_threads=1, verbose=False)

    def compute(skipped: Any) -> None:
        with plans.plan(llama, skipped):
            pass

    check(compute)
    llama.close()


def test_numbers_of_numpy_are_numbers(engine: Engine) -> None:
    """Also those whose range is narrower than that of a seed."""
    settings = Settings(
        temperature=np.float32(1.0),  # type: ignore[arg-type]
        top_k=np.int64(5),  # type: ignore[arg-type]
        seed=np.int64(7),  # type: ignore[arg-type]
        max_tokens=np.int64(4),  # type: ignore[arg-type]
    )
    answer, same = (
        engine.generate("hello", s)
        for s in (settings, Settings(temperature=1.0, top_k=5, seed=7, max_tokens=4))
    )
    assert answer.sampling == same.sampling
    assert type(answer.sampling.top_k) is int
    assert type(answer.sampling.seed) is int
