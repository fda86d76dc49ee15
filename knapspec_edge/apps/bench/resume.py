"""Rows that outlive the run that made them: one JSON object per line, written when it is there.

A row that was made before counts where everything that decides about it agrees: model, library,
machine, settings, sampling, length of the answer, prompt, and what the side drafts with.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from ...closing import Closing
from ..jsonl import Record, RecordFile
from .rows import PLAIN, Run

# what has to agree -> what people call it
_COMPARED = {
    "model_fingerprint": "model",
    "library_digest": "library",
    "machine": "machine",
    "settings": "setting",
    "sampling": "sampling",
    "max_tokens": "--max-tokens",
    "prompt_digest": "prompt",
    "side_digest": "plan or draft model",
}
# How much room there is decides about nothing that is measured, and grows with what is asked for.
_FREE_SETTINGS = ("ctx_tokens",)

Key = tuple[str, str, str, int | None, int]  # side, task, prompt, context, repeat


def key_of(run: Run) -> Key:
    return (run.side, run.task, run.prompt, run.context, run.repeat)


class Rows(Closing):
    """Where rows go: into the file, if there is one, and to whoever wants to see them."""

    def __init__(
        self,
        path: Path | None,
        same: Mapping[str, Any],
        sink: Callable[[Record], None] | None = None,
    ) -> None:
        """`same`: everything about this comparison that all its rows hold.

        Raises UsageError for a file that cannot be written or holds something else.
        """
        self._same = dict(same)
        self._sink = sink
        self._file = None if path is None else RecordFile(path, "side", option="--resume")
        self._path = path

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    @property
    def repaired(self) -> str | None:
        return None if self._file is None else self._file.repaired

    def append(self, run: Run, prompt_digest: str, side_digest: str | None) -> None:
        """Raises OutputError."""
        record = {
            **run.to_json(),
            "prompt_digest": prompt_digest,
            "side_digest": side_digest,
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            **self._same,
        }
        if self._file is not None:
            self._file.append(record)
        if self._sink is not None:
            self._sink(record)

    def kept(self, wanted: Mapping[Key, tuple[str, str | None]]) -> tuple[list[Run], list[str]]:
        """(rows of the file that count, what to say about others in one line at most).

        `wanted`: of each row that is asked for the digests of its prompt and of its side.
        """
        if self._file is None:
            return [], []
        found: dict[tuple[Key, str], Run] = {}
        others: dict[Key, str] = {}  # why such a row does not count
        n_unreadable = 0
        for record in self._file:
            try:
                run = Run.from_json(record)
            except (KeyError, TypeError):
                n_unreadable += 1
                continue
            key = key_of(run)
            if key not in wanted:
                continue
            prompt_digest, side_digest = wanted[key]
            expected = {**self._same, "prompt_digest": prompt_digest, "side_digest": side_digest}
            different = [
                words
                for name, words in _COMPARED.items()
                if _comparable(name, record.get(name)) != _comparable(name, expected[name])
            ]
            if different:
                others[key] = " and ".join(different)
            else:
                # every visit needs its own plain answer
                found[key, run.visit if run.side == PLAIN else ""] = run
        done = {key for key, _ in found}
        reasons = Counter(reason for key, reason in others.items() if key not in done)
        parts = [f"{n} of another {reason}" for reason, n in reasons.most_common()]
        if n_unreadable:
            parts.append(f"{n_unreadable} of another version of this program")
        notes = [f"{self._path}: rows that do not count here: {', '.join(parts)}"] if parts else []
        return list(found.values()), notes


def _comparable(name: str, value: Any) -> Any:
    if name == "settings" and isinstance(value, dict):
        return {k: v for k, v in value.items() if k not in _FREE_SETTINGS}
    return value


def missing(wanted: Iterable[Key], kept: Iterable[Run]) -> set[Key]:
    return set(wanted) - {key_of(run) for run in kept}
