"""GiGPO: an episode's advantage and that of each turn among those from its state."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from seeupo_jax.algorithms.estimator_options import StateOptions, TurnDiscount
from seeupo_jax.algorithms.estimators import Estimator
from seeupo_jax.algorithms.standardize import standardize
from seeupo_jax.algorithms.turn_groups import (
    GROUP_SCALES,
    compared_turns,
    of_episodes,
    of_returns,
    refined,
)
from seeupo_jax.options import within


@functools.partial(jax.jit, static_argnames=("discount", "scale", "clip"))
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
    reward_rest_NK: jax.Array | None = None,
) -> jax.Array:
    """Advantage of the episode plus that of the turn among those from its state (GiGPO).

    GiGPO, arXiv:2505.10978: A = A_episode + step_coef A_turn (Eq. 8). A_episode compares the
    trajectory's total reward with its group's (Eq. 3); A_turn compares the discounted reward from
    the turn on with those of its anchor group: the turns of the same group with the same state
    (Eq. 6 and 7), which may be of one trajectory; alone a turn has A_turn = 0. The authors' code
    averages the episode's part over turns; here, as in the paper, every trajectory counts once.

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
      reward_rest_NK: [N, K], what float32 leaves of each reward. None: 0.

    Returns:
      float32 [N, K]; reward units for `none`, else standard deviations. 0 where there is no turn.

    Raises:
      ValueError: an unknown scale, arrays of other shapes, a clip that is not > 0.
    """
    turns = compared_turns(reward_NK, group_N, state_NK, discount, scale, valid_N, reward_rest_NK)
    part = {"scale": GROUP_SCALES[scale], "clip": clip}
    episode_N = of_episodes(turns, group_N, **part)
    anchor_NK = refined(turns.task_NK, turns.state_NK)
    turn_NK = of_returns(turns, anchor_NK, turns.is_NK, **part)
    advantage_NK = jnp.where(turns.is_NK, episode_N[:, None] + step_coef * turn_NK, 0.0)
    return standardize(advantage_NK, turns.is_NK, clip=clip) if scale == "batch" else advantage_NK


@dataclass(frozen=True)
class GigpoOptions(TurnDiscount, StateOptions):
    """Options of `gigpo`."""

    step_coef: float = within(0, 1000, 1.0)
    """Weight of the turn's advantage, added to the episode's."""


ESTIMATOR = Estimator(
    gigpo_advantage,
    "turn",
    ("reward_NK", "reward_rest_NK", "group_N", "state_NK", "valid_N"),
    GigpoOptions,
    scales=True,
)
