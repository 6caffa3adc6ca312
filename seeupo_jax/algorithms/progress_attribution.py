"""The loss of a progress estimator: contributions of turns are to add up to the reward."""

from __future__ import annotations

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from seeupo_jax.algorithms.standardize import masked


class Progress(NamedTuple):
    """A loss, and its derivative by every trajectory's sum.

    loss: float32, squared reward units; the mean over valid trajectories.
    error: float32, reward units; the mean magnitude of a sum less its reward.
    slope_N: float32 [N].
    """

    loss: jax.Array
    error: jax.Array
    slope_N: jax.Array


@jax.jit
def progress_loss(sum_N: jax.Array, reward_N: jax.Array, valid_N: jax.Array) -> Progress:
    """The mean over trajectories of (sum of a trajectory's contributions - reward)^2.

    SPA-RL, arXiv:2505.20732: the progress estimator's loss.

    Args:
      sum_N: float32 [N], reward units.
      reward_N: float32 [N]. What invalid trajectories have in either is not read.
      valid_N: bool [N].
    """
    chex.assert_rank(sum_N, 1, exception_type=ValueError)
    chex.assert_equal_shape([sum_N, reward_N, valid_N], exception_type=ValueError)
    count = jnp.maximum(valid_N.sum(), 1)
    error_N = masked(sum_N, valid_N) - masked(reward_N, valid_N)
    return Progress(
        (error_N**2).sum() / count, jnp.abs(error_N).sum() / count, 2.0 * error_N / count
    )
