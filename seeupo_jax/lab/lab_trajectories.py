"""The trajectories of an iteration: sampled from the policy, or all with their probabilities."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from seeupo_jax.lab.policies import (
    Policy,
    all_probabilities,
    first_context,
    sequence_probability,
)


class Batch(NamedTuple):
    """Trajectories with their weights in a mean, `share_N`, which sum to 1."""

    context_NK: jax.Array
    action_NK: jax.Array
    reward_N: jax.Array
    share_N: jax.Array


def sampled_batch(
    policy: Policy,
    params: Any,
    mean: jax.Array,
    probability: jax.Array,
    key: jax.Array,
    *,
    trajectories: int,
) -> Batch:
    """Trajectories drawn from the policy, with rewards drawn from the jackpots.

    Args:
      mean, probability: shape (A,) x K; a sequence pays mean / probability with its probability.
    """
    turns, actions = mean.ndim, mean.shape[0]
    first_K = jnp.asarray([first_context(turn, actions) for turn in range(turns)])
    # One call: the code of each is long to compile. The last row decides on the reward.
    uniform_KN = jax.random.uniform(key, (turns + 1, trajectories))

    def act(sequence_N: jax.Array, turn: Any) -> Any:
        first, uniform_N = turn
        context_N = first + sequence_N
        cumulative_NA = jnp.cumsum(jax.nn.softmax(policy.logits(params, context_N)), axis=1)
        # Not the last column: rounding may leave it below the largest uniform number.
        action_N = jnp.sum(uniform_N[:, None] >= cumulative_NA[:, :-1], axis=1)
        return sequence_N * actions + action_N, (context_N, action_N)

    start_N = jnp.zeros(trajectories, jnp.int32)
    sequence_N, (context_KN, action_KN) = jax.lax.scan(act, start_N, (first_K, uniform_KN[:-1]))
    chance_N = probability.reshape(-1)[sequence_N]
    pays_N = uniform_KN[-1] < chance_N
    reward_N = jnp.where(pays_N, mean.reshape(-1)[sequence_N] / chance_N, 0.0)
    share_N = jnp.full(trajectories, 1 / trajectories)
    return Batch(context_KN.T, action_KN.T, reward_N, share_N)


def expected_batch(policy: Policy, params: Any, mean: jax.Array) -> Batch:
    """Every action sequence with its mean reward; its share is its probability."""
    turns, actions = mean.ndim, mean.shape[0]
    action_KN = np.indices(mean.shape).reshape(turns, -1)
    sequence_N = np.arange(action_KN.shape[1])
    context_KN = [
        first_context(turn, actions) + sequence_N // actions ** (turns - turn)
        for turn in range(turns)
    ]
    probability_CA = all_probabilities(policy, params, turns, actions)
    return Batch(
        jnp.asarray(np.stack(context_KN, axis=1)),
        jnp.asarray(action_KN.T),
        mean.reshape(-1),
        sequence_probability(probability_CA, turns),
    )
