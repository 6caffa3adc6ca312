"""Credit of trajectories by more than their reward, against plain loops and hand-worked values."""

import jax
import numpy as np
import pytest

from seeupo_jax.algorithms.estimators.a_grae import asymmetric_advantage
from seeupo_jax.algorithms.estimators.canon import conditional_advantage
from seeupo_jax.algorithms.estimators.grae import group_relative_advantage

# Five tasks of one to five trajectories in mixed rows, some left out: one program for all.
SEEDS = range(4)


def drawn(seed):
    rng = np.random.default_rng(seed)
    group_N = rng.permutation(np.repeat([4, 0, 9, -2, 7], [1, 2, 3, 4, 5]))
    valid_N = rng.random(group_N.size) < 0.8
    reward_N = np.where(valid_N, rng.integers(0, 5, group_N.size) / 4, np.nan)
    return reward_N, group_N, rng.integers(1, 4, group_N.size).astype(float), valid_N


def members(group_N, valid_N):
    """Rows of each group's valid trajectories, where there are two."""
    found = ([n for n in np.flatnonzero(valid_N) if group_N[n] == g] for g in np.unique(group_N))
    return [rows for rows in found if len(rows) > 1]


@pytest.mark.parametrize("alpha", [1.0, 0.5])
def test_a_grae_is_its_formula_on_ragged_groups(alpha):
    for seed in SEEDS:
        reward_N, group_N, _, valid_N = drawn(seed)
        groups, wanted_N = members(group_N, valid_N), np.zeros(len(reward_N))
        p = np.mean([reward_N[rows].mean() for rows in groups])  # each group once
        for rows in groups:
            mu = reward_N[rows].mean()
            base = (reward_N[rows] - mu) / (reward_N[rows].std(ddof=1) + 1e-6)
            own = (1 - p) * 0.5 * base / (1 - mu**0.5 + 1e-6) + p * 0.5 * base / (mu**0.5 + 1e-6)
            wanted_N[rows] = np.where(own > 0, own * min(1, p / alpha), own)
        result = asymmetric_advantage(reward_N, group_N, alpha=alpha, valid_N=valid_N)
        assert result.dtype == np.float32
        np.testing.assert_allclose(result, wanted_N, rtol=1e-4, atol=1e-5)
        assert np.abs(wanted_N).max() > 0.5


def test_a_grae_by_hand():
    # Means 1/4 and 1: m = 5/8. In the first group A = 0.75, -0.25 three times; the factor is
    # 3/8 / 2 / (1/2) + 5/8 / 2 / (1/2) = 1, and 5/8 / alpha where A > 0.
    reward_N, group_N = [1.0, 0.0, 0.0, 0.0, 1.0, 1.0], [0, 0, 0, 0, 1, 1]
    result = asymmetric_advantage(reward_N, group_N, scale="none")
    np.testing.assert_allclose(result, [0.75 * 5 / 8, -0.25, -0.25, -0.25, 0, 0], rtol=1e-5)
    result = asymmetric_advantage(reward_N, group_N, scale="none", alpha=0.5)
    np.testing.assert_allclose(result, [0.75, -0.25, -0.25, -0.25, 0, 0], rtol=1e-5)


def test_groups_count_alike_and_one_trajectory_alone_does_not_count():
    """The authors' code has a mean of 0 for a group of one, which makes all others seem harder."""
    reward_N, group_N = np.array([1.0, 0.0, 1.0]), np.array([0, 0, 5])
    result = asymmetric_advantage(reward_N, group_N, scale="none")
    pair = asymmetric_advantage(reward_N[:2], group_N[:2], scale="none")
    np.testing.assert_allclose(result, [*pair, 0.0], rtol=1e-6)


@pytest.mark.parametrize("scale", ["batch", "none", "group"])
def test_a_grae_keeps_the_sign_and_the_scale_of_its_base(scale):
    reward_N, group_N, _, valid_N = drawn(0)
    of = {"scale": scale, "clip": 1.2, "valid_N": valid_N}
    base_N = np.asarray(group_relative_advantage(reward_N, group_N, **of))
    result = np.asarray(asymmetric_advantage(reward_N, group_N, **of))
    np.testing.assert_array_equal(np.sign(result), np.sign(base_N))
    factor_N = result[base_N < 0] / base_N[base_N < 0]
    unscaled = asymmetric_advantage(reward_N, group_N, scale="none", valid_N=valid_N)
    plain_N = group_relative_advantage(reward_N, group_N, scale="none", valid_N=valid_N)
    wanted = np.asarray(unscaled)[base_N < 0] / np.asarray(plain_N)[base_N < 0]
    np.testing.assert_allclose(factor_N, wanted, rtol=1e-4)


def test_equal_rewards_at_either_end_are_exactly_zero():
    for reward in (0.0, 1.0):
        assert not asymmetric_advantage(np.full(6, reward), [0, 0, 0, 1, 1, 1]).any()


@pytest.mark.parametrize("mu", [0.0, 0.3, 1.0])
def test_canon_is_its_formula_on_ragged_groups_with_ties(mu):
    for seed in SEEDS:
        reward_N, group_N, metric_N, valid_N = drawn(seed)
        wanted_N = np.zeros(len(reward_N))
        for rows in members(group_N, valid_N):
            rows = sorted(rows, key=lambda n: metric_N[n])  # ties keep the order of the batch
            halves = rows[: len(rows) // 2], rows[len(rows) // 2 :]
            for half, other in (halves, halves[::-1]):
                across = reward_N[half] - reward_N[other].mean()
                within = reward_N[half] - reward_N[half].mean()
                wanted_N[half] = mu * across + (1 - mu) * within
        result = conditional_advantage(reward_N, group_N, metric_N, mu=mu, valid_N=valid_N)
        assert result.dtype == np.float32
        np.testing.assert_allclose(result, wanted_N, rtol=1e-5, atol=1e-6)
        assert np.abs(wanted_N).max() > 0.1


def test_canon_by_hand():
    # Sorted by the metric: rewards 4, 0 | 1, 2, 6, the upper half with the odd one.
    reward_N, metric_N = np.array([1.0, 4.0, 6.0, 0.0, 2.0]), np.array([5.0, 1, 9, 2, 5])
    across = conditional_advantage(reward_N, np.zeros(5, int), metric_N, mu=1.0)
    np.testing.assert_allclose(across, [1 - 2, 4 - 3, 6 - 2, 0 - 3, 2 - 2], atol=1e-6)
    within = conditional_advantage(reward_N, np.zeros(5, int), metric_N, mu=0.0)
    np.testing.assert_allclose(within, [1 - 3, 4 - 2, 6 - 3, 0 - 2, 2 - 3], atol=1e-6)


def test_between_equal_halves_canon_is_the_mean_baseline():
    reward_N, metric_N = np.array([1.0, 4.0, 6.0, 0.0]), np.array([3.0, 1.0, 2.0, 4.0])
    result = conditional_advantage(reward_N, np.zeros(4, int), metric_N, mu=0.5)
    np.testing.assert_allclose(result, reward_N - reward_N.mean(), atol=1e-6)


def test_a_metric_that_does_not_differ_cuts_by_the_order_of_the_batch():
    result = conditional_advantage([3.0, 1.0, 0.0], [0, 0, 0], [2.0, 2.0, 2.0], mu=1.0)
    np.testing.assert_allclose(result, [2.5, -2.0, -3.0], atol=1e-6)


def test_a_trajectory_alone_in_its_group_has_no_advantage():
    """The authors' code leaves it its reward."""
    result = conditional_advantage([3.0, 1.0, 1.0], [0, 1, 1], [1.0, 2.0, 3.0], mu=1.0)
    assert not np.any(result)
    alone = conditional_advantage(
        [3.0, 1.0], [0, 0], [1.0, 2.0], mu=1.0, valid_N=np.array([True, False])
    )
    assert not np.any(alone)


def test_equal_rewards_are_exactly_zero_whatever_their_metric():
    metric_N = np.arange(7.0)
    assert not conditional_advantage(np.full(7, 100.1), np.zeros(7, int), metric_N, mu=0.3).any()


def test_batches_of_both_may_be_vmapped():
    reward_BN, group_BN, metric_BN, valid_BN = map(np.stack, zip(*map(drawn, SEEDS), strict=True))
    asymmetric = jax.vmap(lambda r, g, v: asymmetric_advantage(r, g, valid_N=v))
    conditional = jax.vmap(lambda r, g, m, v: conditional_advantage(r, g, m, valid_N=v))
    for seed in SEEDS:
        reward_N, group_N, metric_N, valid_N = drawn(seed)
        np.testing.assert_allclose(
            asymmetric(reward_BN, group_BN, valid_BN)[seed],
            asymmetric_advantage(reward_N, group_N, valid_N=valid_N),
            rtol=1e-5,
            atol=1e-6,
        )
        np.testing.assert_allclose(
            conditional(reward_BN, group_BN, metric_BN, valid_BN)[seed],
            conditional_advantage(reward_N, group_N, metric_N, valid_N=valid_N),
            rtol=1e-5,
            atol=1e-6,
        )


def test_arrays_of_other_shapes_are_named():
    with pytest.raises(ValueError, match="reward_N, group_N, metric_N, valid_N; allowed"):
        conditional_advantage([1.0, 2.0], [0, 0], [1.0], mu=0.5)
    with pytest.raises(ValueError, match="scale: got 'std'; allowed"):
        asymmetric_advantage([1.0, 0.0], [0, 0], scale="std")
