"""What a model beside the policy says of turns, and what its step is to follow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from seeupo_jax.algorithms.preference import pair_preference
from seeupo_jax.configuration.algorithm import Algorithm
from seeupo_jax.learner.batching import Rows
from seeupo_jax.learner.credit.credit_arrays import CreditArrays
from seeupo_jax.learner.credit.sampled_tokens import Ragged
from seeupo_jax.types import Trajectory


class ScorerLoss(NamedTuple):
    """What the scorer's step is to follow.

    slope: derivative of the loss by what the scorer says of each token; None: nothing to learn
      from, and no step.
    """

    slope: Ragged | None
    metrics: dict[str, float]


def scorer_loss(
    algorithm: Algorithm,
    arrays: CreditArrays,
    rows: Rows,
    trajectories: Sequence[Trajectory],
) -> ScorerLoss:
    """The loss over the pairs of a success and a failure of one group.

    A trajectory's score is the mean (iStar's authors' code) or the sum (their paper) of its turns'
    implicit rewards.

    Args:
      arrays: with the scorer's log-probabilities.
    """
    turns_N = arrays.mask_NK.sum(axis=1)
    share_N = np.ones(len(turns_N), np.float32)
    if algorithm.pair_score == "mean":
        share_N = np.float32(1 / np.maximum(turns_N, 1))
    success_N = np.array([t.reward > algorithm.success_above for t in trajectories], bool)
    found = pair_preference(
        arrays.implicit_NK.sum(axis=1) * share_N, success_N, arrays.group_N, arrays.valid_N
    )
    pairs = int(found.pairs)
    metrics = {"sweep/pairs": float(pairs)}
    if not pairs:
        return ScorerLoss(None, metrics)
    metrics["sweep/pair_loss"] = float(found.loss)
    metrics["sweep/pair_accuracy"] = float(found.accuracy)
    slope_N = algorithm.implicit_coef * share_N * np.asarray(found.slope_N)
    pairs_S = zip(rows.trajectory_S, rows.turn, strict=True)
    return ScorerLoss(
        [np.full(len(turn_L), slope_N[owner], np.float32) for owner, turn_L in pairs_S], metrics
    )
