"""Tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence


def print_table(rows: Sequence[Sequence[str]]) -> None:
    """Rows below a head, the first column to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *rest in rows:
        print(first.ljust(widths[0]), *(c.rjust(w) for c, w in zip(rest, widths[1:], strict=True)))
