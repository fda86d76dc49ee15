"""The JSON form of statistics. Names are llama.cpp's where it has one, milliseconds throughout."""

from __future__ import annotations

from typing import Any

from ..records import Stats


def timings(stats: Stats, baseline_per_second: float | None = None) -> dict[str, Any]:
    """The `timings` object of one answer.

    `prompt_n` counts prompt tokens that were computed, `cache_n` those found in the cache.
    `accepted_lengths` counts rounds with a draft by how many tokens were accepted,
    `acceptance_by_place` is described at the function of that name; both are empty without a draft.
    `proposed_n` of the drafted tokens took no part of the model: looked up in the text, or proposed
    by a draft model. `baseline_per_second` (measured plain speed) appears only where it was
    measured.
    """
    computed = max(0, stats.prompt_tokens - stats.cached_tokens)
    result: dict[str, Any] = {
        "cache_n": stats.cached_tokens,
        "prompt_n": computed,
        "prompt_ms": round(stats.prompt_ms, 3),
        "prompt_per_second": _per_second(computed, stats.prompt_ms),
        "predicted_n": stats.completion_tokens,
        "predicted_ms": round(stats.predicted_ms, 3),
        "predicted_per_second": round(stats.predicted_per_second, 3),
        "draft_n": stats.draft_n,
        "draft_n_accepted": stats.draft_n_accepted,
        "proposed_n": stats.proposed_n,
        "proposed_n_accepted": stats.proposed_n_accepted,
        "rounds": stats.rounds,
        "draft_ms": round(stats.draft_ms, 3),
        "verify_ms": round(stats.verify_ms, 3),
        "plan_ms": round(stats.plan_ms, 3),
        "overhead_ms": round(stats.overhead_ms, 3),
        # JSON keys are strings; the histogram is in order of the accepted length.
        "accepted_lengths": {str(k): n for k, n in sorted(stats.accepted_lengths.items())},
        "acceptance_by_place": [round(p, 4) for p in acceptance_by_place(stats)],
    }
    if baseline_per_second is not None:
        result["baseline_per_second"] = round(baseline_per_second, 3)
    return result


def acceptance_by_place(stats: Stats) -> list[float]:
    """p_1..p_γ: share of the tokens verified at each place of a draft that were accepted, of those
    rounds in which all before it were. Ends with the last place that was ever reached."""
    return [
        accepted / tried
        for accepted, tried in zip(stats.accepted_at, stats.tried_at, strict=True)
        if tried
    ]


def _per_second(n: int, ms: float) -> float:
    return round(1000.0 * n / ms, 3) if ms > 0.0 else 0.0
