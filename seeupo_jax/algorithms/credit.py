"""Group-relative credit of single turns: what was earned from a state on, against one's likes.

Every turn names the state that it began from, so turns of one task that began from the same state,
in whatever trajectory and at whatever step, can be compared without a critic.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from seeupo_jax.algorithms.advantage import group_relative_advantage
from seeupo_jax.algorithms.value import reward_to_go, standardize

# Scale -> what each group's advantages are scaled by; `batch` scales their sum instead.
_GROUP_SCALES = {"group": "group", "none": "none", "batch": "none"}


class _Turns(NamedTuple):
    """Turns of all trajectories; rewards and returns are 0 where there is no valid one."""

    is_NK: jax.Array
    reward_NK: jax.Array
    return_NK: jax.Array  # discounted, from the turn on
    state_NK: jax.Array
    task_NK: jax.Array  # id of the trajectory's group
    valid_N: jax.Array


@functools.partial(jax.jit, static_argnames=("scale", "clip"))
def gigpo_advantage(
    reward_NK: jax.Array,
    group_N: jax.Array,
    state_NK: jax.Array,
    *,
    discount: float = 1.0,
    step_coef: float = 1.0,
    scale: str = "group",
    clip: float | None = 3.0,
    valid_N: jax.Array | None = None,
) -> jax.Array:
    """Advantage of the episode plus that of the turn among those from its state (GiGPO).

    GiGPO, arXiv:2505.10978: A = A_episode + step_coef A_turn (Eq. 8). A_episode compares the
    trajectory's total reward with its group's (Eq. 3); A_turn compares the discounted reward from
    the turn on with those of its anchor group: the turns of the same group with the same state
    (Eq. 6 and 7). An anchor group may hold several turns of one trajectory; a turn alone in its own
    has A_turn = 0. The authors' code averages the episode's part over turns, where long
    trajectories count more; here, as in the paper, every trajectory counts once.

    Args:
      reward_NK: [N, K], reward of each turn, reward units.
      group_N: int [N], any ids; trajectories of one task have equal ones.
      state_NK: int [N, K], id of the state that the turn began from; negative where the trajectory
        has no such turn, whose reward is not read.
      discount: in [0, 1], a turn; of A_turn alone.
      step_coef: >= 0, weight of A_turn.
      scale: F_norm of the paper. `group`: both parts are divided by their group's standard
        deviation (n - 1) plus 1e-6; `none`: F_norm = 1; `batch`: F_norm = 1, and the sum is
        standardised over all turns (n - 1; only centred where the deviation is at most 1e-6).
      clip: bound > 0 on the magnitude after `batch` scaling, None for no bound; the other scales
        never clip.
      valid_N: bool [N]; False leaves a trajectory out of everything. None: all are valid.

    Returns:
      float32 [N, K]; reward units for `none`, else standard deviations. 0 where there is no turn.

    Raises:
      ValueError: an unknown scale, arrays of other shapes, a clip that is not > 0.
    """
    turns = _turns(reward_NK, group_N, state_NK, discount, scale, valid_N)
    part = {"scale": _GROUP_SCALES[scale], "clip": clip}
    total_N = turns.reward_NK.sum(axis=1)
    episode_N = group_relative_advantage(total_N, group_N, valid_N=turns.valid_N, **part)
    anchor_NK = _refined(turns.task_NK, turns.state_NK)
    turn_NK = _relative(turns.return_NK, anchor_NK, turns.is_NK, **part)
    advantage_NK = jnp.where(turns.is_NK, episode_N[:, None] + step_coef * turn_NK, 0.0)
    return standardize(advantage_NK, turns.is_NK, clip=clip) if scale == "batch" else advantage_NK


@functools.partial(jax.jit, static_argnames=("history", "scale", "clip"))
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
) -> jax.Array:
    """Advantage of the turn among those from its state, averaged over how much past they share.

    HGPO, arXiv:2602.22817. Group k of a turn, k = 0 ... history: the turns of the same task with
    the same state and the same k states before it (Eq. 3 to 5), so group 0 is GiGPO's anchor group
    and each lies within the one before. A_k compares the discounted rewards from the turn on
    (Eq. 6); A = sum of w_k A_k with w_k proportional to (k + 1)^power (Eq. 7). There is no
    episode's part. As in the paper's experiments (§5.1) groups of zero advantage are left out and
    the other weights add up to 1; here that is a group whose rewards to go are all equal, such as a
    turn's that is alone, where the authors' code drops each turn's advantages that are 0. As in
    that code a turn with fewer than k turns before it has no group k. Their code divides by the
    standard deviation of n, here it is that of n - 1.

    Args:
      reward_NK, group_N, state_NK, discount, clip, valid_N: as for `gigpo_advantage`.
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
    turns = _turns(reward_NK, group_N, state_NK, discount, scale, valid_N)
    part = {"scale": _GROUP_SCALES[scale], "clip": clip}

    def deeper(level, depth):
        group_NK, member_NK, sum_NK, weight_NK = level
        past_NK = _earlier(turns.state_NK, depth)
        member_NK = member_NK & (past_NK >= 0)
        group_NK = _refined(group_NK, past_NK)
        advantage_NK = _relative(turns.return_NK, group_NK, member_NK, **part)
        spread_NK = member_NK & _has_spread(advantage_NK, group_NK)
        depth_weight_NK = jnp.where(spread_NK, (depth + 1.0) ** power, 0.0)
        sum_NK, weight_NK = sum_NK + depth_weight_NK * advantage_NK, weight_NK + depth_weight_NK
        return (group_NK, member_NK, sum_NK, weight_NK), None

    # Scanned, so that a long history compiles no longer than a short one.
    depth_H = jnp.arange(min(history, turns.state_NK.shape[1] - 1) + 1)
    nothing_NK = jnp.zeros_like(turns.return_NK)
    level = (turns.task_NK, turns.is_NK, nothing_NK, nothing_NK)
    (_, _, sum_NK, weight_NK), _ = jax.lax.scan(deeper, level, depth_H)
    advantage_NK = sum_NK / jnp.where(weight_NK > 0, weight_NK, 1.0)
    return standardize(advantage_NK, turns.is_NK, clip=clip) if scale == "batch" else advantage_NK


def _turns(reward_NK, group_N, state_NK, discount, scale, valid_N) -> _Turns:
    if scale not in _GROUP_SCALES:
        raise ValueError(f"scale: got {scale!r}; allowed: {', '.join(_GROUP_SCALES)}.")
    reward_NK = jnp.asarray(reward_NK, jnp.float32)
    group_N, state_NK = (jnp.asarray(x, jnp.int32) for x in (group_N, state_NK))
    valid_N = jnp.ones(group_N.shape, bool) if valid_N is None else jnp.asarray(valid_N, bool)
    rows = reward_NK.shape[:1]
    if reward_NK.ndim != 2 or state_NK.shape != reward_NK.shape:
        raise ValueError(
            f"got shapes reward_NK {reward_NK.shape}, state_NK {state_NK.shape}; allowed: [N, K],"
            " the same for both."
        )
    if not group_N.shape == valid_N.shape == rows:
        raise ValueError(
            f"got shapes group_N {group_N.shape}, valid_N {valid_N.shape} with reward_NK"
            f" {reward_NK.shape}; allowed: {rows}."
        )
    is_NK = (state_NK >= 0) & valid_N[:, None]
    reward_NK = jnp.where(is_NK, reward_NK, 0.0)
    return_NK = reward_to_go(reward_NK, is_NK, discount=discount)
    task_NK = jnp.broadcast_to(group_N[:, None], state_NK.shape)
    return _Turns(is_NK, reward_NK, return_NK, state_NK, task_NK, valid_N)


def _earlier(state_NK: jax.Array, turns: jax.Array) -> jax.Array:
    """The state so many turns before; -1 before the first turn."""
    within_K = jnp.arange(state_NK.shape[1]) >= turns
    return jnp.where(within_K[None, :], jnp.roll(state_NK, turns, axis=1), -1)


def _refined(group_NK: jax.Array, state_NK: jax.Array) -> jax.Array:
    """Ids 0, 1, ... of the pairs of a group and a state."""
    # Not group x states + state: with any ids that overflows an int32.
    pair_M2 = jnp.stack([jnp.ravel(group_NK), jnp.ravel(state_NK)], axis=-1)
    count = pair_M2.shape[0]
    _, index_M = jnp.unique(pair_M2, axis=0, return_inverse=True, size=count)
    return index_M.reshape(group_NK.shape)


def _relative(return_NK, group_NK, member_NK, *, scale: str, clip: float | None) -> jax.Array:
    """`group_relative_advantage` of turns instead of trajectories."""
    flat = (x_NK.ravel() for x_NK in (return_NK, group_NK))
    advantage_M = group_relative_advantage(*flat, scale=scale, clip=clip, valid_N=member_NK.ravel())
    return advantage_M.reshape(return_NK.shape)


def _has_spread(advantage_NK: jax.Array, group_NK: jax.Array) -> jax.Array:
    """Whether anyone in the turn's group has an advantage: equal returns are exactly 0 each."""
    size_M, group_M = jnp.abs(advantage_NK).ravel(), group_NK.ravel()
    largest_M = jax.ops.segment_max(size_M, group_M, num_segments=size_M.shape[0])
    return (largest_M[group_M] > 0).reshape(group_NK.shape)
