"""OTB: rewards to go less a baseline per token that weighs trajectories by their gradients."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from seeupo_jax.algorithms.estimator_options import Options
from seeupo_jax.algorithms.estimators import Estimator
from seeupo_jax.algorithms.estimators.returns import reward_to_go
from seeupo_jax.algorithms.standardize import masked

_EPSILON = 1e-8  # added to the sum of weights, as in the authors' code


@functools.partial(jax.jit, static_argnames=("zero_tail",))
def optimal_token_advantage(
    reward_NL: jax.Array,
    group_N: jax.Array,
    old_logp_NL: jax.Array,
    collision_NL: jax.Array,
    mask_NL: jax.Array,
    *,
    zero_tail: bool = True,
) -> jax.Array:
    """G_ij - Σ_i G_ij W_ij / (Σ_i W_ij + 1e-8), W_ij = Σ_(j' <= j) (1 - 2 π_ij' + Σ_v π_v²).

    G_ij is the reward from token j on. 1 - 2 π + Σ π², the squared norm of log π's gradient by the
    logits, stands for that of the gradient; the sums over i are over the group's trajectories that
    have a token j, counted over all turns. Optimal token baseline, arXiv:2602.07078;
    volcengine/verl, core_algos.py, `compute_multi_turn_optimal_token_baseline_advantage`.

    Args:
      reward_NL: [N, L], reward of each sampled token, whose first is at 0 in every row.
      group_N: int [N], any ids; equal ids make a group.
      old_logp_NL, collision_NL: [N, L], log π (nats) and Σ_v π_v² under the policy that sampled.
      mask_NL: nonzero where there is a token; nothing outside is read.
      zero_tail: whether the baseline is 0, not the trajectory's own G, at tokens that no other of
        the group has.

    Returns:
      float32 [N, L], reward units; 0 outside the mask.
    """
    mask_NL = jnp.asarray(mask_NL, bool)
    size = mask_NL.shape[0]
    _, index_N = jnp.unique(jnp.asarray(group_N), return_inverse=True, size=size)

    def group_sum(x_NL: jax.Array) -> jax.Array:
        return jax.ops.segment_sum(x_NL, index_N, num_segments=size)[index_N]

    return_NL = reward_to_go(reward_NL, mask_NL)
    # Not below 0, where rounding would take it at tokens of probability 1.
    energy_NL = jnp.maximum(1.0 - 2.0 * jnp.exp(masked(old_logp_NL, mask_NL)) + collision_NL, 0.0)
    weight_NL = masked(jnp.cumsum(masked(energy_NL, mask_NL), axis=1), mask_NL)
    baseline_NL = group_sum(return_NL * weight_NL) / (group_sum(weight_NL) + _EPSILON)
    if zero_tail:
        baseline_NL = jnp.where(group_sum(jnp.float32(mask_NL)) > 1, baseline_NL, 0.0)
    return masked(return_NL - baseline_NL, mask_NL)


@dataclass(frozen=True)
class OtbOptions(Options):
    """Options of `otb`."""

    zero_tail: bool = True
    """Whether tokens that no other trajectory of the group has are without a baseline; False: their
    advantage is 0."""


ESTIMATOR = Estimator(
    optimal_token_advantage,
    "token",
    ("reward_NL", "group_N", "old_logp_NL", "collision_NL", "mask_NL"),
    OtbOptions,
)
