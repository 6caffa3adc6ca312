"""MaxRL: a reward less its group's mean, over that mean."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from seeupo_jax.algorithms.estimators import Estimator
from seeupo_jax.algorithms.estimators.grae import group_relative_advantage
from seeupo_jax.algorithms.standardize import masked

_EPSILON = 1e-6  # added to the mean, as in the authors' code


@functools.partial(jax.jit)
def maximum_likelihood_advantage(
    reward_N: jax.Array, group_N: jax.Array, *, valid_N: jax.Array | None = None
) -> jax.Array:
    """(r - mu) / (mu + 1e-6), mu the group's mean reward (MaxRL, arXiv:2602.02710).

    With rewards 0 and 1 it is an unbiased gradient of sum_k 1/k (1 - fail^k) up to k = the group's
    size, which tends to the log-likelihood of success. Harder tasks weigh more, and a task without
    a success nothing. It divides by a statistic of the group and so breaks SeeUPO's guarantee.

    Args:
      reward_N: [N], in [0, 1]; values of invalid trajectories are not read and may be NaN.
      group_N: int [N], any ids; equal ids make a group.
      valid_N: bool [N]; False leaves a trajectory out of every statistic. None: all are valid.

    Returns:
      float32 [N], without a unit; 0 for invalid trajectories and for those that are alone in their
      group, whose rewards the authors' code divides by 1e-6.
    """
    reward_N, group_N = jnp.asarray(reward_N, jnp.float32), jnp.asarray(group_N)
    valid_N = jnp.ones(reward_N.shape, bool) if valid_N is None else jnp.asarray(valid_N, bool)
    centred_N = group_relative_advantage(reward_N, group_N, scale="none", valid_N=valid_N)
    mean_N = masked(reward_N, valid_N) - centred_N
    return jnp.where(valid_N, centred_N / (mean_N + _EPSILON), 0.0)


ESTIMATOR = Estimator(
    maximum_likelihood_advantage,
    "trajectory",
    ("reward_N", "group_N", "valid_N"),
    reward_range=(0.0, 1.0),
    keeps_zero=True,
)
