"""What goes to the screen: text on standard output, everything else on standard error.

Notices, statistics and progress vanish where standard error is not a terminal; errors and warnings
do not. Does not know what is being shown.
"""

from __future__ import annotations

import io
import os
import sys
import threading
import time
from collections.abc import Callable
from functools import cached_property
from typing import Any, TextIO

from .styling import Styler

# A stage that ends within this time shows no progress: a line that flashes up helps nobody.
PROGRESS_DELAY_SECONDS = 1.0
# Remaining time is estimated from what is done; before this share and time it would be a guess.
_ESTIMATE_MIN_SHARE = 0.02
_ESTIMATE_MIN_SECONDS = 2.0
_BAR_COLUMNS = 24
PROGRAM = "knapspec-edge"
# Columns of what is shown in a file or pipe, unless COLUMNS says otherwise.
_FILE_COLUMNS = 100

# A model's text must not drive the terminal: control characters other than tab and newline go.
_UNSAFE = {code: None for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\t\n"}

_STAGES = {
    "load": "loading the model",
    "measure": "measuring this machine (once)",
    "profile": "measuring passes",
    "fidelity": "measuring what sublayers contribute",
    "certify": "comparing states of plans",
    "search": "searching for a mask (once)",
    "prompt": "reading the prompt",
    "compare": "comparing, answer by answer",
    "check": "checking the file",
    "wait": "waiting for another download of the same model",
    "download": "downloading",
    "write": "unpacking",
    "workers": "waiting for workers",
}


def is_terminal(stream: Any) -> bool:
    try:
        return bool(stream is not None and stream.isatty())
    except ValueError:  # closed
        return False


class Terminal:
    """The two output streams of one command."""

    def __init__(
        self,
        *,
        quiet: bool = False,
        verbose: bool = False,
        out: TextIO | None = None,
        err: TextIO | None = None,
    ) -> None:
        self.out = out or sys.stdout
        self.err = err or sys.stderr
        self.quiet = quiet
        self.out_is_terminal = is_terminal(self.out)
        self.err_is_terminal = is_terminal(self.err)
        self.shows_notices = not quiet and (verbose or self.err_is_terminal)
        self._progress = _ProgressLine(self.err) if self.err_is_terminal and not quiet else None
        self._mid_line = False
        self._styled: Any = None
        self._styler: Styler | None = None  # of the answer that is being shown
        for stream, is_tty in ((self.out, self.out_is_terminal), (self.err, self.err_is_terminal)):
            # Files and pipes get UTF-8 whatever the locale; a terminal shows what it can.
            reconfigure = getattr(stream, "reconfigure", None)
            if reconfigure is not None:
                reconfigure(errors="replace") if is_tty else reconfigure(encoding="utf-8")

    # -- standard output

    def text(self, text: str) -> None:
        """A piece of the model's text, shown at once."""
        if not text:
            return
        self.clear_progress()
        self._mid_line = not text.endswith("\n")
        self.out.write(text.translate(_UNSAFE) if self.out_is_terminal else text)
        self.out.flush()

    def answer(self, text: str, *, thought: bool = False) -> None:
        """A piece of an answer in a conversation, shown at once; where there are colours, Markdown
        and thoughts have theirs."""
        if self._styler is None and text and self._has_colours:
            self._styler = Styler()
        if self._styler is None:
            self.text(text)
        elif text:
            self.clear_progress()
            self._mid_line = not text.endswith("\n")
            self.out.write(self._styler.push(text.translate(_UNSAFE), thought=thought))
            self.out.flush()

    @cached_property
    def _has_colours(self) -> bool:
        """Whether standard output takes codes for colours; NO_COLOR and dumb terminals do not."""
        if not self.out_is_terminal:
            return False
        from rich.console import Console

        console = Console(file=self.out)
        return console.color_system not in (None, "windows") and not console.no_color

    @property
    def columns(self) -> int:
        """Width to lay out for: that of the terminal, or one that suits a file."""
        from rich.console import Console

        if self.out_is_terminal or os.environ.get("COLUMNS"):
            return Console(file=self.out).width
        return _FILE_COLUMNS

    def can_show(self, characters: str) -> bool:
        """Whether standard output has these characters. Files and pipes have them all."""
        try:
            characters.encode(getattr(self.out, "encoding", None) or "utf-8")
        except (LookupError, UnicodeEncodeError):
            return False
        return True

    def show(self, renderables: list[Any]) -> None:
        """What rich can print, laid out for `columns`; without colours where nobody watches."""
        from rich.console import Console

        self.clear_progress()
        drawn = io.StringIO()
        real = Console(file=self.out)
        console = Console(
            file=drawn,
            width=self.columns,
            force_terminal=self.out_is_terminal,
            # also obeys NO_COLOR and dumb terminals
            color_system=real.color_system if self.out_is_terminal else None,  # type: ignore[arg-type]
            no_color=real.no_color,
            highlight=False,
            markup=False,
            emoji=False,
        )
        for renderable in renderables:
            console.print(renderable)
        # Padding at the end of a line only gets in the way of copying and comparing.
        self.out.write("".join(f"{line.rstrip()}\n" for line in drawn.getvalue().split("\n")[:-1]))
        self.out.flush()
        self._mid_line = False

    def end_line(self) -> None:
        """Start a new line on standard output unless it is at the start of one."""
        if self._styler is not None:
            self.out.write(self._styler.end())
            self.out.flush()
            self._styler = None
        if self._mid_line:
            self.text("\n")

    # -- standard error

    def clear_echo(self) -> None:
        """What is written next goes over the ^C that a terminal shows at the start of a line."""
        if self.err_is_terminal:
            self.clear_progress()
            self.err.write("\r")

    def notice(self, text: str) -> None:
        """Something worth knowing, dim; only where somebody watches."""
        if self.shows_notices:
            self._line(text, "dim")

    def reply(self, text: str) -> None:
        """What a command that somebody typed has to say; like a notice, but never too much."""
        if self.shows_notices or self.err_is_terminal:
            self._line(text, "dim")

    def warning(self, text: str) -> None:
        if not self.quiet:
            self._line(f"{PROGRAM}: warning: {text}", "yellow")

    def error(self, text: str) -> None:
        self._line(f"{PROGRAM}: error: {text}", "bold red")

    def progress(self, stage: str, share: float | None, detail: str = "") -> None:
        """How far a slow stage is (0..1, None: unknown), and more in words; shown once it has
        lasted a moment."""
        if self._progress is not None:
            self._progress.update(_STAGES.get(stage, stage), share, detail=detail)

    def job_progress(self, text: str, share: float, elapsed_seconds: float) -> None:
        """How far a job of many pieces is, which has taken so long; `text` says what it is doing.
        Unlike a stage it goes on after something else was shown."""
        if self._progress is not None:
            left = remaining_seconds(share, elapsed_seconds)
            self._progress.update("job", share, text.translate(_UNSAFE), left)

    def clear_progress(self) -> None:
        if self._progress is not None:
            self._progress.clear()

    def _line(self, text: str, style: str) -> None:
        self.clear_progress()
        if self.err_is_terminal and self.out_is_terminal:
            self.end_line()
        try:
            self._show_line(text, style)
        except OSError:
            # A notice that cannot be written costs no answer. Standard error stays unusable, so
            # what it holds back goes nowhere.
            self.err = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  (for good)
            sys.stderr = self.err

    def _show_line(self, text: str, style: str) -> None:
        if not self.err_is_terminal:
            self.err.write(text + "\n")
        else:
            if self._styled is None:
                from rich.console import Console

                self._styled = Console(file=self.err, highlight=False, soft_wrap=True)
            self._styled.print(text.translate(_UNSAFE), style=style, markup=False)
        self.err.flush()


def remaining_seconds(share: float, elapsed_seconds: float) -> float | None:
    """Time left of a stage of which `share` (0..1) took `elapsed_seconds`; None: too early."""
    if share < _ESTIMATE_MIN_SHARE or elapsed_seconds < _ESTIMATE_MIN_SECONDS:
        return None
    return max(0.0, elapsed_seconds * (1.0 / min(share, 1.0) - 1.0))


def _left(seconds: float) -> str:
    """ "25 s left", "3:05 min left"."""
    whole = max(1, round(seconds))
    return f"{whole} s left" if whole < 90 else f"{whole // 60}:{whole % 60:02d} min left"


class _ProgressLine:
    """One transient line that appears only for stages that last."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._begun = 0.0  # when the stage began
        self._end: float | None = None  # when it is expected to end
        self._lock = threading.RLock()
        self._stage: str | None = None
        self._share: float | None = None
        self._text = ""
        self._timer: threading.Timer | None = None
        self._bar: Any = None
        self._task: Any = None

    def update(
        self,
        stage: str,
        share: float | None,
        text: str | None = None,
        left_seconds: float | None = None,
        detail: str = "",
    ) -> None:
        """`text` stands for the stage's name, and then the caller knows the remaining time."""
        with self._lock:
            if stage != self._stage:
                self.clear()
                self._stage = stage
                self._begun = self._clock()
                self._end = None
                # By a timer, so that a stage that never reports in between is shown as well.
                self._timer = threading.Timer(PROGRESS_DELAY_SECONDS, self._show, (stage,))
                self._timer.daemon = True
                self._timer.start()
            self._share = share
            now = self._clock()
            left = left_seconds
            if text is None and share is not None:
                left = remaining_seconds(share, now - self._begun)
            self._end = None if left is None else now + left
            self._text = text or (f"{stage}: {detail}" if detail else stage)
            self._refresh()

    def left(self) -> str:
        """The remaining time in words, as of now; empty where it is not known."""
        end = self._end
        return "" if end is None else _left(end - self._clock())

    def clear(self) -> None:
        with self._lock:
            self._stage = None
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            bar, self._bar = self._bar, None
        if bar is not None:
            bar.stop()

    def _show(self, stage: str) -> None:
        from rich.cells import set_cell_size
        from rich.console import Console
        from rich.progress import BarColumn, Progress, ProgressColumn, Task, TimeElapsedColumn
        from rich.table import Table
        from rich.text import Text

        line = self
        bar_column, elapsed_column = BarColumn(bar_width=_BAR_COLUMNS), TimeElapsedColumn()

        class Screen(Console):
            """Leaves the cursor: whatever ends or stops the process would leave it hidden."""

            def show_cursor(self, show: bool = True) -> bool:
                return False

        class Line(ProgressColumn):
            """As much as the terminal is wide for; what matters least goes first."""

            def render(self, task: Task) -> Table:
                text = Text(line._text, style="dim")
                share = "" if line._share is None else f"{line._share:4.0%}"
                left = Text(line.left(), style="dim")  # counts down between two reports
                elapsed = elapsed_column.render(task)
                room = screen.width - 1 - text.cell_len
                with_elapsed = 1 + len(share) + 1 + elapsed.cell_len + 1 + left.cell_len
                cells: list[Any] = [share]
                if room >= with_elapsed:
                    cells += [elapsed, left]
                    if room >= with_elapsed + 1 + _BAR_COLUMNS:
                        cells.insert(0, bar_column.render(task))
                elif room < 1 + len(share):
                    width = max(2, screen.width - 2 - len(share))
                    text = Text(set_cell_size(line._text, width - 1) + "…", style="dim")
                grid = Table.grid(padding=(0, 1))
                for _ in range(1 + len(cells)):
                    grid.add_column(no_wrap=True)
                grid.add_row(text, *cells)
                return grid

        screen = Screen(file=self._stream)
        bar = Progress(
            Line(), console=screen, transient=True, redirect_stdout=False, redirect_stderr=False
        )
        with self._lock:
            if self._stage != stage or self._bar is not None:
                return
            self._bar = bar
            self._task = bar.add_task("", total=None)
            self._refresh()
            bar.start()

    def _refresh(self) -> None:
        if self._bar is not None:
            share = self._share
            self._bar.update(self._task, total=None if share is None else 1.0, completed=share)
