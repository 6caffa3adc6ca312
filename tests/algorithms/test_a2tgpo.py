"""A²TGPO's credit: values by hand, ragged groups, and what must not matter."""

import jax.numpy as jnp
import numpy as np
import pytest

from seeupo_jax.algorithms.estimators.a2tgpo import a2tgpo_credit

NAN = np.nan
REWARD_N = np.array([1.0, 0.0, 0.5, 7.0])
# Group 0 has 4, 3 and 2 turns; trajectory 3 is alone in group 1.
GAIN_NK = np.array(
    [
        [0.3, -0.1, 0.6, NAN],
        [0.1, 0.0, NAN, NAN],
        [0.2, NAN, NAN, NAN],
        [0.9, NAN, NAN, NAN],
    ]
)
GROUP_N = np.array([0, 0, 0, 1])
MASK_NK = np.arange(4) < np.array([4, 3, 2, 2])[:, None]
ALPHA, BETA = 0.3, 0.25


def credited(reward_N=REWARD_N, gain_NK=GAIN_NK, mask_NK=MASK_NK, group_N=GROUP_N, **options):
    options = {"step_coef": ALPHA, "adaptation": BETA} | options
    found = a2tgpo_credit(reward_N, gain_NK, group_N, mask_NK, **options)
    return np.asarray(found.advantage), np.asarray(found.clip_scale)


def z(value, peers, *, scaled=True):
    """Over the deviation of the population."""
    mean = sum(peers) / len(peers)
    square = sum((peer - mean) ** 2 for peer in peers) / len(peers)
    return (value - mean) / (square**0.5 + 1e-6 if scaled else 1.0)


def wanted(*, scaled=True, discount=1.0):
    """The formulas, number by number."""
    first, second = (0.3, 0.1, 0.2), (-0.1, 0.0)
    a, b, c = (z(value, first, scaled=scaled) for value in first)
    d, e = (z(value, second, scaled=scaled) for value in second)
    outcome = [z(r, (1.0, 0.0, 0.5), scaled=scaled) for r in (1.0, 0.0, 0.5)]
    # The third turn of trajectory 0 has no peer that gained at its index: z = 0, but it counts.
    ahead_NK = np.zeros((4, 4))
    ahead_NK[0, :2] = (a + discount * d) / 3**0.5, d / 2**0.5
    ahead_NK[1, :2] = (b + discount * e) / 2**0.5, e
    ahead_NK[2, 0] = c
    outcome_NK = np.array([*outcome, 0.0])[:, None]
    return np.where(MASK_NK, ALPHA * ahead_NK + outcome_NK, 0.0)


@pytest.mark.parametrize("scale, scaled", [("group", True), ("none", False)])
@pytest.mark.parametrize("discount", [1.0, 0.5])
def test_the_advantage_by_hand(scale, scaled, discount):
    advantage_NK, _ = credited(scale=scale, discount=discount)
    np.testing.assert_allclose(
        advantage_NK, wanted(scaled=scaled, discount=discount), rtol=1e-5, atol=1e-6
    )


def test_the_batch_scale_standardises_the_sum_of_unscaled_parts():
    flat = wanted(scaled=False)[MASK_NK]
    flat = (flat - flat.mean()) / flat.std(ddof=1)
    advantage_NK, _ = credited(scale="batch", clip=1.1)
    np.testing.assert_allclose(advantage_NK[MASK_NK], np.clip(flat, -1.1, 1.1), rtol=1e-5)
    assert np.abs(flat).max() > 1.1 and not advantage_NK[~MASK_NK].any()


@pytest.mark.parametrize("scale", ["group", "none", "batch"])
def test_the_clip_range_follows_the_turns_own_scaled_gain(scale):
    _, clip_NK = credited(scale=scale)
    gained = {
        (0, 0): z(0.3, (0.3, 0.1, 0.2)),
        (1, 0): z(0.1, (0.3, 0.1, 0.2)),
        (0, 1): z(-0.1, (-0.1, 0.0)),
        (1, 1): z(0.0, (-0.1, 0.0)),
    }
    wanted_NK = np.ones((4, 4))  # without a gain, alone, or at the mean of its index
    for place, value in gained.items():
        wanted_NK[place] = 1 + BETA * (2 / (1 + np.exp(-value)) - 1)
    np.testing.assert_allclose(clip_NK, wanted_NK, rtol=1e-5)
    assert wanted_NK.max() > 1.1 > 0.9 > wanted_NK.min()


def test_the_last_turn_has_the_outcome_alone_and_a_trajectory_that_is_alone_nothing():
    advantage_NK, clip_NK = credited()
    last = (np.arange(4), MASK_NK.sum(axis=1) - 1)
    outcome = [z(r, (1.0, 0.0, 0.5)) for r in (1.0, 0.0, 0.5)]
    np.testing.assert_allclose(advantage_NK[last], [*outcome, 0.0], rtol=1e-5)
    np.testing.assert_array_equal(clip_NK[last], 1.0)
    assert not advantage_NK[3].any()


def test_a_gain_of_zero_counts_and_a_missing_one_does_not():
    """The authors' code tells gains by their being nonzero, and so drops those of 0."""
    gain_NK = np.array([[0.4, 0.0, NAN], [0.2, 0.2, NAN]])
    mask_NK, group_N, reward_N = np.ones((2, 3), bool), np.zeros(2, int), np.zeros(2)
    advantage_NK, _ = credited(reward_N, gain_NK, mask_NK, group_N)
    first, second = z(0.4, (0.4, 0.2)), z(0.0, (0.0, 0.2))
    np.testing.assert_allclose(advantage_NK[0, 0], ALPHA * (first + second) / 2**0.5, atol=1e-6)
    gain_NK[0, 1] = NAN
    advantage_NK, clip_NK = credited(reward_N, gain_NK, mask_NK, group_N)
    np.testing.assert_allclose(advantage_NK[0], [ALPHA * first, 0, 0], rtol=1e-5)
    assert clip_NK[0, 1] == clip_NK[1, 1] == 1.0


def test_failed_trajectories_and_numbers_outside_the_turns_reach_nothing():
    reward_N, gain_NK, mask_NK = REWARD_N.copy(), GAIN_NK.copy(), MASK_NK.copy()
    reward_N[2], gain_NK[2], gain_NK[0, 3] = NAN, np.inf, NAN
    valid_N = np.array([True, True, False, True])
    gain_NK[~mask_NK] = 99.0
    advantage_NK, clip_NK = credited(reward_N, gain_NK, mask_NK, valid_N=valid_N)
    two = [0, 1]
    alone_NK, own_NK = credited(reward_N[two], GAIN_NK[two], mask_NK[two], GROUP_N[two])
    np.testing.assert_allclose(advantage_NK[two], alone_NK, rtol=1e-6)
    np.testing.assert_allclose(clip_NK[two], own_NK, rtol=1e-6)
    assert not advantage_NK[2].any() and (clip_NK[2] == 1).all()


def test_equal_gains_are_no_gain_whatever_their_size():
    gain_NK = np.where(MASK_NK & ~np.isnan(GAIN_NK), 100.1, NAN)
    advantage_NK, clip_NK = credited(np.full(4, 100.1), gain_NK)
    np.testing.assert_array_equal(advantage_NK, 0.0)
    np.testing.assert_array_equal(clip_NK, 1.0)


def test_groups_and_order_are_only_names():
    order, names = np.array([3, 1, 0, 2]), np.array([-7, 2**30])
    advantage_NK, clip_NK = credited()
    moved = credited(REWARD_N[order], GAIN_NK[order], MASK_NK[order], names[GROUP_N][order])
    np.testing.assert_allclose(moved[0], advantage_NK[order], rtol=1e-6)
    np.testing.assert_allclose(moved[1], clip_NK[order], rtol=1e-6)


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="scale: got 'std'; allowed: group, none, batch"):
        credited(scale="std")
    with pytest.raises(ValueError, match="mask_NK: as gain_NK"):
        credited(mask_NK=jnp.ones((4, 3), bool))
