"""The advantages of the laboratory's trajectories, as in `learner/advantages.py`."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from seeupo_jax.algorithms.advantage import group_relative_advantage
from seeupo_jax.algorithms.credit import gigpo_advantage, hgpo_advantage
from seeupo_jax.algorithms.magnitude import exact_unit
from seeupo_jax.algorithms.value import generalized_advantage, reward_to_go, standardize
from seeupo_jax.configuration.algorithm import Algorithm
from seeupo_jax.lab.lab_trajectories import Batch

_FLAT = 1e-6  # as in `group_relative_advantage`


class Credit(NamedTuple):
    """`return_NK`, what a critic's values are to be, is 0 where there is no critic."""

    advantage_NK: jax.Array
    return_NK: jax.Array


def sampled_credit(
    algorithm: Algorithm, batch: Batch, value_NK: jax.Array, *, group_size: int
) -> Credit:
    """The advantages by `algorithm.advantage`; the reward comes with the last turn.

    Args:
      value_NK: the critic's value of each context; 0 without a critic.
      group_size: trajectories of a group, which stand together.
    """
    group_N = jnp.arange(batch.reward_N.shape[0]) // group_size
    return _ESTIMATORS[algorithm.advantage](algorithm, batch, group_N, value_NK)


def expected_credit(algorithm: Algorithm, batch: Batch) -> Credit:
    """What `sampled_credit` tends to as groups grow, for GRAE and rewards without noise.

    Every baseline is the policy's value then, and a group's deviation that of the batch.
    """
    unit = exact_unit(jnp.max(jnp.abs(batch.reward_N)))
    reward_N, flat = batch.reward_N / unit, _FLAT / unit
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


def _of_trajectories(algorithm, batch, group_N, value_NK):
    advantage_N = group_relative_advantage(
        batch.reward_N,
        group_N,
        baseline=algorithm.baseline,
        scale=algorithm.scale,
        clip=algorithm.advantage_clip,
    )
    return _same_in_all_turns(advantage_N, batch)


def _of_turns(algorithm, batch, group_N, value_NK):
    estimate, choices = {
        "gigpo": (gigpo_advantage, {"step_coef": algorithm.step_coef}),
        "hgpo": (
            hgpo_advantage,
            {"history": algorithm.history, "power": algorithm.history_power},
        ),
    }[algorithm.advantage]
    advantage_NK = estimate(
        _rewards(batch),
        group_N,
        batch.context_NK,
        discount=algorithm.discount,
        scale=algorithm.scale,
        clip=algorithm.advantage_clip,
        **choices,
    )
    return Credit(advantage_NK, jnp.zeros_like(advantage_NK))


def _of_tokens(algorithm, batch, group_N, value_NK):
    reward_NK = _rewards(batch)
    mask_NK = jnp.ones(reward_NK.shape, bool)
    if algorithm.advantage == "gae":
        advantage_NK, return_NK = generalized_advantage(
            value_NK,
            reward_NK,
            mask_NK,
            discount=algorithm.discount,
            lam=algorithm.gae_lambda,
        )
    else:
        advantage_NK = reward_to_go(reward_NK, mask_NK, discount=algorithm.discount)
        return_NK = jnp.zeros_like(advantage_NK)
    if algorithm.scale == "batch":
        advantage_NK = standardize(advantage_NK, mask_NK, clip=algorithm.advantage_clip)
    return Credit(advantage_NK, return_NK)


def _rewards(batch: Batch) -> jax.Array:
    """Of each turn, [N, K]."""
    reward_NK = jnp.zeros(batch.context_NK.shape)
    return reward_NK.at[:, -1].set(batch.reward_N)


_ESTIMATORS = {
    "grae": _of_trajectories,
    "gigpo": _of_turns,
    "hgpo": _of_turns,
    "returns": _of_tokens,
    "gae": _of_tokens,
}
