"""Several rewards a trajectory, each compared within its group."""

from __future__ import annotations

import functools
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from seeupo_jax.algorithms.estimators.grae import group_relative_advantage


class NamedRewards(NamedTuple):
    """Arguments of an estimator that reads rewards by name, checked; as of `gdpo_advantage`."""

    rewards_NQ: jax.Array
    weight_Q: jax.Array
    group_N: jax.Array
    valid_N: jax.Array


def check_rewards(
    rewards_NQ: jax.Array,
    reward_weight_Q: jax.Array,
    group_N: jax.Array,
    valid_N: jax.Array | None,
) -> NamedRewards:
    """The arguments as arrays.

    Raises:
      ValueError: arrays of other shapes.
    """
    rewards_NQ, weight_Q = (jnp.asarray(x, jnp.float32) for x in (rewards_NQ, reward_weight_Q))
    group_N = jnp.asarray(group_N)
    valid_N = jnp.ones(group_N.shape, bool) if valid_N is None else jnp.asarray(valid_N, bool)
    chex.assert_rank(rewards_NQ, 2, custom_message="rewards_NQ: [N, Q]", exception_type=ValueError)
    check = functools.partial(chex.assert_shape, exception_type=ValueError)
    check(weight_Q, rewards_NQ.shape[1:], custom_message="reward_weight_Q: [Q]")
    check([group_N, valid_N], rewards_NQ.shape[:1], custom_message="group_N, valid_N: [N]")
    return NamedRewards(rewards_NQ, weight_Q, group_N, valid_N)


def of_groups(given: NamedRewards, *, scale: str) -> jax.Array:
    """`group_relative_advantage` of each reward for itself, [N, Q], unweighted."""

    def of_one(reward_N: jax.Array) -> jax.Array:
        return group_relative_advantage(
            reward_N, given.group_N, scale=scale, clip=None, valid_N=given.valid_N
        )

    return jax.vmap(of_one, in_axes=1, out_axes=1)(given.rewards_NQ)
