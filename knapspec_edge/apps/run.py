"""The `run` command: one prompt, one answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..engine import Answer, Engine, Progress, Settings
from ..errors import UsageError
from ..text.templates import Message
from .summary import answer_json, logprobs_json


@dataclass(frozen=True)
class Request:
    """What is asked. `raw` None completes base models raw and asks others through their template;
    True passes the prompt as it is, control tokens included."""

    prompt: str
    raw: bool | None = None
    system: str | None = None


def join_prompt(instruction: str | None, content: str | None) -> str:
    """The prompt from an argument (the instruction) and a file or pipe (the content), in this order
    with a blank line between. Raises UsageError if both are missing or blank.

    The newline that ends a file is not part of the content.
    """
    parts = [instruction or "", (content or "").removesuffix("\n").removesuffix("\r")]
    parts = [part for part in parts if part.strip()]
    if not parts:
        raise UsageError("there is no prompt: give PROMPT, -f FILE, or text on standard input")
    return "\n\n".join(parts)


# Bytes of text per token, roughly, before a model's vocabulary is at hand; and how long an answer
# is where nobody limits it.
_BYTES_PER_TOKEN = 4
_USUAL_ANSWER_TOKENS = 256


def expected_tokens(request: Request, settings: Settings) -> int:
    """About how long the context will get, to choose its settings by."""
    text = request.prompt + (request.system or "")
    limit = settings.max_tokens or _USUAL_ANSWER_TOKENS
    return len(text.encode()) // _BYTES_PER_TOKEN + min(limit, 4 * _USUAL_ANSWER_TOKENS)


def answer(
    engine: Engine, request: Request, settings: Settings, *, progress: Progress | None = None
) -> Answer:
    """Start the answer; iterate over it. Raises at once what Engine.chat and generate raise."""
    raw = request.raw
    if raw is None:
        raw = not engine.has_template and engine.template_error is None
    if raw:
        if settings.think is not None:
            raise UsageError("--think and --no-think need a chat template: leave them away")
        if request.system:
            raise UsageError(
                "a system prompt needs a chat template: leave --raw away, or write the system "
                "text into the prompt"
                if request.raw
                else f"{engine.name} has no chat template, so --system has no place; name a "
                "template with --template"
            )
        return engine.generate(
            request.prompt, settings, parse_special=bool(request.raw), progress=progress
        )
    messages: list[Message] = []
    if request.system:
        messages.append({"role": "system", "content": request.system})
    messages.append({"role": "user", "content": request.prompt})
    return engine.chat(messages, settings, progress=progress)


def to_json(engine: Engine, finished: Answer) -> dict[str, Any]:
    """The object of `run --json` for an answer that was read to its end."""
    result = answer_json(finished, engine.backend.sublayers)
    if finished.sampling.n_probs is not None:
        result["logprobs"] = logprobs_json(finished, engine.vocabulary)
    result["model"] = engine.name
    return result
