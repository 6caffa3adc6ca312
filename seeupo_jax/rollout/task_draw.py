"""Which tasks an iteration samples."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np

from seeupo_jax.envs.base import TaskShare
from seeupo_jax.rollout.curriculum import TaskSuccess, WeightedTasks


class TaskDraw(Protocol):
    """Which tasks each iteration samples."""

    def of(self, iteration: int) -> list[str]:
        """The iteration's tasks; iterations count from 1."""
        ...

    def others(self, iteration: int) -> Iterator[str]:
        """Tasks to replace some of the iteration's."""
        ...


def draw_tasks(
    shares: Sequence[TaskShare], *, count: int, seed: int, success: TaskSuccess | None = None
) -> TaskDraw:
    """The drawing of `count` tasks per iteration from weighted parts.

    Args:
      success: rates by which a part's tasks are drawn; None: they are drawn in turn, in epochs.

    Raises:
      ValueError: as `share_counts`.
    """
    parts: list[TaskDraw] = []
    counts = share_counts(shares, count)
    for part, (share, drawn) in enumerate(zip(shares, counts, strict=True)):
        if success is None:
            parts.append(TrainingTasks(share.task_ids, count=drawn, seed=seed))
            continue
        weight = success.weight
        parts.append(WeightedTasks(share.task_ids, count=drawn, seed=(seed, part), weight=weight))
    return parts[0] if len(parts) == 1 else SharedTasks(parts, counts)


def share_counts(shares: Sequence[TaskShare], count: int) -> list[int]:
    """The number of an iteration's tasks from each part: its weight's share, rounded.

    Raises:
      ValueError: a part gets none.
    """
    total = sum(share.weight for share in shares)
    exact = [count * share.weight / total for share in shares]
    counts = [int(each) for each in exact]
    by_rest = sorted(range(len(shares)), key=lambda part: counts[part] - exact[part])
    for part in by_rest[: count - sum(counts)]:
        counts[part] += 1
    if 0 in counts:
        weights = ", ".join(f"{share.name}={share.weight:g}" for share in shares)
        raise ValueError(
            f"config.rollout.tasks: got {count}, of which none is of {shares[counts.index(0)].name}"
            f" with the weights {weights}; allowed: so many that every environment has one in every"
            " iteration."
        )
    return counts


class SharedTasks:
    """Tasks of several parts: a fixed number of each per iteration, in turn.

    Args:
      parts: draw those of each part. counts: how many each draws.
    """

    def __init__(self, parts: Sequence[TaskDraw], counts: Sequence[int]):
        self._parts = parts
        places = [
            ((i + 0.5) / count, part) for part, count in enumerate(counts) for i in range(count)
        ]
        self._order = [part for _, part in sorted(places)]

    def of(self, iteration: int) -> list[str]:
        drawn = [iter(part.of(iteration)) for part in self._parts]
        return [next(drawn[part]) for part in self._order]

    def others(self, iteration: int) -> Iterator[str]:
        others = [part.others(iteration) for part in self._parts]
        return (next(others[part]) for part in itertools.cycle(self._order))


class TrainingTasks:
    """The tasks of every iteration, determined by the arguments alone.

    Each epoch has its own seeded order of all tasks. Where an iteration reaches into the next
    epoch, tasks of that epoch change places, so that none comes twice in the iteration while
    another has not come as often.

    Args:
      task_ids: all there are. count: of an iteration.
    """

    def __init__(self, task_ids: Sequence[str], *, count: int, seed: int):
        import grain  # instruments that draw no tasks go without it

        self._task_ids, self._count, self._seed = task_ids, count, seed
        order = grain.MapDataset.source(task_ids).shuffle(seed=seed).repeat()
        # The task at a place, counted through all epochs. Of few tasks each takes 1 ms to find.
        self._shuffled = functools.lru_cache(4 * count)(order.__getitem__)
        self._exchanges: dict[int, dict[int, int]] = {}  # by epoch: places of it that change

    def of(self, iteration: int) -> list[str]:
        """The iteration's tasks, `count` of them; iterations count from 1."""
        first = (iteration - 1) * self._count
        return [self._at(place) for place in range(first, first + self._count)]

    def others(self, iteration: int) -> Iterator[str]:
        """Tasks to replace some of the iteration's: all others first, then all again and again."""
        rng = np.random.default_rng([self._seed, iteration])
        order = [self._task_ids[i] for i in rng.permutation(len(self._task_ids))]
        taken = set(self.of(iteration))
        yield from (task_id for task_id in order if task_id not in taken)
        yield from itertools.cycle(order)

    def _at(self, place: int) -> str:
        """The task at a place, counted through all epochs."""
        epoch, offset = divmod(place, len(self._task_ids))
        if offset < self._count:  # no other places change
            place += self._exchanged(epoch).get(offset, offset) - offset
        return self._shuffled(place)

    def _exchanged(self, epoch: int) -> dict[int, int]:
        """The places of an epoch that change, and whose tasks they get."""
        missing = []
        while epoch not in self._exchanges:
            missing.append(epoch)
            epoch, offset = divmod(self._iteration_of(epoch), len(self._task_ids))
            if not 0 < offset < self._count:
                break  # exchanges within `epoch` do not matter here
        for each in reversed(missing):
            self._exchanges[each] = self._exchange(each)
        return self._exchanges[missing[0] if missing else epoch]

    def _iteration_of(self, epoch: int) -> int:
        """The first place of the iteration in which an epoch begins."""
        return epoch * len(self._task_ids) // self._count * self._count

    def _exchange(self, epoch: int) -> dict[int, int]:
        """The pairs of places that an epoch exchanges; all others stay unchanged.

        The current iteration contains the end of an earlier epoch, besides whole ones. Tasks of
        that end that this epoch begins with move to the next places whose tasks it lacks.
        There are at most as many of these, so all pairs lie in the epoch's first `count` places.
        """
        size, first = len(self._task_ids), self._iteration_of(epoch)
        begin, end = epoch * size, -(-first // size) * size
        reached = min(first + self._count - begin, size)
        taken = {self._at(place) for place in range(first, end)}
        repeated = [i for i in range(reached) if self._shuffled(begin + i) in taken]
        fresh = (i for i in range(reached, size) if self._shuffled(begin + i) not in taken)
        pairs = [(offset, next(fresh, offset)) for offset in repeated]
        return dict(pairs) | {other: offset for offset, other in pairs}


def repeats(shares: Sequence[TaskShare], count: int) -> list[str]:
    """Sentences on the parts whose tasks an iteration must repeat.

    Args:
      count: the tasks that an iteration takes.
    """
    if len(shares) == 1:
        note = too_few(len(shares[0].task_ids), count)
        return [] if note is None else [note]
    counts = zip(shares, share_counts(shares, count), strict=True)
    return [
        f"an iteration has {drawn} groups of {share.name}, and there are {len(share.task_ids)}"
        " training tasks of it: it repeats some (rollout/repeated_tasks)."
        for share, drawn in counts
        if drawn > len(share.task_ids)
    ]


def too_few(tasks: int, count: int) -> str | None:
    """A sentence where an iteration must repeat tasks; None where it need not.

    Args:
      tasks: that there are. count: that an iteration takes.
    """
    if tasks >= count:
        return None
    return (
        f"config.rollout.tasks: got {count}, and there are {tasks} training tasks: every iteration"
        f" has {count - tasks} groups of a task that it has already (rollout/repeated_tasks)."
    )
