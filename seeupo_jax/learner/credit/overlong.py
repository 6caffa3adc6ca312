"""Penalties on the rewards of overlong episodes: DAPO's soft overlong punishment."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from seeupo_jax.configuration.algorithm import Algorithm
from seeupo_jax.types import CONTEXT, Trajectory


def overlong_reward(
    tokens_N: np.ndarray, *, length: float, buffer: float, penalty: float = 1.0
) -> np.ndarray:
    """0 up to length - buffer tokens, then falling to -penalty (arXiv:2503.14476, Eq. 13).

    Args:
      tokens_N: sampled tokens of each episode.
      length: L_max, where the whole penalty is reached. buffer: L_cache, over which it grows.

    Returns: float64 [N], reward units, in [-penalty, 0].
    """
    over_N = np.asarray(tokens_N, np.float64) - (length - buffer)
    return -penalty * np.clip(over_N / buffer, 0.0, 1.0)


def with_overlong_penalties(
    algorithm: Algorithm, trajectories: Sequence[Trajectory]
) -> tuple[Sequence[Trajectory], dict[str, float]]:
    """The trajectories with the penalty in their reward, and in that of their last turn; metrics.

    Context tokens do not count: the environment wrote them. No metrics if every episode failed.
    """
    length, buffer = algorithm.overlong_length, algorithm.overlong_buffer
    if length is None:
        return trajectories, {}
    tokens_N = np.array(
        [sum((s.turn_L != CONTEXT).sum() for s in t.segments) for t in trajectories]
    )
    penalty_N = overlong_reward(
        tokens_N,
        length=length,
        buffer=length / 5 if buffer is None else buffer,
        penalty=algorithm.overlong_penalty,
    )
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
