"""ProRL's credit by hand, and what must not matter."""

import numpy as np
import pytest

from seeupo_jax.algorithms.estimators.prorl import prorl_advantage

REWARDS_NK = np.array([[1.0, 0.0, 2.0], [0.0, 1.0, 0.0], [3.0, 0.0, 0.0], [9.0, 9.0, 9.0]])
MASK_NK = np.array([[1, 1, 1], [1, 1, 0], [1, 0, 0], [0, 0, 0]], bool)
GROUP_N = np.array([7, 7, 7, 7])
ONE = np.ones(1)


def credit(rewards_NK=REWARDS_NK, mean=0.5, std=0.5, **options):
    arrays = rewards_NK[:, :, None], ONE, mean * ONE, std * ONE, GROUP_N, MASK_NK
    return np.asarray(prorl_advantage(*arrays, **options).advantage)


def test_centred_rewards_to_go_less_the_mean_of_those_that_reach_the_turn():
    # Centred: 1, -1, 3; -1, 1; 5. To go: 3, 2, 3; 0, 1; 5.
    wanted = [[1 / 3, 0.5, 0], [-8 / 3, -0.5, 0], [7 / 3, 0, 0], [0, 0, 0]]
    np.testing.assert_allclose(credit(), wanted, atol=1e-6)
    # Discounted by half: 1.25, 0.5, 3; -0.5, 1; 5.
    halved = np.array([1.25, -0.5, 5]) - 5.75 / 3
    np.testing.assert_allclose(credit(discount=0.5)[:3, 0], halved, atol=1e-6)


def test_a_deviation_below_the_floor_is_the_floor():
    np.testing.assert_allclose(credit(std=0.0), credit(std=0.1), rtol=1e-6)
    np.testing.assert_allclose(credit(std=0.2, std_floor=1.0), credit(std=1.0), rtol=1e-6)
    np.testing.assert_allclose(credit(std=0.2), 5 * credit(std=1.0), rtol=1e-5, atol=1e-5)


def test_a_longer_episode_is_no_better_for_rewards_that_every_step_pays():
    """Not centred, its first turn would be credited with two more rewards."""
    paid_NK = np.where(MASK_NK, 0.7, 0.0)
    np.testing.assert_allclose(credit(paid_NK, mean=0.7), 0, atol=1e-6)
    assert credit(paid_NK, mean=0.0)[0, 0] > 1


def test_what_is_outside_the_mask_is_not_read_and_equal_returns_give_exactly_nothing():
    np.testing.assert_array_equal(credit(np.where(MASK_NK, REWARDS_NK, np.nan)), credit())
    arrays = np.full((7, 2, 1), 100.1), ONE, 0.3 * ONE, ONE, np.zeros(7, int), np.ones((7, 2))
    np.testing.assert_array_equal(prorl_advantage(*arrays).advantage, 0)


def test_rewards_add_up_by_their_weights():
    both = np.stack([REWARDS_NK, REWARDS_NK**2], axis=2)
    statistics = np.array([0.5, 2.0]), np.array([0.5, 3.0])
    found = prorl_advantage(both, np.array([2.0, -1.0]), *statistics, GROUP_N, MASK_NK)
    alone = [credit(), credit(REWARDS_NK**2, 2.0, 3.0)]
    np.testing.assert_allclose(found.advantage, 2 * alone[0] - alone[1], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found.part_NQ[..., 0], 2 * alone[0], rtol=1e-5, atol=1e-5)


def test_arrays_of_other_shapes_are_refused():
    with pytest.raises(ValueError, match="weights and statistics"):
        prorl_advantage(REWARDS_NK[:, :, None], np.ones(2), *[np.ones(2)] * 2, GROUP_N, MASK_NK)
    with pytest.raises(ValueError, match="mask_NK"):
        prorl_advantage(REWARDS_NK[:, :, None], ONE, ONE, ONE, GROUP_N, MASK_NK[:, :2])
