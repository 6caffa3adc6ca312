"""Tasks drawn by how often they have been solved so far (`config.curriculum`)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from seeupo_jax.configuration.schema import Curriculum
from seeupo_jax.types import Trajectory

_STREAM = 2  # of random numbers; another one than that of an iteration's replacement tasks


class TaskSuccess:
    """The success rate of each task so far; the same in every process.

    A trajectory counts as 1 in the iteration that sampled its task last, and `memory` times as much
    with each later one that samples the task again.
    """

    def __init__(self, options: Curriculum):
        self._options = options
        self._iteration = 0  # observed last
        self._counts: dict[str, tuple[float, float]] = {}  # successes, and trajectories in all
        self._before: dict[
            str, tuple[float, float] | None
        ] = {}  # from this iteration's success rates

    def observe(self, iteration: int, trajectories: Sequence[Trajectory]) -> None:
        """Counts an iteration's trajectories, but for those that were not played to their end."""
        outcomes: dict[str, list[bool]] = {}
        for trajectory in trajectories:
            if trajectory.played:
                outcomes.setdefault(trajectory.task_id, []).append(trajectory.info["score"] >= 1)
        self._before = {task_id: self._counts.get(task_id) for task_id in outcomes}
        for task_id, won in outcomes.items():
            successes, count = self._counts.get(task_id, (0.0, 0.0))
            memory = self._options.memory
            self._counts[task_id] = memory * successes + sum(won), memory * count + len(won)
        self._iteration = iteration

    def rate(self, task_id: str) -> float | None:
        """A task's success rate; None: no trajectory of it has counted."""
        successes, count = self._counts.get(task_id, (0.0, 0.0))
        return successes / count if count else None

    def weight(self, task_id: str) -> float:
        """The relative probability of drawing a task, from `floor` to 1; 1 for a new task."""
        options, rate = self._options, self.rate(task_id)
        if rate is None:
            return 1.0
        return max(options.floor, _WEIGHTS[options.by](rate, options))

    def metrics(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """Metrics of the drawn tasks, by their rates before `observe` takes these trajectories."""
        drawn = list(dict.fromkeys(trajectory.task_id for trajectory in trajectories))
        rates = [rate for task_id in drawn if (rate := self.rate(task_id)) is not None]
        return {
            "curriculum/known_tasks": len(self._counts),
            "curriculum/new_fraction": 1 - len(rates) / len(drawn),
            "curriculum/weight_mean": float(np.mean([self.weight(task) for task in drawn])),
            "curriculum/success_rate": float(np.mean(rates)) if rates else float("nan"),
        }

    def state(self, done: int) -> dict[str, list[float]]:
        """All counts after iteration `done`, the one observed last or the one before it."""
        assert self._iteration - 1 <= done <= self._iteration
        counts: dict[str, tuple[float, float] | None] = dict(self._counts)
        if done < self._iteration:
            counts |= self._before
        return {task_id: list(each) for task_id, each in counts.items() if each is not None}

    def restore(self, done: int, state: Mapping[str, Sequence[float]]) -> None:
        """Restores the state that `state` returned after iteration `done`."""
        self._iteration, self._before = done, {}
        self._counts = {task_id: (counts[0], counts[1]) for task_id, counts in state.items()}


# How informative a task with a given success rate is, at most 1.
_WEIGHTS: dict[str, Callable[[float, Curriculum], float]] = {
    "variance": lambda rate, _: 4 * rate * (1 - rate),
    "band": lambda rate, options: float(options.low <= rate <= options.high),
}


class WeightedTasks:
    """Tasks drawn without replacement, each with a probability proportional to its weight.

    Where an iteration takes more than there are, all come once more, in the same order.

    Args:
      task_ids: all there are. count: of an iteration. seed: two numbers.
      weight: of a task, as known when an iteration is drawn; above 0.
    """

    def __init__(
        self,
        task_ids: Sequence[str],
        *,
        count: int,
        seed: tuple[int, int],
        weight: Callable[[str], float],
    ):
        self._task_ids, self._count, self._seed, self._weight = task_ids, count, seed, weight

    def of(self, iteration: int) -> list[str]:
        """The iteration's tasks, `count` of them; iterations count from 1."""
        return [*itertools.islice(itertools.cycle(self._order(iteration)), self._count)]

    def others(self, iteration: int) -> Iterator[str]:
        """Tasks to replace some of the iteration's: all others first, then all again and again."""
        order = self._order(iteration)
        yield from order[self._count :]
        yield from itertools.cycle(order)

    def _order(self, iteration: int) -> list[str]:
        seed, part = self._seed
        rng = np.random.default_rng([seed, iteration, _STREAM, part])
        # The smallest of exponential times with these rates comes first with these probabilities.
        weights = np.array([self._weight(task_id) for task_id in self._task_ids])
        times = rng.standard_exponential(len(weights)) / weights
        return [self._task_ids[int(i)] for i in np.argsort(times, kind="stable")]
