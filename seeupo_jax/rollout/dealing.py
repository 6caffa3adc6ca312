"""How a collection's conversations are dealt to the shards of the sampler's rows."""

from __future__ import annotations

from collections.abc import Sequence


def deal(group_N: Sequence[int], owner_S: Sequence[int], *, whole: bool = False) -> list[int]:
    """The shard of each conversation: equal parts of all of them, in the order of their groups.

    The numbers of conversations of two shards differ by one at most. Equal groups whose number the
    shards divide stay whole. Otherwise a group is cut where a part ends, which happens at most once
    a shard; each shard that has a part of a group computes its prompt once.

    Args:
      group_N: the group of each conversation.
      owner_S: the process of each shard; all have equally many.
      whole: a group stays within one process, since its episodes decide how it branches.

    Returns: [N], numbers of shards, from 0.
    """
    shards = range(len(owner_S))
    ordered = sorted(range(len(group_N)), key=lambda index: group_N[index])
    if not whole:
        return _in_parts(ordered, shards)
    processes, groups = sorted(set(owner_S)), sorted(set(group_N))
    process_of = dict(zip(groups, _in_parts(range(len(groups)), processes), strict=True))
    shard_N = [0] * len(group_N)
    for process in processes:
        own = [index for index in ordered if process_of[group_N[index]] == process]
        local = [shard for shard in shards if owner_S[shard] == process]
        for index, shard in zip(own, _in_parts(range(len(own)), local), strict=True):
            shard_N[index] = shard
    return shard_N


def _in_parts(ordered: Sequence[int], parts: Sequence[int]) -> list[int]:
    """The part that each index of a permutation falls into, where it is cut into equal ones."""
    part_N = [0] * len(ordered)
    for place, index in enumerate(ordered):
        part_N[index] = parts[place * len(parts) // len(ordered)]
    return part_N
