"""GDPO: every named reward over its group's deviation, then their weighted sum."""

from __future__ import annotations

import jax

from seeupo_jax.algorithms.estimators import Credit, Estimator
from seeupo_jax.algorithms.reward_groups import check_rewards, of_groups


def gdpo_advantage(
    rewards_NQ: jax.Array,
    reward_weight_Q: jax.Array,
    group_N: jax.Array,
    valid_N: jax.Array | None = None,
) -> Credit:
    """Weighted sum of each reward's advantage in its group (GDPO, arXiv:2601.05242, Eq. 4 to 6).

    A_iq = (r_iq - μ_gq) / (σ_gq + 1e-6), A_i = Σ_q w_q A_iq. The paper then standardises A over the
    batch, which scale=batch does: over trajectories, by the deviation of n - 1, only centred where
    that is at most 1e-6. σ_g is of n - 1 too, as in the authors' code (NVlabs/GDPO, verl-GDPO,
    ray_trainer.py) and in TRL's `normalize_then_sum`, which adds 1e-4 to either deviation. The
    authors' code takes the batch's mean and deviation over tokens, so that long answers count more:
    here each trajectory counts once, as in the paper and in TRL. It breaks SeeUPO's guarantee.

    Args:
      rewards_NQ: [N, Q], before their weights, reward units; those of invalid trajectories are not
        read.
      reward_weight_Q: [Q], any finite numbers.
      group_N: int [N], any ids.
      valid_N: bool [N]; False leaves a trajectory out. None: all are valid.

    Returns:
      Advantages float32 [N], in weights' units, and their parts w_q A_iq [N, Q]; 0 for invalid
      trajectories and for those that are alone in their group.
    """
    given = check_rewards(rewards_NQ, reward_weight_Q, group_N, valid_N)
    part_NQ = given.weight_Q[None, :] * of_groups(given, scale="group")
    return Credit(part_NQ.sum(axis=1), part_NQ=part_NQ)


ESTIMATOR = Estimator(
    gdpo_advantage,
    "trajectory",
    ("rewards_NQ", "reward_weight_Q", "group_N", "valid_N"),
    keeps_zero=True,
)
