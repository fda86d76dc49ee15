"""A profile: cost of a sublayer, verification curve and shares of a step, per setting."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ...latency.costs import Costs
from ...records import Kind
from ..profile import ProfileReport, SettingResult
from ..profile_report import groups_of, round_tokens, sections, setting_name, title
from ..report import kind_name
from . import HEAD, HUES, REST, Drawing, with_warnings

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MARKERS = "osD^"
_MAX_CURVES = 6  # contexts of the verification curve that are drawn


def drawing(report: ProfileReport) -> Drawing:
    """What `plots.save` writes of a report."""
    return Drawing(
        title(report),
        "Cost of a sublayer, verification curve and shares of a step",
        lambda: _figure(report),
        with_warnings(sections(report), report.warnings),
    )


def drawn_settings(report: ProfileReport) -> list[SettingResult]:
    """The settings that are best for something; the first where none is marked."""
    return [r for r in report.results if r.best_for] or list(report.results[:1])


def _figure(report: ProfileReport) -> Figure:
    from matplotlib.figure import Figure

    settings = drawn_settings(report)
    figure = Figure(figsize=(13.5, 0.5 + 4.2 * max(1, len(settings))), layout="constrained")
    # names may hold what would be read as a formula
    figure.suptitle(title(report), fontsize=13, parse_math=False)
    if not settings:
        return figure
    rows = np.atleast_1d(np.asarray(figure.subfigures(len(settings), 1), dtype=object))
    for row, result in zip(rows, settings, strict=True):
        costs = Costs(result.profile)
        name = setting_name(result)
        if result.best_for:
            purposes = ["plain decoding" if p == "plain" else p for p in result.best_for]
            name += f" (best for {' and '.join(purposes)})"
        row.suptitle(name, fontsize=10.5, parse_math=False)
        left, middle, right = row.subplots(1, 3)
        _draw_costs(left, costs)
        _draw_verification(middle, costs)
        _draw_shares(right, costs)
    return figure


def _grid(costs: Costs, n: int = 300) -> NDArray[np.float64]:
    """Contexts to draw curves at: f64 [n], geometric over what was measured."""
    contexts = costs.profile.contexts
    first, last = contexts[0], contexts[-1]
    if first == last:  # one context is drawn as a short stretch around it
        first, last = max(1, round(0.8 * first)), max(2, round(1.25 * last))
    return np.geomspace(max(1, first), last, n)


def _context_axis(axes: Axes, costs: Costs) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    grid = _grid(costs)
    powers = [2**k for k in range(31) if grid[0] <= 1.01 * 2**k and 2**k <= 1.01 * grid[-1]]
    step = -(-len(powers) // 8)
    ticks = powers[::step] if len(powers) > 1 else list(costs.profile.contexts)
    axes.set_xscale("log", base=2)
    axes.set_xlim(float(grid[0]) / 1.05, float(grid[-1]) * 1.05)
    axes.xaxis.set_major_locator(FixedLocator([float(t) for t in ticks]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: _tokens(x)))
    axes.set_xlabel("context (tokens)")


def _tokens(n: float) -> str:
    return f"{n / 1024:.0f}K" if n >= 1024 and round(n) % 1024 == 0 else f"{n:.0f}"


def _draw_costs(axes: Axes, costs: Costs) -> None:
    """Measured points with standard errors, and the fitted curve, per group of classes."""
    grid = _grid(costs)
    seen: dict[Kind, int] = {}
    top = 0.0
    groups = groups_of(costs)
    for i, group in enumerate(groups):
        n = seen.get(group.kind, 0)
        seen[group.kind] = n + 1
        colour, marker = HUES[group.kind][n % 4], _MARKERS[n % 4]
        fitted = [group.ms(x) for x in grid]
        top = max(top, *fitted)
        axes.plot(grid, fitted, color=colour, linewidth=1.8, label=group.name)
        if group.points:
            x, y, error = (np.array(column) for column in zip(*group.points, strict=True))
            top = max(top, float(y.max()))
            # a little beside each other, so that all error bars are seen
            aside = 1.025 ** (i - 0.5 * (len(groups) - 1))
            axes.errorbar(
                aside * x, y, yerr=error, fmt=marker, color=colour, markersize=4.5, capsize=2.5,
                elinewidth=1.0, linestyle="none",
            )  # fmt: skip
    crossing = costs.crossing_tokens()
    if crossing is not None and grid[0] < crossing < grid[-1]:
        axes.axvline(
            crossing, color="#888888", linewidth=1.0, linestyle=":",
            label=f"attention overtakes MLP\n({round_tokens(crossing):,} tokens)",
        )  # fmt: skip
    _context_axis(axes, costs)
    # one wild error bar must not flatten everything else
    axes.set_ylim(0.0, 1.15 * top if top > 0.0 else 1.0)
    axes.set_ylabel("ms per sublayer (± standard error)")
    axes.set_title("Cost of one sublayer")
    axes.legend(loc="best")


def _draw_verification(axes: Axes, costs: Costs) -> None:
    """A pass over several tokens, in steps of one token."""
    import matplotlib
    from matplotlib.ticker import MaxNLocator

    contexts = costs.profile.contexts
    if len(contexts) > _MAX_CURVES:
        places = np.linspace(0, len(contexts) - 1, _MAX_CURVES).round().astype(int)
        contexts = tuple(contexts[i] for i in places)
    widths = [w for w in costs.profile.widths if w <= costs.max_width]
    # neither end vanishes on white or on black
    colours = matplotlib.colormaps["viridis"](np.linspace(0.25, 0.85, max(2, len(contexts))))
    top = 1.0
    for colour, context in zip(colours, contexts, strict=False):
        step_ms = costs.step_ms(context)
        steps = [costs.verify_ms(context, w) / step_ms for w in widths]
        top = max(top, *steps)
        axes.plot(
            widths, steps, color=colour, marker="o", markersize=3.5, linewidth=1.5,
            label=f"{context:,}",
        )  # fmt: skip
    bound = np.array([1.0, float(max(2, widths[-1]))])
    axes.plot(bound, bound, color="#888888", linewidth=1.0, linestyle="--", label="step by step")
    axes.axhline(1.0, color="#888888", linewidth=1.0, linestyle=":")
    axes.set_xlim(0.0, 1.03 * bound[-1])
    # a stalled pass must not flatten everything else
    axes.set_ylim(0.0, 1.1 * max(2.0, min(top, 1.1 * bound[-1])))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("tokens in the pass")
    axes.set_ylabel("time in steps of one token")
    axes.set_title("Verification")
    axes.legend(loc="best", title="context (tokens)", title_fontsize=8.5)


def _draw_shares(axes: Axes, costs: Costs) -> None:
    """What a step consists of: sublayers by kind, head, rest, stacked."""
    grid = _grid(costs)
    kinds = list(dict.fromkeys(c.kind for c in costs.classes))
    # what grows with the context on top
    kinds.sort(key=lambda kind: kind in (Kind.ATTENTION, Kind.BLOCK))
    steps = np.array([costs.step_ms(x) for x in grid])
    shares = {
        kind_name(kind): np.array([costs.share([kind.value], x) for x in grid]) for kind in kinds
    }
    colours = [HUES[kind][0] for kind in kinds]
    head = np.minimum(costs.head_ms() / steps, 1.0)
    rest = np.array([costs.fixed_ms(x) for x in grid]) / steps
    parts = {"rest": rest, "head": head, **shares}
    total = np.sum(list(parts.values()), axis=0)
    stacked = [100.0 * share / np.maximum(total, 1e-12) for share in parts.values()]
    areas = axes.stackplot(grid, stacked, colors=[REST, HEAD, *colours], alpha=0.85)
    axes.grid(False)
    _context_axis(axes, costs)
    axes.set_ylim(0.0, 100.0)
    axes.set_ylabel("share of a step (%)")
    axes.set_title("What a step consists of")
    # beside the areas, in their order from top to bottom
    axes.legend(
        areas[::-1], list(parts)[::-1], loc="upper left", bbox_to_anchor=(1.0, 1.0),
        handlelength=1.2,
    )  # fmt: skip
