"""Which tasks an iteration samples."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import grain
import numpy as np


class TrainingTasks:
    """The tasks of every iteration; nothing but the arguments decides them.

    Args:
      task_ids: all there are. count: of an iteration.
    """

    def __init__(self, task_ids: Sequence[str], *, count: int, seed: int):
        self._task_ids, self._count, self._seed = task_ids, count, seed
        self._order = grain.MapDataset.source(task_ids).shuffle(seed=seed).repeat()

    def of(self, iteration: int) -> list[str]:
        """A seeded order, shuffled anew every epoch."""
        first = (iteration - 1) * self._count
        return [self._order[i] for i in range(first, first + self._count)]

    def others(self, iteration: int) -> Iterator[str]:
        """Tasks to replace some of the iteration's: all others first, then all again and again."""
        rng = np.random.default_rng([self._seed, iteration])
        order = [self._task_ids[i] for i in rng.permutation(len(self._task_ids))]
        taken = set(self.of(iteration))
        yield from (task_id for task_id in order if task_id not in taken)
        yield from itertools.cycle(order)
