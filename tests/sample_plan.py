"""Plan reports with known contents, from measurements that never happened."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sample_report import ATTENTION, MLP, Class, latency_profile

from knapspec_edge.apps.plan import PlanReport
from knapspec_edge.config import DEFAULTS, Config
from knapspec_edge.latency.classes import LayerClass
from knapspec_edge.latency.costs import Costs
from knapspec_edge.latency.fidelity import Fidelity, ItemCount, Text
from knapspec_edge.latency.profile import LatencyProfile
from knapspec_edge.latency.rounds import RoundTiming
from knapspec_edge.records import Kind, Plan, SubLayer
from knapspec_edge.search.acceptance import Judgement
from knapspec_edge.search.judged import Finalist, Measured
from knapspec_edge.search.outlook import Outlook, outlook
from knapspec_edge.search.planner import Decision, choose
from knapspec_edge.search.throughput import Window

CONTEXT = 512
SETTINGS = {"threads": 4, "threads_batch": 8, "flash_attn": "on", "kv_type": "f16"}


def alternating(n_layer: int) -> tuple[tuple[SubLayer, ...], LatencyProfile]:
    """Attention and MLP in turn, as in a real model."""
    profile = latency_profile((replace(ATTENTION, count=n_layer), replace(MLP, count=n_layer)))
    attention, mlp = profile.classes
    # execution order: the classes of the profile are interleaved
    place = {i: 2 * i if i < n_layer else 2 * (i - n_layer) + 1 for i in range(2 * n_layer)}

    def moved(cls: LayerClass) -> LayerClass:
        return replace(cls, members=tuple(place[i] for i in cls.members))

    samples = tuple(
        replace(s, skipped=tuple(sorted(place[i] for i in s.skipped))) for s in profile.samples
    )
    kinds = (Kind.ATTENTION, Kind.MLP)
    sublayers = tuple(SubLayer(i, i // 2, kinds[i % 2]) for i in range(2 * n_layer))
    return sublayers, replace(profile, classes=(moved(attention), moved(mlp)), samples=samples)


def window(right: int, total: int) -> Window:
    """Misses are spread evenly; the draft is always sure."""
    step = total / max(1, total - right)
    misses = {int((n + 0.5) * step) for n in range(total - right)}
    return Window(tuple(i not in misses for i in range(total)), (0.9,) * total)


def measured_of(
    profile: LatencyProfile, sublayers: Sequence[SubLayer], unprobed: Sequence[int] = ()
) -> Measured:
    """Single skips agree in 48 - (i mod 7) of 48 picks; the first sublayer is indispensable."""
    counts = tuple(
        ItemCount(s.index, "skip", CONTEXT, 3 if s.index == 0 else 48 - s.index % 7, 48)
        for s in sublayers
        if s.index not in unprobed
    )
    fidelity = Fidelity(counts, 45, 47, 1, ("a note of the measurement",))
    return Measured(Costs(profile), Text((1,) * CONTEXT, (1,) * 48), fidelity)


def finalist(
    n_sublayers: int,
    skipped: Sequence[int],
    right: int,
    total: int = 112,
    *,
    draft_step_ms: float | None = None,
    verify_ms: float = 0.0,
    plain_step_ms: float = 0.0,
) -> Finalist:
    judgement = Judgement(Plan.skipping(n_sublayers, list(skipped)), (window(right, total),))
    if draft_step_ms is None:
        return Finalist(judgement)
    return Finalist(judgement, RoundTiming(4, draft_step_ms, verify_ms, plain_step_ms))


def decision_of(
    finalists: Sequence[Finalist],
    measured: Measured,
    sublayers: tuple[SubLayer, ...],
    config: Config = DEFAULTS,
) -> Decision:
    return choose(measured, finalists, sublayers, config)


def sample_outlook(n_layer: int = 8, *, pays: bool = True, **changes: Any) -> Outlook:
    """Of three judged plans two were timed: one skips most, the other little."""
    sublayers, profile = alternating(n_layer)
    n = len(sublayers)
    measured = measured_of(profile, sublayers, unprobed=(3, n - 2))
    step_ms = measured.step_ms
    rounds = {"plain_step_ms": step_ms, "verify_ms": (1.3 if pays else 2.5) * step_ms}
    many, few, some = range(2, n - 1), range(4, 6), range(1, n, 2)
    finalists = [
        finalist(n, many, 100, draft_step_ms=0.35 * step_ms, **rounds),
        finalist(n, few, 108, draft_step_ms=0.75 * step_ms, **rounds),
        finalist(n, some, 40, 48),
    ]
    found = outlook(decision_of(finalists, measured, sublayers), sublayers, SETTINGS)
    return replace(found, **changes)


def block_outlook(n_layer: int = 4) -> Outlook:
    """A model of parallel residuals: one sublayer per layer."""
    profile = latency_profile((Class("block", Kind.BLOCK, n_layer, lambda _: 1.0, n_cells=4096),))
    sublayers = tuple(SubLayer(i, i, Kind.BLOCK) for i in range(n_layer))
    measured = measured_of(profile, sublayers)
    finalists = [finalist(n_layer, [1, 2], 90)]
    return outlook(decision_of(finalists, measured, sublayers), sublayers, {})


def plan_report(found: Outlook | None = None, **changes: Any) -> PlanReport:
    found = found or sample_outlook()
    report = PlanReport(
        model="A small model",
        path="/models/small.gguf",
        architecture="llama",
        fingerprint="f" * 16,
        device="4 of 4 layers on CUDA0",
        settings_reason="flash attention on, 4/8 threads: the best measured",
        outlook=found,
        elapsed_seconds=21.4,
        shown_at=found.measured_at + 7000.0,
    )
    return replace(report, **changes)
