"""Trajectories that the laboratory draws, and the expectation in their place."""

import jax
import jax.numpy as jnp
import numpy as np

from seeupo_jax.instruments.lab.policies import POLICIES, all_probabilities, sequence_probability
from seeupo_jax.instruments.lab.trajectories import TurnRewards, expected_batch, sampled_batch

POLICY = POLICIES["tables"](2, 2)
TABLE_CA = jnp.array([[0.0, 1.0], [0.5, 0.0], [0.0, 2.0]])
MEAN = jnp.array([[1.0, -2.0], [0.5, 3.0]])
CHANCE = jnp.array([[1.0, 0.5], [0.25, 0.1]])
NUMBER = 40_000


def drawn(key):
    return sampled_batch(POLICY, TABLE_CA, MEAN, CHANCE, jax.random.key(key), trajectories=NUMBER)


def test_sequences_come_as_often_as_the_policy_says_and_pay_their_mean():
    batch = drawn(0)
    sequence_N = np.asarray(batch.action_NK) @ [2, 1]
    wanted = sequence_probability(all_probabilities(POLICY, TABLE_CA, 2, 2), 2)
    shares = np.bincount(sequence_N, minlength=4) / NUMBER
    np.testing.assert_allclose(shares, wanted, atol=0.01)
    for sequence, (mean, chance) in enumerate(zip(MEAN.ravel(), CHANCE.ravel(), strict=True)):
        own_N = np.asarray(batch.reward_N)[sequence_N == sequence]
        paid = np.unique(own_N[own_N != 0])
        np.testing.assert_allclose(paid, [mean / chance], rtol=1e-6)
        np.testing.assert_allclose(np.mean(own_N != 0), chance, atol=0.02)
    np.testing.assert_allclose(batch.share_N.sum(), 1, rtol=1e-4)


def test_turns_pay_what_they_are_worth_and_their_coins_which_the_reward_has_too():
    turn_mean = np.array([[[0.0, 0.0], [1.0, 1.0]], [[2.0, 3.0], [4.0, 5.0]]], np.float32)
    coins = TurnRewards(turn_mean, np.float32(0.5))
    plain, paid = (
        sampled_batch(POLICY, TABLE_CA, MEAN, CHANCE, jax.random.key(0), given, trajectories=NUMBER)
        for given in (None, coins)
    )
    np.testing.assert_array_equal(paid.action_NK, plain.action_NK)
    assert plain.reward_NK is None
    first_N, second_N = np.asarray(paid.action_NK).T
    noise_NK = paid.reward_NK - np.stack([first_N, 2 + 2 * first_N + second_N], axis=1)
    assert np.unique(noise_NK).tolist() == [-0.5, 0.5]
    np.testing.assert_allclose(noise_NK.mean(axis=0), 0, atol=0.01)
    np.testing.assert_allclose(np.mean(noise_NK.prod(axis=1)), 0, atol=0.01)  # a coin a turn
    total_N = plain.reward_N + noise_NK.sum(axis=1)
    np.testing.assert_allclose(paid.reward_N, total_N, rtol=1e-5, atol=1e-5)


def test_contexts_are_those_of_the_actions_before():
    batch = drawn(1)
    np.testing.assert_array_equal(batch.context_NK[:, 0], 0)
    np.testing.assert_array_equal(batch.context_NK[:, 1], 1 + batch.action_NK[:, 0])
    assert len(np.unique(batch.action_NK, axis=0)) == 4


def test_another_key_draws_other_trajectories():
    assert np.any(drawn(0).action_NK != drawn(1).action_NK)


def test_the_expected_batch_is_every_sequence_with_its_probability_and_mean():
    batch = expected_batch(POLICY, TABLE_CA, MEAN)
    np.testing.assert_array_equal(batch.action_NK, [[0, 0], [0, 1], [1, 0], [1, 1]])
    np.testing.assert_array_equal(batch.context_NK, [[0, 1], [0, 1], [0, 2], [0, 2]])
    np.testing.assert_array_equal(batch.reward_N, MEAN.ravel())
    first = np.exp([0, 1]) / np.exp([0, 1]).sum()
    second = np.array(
        [np.exp([0.5, 0]) / np.exp([0.5, 0]).sum(), np.exp([0, 2]) / np.exp([0, 2]).sum()]
    )
    np.testing.assert_allclose(batch.share_N, (first[:, None] * second).ravel(), rtol=1e-5)
