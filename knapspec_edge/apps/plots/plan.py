"""A plan: the picture of its layers, cost against contribution, and what skipping could gain."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ...records import Kind
from ..plan import PlanReport
from ..plan_report import RUNS, SKIPPED, WINDOWED, picture, sections, title
from ..report import kind_name
from . import HUES, Drawing, with_warnings

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_RUNS, _SKIPPED, _WINDOWED, _NONE = "#0072B2", "#DDDDDD", "#E69F00", "none"
_COLOURS = {RUNS: _RUNS, SKIPPED: _SKIPPED, WINDOWED: _WINDOWED}


def drawing(report: PlanReport) -> Drawing:
    """What `plots.save` writes of a report."""
    return Drawing(
        title(report),
        "The plan layer by layer, cost and contribution of sublayers, and speed by saving",
        lambda: _figure(report),
        with_warnings(sections(report), report.warnings),
    )


def _figure(report: PlanReport) -> Figure:
    from matplotlib.figure import Figure

    outlook = report.outlook
    figure = Figure(figsize=(13.5, 7.0), layout="constrained")
    verdict = f"speculation {outlook.state}"
    # names may hold what would be read as a formula
    figure.suptitle(f"{title(report)}: {verdict}", fontsize=13, parse_math=False)
    above, below = np.asarray(figure.subfigures(2, 1, height_ratios=(1.0, 2.6)), dtype=object)
    _draw_picture(above.subplots(), report)
    left, right = below.subplots(1, 2)
    _draw_items(left, report)
    _draw_curve(right, report)
    return figure


def _draw_picture(axes: Axes, report: PlanReport) -> None:
    """One column per layer, one row per kind of sublayer."""
    from matplotlib.patches import Patch, Rectangle
    from matplotlib.ticker import MaxNLocator

    axes.grid(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_visible(False)
    if report.outlook.draft is None:
        axes.set_axis_off()
        axes.text(0.5, 0.5, "no draft could be made", ha="center", transform=axes.transAxes)
        return
    drawn = picture(report.outlook)
    for row, (_, cells) in enumerate(drawn.rows):
        for layer, cell in enumerate(cells):
            if cell in _COLOURS:
                place = (layer - 0.42, row - 0.38)
                axes.add_patch(Rectangle(place, 0.84, 0.76, color=_COLOURS[cell], linewidth=0))
    n_layers = max(len(cells) for _, cells in drawn.rows)
    axes.set_xlim(-0.6, n_layers - 0.4)
    axes.set_ylim(len(drawn.rows) - 0.4, -0.6)
    axes.set_yticks(range(len(drawn.rows)), [name for name, _ in drawn.rows])
    axes.tick_params(length=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("layer")
    axes.set_title("The draft" if report.outlook.state == "on" else "The best draft (not used)")
    handles = [Patch(color=_COLOURS[sign], label=meaning) for sign, meaning in drawn.legend]
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _draw_items(axes: Axes, report: PlanReport) -> None:
    """Single agreement of each sublayer over the layers, with its confidence; skipped ones hollow,
    larger where they cost more."""
    outlook = report.outlook
    kinds: list[Kind] = list(dict.fromkeys(s.kind for s in outlook.sublayers))
    dearest = max((i.cost_ms for i in outlook.items), default=0.0)
    for n, kind in enumerate(kinds):
        items = [i for i in outlook.items if i.sublayer.kind is kind]
        # a little beside each other, so that all error bars are seen
        x = np.array([i.sublayer.layer for i in items]) + 0.22 * (n - 0.5 * (len(kinds) - 1))
        y = np.array([i.agreement for i in items])
        low, high = (np.array([i.interval[end] for i in items]) for end in (0, 1))
        colour = HUES[kind][0]
        axes.vlines(x, low, high, color=colour, linewidth=0.8, alpha=0.45)
        sizes = [12.0 + 50.0 * (i.cost_ms / dearest if dearest > 0.0 else 0.0) for i in items]
        faces = ["white" if i.mode != "full" else colour for i in items]
        axes.scatter(x, y, s=sizes, facecolors=faces, edgecolors=colour, linewidths=1.2, zorder=3)
        axes.scatter([], [], s=40, color=colour, label=kind_name(kind))
    axes.scatter([], [], s=40, facecolors="white", edgecolors="#555555", label="left out")
    axes.set_ylim(-0.03, 1.05)
    axes.set_xlabel("layer")
    axes.set_ylabel("picks that survive leaving it out (95 %)")
    axes.set_title("Sublayers (area: cost)")
    axes.legend(loc="lower right")


def _draw_curve(axes: Axes, report: PlanReport) -> None:
    """α and predicted speed by the share of a step that is saved, and the judged plans."""
    outlook = report.outlook
    points = outlook.curve
    x = [100.0 * p.saved_share for p in points]
    axes.plot(x, [p.alpha for p in points], color="#009E73", linewidth=1.6, label="α, predicted")
    axes.plot(x, [p.ratio for p in points], color="#CC79A7", linewidth=1.6, label="its speed")
    judged = outlook.judged
    saved = [100.0 * (1.0 - j.draft_cost) for j in judged]
    if judged:
        errors = np.array(
            [[j.agreement - j.interval[0], j.interval[1] - j.agreement] for j in judged]
        ).T
        axes.errorbar(
            saved, [j.agreement for j in judged], yerr=errors, fmt="o", color="#00674B",
            markersize=5, capsize=2.5, elinewidth=1.0, label="α, measured",
        )  # fmt: skip
        axes.plot(
            saved, [j.ratio for j in judged], "D", color="#8A4A6E", markersize=5,
            label="speed, by what was measured",
        )  # fmt: skip
    axes.axhline(1.0, color="#888888", linewidth=1.0, linestyle=":", label="plain decoding")
    axes.set_ylim(0.0, 1.1 * max([1.0, *(p.ratio for p in points), *(j.ratio for j in judged)]))
    axes.set_xlabel("share of a step saved (%)")
    axes.set_ylabel("acceptance, and speed relative to plain decoding")
    axes.set_title("What skipping could gain")
    axes.legend(loc="best")
