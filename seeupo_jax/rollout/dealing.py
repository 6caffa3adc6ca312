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
    ordered = _by_group(group_N)
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


def deal_beside(group_N: Sequence[int], load_S: Sequence[int]) -> list[int]:
    """The shard of each new conversation, where others are open or wait already.

    Each of them in turn adds to the shard with the fewest, the first of equal ones; the shards take
    their numbers in the order of the groups. Without others `deal` decides.

    Args:
      group_N: the group of each new conversation. load_S: how many others each shard has.

    Returns: [N], numbers of shards, from 0.
    """
    if not any(load_S):
        return deal(group_N, [0] * len(load_S))
    load, added = list(load_S), [0] * len(load_S)
    for _ in group_N:
        shard = load.index(min(load))
        load[shard] += 1
        added[shard] += 1
    dealt = [shard for shard, count in enumerate(added) for _ in range(count)]
    shard_N = [0] * len(group_N)
    for shard, index in zip(dealt, _by_group(group_N), strict=True):
        shard_N[index] = shard
    return shard_N


def _by_group(group_N: Sequence[int]) -> list[int]:
    """The indices of conversations in the order of their groups."""
    return sorted(range(len(group_N)), key=lambda index: group_N[index])


def _in_parts(ordered: Sequence[int], parts: Sequence[int]) -> list[int]:
    """The part that each index of a permutation falls into, where it is cut into equal ones."""
    part_N = [0] * len(ordered)
    for place, index in enumerate(ordered):
        part_N[index] = parts[place * len(parts) // len(ordered)]
    return part_N
