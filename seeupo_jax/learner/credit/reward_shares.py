"""Each named reward's contribution to the advantages of a sweep."""

from __future__ import annotations

from typing import Any

import numpy as np

from seeupo_jax.learner.credit.credit_arrays import CreditArrays
from seeupo_jax.types import CONTEXT


def reward_shares(batch: CreditArrays, part_NQ: Any, *, grouped: bool) -> dict[str, float]:
    """Each named reward's share of the gradient, as `sweep/reward_share/NAME`.

    Share of q: Σ_i n_i |part_iq| / Σ_i Σ_p n_i |part_ip|, with n_i the sampled tokens of trajectory
    i that updates learn from; 0 where all parts are 0.

    Args:
      part_NQ: what each reward adds to the advantages of trajectories, or of turns as [N, K, Q], as
        `Credit.part_NQ`; None: its weight times its distance from its mean, which a sum of rewards
        that is centred is made of.
      grouped: whether that is the mean of the trajectory's group, instead of that of all.

    Returns: empty where no reward has a name.
    """
    by_turn = part_NQ is not None and np.ndim(part_NQ) == 3
    names = [*(batch.turn_named if by_turn else batch.named)]
    if not names:
        return {}
    count_NK = np.zeros(batch.mask_NK.shape)
    rows = batch.rows
    for owner, turn_L, updates in zip(rows.trajectory_S, rows.turn, rows.updated_S, strict=True):
        np.add.at(count_NK[owner], turn_L[updates & (turn_L != CONTEXT)], 1)
    part_NQ = _centred(batch, grouped=grouped) if part_NQ is None else np.asarray(part_NQ)
    size = np.abs(part_NQ[..., : len(names)]).astype(np.float64)
    total_Q = np.tensordot(count_NK if by_turn else count_NK.sum(axis=1), size, size.ndim - 1)
    share_Q = total_Q / (total_Q.sum() if total_Q.sum() > 0 else 1.0)
    return {
        f"sweep/reward_share/{name}": float(share)
        for name, share in zip(names, share_Q, strict=True)
    }


def _centred(batch: CreditArrays, *, grouped: bool) -> np.ndarray:
    """Rewards less their mean, times their weights; 0 for trajectories that do not count."""
    rewards_NQ, part_NQ = batch.rewards_NQ, np.zeros(batch.rewards_NQ.shape)
    group_N = batch.group_N if grouped else np.zeros_like(batch.group_N)
    for group in np.unique(group_N[batch.valid_N]):
        members = np.flatnonzero((group_N == group) & batch.valid_N)
        above_NQ = rewards_NQ[members] - rewards_NQ[members].min(axis=0)  # equal ones: exactly 0
        part_NQ[members] = above_NQ - above_NQ.mean(axis=0)
    return part_NQ * batch.reward_weight_Q
