"""Group-relative credit of single turns: what was earned from a state on, against one's likes.

Every turn names the state that it began from, so turns of one task that began from the same state,
in whatever trajectory and at whatever step, can be compared without a critic.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from seeupo_jax.algorithms.estimators.grae import group_relative_advantage
from seeupo_jax.algorithms.estimators.returns import reward_to_go

_EPSILON = float(jnp.finfo(jnp.float32).eps)

# Scale -> what each group's advantages are scaled by; `batch` scales their sum instead.
GROUP_SCALES = {"group": "group", "none": "none", "batch": "none"}


class Turns(NamedTuple):
    """Turns of all trajectories; rewards and returns are 0 where there is no valid one."""

    is_NK: jax.Array
    reward_NK: jax.Array
    return_NK: jax.Array  # discounted, from the turn on
    rounding_NK: jax.Array  # how far apart float32 may bring equal returns
    state_NK: jax.Array
    task_NK: jax.Array  # id of the trajectory's group
    valid_N: jax.Array


def compared_turns(
    reward_NK: jax.Array,
    group_N: jax.Array,
    state_NK: jax.Array,
    discount: float,
    scale: str,
    valid_N: jax.Array | None,
) -> Turns:
    """The turns of a batch, checked; arguments and errors as for `gigpo_advantage`."""
    if scale not in GROUP_SCALES:
        raise ValueError(f"scale: got {scale!r}; allowed: {', '.join(GROUP_SCALES)}.")
    reward_NK = jnp.asarray(reward_NK, jnp.float32)
    group_N, state_NK = (jnp.asarray(x, jnp.int32) for x in (group_N, state_NK))
    valid_N = jnp.ones(group_N.shape, bool) if valid_N is None else jnp.asarray(valid_N, bool)
    chex.assert_rank(reward_NK, 2, custom_message="reward_NK: [N, K]", exception_type=ValueError)
    check = functools.partial(chex.assert_shape, exception_type=ValueError)
    check(state_NK, reward_NK.shape, custom_message="state_NK: [N, K], as reward_NK")
    check([group_N, valid_N], reward_NK.shape[:1], custom_message="group_N, valid_N: [N]")
    is_NK = (state_NK >= 0) & valid_N[:, None]
    reward_NK = jnp.where(is_NK, reward_NK, 0.0)
    return_NK = reward_to_go(reward_NK, is_NK, discount=discount)
    # A reward is rounded at most 3 n times in a return of n, by eps / 2 of its size each: itself,
    # the discounts, the products with them, the sums. Two returns: eps instead of eps / 2.
    size_NK = reward_to_go(jnp.abs(reward_NK), is_NK, discount=discount)
    rounding_NK = 3 * _EPSILON * reward_to_go(jnp.ones_like(reward_NK), is_NK) * size_NK
    task_NK = jnp.broadcast_to(group_N[:, None], state_NK.shape)
    return Turns(is_NK, reward_NK, return_NK, rounding_NK, state_NK, task_NK, valid_N)


def of_episodes(turns: Turns, group_N: jax.Array, *, scale: str, clip: float | None) -> jax.Array:
    """`group_relative_advantage` of the trajectories' total rewards, [N]."""
    total_N = turns.reward_NK.sum(axis=1)
    # A reward is rounded at most n times in a total of n: itself, and in the sums.
    rounding_N = _EPSILON * turns.is_NK.sum(axis=1) * jnp.abs(turns.reward_NK).sum(axis=1)
    masks = {"valid_N": turns.valid_N, "rounding_N": rounding_N}
    return group_relative_advantage(total_N, group_N, scale=scale, clip=clip, **masks)


def refined(group_NK: jax.Array, state_NK: jax.Array) -> jax.Array:
    """Ids 0, 1, ... of the pairs of a group and a state."""
    # Not group x states + state: with any ids that overflows an int32.
    pair_M2 = jnp.stack([jnp.ravel(group_NK), jnp.ravel(state_NK)], axis=-1)
    count = pair_M2.shape[0]
    _, index_M = jnp.unique(pair_M2, axis=0, return_inverse=True, size=count)
    return index_M.reshape(group_NK.shape)


def relative(
    return_NK: jax.Array,
    group_NK: jax.Array,
    member_NK: jax.Array,
    *,
    scale: str,
    clip: float | None,
    baseline: str = "mean",
    rounding_NK: jax.Array | None = None,
) -> jax.Array:
    """`group_relative_advantage` of turns instead of trajectories."""
    advantage_M = group_relative_advantage(
        return_NK.ravel(),
        group_NK.ravel(),
        baseline=baseline,
        scale=scale,
        clip=clip,
        valid_N=member_NK.ravel(),
        rounding_N=None if rounding_NK is None else rounding_NK.ravel(),
    )
    return advantage_M.reshape(return_NK.shape)
