"""The attention mask of rows of token trees, and the pairs of blocks in which it is not empty.

A query has one coordinate, its order; a key has an interval, and is visible to exactly the queries
with first <= order < end. Tokens of trees in pre-order have their index for order and first, and
the end of their subtree for end. A window also limits the difference of the two depths.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

# The score of a masked key, and the start of a running maximum. No score is as low, and
# exp(MASKED - FLOOR) is 0: a query without a visible key so far needs no case of its own.
MASKED, FLOOR = -2e30, -1e30
_LEAST, _MOST = jnp.iinfo(jnp.int32).min, jnp.iinfo(jnp.int32).max


class TreeMask(NamedTuple):
    """Coordinates of queries and keys, int32.

    order_NL, depth_NL: of each query; depths are positions, which a window is counted in.
    first_NC, end_NC, key_depth_NC: of each key; one whose interval is empty is masked for all.
    """

    order_NL: jax.Array
    depth_NL: jax.Array
    first_NC: jax.Array
    end_NC: jax.Array
    key_depth_NC: jax.Array


class BlockPairs(NamedTuple):
    """Pairs of blocks to compute, sorted by row and in it by the block that accumulates.

    pair_T: int32, (row * a + i) * b + j for the i-th of a row's `a` blocks that accumulate, and the
      j-th of the `b` blocks that it visits. Padding, the first entry too, is rows * a * b.
    start_B: int32 [rows * a + 1], the number of pairs before those of each block.
    """

    pair_T: jax.Array
    start_B: jax.Array


def visible(
    order: jax.Array,
    depth: jax.Array,
    first: jax.Array,
    end: jax.Array,
    key_depth: jax.Array,
    window: int | None,
) -> jax.Array:
    """Whether keys are visible to queries; the arguments broadcast against each other."""
    inside = (first <= order) & (order < end)
    return inside if window is None else inside & (key_depth > depth - window)


def visible_pairs(tree_mask: TreeMask, window: int | None) -> jax.Array:
    """The mask of all pairs, bool [..., L, C]."""
    order, depth = (x[..., :, None] for x in tree_mask[:2])
    first, end, key_depth = (x[..., None, :] for x in tree_mask[2:])
    return visible(order, depth, first, end, key_depth, window)


def split_blocks(x_NL: jax.Array, block: int, fill: int = 0) -> jax.Array:
    """[N, L, ...] as [N, blocks, block, ...], padded at the end."""
    N, L = x_NL.shape[:2]
    count = -(-L // block)
    pad = ((0, 0), (0, count * block - L), *((0, 0),) * (x_NL.ndim - 2))
    filled = jnp.pad(x_NL, pad, constant_values=fill)
    return filled.reshape(N, count, block, *x_NL.shape[2:])


def split_tree_mask(tree_mask: TreeMask, block: int, key_block: int | None = None) -> TreeMask:
    """Every array in blocks, as `split_blocks`; padding is masked on both sides."""
    key_block = block if key_block is None else key_block
    sizes, fills = (block, block, *(key_block,) * 3), (_LEAST, 0, 0, 0, 0)
    return TreeMask(*(split_blocks(*of) for of in zip(tree_mask, sizes, fills, strict=True)))


def visited_blocks(
    tree_mask: TreeMask, *, window: int | None = None, block: int, key_block: int | None = None
) -> jax.Array:
    """Which pairs of blocks are computed, bool [N, blocks of queries, blocks of keys].

    Those in which some key's interval meets the range of the queries' orders (and with a window,
    that key is within it for the least deep query). All other pairs are masked.

    Args:
      block, key_block: queries and keys of a block; `key_block=None`: as many as queries.
    """
    real = split_blocks(jnp.ones_like(tree_mask.order_NL, dtype=bool), block)
    blocks = split_tree_mask(tree_mask, block, key_block)

    def least(x: jax.Array) -> jax.Array:
        return jnp.min(jnp.where(real, x, _MOST), 2)[:, :, None, None]

    most = jnp.max(blocks.order_NL, 2)[:, :, None, None]
    first, end, key_depth = (x[:, None] for x in blocks[2:])
    meets = (first <= most) & (least(blocks.order_NL) < end) & (first < end)
    if window is not None:
        meets &= key_depth > least(blocks.depth_NL) - window
    return meets.any(3)


def list_block_pairs(visited: jax.Array) -> BlockPairs:
    """The pairs that `visited` [N, a, b] marks; blocks of its second axis accumulate.

    Raises:
      ValueError: more pairs than an int32 counts.
    """
    N, a, b = visited.shape
    if visited.size >= _MOST:
        raise ValueError(
            f"attention over token trees: got {N} rows of {a} x {b} blocks; allowed: fewer than"
            " 2**31 - 1 pairs of blocks, which int32 counts: lower"
            " config.batching.microbatch_tokens or config.rollout.max_context."
        )
    (pair,) = jnp.nonzero(visited.reshape(-1), size=visited.size, fill_value=visited.size)
    pair = jnp.pad(pair.astype(jnp.int32), 1, constant_values=visited.size)
    end = jnp.cumsum(visited.sum(2, dtype=jnp.int32).reshape(N * a))
    return BlockPairs(pair, jnp.pad(end, (1, 0)))
