"""ProRL: rewards of turns less their running means, to go, less the mean of their group's turn."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import chex
import jax
import jax.numpy as jnp

from seeupo_jax.algorithms.estimator_options import TurnDiscount
from seeupo_jax.algorithms.estimators import Credit, Estimator
from seeupo_jax.algorithms.estimators.returns import reward_to_go
from seeupo_jax.options import above


def prorl_advantage(
    rewards_NKQ: jax.Array,
    turn_weight_Q: jax.Array,
    running_mean_Q: jax.Array,
    running_std_Q: jax.Array,
    group_N: jax.Array,
    mask_NK: jax.Array,
    *,
    discount: float = 1.0,
    std_floor: float = 0.1,
) -> Credit:
    """Centred rewards from a turn on, less their mean over the group's turns of that index.

    r̂_it = Σ_q w_q (r_itq - mean_q) / max(std_q, std_floor), with running statistics;
    G_it = Σ_(u>=t) discount^(u - t) r̂_iu; A_it = G_it - the mean of G_t over the group's
    trajectories that have a turn t. Without centring, rewards of every step make longer episodes
    better. ProRL, arXiv:2605.28293; hongruhou89/ProRL, trainer_RL_prorl.py.

    There the end of a list is an action of its own, whose return is 0; here it is the last turn's.
    There each process has statistics of its own, which are frozen after the first epoch.

    Args:
      rewards_NKQ: [N, K, Q], before their weights, reward units; not read where there is no turn.
      turn_weight_Q: [Q], any finite numbers.
      running_mean_Q, running_std_Q: [Q], reward units.
      group_N: int [N], any ids.
      mask_NK: [N, K], nonzero where there is a turn that counts.
      discount: in [0, 1], a turn.
      std_floor: > 0, reward units.

    Returns:
      Advantages float32 [N, K], in weights' units, and each reward's part of them [N, K, Q]; 0
      where there is no turn, or no other in the group to compare it with.

    Raises:
      ValueError: arrays of other shapes.
    """
    mask_NK, rewards_NKQ = jnp.asarray(mask_NK, bool), jnp.asarray(rewards_NKQ, jnp.float32)
    check = functools.partial(chex.assert_shape, exception_type=ValueError)
    chex.assert_rank(rewards_NKQ, 3, exception_type=ValueError)
    check(mask_NK, rewards_NKQ.shape[:2], custom_message="mask_NK: [N, K]")
    of_rewards = jnp.stack([turn_weight_Q, running_mean_Q, running_std_Q])
    check(of_rewards, (3, rewards_NKQ.shape[2]), custom_message="weights and statistics: [Q]")
    weight_11Q, mean_11Q, std_11Q = of_rewards.astype(jnp.float32)[:, None, None, :]
    centred_NKQ = weight_11Q * (rewards_NKQ - mean_11Q) / jnp.maximum(std_11Q, std_floor)
    to_go = functools.partial(reward_to_go, mask_NL=mask_NK, discount=discount)
    return_NKQ = jax.vmap(to_go, in_axes=2, out_axes=2)(centred_NKQ)
    part_NKQ = _less_group_mean(return_NKQ, jnp.asarray(group_N), mask_NK)
    return Credit(part_NKQ.sum(axis=2), part_NQ=part_NKQ)


def _less_group_mean(return_NKQ: jax.Array, group_N: jax.Array, mask_NK: jax.Array) -> jax.Array:
    """Less the mean over the group's turns of the same index; 0 outside the mask."""
    trajectories = group_N.shape[0]
    _, index_N = jnp.unique(group_N, return_inverse=True, size=trajectories)
    mask_NK1 = mask_NK[:, :, None]
    # Above the least one first: the float32 mean of equal numbers is not always that number.
    least_NKQ = jax.ops.segment_min(
        jnp.where(mask_NK1, return_NKQ, jnp.inf), index_N, num_segments=trajectories
    )[index_N]
    above_NKQ = jnp.where(mask_NK1, return_NKQ - least_NKQ, 0.0)

    def group_sum(value: jax.Array) -> jax.Array:
        return jax.ops.segment_sum(value, index_N, num_segments=trajectories)[index_N]

    mean_NKQ = group_sum(above_NKQ) / jnp.maximum(group_sum(jnp.float32(mask_NK1)), 1.0)
    return jnp.where(mask_NK1, above_NKQ - mean_NKQ, 0.0)


@dataclass(frozen=True)
class ProrlOptions(TurnDiscount):
    """Options of `prorl`."""

    std_floor: float = above(0, 0.1, most=1_000_000)
    """Centred rewards are divided by their running deviation, or by this if that is less."""


ESTIMATOR = Estimator(
    prorl_advantage,
    "turn",
    (
        "rewards_NKQ",
        "turn_weight_Q",
        "running_mean_Q",
        "running_std_Q",
        "group_N",
        "mask_NK",
    ),
    ProrlOptions,
    keeps_zero=True,
)
