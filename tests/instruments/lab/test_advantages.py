"""What turns of the laboratory's trajectories are credited with."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from seeupo_jax.configuration.algorithm import Algorithm
from seeupo_jax.configuration.recipes import RECIPES
from seeupo_jax.instruments.lab.advantages import expected_credit, sampled_credit
from seeupo_jax.instruments.lab.trajectories import Batch

# Four sequences of two turns, in two groups of eight; contexts 0, then 1 or 2.
ACTION_NK = np.tile([[0, 0], [0, 1], [1, 0], [1, 1]], (4, 1))
REWARD_N = np.tile([0.0, 1.0, 0.5, 4.0], 4)


def batch_of(action_NK, reward_N):
    context_NK = np.stack([np.zeros(len(action_NK), int), 1 + action_NK[:, 0]], axis=1)
    share_N = np.full(len(reward_N), 1 / len(reward_N))
    return Batch(*(jnp.asarray(x) for x in (context_NK, action_NK, reward_N, share_N)))


def credit_of(algorithm, value_NK=None):
    batch = batch_of(ACTION_NK, REWARD_N)
    value_NK = jnp.zeros(ACTION_NK.shape) if value_NK is None else value_NK
    return sampled_credit(algorithm, batch, value_NK, group_size=8)


@pytest.mark.parametrize("scale", ["none", "batch", "group"])
def test_expected_credit_is_what_samples_tend_to(scale):
    algorithm = Algorithm(scale=scale, advantage_clip=1.2)
    sampled, expected = (
        credit_of(algorithm),
        expected_credit(algorithm, batch_of(ACTION_NK, REWARD_N)),
    )
    # Between n - 1 of the samples and n of the expectation.
    np.testing.assert_allclose(sampled.advantage_NK, expected.advantage_NK, rtol=0.08)
    if scale == "none":
        np.testing.assert_allclose(expected.advantage_NK[:4, 0], [-1.375, -0.375, -0.875, 2.625])
    else:
        largest = float(jnp.max(expected.advantage_NK))
        assert largest == pytest.approx(1.2 if scale == "batch" else 2.625 / np.std(REWARD_N))


@pytest.mark.parametrize("scale", ["none", "batch", "group"])
def test_expected_credit_has_no_bound_on_rewards(scale):
    algorithm = Algorithm(scale=scale, advantage_clip=1.2)
    plain, large = (
        expected_credit(algorithm, batch_of(ACTION_NK, size * REWARD_N)).advantage_NK
        for size in (1.0, 2.0**100)
    )
    large = large / 2.0**100 if scale == "none" else large
    np.testing.assert_allclose(large, plain, rtol=1e-5)


def test_expected_credit_weighs_sequences_by_their_share():
    batch = batch_of(ACTION_NK[:2], REWARD_N[:2])._replace(share_N=jnp.array([0.9, 0.1]))
    advantage_NK = expected_credit(Algorithm(scale="none"), batch).advantage_NK
    np.testing.assert_allclose(advantage_NK, [[-0.1, -0.1], [0.9, 0.9]], rtol=1e-5)
    flat = batch._replace(reward_N=jnp.array([0.3, 0.3]))
    np.testing.assert_allclose(expected_credit(Algorithm(), flat).advantage_NK, 0, atol=1e-6)


def test_turns_are_compared_with_those_from_the_same_context():
    algorithm = dataclasses.replace(
        Algorithm(**RECIPES["parallel"]), advantage="hgpo", scale="none", estimator={"history": 0}
    )
    advantage_NK = credit_of(algorithm).advantage_NK
    np.testing.assert_allclose(advantage_NK[:4, 0], [-1.375, -0.375, -0.875, 2.625], rtol=1e-5)
    np.testing.assert_allclose(advantage_NK[:4, 1], [-0.5, 0.5, -1.75, 1.75], rtol=1e-5)


def test_the_one_reward_is_all_that_estimators_of_several_rewards_combine():
    centred_N = (REWARD_N - REWARD_N.mean())[:, None] * np.ones(2)
    dvao_NK = credit_of(Algorithm(**RECIPES["dvao"])).advantage_NK
    np.testing.assert_allclose(dvao_NK, centred_N / REWARD_N.std(), rtol=1e-5)
    gdpo_NK = credit_of(Algorithm(**RECIPES["gdpo"])).advantage_NK
    np.testing.assert_allclose(gdpo_NK, centred_N / REWARD_N.std(ddof=1), rtol=1e-5)


@pytest.mark.parametrize("anchor", ["turn", "task"])
def test_turns_are_compared_with_those_of_their_anchor(anchor):
    algorithm = Algorithm(
        advantage="hgpo", scale="none", estimator={"history": 0, "anchor": anchor}
    )
    advantage_NK = credit_of(algorithm).advantage_NK
    # To go it is the reward from either turn.
    np.testing.assert_allclose(
        advantage_NK, np.stack([REWARD_N - REWARD_N.mean()] * 2, axis=1), rtol=1e-5
    )


def test_halves_are_of_the_mean_entropy_of_a_trajectorys_contexts():
    algorithm = Algorithm(
        advantage="canon", scale="none", estimator={"metric": "entropy", "mu": 1.0}
    )
    batch = batch_of(ACTION_NK, REWARD_N)
    entropy_NK = jnp.stack([jnp.ones(16), jnp.array([0.9, 0.1])[ACTION_NK[:, 0]]], axis=1)
    credit = sampled_credit(algorithm, batch, 0 * entropy_NK, group_size=8, entropy_NK=entropy_NK)
    # After action 1 it is less: that half's mean is 2.25, the other's 0.5.
    wanted_N = [0 - 2.25, 1 - 2.25, 0.5 - 0.5, 4 - 0.5]
    np.testing.assert_allclose(credit.advantage_NK[:4, 0], wanted_N, rtol=1e-5, atol=1e-6)


def test_estimators_of_turns_read_what_turns_pay_and_those_of_trajectories_the_reward():
    reward_NK = np.stack([3.0 * ACTION_NK[:, 0], np.zeros(16)], axis=1)
    batch = batch_of(ACTION_NK, REWARD_N)._replace(reward_NK=jnp.asarray(reward_NK))
    of = {"scale": "none"}
    turns = Algorithm(advantage="matchtir", estimator={"discount": 0.5}, **of)
    advantage_NK = sampled_credit(turns, batch, 0 * batch.reward_NK, group_size=8).advantage_NK
    # Totals and what is still to come from the first turn: 3 or 0; nothing from the second.
    wanted = np.where(ACTION_NK[:, :1] == 1, 1.5, -1.5) * [1.0, 0.5]
    np.testing.assert_allclose(advantage_NK, wanted, rtol=1e-5)
    whole = sampled_credit(Algorithm(**of), batch, 0 * batch.reward_NK, group_size=8)
    np.testing.assert_allclose(whole.advantage_NK[:, 0], REWARD_N - REWARD_N.mean(), rtol=1e-5)


def test_a_critic_that_is_right_leaves_what_the_turn_itself_changed():
    # The uniform policy's values: 1.375 at the start, 0.5 and 2.25 after the first action.
    value_NK = jnp.stack([jnp.full(16, 1.375), jnp.array([0.5, 2.25])[ACTION_NK[:, 0]]], axis=1)
    algorithm = Algorithm(
        advantage="gae", critic={"kind": "head"}, scale="none", estimator={"lam": 0.0}
    )
    credit = credit_of(algorithm, value_NK)
    np.testing.assert_allclose(credit.advantage_NK[:4, 0], [-0.875, -0.875, 0.875, 0.875])
    np.testing.assert_allclose(credit.advantage_NK[:4, 1], [-0.5, 0.5, -1.75, 1.75])
    np.testing.assert_allclose(credit.return_NK[:4, 1], REWARD_N[:4])
    # No trajectory of the laboratory is cut: it refuses the field.
    cut = credit_of(
        dataclasses.replace(algorithm, estimator={"lam": 0.0, "bootstrap_truncated": True}),
        value_NK,
    )
    np.testing.assert_array_equal(cut.advantage_NK, credit.advantage_NK)


def test_returns_are_standardised_over_all_turns():
    algorithm = Algorithm(advantage="returns", advantage_clip=None, estimator={"discount": 0.5})
    advantage_NK = credit_of(algorithm).advantage_NK
    returns_NK = REWARD_N[:, None] * [0.5, 1.0]
    wanted_NK = (returns_NK - returns_NK.mean()) / returns_NK.std(ddof=1)
    np.testing.assert_allclose(advantage_NK, wanted_NK, rtol=1e-4)


PAID_NK = np.stack([3.0 * ACTION_NK[:, 0], 0.5 * ACTION_NK[:, 1]], axis=1)


def paid_credit(recipe):
    """By a recipe, of turns that are paid."""
    batch = batch_of(ACTION_NK, REWARD_N)._replace(reward_NK=jnp.asarray(PAID_NK))
    return sampled_credit(Algorithm(**RECIPES[recipe]), batch, jnp.zeros((16, 2)), group_size=8)


def test_rewards_of_turns_are_scaled_by_their_deviation_over_the_batch():
    found = paid_credit("prorl")
    # What is still to come, less its mean: 1.75 from the first turn, 0.25 from the second.
    wanted_NK = np.stack([PAID_NK.sum(axis=1) - 1.75, PAID_NK[:, 1] - 0.25], axis=1)
    np.testing.assert_allclose(found.advantage_NK, wanted_NK / PAID_NK.std(ddof=1), rtol=1e-5)


def test_a_last_turn_has_no_gain_whatever_it_is_paid():
    found = paid_credit("a2tgpo")
    # Half of the first turns gain 3, half 0: one deviation from their mean.
    sign_N = 2 * ACTION_NK[:, 0] - 1
    outcome_N = (REWARD_N - REWARD_N.mean()) / REWARD_N.std()
    wanted_NK = np.stack([outcome_N + 0.3 * sign_N, outcome_N], axis=1)
    np.testing.assert_allclose(found.advantage_NK, wanted_NK, rtol=1e-5)
    scale_NK = np.stack([1 + 0.3 * sign_N * np.tanh(0.5), np.ones(16)], axis=1)
    np.testing.assert_allclose(found.clip_scale_NK, scale_NK, rtol=1e-5)
