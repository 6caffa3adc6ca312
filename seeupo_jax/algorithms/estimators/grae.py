"""Group-relative advantages (GRAE): one number a trajectory, from rewards alone, no critic."""

from __future__ import annotations

import functools
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from seeupo_jax.algorithms.estimator_options import Baseline
from seeupo_jax.algorithms.estimators import Estimator
from seeupo_jax.algorithms.standardize import FLAT, exact_unit


class _Groups(NamedTuple):
    """Statistics of each trajectory's own group, over its valid members."""

    index_N: jax.Array
    size_N: jax.Array
    total_N: jax.Array  # of rewards
    unit_N: jax.Array  # that rewards are counted in here, reward units


@functools.partial(jax.jit, static_argnames=("baseline", "scale", "clip"))
def group_relative_advantage(
    reward_N: jax.Array,
    group_N: jax.Array,
    *,
    baseline: str = "mean",
    scale: str = "batch",
    clip: float | None = 3.0,
    valid_N: jax.Array | None = None,
) -> jax.Array:
    """Reward minus a baseline from its own group, then scaled (Eq. 9, arXiv:2602.06554 §4.2).

    Args:
      reward_N: [N], reward units; values of invalid trajectories are not read and may be NaN.
      group_N: int [N], any ids; equal ids make a group, wherever its members stand.
      baseline: `mean`, of the whole group; `leave_one_out`, of the group's other members (RLOO);
        `batch`, the mean of all valid trajectories, whatever their groups (REINFORCE with one
        baseline for every task).
      scale: `none`; `batch`, subtract the batch's mean and divide by its standard deviation
        (n - 1), or only subtract where that is at most 1e-6; `group`, divide by the standard
        deviation (n - 1) of the group's rewards plus 1e-6 (GRPO; it breaks SeeUPO's guarantee);
        `population`, the same with the deviation of n. Neither of these with baseline `batch`,
        where equal rewards would be divided by a deviation of 0.
      clip: bound > 0 on the magnitude after `batch` scaling, None for no bound; the other scales
        never clip.
      valid_N: bool [N]; False leaves a trajectory out of every statistic. None: all are valid.

    Returns:
      float32 [N], reward units for `none` and standard deviations otherwise, also where squares of
      the rewards lie beyond float32; 0 for invalid trajectories and, unless the baseline is
      `batch`, for those that are alone in their group.

    Raises:
      ValueError: an unknown baseline or scale, a group's scale with baseline `batch`, arrays that
        are not [N], a clip that is not > 0.
    """
    if baseline not in _BASELINES:
        raise ValueError(f"baseline: got {baseline!r}; allowed: {', '.join(_BASELINES)}.")
    if scale not in _SCALES:
        raise ValueError(f"scale: got {scale!r}; allowed: {', '.join(_SCALES)}.")
    if baseline == "batch" and scale in ("group", "population"):
        raise ValueError(f"scale: got {scale!r} with baseline='batch'; allowed: none, batch.")
    if clip is not None and not clip > 0:
        raise ValueError(f"clip: got {clip!r}; allowed: a number > 0, or None.")
    reward_N = jnp.asarray(reward_N, jnp.float32)
    group_N = jnp.asarray(group_N)
    valid_N = jnp.ones(reward_N.shape, bool) if valid_N is None else jnp.asarray(valid_N, bool)
    names = "reward_N, group_N, valid_N; allowed: [N], the same for each"
    chex.assert_rank(reward_N, 1, custom_message=names, exception_type=ValueError)
    arrays = [reward_N, group_N, valid_N]
    chex.assert_equal_shape(arrays, custom_message=names, exception_type=ValueError)
    if baseline == "batch":
        group_N = jnp.zeros_like(group_N)  # the mean of the one group that all make
    # Ids become 0, 1, ...: an id past N would be dropped silently by the segment sums.
    _, index_N = jnp.unique(group_N, return_inverse=True, size=group_N.shape[0])
    unit_N = _units(reward_N, index_N, valid_N, per_batch=scale == "batch")
    reward_N = _above_group_minimum(reward_N / unit_N, index_N, valid_N)
    groups = _Groups(
        index_N,
        _group_sum(valid_N, index_N).astype(jnp.int32),
        _group_sum(reward_N, index_N),
        unit_N,
    )
    advantage_N = reward_N - _BASELINES[baseline](reward_N, groups)
    advantage_N = jnp.where(valid_N, advantage_N, 0.0)
    return _SCALES[scale](advantage_N, reward_N, valid_N, groups, clip)


def _units(
    reward_N: jax.Array, index_N: jax.Array, valid_N: jax.Array, *, per_batch: bool
) -> jax.Array:
    """The unit of each trajectory's reward, [N]: its group's, or one for all."""
    size_N = jnp.where(valid_N, jnp.abs(reward_N), 0.0)
    if per_batch:
        return jnp.broadcast_to(exact_unit(jnp.max(size_N, initial=0.0)), size_N.shape)
    largest_N = jax.ops.segment_max(size_N, index_N, num_segments=size_N.shape[0])
    return exact_unit(largest_N[index_N])


def _above_group_minimum(reward_N: jax.Array, index_N: jax.Array, valid_N: jax.Array) -> jax.Array:
    """Rewards shifted by a constant of their group, which no advantage depends on; invalid: 0.

    Equal rewards become exactly 0. Unshifted, the float32 mean of seven rewards of 100.1 is 8e-6
    off, and dividing by the group's standard deviation makes that an advantage of -0.8 for each.
    """
    minimum = jax.ops.segment_min(
        jnp.where(valid_N, reward_N, jnp.inf), index_N, num_segments=reward_N.shape[0]
    )
    return jnp.where(valid_N, reward_N - minimum[index_N], 0.0)


def _group_sum(value_N: jax.Array, index_N: jax.Array) -> jax.Array:
    """Each trajectory's group total of `value_N`, [N]."""
    value_N = value_N.astype(jnp.float32)
    return jax.ops.segment_sum(value_N, index_N, num_segments=value_N.shape[0])[index_N]


def _mean(reward_N: jax.Array, groups: _Groups) -> jax.Array:
    return groups.total_N / jnp.maximum(groups.size_N, 1)


def _leave_one_out(reward_N: jax.Array, groups: _Groups) -> jax.Array:
    return (groups.total_N - reward_N) / jnp.maximum(groups.size_N - 1, 1)


def _unscaled(advantage_N, reward_N, valid_N, groups, clip):
    return advantage_N * groups.unit_N


def _by_batch(advantage_N, reward_N, valid_N, groups, clip):
    # The batch mean is 0 already: either baseline makes every group's advantages sum to 0.
    std = jnp.sqrt(jnp.sum(advantage_N**2) / jnp.maximum(jnp.sum(valid_N) - 1, 1))
    scaled_N = advantage_N / jnp.where(std > FLAT / groups.unit_N, std, 1.0 / groups.unit_N)
    return scaled_N if clip is None else jnp.clip(scaled_N, -clip, clip)


def _by_group(advantage_N, reward_N, valid_N, groups, clip, *, less=1):
    deviation_N = jnp.where(valid_N, reward_N - _mean(reward_N, groups), 0.0)
    square_N = _group_sum(deviation_N**2, groups.index_N)
    std_N = jnp.sqrt(square_N / jnp.maximum(groups.size_N - less, 1))
    return advantage_N / (std_N + 1e-6 / groups.unit_N)


_BASELINES = {"mean": _mean, "leave_one_out": _leave_one_out, "batch": _mean}
_SCALES = {
    "none": _unscaled,
    "batch": _by_batch,
    "group": _by_group,
    "population": functools.partial(_by_group, less=0),
}

ESTIMATOR = Estimator(
    group_relative_advantage,
    "trajectory",
    ("reward_N", "group_N", "valid_N"),
    Baseline,
    scales=True,
    keeps_zero=True,
)
