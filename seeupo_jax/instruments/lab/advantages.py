"""The advantages of the laboratory's trajectories, as in `learner/credit/advantages.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from seeupo_jax.algorithms.standardize import FLAT, exact_unit
from seeupo_jax.configuration.algorithm import Algorithm
from seeupo_jax.configuration.entry_points import find_entry
from seeupo_jax.instruments.lab.trajectories import Batch


class TurnCredit(NamedTuple):
    """The advantages of the laboratory's turns.

    return_NK: what a critic's values are to be; 0 where there is no critic.
    clip_scale_NK: what clip ranges are multiplied by; None: by nothing.
    """

    advantage_NK: jax.Array
    return_NK: jax.Array
    clip_scale_NK: jax.Array | None = None


class _Source(NamedTuple):
    """The numbers that an estimator's inputs are made of; arguments of `sampled_credit`."""

    algorithm: Algorithm
    batch: Batch
    value_NK: jax.Array
    group_size: int
    entropy_NK: jax.Array | None = None
    logp_NK: jax.Array | None = None
    collision_NK: jax.Array | None = None

    @property
    def ones_NK(self) -> jax.Array:
        return jnp.ones(self.batch.context_NK.shape, bool)

    @property
    def turn_NK(self) -> jax.Array:
        return jnp.broadcast_to(jnp.arange(self.ones_NK.shape[1]), self.ones_NK.shape)

    @property
    def reward_NK(self) -> jax.Array:
        if self.batch.reward_NK is not None:
            return self.batch.reward_NK
        zero_NK = jnp.zeros(self.batch.context_NK.shape)  # all of it comes with the last turn
        return zero_NK.at[:, -1].set(self.batch.reward_N)

    @property
    def state_NK(self) -> jax.Array:
        return {
            "state": self.batch.context_NK,
            "turn": self.turn_NK,
            "task": jnp.zeros_like(self.turn_NK),
        }[self.algorithm.estimator.anchor]

    @property
    def metric_N(self) -> jax.Array:
        if self.entropy_NK is not None:
            return jnp.mean(self.entropy_NK, axis=1)
        return jnp.full(self.batch.reward_N.shape, self.ones_NK.shape[1], jnp.float32)


# Input of an estimator -> how the laboratory makes it; it has no others.
INPUTS: dict[str, Callable[[_Source], jax.Array]] = {
    "reward_N": lambda source: source.batch.reward_N,
    "group_N": lambda source: jnp.arange(source.batch.reward_N.shape[0]) // source.group_size,
    "valid_N": lambda source: jnp.ones(source.batch.reward_N.shape, bool),
    "rewards_NQ": lambda source: source.batch.reward_N[:, None],
    "reward_weight_Q": lambda source: jnp.ones(1),
    "rewards_NKQ": lambda source: source.reward_NK[:, :, None],
    "turn_weight_Q": lambda source: jnp.ones(1),
    "running_mean_Q": lambda source: source.reward_NK.mean()[None],
    "running_std_Q": lambda source: source.reward_NK.std(ddof=1)[None],
    "reward_NK": lambda source: source.reward_NK,
    "reward_rest_NK": lambda source: jnp.zeros_like(source.reward_NK),
    "gain_NK": lambda source: source.reward_NK.at[:, -1].set(jnp.nan),
    "state_NK": lambda source: source.state_NK,
    "mask_NK": lambda source: source.ones_NK,
    # No turn is shared.
    "node_NK": lambda source: jnp.arange(source.ones_NK.size).reshape(source.ones_NK.shape),
    "reward_NL": lambda source: source.reward_NK,
    "turn_NL": lambda source: source.turn_NK,
    "mask_NL": lambda source: source.ones_NK,
    "value_NL": lambda source: source.value_NK,
    "truncated_N": lambda source: jnp.zeros(source.batch.reward_N.shape, bool),
    "metric_N": lambda source: source.metric_N,
    "old_logp_NL": lambda source: source.logp_NK,
    "collision_NL": lambda source: source.collision_NK,
}


def sampled_credit(
    algorithm: Algorithm,
    batch: Batch,
    value_NK: jax.Array,
    *,
    group_size: int,
    **of_policy: jax.Array,
) -> TurnCredit:
    """The advantages by `algorithm.advantage`; every turn is one token.

    Args:
      value_NK: the critic's value of each context; 0 without a critic.
      group_size: trajectories of a group, which stand together.
      of_policy: those of `_Source` that the estimator reads of the policy: the entropy and the sum
        of squared probabilities in each context, and the log-probability of the action.
    """
    estimator, options = find_entry("advantage", algorithm.advantage), algorithm.estimator
    source = _Source(algorithm, batch, value_NK, group_size, **of_policy)
    inputs = estimator.inputs(options, algorithm.scale)
    credit = estimator.credit(
        {name: INPUTS[name](source) for name in inputs},
        options,
        scale=algorithm.scale,
        clip=algorithm.advantage_clip,
    )
    if estimator.level == "trajectory":
        return _same_in_all_turns(credit.advantage, batch)
    returns = jnp.zeros_like(credit.advantage) if credit.returns is None else credit.returns
    return TurnCredit(
        credit.advantage, returns, credit.clip_scale if algorithm.adapts_clip else None
    )


def expected_credit(algorithm: Algorithm, batch: Batch) -> TurnCredit:
    """The limit of `sampled_credit` as groups grow, for GRAE and rewards without noise.

    In the limit every baseline is the policy's value, and a group's deviation is the batch's.
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


def _same_in_all_turns(advantage_N: jax.Array, batch: Batch) -> TurnCredit:
    advantage_NK = jnp.broadcast_to(advantage_N[:, None], batch.context_NK.shape)
    return TurnCredit(advantage_NK, jnp.zeros_like(advantage_NK))
