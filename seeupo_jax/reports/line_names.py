"""Names of a chart's lines, at their ends and in its legend: places, and how they are shortened."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping

LABEL_CHARACTERS = 18
_APART = 13  # pixels between the names of two lines
_LEGEND_WIDTH = 660  # pixels
_CHARACTER = 7  # pixels of a wide one in the legend


def end_labels(ends: Mapping[str, float], low: float, high: float, height: int) -> dict[str, float]:
    """Where to write each line's name, in pixels from the top, so that none covers another.

    Args:
      ends: the last value of each line.
      low, high: of the axis, which is `height` pixels long.
    """
    scale = height / (high - low)
    places = sorted(((high - ends[name]) * scale, name) for name in ends)
    placed: list[float] = []
    for place, _ in places:
        placed.append(max(place, placed[-1] + _APART) if placed else place)
    floor = float(max(height, _APART * len(placed)))
    for i in reversed(range(len(placed))):  # names pushed below the end move up again
        placed[i] = min(placed[i], floor)
        floor = placed[i] - _APART
    return {name: y for y, (_, name) in zip(placed, places, strict=True)}


def short_names(names: Collection[str]) -> dict[str, str]:
    """Each name's short form, no two the same: where ends do not tell names apart, words that all
    begin or end with are left out, and then the names are as long as they must be."""
    short = {name: shortened(name) for name in names}
    begin, end = _common(names), _common([name[::-1] for name in names])
    if begin + end >= min(map(len, names), default=0):  # nothing would be left
        begin = end = 0
    most = LABEL_CHARACTERS
    while len(set(short.values())) < len(short):
        short = {name: shortened(name[begin : len(name) - end], most) for name in names}
        most += 2
    return short


def _common(names: Collection[str]) -> int:
    """How many characters all names begin with, up to the end of a word."""
    common = os.path.commonprefix(list(names))
    return max(common.rfind(mark) for mark in " /=_,") + 1


def shortened(text: str, most: int = LABEL_CHARACTERS) -> str:
    """Shortens a text by leaving out its middle: names often differ at their ends."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[: half - 1]}…{text[-half:]}"


def legend_columns(names: Collection[str]) -> dict[str, int]:
    """Columns of a legend, three if there is room, and pixels within which no name is cut."""
    longest = _CHARACTER * max(map(len, names))
    columns = min(3, max(1, _LEGEND_WIDTH // longest))
    return {"columns": columns, "labelLimit": max(_LEGEND_WIDTH // columns, longest)}
