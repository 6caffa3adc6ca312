"""Group-relative advantages against hand-worked values and the NumPy twin."""

import itertools

import numpy as np
import numpy_credit as twin
import pytest

from seeupo_jax.algorithms.advantage import group_relative_advantage

CHOICES = list(itertools.product(("mean", "leave_one_out"), ("none", "batch", "group")))


def advantages(reward_N, group_N, **options):
    return np.asarray(group_relative_advantage(np.array(reward_N), np.array(group_N), **options))


def ragged(seed):
    """Groups of 1 to 6 trajectories in mixed rows, some invalid, rewards far from 0."""
    rng = np.random.default_rng(seed)
    group_N = rng.permutation(np.repeat(np.arange(7), [1, 2, 3, 4, 5, 6, 3]))
    reward_N = 5.0 + rng.integers(0, 3, group_N.size) * rng.uniform(0.5, 1.0, group_N.size)
    return reward_N, group_N, rng.random(group_N.size) < 0.7


def test_the_mean_baseline_is_the_mean_of_the_own_group():
    result = advantages([1.0, 7.0, 0.0, 5.0, 2.0], [0, 1, 0, 1, 0], scale="none")
    np.testing.assert_allclose(result, [0.0, 1.0, -1.0, -1.0, 1.0], atol=1e-6)
    assert result.dtype == np.float32


def test_leave_one_out_is_the_mean_of_the_other_members():
    result = advantages([1.0, 0.0, 0.0], [0, 0, 0], baseline="leave_one_out", scale="none")
    np.testing.assert_allclose(result, [1.0, -0.5, -0.5], atol=1e-6)


def test_batch_scale_divides_by_the_deviation_with_n_minus_one():
    # [1/2, -1/2, 0, 0] over sqrt((1/4 + 1/4) / 3)
    expected = [1.5**0.5, -(1.5**0.5), 0.0, 0.0]
    np.testing.assert_allclose(advantages([1, 0, 3, 3], [0, 0, 1, 1]), expected, atol=1e-6)


def test_group_scale_divides_by_the_deviation_of_the_own_group():
    result = advantages([2.0, 0.0, 200.0, 0.0], [0, 0, 1, 1], scale="group")
    np.testing.assert_allclose(result, np.array([1, -1, 1, -1]) * 0.5**0.5, atol=2e-6)


def test_a_tiny_batch_deviation_only_centres():
    np.testing.assert_allclose(advantages([1e-6, 0.0], [0, 0]), [5e-7, -5e-7], rtol=1e-5)
    np.testing.assert_allclose(advantages([2e-6, 0.0], [0, 0]), [0.5**0.5, -(0.5**0.5)], rtol=1e-5)


def test_clip_bounds_batch_scaled_advantages_only():
    reward_N, group_N = [1.0] + [0.0] * 19, [0] * 20  # 0.95 and -0.05, deviation sqrt(0.05)
    assert advantages(reward_N, group_N)[0] == 3.0
    np.testing.assert_allclose(advantages(reward_N, group_N)[1:], -(0.05**0.5), rtol=1e-5)
    assert advantages(np.array(reward_N) * -1, group_N, clip=2.0)[0] == -2.0
    unbounded = advantages(reward_N, group_N, clip=None)[0]
    np.testing.assert_allclose(unbounded, 0.95 / 0.05**0.5, rtol=1e-5)
    grouped = advantages(reward_N, group_N, scale="group")[0]
    np.testing.assert_allclose(grouped, unbounded, rtol=1e-4)
    assert advantages([100.0, 0.0], [0, 0], scale="none")[0] == 50.0


@pytest.mark.parametrize("baseline, scale", CHOICES)
@pytest.mark.parametrize("seed", range(3))
def test_ragged_groups_agree_with_the_numpy_twin(baseline, scale, seed):
    reward_N, group_N, valid_N = ragged(seed)
    options = {"baseline": baseline, "scale": scale, "clip": 1.0}
    expected = twin.group_relative_advantages(reward_N, group_N, valid_N, **options)
    result = advantages(reward_N, group_N, valid_N=valid_N, **options)
    np.testing.assert_allclose(result, expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("baseline, scale", [*CHOICES, ("batch", "batch")])
@pytest.mark.parametrize("size", [1e13, 1e30, 1.6e38])
def test_rewards_whose_squares_float32_cannot_hold_agree_with_the_numpy_twin(baseline, scale, size):
    reward_N, group_N, valid_N = ragged(0)
    reward_N = (size * (reward_N - 6)).astype(np.float32)  # of both signs
    assert reward_N.min() < -0.5 * size and reward_N.max() > 0.5 * size
    options = {"baseline": baseline, "scale": scale, "clip": 1.0}
    exact_N = reward_N.astype(np.float64)
    expected = twin.group_relative_advantages(exact_N, group_N, valid_N, **options)
    result = advantages(reward_N, group_N, valid_N=valid_N, **options)
    unit = size if scale == "none" else 1.0
    np.testing.assert_allclose(result / unit, expected / unit, rtol=2e-5, atol=2e-6)
    assert np.abs(result).max() > 0.5 * unit


def test_one_huge_group_leaves_the_advantages_of_the_others_alone():
    reward_N, group_N = np.array([1e38, -1e38, 3.0, 1.0]), [0, 0, 1, 1]
    for scale, wanted in {"group": [0.5**0.5, -(0.5**0.5)], "none": [1, -1]}.items():
        result = advantages(reward_N, group_N, scale=scale)
        np.testing.assert_allclose(result[2:], wanted, atol=2e-6)
        alone = advantages([0.0, 0.0, 3.0, 1.0], group_N, scale=scale)
        np.testing.assert_array_equal(result[2:], alone[2:])
        assert np.isfinite(result).all() and result[0] > 0 > result[1]
    # Over the batch they are nothing beside it, as in exact arithmetic.
    result = advantages(reward_N, group_N, scale="batch")
    np.testing.assert_allclose(result, [1.5**0.5, -(1.5**0.5), 0, 0], atol=1e-6)


@pytest.mark.parametrize("scale", ["batch", "group"])
def test_the_unit_of_large_rewards_moves_no_bit(scale):
    reward_N, group_N, valid_N = ragged(1)
    # 2^39 times as large is the last without a unit, 2^120 times needs one of 2^82.
    near, far = (
        advantages(reward_N * 2.0**power, group_N, valid_N=valid_N, scale=scale)
        for power in (37, 120)
    )
    np.testing.assert_array_equal(near, far)


@pytest.mark.parametrize("baseline, scale", CHOICES)
def test_invalid_trajectories_get_zero_and_move_nobody(baseline, scale):
    reward_N, group_N, valid_N = ragged(3)
    options = {"baseline": baseline, "scale": scale, "clip": 1.0, "valid_N": valid_N}
    result = advantages(reward_N, group_N, **options)
    assert not result[~valid_N].any()
    for reward, group in ((np.nan, 0), (-1e6, 5)):
        moved = (np.where(valid_N, reward_N, reward), np.where(valid_N, group_N, group))
        np.testing.assert_array_equal(advantages(*moved, **options), result)


@pytest.mark.parametrize("baseline, scale", CHOICES)
def test_alone_in_a_group_is_exactly_zero(baseline, scale):
    valid_N = np.array([True, True, False, True, True, True])
    options = {"baseline": baseline, "scale": scale, "valid_N": valid_N}
    result = advantages([9.0, 4.0, 1.0, 0.1, 0.2, 0.9], [5, 0, 0, 1, 1, 1], **options)
    assert result[0] == 0.0 and result[1] == 0.0
    assert result[3] < result[4] < 0.0 < result[5]


@pytest.mark.parametrize("baseline, scale", CHOICES)
def test_equal_rewards_are_exactly_zero_however_large(baseline, scale):
    result = advantages([100.1] * 7 + [7e5] * 5, [0] * 7 + [1] * 5, baseline=baseline, scale=scale)
    assert not result.any()


@pytest.mark.parametrize("baseline, scale", CHOICES)
def test_the_order_of_rows_does_not_matter(baseline, scale):
    reward_N, group_N, valid_N = ragged(4)
    options = {"baseline": baseline, "scale": scale, "clip": 1.0}
    order_N = np.random.default_rng(0).permutation(group_N.size)
    shuffled = advantages(reward_N[order_N], group_N[order_N], valid_N=valid_N[order_N], **options)
    result = advantages(reward_N, group_N, valid_N=valid_N, **options)
    np.testing.assert_allclose(shuffled, result[order_N], rtol=1e-5, atol=1e-6)


def test_the_batch_baseline_is_the_mean_of_all_valid_trajectories():
    # Valid: 4, 1, 1, 2, with mean 2; the first and the last are alone in their groups.
    reward_N, group_N = [4.0, 1.0, 99.0, 1.0, 2.0], [5, 0, 0, 0, 1]
    options = {"baseline": "batch", "valid_N": np.array([True, True, False, True, True])}
    result = advantages(reward_N, group_N, scale="none", **options)
    np.testing.assert_allclose(result, [2.0, -1.0, 0.0, -1.0, 0.0], atol=1e-6)
    scaled = advantages(reward_N, group_N, **options)
    np.testing.assert_allclose(scaled, result / 2**0.5, atol=1e-6)  # squares 4 + 1 + 1 over 3


@pytest.mark.parametrize("scale", ["none", "batch"])
@pytest.mark.parametrize("seed", range(3))
def test_the_batch_baseline_on_ragged_groups_agrees_with_numpy(scale, seed):
    reward_N, group_N, valid_N = ragged(seed)
    expected = np.where(valid_N, reward_N - reward_N[valid_N].mean(), 0.0)
    if scale == "batch":
        expected = np.clip(expected / reward_N[valid_N].std(ddof=1), -1.0, 1.0)
    options = {"baseline": "batch", "scale": scale, "clip": 1.0, "valid_N": valid_N}
    result = advantages(reward_N, group_N, **options)
    np.testing.assert_allclose(result, expected, rtol=2e-5, atol=2e-6)
    dirty_N = np.where(valid_N, reward_N, np.nan)
    np.testing.assert_array_equal(advantages(dirty_N, group_N, **options), result)
    np.testing.assert_array_equal(advantages(dirty_N, -(group_N**2), **options), result)


@pytest.mark.parametrize("scale", ["none", "batch"])
def test_equal_rewards_of_all_groups_are_exactly_zero_with_the_batch_baseline(scale):
    assert not advantages([100.1] * 7, [0, 0, 1, 1, 1, 2, 3], baseline="batch", scale=scale).any()


def test_a_group_of_equal_rewards_differs_from_the_batch_baseline():
    result = advantages([100.1] * 4 + [0.1] * 4, [0] * 4 + [1] * 4, baseline="batch", scale="none")
    np.testing.assert_allclose(result, [50.0] * 4 + [-50.0] * 4, rtol=1e-6)


def test_group_ids_are_only_names():
    reward_N, group_N, valid_N = ragged(5)
    names = np.array([-3, 10**6, 40, 41, 7, 0, 999])
    np.testing.assert_array_equal(
        advantages(reward_N, names[group_N], valid_N=valid_N, scale="group"),
        advantages(
            reward_N, np.argsort(np.argsort(names))[group_N], valid_N=valid_N, scale="group"
        ),
    )


@pytest.mark.parametrize("baseline, scale", CHOICES)
def test_a_batch_of_failures_is_all_zero(baseline, scale):
    reward_N, group_N, valid_N = ragged(6)
    options = {"baseline": baseline, "scale": scale, "clip": 1.0, "valid_N": ~valid_N & valid_N}
    assert not advantages(np.where(valid_N, reward_N, np.nan), group_N, **options).any()


def test_user_mistakes_are_named_with_what_is_allowed():
    with pytest.raises(
        ValueError, match="baseline: got 'median'; allowed: mean, leave_one_out, batch"
    ):
        advantages([1.0], [0], baseline="median")
    with pytest.raises(ValueError, match="scale: got 'std'; allowed: none, batch, group"):
        advantages([1.0], [0], scale="std")
    with pytest.raises(ValueError, match="'group' with baseline='batch'; allowed: none, batch"):
        advantages([1.0], [0], baseline="batch", scale="group")
    with pytest.raises(ValueError, match="clip: got 0.0; allowed: a number > 0, or None"):
        advantages([1.0], [0], clip=0.0)
    with pytest.raises(ValueError, match=r"\(2,\), \(3,\).*reward_N, group_N"):
        advantages([1.0, 2.0], [0, 0, 0])
