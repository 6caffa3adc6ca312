"""Blocks of the rows of a grouped product, each of one group.

Axes beyond the legend in `types.py`: S rows, sorted by group, E groups, T blocks.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class RowBlocks(NamedTuple):
    """Blocks in the order of their rows; those beyond `count` are empty.

    start_T, stop_T: int32, of rows. group_T: int32. count: int32 scalar.
    """

    start_T: jax.Array
    stop_T: jax.Array
    group_T: jax.Array
    count: jax.Array


def list_row_blocks(size_E: jax.Array, rows: int, block: int) -> RowBlocks:
    """The blocks of at most `block` rows that cover all groups.

    Args:
      size_E: int, rows of each group; together at most `rows`.
    """
    groups = size_E.shape[0]
    begun = min(groups, rows)  # one row of each of so many groups, and blocks of what is left
    index_T = jnp.arange(begun + (rows - begun) // block)
    size_E = size_E.astype(jnp.int32)
    blocks_E, end_E = -(-size_E // block), jnp.cumsum(size_E)
    last_E = jnp.cumsum(blocks_E)
    group_T = jnp.searchsorted(last_E, index_T, side="right", method="compare_all")
    group_T = jnp.minimum(group_T, groups - 1).astype(jnp.int32)
    before_E = last_E - blocks_E
    start_T = (end_E - size_E)[group_T] + (index_T - before_E[group_T]) * block
    stop_T = jnp.clip(end_E[group_T], start_T, start_T + block)
    return RowBlocks(start_T, stop_T, group_T, last_E[-1])


def rows_of_block(rows: int, groups: int, most: int, least: int = 8) -> int:
    """A block's rows, a power of 2: about those of a group of average size."""
    average = -(-rows // groups)
    return min(most, max(least, 1 << (average - 1).bit_length()))
