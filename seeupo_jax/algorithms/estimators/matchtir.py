"""MatchTIR: a trajectory among those of its task, and each turn among those of its index."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from seeupo_jax.algorithms.estimator_options import TurnDiscount
from seeupo_jax.algorithms.estimators import Estimator
from seeupo_jax.algorithms.standardize import standardize
from seeupo_jax.algorithms.turn_groups import (
    GROUP_SCALES,
    compared_turns,
    of_episodes,
    of_returns,
    refined,
)


@functools.partial(jax.jit, static_argnames=("discount", "scale", "clip"))
def matchtir_advantage(
    reward_NK: jax.Array,
    group_N: jax.Array,
    mask_NK: jax.Array,
    *,
    discount: float = 0.9,
    scale: str = "group",
    clip: float | None = 3.0,
    valid_N: jax.Array | None = None,
    reward_rest_NK: jax.Array | None = None,
) -> jax.Array:
    """Half of the trajectory's advantage and of the turn's among the turns of its index.

    MatchTIR, arXiv:2601.10712 (quchangle1/MatchTIR, core_algos.py): A = (A_traj + A_turn) / 2.
    A_traj compares the sum of the trajectory's turn rewards with its group's; A_turn compares the
    discounted rewards from turn t on with those of the group's trajectories that have a turn t.
    It is GiGPO's with the turn's index as its state, halved. A turn that is alone at its index has
    A_turn = 0; in the authors' code it has its reward to go, undivided.

    Args:
      reward_NK: [N, K], reward of each turn, reward units.
      group_N: int [N], any ids; trajectories of one task have equal ones.
      mask_NK: [N, K], whether there is such a turn; other rewards are not read.
      discount: in [0, 1], a turn; of A_turn alone.
      scale: `group`: both parts are divided by their group's standard deviation (n - 1) plus 1e-6
        (the paper); `none`: they are not; `batch`: they are not, and the sum is standardised over
        all turns (n - 1; only centred where the deviation is at most 1e-6).
      clip: bound > 0 on the magnitude after `batch` scaling, None for no bound; the other scales
        never clip.
      valid_N: bool [N]; False leaves a trajectory out of everything. None: all are valid.
      reward_rest_NK: [N, K], what float32 leaves of each reward. None: 0.

    Returns:
      float32 [N, K]; reward units for `none`, else standard deviations. 0 where there is no turn.

    Raises:
      ValueError: an unknown scale, arrays of other shapes, a clip that is not > 0.
    """
    mask_NK = jnp.asarray(mask_NK, bool)
    index_NK = jnp.where(mask_NK, jnp.arange(mask_NK.shape[-1]), -1)
    turns = compared_turns(reward_NK, group_N, index_NK, discount, scale, valid_N, reward_rest_NK)
    part = {"scale": GROUP_SCALES[scale], "clip": clip}
    trajectory_N = of_episodes(turns, group_N, **part)
    same_index_NK = refined(turns.task_NK, turns.state_NK)
    turn_NK = of_returns(turns, same_index_NK, turns.is_NK, **part)
    advantage_NK = jnp.where(turns.is_NK, (trajectory_N[:, None] + turn_NK) / 2, 0.0)
    return standardize(advantage_NK, turns.is_NK, clip=clip) if scale == "batch" else advantage_NK


ESTIMATOR = Estimator(
    matchtir_advantage,
    "turn",
    ("reward_NK", "reward_rest_NK", "group_N", "mask_NK", "valid_N"),
    TurnDiscount,
    scales=True,
)
