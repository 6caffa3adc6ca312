"""HGPO: each turn among those that share its state and more and more of its past."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from seeupo_jax.algorithms.estimator_options import StateOptions, TurnDiscount
from seeupo_jax.algorithms.estimators import Estimator
from seeupo_jax.algorithms.standardize import standardize
from seeupo_jax.algorithms.turn_groups import GROUP_SCALES, compared_turns, of_returns, refined
from seeupo_jax.options import at_least, within


@functools.partial(jax.jit, static_argnames=("discount", "history", "scale", "clip"))
def hgpo_advantage(
    reward_NK: jax.Array,
    group_N: jax.Array,
    state_NK: jax.Array,
    *,
    discount: float = 1.0,
    history: int = 2,
    power: float = 1.0,
    scale: str = "group",
    clip: float | None = 3.0,
    valid_N: jax.Array | None = None,
    reward_rest_NK: jax.Array | None = None,
) -> jax.Array:
    """Advantage of the turn among those from its state, averaged over how much past they share.

    HGPO, arXiv:2602.22817. Group k of a turn, k = 0 ... history: the turns of the same task with
    the same state and the same k states before it (Eq. 3 to 5), so group 0 is GiGPO's anchor group
    and each lies within the one before. A_k compares the discounted rewards from the turn on
    (Eq. 6); A = sum of w_k A_k with w_k proportional to (k + 2)^power, without an episode's part.
    These are the weights of the authors' code (langfengQ/verl-agent, recipe/hgpo/core_hgpo.py),
    whose k counts the turn's own state too, before it weighs by k + 1; Eq. 7 has (k + 1)^power. As
    in the paper's experiments (§5.1) zero-advantage groups are left out and the other weights add
    up to 1: here groups whose rewards to go are all equal, in the authors' code each turn's
    advantages that are 0. As in that code a turn with fewer than k turns before it has no group k.
    Their code divides by the standard deviation of n, here it is that of n - 1.

    Args:
      reward_NK, group_N, state_NK, discount, clip, valid_N, reward_rest_NK: as for
        `gigpo_advantage`.
      history: >= 0, turns before a state that its deepest group shares; the paper's K.
      power: >= 0, how much more a deeper group counts, 0 for all alike; the paper's alpha.
      scale: `group`: each A_k is divided by its group's standard deviation (n - 1) plus 1e-6 (the
        paper); `none`: it is not; `batch`: it is not, and A is standardised over all turns.

    Returns:
      float32 [N, K]; reward units for `none`, else standard deviations. 0 where there is no turn
      and, unless scale is `batch`, for a turn that no group with a spread holds.

    Raises:
      ValueError: an unknown scale, arrays of other shapes, a history that is negative, a clip that
        is not > 0.
    """
    if history < 0:
        raise ValueError(f"history: got {history!r}; allowed: an integer >= 0.")
    turns = compared_turns(reward_NK, group_N, state_NK, discount, scale, valid_N, reward_rest_NK)
    part = {"scale": GROUP_SCALES[scale], "clip": clip}

    def deeper(level, depth):
        group_NK, member_NK, sum_NK, weight_NK = level
        past_NK = _earlier(turns.state_NK, depth)
        member_NK = member_NK & (past_NK >= 0)
        group_NK = refined(group_NK, past_NK)
        advantage_NK = of_returns(turns, group_NK, member_NK, **part)
        differs_NK = member_NK & _differs(advantage_NK, group_NK)
        depth_weight_NK = jnp.where(differs_NK, (depth + 2.0) ** power, 0.0)
        sum_NK, weight_NK = sum_NK + depth_weight_NK * advantage_NK, weight_NK + depth_weight_NK
        return (group_NK, member_NK, sum_NK, weight_NK), None

    # Scanned, so that a long history compiles no longer than a short one.
    depth_H = jnp.arange(min(history, turns.state_NK.shape[1] - 1) + 1)
    zeros_NK = jnp.zeros(turns.is_NK.shape)
    level = (turns.task_NK, turns.is_NK, zeros_NK, zeros_NK)
    (_, _, sum_NK, weight_NK), _ = jax.lax.scan(deeper, level, depth_H)
    advantage_NK = sum_NK / jnp.where(weight_NK > 0, weight_NK, 1.0)
    return standardize(advantage_NK, turns.is_NK, clip=clip) if scale == "batch" else advantage_NK


def _earlier(state_NK: jax.Array, turns: jax.Array) -> jax.Array:
    """The state so many turns before; -1 before the first turn."""
    within_K = jnp.arange(state_NK.shape[1]) >= turns
    return jnp.where(within_K[None, :], jnp.roll(state_NK, turns, axis=1), -1)


def _differs(advantage_NK: jax.Array, group_NK: jax.Array) -> jax.Array:
    """Whether anyone in the turn's group has an advantage: equal returns are exactly 0 each."""
    size_M, group_M = jnp.abs(advantage_NK).ravel(), group_NK.ravel()
    largest_M = jax.ops.segment_max(size_M, group_M, num_segments=size_M.shape[0])
    return (largest_M[group_M] > 0).reshape(group_NK.shape)


@dataclass(frozen=True)
class HgpoOptions(TurnDiscount, StateOptions):
    """Options of `hgpo`."""

    history: int = at_least(0, 2)
    """Turns before a state that its deepest group shares."""
    power: float = within(0, 10, 1.0)
    """How much more deeper groups count; 0: not."""


ESTIMATOR = Estimator(
    hgpo_advantage,
    "turn",
    ("reward_NK", "reward_rest_NK", "group_N", "state_NK", "valid_N"),
    HgpoOptions,
    scales=True,
)
