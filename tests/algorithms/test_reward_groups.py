"""Several rewards: GDPO and DVAO against worked values, and what must not matter."""

import numpy as np
import pytest

from seeupo_jax.algorithms.estimators.dvao import dvao_advantage
from seeupo_jax.algorithms.estimators.gdpo import gdpo_advantage
from seeupo_jax.configuration.algorithm import Algorithm
from seeupo_jax.configuration.entry_points import find_entry
from seeupo_jax.configuration.recipes import RECIPES

# One group: whether it is right, and its length as a penalty.
RIGHT, LENGTH = [1.0, 0.0, 1.0, 0.0], [-120.0, -100.0, -60.0, -80.0]
REWARDS_NQ, GROUP_N = np.stack([RIGHT, LENGTH], axis=1), np.zeros(4, int)
ONES = np.ones(2)
BOTH = pytest.mark.parametrize("function", [gdpo_advantage, dvao_advantage])


def ragged(seed=0):
    """Three groups, the last of one survivor; a failed one of no numbers, three rewards."""
    rng = np.random.default_rng(seed)
    rewards_NQ = rng.normal(size=(9, 3)) * [1.0, 30.0, 0.01]
    valid_N = np.arange(9) != 7
    rewards_NQ[~valid_N] = np.nan
    return rewards_NQ, np.array([5, 5, -2, 5, -2, -2, -2, 9, 9]), valid_N


def numpy_parts(rewards_NQ, weight_Q, group_N, valid_N, scale):
    part_NQ = np.zeros(rewards_NQ.shape)
    for group in np.unique(group_N):
        own = (group_N == group) & valid_N
        if own.sum() > 1:
            centred = rewards_NQ[own] - rewards_NQ[own].mean(axis=0)
            part_NQ[own] = weight_Q * centred / scale(rewards_NQ[own])
    return part_NQ


def test_a_groups_advantages_by_hand():
    # Sample deviations 0.57735 and 25.81989.
    gdpo_N = np.array([0.866 - 1.1619, -0.866 - 0.3873, 0.866 + 1.1619, -0.866 + 0.3873])
    np.testing.assert_allclose(
        gdpo_advantage(REWARDS_NQ, ONES, GROUP_N).advantage, gdpo_N, atol=1e-4
    )
    # Population deviations 0.5 and 22.36068.
    dvao_N = np.array([-29.5, -10.5, 30.5, 9.5]) / 22.86068
    np.testing.assert_allclose(
        dvao_advantage(REWARDS_NQ, ONES, GROUP_N).advantage, dvao_N, rtol=1e-5
    )


def test_the_preset_gdpo_is_what_users_of_trl_know_as_normalize_then_sum():
    """Its advantages of this group, to its 1e-4 beside the deviations."""
    arrays = {"rewards_NQ": REWARDS_NQ, "reward_weight_Q": ONES, "group_N": GROUP_N}
    arrays["valid_N"] = np.ones(4, bool)
    own = Algorithm(**RECIPES["gdpo"])
    scaling = {"scale": own.scale, "clip": own.advantage_clip}
    found = find_entry("advantage", "gdpo").credit(arrays, own.estimator, **scaling)
    np.testing.assert_allclose(found.advantage, [-0.21, -0.89, 1.43, -0.34], atol=0.006)


def test_gdpo_is_numpys_on_ragged_groups():
    rewards_NQ, group_N, valid_N = ragged()
    weight_Q = np.array([0.5, -2.0, 1.0])
    found = gdpo_advantage(rewards_NQ, weight_Q, group_N, valid_N)
    wanted = numpy_parts(
        rewards_NQ, weight_Q, group_N, valid_N, lambda own: own.std(axis=0, ddof=1) + 1e-6
    )
    np.testing.assert_allclose(found.part_NQ, wanted, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found.advantage, wanted.sum(axis=1), rtol=1e-5, atol=1e-6)


def test_dvao_is_numpys_on_ragged_groups():
    rewards_NQ, group_N, valid_N = ragged()
    weight_Q = np.array([0.5, 2.0, 1.0])
    found = dvao_advantage(rewards_NQ, weight_Q, group_N, valid_N)
    wanted = numpy_parts(
        rewards_NQ, weight_Q, group_N, valid_N, lambda own: (weight_Q * own.std(axis=0)).sum()
    )
    np.testing.assert_allclose(found.part_NQ, wanted, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found.advantage, wanted.sum(axis=1), rtol=1e-5, atol=1e-6)


@BOTH
def test_a_reward_of_no_weight_or_no_difference_changes_nothing(function):
    rewards_NQ, group_N, valid_N = ragged()
    alone = function(rewards_NQ, np.ones(3), group_N, valid_N).advantage
    equal_N = np.full((9, 1), 100.1)
    more_NQ = np.concatenate([rewards_NQ, equal_N, rewards_NQ[:, :1] ** 2, np.zeros((9, 1))], 1)
    weight_Q = np.array([1, 1, 1, 7, 0, 1.0])
    np.testing.assert_allclose(
        function(more_NQ, weight_Q, group_N, valid_N).advantage, alone, rtol=1e-6, atol=1e-6
    )


@BOTH
def test_a_trajectory_that_failed_or_is_alone_has_none_and_equal_rewards_give_none(function):
    rewards_NQ, group_N, valid_N = ragged()
    assert not np.any(function(rewards_NQ, np.ones(3), group_N, valid_N).advantage[-2:])
    assert not np.any(function(np.full((7, 2), 100.1), ONES, np.zeros(7, int)).advantage)


def test_dvao_is_zero_where_the_weighted_deviations_sum_to_a_millionth_at_most():
    reward_N1 = np.array([[0.0], [2e-6]])  # deviation 1e-6

    def just(weight):
        return dvao_advantage(reward_N1, np.array([weight]), [0, 0]).advantage

    np.testing.assert_array_equal(just(0.9), [0, 0])
    np.testing.assert_allclose(just(1.2), [-1, 1], rtol=1e-5)


@BOTH
def test_rewards_may_be_of_any_size(function):
    plain, large = (function(REWARDS_NQ * size, ONES, GROUP_N).advantage for size in (1.0, 2.0**80))
    np.testing.assert_allclose(large, plain, rtol=1e-5)


@BOTH
def test_arrays_of_other_shapes_are_refused(function):
    with pytest.raises(ValueError, match=r"reward_weight_Q: \[Q\]"):
        function(REWARDS_NQ, np.ones(3), GROUP_N)
    with pytest.raises(ValueError, match=r"group_N, valid_N: \[N\]"):
        function(REWARDS_NQ, ONES, GROUP_N[:3])
