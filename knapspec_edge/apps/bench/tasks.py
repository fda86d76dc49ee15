"""The prompts of a comparison: tasks at exact lengths, or the user's own.

A prompt of a task has exactly as many tokens as was asked for, chat format included; what is cut
off to fit lies in the middle, in front of the question. The same task, length and repeat give the
same prompt, another repeat another one.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any

from ...config import BENCH_TASKS, CTX_TOKENS_MAX
from ...errors import ContextError, ModelError, UsageError
from ...text.calibration import FIXED_DATE, passages
from ...text.fitting import TooShortError, fitted
from ...text.templates import ChatTemplate, Message
from ...text.vocabulary import Vocabulary, tokenize_prompt
from . import texts

LEAST_CONTEXT_TOKENS = 32
_OWN_TASK = "prompts"
# of a file of prompts: books by the dozen; beyond it, it is something else by mistake
_FILE_BYTES_MAX = 64 * 2**20


@dataclass(frozen=True)
class Prompt:
    """One prompt, ready for prefill."""

    task: str
    name: str
    context: int | None  # tokens asked for; None: the prompt's own length
    repeat: int
    tokens: tuple[int, ...]

    @cached_property
    def digest(self) -> str:
        """By which the same prompt is known again."""
        return tokens_digest(self.tokens)


@dataclass(frozen=True)
class OwnPrompt:
    """One line of a file of prompts."""

    name: str
    task: str
    prompt: str | None  # completed as it is where the model cannot chat
    messages: tuple[Message, ...]

    @property
    def n_chars(self) -> int:
        return len(self.prompt or "") + sum(len(m["content"]) for m in self.messages)


def tokens_digest(tokens: Sequence[int]) -> str:
    return hashlib.sha256(",".join(map(str, tokens)).encode()).hexdigest()[:16]


# ---------------------------------------------------------------------------------------------
# Tasks

Render = Callable[[str], str]


@dataclass(frozen=True)
class _Task:
    """`pieces(repeat)`: the text. `ask(repeat)`: (in front of it, behind it in a chat, behind it
    in plain text). `acknowledged`: text and question are turns of their own."""

    pieces: Callable[[int], Iterator[str]]
    ask: Callable[[int], tuple[str, str, str]]
    acknowledged: bool = False


def _from(documents: Sequence[str], repeat: int, describe: Callable[[str], str]) -> Iterator[str]:
    """The documents in turn from that of this repeat on; each further turn through them begins a
    paragraph later, so that no two repeats are alike."""
    turn, start = divmod(repeat, len(documents))
    for i in range(len(documents)):
        text = describe(documents[(start + i) % len(documents)])
        if i == 0 and turn:
            blocks = text.split("\n\n")
            text = "\n\n".join(blocks[turn % len(blocks) :])
        yield text


def _as_it_is(text: str) -> str:
    return text


def _prose(repeat: int) -> Iterator[str]:
    yield from _from(texts.topics() or passages(), repeat, _as_it_is)


def _code(repeat: int) -> Iterator[str]:
    yield from _from(_need(texts.module_names()), repeat, texts.source)


def _documentation(repeat: int) -> Iterator[str]:
    """Functions of one module after the other, the one that is asked about first."""
    modules = _need(texts.documented_modules())
    turn, start = divmod(repeat, len(modules))
    for i in range(len(modules)):
        found = texts.functions(modules[(start + i) % len(modules)])
        first = turn % len(found) if i == 0 else 0
        yield from (item.text for item in found[first:])


def _asked_about(repeat: int) -> str:
    modules = _need(texts.documented_modules())
    turn, start = divmod(repeat, len(modules))
    found = texts.functions(modules[start])
    return found[turn % len(found)].name


def _need(names: tuple[str, ...]) -> tuple[str, ...]:
    if not names:
        raise UsageError(
            "this Python comes without the sources of its standard library, which the tasks code "
            "and qa are made of; use --tasks summarize,chat,reason, or --prompts FILE.jsonl"
        )
    return names


def _notes(repeat: int) -> Iterator[str]:
    yield from _from((*passages(), *texts.topics()), repeat, _as_it_is)


def _solved(repeat: int) -> Iterator[str]:
    # far from those that other repeats ask for or show
    for i in count(1 + 1_000_000 * repeat):
        found = texts.problem(i)
        yield f"Problem: {found.text}\nSolution: {found.solution}\n\n"


def _ask_summary(repeat: int) -> tuple[str, str, str]:
    return (
        "Here is a text.",
        "Summarize the text above in one paragraph: what it is about, and its most important "
        "points in the order in which they come.",
        "Summary of the text above:",
    )


def _ask_code(repeat: int) -> tuple[str, str, str]:
    return (
        "Here is the beginning of a Python source file.",
        "Continue the file from where it stops. Answer with Python code only.",
        "",
    )


def _ask_documentation(repeat: int) -> tuple[str, str, str]:
    name = _asked_about(repeat)
    question = f"what does {name} do, and what has to be known to use it?"
    return (
        "Here is documentation.",
        f"According to the documentation above, {question} Explain it in your own words.",
        f"Question: According to the documentation above, {question}\nAnswer:",
    )


def _ask_freely(repeat: int) -> tuple[str, str, str]:
    question = texts.QUESTIONS[repeat % len(texts.QUESTIONS)]
    return "Please keep these notes of mine.", question, question


def _ask_problem(repeat: int) -> tuple[str, str, str]:
    text = texts.problem(1_000_000 * repeat).text
    return (
        "Here are problems with their solutions.",
        f"Solve this one in the same way, step by step.\n\nProblem: {text}",
        f"Problem: {text}\nSolution:",
    )


_TASKS = {
    "summarize": _Task(_prose, _ask_summary),
    "code": _Task(_code, _ask_code),
    "qa": _Task(_documentation, _ask_documentation),
    "chat": _Task(_notes, _ask_freely, acknowledged=True),
    "reason": _Task(_solved, _ask_problem),
}
assert tuple(_TASKS) == BENCH_TASKS
_ACKNOWLEDGED = "I will keep them in mind. What would you like to know?"


def build(
    vocabulary: Vocabulary, template: ChatTemplate | None, task: str, n_tokens: int, repeat: int
) -> Prompt:
    """The prompt of a task in exactly n_tokens tokens, in the model's chat format where it has one.

    Raises UsageError where the question and the format alone take more, or there is not so much
    text.
    """
    chosen = _TASKS[task]
    before, behind, behind_plain = chosen.ask(repeat)

    def chat(text: str) -> list[int]:
        assert template is not None
        messages = [{"role": "user", "content": f"{before}\n\n{text}\n\n{behind}"}]
        if chosen.acknowledged:
            messages = [
                {"role": "user", "content": f"{before}\n\n{text}"},
                {"role": "assistant", "content": _ACKNOWLEDGED},
                {"role": "user", "content": behind},
            ]
        return template.apply(messages, now=FIXED_DATE).tokens

    def plain(text: str) -> list[int]:
        whole = f"{text}\n\n{behind_plain}" if behind_plain else text
        return tokenize_prompt(vocabulary, whole, parse_special=False)

    try:
        try:
            tokens = fitted(chat if template else plain, chosen.pieces(repeat), n_tokens)
        except ModelError:  # of the template; the text without it serves as well
            tokens = fitted(plain, chosen.pieces(repeat), n_tokens)
    except TooShortError as error:
        raise UsageError(
            f"--contexts {n_tokens}: the question of task {task} and the chat format of this model "
            f"take at least {error.needed} tokens"
        ) from None
    except ValueError as error:
        raise UsageError(
            f"--contexts {n_tokens}: task {task} has no such long text: {error}"
        ) from None
    return Prompt(task, f"{task}-{repeat + 1}", n_tokens, repeat, tuple(tokens))


def parse_contexts(text: str) -> tuple[int, ...]:
    """Lengths of "256,2K,6K" in tokens, ascending; K is 1,024. Raises UsageError."""
    found = set()
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]{1,9})([kK]?)", part.strip())
        if match is None:
            raise UsageError(
                f"--contexts {ascii(text)}: give lengths in tokens, as in 256,2K,6K (K is 1,024)"
            )
        n_tokens = int(match[1]) * (1024 if match[2] else 1)
        if not LEAST_CONTEXT_TOKENS <= n_tokens <= CTX_TOKENS_MAX:
            raise UsageError(
                f"--contexts {part.strip()}: a length of at least {LEAST_CONTEXT_TOKENS} tokens"
            )
        found.add(n_tokens)
    return tuple(sorted(found))


def shown_context(n_tokens: int | None) -> str:
    """A length as people write it: 6K, 256; "own" for None."""
    if n_tokens is None:
        return "own"
    if n_tokens >= 1024 and n_tokens % 1024 == 0:
        return f"{n_tokens // 1024}K"
    return str(n_tokens)


# ---------------------------------------------------------------------------------------------
# The user's own prompts


def read_prompts(path: Path) -> tuple[OwnPrompt, ...]:
    """The prompts of a file with one JSON object per line: {"prompt": text} or {"messages":
    [{"role": .., "content": ..}]}, and "name" and "task" where wanted.

    Raises UsageError, one line, for the first line that is none.
    """
    try:
        if path.stat().st_size > _FILE_BYTES_MAX:
            raise UsageError(f"--prompts {path}: more than {_FILE_BYTES_MAX // 2**20} MiB")
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError:
        raise UsageError(f"--prompts {path}: this is no UTF-8 text") from None
    except OSError as error:
        raise UsageError(f"--prompts {path}: {error.strerror or error}") from None
    found: list[OwnPrompt] = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            found.append(_own_prompt(line, f"--prompts {path}, line {number}", len(found) + 1))
    if not found:
        raise UsageError(f"--prompts {path}: there is no prompt in it")
    names = [prompt.name for prompt in found]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"--prompts {path}: two prompts have the name {ascii(name)}")
    return tuple(found)


def _own_prompt(line: str, where: str, number: int) -> OwnPrompt:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        raise UsageError(f"{where} is no JSON object") from None
    if not isinstance(record, dict):
        raise UsageError(f"{where} is no JSON object")
    unknown = set(record) - {"prompt", "messages", "name", "task"}
    if unknown:
        raise UsageError(
            f"{where}: {ascii(min(unknown))} is not known; a line has prompt or messages, and name "
            "and task where wanted"
        )
    name, task = record.get("name", f"prompt-{number}"), record.get("task", _OWN_TASK)
    for key, value in (("name", name), ("task", task)):
        if not isinstance(value, str) or not value.strip():
            raise UsageError(f"{where}: {key} has to be a text that is not empty")
    if ("prompt" in record) == ("messages" in record):
        raise UsageError(f"{where}: give either prompt or messages")
    prompt, messages = record.get("prompt"), record.get("messages", [])
    if "prompt" in record and (not isinstance(prompt, str) or not prompt):
        raise UsageError(f"{where}: prompt has to be a text that is not empty")
    if "messages" in record and not (
        isinstance(messages, list) and messages and all(map(_is_message, messages))
    ):
        raise UsageError(
            f'{where}: messages has to be a list of {{"role": "system", "user" or "assistant", '
            '"content": text}'
        )
    for text in (name, task, prompt or "", *(m["content"] for m in messages)):
        try:
            text.encode()
        except UnicodeEncodeError:  # half of a pair, as JSON can write it
            raise UsageError(f"{where}: it holds what is no text in UTF-8") from None
    return OwnPrompt(name, task, prompt, tuple(messages))


def _is_message(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and set(value) == {"role", "content"}
        and value["role"] in ("system", "user", "assistant")
        and isinstance(value["content"], str)
    )


def build_own(
    vocabulary: Vocabulary,
    template: ChatTemplate | None,
    own: OwnPrompt,
    repeat: int,
    room_tokens: int,
) -> Prompt:
    """A prompt of the user's in its own length: a question where the model can chat, else a text
    to be continued. Raises UsageError for messages without a chat template, ContextError where the
    prompt has more than `room_tokens`."""
    messages = list(own.messages) or [{"role": "user", "content": own.prompt or ""}]
    if template is not None:
        tokens = template.apply(messages, now=FIXED_DATE).tokens
    elif own.prompt is not None:
        tokens = tokenize_prompt(vocabulary, own.prompt, parse_special=False)
    else:
        raise UsageError(
            f"prompt {own.name} has messages, and this model has no chat template: give prompt, or "
            "name a format with --template"
        )
    if len(tokens) > room_tokens:
        raise ContextError(
            f"prompt {own.name} has {len(tokens)} tokens, and the context has room for "
            f"{room_tokens} before the answer: raise --ctx"
        )
    return Prompt(own.task, own.name, None, repeat, tuple(tokens))
