"""Where a thinking model's thoughts begin and end in its text.

Thoughts stand at the beginning of an answer, between two marks. Some templates write the opening
mark into the prompt, so that the answer begins within a thought. Nothing is taken out of a text
here: what happens to old thoughts is for the chat template to say.
"""

from __future__ import annotations

# opening and closing marks: Qwen, DeepSeek, SmolLM and GLM; Magistral; Seed
_MARKS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"))


def opening(prompt: str) -> str:
    """The beginning of the answer that a rendered prompt already holds: the mark of a thought that
    it opens, with the white space behind it; "" where it opens none."""
    bare = prompt.rstrip()
    for mark, _ in _MARKS:
        if bare.endswith(mark):
            return mark + prompt[len(bare) :]
    return ""


def closed(text: str) -> str:
    """An answer as history has it: a thought that was cut gets its end, so that a template that
    drops thoughts finds it."""
    found = _opened(text)
    if found is None:
        return text
    start, (_, end) = found
    return text if end in text[start:] else f"{text.rstrip()}\n{end}\n\n"


def _opened(text: str) -> tuple[int, tuple[str, str]] | None:
    """Where the thought that a text begins with begins, and its marks."""
    bare = text.lstrip()
    for marks in _MARKS:
        if bare.startswith(marks[0]):
            return len(text) - len(bare), marks
    return None


class ThoughtSplitter:
    """Tells thoughts from the answer in a stream, without holding anything back.

    A mark that arrives in pieces is told from its last piece on: what was shown stays shown.
    """

    def __init__(self, opening: str = "") -> None:
        """`opening`: the beginning of the answer that the prompt already holds."""
        self._text = opening
        self._end = ""  # what ends the thought
        self._decided = False  # whether the answer begins with a thought is known
        self._decide()

    def push(self, text: str) -> list[tuple[str, bool]]:
        """(text, whether it is a thought), in order; joined it is what was pushed."""
        before = len(self._text)
        if not self._decided:
            self._text += text
            self._decide()
            if not self._end:
                return [(text, False)] if text else []
        elif not self._end:
            return [(text, False)] if text else []
        else:
            self._text += text
        at = self._text.find(self._end)
        if at < 0:
            return [(text, True)] if text else []
        cut = at + len(self._end) - before
        self._end, self._text = "", ""
        return [piece for piece in ((text[:cut], True), (text[cut:], False)) if piece[0]]

    def _decide(self) -> None:
        found = _opened(self._text)
        if found is not None:
            self._end = found[1][1]
            self._decided = True
            return
        bare = self._text.lstrip()
        self._decided = not any(mark.startswith(bare) for mark, _ in _MARKS)
