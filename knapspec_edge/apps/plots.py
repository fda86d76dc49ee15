"""Draws a profile: cost of a sublayer, verification curve and shares of a step, per setting.

`check` finds what would keep a plot from being written before anything is measured. The page holds
the same figure and the tables of profile_report; it needs nothing but itself.
"""

from __future__ import annotations

import io
import logging
import os
import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..errors import KnapspecError, UsageError
from ..latency.costs import Costs
from ..records import Kind
from .profile import ProfileReport, SettingResult
from .profile_report import Table, groups_of, round_tokens, sections, setting_name, title

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg", ".html")
# the Python that runs this, which need not be the one whose pip comes first
_MISSING = (
    f"plots need matplotlib: {shlex.quote(sys.executable)} -m pip install 'knapspec-edge[plot]'"
)

# Okabe and Ito's palette, which colour-blind readers can tell apart. One hue per kind of sublayer.
_HUES = {
    Kind.ATTENTION: ("#0072B2", "#56B4E9", "#004D7A", "#8FCBF0"),
    Kind.MLP: ("#D55E00", "#E69F00", "#8C3D00", "#F2C766"),
    Kind.BLOCK: ("#009E73", "#66C9AE", "#00674B", "#A3DECD"),
    Kind.RECURRENT: ("#CC79A7", "#E2B3CD", "#8A4A6E", "#F0D5E3"),
}
_HEAD, _REST = "#F0E442", "#999999"
_MARKERS = "osD^"
_MAX_CURVES = 6  # contexts of the verification curve that are drawn
_PNG_DPI = 150
# Stand for the colours of text and ground in the page, which depend on light or dark.
_INK, _PAPER = "#010203", "#fdfcfb"


def check(path: Path) -> None:
    """Whether a plot could be written to `path`. Raises UsageError, one line, where not."""
    suffix = _suffix(path)
    # that its cache folder cannot be written is no news for who asked for a plot
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    try:
        import matplotlib  # noqa: F401

        if suffix == ".html":
            import jinja2  # noqa: F401
    except ImportError:
        raise UsageError(_MISSING) from None
    try:
        if path.is_dir():
            raise UsageError(f"cannot write the plot {path}: it is a folder")
        if path.exists() and not path.is_file():
            raise UsageError(f"cannot write the plot {path}: it is not a file")
        if path.exists() and not os.access(path, os.W_OK):
            raise UsageError(f"cannot write the plot {path}: the file is read-only")
        temporary = _temporary(path)
        with open(temporary, "xb"):
            pass
        temporary.unlink()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"cannot write the plot {path}: {reason}") from None


def save(report: ProfileReport, path: Path) -> None:
    """Draw the report into a .png, .svg or .html file, all of it or nothing.

    Raises UsageError for another suffix or without matplotlib, KnapspecError where the file cannot
    be written.
    """
    suffix = _suffix(path)
    try:
        content = page(report).encode() if suffix == ".html" else _drawn(report, suffix[1:])
    except ImportError:
        raise UsageError(_MISSING) from None
    temporary = _temporary(path)
    try:
        try:
            with open(temporary, "xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, _target(path))
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise
    except OSError as error:
        raise KnapspecError(
            f"cannot write the plot {path}: {error.strerror or error}; the measurement itself is "
            "not lost"
        ) from None


def _suffix(path: Path) -> str:
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise UsageError(f"a plot is a .png, .svg or .html file, not {path.name or path}")
    return suffix


def _target(path: Path) -> Path:
    """Where a link leads: it is the file behind it that is replaced, not the link."""
    return Path(os.path.realpath(path))


def _temporary(path: Path) -> Path:
    target = _target(path)
    return target.with_name(f".{target.name}.{os.getpid()}.new")


# -- the figure


def drawn_settings(report: ProfileReport) -> list[SettingResult]:
    """The settings that are best for something; the first where none is marked."""
    return [r for r in report.results if r.best_for] or list(report.results[:1])


def _drawn(report: ProfileReport, form: str, ink: str = "black") -> bytes:
    """The figure in one of matplotlib's formats, the same bytes for the same report."""
    import matplotlib

    chosen: dict[Any, Any] = {
        "svg.hashsalt": "knapspec-edge",
        "font.family": "sans-serif",
        "font.size": 9.5,
        "axes.titlesize": 10.5,
        "legend.fontsize": 8.5,
        "text.color": ink,
        "axes.labelcolor": ink,
        "axes.edgecolor": ink,
        "xtick.color": ink,
        "ytick.color": ink,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": "#888888",
        "grid.alpha": 0.25,
        "grid.linewidth": 0.6,
        # hides lines that run behind it
        "legend.facecolor": _PAPER if ink == _INK else "white",
        "legend.edgecolor": "none",
        "legend.framealpha": 1.0,
    }
    with matplotlib.rc_context(chosen):
        figure = _figure(report)
        buffer = io.BytesIO()
        settings: dict[str, Any] = {"dpi": _PNG_DPI} if form == "png" else {}
        if form == "svg":
            settings["metadata"] = {"Date": None}
        figure.savefig(buffer, format=form, transparent=ink == _INK, **settings)
    return buffer.getvalue()


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
        colour, marker = _HUES[group.kind][n % 4], _MARKERS[n % 4]
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
    shares = {_name(kind): np.array([costs.share([kind.value], x) for x in grid]) for kind in kinds}
    colours = [_HUES[kind][0] for kind in kinds]
    head = np.minimum(costs.head_ms() / steps, 1.0)
    rest = np.array([costs.fixed_ms(x) for x in grid]) / steps
    parts = {"rest": rest, "head": head, **shares}
    total = np.sum(list(parts.values()), axis=0)
    stacked = [100.0 * share / np.maximum(total, 1e-12) for share in parts.values()]
    areas = axes.stackplot(grid, stacked, colors=[_REST, _HEAD, *colours], alpha=0.85)
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


def _name(kind: Kind) -> str:
    return "MLP" if kind is Kind.MLP else kind.value


# -- the page


@dataclass(frozen=True)
class _Part:
    """A table or facts, as the page shows them."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def page(report: ProfileReport) -> str:
    """One HTML file with the figure and all tables; everything in it is escaped."""
    import jinja2

    figure = _drawn(report, "svg", _INK).decode()
    # what stands before the element belongs to a file of its own
    figure = figure[figure.index("<svg") :]
    figure = figure.replace(_INK, "currentColor").replace(_PAPER, "var(--paper)")
    shown = []
    for section in sections(report):
        parts = [
            _Part(part.caption, part.columns, part.rows)
            if isinstance(part, Table)
            else _Part(part.caption, (), part.pairs)
            for part in section.parts
        ]
        shown.append((section.title, parts))
    if report.warnings:
        shown.append(("Warnings", [_Part("", (), [("", text) for text in report.warnings])]))
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    # our own drawing, in which matplotlib has escaped all texts
    from markupsafe import Markup

    return environment.from_string(_PAGE).render(
        title=title(report), figure=Markup(figure), sections=shown
    )


_PAGE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{{ title }}</title>
<style>
:root { color-scheme: light dark; }
:root { --ink: #1a1a1a; --paper: #ffffff; --dim: #5c5c5c; --rule: #d8d8d8; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e6e6; --paper: #16181c; --dim: #a8a8a8; --rule: #3a3d44; }
}
body { color: var(--ink); background: var(--paper); margin: 2rem auto; max-width: 80rem;
  padding: 0 1.5rem; font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2.2rem; }
figure { margin: 1.5rem 0; overflow-x: auto; }
figure svg { width: 100%; min-width: 56rem; height: auto; }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; }
caption { text-align: left; color: var(--dim); padding-bottom: .3rem; }
th, td { padding: .15rem .8rem; vertical-align: top; text-align: left; }
.figures th, .figures td { text-align: right; white-space: pre-line; vertical-align: bottom;
  border-bottom: 1px solid var(--rule); }
.facts th { font-weight: normal; color: var(--dim); white-space: nowrap; padding-left: 0; }
</style>
</head>
<body>
<h1>{{ title }}</h1>
<figure role="img" aria-label="Cost of a sublayer, verification curve and shares of a step">
{{ figure }}
</figure>
{% for heading, parts in sections %}
<h2>{{ heading }}</h2>
{% for part in parts %}
<table class="{{ 'figures' if part.columns else 'facts' }}">
{% if part.caption %}
<caption>{{ part.caption }}</caption>
{% endif %}
{% if part.columns %}
<thead><tr>
{%- for column in part.columns %}<th scope="col">{{ column }}</th>{% endfor -%}
</tr></thead>
{% endif %}
<tbody>
{% for row in part.rows %}
<tr>
{%- for cell in row %}
{% if loop.first %}<th scope="row">{{ cell }}</th>{% else %}<td>{{ cell }}</td>{% endif %}
{% endfor -%}
</tr>
{% endfor %}
</tbody>
</table>
{% endfor %}
{% endfor %}
</body>
</html>
"""
