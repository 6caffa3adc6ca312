"""CANON: a trajectory among the half of its group with more of a metric, and with less."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import chex
import jax
import jax.numpy as jnp

from seeupo_jax.algorithms.estimator_options import MetricOptions
from seeupo_jax.algorithms.estimators import Estimator
from seeupo_jax.algorithms.standardize import masked
from seeupo_jax.options import within


@jax.jit
def conditional_advantage(
    reward_N: jax.Array,
    group_N: jax.Array,
    metric_N: jax.Array,
    *,
    mu: float = 0.5,
    valid_N: jax.Array | None = None,
) -> jax.Array:
    """Reward less the mean of the other half of its group and of its own half, weighted.

    CANON, arXiv:2509.23962, Eq. 5 with alpha = 1 (biuboomc/CANON, core_algos.py). A group is sorted
    by the metric and cut in the middle: A = mu (r - the other half's mean) + (1 - mu) (r - its own
    half's mean). With mu = 1/2 and halves of one size that is r less the group's mean. As in the
    authors' code the upper half of an odd group has one more, and equal metrics keep the order of
    the batch, so that a cut may go through them. There a trajectory that is alone in its group
    keeps its reward; here it has 0. The result is in reward units: what the authors' code divides
    it by, the longest response, is `loss_aggregation=constant` here.

    Args:
      reward_N: [N], reward units; values of invalid trajectories are not read and may be NaN.
      group_N: int [N], any ids; equal ids make a group.
      metric_N: [N]; only its order within a group counts.
      mu: in [0, 1].
      valid_N: bool [N]; False leaves a trajectory out of every statistic. None: all are valid.

    Returns:
      float32 [N], reward units; 0 for invalid trajectories and for those alone in their group.

    Raises:
      ValueError: arrays that are not [N].
    """
    reward_N, group_N, metric_N = (jnp.asarray(x) for x in (reward_N, group_N, metric_N))
    valid_N = jnp.ones(reward_N.shape, bool) if valid_N is None else jnp.asarray(valid_N, bool)
    names = "reward_N, group_N, metric_N, valid_N; allowed: [N], the same for each"
    chex.assert_rank(reward_N, 1, custom_message=names, exception_type=ValueError)
    arrays = [reward_N, group_N, metric_N, valid_N]
    chex.assert_equal_shape(arrays, custom_message=names, exception_type=ValueError)
    size = reward_N.shape[0]
    _, index_N = jnp.unique(group_N, return_inverse=True, size=size)
    total = functools.partial(jax.ops.segment_sum, num_segments=2 * size)
    count_G = total(jnp.int32(valid_N), index_N)
    # Sorted by group, those left out last; then by the metric, then by their place in the batch.
    order_N = jnp.lexsort((masked(metric_N, valid_N), ~valid_N, index_N))
    member_G = jax.ops.segment_sum(jnp.ones(size, jnp.int32), index_N, num_segments=size)
    first_G = jnp.cumsum(member_G) - member_G
    place_N = jnp.zeros(size, jnp.int32).at[order_N].set(jnp.arange(size)) - first_G[index_N]
    upper_N = place_N >= count_G[index_N] // 2
    half_N = 2 * index_N + upper_N
    # Above the group's least reward: equal ones are then exactly 0, whatever their mean rounds to.
    low_G = jax.ops.segment_min(jnp.where(valid_N, reward_N, jnp.inf), index_N, num_segments=size)
    reward_N = masked(reward_N - low_G[index_N], valid_N)
    count_H = total(jnp.float32(valid_N), half_N)
    mean_H = total(reward_N, half_N) / jnp.maximum(count_H, 1.0)
    own_N, other_N = mean_H[half_N], mean_H[half_N + 1 - 2 * upper_N]
    advantage_N = mu * (reward_N - other_N) + (1.0 - mu) * (reward_N - own_N)
    return jnp.where(valid_N & (count_G[index_N] >= 2), advantage_N, 0.0)


@dataclass(frozen=True)
class CanonOptions(MetricOptions):
    """Options of `canon`."""

    mu: float = within(0, 1, 0.5)
    """Weight of the comparison with the other half; 0.5 is the group's mean as baseline."""


ESTIMATOR = Estimator(
    conditional_advantage,
    "trajectory",
    ("reward_N", "group_N", "metric_N", "valid_N"),
    CanonOptions,
)
