"""A²TGPO: the outcome's advantage, and what turns gained among those at their index."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import chex
import jax
import jax.numpy as jnp

from seeupo_jax.algorithms.estimator_options import GainOptions, TurnDiscount
from seeupo_jax.algorithms.estimators import Credit, Estimator
from seeupo_jax.algorithms.estimators.grae import group_relative_advantage
from seeupo_jax.algorithms.estimators.returns import reward_to_go
from seeupo_jax.algorithms.standardize import standardize
from seeupo_jax.algorithms.turn_groups import refined, relative
from seeupo_jax.options import within

# Scale -> what each group's parts are scaled by; `batch` scales their sum instead.
_PARTS = {"group": "population", "none": "none", "batch": "none"}


@functools.partial(jax.jit, static_argnames=("scale", "clip"))
def a2tgpo_credit(
    reward_N: jax.Array,
    gain_NK: jax.Array,
    group_N: jax.Array,
    mask_NK: jax.Array,
    *,
    discount: float = 1.0,
    step_coef: float = 0.3,
    adaptation: float = 0.3,
    scale: str = "group",
    clip: float | None = 3.0,
    valid_N: jax.Array | None = None,
) -> Credit:
    """Advantage of the outcome, plus the gains from the turn on; and a clip range a turn.

    A²TGPO, arXiv:2605.06200. With z the gain of a turn less the mean of the gains at its index in
    its group, over their standard deviation (of the population, plus 1e-6; alone z = 0), and O the
    same of the trajectory's reward among its group's:
    D_t = sum over j >= t of discount^(j - t) z_j,   n_t = gains from turn t on,
    A_t = step_coef D_t / sqrt(n_t) + O,   c_t = 1 + adaptation (2 sigmoid(z_t) - 1).
    A turn without a gain (the last one always) has no part in z, D and n and c = 1, so the last
    turn's advantage is O. A gain of 0 is a gain, unlike in the authors' code.

    Args:
      reward_N: [N], of the outcome, reward units.
      gain_NK: [N, K], any unit; NaN where a turn has none.
      group_N: int [N], any ids; trajectories of one task have equal ones.
      mask_NK: bool [N, K], whether there is such a turn; elsewhere no gain is read.
      discount: in [0, 1], a turn.
      step_coef: >= 0, weight of the gains; the paper's alpha.
      adaptation: in [0, 1], how far a clip range is widened or narrowed; the paper's beta.
      scale: `group`: both parts are divided by their group's deviation (the paper); `none`: they
        are not; `batch`: they are not, and A is standardised over all turns (n - 1; only centred
        where the deviation is at most 1e-6). c is the paper's with each.
      clip: bound > 0 on the magnitude after `batch` scaling, None for no bound.
      valid_N: bool [N]; False leaves a trajectory out of everything. None: all are valid.

    Returns:
      The advantage, float32 [N, K], 0 where there is no turn, and the clip scale c, float32 [N, K].

    Raises:
      ValueError: an unknown scale, arrays of other shapes, a clip that is not > 0.
    """
    if scale not in _PARTS:
        raise ValueError(f"scale: got {scale!r}; allowed: {', '.join(_PARTS)}.")
    gain_NK, mask_NK = jnp.asarray(gain_NK, jnp.float32), jnp.asarray(mask_NK, bool)
    chex.assert_rank(gain_NK, 2, custom_message="gain_NK: [N, K]", exception_type=ValueError)
    chex.assert_equal_shape(
        [gain_NK, mask_NK], custom_message="mask_NK: as gain_NK", exception_type=ValueError
    )
    N, K = gain_NK.shape
    group_N = jnp.asarray(group_N, jnp.int32)
    valid_N = jnp.ones(N, bool) if valid_N is None else jnp.asarray(valid_N, bool)
    mask_NK = mask_NK & valid_N[:, None]
    gained_NK = mask_NK & ~jnp.isnan(gain_NK)
    index_NK = jnp.broadcast_to(jnp.arange(K), (N, K))
    peers_NK = refined(jnp.broadcast_to(group_N[:, None], (N, K)), index_NK)
    part = {"scale": _PARTS[scale], "clip": None}
    outcome_N = group_relative_advantage(reward_N, group_N, valid_N=valid_N, **part)
    step_NK = relative(gain_NK, peers_NK, gained_NK, **part)
    sum_NK = reward_to_go(step_NK, mask_NK, discount=discount)
    count_NK = jnp.cumsum(gained_NK[:, ::-1], axis=1)[:, ::-1]
    ahead_NK = sum_NK / jnp.sqrt(jnp.maximum(count_NK, 1))
    advantage_NK = jnp.where(mask_NK, step_coef * ahead_NK + outcome_N[:, None], 0.0)
    if scale == "batch":
        advantage_NK = standardize(advantage_NK, mask_NK, clip=clip)
    z_NK = step_NK
    if scale != "group":
        z_NK = relative(gain_NK, peers_NK, gained_NK, scale="population", clip=None)
    return Credit(advantage_NK, clip_scale=1.0 + adaptation * (2.0 * jax.nn.sigmoid(z_NK) - 1.0))


@dataclass(frozen=True)
class A2tgpoOptions(TurnDiscount, GainOptions):
    """Options of `a2tgpo`."""

    step_coef: float = within(0, 1000, 1.0)
    """Weight of the turn's advantage, added to the episode's."""
    adaptation: float = within(0, 1, 0.3)
    """The largest share by which the gain of a turn widens or narrows its clip range."""


ESTIMATOR = Estimator(
    a2tgpo_credit,
    "turn",
    ("reward_N", "gain_NK", "group_N", "mask_NK", "valid_N"),
    A2tgpoOptions,
    scales=True,
    adapts_clip=True,
)
