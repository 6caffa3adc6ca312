"""Rows at the foot of a terminal that are redrawn, as wide and high as it is at the moment."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Sequence

from rich.console import Console, ConsoleDimensions, Group
from rich.control import Control
from rich.live import Live
from rich.segment import ControlType
from rich.text import Text

from seeupo_jax.display.terminal import SafeStream
from seeupo_jax.display.view import GAP, DisplayRow

_BARS = {True: ("━", "─"), False: ("=", "-")}  # done, not done; by whether there is Unicode
_LABEL = 11  # columns
_BAR = (6, 24)  # columns, at least and at most


class LiveDisplay:
    """Rows at the bottom of the terminal, with other lines scrolling above.

    Args:
      stream: a terminal.
      look: returns the rows, the most important first; rows that do not fit are left out.
    """

    def __init__(self, stream: SafeStream, look: Callable[[], Sequence[DisplayRow]]):
        self._stream, self._look = stream, look
        self._drawn: list[int] = []  # cells of each line, as drawn last
        self._console = Console(
            file=stream, force_terminal=True, highlight=False, markup=False, emoji=False
        )
        # Other prints appear above the rows only if they go to a terminal: `> file` and
        # `2> file` hold.
        shared = [each is not None and each.isatty() for each in (sys.stdout, sys.stderr)]
        self._live = Live(
            console=self._console,
            get_renderable=self._rows,
            redirect_stdout=shared[0],
            redirect_stderr=shared[1],
            vertical_overflow="visible",  # `_rows` leaves out rows that do not fit, also at the end
        )

    def start(self) -> None:
        self._live.start()

    def stop(self) -> None:
        self._live.stop()

    def line(self, text: str) -> None:
        """Writes a line that stays."""
        if self._live.is_started:
            self._live.refresh()  # to the terminal's width of now, before anything moves
        self._console.print(text, soft_wrap=True)

    def _rows(self) -> Group:
        self._fit()
        width = max(self._console.width - 1, 1)  # the last column is where terminals wrap
        unicode = self._stream.unicode
        shown = self._look()[: max(self._console.height - 1, 1)]
        lines = [_line(row, width, unicode) for row in shown]
        self._drawn = [line.cell_len for line in lines]
        return Group(*lines)

    def _fit(self) -> None:
        """Adopts the terminal's new size, and erases rows that a narrower size has wrapped."""
        with contextlib.suppress(OSError, ValueError, AttributeError, TypeError):
            # Of our own stream: rich asks the standard ones.
            width, height = os.get_terminal_size(self._stream.fileno())
            if width < 1 or height < 1:
                return
            wrapped = sum((cells - 1) // width for cells in self._drawn if cells)
            if width < self._console.width and wrapped:
                up = [(ControlType.ERASE_IN_LINE, 2), (ControlType.CURSOR_UP, 1)] * wrapped
                self._console.control(Control(*up))
            self._console.size = ConsoleDimensions(width, height)


def _line(row: DisplayRow, width: int, unicode: bool) -> Text:
    """A row within a width: its bar shrinks first, then its last parts are left out."""
    line = Text(f"{row.label:{_LABEL}}", style="dim", no_wrap=True)
    first, *others = row.parts
    line.append(first, style="not dim bold" if row.bar is not None else "not dim")
    least, most = _BAR
    room = width - line.cell_len - sum(len(GAP) + len(part) for part in others) - len(GAP)
    if row.bar is not None and room >= least:
        full, empty = _BARS[unicode]
        size = min(room, most)
        done = round(size * min(max(row.bar, 0.0), 1.0))
        line.append(GAP + full * done, style="not dim cyan").append(empty * (size - done))
    if row.trend and (room := width - line.cell_len - len(GAP)) > 0:
        line.append(GAP + row.trend[-room:], style="not dim green")
    for part in others:
        if line.cell_len + len(GAP) + len(part) > width:
            break
        line.append(GAP + part, style="not dim")
    line.truncate(width, overflow="ellipsis" if unicode else "crop")
    return line
