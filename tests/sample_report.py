"""Profile reports with known contents: each class costs what a function of the context says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from knapspec_edge.apps.profile import ProfileReport, SettingResult
from knapspec_edge.latency.classes import LayerClass
from knapspec_edge.latency.fidelity import Fidelity, ItemCount
from knapspec_edge.latency.profile import LatencyProfile, Sample
from knapspec_edge.latency.timing import Timing
from knapspec_edge.records import Kind, SubLayer

CONTEXTS = (128, 222, 512, 990, 2048)
WIDTHS = (2, 3, 4, 5, 6, 8, 12, 16)
HEAD_MS, FIXED_MS = 2.0, 1.0
TOKEN_SHARE = 0.25  # a further token of a pass, in steps


@dataclass(frozen=True)
class Class:
    """A class of sublayers and what one of them costs in ms at a context."""

    name: str
    kind: Kind
    count: int
    ms: Callable[[float], float]
    n_cells: int = 0  # a window where it is shorter than the longest context
    weight_bytes: int = 1_000_000


def attention_ms(context: float) -> float:
    return 0.05 + 0.0002 * context


ATTENTION = Class("attention", Kind.ATTENTION, 4, attention_ms, n_cells=4096)
MLP = Class("mlp", Kind.MLP, 4, lambda _: 0.25, weight_bytes=2_000_000)


def latency_profile(
    classes: Sequence[Class] = (ATTENTION, MLP),
    contexts: Sequence[int] = CONTEXTS,
    widths: Sequence[int] = WIDTHS,
    *,
    spread: float = 0.02,
    notes: tuple[str, ...] = (),
) -> LatencyProfile:
    """Every class is left out once in part and once as a whole at each context."""
    layer_classes = []
    start = 0
    for c in classes:
        members = tuple(range(start, start + c.count))
        start += c.count
        layer_classes.append(
            LayerClass(c.name, c.kind, members, c.weight_bytes, 64 if c.n_cells else 0, c.n_cells)
        )
    samples = []

    def add(context: int, width: int, skipped: tuple[int, ...], ms: float, head: bool = True):
        ticks = [ms * (1.0 + spread * k) for k in (-1.0, -0.5, 0.0, 0.5, 1.0)]
        samples.append(Sample(context, width, skipped, head, Timing.of(ticks)))

    for context in contexts:
        step_ms = HEAD_MS + FIXED_MS + sum(c.count * c.ms(context) for c in classes)
        add(context, 1, (), step_ms)
        last = classes[-1]
        without_head = step_ms - HEAD_MS
        # without logits nothing needs the last MLP either
        add(
            context, 1, (), without_head - (last.ms(context) if last.kind is Kind.MLP else 0.0),
            head=False,
        )  # fmt: skip
        for c, cls in zip(classes, layer_classes, strict=True):
            for skipped in (cls.members[: max(1, c.count // 2)], cls.members):
                add(context, 1, skipped, step_ms - len(skipped) * c.ms(context))
        for width in widths:
            add(context, width, (), step_ms * (1.0 + TOKEN_SHARE * (width - 1)))
    return LatencyProfile(
        n_sublayers=start,
        classes=tuple(layer_classes),
        limit_tokens=max(contexts),
        samples=tuple(samples),
        settings={},
        budget_seconds=10.0,
        elapsed_seconds=9.5,
        measured_at=1_700_000_000.0,
        notes=notes,
    )


def sublayers_of(profile: LatencyProfile) -> tuple[SubLayer, ...]:
    kinds = {i: c.kind for c in profile.classes for i in c.members}
    seen: dict[Kind, int] = {}
    found = []
    for i in range(profile.n_sublayers):
        found.append(SubLayer(i, seen.get(kinds[i], 0), kinds[i]))
        seen[kinds[i]] = found[-1].layer + 1
    return tuple(found)


def profile_report(profile: LatencyProfile | None = None, **changes: Any) -> ProfileReport:
    """Two settings of one model; single skips of sublayer i agree in 40 - i of 40 picks."""
    profile = profile or latency_profile()
    sublayers = sublayers_of(profile)
    counts = [ItemCount(s.index, "skip", 256, 40 - s.index, 40) for s in sublayers]
    results = (
        SettingResult("on", "f16", 4, 8, profile, ("plain",), 5.0, 5.5),
        SettingResult("off", "f16", 4, 4, profile, ("speculation",), 5.2, 4.0),
    )
    report = ProfileReport(
        model="A small model",
        path="/models/small.gguf",
        n_params=134_515_008,
        size_bytes=96_600_000,
        device={
            "devices": ["CUDA0", "CPU"],
            "offloaded_layers": 3,
            "n_layers": 4,
            "partial": True,
            "unified_memory": False,
        },
        sublayers=sublayers,
        expected_tokens=1024,
        results=results,
        fidelity=Fidelity(tuple(counts), 39, 40, 2),
        threads_ms={
            "4": {"step_ms": 5.0, "pass_ms": 9.0},
            "2": {"step_ms": 8.0, "pass_ms": 16.0},
        },
        elapsed_seconds=21.4,
        budget_seconds=20.0,
        kept_in="/cache/measurements",
        notes=("the machine was not at rest",),
    )
    return replace(report, **changes)
