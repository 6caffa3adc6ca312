"""The text of an explanation: titles, lines, and lists cut short."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax

EXPLAIN = "print what would run, and run nothing."  # what --explain is

Section = tuple[str, list[str]]  # a title and its lines
_TITLE, _WIDTH, _LISTED = 13, 100, 12


def print_explanation(sections: Iterable[Section], *, runs_here: bool = True) -> None:
    """Prints what was found; process 0 does.

    Args:
      runs_here: whether the command without --explain would run on this machine.
    """
    if jax.process_index():
        return
    for title, lines in sections:
        for number, line in enumerate(lines):
            head = f"{title if not number else '':{_TITLE}}"
            print(_wrapped(line, head))
    same = "rerun without --explain to run this."
    print(f"\nNothing was run and nothing written{f'; {same}' if runs_here else '.'}")


def _wrapped(line: str, head: str) -> str:
    """A line under its title; words, and so paths, stay whole."""
    return textwrap.fill(
        line,
        _WIDTH,
        initial_indent=head,
        subsequent_indent=" " * _TITLE,
        break_long_words=False,
        break_on_hyphens=False,
    )


def choices(values: Mapping[str, Any]) -> str:
    """Fields and their values, as in `a=1, b=2`."""
    return ", ".join(f"{name}={value}" for name, value in values.items())


def grouped(names: Sequence[str]) -> str:
    """Names of programs by kind: `sweep/turn 64` and `sweep/turn 128` as `turn 64 128`."""
    kinds: dict[str, list[str]] = {}
    for name in names:
        kind, _, sizes = name.partition("/")[2].partition(" ")
        kinds.setdefault(kind, []).append(sizes)
    return ", ".join(" ".join((kind, *filter(None, sizes))) for kind, sizes in kinds.items())


def listed(numbers: Sequence[int]) -> str:
    """Numbers, the middle of many left out."""
    shown = [f"{number:,}" for number in numbers]
    if len(shown) > _LISTED:
        shown = [*shown[: _LISTED - 1], "...", shown[-1]]
    return ", ".join(shown)
