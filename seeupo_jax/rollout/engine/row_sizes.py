"""The few numbers of rows that the sampler's programs are compiled for."""

from __future__ import annotations

from collections.abc import Sequence


def row_sizes(most: int, *, halvings: int, least: int) -> list[int]:
    """Numbers of rows that programs are compiled for: the most, and halves of it."""
    return sorted({max(min(least, most), -(-most // 2**i)) for i in range(halvings + 1)})


def at_least(sizes: Sequence[int], wanted: int) -> int:
    """The smallest size that holds so many; the largest where none does."""
    return next((size for size in sizes if size >= wanted), sizes[-1])


def cover(count: int, sizes: Sequence[int]) -> list[int]:
    """The dispatches for `count` rows, no more than the largest size holds of them.

    A size that would be less than three quarters full gives way to smaller ones.
    """
    remaining, dispatches = min(count, sizes[-1]), []
    while remaining > 0:
        size = at_least(sizes, remaining)
        if 4 * remaining < 3 * size:
            size = max((smaller for smaller in sizes if smaller <= remaining), default=size)
        dispatches.append(size)
        remaining -= size
    return dispatches
