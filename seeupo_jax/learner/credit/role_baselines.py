"""Baselines of roles: moving averages of their rewards over all iterations of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from seeupo_jax.envs.base import ENVIRONMENT
from seeupo_jax.trajectories.roles import played_role, role_views
from seeupo_jax.types import Trajectory

Baselines = Mapping[str, float]  # by `baseline_name`


def baseline_name(view: Trajectory) -> str:
    """Which average a trajectory's reward counts in: of its role, and environment of a mixture."""
    role = played_role(view)
    game = view.info.get(ENVIRONMENT)
    return role if game is None else f"{game}:{role}"


def baselines_before(
    views: Sequence[Trajectory], previous: Baselines | None, decay: float
) -> tuple[np.ndarray, dict[str, float]]:
    """The baseline of each trajectory, before its own reward, and the baselines after all.

    b <- decay b + (1 - decay) r, from 0, in the trajectories' order (arXiv:2506.24119 §3.3;
    spiral-rl/spiral, train_spiral.py, whose advantages are by the baseline before the update).

    Args:
      views: each of one role; one that failed has baseline 0 and changes none.
      previous: those before the first; None: 0.

    Returns: float64 [N], reward units; and the last ones, float64 exactly, by `baseline_name`.
    """
    baselines = {} if previous is None else dict(previous)
    before_N = np.zeros(len(views))
    for place, view in enumerate(views):
        if not view.failed:
            name = baseline_name(view)
            before_N[place] = baselines.get(name, 0.0)
            baselines[name] = decay * before_N[place] + (1 - decay) * view.reward
    return before_N, {name: float(value) for name, value in baselines.items()}


def next_baselines(
    trajectories: Sequence[Trajectory],
    roles: Sequence[str],
    previous: Baselines | None,
    decay: float,
) -> dict[str, float]:
    """The baselines after an iteration; `roles`: as of `Learner`."""
    views = role_views(trajectories, roles) if roles else trajectories
    return baselines_before(views, previous, decay)[1]
