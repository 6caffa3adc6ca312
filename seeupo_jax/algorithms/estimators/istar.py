"""iStar: an episode's advantage and that of each turn by an implicit process reward model."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from seeupo_jax.algorithms.estimator_options import Baseline, ImplicitOptions
from seeupo_jax.algorithms.estimators import Estimator
from seeupo_jax.algorithms.estimators.grae import group_relative_advantage
from seeupo_jax.algorithms.standardize import masked, standardize
from seeupo_jax.algorithms.turn_groups import GROUP_SCALES, relative
from seeupo_jax.options import choice, within

NORMS = ("none", "batch_max")


@functools.partial(jax.jit, static_argnames=("baseline", "norm", "scale", "clip"))
def istar_advantage(
    reward_N: jax.Array,
    implicit_NK: jax.Array,
    mask_NK: jax.Array,
    group_N: jax.Array,
    valid_N: jax.Array,
    *,
    step_coef: float = 1.0,
    baseline: str = "mean",
    norm: str = "none",
    scale: str = "group",
    clip: float | None = 3.0,
) -> jax.Array:
    """The episode's advantage plus that of the turn's implicit reward among its group's turns.

    iStar, arXiv:2509.19199: A = A_episode + step_coef A_turn. A_episode compares the trajectory's
    reward with its group's, A_turn the turn's implicit reward with those of all turns of its
    group's trajectories. The authors' code takes the statistics of A_turn from the first turn that
    it meets of each trajectory; here, as in the paper, from all. Their scripts train `istar_rloo`
    with `istar_norm: batch_norm` (Tongyi-ConvAI/Qwen-Character, CharacterRL-iStar): baseline
    `leave_one_out`, norm `batch_max`, scale `none`; the paper's scale is `group`.

    Args:
      reward_N: [N], reward units.
      implicit_NK: [N, K], implicit reward of each turn, nats; not read outside the mask.
      mask_NK: bool [N, K], whether there is such a turn.
      group_N: int [N], any ids; trajectories of one task have equal ones.
      valid_N: bool [N]; False leaves a trajectory out of everything.
      step_coef: >= 0, weight of A_turn; the paper's alpha.
      baseline: of both parts, as for `group_relative_advantage`; for A_turn the others are the
        group's other turns.
      norm: `batch_max`: implicit rewards are divided by the largest magnitude of them all plus
        1e-6; `none`: they are not.
      scale: `group`: both parts are divided by their group's standard deviation (n - 1) plus 1e-6;
        `none`: neither is; `batch`: neither is, and the sum is standardised over all turns.
      clip: bound > 0 on the magnitude after `batch` scaling, None for no bound.

    Returns:
      float32 [N, K], standard deviations, or for `none` reward units plus nats. 0 where there is
      no turn. Implicit rewards that are all equal, as those of a new model are, leave A_episode.

    Raises:
      ValueError: an unknown baseline, norm or scale, arrays of other shapes, a clip that is not
        > 0.
    """
    for name, value, allowed in (("norm", norm, NORMS), ("scale", scale, tuple(GROUP_SCALES))):
        if value not in allowed:
            raise ValueError(f"{name}: got {value!r}; allowed: {', '.join(allowed)}.")
    part = {"baseline": baseline, "scale": GROUP_SCALES[scale], "clip": clip}
    is_NK = jnp.asarray(mask_NK, bool) & jnp.asarray(valid_N, bool)[:, None]
    episode_N = group_relative_advantage(reward_N, group_N, valid_N=valid_N, **part)
    if norm == "batch_max":
        largest = jnp.max(jnp.abs(masked(implicit_NK, is_NK)), initial=0.0)
        implicit_NK = implicit_NK / (largest + 1e-6)
    task_NK = jnp.broadcast_to(jnp.asarray(group_N)[:, None], is_NK.shape)
    turn_NK = relative(implicit_NK, task_NK, is_NK, **part)
    advantage_NK = jnp.where(is_NK, episode_N[:, None] + step_coef * turn_NK, 0.0)
    return standardize(advantage_NK, is_NK, clip=clip) if scale == "batch" else advantage_NK


@dataclass(frozen=True)
class IstarOptions(ImplicitOptions, Baseline):
    """Options of `istar`."""

    step_coef: float = within(0, 1000, 1.0)
    """Weight of the turn's advantage, added to the episode's."""
    norm: str = choice("none", "batch_max")
    """batch_max divides implicit rewards by the largest magnitude of the iteration's."""


ESTIMATOR = Estimator(
    istar_advantage,
    "turn",
    ("reward_N", "implicit_NK", "mask_NK", "group_N", "valid_N"),
    IstarOptions,
    scales=True,
)
