"""A-GRAE: a group-relative advantage that leans to hard tasks as the policy succeeds more often."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from seeupo_jax.algorithms.estimator_options import Options
from seeupo_jax.algorithms.estimators import Estimator
from seeupo_jax.algorithms.estimators.grae import group_relative_advantage
from seeupo_jax.algorithms.standardize import masked
from seeupo_jax.options import above

_EPSILON = 1e-6  # what the formula divides by is larger by this


@functools.partial(jax.jit, static_argnames=("scale", "clip"))
def asymmetric_advantage(
    reward_N: jax.Array,
    group_N: jax.Array,
    *,
    alpha: float = 1.0,
    scale: str = "group",
    clip: float | None = 3.0,
    valid_N: jax.Array | None = None,
) -> jax.Array:
    """GRAE's advantage, more of it for easy tasks at first and for hard ones later, less if > 0.

    A-GRAE, arXiv:2602.05548 (Yu7-code/A-GRAE, core_algos.py). With mu the mean reward of the group,
    m the mean of mu over the groups, and A the advantage by `group_relative_advantage`:
    A <- (1 - m) A / 2 / (1 - sqrt(mu) + 1e-6) + m A / 2 / (sqrt(mu) + 1e-6), and where that is
    above 0, A <- A min(1, m / alpha). Every group counts once in m; one with a single valid member
    does not, where the authors' code counts it as a group of mean 0.

    Args:
      reward_N: [N], in [0, 1]; values of invalid trajectories are not read and may be NaN.
      group_N: int [N], any ids; equal ids make a group.
      alpha: in (0, 1]; advantages above 0 count less while m is below it.
      scale, clip: of A, as for `group_relative_advantage`; the paper's is `group`.
      valid_N: bool [N]; False leaves a trajectory out of every statistic. None: all are valid.

    Returns:
      float32 [N]; reward units for `none`, else standard deviations, times the factors; 0 for
      invalid trajectories and for those that are alone in their group.

    Raises:
      ValueError: an unknown scale, arrays that are not [N], a clip that is not > 0.
    """
    reward_N, group_N = jnp.asarray(reward_N), jnp.asarray(group_N)
    valid_N = jnp.ones(reward_N.shape, bool) if valid_N is None else jnp.asarray(valid_N, bool)
    base = {"scale": scale, "clip": clip, "valid_N": valid_N}
    advantage_N = group_relative_advantage(reward_N, group_N, **base)
    size = reward_N.shape[0]
    _, index_N = jnp.unique(group_N, return_inverse=True, size=size)
    count_G = jax.ops.segment_sum(jnp.float32(valid_N), index_N, num_segments=size)
    total_G = jax.ops.segment_sum(masked(reward_N, valid_N), index_N, num_segments=size)
    mean_G = total_G / jnp.maximum(count_G, 1.0)
    compared_G = count_G >= 2
    success = masked(mean_G, compared_G).sum() / jnp.maximum(compared_G.sum(), 1)
    root_N = jnp.sqrt(mean_G)[index_N]
    easy_N = 0.5 * advantage_N / (1.0 - root_N + _EPSILON)
    hard_N = 0.5 * advantage_N / (root_N + _EPSILON)
    advantage_N = (1.0 - success) * easy_N + success * hard_N
    less_N = jnp.where(advantage_N > 0, jnp.minimum(1.0, success / alpha), 1.0)
    return jnp.where(valid_N, advantage_N * less_N, 0.0)


@dataclass(frozen=True)
class AGraeOptions(Options):
    """Options of `a_grae`."""

    alpha: float = above(0, 1.0, most=1)
    """Advantages above 0 count less while the mean reward is below it."""


ESTIMATOR = Estimator(
    asymmetric_advantage,
    "trajectory",
    ("reward_N", "group_N", "valid_N"),
    AGraeOptions,
    scales=True,
    reward_range=(0.0, 1.0),
    keeps_zero=True,
)
