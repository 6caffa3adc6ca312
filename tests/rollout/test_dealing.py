"""Conversations on shards: equal parts, few cuts of groups."""

import itertools
from collections import Counter

import pytest

from seeupo_jax.rollout.dealing import deal, deal_beside


def groups(count, size):
    return [group for group in range(count) for _ in range(size)]


@pytest.mark.parametrize(
    "group_N, shards, wanted",
    [
        (groups(2, 4), 4, [0, 0, 1, 1, 2, 2, 3, 3]),  # both halves of each group
        (groups(4, 2), 2, [0, 0, 0, 0, 1, 1, 1, 1]),  # whole groups
        (groups(3, 2), 2, [0, 0, 0, 1, 1, 1]),  # the second one is cut
        ([1, 0, 1, 0], 2, [1, 0, 1, 0]),  # by group, not by place
        ([0, 0, 1], 4, [0, 1, 2]),  # more shards than conversations
        ([], 2, []),
    ],
)
def test_conversations_are_cut_into_equal_parts_in_the_order_of_their_groups(
    group_N, shards, wanted
):
    assert deal(group_N, [0] * shards) == wanted


@pytest.mark.parametrize(
    "count, size, shards", [*itertools.product((1, 3, 12), (1, 5, 8), (2, 6, 8))]
)
def test_no_shard_has_two_more_than_another_and_no_group_is_cut_needlessly(count, size, shards):
    group_N = groups(count, size)
    shard_N = deal(group_N, [0] * shards)
    have = [Counter(shard_N)[shard] for shard in range(shards)]
    assert max(have) - min(have) <= 1 and sum(have) == count * size
    parts = len({*zip(group_N, shard_N, strict=True)})
    assert parts <= count + shards - 1  # a cut at the end of a part at the most
    if count % shards == 0:
        assert parts == count


@pytest.mark.parametrize("shards, most", [(64, 4), (256, 1)])
def test_all_replicas_of_the_shipped_layouts_work(shards, most):
    """32 groups of 8: on 64 shards of v5e:16x16, and on the 256 of 1,024 chips."""
    assert set(Counter(deal(groups(32, 8), [0] * shards)).values()) == {most}


def test_groups_that_branch_stay_within_a_process():
    owner_S = [0, 1, 0, 1]
    group_N = groups(3, 4)
    shard_N = deal(group_N, owner_S, whole=True)
    assert shard_N == [0, 0, 0, 0, 2, 2, 2, 2, 1, 1, 3, 3]
    assert deal(group_N, [0] * 4, whole=True) == deal(group_N, [0] * 4)
    # Otherwise the second group is on shards of both.
    assert {owner_S[shard] for shard in deal(group_N, owner_S)[4:8]} == {0, 1}


@pytest.mark.parametrize(
    "group_N, load_S, wanted",
    [
        ([7, 7, 8, 8], [0, 4], [0, 0, 0, 0]),  # both groups where nothing is open
        ([7, 7, 8, 8], [3, 1], [0, 1, 1, 1]),  # until both have the same
        ([8, 7, 8, 7], [1, 1], [1, 0, 1, 0]),  # groups stay whole where they can
        ([7], [2, 2, 1], [2]),
        ([7], [1, 1], [0]),
        ([], [1, 2], []),
    ],
)
def test_further_conversations_level_the_shards(group_N, load_S, wanted):
    assert deal_beside(group_N, load_S) == wanted


@pytest.mark.parametrize("count, size, shards", [(3, 5, 2), (4, 2, 8), (12, 8, 6)])
def test_where_nothing_is_open_further_conversations_are_dealt_as_all_of_them(count, size, shards):
    group_N = groups(count, size)
    assert deal_beside(group_N, [0] * shards) == deal(group_N, [0] * shards)
