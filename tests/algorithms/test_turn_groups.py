"""Credit of single turns against hand-worked values and plain loops over groups."""

from functools import partial

import jax
import numpy as np
import pytest

from seeupo_jax.algorithms.estimators.gigpo import gigpo_advantage
from seeupo_jax.algorithms.estimators.hgpo import hgpo_advantage
from seeupo_jax.algorithms.estimators.matchtir import matchtir_advantage

SCALES = ("group", "none", "batch")
ROWS, COLUMNS = 15, 6  # of every batch here, so that little is compiled
EVERY = pytest.mark.parametrize("scale", SCALES)


def padded(estimator, reward_NK, group_N, state_NK, valid_N=None, **options):
    """What an estimator says of a batch that rows and columns of nothing are added to."""
    rows, columns = np.shape(reward_NK)
    space = ((0, ROWS - rows), (0, COLUMNS - columns))
    valid_N = np.ones(rows, bool) if valid_N is None else valid_N
    reward_NK = np.pad(np.array(reward_NK, float), space, constant_values=np.nan)
    result = estimator(
        np.float32(reward_NK),
        np.pad(np.array(group_N), space[0]),
        np.pad(np.array(state_NK), space, constant_values=-1),
        valid_N=np.pad(valid_N, space[0]),
        reward_rest_NK=reward_NK - np.float32(reward_NK),
        **{"clip": 1.5} | options,
    )
    assert result.dtype == np.float32 and result.shape == (ROWS, COLUMNS)
    return np.asarray(result[:rows, :columns])


def of_indices(reward_NK, group_N, state_NK, **options):
    """MatchTIR's, which reads of states only whether there is such a turn."""
    return matchtir_advantage(reward_NK, group_N, state_NK >= 0, **options)


gigpo, hgpo = partial(padded, gigpo_advantage), partial(padded, hgpo_advantage)
matchtir = partial(padded, of_indices)
ESTIMATORS = {
    "gigpo": partial(gigpo, discount=0.9, step_coef=0.7),
    "hgpo": partial(hgpo, discount=0.9, history=2, power=1.5),
    "matchtir": partial(matchtir, discount=0.9),
}
BOTH = pytest.mark.parametrize("estimator", ESTIMATORS.values(), ids=ESTIMATORS.keys())


def ragged(seed):
    """Five tasks of one to five trajectories in mixed rows, with 0 to 6 turns in three states."""
    rng = np.random.default_rng(seed)
    group_N = rng.permutation(np.repeat([4, 0, 9, 2, 7], [1, 2, 3, 4, 5]))
    count_N = rng.integers(0, 7, group_N.size)
    there_NK = np.arange(6) < count_N[:, None]
    state_NK = np.where(there_NK, rng.integers(0, 3, there_NK.shape), -1)
    reward_NK = np.where(there_NK, rng.integers(-1, 3, there_NK.shape) * 1.25, 0.0)
    return reward_NK, group_N, state_NK, rng.random(group_N.size) < 0.8


def returns(reward_NK, state_NK, discount):
    """Discounted reward from each turn on, by its definition."""
    return {
        (n, t): sum(discount ** (u - t) * reward_NK[n, u] for u in range(t, turns))
        for n, turns in enumerate((state_NK >= 0).sum(axis=1))
        for t in range(turns)
    }


def relative(value, keys, scale):
    """Value of each member less the mean of those with the same key; alone: 0."""
    result = {}
    for member in keys:
        likes = [value[other] for other in keys if keys[other] == keys[member]]
        result[member] = value[member] - np.mean(likes)
        if scale == "group":
            result[member] /= np.std(likes, ddof=1) + 1e-6 if len(likes) > 1 else 1.0
    return result


def table(advantage, shape, scale, clip):
    """Turns as an array, standardised for `batch`."""
    numbers = np.array(list(advantage.values()))
    if scale == "batch":
        numbers = np.clip((numbers - numbers.mean()) / numbers.std(ddof=1), -clip, clip)
    advantage_NK = np.zeros(shape)
    for (n, t), number in zip(advantage, numbers, strict=True):
        advantage_NK[n, t] = number
    return advantage_NK


def gigpo_twin(reward_NK, group_N, state_NK, valid_N, scale):
    value = returns(reward_NK, state_NK, 0.9)
    anchors = {(n, t): (group_N[n], state_NK[n, t]) for n, t in value if valid_N[n]}
    step = relative(value, anchors, scale)
    tasks = {n: group_N[n] for n in np.flatnonzero(valid_N)}
    episode = relative(dict(enumerate(reward_NK.sum(axis=1))), tasks, scale)
    joint = {(n, t): episode[n] + 0.7 * step[n, t] for n, t in anchors}
    return table(joint, state_NK.shape, scale, 1.5)


def matchtir_twin(reward_NK, group_N, state_NK, valid_N, scale):
    value = returns(reward_NK, state_NK, 0.9)
    turn = relative(value, {(n, t): (group_N[n], t) for n, t in value if valid_N[n]}, scale)
    tasks = {n: group_N[n] for n in np.flatnonzero(valid_N)}
    whole = relative(dict(enumerate(reward_NK.sum(axis=1))), tasks, scale)
    half = {(n, t): (whole[n] + own) / 2 for (n, t), own in turn.items()}
    return table(half, state_NK.shape, scale, 1.5)


def hgpo_twin(reward_NK, group_N, state_NK, valid_N, scale):
    value = returns(reward_NK, state_NK, 0.9)
    turns = [(n, t) for n, t in value if valid_N[n]]
    weighted, weight = dict.fromkeys(turns, 0.0), dict.fromkeys(turns, 0.0)
    for k in range(3):
        keys = {(n, t): (group_N[n], *state_NK[n, t - k : t + 1]) for n, t in turns if t - k >= 0}
        level = relative(value, keys, scale)
        for turn, key in keys.items():
            if len({value[other] for other in keys if keys[other] == key}) > 1:
                weighted[turn] += (k + 2) ** 1.5 * level[turn]
                weight[turn] += (k + 2) ** 1.5
    mean = {turn: weighted[turn] / max(weight[turn], 1.0) for turn in turns}
    return table(mean, state_NK.shape, scale, 1.5)


def test_an_episode_and_its_turns_add_up():
    # Totals 1 and 0: +-1/2. From state 7 on, discounted: 1/2 and 0, +-1/4; 8 and 9 are alone.
    reward_NK, state_NK = np.array([[0.0, 1.0], [0.0, 0.0]]), np.array([[7, 8], [7, 9]])
    options = {"discount": 0.5, "step_coef": 2.0, "scale": "none"}
    result = gigpo(reward_NK, np.array([3, 3]), state_NK, **options)
    np.testing.assert_allclose(result, [[1.0, 0.5], [-1.0, -0.5]], atol=1e-6)


def test_group_scale_divides_both_parts_by_the_deviation_of_their_own_group():
    # The episode's rewards spread over 10, those from the second turn on over 1.
    reward_NK = np.array([[10.0, 0.0], [0.0, 0.0], [0.0, 1.0]])
    state_NK = np.array([[1, 5], [2, 6], [3, 5]])
    result = gigpo(reward_NK, np.zeros(3, int), state_NK)
    episode_N = (np.array([10, 0, 1]) - 11 / 3) / np.std([10, 0, 1], ddof=1)
    step_NK = np.array([[0, -1], [0, 0], [0, 1]]) * 0.5**0.5
    np.testing.assert_allclose(result, episode_N[:, None] + step_NK, atol=1e-5)


def test_a_turn_alone_at_its_index_has_no_advantage_of_its_own():
    # Totals 7 and 2, to go 3, 4 and 1.5, 1: +-2^-0.5 each. Only the first has a third turn, whose
    # reward to go, 4, the authors' code has in the place of 0.
    reward_NK = np.array([[1.0, 2.0, 4.0], [1.0, 1.0, 9.0]])
    state_NK = np.array([[0, 0, 0], [0, 0, -1]])
    result = matchtir(reward_NK, np.array([3, 3]), state_NK, discount=0.5)
    unit = 0.5**0.5
    np.testing.assert_allclose(result, [[unit, unit, unit / 2], [-unit, -unit, 0]], rtol=1e-5)


def test_matchtir_is_half_of_gigpo_with_the_index_as_state():
    reward_NK, group_N, state_NK, valid_N = ragged(3)
    index_NK = np.where(state_NK >= 0, np.arange(6), -1)
    of = {"discount": 0.9, "scale": "group", "valid_N": valid_N}
    twice = 2 * matchtir(reward_NK, group_N, state_NK, **of)
    np.testing.assert_array_equal(twice, gigpo(reward_NK, group_N, index_NK, **of))


def test_turns_of_one_trajectory_that_return_to_a_state_are_compared():
    result = gigpo(np.array([[1.0, 0.0, 0.5]]), np.array([0]), np.array([[4, 4, 4]]), scale="none")
    np.testing.assert_allclose(result, [[1.5 - 2.5 / 3, 0.5 - 2.5 / 3, 0.5 - 2.5 / 3]], atol=1e-6)


def test_a_state_of_another_task_is_another_state():
    reward_NK, state_NK = np.array([[1.0], [0.0]]), np.array([[4], [4]])
    for estimator in (gigpo, hgpo):
        assert not estimator(reward_NK, np.array([0, 1]), state_NK).any()
        assert np.asarray(estimator(reward_NK, np.array([0, 0]), state_NK)).all()


def test_deeper_groups_share_more_of_the_past_and_weigh_more():
    # Second turn, state 5: {1, 0, 0} in group 0; after state 1 {1, 0} in group 1, after 2 alone.
    reward_NK = np.array([[0.0, 1.0], [0.0, 0.0], [0.0, 0.0]])
    state_NK = np.array([[1, 5], [1, 5], [2, 5]])
    for power, deep in ((1.0, 3 / 5), (0.0, 1 / 2), (2.0, 9 / 13)):
        result = hgpo(reward_NK, np.zeros(3, int), state_NK, history=2, power=power, scale="none")
        first, second = (1 - deep) * 2 / 3 + deep / 2, -(1 - deep) / 3 - deep / 2
        expected = [[0.5, first], [-0.5, second], [0.0, -1 / 3]]
        np.testing.assert_allclose(result, expected, atol=1e-6)


def test_groups_of_no_one_and_two_states_before_weigh_two_three_and_four():
    # Third turn, state 7: {8, 0, 1, 3}; after 5 {8, 0, 1}; after 1 and 5 {8, 0}.
    state_NK = np.array([[1, 5, 7], [1, 5, 7], [2, 5, 7], [3, 4, 7]])
    reward_NK = np.array([[0, 0, 8], [0, 0, 0], [0, 0, 1], [0, 0, 3]], float)
    result = hgpo(reward_NK, np.zeros(4, int), state_NK, history=2, scale="none")
    expected = [(2 * 5 + 3 * 5 + 4 * 4) / 9, -(2 * 3 + 3 * 3 + 4 * 4) / 9, -2, 0]
    np.testing.assert_allclose(result[:, 2], expected, atol=1e-6)


def test_a_group_of_equal_returns_has_no_weight():
    # After state 1 both earned 100.1: what is left is group 0, {100.1, 100.1, 0}.
    reward_NK = np.array([[0.0, 100.1], [0.0, 100.1], [0.0, 0.0]])
    state_NK = np.array([[1, 5], [1, 5], [2, 5]])
    result = hgpo(reward_NK, np.zeros(3, int), state_NK, history=2, scale="none")
    expected = [[0.0, 100.1 / 3], [0.0, 100.1 / 3], [0.0, -200.2 / 3]]
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-4)


def test_a_return_that_is_the_mean_of_its_group_keeps_that_group():
    # Group 0: {0, 2, 1, 9}; group 1, after state 1: {0, 2, 1}, where the third is the mean.
    state_NK = np.array([[1, 5], [1, 5], [1, 5], [2, 5]])
    reward_NK = np.array([[0.0, 0.0], [0.0, 2.0], [0.0, 1.0], [0.0, 9.0]])
    result = hgpo(reward_NK, np.zeros(4, int), state_NK, history=2, scale="none")
    np.testing.assert_allclose(result[2, 1], (2 * (1 - 3) + 3 * 0) / 5, atol=1e-6)


def test_without_history_hgpo_is_the_turns_part_of_gigpo():
    reward_NK, group_N, state_NK, valid_N = ragged(0)
    arrays = {"scale": "none", "valid_N": valid_N, "discount": 0.9}
    with_step, without = (
        gigpo(reward_NK, group_N, state_NK, step_coef=c, **arrays) for c in (1.0, 0.0)
    )
    result = hgpo(reward_NK, group_N, state_NK, history=0, **arrays)
    np.testing.assert_allclose(result, with_step - without, atol=1e-5)


def test_a_history_longer_than_the_trajectories_adds_nothing():
    reward_NK, state_NK = np.array([[0.0, 1.0], [0.0, 3.0], [0.0, 0.0]]), np.full((3, 2), 4)
    state_NK[2, 0] = 5
    results = [
        hgpo(reward_NK, np.zeros(3, int), state_NK, history=h, scale="none") for h in (0, 2, 60)
    ]
    assert (results[0] != results[1]).any()
    np.testing.assert_array_equal(results[1], results[2])


@pytest.mark.sampled(3)
@EVERY
@pytest.mark.parametrize("name", ESTIMATORS)
def test_ragged_tasks_agree_with_plain_loops(name, scale):
    loops = {"gigpo": gigpo_twin, "hgpo": hgpo_twin, "matchtir": matchtir_twin}[name]
    for seed in range(4):
        reward_NK, group_N, state_NK, valid_N = ragged(seed)
        expected = loops(reward_NK, group_N, state_NK, valid_N, scale)
        result = ESTIMATORS[name](reward_NK, group_N, state_NK, scale=scale, valid_N=valid_N)
        np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-5)
        assert np.abs(expected).max() > 1.0


@EVERY
@BOTH
def test_the_size_of_rewards_has_no_bound_where_they_are_scaled(estimator, scale):
    reward_NK, group_N, state_NK, valid_N = ragged(4)
    of = partial(estimator, scale=scale, valid_N=valid_N)
    plain = of(reward_NK, group_N, state_NK)
    large = of(reward_NK * 2.0**100, group_N, state_NK)  # 1.3e30
    large = large / 2.0**100 if scale == "none" else large
    np.testing.assert_allclose(large, plain, rtol=1e-5, atol=1e-5)
    assert np.abs(large).max() > 1.0


@EVERY
@BOTH
def test_what_is_not_there_gets_zero_and_moves_nobody(estimator, scale):
    reward_NK, group_N, state_NK, valid_N = ragged(5)
    result = np.asarray(estimator(reward_NK, group_N, state_NK, scale=scale, valid_N=valid_N))
    there_NK = (state_NK >= 0) & valid_N[:, None]
    assert not result[~there_NK].any() and result[there_NK].any()
    dirty_NK = np.where(there_NK, reward_NK, np.nan)
    other_NK = np.where(valid_N[:, None], np.where(state_NK < 0, -7, state_NK), 1)
    moved = estimator(dirty_NK, group_N, other_NK, scale=scale, valid_N=valid_N)
    np.testing.assert_array_equal(moved, result)


@EVERY
@BOTH
def test_equal_rewards_are_exactly_zero(estimator, scale):
    # Seven failures after as many turns each; every episode as long, so that totals are equal too.
    reward_NK = np.concatenate([np.zeros((7, 2)), np.full((7, 1), 100.1)], axis=1)
    state_NK = np.random.default_rng(0).integers(0, 2, (7, 3)) + 2 * np.arange(3)
    assert not estimator(reward_NK, np.zeros(7, int), state_NK, scale=scale).any()


@EVERY
@pytest.mark.parametrize(
    "pay", [[2 / 3, 1 / 2, 1, 1 / 3, 0.6, 0.8], [12.5, 33.3, 7.1, 25.9, 18.4, 40.2]]
)
def test_equal_sums_of_other_rewards_are_exactly_zero(pay, scale):
    # Totals are 3.9 and 137.4, whatever the order and in one reward; in float32 some are 1 ulp off.
    rng = np.random.default_rng(0)
    rows = [rng.permutation(pay) for _ in range(14)]
    reward_NK, group_N = np.array([*rows, [0, 0, sum(pay), 0, 0, 0]]), np.zeros(15, int)
    assert len(set(np.float32(reward_NK).sum(axis=1))) > 1
    state_NK = np.arange(90).reshape(15, 6)
    state_NK[:, 0] = 0  # the one state that turns begin from together
    for estimator in (gigpo, hgpo):
        assert not estimator(reward_NK, group_N, state_NK, discount=1.0, scale=scale).any()
    # Later turns of MatchTIR are compared by index, where rewards to go differ.
    first_N = matchtir(reward_NK, group_N, state_NK, discount=1.0, scale="group")[:, 0]
    assert not first_N.any()


@EVERY
def test_equal_discounted_sums_of_other_rewards_are_exactly_zero(scale):
    # One reward of 100.1 x 0.9^(5 - t) in turn t: 100.1 x 0.9^5 from the first turn on.
    turn_N = np.arange(15) % 6
    reward_NK = (np.arange(6) == turn_N[:, None]) * 100.1 * 0.9 ** (5 - turn_N[:, None])
    state_NK = np.arange(90).reshape(15, 6)
    state_NK[:, 0] = 0
    assert not hgpo(reward_NK, np.zeros(15, int), state_NK, discount=0.9, scale=scale).any()


@pytest.mark.parametrize("name", ["gigpo", "matchtir"])
def test_sums_that_differ_by_more_than_rounding_keep_their_advantage(name):
    # Totals 3.9 and 3.9001.
    rng = np.random.default_rng(0)
    reward_NK = np.stack([rng.permutation([2 / 3, 1 / 2, 1, 1 / 3, 0.6, 0.8]) for _ in range(15)])
    reward_NK[:7, 0] += 1e-4
    group_N, state_NK = np.zeros(15, int), np.arange(90).reshape(15, 6)
    state_NK[:, 0] = 0
    loops = {"gigpo": gigpo_twin, "matchtir": matchtir_twin}[name]
    expected = loops(reward_NK, group_N, state_NK, np.ones(15, bool), "group")
    result = ESTIMATORS[name](reward_NK, group_N, state_NK)
    np.testing.assert_allclose(result, expected, atol=0.02)


def long(estimator, reward_NK, **options):
    """What an estimator says of one task's turns, each in the state of its index."""
    reward_NK = np.array(reward_NK, float)
    state_NK = np.broadcast_to(np.arange(reward_NK.shape[1]), reward_NK.shape)
    rest = {"reward_rest_NK": reward_NK - np.float32(reward_NK)}
    group_N = np.zeros(len(reward_NK), int)
    return np.asarray(estimator(np.float32(reward_NK), group_N, state_NK, **rest, **options))


@pytest.mark.parametrize(
    "estimator, discount, pay, last, first",
    [
        # To go from the first turn on: 0.9^49 x 0.1 = 5.73e-4 and 0.95^49 x 1e-3 = 8.10e-5 more,
        # of 99.5 and 18.5. In float32 the authors' code has 0.711 and 1.401.
        (of_indices, 0.9, 10.0, 10.1, 0.70623),
        (gigpo_advantage, 0.95, 1.0, 1.001, 1.40108),
    ],
    ids=["matchtir", "gigpo"],
)
def test_a_last_reward_of_fifty_counts_at_the_first_turn(estimator, discount, pay, last, first):
    reward_NK = np.full((2, 50), pay)
    reward_NK[1, -1] = last
    result = long(estimator, reward_NK, discount=discount)[:, 0]
    both = [(last - pay) * discount**49, last - pay]  # of the turn, and of the trajectory
    by_hand = sum(d / 2 / (d / 2**0.5 + 1e-6) for d in both)
    by_hand /= 2 if estimator is of_indices else 1
    np.testing.assert_allclose(by_hand, first, rtol=1e-5)
    np.testing.assert_allclose(result, [-by_hand, by_hand], rtol=1e-5)


@pytest.mark.parametrize("formula", [gigpo_advantage, hgpo_advantage, of_indices])
def test_fifty_rewards_in_another_order_are_exactly_zero(formula):
    rng = np.random.default_rng(1)
    pay = 100 * rng.random(49)
    reward_NK = np.stack([np.append(rng.permutation(pay), 7.7) for _ in range(6)])
    result = long(formula, reward_NK, discount=1.0, scale="group")
    assert len({*np.float32(reward_NK).sum(axis=1)}) > 1
    assert not result[:, 0].any() and result[:, 1].any()


@BOTH
def test_ids_are_only_names_and_rows_have_no_order(estimator):
    reward_NK, group_N, state_NK, valid_N = ragged(6)
    result = np.asarray(estimator(reward_NK, group_N, state_NK, valid_N=valid_N))
    names = np.array([10**9, 7, 2**31 - 1, -1])  # the last for "none"
    order_N = np.random.default_rng(0).permutation(group_N.size)
    renamed = estimator(
        reward_NK[order_N],
        -(10**8) * group_N[order_N],
        names[state_NK[order_N]],
        valid_N=valid_N[order_N],
    )
    np.testing.assert_allclose(renamed, result[order_N], rtol=1e-4, atol=1e-5)


def test_batches_may_be_vmapped():
    batches = [ragged(seed) for seed in (1, 2)]
    estimate = partial(hgpo_advantage, scale="batch", clip=1.5)
    mapped = jax.vmap(lambda r, g, s, v: estimate(r, g, s, valid_N=v))
    result = mapped(*(np.stack(x) for x in zip(*batches, strict=True)))
    for row, (reward_NK, group_N, state_NK, valid_N) in zip(result, batches, strict=True):
        alone = estimate(reward_NK, group_N, state_NK, valid_N=valid_N)
        np.testing.assert_allclose(row, alone, rtol=1e-5, atol=1e-6)


def test_user_mistakes_are_named_with_what_is_allowed():
    reward_NK, group_N, state_NK = np.zeros((2, 3)), np.zeros(2, int), np.zeros((2, 3), int)
    for estimator in (gigpo_advantage, hgpo_advantage):
        with pytest.raises(ValueError, match="scale: got 'std'; allowed: group, none, batch"):
            estimator(reward_NK, group_N, state_NK, scale="std")
        with pytest.raises(
            ValueError, match=r"\(2, 2\) but expected \(2, 3\).*state_NK, reward_rest_NK: \[N, K\]"
        ):
            estimator(reward_NK, group_N, state_NK[:, :2])
        with pytest.raises(ValueError, match=r"\(1,\) but expected \(2\).*group_N, valid_N: \[N\]"):
            estimator(reward_NK, group_N[:1], state_NK)
        with pytest.raises(ValueError, match="clip: got 0.0; allowed: a number > 0, or None"):
            estimator(reward_NK, group_N, state_NK, clip=0.0)
    with pytest.raises(ValueError, match="history: got -1; allowed: an integer >= 0"):
        hgpo_advantage(reward_NK, group_N, state_NK, history=-1)
