"""How a plan is shown: a picture, items, the budget curve, the judged plans; or one JSON object.

`sections` decides what is said; report lays it out for a terminal, and plots put the tables into a
page.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..records import Kind, ModeKind, SubLayer
from ..search.outlook import CurvePoint, Item, JudgedPlan, Outlook
from .certify import Certification
from .plan import PlanReport
from .report import (
    Facts,
    Picture,
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

RUNS, SKIPPED, WINDOWED = "█", "·", "▒"
CURVE_ROWS = 12  # of the budget curve; all points are in the JSON form
_BAR = 20  # columns of a bar
# What terminals without Unicode get in place of what is written here.
_ASCII = str.maketrans(
    {RUNS: "#", SKIPPED: ".", WINDOWED: "w", "α": "alpha", "γ": "gamma", "–": "-", "−": "-"}
)
UNICODE = "".join(chr(c) for c in _ASCII)


# -- what is said


def sections(report: PlanReport) -> list[Section]:
    """The report for people, in order of reading. All text is free of control characters."""
    outlook = report.outlook
    found = [_overview(report)]
    if outlook.draft is not None:
        found.append(Section(_draft_title(outlook), (picture(outlook),)))
    found.append(Section("What sublayers cost and contribute", _items(outlook)))
    if front := outlook.front(CURVE_ROWS):
        found.append(Section("What skipping could gain", (_curve(outlook, front),)))
    if outlook.judged:
        found.append(Section("Judged plans", _judged(outlook)))
    if report.certification is not None:
        found.append(_certified(report.certification))
    found.append(_basis(report))
    if outlook.notes:
        notes = tuple(("", clean(note)) for note in outlook.notes)
        found.append(Section("Notes", (Facts(notes),)))
    return found


def title(report: PlanReport) -> str:
    return f"{clean(report.model)} at {report.outlook.context_tokens:,} tokens of context"


def _overview(report: PlanReport) -> Section:
    outlook = report.outlook
    pairs = [
        ("model", f"{report.model} ({report.path})"),
        ("speculation", outlook.state),
        ("why", outlook.why),
        ("runner-up", outlook.runner_up),
    ]
    best = outlook.best
    if best is not None and outlook.draft is not None:
        pairs.append(("draft", _draft_line(outlook, best)))
    speed = f"{sig(1000.0 / outlook.step_ms)} tokens/s plain"
    if best is not None:
        speed += f", {sig(1000.0 * best.ratio / outlook.step_ms)} predicted with the best draft"
    pairs.append(("speed", speed))
    head = f"The plan at {_tokens(outlook.context_tokens)} of context"
    return Section(head, (Facts(clean_pairs(pairs)),))


def _draft_line(outlook: Outlook, best: JudgedPlan) -> str:
    kinds = _by_kind(outlook.sublayers)
    skipped = ", ".join(
        f"{best.skipped[kind.value]} of {n} {kind_name(kind)}" for kind, n in kinds.items()
    )
    windows = [str(m) for m in best.draft.plan.modes if m.kind is ModeKind.WINDOW]
    widths = ", ".join(f"{windows.count(w)} with {w}" for w in dict.fromkeys(windows))
    return (
        f"{skipped} sublayers skipped{f', {widths}' if widths else ''}; "
        f"{best.drafted_per_round:.1f} tokens a round on average, "
        f"each draft as long as it is worth; in a plan file γ = {best.draft.max_tokens}, and none "
        f"after a token less sure than {best.draft.min_probability:.2f}"
    )


def _draft_title(outlook: Outlook) -> str:
    return "The draft" if outlook.state == "on" else "The best draft, which is not used"


def picture(outlook: Outlook) -> Picture:
    """The best draft, one column per layer and one row per kind of sublayer.

    Raises ValueError where there is no draft.
    """
    if outlook.draft is None:
        raise ValueError("there is no draft to draw")
    n_layers = 1 + max(s.layer for s in outlook.sublayers)
    modes = [_sign(str(mode)) for mode in outlook.draft.plan.modes]
    rows = []
    for name, by_layer in slots(outlook.sublayers):
        cells = [modes[by_layer[n]] if n in by_layer else " " for n in range(n_layers)]
        rows.append((name, "".join(cells)))
    legend = [(RUNS, "runs"), (SKIPPED, "skipped")]
    if WINDOWED in modes:
        legend.append((WINDOWED, "recent tokens only"))
    styles = ((RUNS, "cyan"), (SKIPPED, "dim"), (WINDOWED, "yellow"))
    return Picture(tuple(rows), "One column per layer", tuple(legend), styles)


def slots(sublayers: Sequence[SubLayer]) -> list[tuple[str, dict[int, int]]]:
    """(name, layer -> index) of the rows of a picture. A layer may have two sublayers of a kind,
    as one with cross-attention has."""
    found: dict[tuple[Kind, int], dict[int, int]] = {}
    seen: dict[tuple[Kind, int], int] = {}
    for s in sublayers:
        nth = seen.get((s.kind, s.layer), 0)
        seen[s.kind, s.layer] = nth + 1
        found.setdefault((s.kind, nth), {})[s.layer] = s.index
    return [
        (kind_name(kind) + (f" {nth + 1}" if nth else ""), by_layer)
        for (kind, nth), by_layer in found.items()
    ]


def _sign(mode: str) -> str:
    return {"full": RUNS, "skip": SKIPPED}.get(mode, WINDOWED)


def _items(outlook: Outlook) -> tuple[Table | Facts, ...]:
    columns = ["\nlayer"]
    rows_of = slots(outlook.sublayers)
    for name, _ in rows_of:
        columns += ["\nms", "\nshare", "\nkeeps", "\npicks", f"{name}\n95 %", "\nplan"]
    layers = sorted({s.layer for s in outlook.sublayers})
    rows = []
    for layer in layers:
        row = [str(layer)]
        for _, by_layer in rows_of:
            row += _item_cells(outlook, by_layer.get(layer))
        rows.append(tuple(row))
    caption = "Cost in a step, and the share of the model's picks that survive leaving one out"
    if outlook.draft is not None and outlook.draft.plan.windowed:
        caption += ", or its part of what all windows lose"
    if any(i.agreed is None for i in outlook.items):
        caption += " (~: interpolated)"
    return Table(tuple(columns), tuple(rows), caption, together=6), _parts(outlook)


def _item_cells(outlook: Outlook, index: int | None) -> list[str]:
    if index is None:
        return [""] * 6
    item = outlook.items[index]
    plan = {"full": "runs", "skip": "skip"}.get(item.mode, item.mode)
    return [
        sig(item.cost_ms),
        f"{100.0 * item.share:.1f} %",
        f"{'' if item.agreed is not None else '~'}{item.agreement:.2f}",
        _picks(item),
        _interval(item.interval),
        "" if outlook.draft is None else plan,
    ]


def _picks(item: Item) -> str:
    return "" if item.agreed is None else f"{item.agreed}/{item.total}"


def _interval(interval: tuple[float, float]) -> str:
    return f"{interval[0]:.2f}–{interval[1]:.2f}"


def _parts(outlook: Outlook) -> Facts:
    """Where a step goes, in lines that add up."""
    pairs = []
    for kind, n in _by_kind(outlook.sublayers).items():
        spent = sum(i.cost_ms for i in outlook.items if i.sublayer.kind is kind)
        pairs.append((f"{n} {kind_name(kind)}", _ms_and_share(spent, outlook)))
    if outlook.head_ms > 0.0:
        pairs.append(("head", _ms_and_share(outlook.head_ms, outlook)))
    rest = _ms_and_share(outlook.rest_ms, outlook)
    if outlook.rest_ms < 0.0:
        rest += "; negative because parts cost less in company than leaving one out saves"
    pairs.append(("rest", rest))
    pairs.append(("step", f"{sig(outlook.step_ms)} ms"))
    return Facts(clean_pairs(pairs), "A step of one token")


def _ms_and_share(ms: float, outlook: Outlook) -> str:
    sign = "−" if ms < 0.0 else ""
    return f"{sign}{sig(abs(ms))} ms, {sign}{100.0 * abs(ms) / outlook.step_ms:.1f} %"


def _curve(outlook: Outlook, front: Sequence[CurvePoint]) -> Table:
    kinds = _by_kind(outlook.sublayers)
    top = max([1.0, *(p.ratio for p in front)])
    windows = any(p.windowed for p in outlook.curve)
    columns = (
        "saved\nof a step",
        *(f"{kind_name(k)}\nskipped" for k in kinds),
        *(["\nwindowed"] if windows else []),
    )
    rows = tuple(
        (
            f"{100.0 * p.saved_share:.1f} %",
            *(str(p.skipped[k.value]) for k in kinds),
            *([str(p.windowed)] if windows else []),
            f"{p.alpha:.2f}",
            str(p.draft_tokens),
            f"{p.ratio:.2f}x",
            _bar(p, top),
        )
        for p in front
    )
    caption = (
        f"The best of {counted(len(outlook.curve), 'cut')} by the knapsack, in parts; α as product "
        "of what singles let expect, speed by the geometric model"
    )
    return Table((*columns, "\nα", "best\nγ", "predicted\nspeed", "\n"), rows, caption)


def _bar(point: CurvePoint, top: float) -> str:
    filled = min(_BAR, round(_BAR * point.ratio / top))
    return RUNS * filled + SKIPPED * (_BAR - filled)


def _judged(outlook: Outlook) -> tuple[Table, ...]:
    kinds = _by_kind(outlook.sublayers)
    windows = any(p.windowed for p in outlook.judged)
    rows = []
    for n, plan in enumerate(outlook.judged, start=1):
        rows.append(
            (
                str(n),
                *(str(plan.skipped[k.value]) for k in kinds),
                *([str(plan.windowed)] if windows else []),
                str(plan.draft.max_tokens),
                f"{plan.agreement:.2f}",
                f"{plan.agreed}/{plan.total}",
                f"{plan.drafted_per_round:.2f}",
                f"{plan.tokens_per_round:.2f}",
                f"{plan.draft_cost:.2f}",
                f"{plan.verify_cost:.2f}",
                f"{plan.ratio:.2f}x",
                f"{plan.geometric_ratio:.2f}x",
                "yes" if plan.timed else "no",
            )
        )
    none = ("0",) * (len(kinds) + windows)
    off = ("off", *none, "0", "", "", "", "1.00", "", "1.00", "1.00x", "1.00x", "")
    ahead = sum(p.ratio > 1.0 for p in outlook.judged) if outlook.state == "on" else 0
    rows.insert(ahead, off)
    columns = (
        "\nplan",
        *(f"{kind_name(k)}\nskipped" for k in kinds),
        *(["\nwindowed"] if windows else []),
        "\nγ",
        "\nα",
        "\npicks",
        "drafted\na round",
        "tokens\na round",
        "draft\nc",
        "verify\nγ + 1",
        "\nspeed",
        "geo-\nmetric",
        "\ntimed",
    )
    caption = (
        "Costs in plain steps, predicted speed relative to plain decoding; timed: costs of real "
        "rounds"
    )
    shown = [Table(columns, tuple(rows), caption)]
    most = max(len(p.acceptance) for p in outlook.judged)
    if most:
        places = tuple(
            (
                str(n),
                *(f"{p:.2f}" for p in plan.acceptance),
                *("" for _ in range(most - len(plan.acceptance))),
            )
            for n, plan in enumerate(outlook.judged, start=1)
        )
        columns = ("plan", *(f"p_{i + 1}" for i in range(most)))
        caption = "Acceptance by place in the draft, all before it accepted"
        shown.append(Table(columns, places, caption))
    return tuple(shown)


def _certified(found: Certification) -> Section:
    rows = tuple(
        (
            str(n),
            f"{plan.agreement:.2f}",
            f"{plan.agreed}/{plan.positions}",
            f"{plan.tight_share:.3f}",
            f"{plan.loose_share:.3f}",
            str(plan.broken),
            f"{plan.cosine:.4f}",
        )
        for n, plan in enumerate(found.plans, start=1)
    )
    columns = (
        "\nplan",
        "measured\nagreement",
        "\npicks",
        "guaranteed\ntight",
        "as\npublished",
        "\nbroken",
        "median\ncosine",
    )
    caption = (
        f"Share of {found.positions} positions, by the states in front of the head "
        f"({found.n_embd} dimensions, {found.n_vocab:,} tokens)"
    )
    room = (
        f"the median position takes a cosine of {1.0 - found.room_tight:.6f} (as published "
        f"{1.0 - found.room_loose:.6f})"
    )
    parts: list[Table | Facts] = [Table(columns, rows, caption)] if rows else []
    parts.append(Facts((("needed", room),)))
    return Section("What the cosine alone guarantees", tuple(parts))


def _basis(report: PlanReport) -> Section:
    outlook = report.outlook
    best = outlook.best
    judged = f"single skips on {_range(outlook)} tokens of the model's own text"
    if best is not None:
        judged += f", the best plan on {best.total}"
    judged += (
        f"; passes of several tokens pick what single steps pick: {outlook.batch_agreement:.3f}"
    )
    age = _ago(report.shown_at - outlook.measured_at)
    contexts = outlook.latency_contexts
    times = f"measured {age}, at {counted(len(contexts), 'context')}"
    if len(contexts) > 1:
        times += f" of {contexts[0]:,} to {contexts[-1]:,} tokens"
    kept = "taken from what is kept" if outlook.from_cache else "measured now"
    pairs = [
        ("judged", judged),
        ("times", times),
        ("settings", ", ".join(_settings(outlook.settings)) or "unknown"),
        ("chosen", report.settings_reason or ""),
        ("device", report.device or ""),
        ("policy", outlook.policy),
        ("took", f"{duration(report.elapsed_seconds)}, {kept}"),
    ]
    pairs = [pair for pair in pairs if pair[1]]
    return Section("What this rests on", (Facts(clean_pairs(pairs)),))


def _settings(settings: Mapping[str, Any]) -> list[str]:
    """Those that times depend on, in words, as far as they are known."""
    found = []
    if "threads" in settings:
        several = settings.get("threads_batch", settings["threads"])
        more = "" if several == settings["threads"] else f" ({several} for several tokens)"
        found.append(counted(settings["threads"], "thread") + more)
    if "flash_attn" in settings:
        found.append(f"flash attention {settings['flash_attn']}")
    if "kv_type" in settings:
        found.append(f"{settings['kv_type']} keys and values")
    return found


# -- how it is laid out


def renderables(report: PlanReport, width: int, *, unicode: bool = True) -> list[Any]:
    """What rich prints, for a terminal of so many columns. `unicode` False: ASCII in place of all
    that is drawn and written here."""
    found = sections(report)
    return laid_out(found if unicode else [_plain(section) for section in found], width)


def _plain(section: Section) -> Section:
    """The section in ASCII."""

    def texts(row: Sequence[str]) -> tuple[str, ...]:
        return tuple(text.translate(_ASCII) for text in row)

    def pairs(rows: Sequence[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
        return tuple((a.translate(_ASCII), b.translate(_ASCII)) for a, b in rows)

    parts: list[Table | Facts | Picture] = []
    for part in section.parts:
        caption = part.caption.translate(_ASCII)
        if isinstance(part, Table):
            rows = tuple(texts(row) for row in part.rows)
            parts.append(Table(texts(part.columns), rows, caption))
        elif isinstance(part, Facts):
            parts.append(Facts(pairs(part.pairs), caption))
        else:
            parts.append(Picture(pairs(part.rows), caption, pairs(part.legend), pairs(part.styles)))
    return replace(section, title=section.title.translate(_ASCII), parts=tuple(parts))


# -- for programs


def to_json(report: PlanReport) -> dict[str, Any]:
    """The whole report as one JSON object; numbers that are not known are null.

    model          name, path, architecture, n_sublayers
    device, settings_reason, elapsed_seconds, warnings
    context_tokens, policy, state ("on" or "off"), reason, why, runner_up
    disturbed      true where the machine was too busy for the figures to be believed
    margin         predicted gain that "auto" asks for
    plan           the best draft, also when off; null if there is none: skipped (indices), modes
                   (of sublayers neither run nor skipped), draft_max_tokens, draft_min_probability
    step_ms, tokens_per_second, head_ms, rest_ms: a plain step at this context
    items          one per sublayer: index, layer, kind, mode (in the plan), cost_ms, share,
                   agreement (as counted), expected (elsewhere), agreed (null: interpolated), total,
                   interval (95 %)
    curve          the knapsack's plan for every saving that is not beaten in both saving and alpha:
                   skipped, modes, n_skipped (by kind), n_windowed, saved_share, alpha (product of
                   what singles let expect), draft_tokens (best γ), ratio (predicted speed relative
                   to plain decoding, geometric)
    judged         best first: the keys of plan, n_skipped, n_windowed, agreement, agreed, total,
                   interval,
                   acceptance (p_1..p_γ), tokens_per_round, drafted_per_round; in plain steps
                   draft_cost (c), verify_cost (γ + 1 tokens), verify_slope (s, at its smallest);
                   ratio, geometric_ratio, timed (in real rounds)
    measurement    window_tokens, batch_agreement, latency_contexts, measured_at (seconds since
                   1970), from_cache, settings
    notes
    certificate    null unless it was asked for: positions, dimension, vocabulary, head_agreement,
                   median_room_tight and _loose (1 - the cosine that is needed), plans in the order
                   of judged: agreement, guaranteed_tight, guaranteed_loose, broken, median_cosine
    """
    certification = report.certification
    data = {
        "model": {
            "name": report.model,
            "path": report.path,
            "architecture": report.architecture,
            "n_sublayers": len(report.outlook.sublayers),
        },
        "device": report.device,
        "settings_reason": report.settings_reason,
        "elapsed_seconds": report.elapsed_seconds,
        **report.outlook.to_json(),
        "certificate": None if certification is None else certification.to_json(),
        "warnings": list(report.warnings),
    }
    plain: dict[str, Any] = finite(data)
    return plain


# -- words


def _tokens(n: int) -> str:
    return f"{n:,} token{'' if n == 1 else 's'}"


def _range(outlook: Outlook) -> str:
    """How many picks single skips were judged on."""
    totals = sorted({i.total for i in outlook.items if i.agreed is not None}) or [0]
    return str(totals[0]) if len(totals) == 1 else f"{totals[0]} to {totals[-1]}"


def _ago(seconds: float) -> str:
    """ "2 min ago"; a clock that was set back counts as now."""
    seconds = max(0.0, seconds)
    for unit, name, enough in ((1, "s", 90), (60, "min", 90), (3600, "h", 48)):
        if seconds < enough * unit:
            return f"{seconds / unit:.0f} {name} ago"
    return f"{seconds / 86400:.0f} days ago"


def _by_kind(sublayers: Sequence[SubLayer]) -> dict[Kind, int]:
    found: dict[Kind, int] = {}
    for s in sublayers:
        found[s.kind] = found.get(s.kind, 0) + 1
    return found
