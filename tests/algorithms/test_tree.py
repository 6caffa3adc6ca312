"""Turns of a tree compared with those that begin where they do, by hand."""

import numpy as np
import pytest

from seeupo_jax.algorithms.estimators.tree import tree_advantage

# Two groups. 0 and 1 share their first turn, 2 is beside it; 3 failed; 4 and 5 share two turns.
NODE = [[0, 1, -1], [0, 2, -1], [3, -1, -1], [4, 5, -1], [6, 7, 8], [6, 7, 9]]
REWARD = [[1.0, 0.5, 9.0], [1.0, 0.0, 9.0], [0.0, 9.0, 9.0], [7.0, 7.0, 7.0]]
REWARD += [[2.0, 3.0, 1.0], [2.0, 3.0, 1.0]]
GROUP, VALID = [0, 0, 0, 0, 5, 5], [True, True, True, False, True, True]


def siblings(reward=REWARD, **options):
    fields = {"baseline": "siblings", "reward_NK": np.array(reward)} | options
    return np.asarray(
        tree_advantage(np.zeros(6), np.array(GROUP), np.array(VALID), np.array(NODE), **fields)
    )


def test_turns_are_compared_with_those_that_begin_where_they_do():
    half, quarter = 0.5, 0.25
    by_hand = [[half, quarter, 0], [half, -quarter, 0], [-half, 0, 0], [0, 0, 0]]
    by_hand += [[0, 0, 0]] * 2  # alone, alone, and two that are equal
    np.testing.assert_allclose(siblings(scale="none"), by_hand, atol=1e-7)
    # Divided by the deviation of two: sqrt(0.5) and sqrt(0.125).
    deviation = np.sqrt(0.5)
    scaled = np.array(by_hand) / np.array([[deviation, deviation / 2, 1]])
    np.testing.assert_allclose(siblings(scale="group"), scaled, atol=1e-5)


def test_equal_scores_are_worth_exactly_nothing():
    for value in (0.1, 1 / 3, 1e6 + 0.1):
        assert not siblings(np.full((6, 3), value), scale="group").any()


def test_their_rewards_are_needed():
    with pytest.raises(ValueError, match="reward_NK: got None; allowed with baseline=siblings"):
        siblings(reward_NK=None)


def test_one_turn_far_from_the_others_is_cut_where_turns_are_standardised():
    """One success of 16: 15/16 and -1/16 over the deviation (n - 1), which is 1/4."""
    one_N, group_N, valid_N = np.eye(16)[0], np.zeros(16, int), np.ones(16, bool)
    node_NK = np.arange(16)[:, None]
    for clip, first in ((None, 3.75), (3.0, 3.0)):
        found_NK = tree_advantage(one_N, group_N, valid_N, node_NK, scale="batch", clip=clip)
        np.testing.assert_allclose(found_NK[:, 0], [first] + [-0.25] * 15, rtol=1e-5)
