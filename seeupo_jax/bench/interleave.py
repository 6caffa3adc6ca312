"""Contenders that take turns, so that a noisy machine slows all of them; and tables of them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Timing:
    """Seconds of every run of a contender."""

    each: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.each)

    def as_json(self) -> dict[str, float | list[float]]:
        return {
            "median_s": self.median,
            "least_s": min(self.each),
            "most_s": max(self.each),
            "each_s": list(self.each),
        }


def alternate(contenders: Mapping[str, Callable[[int], float]], repeats: int) -> dict[str, Timing]:
    """Runs every contender once a round, in every other round the last one first.

    Args:
      contenders: from the number of the round to the seconds that it took.
    """
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(repeats):
        names = list(contenders)
        for name in names if number % 2 == 0 else names[::-1]:
            found[name].append(contenders[name](number))
    return {name: Timing(tuple(each)) for name, each in found.items()}


def fastest(timings: Mapping[str, Timing], names: Sequence[str]) -> str:
    """The one of `names` with the least median."""
    return min(names, key=lambda name: timings[name].median)


def ratio(slower: Timing, faster: Timing) -> dict[str, float]:
    """Of the medians, and the least and greatest of a round."""
    rounds = [a / b for a, b in zip(slower.each, faster.each, strict=True)]
    return {
        "ratio": slower.median / faster.median,
        "ratio_least": min(rounds),
        "ratio_most": max(rounds),
    }


def print_table(rows: Sequence[Sequence[str]]) -> None:
    """Rows below a head, the first column to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *rest in rows:
        print(first.ljust(widths[0]), *(c.rjust(w) for c, w in zip(rest, widths[1:], strict=True)))
