"""Mean and deviation of the rewards of turns, by name, over all iterations of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from seeupo_jax.trajectories.rewards_by_name import OWN_REWARD, named_turn_rewards
from seeupo_jax.types import Trajectory, learnable, rewards_of


class Moments(NamedTuple):
    """Moments of all numbers so far. squares: sum of the squared distances from their mean."""

    count: int
    mean: float
    squares: float

    @property
    def std(self) -> float:
        """The standard deviation, by n - 1; 0 for a single number."""
        return math.sqrt(self.squares / (self.count - 1)) if self.count > 1 else 0.0


Statistics = Mapping[str, Moments]  # by the name of a reward


def running_statistics(
    trajectories: Sequence[Trajectory], previous: Statistics | None = None
) -> dict[str, Moments]:
    """The statistics after an iteration, whose turns count in them.

    They are float64, of the trajectories that are learned from in their order: the same in every
    process, and after a run was resumed.

    Args:
      previous: those before it; None: of nothing.
    """
    statistics = {} if previous is None else dict(previous)
    pairs = zip(trajectories, learnable(trajectories), strict=True)
    included = [trajectory for trajectory, keep in pairs if keep]
    columns = named_turn_rewards(included)
    if not columns:
        columns = {OWN_REWARD: [rewards_of(trajectory) for trajectory in included]}
    for name, each in columns.items():
        numbers = np.concatenate([np.zeros(0), *each])
        if numbers.size:
            statistics[name] = _merged(statistics.get(name), numbers)
    return statistics


def _merged(previous: Moments | None, numbers: np.ndarray) -> Moments:
    """Chan's update of a mean and of squared distances from it."""
    mean = float(numbers.mean())
    batch = Moments(numbers.size, mean, float(((numbers - mean) ** 2).sum()))
    if previous is None:
        return batch
    count, delta = previous.count + batch.count, batch.mean - previous.mean
    return Moments(
        count,
        previous.mean + delta * batch.count / count,
        previous.squares + batch.squares + delta**2 * previous.count * batch.count / count,
    )
