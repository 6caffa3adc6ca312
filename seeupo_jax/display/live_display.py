"""Rows at the foot of a terminal that are redrawn, as wide and high as it is at the moment."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence

from rich.console import Console, ConsoleDimensions, ConsoleOptions, ConsoleRenderable
from rich.control import Control
from rich.live import Live
from rich.segment import ControlType
from rich.text import Text

from seeupo_jax.display.terminal import SafeStream
from seeupo_jax.display.view import GAP, Row

_BARS = {True: ("━", "─"), False: ("=", "-")}  # done, not done; by whether there is Unicode
_LABEL = 11  # columns
_BAR = (6, 24)  # columns, at least and at most


class Rich:
    """Rows at the foot of the terminal that are redrawn; other lines scroll above them."""

    live = True

    def __init__(self, stream: SafeStream, look: Callable[[], Sequence[Row]], _: object):
        self._console = _Terminal(stream)
        # What else is printed is drawn above the rows only if it goes to a terminal: `> file` and
        # `2> file` hold.
        shared = [each is not None and each.isatty() for each in (sys.stdout, sys.stderr)]
        unicode = stream.encoding.lower().startswith("utf")
        self._live = _Live(_Rows(look, unicode), self._console, *shared)

    def start(self) -> None:
        self._live.start()

    def stop(self) -> None:
        self._live.stop()

    def line(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)


class _Terminal(Console):
    """A console that has the size of its own stream's terminal, at every moment."""

    def __init__(self, stream: SafeStream):
        super().__init__(file=stream, force_terminal=True, highlight=False)
        self._descriptor: int | None = None
        with contextlib.suppress(OSError, ValueError, AttributeError):
            self._descriptor = stream.fileno()

    @property
    def size(self) -> ConsoleDimensions:
        with contextlib.suppress(OSError, TypeError):
            width, height = os.get_terminal_size(self._descriptor)
            if width > 0 and height > 0:
                return ConsoleDimensions(width, height)
        return super().size


class _Rows:
    """The rows as wide and as high as the terminal is when they are drawn.

    What does not fit is left out: of a row its last parts, of all rows the last ones.

    drawn: cells of each line, when they were drawn last.
    """

    def __init__(self, look: Callable[[], Sequence[Row]], unicode: bool):
        self._look, self._unicode = look, unicode
        self.drawn: list[int] = []

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        width = max(console.size.width - 1, 1)  # the last column is where terminals wrap
        shown = self._look()[: max(console.size.height - 1, 1)]
        lines = [self._line(row, width) for row in shown]
        self.drawn = [line.cell_len for line in lines]
        yield from lines

    def _line(self, row: Row, width: int) -> Text:
        line = Text(f"{row.label:{_LABEL}}", style="dim", no_wrap=True)
        first, *others = row.parts
        line.append(first, style="not dim bold" if row.bar is not None else "not dim")
        least, most = _BAR
        room = width - line.cell_len - sum(len(GAP) + len(part) for part in others) - len(GAP)
        if row.bar is not None and room >= least:
            full, empty = _BARS[self._unicode]
            size = min(room, most)
            done = round(size * min(max(row.bar, 0.0), 1.0))
            line.append(GAP + full * done, style="not dim cyan")
            line.append(empty * (size - done))
        if row.trend and (room := width - line.cell_len - len(GAP)) > 0:
            line.append(GAP + row.trend[-room:], style="not dim green")
        for part in others:
            if line.cell_len + len(GAP) + len(part) > width:
                break
            line.append(GAP + part, style="not dim")
        line.truncate(width, overflow="ellipsis" if self._unicode else "crop")
        return line


class _Live(Live):
    """Erases all of what it drew, also where a terminal made narrower has wrapped its lines."""

    def __init__(self, drawn: _Rows, console: Console, out: bool, err: bool):
        self._drawn, self._width = drawn, console.size.width
        super().__init__(
            drawn,
            console=console,
            refresh_per_second=4,
            redirect_stdout=out,
            redirect_stderr=err,
            vertical_overflow="visible",
        )

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        width = self.console.size.width
        wrapped = sum((cells - 1) // width for cells in self._drawn.drawn if cells)
        narrower, self._width = width < self._width, width
        shown = super().process_renderables(renderables)
        if narrower and wrapped:
            up = [(ControlType.ERASE_IN_LINE, 2), (ControlType.CURSOR_UP, 1)] * wrapped
            return [Control(*up), *shown]
        return shown
