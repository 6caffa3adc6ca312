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
    process, and after a run was resumed. A turn without a reward of a name counts as 0, also in
    iterations in which no turn has one.

    Args:
      previous: those before it; None: of nothing.
    """
    previous = {} if previous is None else previous
    pairs = zip(trajectories, learnable(trajectories), strict=True)
    included = [trajectory for trajectory, keep in pairs if keep]
    columns = named_turn_rewards(included)
    if not columns:
        columns = {OWN_REWARD: [rewards_of(trajectory) for trajectory in included]}
    turns = sum(len(each) for each in next(iter(columns.values())))
    if not turns:
        return dict(previous)
    before = max((moments.count for moments in previous.values()), default=0)
    statistics: dict[str, Moments] = {}
    for name in dict.fromkeys((*previous, *columns)):
        moments = previous.get(name, Moments(0, 0.0, 0.0))
        moments = _merged(moments, np.zeros(before - moments.count))
        numbers = np.concatenate(columns[name]) if name in columns else np.zeros(turns)
        statistics[name] = _merged(moments, numbers)
    return statistics


def _merged(previous: Moments, numbers: np.ndarray) -> Moments:
    """Chan's update of a mean and of squared distances from it."""
    if not numbers.size:
        return previous
    mean = float(numbers.mean())
    batch = Moments(numbers.size, mean, float(((numbers - mean) ** 2).sum()))
    if not previous.count:
        return batch
    count, delta = previous.count + batch.count, batch.mean - previous.mean
    return Moments(
        count,
        previous.mean + delta * batch.count / count,
        previous.squares + batch.squares + delta**2 * previous.count * batch.count / count,
    )
