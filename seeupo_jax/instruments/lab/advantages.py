"""The advantages of the laboratory's trajectories, as in `learner/credit/advantages.py`."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from seeupo_jax.algorithms.standardize import FLAT, exact_unit
from seeupo_jax.configuration.algorithm import Algorithm
from seeupo_jax.configuration.entry_points import find_entry
from seeupo_jax.instruments.lab.trajectories import Batch

# What estimators may need but the laboratory lacks, and why: see `lab_sweep` on KL and the old
# policy.
_NO_PENALTY = "the laboratory has no penalty"
_NO_SCORER = "the laboratory has no model beside the policy but a critic"
LACKING = {
    "old_logp_NL": _NO_PENALTY,
    "ref_logp_NL": _NO_PENALTY,
    "implicit_NK": _NO_SCORER,
    "progress_NL": _NO_SCORER,
    "executed_NL": "every action of the laboratory is executed",
}


class Credit(NamedTuple):
    """What the laboratory's turns are credited with.

    return_NK: what a critic's values are to be; 0 where there is no critic.
    clip_scale_NK: what clip ranges are multiplied by; None: by nothing.
    """

    advantage_NK: jax.Array
    return_NK: jax.Array
    clip_scale_NK: jax.Array | None = None


def sampled_credit(
    algorithm: Algorithm,
    batch: Batch,
    value_NK: jax.Array,
    entropy_NK: jax.Array | None = None,
    *,
    group_size: int,
) -> Credit:
    """The advantages by `algorithm.advantage`; every turn is one token.

    Args:
      value_NK: the critic's value of each context; 0 without a critic.
      entropy_NK: of the policy in each context; None where `algorithm.reads_entropy` is False.
      group_size: trajectories of a group, which stand together.
    """
    estimator, choices = find_entry("advantage", algorithm.advantage), vars(algorithm)
    shape_N, shape_NK = batch.reward_N.shape, batch.context_NK.shape
    reward_NK = batch.reward_NK
    if reward_NK is None:  # all of it comes with the last turn
        reward_NK = jnp.zeros(shape_NK).at[:, -1].set(batch.reward_N)
    turn_NK = jnp.broadcast_to(jnp.arange(shape_NK[1]), shape_NK)
    anchors = {"state": batch.context_NK, "turn": turn_NK, "task": jnp.zeros_like(turn_NK)}
    turns_N = jnp.full(shape_N, shape_NK[1], jnp.float32)
    arrays = {
        "reward_N": batch.reward_N,
        "group_N": jnp.arange(shape_N[0]) // group_size,
        "valid_N": jnp.ones(shape_N, bool),
        "rewards_NQ": batch.reward_N[:, None],
        "reward_weight_Q": jnp.ones(1),
        "rewards_NKQ": reward_NK[:, :, None],
        "turn_weight_Q": jnp.ones(1),
        "running_mean_Q": reward_NK.mean()[None],
        "running_std_Q": reward_NK.std(ddof=1)[None],
        "reward_NK": reward_NK,
        "reward_rest_NK": jnp.zeros_like(reward_NK),
        "gain_NK": reward_NK.at[:, -1].set(jnp.nan),
        "state_NK": anchors[algorithm.anchor],
        "mask_NK": jnp.ones(shape_NK, bool),
        "node_NK": jnp.arange(shape_NK[0] * shape_NK[1]).reshape(shape_NK),  # no turn is shared
        "reward_NL": reward_NK,
        "turn_NL": turn_NK,
        "mask_NL": jnp.ones(shape_NK, bool),
        "value_NL": value_NK,
        "truncated_N": jnp.zeros(shape_N, bool),
        "metric_N": turns_N if entropy_NK is None else jnp.mean(entropy_NK, axis=1),
    }
    credit = estimator.credit(arrays, choices)
    if estimator.level == "trajectory":
        return _same_in_all_turns(credit.advantage, batch)
    returns = jnp.zeros_like(credit.advantage) if credit.returns is None else credit.returns
    return Credit(credit.advantage, returns, credit.clip_scale if algorithm.adapts_clip else None)


def expected_credit(algorithm: Algorithm, batch: Batch) -> Credit:
    """What `sampled_credit` tends to as groups grow, for GRAE and rewards without noise.

    Every baseline is the policy's value then, and a group's deviation that of the batch.
    """
    unit = exact_unit(jnp.max(jnp.abs(batch.reward_N)))
    reward_N, flat = batch.reward_N / unit, FLAT / unit
    deviation_N = reward_N - jnp.sum(batch.share_N * reward_N)
    std = jnp.sqrt(jnp.sum(batch.share_N * deviation_N**2))
    scaled_N = deviation_N / jnp.where(std > flat, std, 1.0 / unit)
    bound = algorithm.advantage_clip
    advantages = {
        "none": deviation_N * unit,
        "batch": scaled_N if bound is None else jnp.clip(scaled_N, -bound, bound),
        "group": deviation_N / (std + flat),
    }
    return _same_in_all_turns(advantages[algorithm.scale], batch)


def _same_in_all_turns(advantage_N: jax.Array, batch: Batch) -> Credit:
    advantage_NK = jnp.broadcast_to(advantage_N[:, None], batch.context_NK.shape)
    return Credit(advantage_NK, jnp.zeros_like(advantage_NK))
