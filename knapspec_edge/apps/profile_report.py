"""How a profile is shown: sections of text and tables for people, one JSON object for programs.

`sections` decides what is said; report lays it out for a terminal, and plots put the same sections
into a page.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ..latency.classes import LayerClass
from ..latency.costs import ClassCost, Costs
from ..latency.fidelity import Fidelity
from ..latency.profile import Sample
from ..latency.profiler import INTERRUPTED
from ..latency.regression import Line, fit_line, t95
from ..records import Kind, Mode, SubLayer
from .profile import ProfileReport, SettingResult
from .report import (
    Facts,
    Section,
    Table,
    clean,
    clean_pairs,
    counted,
    duration,
    finite,
    kind_name,
    laid_out,
    sig,
)

# Widths of the verification table; all that were measured are in the JSON form.
SHOWN_WIDTHS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32)
# More kinds of sublayers than this share their columns and curves with others of their kind.
MAX_GROUPS = 4
_EXTREMES = 5  # most harmless and most harmful sublayers that are named


@dataclass(frozen=True)
class Group:
    """Classes of sublayers that are shown together. Times are those of an average member."""

    name: str  # "attention", "MLP A", "attention, window"
    description: str  # how many there are and what they work on
    kind: Kind
    members: tuple[int, ...]
    points: tuple[tuple[int, float, float], ...]  # (context in tokens, ms, standard error in ms)
    line: Line
    is_line: bool
    grows: bool  # reads more of the cache at a longer context, so its slope is shown in any case
    window_tokens: int  # 0: none within the measured contexts
    ms: Callable[[float], float]  # fitted time by context in tokens


def groups_of(costs: Costs) -> tuple[Group, ...]:
    """The classes of a profile; where there are more than MAX_GROUPS, one group per kind and kind
    of cache (with a sliding window or without), and at last one per kind."""
    single = [[cost] for cost in costs.class_costs]
    if len(single) <= MAX_GROUPS:
        return tuple(_group(costs, part, part[0].layer_class.name) for part in single)
    by_window = _parts(costs, lambda c: (c.kind, _window(costs, c) > 0))
    parts = by_window if len(by_window) <= MAX_GROUPS else _parts(costs, lambda c: (c.kind, False))
    windowed = {kind for kind, has_window in parts if has_window}
    return tuple(
        _group(
            costs,
            part,
            kind.value + (", window" if has_window else ", full" if kind in windowed else ""),
        )
        for (kind, has_window), part in parts.items()
    )


def _parts(
    costs: Costs, key: Callable[[LayerClass], tuple[Kind, bool]]
) -> dict[tuple[Kind, bool], list[ClassCost]]:
    parts: dict[tuple[Kind, bool], list[ClassCost]] = {}
    for cost in costs.class_costs:
        parts.setdefault(key(cost.layer_class), []).append(cost)
    return parts


def _window(costs: Costs, layer_class: LayerClass) -> int:
    """Cells of a sliding window that is shorter than the longest measured context, else 0."""
    cells = layer_class.n_cells
    return cells if 0 < cells < costs.profile.limit_tokens else 0


def _group(costs: Costs, parts: Sequence[ClassCost], name: str) -> Group:
    classes = [part.layer_class for part in parts]
    counts = [len(c.members) for c in classes]
    total = sum(counts)
    shared = sorted(set.intersection(*({x for x, _, _ in part.points} for part in parts)))
    points = []
    for context in shared:
        own = [next(p for p in part.points if p[0] == context) for part in parts]
        mean = sum(n * ms for n, (_, ms, _) in zip(counts, own, strict=True)) / total
        error = math.hypot(*(n * e for n, (_, _, e) in zip(counts, own, strict=True))) / total
        points.append((context, mean, error))
    if len(parts) == 1 or not points:
        line = parts[0].line
    else:
        x, y, e = (np.array(column, dtype=np.float64) for column in zip(*points, strict=True))
        line = fit_line(x, y, np.maximum(1e-9, e))
    kind = classes[0].kind
    windows = {_window(costs, c) for c in classes}
    window = windows.pop() if len(windows) == 1 else 0
    members = tuple(sorted(i for c in classes for i in c.members))

    def ms(context: float) -> float:
        own = [costs.saving_ms(c.members[0], context) for c in classes]
        return sum(n * t for n, t in zip(counts, own, strict=True)) / total

    return Group(
        name.replace("mlp", "MLP"),
        _describe(classes, members, window),
        kind,
        members,
        tuple(points),
        line,
        all(part.is_line for part in parts),
        any(c.cell_bytes and not _window(costs, c) for c in classes),
        window,
        ms,
    )


def _describe(classes: Sequence[LayerClass], members: tuple[int, ...], window: int) -> str:
    weights = sum(len(c.members) * c.weight_bytes for c in classes) / len(members)
    parts = [counted(len(members), "sublayer")]
    if weights:
        parts.append(f"{_bytes(weights)} of weights each")
    if window:
        parts.append(f"a window of {window:,} cells")
    experts = {(c.n_experts_used, c.n_experts) for c in classes if c.n_experts}
    parts += [f"{used} of {n} experts" for used, n in sorted(experts)]
    return ", ".join(parts)


# -- what is said


def sections(report: ProfileReport) -> list[Section]:
    """The report for people, in order of reading. All text is free of control characters."""
    found = [_overview(report)]
    for result in report.results:
        found.append(_setting(report, result))
    if report.fidelity.counts:
        found.append(_contributions(report))
    closing = _closing(report)
    if closing:
        found.append(Section("Notes", (Facts(tuple(("", note) for note in closing)),)))
    return found


def title(report: ProfileReport) -> str:
    """Model and where it runs, in one line."""
    devices = clean(", ".join(str(d) for d in report.device.get("devices", ())))
    return f"{clean(report.model)} on {devices}" if devices else clean(report.model)


def setting_name(result: SettingResult) -> str:
    """One measured setting, in words."""
    return (
        f"flash attention {clean(result.flash_attn)}, {clean(result.kv_type)} keys and values, "
        + _threads(result)
    )


def _short_name(report: ProfileReport, result: SettingResult) -> str:
    """What tells a setting from the others of the same report."""
    parts = []
    if len({r.flash_attn for r in report.results}) > 1:
        parts.append(f"flash attention {clean(result.flash_attn)}")
    if len({r.kv_type for r in report.results}) > 1:
        parts.append(f"{clean(result.kv_type)} keys and values")
    if len({(r.threads, r.threads_batch) for r in report.results}) > 1:
        parts.append(_threads(result))
    return ", ".join(parts) or setting_name(result)


def _threads(result: SettingResult) -> str:
    if result.threads == result.threads_batch:
        return counted(result.threads, "thread")
    return f"{counted(result.threads, 'thread')} ({result.threads_batch} for several tokens)"


def _why_not_kept(report: ProfileReport) -> str:
    if any(INTERRUPTED in result.profile.notes for result in report.results):
        return "interrupted too early; it will be measured again"
    return "the cache folder could not be written; it will be measured again"


def _overview(report: ProfileReport) -> Section:
    device = report.device
    devices = ", ".join(str(d) for d in device.get("devices", ())) or "unknown"
    if device.get("offloaded_layers") is not None and device.get("n_layers"):
        devices += f"; {device['offloaded_layers']} of {device['n_layers']} layers on a GPU"
        if device.get("partial"):
            devices += ", the rest on the CPU"
    if device.get("unified_memory"):
        devices += "; unified memory"
    kinds: dict[Kind, int] = {}
    for sublayer in report.sublayers:
        kinds[sublayer.kind] = kinds.get(sublayer.kind, 0) + 1
    size = f"{_bytes(report.size_bytes)}, {_number(report.n_params)} parameters; "
    size += ", ".join(f"{n} {kind_name(kind)}" for kind, n in kinds.items()) + " sublayers"
    pairs = [("model", f"{report.model} ({size})"), ("file", report.path), ("device", devices)]
    if len(report.threads_ms) > 1:
        pairs.append(("threads", _threads_line(report.threads_ms)))
    took = f"{duration(report.elapsed_seconds)} of a budget of {duration(report.budget_seconds)}"
    pairs.append(("measured", took))
    pairs.append(
        ("kept in", report.kept_in)
        if report.kept_in is not None
        else ("not kept", _why_not_kept(report))
    )
    parts: list[Table | Facts] = [Facts(clean_pairs(pairs))]
    comparison = _comparison(report)
    if comparison.pairs:
        parts.append(comparison)
    head = "What passes cost on this machine"
    if report.interrupted:
        head += " (interrupted: from what was measured until then)"
    return Section(head, tuple(parts))


def _threads_line(threads_ms: dict[str, dict[str, float]]) -> str:
    parts = []
    for threads, times in threads_ms.items():
        own = [f"step {sig(times['step_ms'])} ms"] if "step_ms" in times else []
        own += [f"pass of several {sig(times['pass_ms'])} ms"] if "pass_ms" in times else []
        parts.append(f"{threads}: {', '.join(own)}")
    return "; ".join(parts)


def _comparison(report: ProfileReport) -> Facts:
    """Which setting is best for what, and by how much."""
    pairs = []
    for purpose, label in (("plain", "plain decoding"), ("speculation", "speculation")):
        known = [r for r in report.results if _is_known(r.plain_ms, r.speculation_ms)]
        marked = [r for r in known if purpose in r.best_for]
        if not marked:
            continue
        if purpose == "speculation" and not report.fidelity.counts:
            pairs.append((label, "not known: what sublayers contribute was not measured"))
            continue
        best = marked[0]
        text = f"{setting_name(best)}: {_per_second(best.plain_ms)}"
        if purpose == "speculation":
            text = f"{setting_name(best)}: {_per_second(best.speculation_ms)} with the best draft"
            if best.speculation_ms >= best.plain_ms:
                text += f", {_per_second(best.plain_ms)} without: does not pay"
            else:
                gain = 100.0 * (best.plain_ms / best.speculation_ms - 1.0)
                text += f", {gain:.0f} % faster than without"
        others = [(_ms_for(r, purpose), r) for r in known if r is not best]
        if others:
            ms, next_best = min(others, key=lambda other: other[0])
            change = 100.0 * (ms / _ms_for(best, purpose) - 1.0)
            word = "faster" if change >= 0.0 else "slower"
            text += f"; {abs(change):.1f} % {word} than {_short_name(report, next_best)}"
            if change < 0.0:
                text += ", which is within the margin"
        pairs.append((label, text))
    caption = f"Best setting at {report.expected_tokens:,} tokens of context (predicted)"
    return Facts(tuple(pairs), caption)


def _ms_for(result: SettingResult, purpose: str) -> float:
    """Whoever may speculate may also decode plainly."""
    plain = result.plain_ms
    return plain if purpose == "plain" else min(plain, result.speculation_ms)


def _is_known(*times_ms: float) -> bool:
    return all(math.isfinite(ms) and ms > 0.0 for ms in times_ms)


def _per_second(ms: float) -> str:
    return f"{sig(1000.0 / ms)} tokens/s"


def _setting(report: ProfileReport, result: SettingResult) -> Section:
    costs = Costs(result.profile)
    groups = groups_of(costs)
    name = setting_name(result)
    parts: list[Table | Facts] = [_cost_table(costs, groups)]
    if costs.max_width > 1:
        parts.append(_verification_table(costs))
    parts.append(_fit_facts(report, costs, groups))
    return Section(name[0].upper() + name[1:], tuple(parts))


def _cost_table(costs: Costs, groups: Sequence[Group]) -> Table:
    columns = ["context\ntokens", "step\nms", "tokens/s"]
    columns += [f"{group.name}\nms each" for group in groups]
    windows = [(g, m) for g in groups for m in costs.window_modes if _windowed(costs, g, m)]
    columns += [f"{g.name}\n{_width(m)}, ms" for g, m in windows]
    columns += ["head\nms", *(f"{n:,} rows\nof it, ms" for n in costs.short_heads), "rest\nms"]
    heads_ms = [max(0.0, costs.head_ms() - costs.head_saving_ms(n)) for n in costs.short_heads]
    mixers = [k for k in (Kind.ATTENTION, Kind.BLOCK) if any(g.kind is k for g in groups)]
    if mixers:
        columns.append(f"{mixers[0].value}\nshare")
    rows = []
    for context in costs.profile.contexts:
        step_ms = costs.step_ms(context)
        row = [f"{context:,}", sig(step_ms), sig(1000.0 / step_ms)]
        row += [sig(group.ms(context)) for group in groups]
        row += [_windowed(costs, g, m).get(context, "") for g, m in windows]
        row += [sig(ms) for ms in (costs.head_ms(), *heads_ms, costs.rest_ms(context))]
        if mixers:
            row.append(f"{100.0 * costs.share([mixers[0].value], context):.0f} %")
        rows.append(tuple(row))
    return Table(tuple(columns), tuple(rows), "A step of one token, by context")


def _width(mode: Mode) -> str:
    return f"last {mode.window_tokens:,}"


def _windowed(costs: Costs, group: Group, mode: Mode) -> dict[int, str]:
    """Mean cost of a sublayer of this group under a window, by context."""
    members = [costs.window_points(i, mode) for i in group.members]
    if not all(members):
        return {}
    shared = set.intersection(*({c for c, _ in points} for points in members))
    return {
        context: sig(statistics.fmean(dict(points)[context] for points in members))
        for context in sorted(shared)
    }


def verification_widths(costs: Costs) -> list[int]:
    """SHOWN_WIDTHS up to the widest measured pass, and that one."""
    widest = costs.max_width
    return [w for w in SHOWN_WIDTHS if w < widest] + [widest]


def _verification_table(costs: Costs) -> Table:
    widths = verification_widths(costs)
    rows = []
    for context in costs.profile.contexts:
        step_ms = costs.step_ms(context)
        rows.append(
            (f"{context:,}", *(f"{costs.verify_ms(context, w) / step_ms:.2f}" for w in widths))
        )
    columns = ("context\ntokens", *(f"\n{w}" for w in widths))
    return Table(columns, tuple(rows), "A pass over several tokens, in steps of one token")


def _fit_facts(report: ProfileReport, costs: Costs, groups: Sequence[Group]) -> Facts:
    pairs = [(group.name, f"{law(group)} ({group.description})") for group in groups]
    kinds = {group.kind for group in groups}
    if {Kind.ATTENTION, Kind.MLP} <= kinds:
        pairs.append(("crossing", crossing_text(costs)))
    if costs.max_width >= 4:
        at = report.expected_tokens
        further = (costs.verify_ms(at, 4) / costs.step_ms(at) - 1.0) / 3.0
        pairs.append(
            (
                "verification",
                f"each further token costs {further:.2f} of a step (pass of 4, {at:,} tokens of "
                "context); only an acceptance above that plus the cost of a draft step gains "
                "anything",
            )
        )
    errors = [abs(error) for _, error in costs.fit_errors()]
    timings = sum(s.timing.samples for s in costs.profile.samples)
    pairs.append(
        (
            "fit",
            f"misses what it was fitted to by {100.0 * statistics.median(errors):.1f} % (median), "
            f"{100.0 * max(errors):.1f} % at most; {timings:,} timings of "
            f"{len(costs.profile.samples):,} kinds of pass; {_spread(costs)}",
        )
    )
    if any(costs.rest_ms(c) < -0.02 * costs.step_ms(c) for c in costs.profile.contexts):
        pairs.append(
            (
                "rest",
                "is negative: each part costs less in company than leaving it out saves, because "
                "the processor's cache keeps more of the weights the fewer there are",
            )
        )
    if costs.blind:
        pairs.append(("warning", "noise hid what a sublayer costs; measure again at rest"))
    return Facts(clean_pairs(pairs), "Cost of one sublayer (± 95 % confidence)")


def _spread(costs: Costs) -> str:
    if max(step.timing.samples for step in costs.profile.steps()) < 2:
        return "how much plain steps vary is not known"
    return f"plain steps vary by {100.0 * costs.profile.spread:.1f} % (quartile distance)"


def law(group: Group) -> str:
    """The fitted cost of a sublayer in words: constant, or a line in the context."""
    line = group.line
    if not group.points:
        return "not measured"
    if len(group.points) < 2:
        return f"{sig(line.intercept)} ms, measured at one context only"
    if not math.isfinite(line.slope_half_width):
        text = (
            f"{sig(line.intercept)} ms {_signed(1000.0 * line.slope)} ms per 1,000 tokens of "
            "context (two contexts only: no confidence)"
        )
    elif abs(line.slope) <= line.slope_half_width and not group.grows:
        mean, half_width = constant(group)
        return f"{_with_error(mean, half_width)} ms, constant"
    else:
        text = (
            f"{_with_error(line.intercept, line.intercept_half_width)} ms "
            f"{'+' if line.slope > 0 else '−'} "
            f"{_with_error(abs(1000.0 * line.slope), 1000.0 * line.slope_half_width)} ms per 1,000 "
            "tokens of context"
        )
    if group.window_tokens:
        text += ", level once the window is full"
    elif not group.is_line:
        text += ", not a straight line"
    return text


def constant(group: Group) -> tuple[float, float]:
    """Weighted mean over the contexts in ms, and the half width of its 95 % interval."""
    costs = np.array([p[1] for p in group.points])
    weights = 1.0 / np.maximum(1e-9, np.array([p[2] for p in group.points])) ** 2
    mean = float(np.average(costs, weights=weights))
    dof = len(costs) - 1
    inflation = max(1.0, float(np.sum(weights * (costs - mean) ** 2)) / max(1, dof))
    return mean, t95(dof) * math.sqrt(inflation / float(weights.sum()))


def crossing_text(costs: Costs) -> str:
    """Where an average attention overtakes an average MLP."""
    if all(len(cost.points) < 2 for cost in costs.class_costs):
        return "not known: measured at one context only"
    crossing = costs.crossing_tokens()
    if crossing is None:
        return "attention never costs as much as an MLP (lines continued to a million tokens)"
    if crossing <= 0.0:
        return "attention costs more than an MLP at every context"
    text = f"attention costs more than an MLP from {round_tokens(crossing):,} tokens on"
    if crossing > costs.profile.contexts[-1]:
        text += ", beyond what was measured"
    elif crossing < costs.profile.contexts[0]:
        text += ", below what was measured"
    return text


def _contributions(report: ProfileReport) -> Section:
    fidelity = report.fidelity
    sums: dict[tuple[int, str], list[int]] = {}
    for count in fidelity.counts:
        both = sums.setdefault((count.index, count.mode), [0, 0])
        both[0] += count.agreed
        both[1] += count.total
    ranked = sorted(
        ((agreed / total, agreed, total, key) for key, (agreed, total) in sums.items() if total),
        key=lambda r: (-r[0], -r[2], r[3]),  # of equal shares, first what was judged on more
    )

    def named(rows: Sequence[tuple[float, int, int, tuple[int, str]]]) -> str:
        return ", ".join(
            f"{_item(report.sublayers, *key)}: {share:.2f} ({agreed} of {total})"
            for share, agreed, total, key in rows
        )

    pairs = [
        ("most harmless", named(ranked[:_EXTREMES])),
        (
            "most harmful",
            named(sorted(ranked[_EXTREMES:], key=lambda r: (r[0], -r[2], r[3]))[:_EXTREMES]),
        ),
    ]
    if ranked:
        pairs.append(("mean", _means(fidelity)))
    if fidelity.batch_total:
        pairs.append(
            (
                "exactness",
                f"passes of several tokens pick what single steps pick: "
                f"{fidelity.batch_agreement:.3f} "
                f"({fidelity.batch_agreed} of {fidelity.batch_total})",
            )
        )
    caption = (
        "Share of the model's picks that survive leaving one sublayer out "
        f"({counted(fidelity.runs, 'run')} so far)"
    )
    facts = Facts(tuple(pair for pair in pairs if pair[1]), caption)
    return Section("What sublayers contribute", (facts,))


def _means(fidelity: Fidelity) -> str:
    """By context, over what was judged at every context: other sublayers would not compare."""
    contexts = fidelity.contexts
    judged = [
        {(c.index, c.mode) for c in fidelity.counts if c.context_tokens == n} for n in contexts
    ]
    shared = set.intersection(*judged)
    means = []
    for context in contexts:
        own = [c for c in fidelity.counts if c.context_tokens == context]
        own = [c for c in own if (c.index, c.mode) in shared] or own
        share = sum(c.agreed for c in own) / max(1, sum(c.total for c in own))
        means.append(f"{share:.2f} at {context:,} tokens")
    text = ", ".join(means)
    if len(contexts) > 1 and shared:
        text += f" (of the {len(shared)} judged at every context)"
    return text


def _item(sublayers: Sequence[SubLayer], index: int, mode: str) -> str:
    sublayer = sublayers[index]
    name = f"{kind_name(sublayer.kind)} {sublayer.layer}"
    return name if mode == "skip" else f"{name} as {clean(mode)}"


def _closing(report: ProfileReport) -> list[str]:
    """Notes of the run, each once."""
    return list(dict.fromkeys(clean(note) for note in report.notes))


def renderables(report: ProfileReport, width: int) -> list[Any]:
    """What rich prints, for a terminal of so many columns."""
    return laid_out(sections(report), width)


# -- for programs


def to_json(report: ProfileReport) -> dict[str, Any]:
    """The whole report as one JSON object; numbers that are not known are null.

    model       name, path, n_params, size_bytes, sublayers: [{index, layer, kind}]
    device      where the layers lie: devices, offloaded_layers, n_layers, unified_memory, ...
    expected_tokens, elapsed_seconds, budget_seconds, kept_in, interrupted, notes, warnings
    threads     [{threads, step_ms, pass_ms}]: what numbers of threads were tried
    settings    one per measured setting of the context, best for plain decoding first:
        flash_attn, kv_type, threads, threads_batch, best_for, plain_ms and speculation_ms (per
        emitted token at expected_tokens, predicted), limit_tokens, measured_at (seconds since
        1970), elapsed_seconds, budget_seconds, spread, notes
        samples       [{context_tokens, width_tokens, skipped, head, median_ms, low_ms, high_ms,
                      samples, dropped}]: what was timed; low and high are quartiles
        classes       sublayers of equal work: name, kind, members, what they work on, is_line,
                      line {intercept_ms, slope_ms_per_token, their half widths at 95 %, points,
                      largest_residual_ms}, costs [{context_tokens, ms, standard_error_ms,
                      fitted_ms}]
        steps         [{context_tokens, step_ms, tokens_per_second, head_ms, fixed_ms, rest_ms,
                      shares}]
        verification  [{context_tokens, width_tokens, ms, steps}]: passes, also in steps
        crossing_tokens  context from which attention costs more than an MLP
        fit_error     {median, worst}: relative, over the samples of single tokens
    fidelity    runs, batch_agreed, batch_total, notes, counts: [{index, sublayer, mode,
                context_tokens, agreed, total}]
    """
    data = {
        "model": {
            "name": report.model,
            "path": report.path,
            "n_params": report.n_params,
            "size_bytes": report.size_bytes,
            "sublayers": [
                {"index": s.index, "layer": s.layer, "kind": s.kind.value} for s in report.sublayers
            ],
        },
        "device": report.device,
        "expected_tokens": report.expected_tokens,
        "elapsed_seconds": report.elapsed_seconds,
        "budget_seconds": report.budget_seconds,
        "kept_in": report.kept_in,
        "interrupted": report.interrupted,
        "threads": [
            {"threads": int(threads), **times} for threads, times in report.threads_ms.items()
        ],
        "settings": [_setting_json(result) for result in report.results],
        "fidelity": {
            "runs": report.fidelity.runs,
            "batch_agreed": report.fidelity.batch_agreed,
            "batch_total": report.fidelity.batch_total,
            "counts": [
                {
                    "index": c.index,
                    "sublayer": str(report.sublayers[c.index]),
                    "mode": c.mode,
                    "context_tokens": c.context_tokens,
                    "agreed": c.agreed,
                    "total": c.total,
                }
                for c in report.fidelity.counts
            ],
            "notes": list(report.fidelity.notes),
        },
        "notes": list(report.notes),
        "warnings": list(report.warnings),
    }
    plain: dict[str, Any] = finite(data)
    return plain


def _setting_json(result: SettingResult) -> dict[str, Any]:
    profile = result.profile
    costs = Costs(profile)
    errors = [abs(error) for _, error in costs.fit_errors()]
    kinds = list(dict.fromkeys(c.kind.value for c in costs.classes))
    return {
        "flash_attn": result.flash_attn,
        "kv_type": result.kv_type,
        "threads": result.threads,
        "threads_batch": result.threads_batch,
        "best_for": list(result.best_for),
        "plain_ms": result.plain_ms,
        "speculation_ms": result.speculation_ms,
        "limit_tokens": profile.limit_tokens,
        "measured_at": profile.measured_at,
        "elapsed_seconds": profile.elapsed_seconds,
        "budget_seconds": profile.budget_seconds,
        "spread": profile.spread,
        "samples": [_sample_json(sample) for sample in profile.samples],
        "classes": [_class_json(costs, cost) for cost in costs.class_costs],
        "steps": [
            {
                "context_tokens": c,
                "step_ms": costs.step_ms(c),
                "tokens_per_second": 1000.0 / costs.step_ms(c),
                "head_ms": costs.head_ms(),
                "short_heads_saved_ms": {n: costs.head_saving_ms(n) for n in costs.short_heads},
                "fixed_ms": costs.fixed_ms(c),
                "rest_ms": costs.rest_ms(c),
                "shares": {kind: costs.share([kind], c) for kind in kinds},
            }
            for c in profile.contexts
        ],
        "verification": [
            {
                "context_tokens": c,
                "width_tokens": w,
                "ms": costs.verify_ms(c, w),
                "steps": costs.verify_ms(c, w) / costs.step_ms(c),
            }
            for c in profile.contexts
            for w in profile.widths
            if w <= costs.max_width
        ],
        "crossing_tokens": costs.crossing_tokens(),
        "fit_error": {"median": statistics.median(errors), "worst": max(errors)},
        "notes": list(profile.notes),
    }


def _sample_json(sample: Sample) -> dict[str, Any]:
    return {
        "context_tokens": sample.context_tokens,
        "width_tokens": sample.width,
        "skipped": list(sample.skipped),
        "windowed": list(sample.windowed),
        "window": None if sample.window is None else str(sample.window),
        "head": sample.head,
        "head_rows": sample.head_rows,
        **asdict(sample.timing),
    }


def _class_json(costs: Costs, cost: ClassCost) -> dict[str, Any]:
    cls, line = cost.layer_class, cost.line
    return {
        **asdict(cls),
        "kind": cls.kind.value,
        "members": list(cls.members),
        "is_line": cost.is_line,
        "line": {
            "intercept_ms": line.intercept,
            "intercept_half_width_ms": line.intercept_half_width,
            "slope_ms_per_token": line.slope,
            "slope_half_width_ms_per_token": line.slope_half_width,
            "points": line.points,
            "largest_residual_ms": line.largest_residual,
        },
        "costs": [
            {
                "context_tokens": context,
                "ms": ms,
                "standard_error_ms": error,
                "fitted_ms": costs.saving_ms(cls.members[0], context),
            }
            for context, ms, error in cost.points
        ],
        "windows": {
            str(mode): [
                {"context_tokens": context, "ms": ms}
                for context, ms in costs.window_points(cls.members[0], mode)
            ]
            for mode in costs.window_modes
            if costs.window_points(cls.members[0], mode)
        },
    }


# -- figures and words


def _with_error(value: float, half_width: float) -> str:
    """Both with the decimals of the first two digits of the uncertainty, "0.0559 ± 0.0078", or of
    the first one where the value would get more than three digits."""
    if not math.isfinite(half_width):
        return sig(value)
    first = -math.floor(math.log10(max(half_width, 1e-9)))  # decimal of its first digit
    enough = 2 - math.floor(math.log10(max(abs(value), half_width, 1e-9)))
    decimals = max(0, min(6, max(first, min(first + 1, enough))))
    return f"{value:.{decimals}f} ± {half_width:.{decimals}f}"


def _signed(value: float) -> str:
    return f"{'+' if value >= 0.0 else '−'} {sig(abs(value))}"


def round_tokens(tokens: float) -> int:
    """Two significant digits: no measurement knows more."""
    unit: int = 10 ** max(0, math.floor(math.log10(max(1.0, tokens))) - 1)
    return round(tokens / unit) * unit


def _bytes(n: float) -> str:
    for unit in ("bytes", "kB", "MB"):
        if n < 999.5:
            return f"{sig(n)} {unit}" if unit != "bytes" else f"{n:.0f} bytes"
        n /= 1000.0
    return f"{sig(n)} GB"


def _number(n: float) -> str:
    for unit in ("", " thousand", " million"):
        if n < 999.5:
            return f"{sig(n)}{unit}"
        n /= 1000.0
    return f"{sig(n)} billion"
