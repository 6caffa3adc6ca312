"""DVAO: several rewards over the sum of their weighted deviations."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from seeupo_jax.algorithms.estimators import Credit, Estimator
from seeupo_jax.algorithms.reward_groups import check_rewards, of_groups
from seeupo_jax.algorithms.standardize import exact_unit

_FLAT = 1e-6  # reward units: groups whose weighted deviations sum to at most this have advantage 0


def dvao_advantage(
    rewards_NQ: jax.Array,
    reward_weight_Q: jax.Array,
    group_N: jax.Array,
    valid_N: jax.Array | None = None,
) -> Credit:
    """Centred rewards over the sum of their deviations, both weighted (DVAO, arXiv:2605.25604).

    A_i = Σ_q b_q (r_iq - μ_gq) / Σ_q b_q σ_gq: the mean of the standardised rewards, each weighing
    b_q σ_gq. σ_g is the group's population deviation; where Σ b σ <= 1e-6, A = 0. It breaks
    SeeUPO's guarantee; without the denominator it is GRAE of the weighted sum.

    Args:
      rewards_NQ: [N, Q], before their weights, reward units; those of invalid trajectories are not
        read.
      reward_weight_Q: b, [Q], >= 0: a negative one could make the denominator 0.
      group_N: int [N], any ids.
      valid_N: bool [N]; False leaves a trajectory out. None: all are valid.

    Returns:
      Advantages float32 [N], in standard deviations, and each reward's part of them [N, Q]; 0 for
      invalid trajectories and for those that are alone in their group.
    """
    given = check_rewards(rewards_NQ, reward_weight_Q, group_N, valid_N)
    weight_1Q = given.weight_Q[None, :]
    centred_NQ = of_groups(given, scale="none")
    _, index_N = jnp.unique(given.group_N, return_inverse=True, size=given.group_N.shape[0])

    def group_sum(value: jax.Array) -> jax.Array:
        return jax.ops.segment_sum(value, index_N, num_segments=index_N.shape[0])[index_N]

    unit_1Q = exact_unit(jnp.max(jnp.abs(centred_NQ), axis=0, keepdims=True, initial=0.0))
    count_N = jnp.maximum(group_sum(jnp.float32(given.valid_N)), 1.0)
    std_NQ = unit_1Q * jnp.sqrt(group_sum((centred_NQ / unit_1Q) ** 2) / count_N[:, None])
    total_N1 = (weight_1Q * std_NQ).sum(axis=1, keepdims=True)
    part_NQ = weight_1Q * centred_NQ / jnp.where(total_N1 > _FLAT, total_N1, 1.0)
    part_NQ = jnp.where(total_N1 > _FLAT, part_NQ, 0.0)
    return Credit(part_NQ.sum(axis=1), part_NQ=part_NQ)


ESTIMATOR = Estimator(
    dvao_advantage,
    "trajectory",
    ("rewards_NQ", "reward_weight_Q", "group_N", "valid_N"),
    signed_weights=False,
    keeps_zero=True,
)
