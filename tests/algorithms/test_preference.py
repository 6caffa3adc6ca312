"""Pairs of a success and a failure: the loss, who is right, and which way scores are pulled."""

import numpy as np
import pytest

from seeupo_jax.algorithms.estimators.istar import istar_advantage
from seeupo_jax.algorithms.preference import pair_preference

SCORE_N = np.array([0.3, -0.2, 1.5, 0.1, np.nan, 0.1], np.float32)
SUCCESS_N = np.array([True, False, True, False, True, True])
GROUP_N = np.array([0, 0, 1, 1, 0, 1])
VALID_N = np.array([True, True, True, True, False, True])
PAIRS = [(0, 1), (2, 3), (5, 3)]  # the fifth failed; nobody of group 0 is paired with one of 1


def test_every_success_is_paired_with_every_failure_of_its_group():
    got = pair_preference(SCORE_N, SUCCESS_N, GROUP_N, VALID_N)
    gap_P = np.array([SCORE_N[i] - SCORE_N[j] for i, j in PAIRS], np.float64)
    assert got.pairs == 3
    np.testing.assert_allclose(got.loss, np.log1p(np.exp(-gap_P)).mean(), rtol=1e-6)
    np.testing.assert_allclose(got.accuracy, (1 + 1 + 0.5) / 3, rtol=1e-6)  # the last is a tie
    slope_N = np.zeros(6)
    for (i, j), gap in zip(PAIRS, gap_P, strict=True):
        slope_N[i] -= 1 / (1 + np.exp(gap)) / 3
        slope_N[j] += 1 / (1 + np.exp(gap)) / 3
    np.testing.assert_allclose(got.slope_N, slope_N, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("success", [True, False])
def test_without_a_pair_there_is_no_loss_and_no_slope(success):
    got = pair_preference(SCORE_N, np.full(6, success), GROUP_N, VALID_N)
    assert got.pairs == got.loss == got.accuracy == 0 and not np.any(got.slope_N)


def test_scores_far_apart_have_a_finite_loss():
    score_N = np.where(SUCCESS_N, np.float32(-1e30), np.float32(1e30))
    got = pair_preference(score_N, SUCCESS_N, GROUP_N, VALID_N)
    assert np.isfinite(got.loss) and np.isfinite(got.slope_N).all() and got.accuracy == 0


def test_turns_are_standardised_over_all_turns_of_the_group_not_over_the_first_of_each():
    implicit_NK = np.array([[1.0, 5.0, -3.0], [2.0, 0.0, np.nan]], np.float32)
    mask_NK = np.array([[True, True, True], [True, True, False]])
    arrays = np.ones(2, np.float32), implicit_NK, mask_NK, np.zeros(2, int), np.ones(2, bool)
    got = np.asarray(istar_advantage(*arrays, step_coef=2.0))
    turns = np.array([1, 5, -3, 2, 0.0])
    wanted = 2 * (implicit_NK - turns.mean()) / (turns.std(ddof=1) + 1e-6)
    np.testing.assert_allclose(got[mask_NK], wanted[mask_NK], rtol=1e-5)
    assert got[1, 2] == 0
    first = np.array([1.0, 2.0])  # the authors' code: far off, and not centred
    slip = 2 * (implicit_NK - first.mean()) / (first.std(ddof=1) + 1e-6)
    assert abs(np.nanmean(slip)) > 0.5 and abs(got[mask_NK].mean()) < 1e-6


def test_as_their_scripts_train_parts_are_less_the_others_and_turns_in_units_of_the_largest():
    # Rewards 1 and 0, each less the other. Turns over 0.4: 1/2, -1 and 1/4; less the others' mean:
    # 1/2 + 3/8, -1 - 3/8 and 1/4 + 1/4. Another task's turn is the largest of the next batch.
    implicit_NK = np.array([[0.2, -0.4], [0.1, np.nan], [0.3, np.nan]], np.float32)
    mask_NK = np.array([[True, True], [True, False], [True, False]])
    rest = mask_NK, np.array([0, 0, 1]), np.ones(3, bool)
    options = {"baseline": "leave_one_out", "norm": "batch_max", "scale": "none"}
    reward_N = np.array([1, 0, 5], np.float32)
    got = istar_advantage(reward_N, implicit_NK, *rest, step_coef=2.0, **options)
    wanted = [[1 + 7 / 4, 1 - 11 / 4], [-1 + 1, 0], [0, 0]]
    np.testing.assert_allclose(got, wanted, atol=1e-4)
    implicit_NK[2, 0] = -0.8
    got = istar_advantage(reward_N, implicit_NK, *rest, step_coef=4.0, **options)
    np.testing.assert_allclose(got, wanted, atol=1e-4)
    for name, allowed in (("norm", "none, batch_max"), ("baseline", "mean, leave_one_out, batch")):
        with pytest.raises(ValueError, match=f"{name}: got 'turn'; allowed: {allowed}"):
            istar_advantage(reward_N, implicit_NK, *rest, **options | {name: "turn"})


@pytest.mark.parametrize("scale", ["group", "none", "batch"])
def test_implicit_rewards_that_are_all_equal_leave_the_episodes_advantage(scale):
    reward_N, group_N = np.array([1.0, 0.0, 0.5, 0.0], np.float32), np.array([0, 0, 1, 1])
    mask_NK = np.array([[1, 1, 1], [1, 0, 0], [1, 1, 0], [1, 0, 0]], bool)
    rest = mask_NK, group_N, np.ones(4, bool)
    new, same = (
        istar_advantage(reward_N, np.full((4, 3), value, np.float32), *rest, scale=scale)
        for value in (0.0, 0.1)
    )
    np.testing.assert_array_equal(new, same)
    for row in np.asarray(new):
        assert len({*row[row != 0]}) == 1


def test_an_unknown_scale_is_refused():
    with pytest.raises(ValueError, match="scale: got 'turn'; allowed: group, none, batch"):
        istar_advantage(np.ones(1), np.ones((1, 1)), [[True]], [0], [True], scale="turn")
