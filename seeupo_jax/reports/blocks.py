"""Shortens long series for charts: means over blocks of iterations."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Point:
    """A value and its interval, if it has one; `at` is an iteration or a kind.

    value: None: recorded as missing; no line joins its neighbours.
    """

    at: float | str
    value: float | None
    low: float | None = None
    high: float | None = None


def block_size(iterations: Iterable[float], most: int) -> int:
    """The number of iterations to average over so that at most `most` values are left.

    Sparse series, such as evaluations, stay unchanged as long as they fit.
    """
    distinct = set(iterations)
    if len(distinct) <= most:
        return 1
    return math.ceil((max(distinct) - min(distinct) + 1) / (most - 1))


def block_start(iteration: int, block: int) -> int:
    """The first iteration of the block that this one is in; one begins at iteration 1."""
    return (iteration - 1) // block * block + 1


def thin(points: Sequence[Point], block: int) -> list[Point]:
    """One point a block: the means of iterations, values, and of the bounds that are there."""
    if block == 1:
        return list(points)
    blocks: dict[int, list[Point]] = {}
    for point in points:
        blocks.setdefault(block_start(int(point.at), block), []).append(point)
    fields = ("at", "value", "low", "high")
    return [
        Point(*(mean([getattr(p, f) for p in members]) for f in fields))
        for members in blocks.values()
    ]


def known(points: Iterable[Point]) -> list[Point]:
    """The points that have a value."""
    return [point for point in points if point.value is not None]


def mean(numbers: Sequence[float | None]) -> float | None:
    """The mean of the values that are there."""
    present = [number for number in numbers if number is not None]
    return sum(present) / len(present) if present else None


def rounded(number: float) -> float:
    """Six digits, which is more than a chart shows."""
    return float(f"{number:.6g}")


def axis_range(lines: Iterable[Sequence[Point]]) -> tuple[float, float]:
    """From 0, or below, to a little more than the largest value."""
    values = [n for line in lines for p in line for n in (p.value, p.low, p.high) if n is not None]
    low, high = min(0.0, *values, 0.0), max(0.0, *values, 0.0)
    return (low, low + 1.0) if high == low else (low * 1.05, high * 1.05)


def color_range(values: Sequence[float]) -> list[float]:
    """The least and the largest value; of equal ones Vega would draw the colour in the middle."""
    low, high = min(values), max(values)
    return [low, high if high > low else low + (abs(low) or 1.0)]


def block_span(start: int, block: int) -> dict[str, float]:
    """A block on the axis; that of iteration 0, before which there is none, is it alone."""
    return {"from": max(start, 0) - 0.5, "to": start + block - 0.5}
