"""Draws reports: one figure, as an image or in a page with the report's tables.

What is drawn is in the modules of this package, one per report. `check` finds what would keep a
plot from being written before anything is measured. A page needs nothing but itself.
"""

from __future__ import annotations

import io
import logging
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import KnapspecError, UsageError
from ...records import Kind
from .. import files
from ..report import Facts, Section, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg", ".html")
# the Python that runs this, which need not be the one whose pip comes first
_MISSING = (
    f"plots need matplotlib: {shlex.quote(sys.executable)} -m pip install 'knapspec-edge[plot]'"
)

# Okabe and Ito's palette, which colour-blind readers can tell apart. One hue per kind of sublayer.
HUES = {
    Kind.ATTENTION: ("#0072B2", "#56B4E9", "#004D7A", "#8FCBF0"),
    Kind.MLP: ("#D55E00", "#E69F00", "#8C3D00", "#F2C766"),
    Kind.BLOCK: ("#009E73", "#66C9AE", "#00674B", "#A3DECD"),
    Kind.RECURRENT: ("#CC79A7", "#E2B3CD", "#8A4A6E", "#F0D5E3"),
}
HEAD, REST = "#F0E442", "#999999"
_PNG_DPI = 150
# Stand for the colours of text and ground in the page, which depend on light or dark.
_INK, _PAPER = "#010203", "#fdfcfb"


@dataclass(frozen=True)
class Drawing:
    """What `save` writes."""

    title: str
    description: str  # of the figure, for who cannot see it
    figure: Callable[[], Figure]
    sections: Sequence[Section]  # of the page; pictures are left to the figure


def with_warnings(sections: Sequence[Section], warnings: Sequence[str]) -> list[Section]:
    """A page also lists the warnings, which a terminal has shown before."""
    if not warnings:
        return list(sections)
    facts = Facts(tuple(("", text) for text in warnings))
    return [*sections, Section("Warnings", (facts,))]


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
    files.check_writable(path, "the plot")


def save(drawing: Drawing, path: Path) -> None:
    """Draw it into a .png, .svg or .html file, all of it or nothing.

    Raises UsageError for another suffix or without matplotlib, KnapspecError where the file cannot
    be written.
    """
    suffix = _suffix(path)
    try:
        content = page(drawing).encode() if suffix == ".html" else _drawn(drawing, suffix[1:])
    except ImportError:
        raise UsageError(_MISSING) from None
    temporary = files.temporary(path)
    try:
        try:
            with open(temporary, "xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, files.target(path))
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


def _drawn(drawing: Drawing, form: str, ink: str = "black") -> bytes:
    """The figure in one of matplotlib's formats, the same bytes for the same drawing."""
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
        figure = drawing.figure()
        buffer = io.BytesIO()
        settings: dict[str, Any] = {"dpi": _PNG_DPI} if form == "png" else {}
        if form == "svg":
            settings["metadata"] = {"Date": None}
        figure.savefig(buffer, format=form, transparent=ink == _INK, **settings)
    return buffer.getvalue()


# -- the page


@dataclass(frozen=True)
class _Part:
    """A table or facts, as the page shows them."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def page(drawing: Drawing) -> str:
    """One HTML file with the figure and all tables; everything in it is escaped."""
    import jinja2

    figure = _drawn(drawing, "svg", _INK).decode()
    # what stands before the element belongs to a file of its own
    figure = figure[figure.index("<svg") :]
    figure = figure.replace(_INK, "currentColor").replace(_PAPER, "var(--paper)")
    shown = []
    for section in drawing.sections:
        parts = [
            _Part(part.caption, part.columns, part.rows)
            if isinstance(part, Table)
            else _Part(part.caption, (), part.pairs)
            for part in section.parts
            if isinstance(part, Table | Facts)
        ]
        shown.append((section.title, parts))
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    # our own drawing, in which matplotlib has escaped all texts
    from markupsafe import Markup

    return environment.from_string(_PAGE).render(
        title=drawing.title, description=drawing.description, figure=Markup(figure), sections=shown
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
<figure role="img" aria-label="{{ description }}">
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
