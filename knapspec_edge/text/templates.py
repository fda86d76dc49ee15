"""Chat templates: messages to token ids, with the contents kept apart from the template's own text.

A control-token string in a message (say an end-of-turn marker somebody pasted) must stay text, yet
tokenization must otherwise be that of the rendered prompt as a whole. So the template is rendered
with unguessable placeholders for the contents; what lies between placeholders is template text, and
only there control tokens are looked for. Everything between two control tokens, template text and
contents joined, is tokenized in one piece with control tokens off, which is what llama.cpp's own
tokenizer does with the text between two control tokens: merges and prefix spaces come out the same.

Rendering itself is llama-cpp-python's Jinja formatter.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any

from .. import arguments
from ..errors import ModelError, UsageError
from ..folders import expanded, read_at_most
from ..native import library
from .builtin_templates import BUILTIN
from .vocabulary import Vocabulary, start_prompt

Message = dict[str, str]  # {"role": "system" | "user" | "assistant", "content": text}

_WHITESPACE = " \t\n\v\f\r"  # C isspace, which llama.cpp's token attributes strip by
_MAX_TEMPLATE_BYTES = 4 << 20
# what templates call it: Qwen, SmolLM and GLM; DeepSeek and Granite
_THINKING_SWITCHES = ("enable_thinking", "thinking")


class _Refused(Exception):
    """The template ran and did not take these messages (raise_exception, failing expression)."""


@dataclass(frozen=True)
class Rendered:
    """A prompt ready for prefill."""

    tokens: list[int]
    text: str
    notices: tuple[str, ...] = ()  # what had to be changed to please the template


@dataclass(frozen=True)
class _Piece:
    text: str
    is_template: bool


class ChatTemplate:
    """One chat template bound to one vocabulary.

    Raises ModelError where the template cannot be compiled; `origin` names it in messages.
    `ends` are the texts that end an answer; those the vocabulary has as control tokens are
    `extra_end_tokens`, the others stop strings, `stop`.
    """

    def __init__(
        self, source: str, vocabulary: Vocabulary, *, origin: str, ends: Sequence[str] = ()
    ) -> None:
        self.source = source
        self.origin = origin
        self._vocabulary = vocabulary
        self._strips: dict[int, tuple[bool, bool]] = {}
        self._renderer = _Renderer(source, vocabulary, origin)
        self._think: bool | None = None  # of the conversation that is being rendered
        end_tokens: list[int] = []
        stop: list[str] = []
        for end in ends:
            ids = vocabulary.tokenize(end, parse_special=True)
            if len(ids) == 1 and vocabulary.is_control(ids[0]):
                end_tokens += ids
            else:
                stop.append(end)
        self.extra_end_tokens = frozenset(end_tokens)
        self.stop = tuple(stop)

    @cached_property
    def can_switch_thinking(self) -> bool:
        """Whether the template asks whether to think, found by rendering it both ways."""
        question = [{"role": "user", "content": _placeholder()}]
        self._renderer.now = datetime.now()
        try:
            return len({self._rendered(question, True, think) for think in (True, False)}) > 1
        except _Refused:
            return False

    def check_think(self, think: bool | None) -> None:
        """Raises UsageError, one line, where thinking is to be switched and cannot be."""
        if think is not None and not self.can_switch_thinking:
            raise UsageError(
                f"{self.origin} has no switch for thinking; leave --think and --no-think away"
            )

    def apply(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        now: datetime | None = None,
        think: bool | None = None,
    ) -> Rendered:
        """Token ids of a conversation, BOS included exactly once where the model wants one.

        `now`: the time for templates that write the date (None: the real one). `think`: whether the
        answer is to begin with thoughts (None: what the template does by itself).

        A system prompt the template refuses or leaves out goes in front of the first user message,
        and `notices` says so. Raises ModelError, one line, where the template takes neither, and
        UsageError where it has no switch for `think`.
        """
        if not messages:
            raise UsageError("a conversation needs at least one message")
        self.check_think(think)
        self._think = think
        chosen = [{"role": m["role"], "content": m["content"]} for m in messages]
        self._renderer.now = now or datetime.now()
        try:
            pieces = self._pieces(chosen, add_generation_prompt)
            notices: tuple[str, ...] = ()
        except _Refused as refusal:
            folded = _fold_system(chosen)
            if folded is None:
                raise ModelError(self._refusal_line(refusal)) from None
            try:
                pieces = self._pieces(folded, add_generation_prompt)
            except _Refused:
                raise ModelError(self._refusal_line(refusal)) from None
            notices = (
                f"{self.origin} takes no system prompt; it was put in front of the first message",
            )
        tokens = start_prompt(self._vocabulary, self._tokenize(pieces))
        return Rendered(tokens, "".join(piece.text for piece in pieces), notices)

    def _refusal_line(self, refusal: _Refused) -> str:
        return (
            f"{self.origin} refused the conversation ({_one_line(refusal)}); "
            "choose another with --template NAME or FILE"
        )

    # -- rendering with placeholders

    def _render(self, messages: list[Message], add_generation_prompt: bool) -> str:
        return self._rendered(messages, add_generation_prompt, self._think)

    def _rendered(
        self, messages: list[Message], add_generation_prompt: bool, think: bool | None
    ) -> str:
        variables = {} if think is None else dict.fromkeys(_THINKING_SWITCHES, think)
        return self._renderer.render(messages, add_generation_prompt, variables)

    def _pieces(self, messages: list[Message], add_generation_prompt: bool) -> list[_Piece]:
        """The rendered prompt, cut into template text and contents.

        Raises _Refused where the template does, or leaves the system prompt out.
        """
        real = self._render(messages, add_generation_prompt)
        marks = {_placeholder(): m["content"] for m in messages if m["content"]}
        by_content = iter(marks)
        marked_messages = [
            {"role": m["role"], "content": next(by_content) if m["content"] else ""}
            for m in messages
        ]
        try:
            marked = self._render(marked_messages, add_generation_prompt)
        except _Refused:  # it looks into the contents
            return self._pieces_around_controls(messages, add_generation_prompt)
        if messages[0]["role"] == "system" and messages[0]["content"].strip():
            system_mark = marked_messages[0]["content"]
            if system_mark not in marked and messages[0]["content"].strip() not in real:
                raise _Refused("it leaves the system prompt out")
        pieces = _split(marked, marks)
        filled = _fill(pieces, marks, real)
        if filled is None:
            return self._pieces_around_controls(messages, add_generation_prompt)
        return filled

    def _pieces_around_controls(
        self, messages: list[Message], add_generation_prompt: bool
    ) -> list[_Piece]:
        """For templates that take contents apart (cut out reasoning, say): placeholders stand only
        for the control-token strings within contents, so the template sees the rest as it is."""
        marks: dict[str, str] = {}
        defused = []
        for message in messages:
            content = ""
            for text, token in self._find_controls(message["content"]):
                if token is None:
                    content += text
                else:
                    mark = _placeholder()
                    marks[mark] = text
                    content += mark
            defused.append({"role": message["role"], "content": content})
        rendered = self._render(defused, add_generation_prompt)
        return [
            _Piece(marks[piece], False) if piece in marks else _Piece(piece, True)
            for piece in _split(rendered, marks)
        ]

    # -- tokenization

    def _tokenize(self, pieces: Sequence[_Piece]) -> list[int]:
        tokens: list[int] = []
        plain = ""
        strip_left = False  # the control token before takes the white space after it

        def end_plain(strip_right: bool) -> None:
            nonlocal plain
            if strip_left:
                plain = plain.lstrip(_WHITESPACE)
            if strip_right:
                plain = plain.rstrip(_WHITESPACE)
            if plain:
                tokens.extend(self._vocabulary.tokenize(plain, parse_special=False))
            plain = ""

        for piece in pieces:
            if not piece.is_template:
                plain += piece.text
                continue
            for text, token in self._find_controls(piece.text):
                if token is None:
                    plain += text
                    continue
                strips_before, strips_after = self._strips_around(token, text)
                end_plain(strips_before)
                tokens.append(token)
                strip_left = strips_after
        end_plain(False)
        return tokens

    def _find_controls(self, text: str) -> list[tuple[str, int | None]]:
        """Cut text at the control tokens the tokenizer sees: (text, control token or None)."""
        if not text:
            return []
        parts: list[tuple[str, int | None]] = []
        done = 0
        for token in self._vocabulary.tokenize(text, parse_special=True):
            if not self._vocabulary.is_control(token):
                continue
            name = self._vocabulary.token_bytes(token, special=True).decode("utf-8", "replace")
            at = text.find(name, done) if name else -1
            if at < 0:  # a token without text of its own here, such as <unk> for an unknown sign
                continue
            if at > done:
                parts.append((text[done:at], None))
            parts.append((name, token))
            done = at + len(name)
        if done < len(text):
            parts.append((text[done:], None))
        return parts

    def _strips_around(self, token: int, name: str) -> tuple[bool, bool]:
        """Whether the tokenizer drops white space before / after this control token (the lstrip
        and rstrip attributes), found by asking it."""
        if token not in self._strips:
            ids = self._vocabulary.tokenize
            plain = ids("a", parse_special=False)
            self._strips[token] = (
                ids("a " + name, parse_special=True) == [*plain, token],
                ids(name + " a", parse_special=True) == [token, *plain]
                # with a prefix space the two spellings may be one anyway
                and ids(" a", parse_special=False) != plain,
            )
        return self._strips[token]


def choose_template(vocabulary: Vocabulary, override: str | None = None) -> ChatTemplate | None:
    """The template to chat with: the override (a built-in name or a file), else the GGUF's own.

    None where the model has none. Raises UsageError for an unknown name or unreadable file,
    ModelError for a template that does not compile.
    """
    if override is not None:
        builtin = BUILTIN.get(override.strip().lower())
        if builtin is not None:
            return ChatTemplate(
                builtin.source,
                vocabulary,
                origin=f"the built-in template {override.strip().lower()}",
                ends=builtin.ends,
            )
        return ChatTemplate(
            _read_template(override), vocabulary, origin=f"the template file {override}"
        )
    source = vocabulary.chat_template
    if not source or not source.strip():
        return None
    return ChatTemplate(source, vocabulary, origin="the model's chat template")


def template_identity(override: str) -> str:
    """What tells an override from others: the name of a built-in template, else a digest of the
    file. Raises UsageError."""
    name = override.strip().lower()
    if name in BUILTIN:
        return name
    return hashlib.sha256(_read_template(override).encode()).hexdigest()[:16]


def _read_template(path: str) -> str:
    file = expanded(path)
    try:
        text = read_at_most(file, _MAX_TEMPLATE_BYTES).decode("utf-8")
        return text.replace("\r\n", "\n").replace("\r", "\n")
    except FileNotFoundError:
        raise UsageError(
            f"no chat template {arguments.shown(path)}: neither a file nor one of "
            f"{', '.join(BUILTIN)}"
        ) from None
    except OSError as error:
        raise UsageError(
            f"cannot read the template file {arguments.cut(path)}: {error.strerror or error}"
        ) from None
    except UnicodeDecodeError:
        raise UsageError(f"the template file {path} is not UTF-8 text") from None
    except ValueError:
        raise UsageError(f"{arguments.shown(path)} cannot be the name of a file") from None


class _Renderer:
    """llama-cpp-python's Jinja formatter around one template.

    Raises ModelError, one line, where the template cannot be compiled.
    """

    def __init__(self, source: str, vocabulary: Vocabulary, origin: str) -> None:
        library.load()  # the import below must find our llama.cpp, and no other
        from jinja2 import TemplateSyntaxError
        from llama_cpp.llama_chat_format import Jinja2ChatFormatter

        def text_of(token: int | None) -> str:
            if token is None:
                return ""
            return vocabulary.token_bytes(token, special=True).decode("utf-8", "replace")

        self.now = datetime.now()
        try:
            self._formatter: Any = Jinja2ChatFormatter(
                template=source,
                eos_token=text_of(vocabulary.eos_token),
                bos_token=text_of(vocabulary.bos_token),
            )
        except Exception as error:  # Jinja's sandbox has several classes for what it refuses
            where = f"line {error.lineno}: " if isinstance(error, TemplateSyntaxError) else ""
            raise ModelError(
                f"{origin} cannot be read ({where}{_one_line(error)}); "
                "choose another with --template NAME or FILE"
            ) from None
        # One moment for all renderings of a prompt, so that the clock cannot make them differ.
        setattr(self._formatter, "strftime_now", self._strftime)  # noqa: B010  (a static method)

    def _strftime(self, form: str) -> str:
        return self.now.strftime(form)

    def render(
        self, messages: list[Message], add_generation_prompt: bool, variables: Mapping[str, bool]
    ) -> str:
        """The prompt's text. Raises _Refused."""
        self._formatter.add_generation_prompt = add_generation_prompt
        try:
            try:
                return str(self._formatter(messages=messages, **variables).prompt)
            except TypeError:  # templates made for tools loop over them without asking
                return str(self._formatter(messages=messages, tools=[], **variables).prompt)
        except Exception as error:  # anything a template's own code can raise
            raise _Refused(_one_line(error)) from None


def _fold_system(messages: list[Message]) -> list[Message] | None:
    """The conversation with its system prompt in front of the first user message, or None."""
    if len(messages) < 2 or messages[0]["role"] != "system" or messages[1]["role"] != "user":
        return None
    first = messages[0]["content"] + "\n\n" + messages[1]["content"]
    return [{"role": "user", "content": first}, *messages[2:]]


_PLACEHOLDER = re.compile("(?=(x[0-9a-f]{32}x))")


def _placeholder() -> str:
    # Letters and digits only: no template filter or tokenizer rule changes it.
    return "x" + secrets.token_hex(16) + "x"


def _split(text: str, marks: dict[str, str]) -> list[str]:
    """Cut text at every placeholder; placeholders are parts of their own, empty parts left out."""
    parts, at = [], 0
    # every place is looked at, as text before a placeholder may look like the beginning of one; one
    # pattern for all, as one of them all takes a time that grows with their number at each place
    for match in _PLACEHOLDER.finditer(text):
        if match[1] in marks and match.start() >= at:
            parts += [text[at : match.start()], match[1]]
            at = match.end(1)
    return [part for part in (*parts, text[at:]) if part]


def _fill(parts: Sequence[str], marks: dict[str, str], real: str) -> list[_Piece] | None:
    """Put contents, or their stripped forms, in place of placeholders so that `real` comes out.

    None where that is impossible: the template does something else with the contents.
    """
    # came_from[i]: every offset in `real` that parts[:i] can reach -> (offset before, text used)
    came_from: list[dict[int, tuple[int, str]]] = [{0: (0, "")}]
    for part in parts:
        content = marks.get(part)
        forms = (
            (part,)
            if content is None
            else (content, content.strip(), content.rstrip(), content.lstrip())
        )
        reached: dict[int, tuple[int, str]] = {}
        for at in came_from[-1]:
            for form in forms:
                if real.startswith(form, at):
                    reached.setdefault(at + len(form), (at, form))
        came_from.append(reached)
    at = len(real)
    if at not in came_from[-1]:
        return None
    pieces: list[_Piece] = []
    for part, reached in zip(reversed(parts), reversed(came_from), strict=False):
        at, text = reached[at]
        pieces.append(_Piece(text, part not in marks))
    return pieces[::-1]


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
