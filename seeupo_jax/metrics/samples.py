"""An iteration's samples for trackers: distributions, and conversations to read."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from seeupo_jax.metrics.trackers import Sample
from seeupo_jax.trajectories.trajectory_record import succeeded
from seeupo_jax.types import Trajectory, TrajectoryStats


def histograms_of(stats: Sequence[TrajectoryStats | None]) -> dict[str, np.ndarray]:
    """Histograms of advantages, and of weights M at every turn (from 1); of finite numbers."""
    present = [each for each in stats if each is not None]
    turns = max((len(each.weight_K) for each in present), default=0)
    values = {"sweep/advantage": np.array([each.advantage for each in present])}
    for turn in range(turns):
        weights = [each.weight_K[turn] for each in present if len(each.weight_K) > turn]
        values[f"sweep/weight/turn={turn + 1}"] = np.array(weights, np.float64)
    finite = {name: x[np.isfinite(x)] for name, x in values.items()}
    return {name: x for name, x in finite.items() if x.size}


def samples_of(trajectories: Sequence[Trajectory], split: str) -> list[Sample]:
    """The first of those with the highest reward, and of those with the lowest, if they differ."""
    good = [t for t in trajectories if not t.failed]
    if not good:
        return []
    extremes = [max(good, key=lambda t: t.reward), min(good, key=lambda t: t.reward)]
    return [_sample(t, split) for t in extremes[: 1 + (extremes[0].reward != extremes[1].reward)]]


def _sample(trajectory: Trajectory, split: str) -> Sample:
    about = {
        "task": trajectory.task_id,
        "reward": f"{trajectory.reward:g}",
        "success": {True: "yes", False: "no", None: "unknown"}[succeeded(trajectory)],
        "stop": trajectory.stop,
        "turns": str(trajectory.turns),
    }
    return Sample(split, about, trajectory.messages)
