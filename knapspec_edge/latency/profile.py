"""What was measured about the cost of passes: records and their JSON form, no fitting."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ..records import FULL, SKIP, Kind, Mode, ModeKind, Plan, parse_mode
from .classes import LayerClass
from .store import MAX_COUNT
from .timing import Timing


@dataclass(frozen=True)
class Sample:
    """One kind of pass at one context length.

    Its time is what repeated visits saw relative to a plain step at the same place and moment,
    times the usual plain step there: a slow drift of the machine cancels out.
    """

    context_tokens: int  # in the cache before the pass
    width: int  # tokens in the pass
    skipped: tuple[int, ...]  # sublayers left out
    head: bool  # whether logits were computed and a token was picked
    timing: Timing
    windowed: tuple[int, ...] = ()  # sublayers whose attention had this window
    window: Mode | None = None
    head_rows: int = 0  # of a short head; 0: the whole one

    @property
    def is_full(self) -> bool:
        """Whether nothing was left out."""
        return not self.skipped and not self.windowed and not self.head_rows


@dataclass(frozen=True)
class LatencyProfile:
    """One measurement of a model under one setting of its context."""

    n_sublayers: int
    classes: tuple[LayerClass, ...]
    limit_tokens: int  # longest context that was measured
    samples: tuple[Sample, ...]
    settings: dict[str, Any]
    budget_seconds: float
    elapsed_seconds: float
    measured_at: float  # seconds since 1970
    notes: tuple[str, ...] = field(default=())
    # What was to be measured: a slow model is measured at fewer contexts than that, see notes.
    asked_tokens: int = 0  # size of the context, or the limit that was set
    asked_width: int = 0  # widest pass

    def covers(self, n_ctx: int, width: int) -> bool:
        """Whether it was meant to reach so far: measuring again would not tell more."""
        return self.asked_tokens >= n_ctx and self.asked_width >= width

    @property
    def contexts(self) -> tuple[int, ...]:
        """Context lengths at which a plain step was timed, ascending."""
        return tuple(s.context_tokens for s in self.steps())

    @property
    def widths(self) -> tuple[int, ...]:
        """Widths of full passes that were timed anywhere, ascending, 1 included."""
        found = {s.width for s in self.samples if s.is_full and s.head}
        return tuple(sorted(found | {1}))

    def steps(self) -> list[Sample]:
        """Plain steps, by context."""
        plain = [s for s in self.samples if s.width == 1 and s.head and s.is_full]
        return sorted(plain, key=lambda s: s.context_tokens)

    @property
    def spread(self) -> float:
        """The median over the contexts of a plain step's quartile distance over its median."""
        spreads = sorted(s.timing.relative_spread for s in self.steps())
        return spreads[len(spreads) // 2] if spreads else 0.0

    def to_json(self) -> dict[str, Any]:
        """Plain data. Sets of skipped sublayers are hexadecimal numbers, one bit each."""
        data = asdict(self)
        data["classes"] = [{**asdict(c), "kind": c.kind.value} for c in self.classes]
        data["samples"] = [
            {
                "context_tokens": s.context_tokens,
                "width": s.width,
                "skipped": _to_hex(s.skipped),
                "head": s.head,
                "timing": asdict(s.timing),
                "windowed": _to_hex(s.windowed),
                "window": None if s.window is None else str(s.window),
                "head_rows": s.head_rows,
            }
            for s in self.samples
        ]
        return data

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> LatencyProfile:
        """The inverse of to_json. Raises one of store.INVALID for anything else."""
        n = int(data["n_sublayers"])
        classes = tuple(
            LayerClass(
                **{**c, "kind": Kind(c["kind"]), "members": tuple(int(i) for i in c["members"])}
            )
            for c in data["classes"]
        )
        samples = tuple(
            Sample(
                int(s["context_tokens"]),
                int(s["width"]),
                _from_hex(s["skipped"]),
                bool(s["head"]),
                _timing(s["timing"]),
                # profiles of earlier releases have neither windows nor short heads
                _from_hex(s.get("windowed", "0")),
                None if s.get("window") is None else parse_mode(s["window"]),
                int(s.get("head_rows", 0)),
            )
            for s in data["samples"]
        )
        if not all(
            1 <= s.width <= MAX_COUNT
            and 0 <= s.context_tokens <= MAX_COUNT
            and 0 <= s.head_rows <= MAX_COUNT
            for s in samples
        ):
            raise ValueError("a pass of no tokens, or behind an impossible number of them")
        covered = sorted(i for c in classes for i in c.members)
        if covered != list(range(n)):
            raise ValueError("the classes do not cover the sublayers")
        if any(s.skipped and s.skipped[-1] >= n for s in samples):
            raise ValueError("a sample skips a sublayer that does not exist")
        if any(s.windowed and s.windowed[-1] >= n for s in samples):
            raise ValueError("a sample has a window on a sublayer that does not exist")
        for s in samples:
            is_window = s.window is not None and s.window.kind is ModeKind.WINDOW
            if is_window != bool(s.windowed) or set(s.windowed) & set(s.skipped):
                raise ValueError("a sample has a window without a place, or on what is left out")
        if not any(s.width == 1 and s.head and s.is_full for s in samples):
            raise ValueError("no plain step was measured")
        return cls(
            n_sublayers=n,
            classes=classes,
            limit_tokens=int(data["limit_tokens"]),
            samples=samples,
            settings=dict(data["settings"]),
            budget_seconds=float(data["budget_seconds"]),
            elapsed_seconds=float(data["elapsed_seconds"]),
            measured_at=float(data["measured_at"]),
            notes=tuple(str(note) for note in data["notes"]),
            asked_tokens=int(data["asked_tokens"]),
            asked_width=int(data["asked_width"]),
        )


def plan_of(sample: Sample, n_sublayers: int) -> Plan | None:
    """The plan a sample was measured under; None is the full model."""
    return plan_with(n_sublayers, sample.skipped, sample.windowed, sample.window, sample.head_rows)


def plan_with(
    n_sublayers: int,
    skipped: Sequence[int],
    windowed: Sequence[int],
    window: Mode | None,
    head_rows: int = 0,
) -> Plan | None:
    """The plan that skips some sublayers and has a window on others; None is the full model."""
    if not skipped and not windowed and not head_rows:
        return None
    modes = [FULL] * n_sublayers
    for i in skipped:
        modes[i] = SKIP
    for i in windowed:
        modes[i] = window or FULL
    return Plan(tuple(modes), head_rows)


def _timing(data: Mapping[str, Any]) -> Timing:
    """Raises one of store.INVALID for anything that was never measured."""
    timing = Timing(
        float(data["median_ms"]),
        float(data["low_ms"]),
        float(data["high_ms"]),
        int(data["samples"]),
        int(data["dropped"]),
    )
    times = (timing.low_ms, timing.median_ms, timing.high_ms)
    if not (timing.median_ms > 0.0 and all(map(math.isfinite, times)) and timing.samples > 0):
        raise ValueError("a time is impossible")
    return timing


def _to_hex(indices: Sequence[int]) -> str:
    return f"{sum(1 << i for i in indices):x}"


def _from_hex(text: str) -> tuple[int, ...]:
    bits = int(text, 16)
    if bits < 0:
        raise ValueError("a set of sublayers is negative")
    return tuple(i for i in range(bits.bit_length()) if bits >> i & 1)
