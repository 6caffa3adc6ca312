"""The mask of token trees, at the lengths that agents' contexts reach."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tree_cases import ends_of, parents_of

from seeupo_jax.policy.kernels.attention import Past, Tree, tree_mask_of
from seeupo_jax.policy.kernels.tree_mask import (
    list_block_pairs,
    visible,
    visible_pairs,
    visited_blocks,
)


def continued(rng, past_ends, new_ends, at):
    """One row: trees of an earlier pass, and new ones of which each hangs below one of its tokens.

    Returns: its `Past` and `Tree`.
    """

    def depths(ends):
        return jnp.asarray(rng.integers(0, 9, (1, len(ends))), jnp.int32)

    def ends(x):
        return jnp.asarray(x, jnp.int32)[None]

    past = Past((), Tree(depths(past_ends), ends(past_ends)), ends(at))
    return past, Tree(depths(new_ends), ends(new_ends))


def visible_past(query, past_end, at):
    """Visible to a new token: the past's token that its tree hangs below, and its ancestors."""
    index = np.arange(len(past_end))
    return (index <= at[query]) & (at[query] < past_end)


def visible_new(query, new_end):
    """Visible in its own pass: a token's ancestors and itself."""
    index = np.arange(len(new_end))
    return (index <= query) & (query < new_end)


def blocks_of_trees(rng, length, size):
    """The ends of chains of a size that follow one another, and their first tokens."""
    first = np.arange(length) // size * size
    return np.minimum(first + size, length), first


@pytest.mark.parametrize("past_length, new_length", [(131_072, 16_384), (262_144, 32_768)])
def test_the_ancestors_of_a_distant_token_are_visible(past_length, new_length):
    rng = np.random.default_rng(0)
    # The past's first half is one chain, which its second half's chains branch off.
    past_end, first = blocks_of_trees(rng, past_length, 4096)
    past_end[: past_length // 2] = past_length
    new_end, begins = blocks_of_trees(rng, new_length, 512)
    at = rng.integers(0, past_length, new_length)[begins]
    at[-512:] = past_length - 1
    past, tree = continued(rng, past_end, new_end, at)
    tree_mask = tree_mask_of(tree, past)
    assert all(x.dtype == jnp.int32 for x in tree_mask)
    for query in (0, 511, 512, new_length // 2 + 3, new_length - 512, new_length - 1):
        order, depth = (np.asarray(x)[0, query] for x in tree_mask[:2])
        found = np.asarray(visible(order, depth, *tree_mask[2:], None))[0]
        wanted = visible_past(query, past_end, at)
        np.testing.assert_array_equal(found[:past_length], wanted)
        np.testing.assert_array_equal(found[past_length:], visible_new(query, new_end))
        assert wanted.sum() >= min(at[query] + 1, past_length // 2)


@pytest.mark.parametrize("seed", range(3))
def test_new_trees_hang_below_tokens_in_any_order(seed):
    rng = np.random.default_rng(seed)
    past_end, new_parents = ends_of(parents_of(rng, 90)), parents_of(rng, 40)
    root = np.asarray([x if p < 0 else -1 for x, p in enumerate(new_parents)])
    for index in np.flatnonzero(root < 0):
        root[index] = root[new_parents[index]]
    new_end = ends_of(new_parents)
    new_end[-5:] = 0  # masked for all queries
    at = rng.integers(0, 90, 40)[root]
    at[:3] = at[-1]  # and several trees hang below one
    at = at[root]
    past, tree = continued(rng, past_end, new_end, at)
    tree_mask = tree_mask_of(tree, past)
    found = np.asarray(visible_pairs(tree_mask, None))[0]
    for query in range(40):
        np.testing.assert_array_equal(found[query, :90], visible_past(query, past_end, at))
        np.testing.assert_array_equal(found[query, 90:], visible_new(query, new_end))
    # The coordinates rise as a key of the two numbers does, at * (new tokens + 1) + index, where
    # that fits: the same blocks are visited, so the same numbers come out bit by bit.
    key, step = at * 41 + 1 + np.arange(40), 41
    by_key = tree_mask._replace(
        order_NL=jnp.asarray(key)[None],
        first_NC=jnp.asarray(np.concatenate([np.arange(90) * step, key]))[None],
        end_NC=jnp.asarray(np.concatenate([past_end * step, at * 41 + 1 + new_end]))[None],
    )
    for window in (None, 4):
        np.testing.assert_array_equal(
            visible_pairs(tree_mask, window), visible_pairs(by_key, window)
        )
        blocks = [visited_blocks(x, window=window, block=16) for x in (tree_mask, by_key)]
        np.testing.assert_array_equal(*blocks)


def test_more_pairs_of_blocks_than_int32_counts_are_refused():
    # 32 rows of 262,144 tokens in blocks of 32: 32 x 8,192 x 8,192 pairs are 2**31.
    with pytest.raises(ValueError, match=r"32 rows of 8192 x 8192 blocks.*microbatch_tokens"):
        jax.eval_shape(list_block_pairs, jax.ShapeDtypeStruct((32, 8192, 8192), bool))
