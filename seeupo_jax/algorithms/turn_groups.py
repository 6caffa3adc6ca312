"""Group-relative credit of single turns: what was earned from a state on, against one's likes.

Every turn names the state that it began from, so turns of one task that began from the same state,
in whatever trajectory and at whatever step, can be compared without a critic.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from seeupo_jax.algorithms.double_float import DoubleFloat, add, multiply, select
from seeupo_jax.algorithms.estimators.grae import group_relative_advantage
from seeupo_jax.algorithms.estimators.returns import reward_to_go
from seeupo_jax.algorithms.standardize import masked

# How far apart equal sums of n rewards may come out, in units of n times their size: rewards and
# discounts have 48 bits, and each of the n sums and products is right to 45.
_ROUNDING = 2.0**-42

# Scale -> what each group's advantages are scaled by; `batch` scales their sum instead.
GROUP_SCALES = {"group": "group", "none": "none", "batch": "none"}


class Turns(NamedTuple):
    """Turns of all trajectories; rewards and returns are 0 where there is no valid one."""

    is_NK: jax.Array
    total_N: DoubleFloat
    total_rounding_N: jax.Array  # how far apart equal totals may come out
    return_NK: DoubleFloat  # discounted, from the turn on
    rounding_NK: jax.Array  # how far apart equal returns may come out
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
    reward_rest_NK: jax.Array | None,
) -> Turns:
    """The turns of a batch, checked; arguments and errors as for `gigpo_advantage`."""
    if scale not in GROUP_SCALES:
        raise ValueError(f"scale: got {scale!r}; allowed: {', '.join(GROUP_SCALES)}.")
    reward_NK = jnp.asarray(reward_NK, jnp.float32)
    rest_NK = jnp.zeros_like(reward_NK) if reward_rest_NK is None else reward_rest_NK
    group_N, state_NK = (jnp.asarray(x, jnp.int32) for x in (group_N, state_NK))
    valid_N = jnp.ones(group_N.shape, bool) if valid_N is None else jnp.asarray(valid_N, bool)
    chex.assert_rank(reward_NK, 2, custom_message="reward_NK: [N, K]", exception_type=ValueError)
    check = functools.partial(chex.assert_shape, exception_type=ValueError)
    check(
        [state_NK, rest_NK],
        reward_NK.shape,
        custom_message="state_NK, reward_rest_NK: [N, K], as reward_NK",
    )
    check([group_N, valid_N], reward_NK.shape[:1], custom_message="group_N, valid_N: [N]")
    is_NK = (state_NK >= 0) & valid_N[:, None]
    reward_NK = DoubleFloat(*(masked(part_NK, is_NK) for part_NK in (reward_NK, rest_NK)))
    total_N, _ = _sums_from_each(reward_NK, is_NK, 1.0)
    _, return_NK = _sums_from_each(reward_NK, is_NK, discount)
    size_NK, terms_NK = jnp.abs(reward_NK.hi), reward_to_go(jnp.ones_like(rest_NK), is_NK)
    return Turns(
        is_NK=is_NK,
        total_N=total_N,
        total_rounding_N=_ROUNDING * is_NK.sum(axis=1) * size_NK.sum(axis=1),
        return_NK=return_NK,
        rounding_NK=_ROUNDING * terms_NK * reward_to_go(size_NK, is_NK, discount=discount),
        state_NK=state_NK,
        task_NK=jnp.broadcast_to(group_N[:, None], state_NK.shape),
        valid_N=valid_N,
    )


def _sums_from_each(
    reward_NK: DoubleFloat, is_NK: jax.Array, discount: float
) -> tuple[DoubleFloat, DoubleFloat]:
    """Discounted sums of all turns, [N], and from each turn on, [N, K]; 0 where there is none.

    In float32 the sum of 50 rewards of 10 would lose what a last one of 10.1 adds to the first.
    """

    def earlier(later_N, turn):
        reward_N, is_N = turn
        here_N = select(is_N, add(reward_N, multiply(later_N, discount)), later_N)
        return here_N, here_N

    turns = (DoubleFloat(*(part_NK.T for part_NK in reward_NK)), is_NK.T)
    zeros_N = jnp.zeros(is_NK.shape[0])
    total_N, sum_KN = jax.lax.scan(earlier, DoubleFloat(zeros_N, zeros_N), turns, reverse=True)
    return total_N, DoubleFloat(*(masked(part_KN.T, is_NK) for part_KN in sum_KN))


def of_episodes(turns: Turns, group_N: jax.Array, *, scale: str, clip: float | None) -> jax.Array:
    """`group_relative_advantage` of the trajectories' total rewards, [N]."""
    above_N = _above_least(turns.total_N, turns.total_rounding_N, group_N, turns.valid_N)
    return group_relative_advantage(above_N, group_N, scale=scale, clip=clip, valid_N=turns.valid_N)


def of_returns(
    turns: Turns, group_NK: jax.Array, member_NK: jax.Array, *, scale: str, clip: float | None
) -> jax.Array:
    """`relative` of the discounted rewards from each turn on."""
    above_NK = _above_least(turns.return_NK, turns.rounding_NK, group_NK, member_NK)
    return relative(above_NK, group_NK, member_NK, scale=scale, clip=clip)


def _above_least(
    value: DoubleFloat, rounding: jax.Array, group: jax.Array, valid: jax.Array
) -> jax.Array:
    """How far values are above the least of their group, in float32, any shape; invalid: 0.

    All are 0 in a group where rounding explains the largest.
    """
    _, index = jnp.unique(group, return_inverse=True, size=group.size)
    index = index.reshape(group.shape)

    def of_group(reduce: Callable[..., jax.Array], x: jax.Array) -> jax.Array:
        return reduce(x.ravel(), index.ravel(), num_segments=x.size)[index]

    def least(x: jax.Array, of: jax.Array) -> jax.Array:
        return of_group(jax.ops.segment_min, jnp.where(of, x, jnp.inf))

    least_hi = least(value.hi, valid)
    # Of the nearest float32 in common, that of the smallest rest.
    least_lo = least(value.lo, valid & (value.hi == least_hi))
    above = jnp.where(valid, (value.hi - least_hi) + (value.lo - least_lo), 0.0)
    rounding = jnp.where(valid, rounding, 0.0)
    largest = functools.partial(of_group, jax.ops.segment_max)
    return jnp.where(largest(above) <= largest(rounding), 0.0, above)


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
) -> jax.Array:
    """`group_relative_advantage` of turns instead of trajectories."""
    advantage_M = group_relative_advantage(
        return_NK.ravel(),
        group_NK.ravel(),
        baseline=baseline,
        scale=scale,
        clip=clip,
        valid_N=member_NK.ravel(),
    )
    return advantage_M.reshape(return_NK.shape)
