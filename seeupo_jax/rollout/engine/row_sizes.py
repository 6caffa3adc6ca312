"""The few numbers of rows that the sampler's programs are compiled for."""

from __future__ import annotations

from collections.abc import Sequence

# Rows that a small policy decodes hardly slower than a quarter of them. With 128 rows alone, games
# of seven turns that end one by one decoded 2.6 times as many positions as with 16 and 128.
FEW = 32


def row_sizes(most: int, *, halvings: int, least: int) -> list[int]:
    """Numbers of rows that programs are compiled for: the most, and halves of it."""
    return sorted({max(min(least, most), -(-most // 2**i)) for i in range(halvings + 1)})


def decoded_rows(slots: int, *, halvings: int, few: bool) -> list[int]:
    """Numbers of rows that decoding is compiled for; `few`: at most two."""
    sizes = row_sizes(slots, halvings=halvings, least=8)
    if not few:
        return sizes
    return sizes[-1:] if slots <= FEW else sorted({sizes[0], sizes[-1]})


def prefilled_rows(tokens: int, length: int, *, few: bool) -> list[int]:
    """Row counts that prefilling `tokens` in rows of `length` is compiled for; `few`: one."""
    sizes = row_sizes(max(1, tokens // length), halvings=4, least=2)[::-2][::-1]
    middle = (len(sizes) - 1) // 2
    return sizes[middle : middle + 1] if few else sizes


def at_least(sizes: Sequence[int], wanted: int) -> int:
    """The smallest size of at least `wanted`; the largest if all are smaller."""
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
