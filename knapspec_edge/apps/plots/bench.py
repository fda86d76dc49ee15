"""A comparison in four pictures: speed by context, acceptance against cost, where the time of a
round goes, and what the cost model says against what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..bench.rows import PLAIN, Run
from ..bench.runner import Report
from ..bench.tasks import shown_context
from ..report import clean
from . import Drawing, check, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette, then the same with another mark.
_COLOURS = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C3D00", "#555555",
)  # fmt: skip
_MARKS = ("o", "s", "^", "D")
_PARTS = (
    ("draft_ms", "draft", "#56B4E9"),
    ("verify_ms", "verification", "#0072B2"),
    ("plan_ms", "search and learning", "#D55E00"),
    ("overhead_ms", "rest", "#999999"),
)

NAMES = ("speed-up", "acceptance", "rounds", "predicted")


def check_folder(folder: Path) -> None:
    """Whether plots could be written there; it is made where it is not. Raises UsageError."""
    from ...errors import UsageError

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"cannot write plots into {folder}: {reason}") from None
    for name in NAMES:
        check(folder / f"{name}.png")


def write(report: Report, folder: Path) -> list[Path]:
    """Draw all four. Raises UsageError, KnapspecError."""
    written = []
    for name, drawing in zip(NAMES, drawings(report), strict=True):
        path = folder / f"{name}.png"
        save(drawing, path)
        written.append(path)
    return written


def drawings(report: Report) -> list[Drawing]:
    """In the order of NAMES."""
    model = f"{clean(str(report.environment['model']))} ({report.environment['model_type']})"
    drawn = (
        ("speed against plain decoding", _speed_up),
        ("acceptance against cost of a draft step", _acceptance),
        ("where the time of a token goes", _rounds),
        ("predicted against measured speed", _predicted),
    )
    return [
        Drawing(f"{model}: {words}", words, partial(draw, report, f"{model}: {words}"), ())
        for words, draw in drawn
    ]


def _figure(title: str, width: float = 8.5, height: float = 5.2) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    # names may hold what would be read as a formula
    figure.suptitle(title, fontsize=12, parse_math=False)
    return figure, figure.subplots()


def _styles(names: Sequence[str]) -> dict[str, tuple[str, str]]:
    return {
        name: (_COLOURS[i % len(_COLOURS)], _MARKS[i // len(_COLOURS) % len(_MARKS)])
        for i, name in enumerate(names)
    }


def _nothing(axes: Axes, words: str) -> None:
    axes.set_axis_off()
    axes.text(0.5, 0.5, words, ha="center", transform=axes.transAxes)


def _others(report: Report) -> list[str]:
    return [s.side for s in report.sides if s.side != PLAIN]


def _speed_up(report: Report, title: str) -> Figure:
    """Groups of points with quartiles, one group per length."""
    figure, axes = _figure(title)
    sides = _others(report)
    contexts = list(dict.fromkeys(s.context for s in report.by_context))
    styles = _styles(sides)
    drawn = False
    for i, side in enumerate(sides):
        x, y, low, high = [], [], [], []
        for place, context in enumerate(contexts):
            for s in report.by_context:
                if s.side == side and s.context == context and s.ratio is not None:
                    assert s.ratio_low is not None
                    assert s.ratio_high is not None
                    x.append(place + 0.7 * ((i + 0.5) / len(sides) - 0.5))
                    y.append(s.ratio)
                    low.append(s.ratio - s.ratio_low)
                    high.append(s.ratio_high - s.ratio)
        if not x:
            continue
        drawn = True
        colour, mark = styles[side]
        axes.errorbar(
            x, y, yerr=[low, high], fmt=mark, color=colour, capsize=2.5, elinewidth=1.0,
            markersize=6, label=side,
        )  # fmt: skip
    if not drawn:
        _nothing(axes, "nothing to compare")
        return figure
    axes.axhline(1.0, color="#888888", linewidth=1.0, linestyle=":", label="plain decoding")
    axes.set_xticks(range(len(contexts)), [shown_context(c) for c in contexts])
    axes.set_xlim(-0.5, len(contexts) - 0.5)
    axes.set_ylim(bottom=0.0)
    axes.set_xlabel("context in tokens")
    axes.set_ylabel("speed relative to plain decoding (quartiles)")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def _acceptance(report: Report, title: str) -> Figure:
    """Each side at each length by what a draft step costs; a draft can pay above the line α = c."""
    figure, axes = _figure(title)
    shown = [
        (s.side, s.draft_cost, s.acceptance, shown_context(s.context))
        for s in report.by_context
        if s.acceptance is not None and s.draft_cost is not None
    ]
    if not shown:
        _nothing(axes, "nothing was drafted")
        return figure
    styles = _styles(_others(report))
    for side in dict.fromkeys(side for side, *_ in shown):
        own = [(c, alpha, words) for name, c, alpha, words in shown if name == side]
        colour, mark = styles[side]
        axes.plot(
            [c for c, _, _ in own], [alpha for _, alpha, _ in own], mark,
            color=colour, markersize=7, label=side,
        )  # fmt: skip
        for c, alpha, words in own:
            axes.annotate(
                words, (c, alpha), xytext=(5, 4), textcoords="offset points", fontsize=8,
                color=colour,
            )  # fmt: skip
    most = max(1.05, 1.05 * max(c for _, c, _, _ in shown))
    axes.plot([0.0, 1.0], [0.0, 1.0], ":", color="#888888", linewidth=1.0, label="α = c")
    axes.set_xlim(-0.03, most)
    axes.set_ylim(-0.03, 1.05)
    axes.set_xlabel("cost c of a draft step, in plain steps")
    axes.set_ylabel("share α of drafted tokens that were accepted")
    axes.set_title("Below the line no length pays, however cheap verification is")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def _rounds(report: Report, title: str) -> Figure:
    """Time per token of each side, in plain tokens of the same visit, by what it is spent on."""
    sides = [s for s in report.by_context if s.timed and s.draft_share is not None]
    figure, axes = _figure(title, height=max(3.6, 0.9 + 0.32 * len(sides)))
    plain = {r.visit: r for r in report.runs if r.side == PLAIN and r.timed}
    labels, rows = [], []
    for s in sides:
        runs = [
            r for r in report.runs
            if r.side == s.side and r.context == s.context and r.timed and r.visit in plain
        ]  # fmt: skip
        if runs:
            labels.append(f"{s.side}, {shown_context(s.context)}")
            rows.append([_part(runs, plain, name) for name, _, _ in _PARTS])
    if not rows:
        _nothing(axes, "nothing was timed")
        return figure
    values = np.array(rows)  # f64 [sides, parts]
    left = np.zeros(len(rows))
    for i, (_, words, colour) in enumerate(_PARTS):
        axes.barh(range(len(rows)), values[:, i], left=left, color=colour, label=words)
        left += values[:, i]
    axes.axvline(1.0, color="#888888", linewidth=1.0, linestyle=":")
    axes.set_yticks(range(len(rows)), labels, parse_math=False)
    axes.invert_yaxis()
    axes.set_xlabel("time of a token, in plain tokens")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def _part(runs: Sequence[Run], plain: dict[str, Run], name: str) -> float:
    """Mean time per token of one part, in plain tokens."""
    shares = []
    for r in runs:
        value = getattr(r, name) or 0.0
        per_token_ms = value / (r.completion_tokens - 1)
        shares.append(per_token_ms * plain[r.visit].per_second / 1000.0)
    return float(np.mean(shares))


def _predicted(report: Report, title: str) -> Figure:
    """One point per answer: speed by the cost model, for the rounds as they were, and as timed."""
    figure, axes = _figure(title)
    runs = [r for r in report.runs if r.timed and r.model_ms]
    if not runs:
        _nothing(axes, "the cost model was not asked: compare with auto or knapspec")
        return figure
    styles = _styles([s.side for s in report.sides])
    fastest = 0.0
    for side in dict.fromkeys(r.side for r in runs):
        own = [r for r in runs if r.side == side]
        x = [r.per_second for r in own]
        y = [1000.0 * (r.completion_tokens - 1) / (r.model_ms or 1.0) for r in own]
        fastest = max(fastest, *x, *y)
        colour, mark = styles[side]
        axes.plot(x, y, mark, color=colour, markersize=5, alpha=0.75, label=side)
    axes.plot([0.0, fastest], [0.0, fastest], ":", color="#888888", linewidth=1.0)
    axes.set_xlim(0.0, 1.05 * fastest)
    axes.set_ylim(0.0, 1.05 * fastest)
    axes.set_xlabel("measured, tokens per second")
    axes.set_ylabel("by the cost model, tokens per second")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


__all__ = ["NAMES", "check_folder", "drawings", "write"]
