"""Penalties on the rewards of overlong episodes: DAPO's soft overlong punishment."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from seeupo_jax.configuration.algorithm import Algorithm
from seeupo_jax.types import CONTEXT, Trajectory


def with_overlong_penalties(
    algorithm: Algorithm, trajectories: Sequence[Trajectory]
) -> tuple[Sequence[Trajectory], dict[str, float]]:
    """The trajectories with the penalty in their reward, and in that of their last turn; metrics.

    Context tokens do not count: the environment wrote them. No metrics if every episode failed.
    """
    options = algorithm.overlong
    if options is None:
        return trajectories, {}
    tokens = [sum(int((s.turn_L != CONTEXT).sum()) for s in t.segments) for t in trajectories]
    penalty_N = np.array([options.reward(count) for count in tokens])
    counted_N = np.array([not t.failed for t in trajectories], bool)
    metrics = {}
    if counted_N.any():
        metrics["sweep/overlong_penalty"] = float(penalty_N[counted_N].mean())
        metrics["sweep/overlong_fraction"] = float((penalty_N < 0)[counted_N].mean())
    pairs = zip(trajectories, penalty_N, strict=True)
    penalized = [
        dataclasses.replace(t, reward_table=t.reward_table.plus(float(penalty)))
        for t, penalty in pairs
    ]
    return penalized, metrics
