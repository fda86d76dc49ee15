"""What the reports for people are made of: sections of tables and facts, and their layout.

Figures and words that every report writes alike stand here too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..records import Kind

_NARROWEST = 24  # columns of a terminal; nothing readable fits into fewer
_RULER = 10  # columns of a picture between two numbers
_KIND_NAMES = {Kind.MLP: "MLP"}


@dataclass(frozen=True)
class Table:
    """Text cells; the first column names the row. Headings may have several lines."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str
    together: int = 1  # so many columns after the first are not parted where the table is too wide


@dataclass(frozen=True)
class Facts:
    """(name, text) pairs."""

    pairs: tuple[tuple[str, str], ...]
    caption: str = ""


@dataclass(frozen=True)
class Picture:
    """One character per column in every row; what is too wide comes in strips."""

    rows: tuple[tuple[str, str], ...]  # (name, characters)
    caption: str
    legend: tuple[tuple[str, str], ...]  # (character, what it stands for)
    styles: tuple[tuple[str, str], ...] = ()  # (character, rich's style where there are colours)


@dataclass(frozen=True)
class Section:
    title: str
    parts: tuple[Table | Facts | Picture, ...]


# -- how it is laid out


def laid_out(sections: Sequence[Section], width: int) -> list[Any]:
    """What rich prints, for a terminal of so many columns. Tables that are wider come in parts."""
    from rich.padding import Padding
    from rich.table import Table as Grid
    from rich.text import Text

    width = max(_NARROWEST, width)
    shown: list[Any] = []
    for number, section in enumerate(sections):
        if number:
            shown.append(Text())
        shown.append(Text(section.title, style="bold"))
        for place, part in enumerate(section.parts):
            if part.caption:
                shown.append(Padding(Text(part.caption, style="dim"), (min(place, 1), 0, 0, 0)))
            if isinstance(part, Facts):
                grid = Grid.grid(padding=(0, 2, 0, 0))
                if any(name for name, _ in part.pairs):
                    grid.add_column(no_wrap=True)
                grid.add_column(overflow="fold")
                for pair in part.pairs:
                    grid.add_row(*(Text(text) for text in pair if text or len(grid.columns) == 2))
                shown.append(grid)
            elif isinstance(part, Picture):
                shown += _strips(part, width)
            else:
                shown += [_grid(piece) for piece in fitting(part, width)]
    return shown


def _strips(picture: Picture, width: int) -> list[Any]:
    from rich.text import Text

    margin = max((len(name) for name, _ in picture.rows), default=0) + 2
    n_columns = max((len(cells) for _, cells in picture.rows), default=0)
    # whole tens, so that a column is found by the ruler in every strip alike
    most = max(_RULER, (width - margin) // _RULER * _RULER)
    styles = dict(picture.styles)
    shown: list[Any] = []
    for first in range(0, n_columns, most):
        end = min(n_columns, first + most)
        marks = "".join(f"{n:<{_RULER}}" for n in range(first, end, _RULER))
        shown.append(Text(f"{'':<{margin}}{marks}".rstrip(), style="dim"))
        for name, cells in picture.rows:
            line = Text(f"{name:<{margin}}")
            for cell in cells[first:end]:
                line.append(cell, styles.get(cell, ""))
            shown.append(line)
    legend = "   ".join(f"{cell} {meaning}" for cell, meaning in picture.legend)
    shown.append(Text(f"{'':<{margin}}{legend}", style="dim"))
    return shown


def fitting(table: Table, width: int) -> list[Table]:
    """The table in as many pieces side by side as it takes; each repeats the first column."""
    widths = [_column_width(table, i) for i in range(len(table.columns))]
    pieces: list[list[int]] = [[0]]
    used = widths[0]
    for start in range(1, len(widths), table.together):
        group = range(start, min(len(widths), start + table.together))
        needed = sum(widths[i] for i in group)
        # as a whole into the next piece; parted only where even a piece of its own is too narrow
        if used + needed > width and len(pieces[-1]) > 1:
            pieces.append([0])
            used = widths[0]
        for i in group:
            if used + widths[i] > width and len(pieces[-1]) > 1:
                pieces.append([0])
                used = widths[0]
            pieces[-1].append(i)
            used += widths[i]
    return [
        Table(
            tuple(table.columns[i] for i in piece),
            tuple(tuple(row[i] for i in piece) for row in table.rows),
            table.caption,
        )
        for piece in pieces
    ]


def _column_width(table: Table, i: int) -> int:
    lines = [*table.columns[i].split("\n"), *(row[i] for row in table.rows)]
    return max(len(line) for line in lines) + 2  # the gap to the next column


def _grid(table: Table) -> Any:
    from rich.table import Table as Grid
    from rich.text import Text

    grid = Grid(box=None, padding=(0, 2, 0, 0), show_edge=False, header_style="bold")
    for heading in table.columns:
        grid.add_column(Text(heading), justify="right", vertical="bottom", no_wrap=True)
    for row in table.rows:
        grid.add_row(*(Text(cell) for cell in row))
    return grid


# -- figures and words


def sig(value: float, digits: int = 3) -> str:
    """A figure with so many significant digits, never in powers of ten."""
    if value == 0.0 or not math.isfinite(value):
        return "0" if value == 0.0 else "–"
    decimals = digits - 1 - math.floor(math.log10(abs(value)))
    return f"{round(value, decimals):,.{max(0, min(6, decimals))}f}"


def duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120.0 else f"{seconds / 60.0:.1f} min"


def counted(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def kind_name(kind: Kind) -> str:
    """The kind in words."""
    return _KIND_NAMES.get(kind, kind.value)


def clean(text: str) -> str:
    """Names come from files: nothing in them drives a terminal."""
    return "".join(c if c.isprintable() else "�" for c in " ".join(text.split()))


def clean_pairs(pairs: Sequence[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    return tuple((name, clean(text)) for name, text in pairs)


def finite(value: Any) -> Any:
    """JSON knows neither infinities nor "not a number"."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value
