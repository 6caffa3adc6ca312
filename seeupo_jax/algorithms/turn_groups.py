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

# Scale -> what each group's advantages are scaled by; `batch` scales their sum instead.
GROUP_SCALES = {"group": "group", "none": "none", "batch": "none"}


class Turns(NamedTuple):
    """Turns of all trajectories; rewards and returns are 0 where there is no valid one."""

    is_NK: jax.Array
    reward_NK: jax.Array
    return_NK: jax.Array  # discounted, from the turn on
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
    task_NK = jnp.broadcast_to(group_N[:, None], state_NK.shape)
    return Turns(is_NK, reward_NK, return_NK, state_NK, task_NK, valid_N)


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
) -> jax.Array:
    """`group_relative_advantage` of turns instead of trajectories."""
    flat = (x_NK.ravel() for x_NK in (return_NK, group_NK))
    advantage_M = group_relative_advantage(*flat, scale=scale, clip=clip, valid_N=member_NK.ravel())
    return advantage_M.reshape(return_NK.shape)
