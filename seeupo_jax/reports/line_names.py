"""Names at the ends of a chart's lines: where each is written, and how it is shortened."""

from __future__ import annotations

from collections.abc import Mapping

LABEL_CHARACTERS = 18
_APART = 13  # pixels between the names of two lines


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
    for i in reversed(range(len(placed))):  # what was pushed out below moves up again
        placed[i] = min(placed[i], floor)
        floor = placed[i] - _APART
    return {name: y for y, (_, name) in zip(placed, places, strict=True)}


def shortened(text: str) -> str:
    """At most `LABEL_CHARACTERS`, the middle left out: names often differ at their ends."""
    if len(text) <= LABEL_CHARACTERS:
        return text
    half = LABEL_CHARACTERS // 2
    return f"{text[: half - 1]}…{text[-half:]}"
