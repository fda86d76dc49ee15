"""What prompts are made of: real text and sources of Python's own standard library, and questions
and problems written for this.

Nothing is downloaded and no module of the library is run: sources are read as text. Another version
of Python has other text, so figures are compared within one; every record holds its version.
"""

from __future__ import annotations

import ast
import random
import tokenize
import warnings
from collections.abc import Iterator, Sequence
from functools import lru_cache
from importlib.util import find_spec
from typing import NamedTuple

# What people ask a model, without any text to go by.
QUESTIONS = (
    "Explain why the sky is blue in a few sentences.",
    "Write a short story about a lighthouse keeper who finds a message in a bottle.",
    "List five tips for someone who starts to learn the piano.",
    "What is the difference between a virus and a bacterium?",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Describe how bread is made, step by step.",
    "Give me a recipe for a simple vegetable soup.",
    "Summarize the plot of Romeo and Juliet in one paragraph.",
    "Write an email that asks a colleague to move a meeting to Thursday.",
    "What are the main causes of ocean tides?",
    "Translate into French: The train leaves at seven in the morning.",
    "Explain recursion to a ten-year-old child.",
    "Name three famous scientists and what they discovered.",
    "Write a poem about the first snow of winter.",
    "How does a bicycle stay upright when it moves?",
    "Compare living in a city with living in a village.",
    "What should one think of before adopting a dog?",
    "Write a regular expression that matches a date such as 2024-05-17, and explain it.",
    "Tell me about the history of the printing press.",
    "How do you calculate the area of a circle? Give an example.",
)

# Modules in pure Python with much code and documentation, in versions 3.10 and later.
MODULES = (
    "textwrap", "argparse", "calendar", "heapq", "statistics", "shlex", "csv", "difflib", "tarfile",
    "string", "fractions", "subprocess", "threading", "configparser", "random", "zipfile", "bisect",
    "contextlib", "dataclasses", "enum", "functools", "inspect", "json.decoder", "logging",
    "mailbox", "optparse", "pdb", "pickle", "plistlib", "shutil", "smtplib", "socketserver",
    "tempfile", "tokenize", "traceback", "typing", "urllib.parse", "uuid", "weakref", "ftplib",
    "unittest.case", "cmd", "sched", "gettext", "queue", "timeit", "wave", "colorsys", "copy",
    "fileinput", "fnmatch", "html.parser", "http.cookies", "ipaddress", "numbers", "pprint",
    "selectors", "turtle",
)  # fmt: skip
_LEAST_TOPIC_CHARS = 1500
_LEAST_DOCSTRING_CHARS = 120


class Function(NamedTuple):
    """A function or class with its documentation."""

    name: str
    text: str  # the line that defines it, and its docstring


@lru_cache(maxsize=1)
def topics() -> tuple[str, ...]:
    """Long prose: chapters of the language reference, by name. Empty where Python lacks them."""
    try:
        from pydoc_data.topics import topics as found
    except ImportError:  # left out by some distributions
        return ()
    return tuple(
        text.strip() + "\n\n"
        for _, text in sorted(found.items())
        if len(text) >= _LEAST_TOPIC_CHARS
    )


@lru_cache(maxsize=1)
def module_names() -> tuple[str, ...]:
    """Those of MODULES whose sources are there."""
    return tuple(name for name in MODULES if _source_file(name) is not None)


@lru_cache(maxsize=len(MODULES))
def source(name: str) -> str:
    """The source text of a module of `module_names`."""
    file = _source_file(name)
    assert file is not None
    with tokenize.open(file) as stream:
        return stream.read().strip() + "\n\n"


def _source_file(name: str) -> str | None:
    try:
        spec = find_spec(name)
    except (ImportError, ValueError):
        return None
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None
    return spec.origin if spec.has_location else None


@lru_cache(maxsize=len(MODULES))
def functions(name: str) -> tuple[Function, ...]:
    """Documented functions, methods and classes of a module, in the order of its source."""
    with warnings.catch_warnings():  # about escapes in sources that are not ours
        warnings.simplefilter("ignore")
        tree = ast.parse(source(name))
    return tuple(_documented(tree.body, name))


def _documented(body: Sequence[ast.stmt], owner: str) -> Iterator[Function]:
    for node in body:
        if not isinstance(node, ast.FunctionDef | ast.ClassDef):
            continue
        name = f"{owner}.{node.name}"
        text = ast.get_docstring(node)
        if text is not None and len(text) >= _LEAST_DOCSTRING_CHARS:
            arguments = f"({ast.unparse(node.args)})" if isinstance(node, ast.FunctionDef) else ""
            word = "function" if isinstance(node, ast.FunctionDef) else "class"
            yield Function(name, f"{word} {name}{arguments}\n\n{text}\n\n\n")
        if isinstance(node, ast.ClassDef):
            yield from _documented(node.body, name)


@lru_cache(maxsize=1)
def documented_modules() -> tuple[str, ...]:
    """Modules with enough documentation to ask about."""
    return tuple(name for name in module_names() if len(functions(name)) >= 3)


class Problem(NamedTuple):
    """A word problem with its solution, step by step."""

    text: str
    solution: str


_NAMES = ("Anna", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Henry", "Ida", "Jonas")
_THINGS = ("apples", "books", "candles", "eggs", "lamps", "pencils", "plates", "stamps", "tickets")


def problem(number: int) -> Problem:
    """The problem of this number: arithmetic in a few steps. Neighbours are of different kinds."""
    rng = random.Random(number)
    kinds = (_shopping, _travel, _ages, _sharing, _savings, _fence)
    return kinds[number % len(kinds)](rng)


def _shopping(rng: random.Random) -> Problem:
    name, thing = rng.choice(_NAMES), rng.choice(_THINGS)
    n, price, extra = rng.randrange(3, 12), rng.randrange(2, 9), rng.randrange(5, 30)
    paid = 100 + n * price
    return Problem(
        f"{name} buys {n} {thing} for {price} coins each and a bag for {extra} coins. {name} pays "
        f"with {paid} coins. How many coins come back?",
        f"The {thing} cost {n} times {price}, that is {n * price} coins. With the bag it is "
        f"{n * price} plus {extra}, that is {n * price + extra} coins. {paid} minus "
        f"{n * price + extra} is {paid - n * price - extra}. Answer: {paid - n * price - extra}",
    )


def _travel(rng: random.Random) -> Problem:
    first, second = rng.randrange(40, 90, 5), rng.randrange(60, 130, 5)
    hours, more = rng.randrange(2, 6), rng.randrange(1, 5)
    total = first * hours + second * more
    return Problem(
        f"A train runs {hours} hours at {first} kilometres per hour and then {more} hours at "
        f"{second} kilometres per hour. How far does it get?",
        f"In the first part it runs {hours} times {first}, that is {first * hours} kilometres. In "
        f"the second part it runs {more} times {second}, that is {second * more} kilometres. "
        f"Together that is {total} kilometres. Answer: {total}",
    )


def _ages(rng: random.Random) -> Problem:
    younger, older = rng.sample(_NAMES, 2)
    age, gap, years = rng.randrange(4, 15), rng.randrange(2, 9), rng.randrange(3, 12)
    total = 2 * age + gap + 2 * years
    return Problem(
        f"{younger} is {age} years old. {older} is {gap} years older. How old are both together in "
        f"{years} years?",
        f"{older} is {age} plus {gap}, that is {age + gap} years old. Together they are "
        f"{2 * age + gap} years old now. In {years} years each of them is {years} years older, so "
        f"{2 * years} is added: {2 * age + gap} plus {2 * years} is {total}. Answer: {total}",
    )


def _sharing(rng: random.Random) -> Problem:
    name, thing = rng.choice(_NAMES), rng.choice(_THINGS)
    friends, each, left = rng.randrange(3, 9), rng.randrange(4, 15), rng.randrange(1, 3)
    total = friends * each + left
    return Problem(
        f"{name} has {total} {thing} and shares them equally among {friends} friends, as far as "
        f"that goes. How many {thing} does each friend get, and how many are left?",
        f"{friends} times {each} is {friends * each}, and {friends} times {each + 1} would be "
        f"{friends * (each + 1)}, which is more than {total}. So each gets {each}, and {total} "
        f"minus {friends * each} is {left}. Answer: {each} each, {left} left",
    )


def _savings(rng: random.Random) -> Problem:
    name = rng.choice(_NAMES)
    start, weekly, spent = rng.randrange(10, 60), rng.randrange(3, 15), rng.randrange(5, 20)
    weeks = rng.randrange(4, 13)
    total = start + weekly * weeks - spent
    return Problem(
        f"{name} has {start} coins, saves {weekly} coins every week for {weeks} weeks, and spends "
        f"{spent} coins on a present. How many coins are there in the end?",
        f"Saving gives {weeks} times {weekly}, that is {weekly * weeks} coins. With the {start} "
        f"coins from before it is {start + weekly * weeks}. After the present {total} are left. "
        f"Answer: {total}",
    )


def _fence(rng: random.Random) -> Problem:
    width, length = rng.randrange(4, 20), rng.randrange(20, 45)
    price = rng.randrange(2, 9)
    around = 2 * (width + length)
    return Problem(
        f"A garden is {length} metres long and {width} metres wide. A fence around it costs "
        f"{price} coins per metre. What does the whole fence cost?",
        f"The two long sides take 2 times {length}, that is {2 * length} metres, the short ones 2 "
        f"times {width}, that is {2 * width} metres, together {around} metres. {around} times "
        f"{price} is {around * price}. Answer: {around * price}",
    )
