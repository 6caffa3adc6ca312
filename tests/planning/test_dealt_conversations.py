"""What an estimate counts of the shards: the busiest one, its rounds, and prompts."""

import math
from types import SimpleNamespace

import pytest

from seeupo_jax.configuration import schema
from seeupo_jax.planning.dealt_conversations import dealt_conversations


def dealt(tasks, size, shards, concurrency, slots):
    """Of an iteration of so many groups, with a cache for so many conversations of a shard."""
    cache = SimpleNamespace(shards=shards, concurrency=concurrency, slots=slots)
    return dealt_conversations(schema.Rollout(tasks=tasks, group_size=size), cache)


@pytest.mark.parametrize(
    "sizes, least, most, prompts, rounds",
    [
        ((32, 8, 64, 4, 4), 4, 4, 64, 1),  # v5e:16x16: halves of groups
        ((32, 8, 256, 1, 1), 1, 1, 256, 1),  # 1,024 chips
        ((32, 8, 16, 4, 4), 16, 16, 32, 4),  # four waves of whole groups
        ((32, 8, 16, 8, 4), 16, 16, 32, 4),  # two waves, each of two rounds
        ((3, 4, 8, 2, 2), 1, 2, 9, 1),  # half of the shards have a slot too many
        ((1, 10, 2, 4, 4), 5, 5, 2, 2),  # the second wave has one conversation
    ],
)
def test_the_busiest_shard_is_counted(sizes, least, most, prompts, rounds):
    found = dealt(*sizes)
    assert (found.least, found.most, found.prompts, found.rounds) == (least, most, prompts, rounds)
    assert found.busiest == most * sizes[2] and most == math.ceil(sizes[0] * sizes[1] / sizes[2])


def test_it_is_told_whether_groups_are_split():
    assert str(dealt(32, 8, 64, 4, 4)) == (
        "conversations on each of 64 row shards: 4; prompts of 32 groups are prefilled in 64"
        " places, since groups are split"
    )
    assert str(dealt(4, 2, 2, 4, 4)) == (
        "conversations on each of 2 row shards: 4; a group's prompt is prefilled once"
    )
    assert "3 row shards: 2 or 3;" in str(dealt(4, 2, 3, 3, 3))
