"""The trajectories of an iteration: sampled from the policy, or all with their probabilities."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from seeupo_jax.instruments.lab.policies import (
    TabularPolicy,
    all_probabilities,
    first_context,
    sequence_probability,
)


class TurnRewards(NamedTuple):
    """Rewards of turns: `mean` of shape (K,) + (A,) x K, plus or minus `noise` by a coin each."""

    mean: jax.Array
    noise: jax.Array


class Batch(NamedTuple):
    """Trajectories with their weights in a mean, `share_N`, which sum to 1.

    reward_NK: of each turn; None: all of `reward_N` comes with the last one.
    sampler_logp_NK: log-probabilities (nats) under the policy that sampled; None: it is the one
      that is trained on them.
    """

    context_NK: jax.Array
    action_NK: jax.Array
    reward_N: jax.Array
    share_N: jax.Array
    reward_NK: jax.Array | None = None
    sampler_logp_NK: jax.Array | None = None


def sampled_batch(
    policy: TabularPolicy,
    params: Any,
    mean: jax.Array,
    probability: jax.Array,
    key: jax.Array,
    turn_rewards: TurnRewards | None = None,
    *,
    trajectories: int,
) -> Batch:
    """Trajectories drawn from the policy, with rewards drawn from the jackpots.

    Args:
      mean, probability: shape (A,) x K; a sequence pays mean / probability with its probability.
      turn_rewards: what estimators of turns see instead; its noise is in both.
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
    if turn_rewards is None:
        return Batch(context_KN.T, action_KN.T, reward_N, share_N)
    coin_NK = jax.random.rademacher(jax.random.fold_in(key, 2), (trajectories, turns), jnp.float32)
    noise_NK = turn_rewards.noise * coin_NK
    reward_NK = turn_rewards.mean.reshape(turns, -1)[:, sequence_N].T + noise_NK
    total_N = reward_N + noise_NK.sum(axis=1)
    return Batch(context_KN.T, action_KN.T, total_N, share_N, reward_NK)


def expected_batch(policy: TabularPolicy, params: Any, mean: jax.Array) -> Batch:
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
