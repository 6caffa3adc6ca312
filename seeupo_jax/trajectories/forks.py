"""Trajectories that share their first turns: the owner of each turn, and the tree that they form.

A trajectory that continues another one names it: `parent`, its place in the group, and `fork`, how
many of its first turns are that one's. A shared turn belongs to the first trajectory that has it
and that an update learns from; in the others it is context.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from seeupo_jax.types import CONTEXT, RewardRow, RewardTable, Trajectory


def forked(trajectories: Sequence[Trajectory]) -> bool:
    """Whether any of them continues another one."""
    return any(trajectory.fork for trajectory in trajectories)


def turn_nodes(trajectories: Sequence[Trajectory]) -> list[list[int]]:
    """The node that each turn leads to, a list a trajectory: a shared turn leads to one node.

    Raises:
      ValueError: a parent that is none of the group's earlier trajectories, or has fewer turns.
    """
    groups: dict[int, list[list[int]]] = {}
    nodes, count = [], 0
    for trajectory in trajectories:
        earlier, turns = groups.setdefault(trajectory.group, []), trajectory.turns
        start: list[int] = []
        if trajectory.fork:
            _check(trajectory, earlier, turns)
            start = earlier[trajectory.parent][: trajectory.fork]
        path = [*start, *range(count, count + turns - len(start))]
        count += turns - len(start)
        earlier.append(path)
        nodes.append(path)
    return nodes


def _check(trajectory: Trajectory, earlier: Sequence[Sequence[int]], turns: int) -> None:
    place, fork = trajectory.parent, trajectory.fork
    if place is None or not 0 <= place < len(earlier):
        allowed = f"a place from 0 to {len(earlier) - 1}" if earlier else "none for the first one"
        raise ValueError(
            f"{trajectory.task_id}: parent: got {place}; allowed: {allowed}, of an earlier"
            " trajectory of its group."
        )
    most = min(len(earlier[place]), turns)
    if fork > most:
        raise ValueError(
            f"{trajectory.task_id}: fork: got {fork}; allowed: at most {most}, the turns that it"
            " and its parent have."
        )


def check_forks(trajectories: Sequence[Trajectory]) -> None:
    """Checks that each trajectory with a parent has the parent's tokens in the turns they share.

    Raises:
      ValueError: one sentence with the line, what was got and what is allowed.
    """
    turn_nodes(trajectories)
    groups: dict[int, list[list[tuple[int, bytes, bytes]]]] = {}
    for trajectory in trajectories:
        earlier, beginnings = groups.setdefault(trajectory.group, []), _beginnings(trajectory)
        earlier.append(beginnings)
        if not trajectory.fork:
            continue
        most = _common(beginnings, earlier[trajectory.parent])
        if trajectory.fork > most:
            raise ValueError(
                f"{trajectory.task_id}: fork: got {trajectory.fork}; allowed: at most {most}, the"
                " turns whose tokens, and those before, its parent has too."
            )


def shared_turns(trajectories: Sequence[Trajectory], counted: Sequence[bool]) -> list[int]:
    """How many of its first turns another one owns, a number a trajectory.

    Args:
      counted: which trajectories may own turns.
    """
    owned: set[int] = set()
    shared = []
    for path, counts in zip(turn_nodes(trajectories), counted, strict=True):
        shared.append(sum(node in owned for node in path))
        if counts:
            owned.update(path)
    return shared


def node_numbers(trajectories: Sequence[Trajectory], turns: int) -> np.ndarray:
    """`turn_nodes` as int32 [N, K] for K turns; -1 after a trajectory's last turn."""
    node_NK = np.full((len(trajectories), turns), -1, np.int32)
    for row, path in enumerate(turn_nodes(trajectories)):
        node_NK[row, : len(path)] = path
    return node_NK


def new_turns(trajectory: Trajectory) -> list[np.ndarray]:
    """The turn of each token that its parent has not; an array a segment.

    The reply to the last turn that they share is the parent's too.
    """
    parts = []
    for segment in trajectory.segments:
        own_L = segment.turn_L >= trajectory.fork
        shares = bool(((segment.turn_L != CONTEXT) & ~own_L).any())
        first = (int(own_L.argmax()) if own_L.any() else len(own_L)) if shares else 0
        parts.append(segment.turn_L[first:])
    return parts


def fill_up(trajectories: Sequence[Trajectory], count: int) -> list[Trajectory]:
    """So many trajectories: those that there are, then some that nothing is learned from.

    With forks an iteration has fewer than `tasks x group_size` where episodes are over early; its
    programs are compiled for all.
    """
    absent = Trajectory((), RewardTable(RewardRow(0.0)), group=-1, stop="env_error")
    return [*trajectories, *[absent] * (count - len(trajectories))]


def find_forks(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """Trajectories whose forks are read off their tokens, where none names its parent.

    Those of one group share the turns up to whose end all their tokens are equal; each continues
    the first one of those that it shares the most with.
    """
    if any(trajectory.parent is not None for trajectory in trajectories):
        return list(trajectories)
    groups: dict[int, list[list[tuple[int, bytes, bytes]]]] = {}
    with_parents = []
    for trajectory in trajectories:
        earlier, beginnings = groups.setdefault(trajectory.group, []), _beginnings(trajectory)
        common = [_common(beginnings, other) for other in earlier]
        earlier.append(beginnings)
        fork = max(common, default=0)
        parent = common.index(fork) if fork else None
        with_parents.append(dataclasses.replace(trajectory, parent=parent, fork=fork))
    return with_parents


def _beginnings(trajectory: Trajectory) -> list[tuple[int, bytes, bytes]]:
    """For each turn its segment, and that segment's tokens and turns up to the turn's end."""
    ends: dict[int, tuple[int, bytes, bytes]] = {}
    for number, segment in enumerate(trajectory.segments):
        tokens_L, turn_L = (np.asarray(x_L, np.int32) for x_L in (segment.tokens_L, segment.turn_L))
        for turn in np.unique(turn_L[turn_L != CONTEXT]).tolist():
            stop = 1 + int(np.flatnonzero(turn_L == turn)[-1])
            ends[turn] = number, tokens_L[:stop].tobytes(), turn_L[:stop].tobytes()
    return [ends[turn] for turn in sorted(ends)]


def _common(one: Sequence[object], other: Sequence[object]) -> int:
    """How many leading items are equal."""
    differs = (i for i, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1])
    return next(differs, min(len(one), len(other)))
