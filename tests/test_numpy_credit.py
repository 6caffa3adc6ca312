"""The twin's advantages against values worked out by hand."""

import dataclasses

import numpy as np
import numpy_credit as credit
import numpy_twin as twin
import pytest

OWN = {
    **{"baseline": "mean", "discount": 1.0, "anchor": "state", "step_coef": 1.0, "adaptation": 0.3},
    **{"history": 2, "power": 1.0, "lam": 0.95, "bootstrap_truncated": False, "std_floor": 0.1},
    **{"implicit_coef": 0.05, "norm": "none", "success_above": 0.0, "pair_score": "mean"},
    **{"alpha": 1.0, "metric": "turns", "mu": 0.5, "progress_coef": 1.0, "grounding_coef": 0.5},
    "decay": 0.95,
}
OPTIONS = twin.Options(order=[], scale="none", advantage_clip=None, estimator=OWN)


def close(got, wanted):
    assert len(got) == len(wanted)
    for one, expected in zip(got, wanted, strict=True):
        np.testing.assert_allclose(one, expected, rtol=1e-10, atol=1e-12)


def replaced(options, **choices):
    """Other options; those of estimators among them."""
    own = {name: choices.pop(name) for name in OWN.keys() & choices}
    return dataclasses.replace(options, **choices, estimator=options.estimator | own)


def trajectory(turns, reward=0.0, group=0, **fields):
    """Of one segment; `turns` is its `turn_L`."""
    return twin.Trajectory([twin.Segment([0] * len(turns), turns)], reward, group, **fields)


def credited(trajectories, penalty=None, values=None, **choices):
    """Advantages per trajectory and segment; `penalty` of every sampled token."""
    pieces = twin.step_pieces(trajectories, range(9))
    sizes = [len(piece.position_A) for piece in pieces]
    penalty = np.zeros(sum(sizes)) if penalty is None else np.array(penalty)
    parts = np.split(penalty, np.cumsum(sizes)[:-1])
    options = replaced(OPTIONS, **choices)
    return credit.token_advantages(trajectories, pieces, parts, options, values)


def test_what_failed_and_the_last_one_left_of_a_group_are_not_learned_from():
    groups, failed = [0, 0, 1, 1, 2, 0, 3], [True, False, True, False, False, False, True]
    trajectories = [trajectory([], group=g, failed=f) for g, f in zip(groups, failed, strict=True)]
    kept = [False, True, False, False, False, True, False]
    assert credit.learnable(trajectories) == kept
    assert credit.learnable(trajectories, grouped=False) == [not f for f in failed]
    choices = [{}, {"baseline": "batch"}, {"advantage": "gigpo"}, {"advantage": "returns"}]
    wanted = [True, False, True, False]
    assert [credit.grouped(replaced(OPTIONS, **c)) for c in choices] == wanted


def test_the_baseline_of_the_whole_batch():
    advantage_N = credit.group_relative_advantages(
        [1, 2, 6, 50],
        [0, 1, 1, 0],
        [True, True, True, False],
        baseline="batch",
        scale="none",
        clip=None,
    )
    np.testing.assert_allclose(advantage_N, [-2, -1, 3, 0])


def test_rewards_to_go_by_hand():
    np.testing.assert_allclose(credit.rewards_to_go(np.array([1.0, 0, 4]), 0.5), [2, 2, 4])
    assert credit.rewards_to_go(np.zeros(0), 0.5).shape == (0,)


def test_generalized_advantages_by_hand():
    reward_J, value_J = np.array([1.0, 0.0, 8.0]), np.array([2.0, 4.0, 6.0])
    # Temporal differences: 1 + 4/2 - 2, 0 + 6/2 - 4, 8 - 6.
    result = credit.generalized_advantages(reward_J, value_J, discount=0.5, trace=0.5)
    np.testing.assert_allclose(result, [1 - 0.25 + 0.125, -1 + 0.5, 2])
    blind = credit.generalized_advantages(reward_J, np.zeros(3), discount=0.5, trace=1.0)
    np.testing.assert_allclose(blind, credit.rewards_to_go(reward_J, 0.5))


def test_all_are_standardized_as_one_and_bounded():
    values = [np.array([1.0, 3.0]), np.zeros(0), np.array([5.0])]
    close(credit.all_standardized(values, scale="batch", clip=None), [[-1, 0], [], [1]])
    close(credit.all_standardized(values, scale="batch", clip=0.5), [[-0.5, 0], [], [0.5]])
    close(credit.all_standardized(values, scale="none", clip=0.5), values)
    close(credit.all_standardized(values[1:2], scale="batch", clip=None), [[]])
    close(credit.all_standardized([np.full(2, 7.0)], scale="batch", clip=None), [[0, 0]])


def test_rewards_lie_at_the_ends_of_turns_in_whatever_segment_these_are():
    segments = [
        twin.Segment([0] * 6, [-1, 0, 0, -1, 2, 2]),
        twin.Segment([0] * 3, [-1, 1, -1]),
    ]
    given = twin.Trajectory(segments, 9.0, 0, turn_rewards=[1.0, 10.0, 100.0])
    other = trajectory([-1], group=0)
    own, _ = credited([given, other], advantage="returns")
    close(own, [[0, 111, 111, 0, 100, 100], [0, 110, 0]])
    own, _ = credited(
        [dataclasses.replace(given, turn_rewards=()), other], advantage="returns", discount=0.5
    )
    close(own, [[0, 9 / 16, 9 / 8, 0, 9 / 2, 9], [0, 9 / 4, 0]])
    # Penalties of turn 0, turn 2 and turn 1.
    own, _ = credited([given, other], [1, 2, 4, 8, 16], advantage="returns")
    close(own, [[0, 80, 81, 0, 88, 92], [0, 82, 0]])


def test_the_returns_of_a_batch_are_standardized_over_its_tokens():
    (first,), (second,) = credited(
        [trajectory([0, 0, 0], 1.0), trajectory([-1, 0], -3.0)], advantage="returns", scale="batch"
    )
    close([first, second], [[0.5, 0.5, 0.5], [0, -1.5]])


def test_generalized_advantages_read_the_values_of_sampled_tokens():
    values = [[np.array([90.0, 2.0, 90.0, 6.0])], [np.zeros(1)]]
    (own,), _ = credited(
        [trajectory([-1, 0, -1, 1], 8.0), trajectory([-1])],
        values=values,
        advantage="gae",
        discount=0.5,
        lam=0.5,
    )
    np.testing.assert_allclose(own, [0, 1 + 0.5, 0, 2])


def test_a_penalty_counts_before_the_groups_mean():
    trajectories = [trajectory([-1, 0, 0], 1.0), trajectory([-1, 0], 0.0)]
    (first,), (second,) = credited(trajectories, [0.25, 0.5, -0.25])
    np.testing.assert_allclose(first, [0, 0, 0])  # 1 - 0.75 and 0 + 0.25
    np.testing.assert_allclose(second, [0, 0])


# Two trajectories of group 0 that meet in state b, one of group 1 that is there too.
STATES = [["a", "b", "c"], ["a", "b"], ["a", "b", "b"]]
REWARDS = [[0.0, 1.0, 4.0], [0.0, 2.0], [3.0, 0.0, 5.0]]
GROUPS = [0, 0, 1]


def test_gigpo_by_hand():
    options = replaced(OPTIONS, step_coef=2.0, discount=0.5)
    # Totals 5 and 2. To go: 1.5, 3, 4; 1, 2; and of group 1: 4.25, 2.5, 5.
    wanted = [[1.5 + 0.5, 1.5 + 1, 1.5], [-1.5 - 0.5, -1.5 - 1], [0, -2.5, 2.5]]
    close(credit.gigpo(REWARDS, GROUPS, STATES, options), wanted)
    by_group = credit.gigpo(REWARDS, GROUPS, STATES, replaced(options, scale="group"))
    unit = 0.5**0.5  # the half distance of two over their deviation
    signs = [[3, 3, 1], [-3, -3], [0, -2, 2]]
    for one, sign in zip(by_group, signs, strict=True):
        np.testing.assert_allclose(one, unit * np.array(sign), rtol=1e-5)
    flat = np.concatenate([np.array(row) for row in wanted])
    together = credit.gigpo(REWARDS, GROUPS, STATES, replaced(options, scale="batch"))
    np.testing.assert_allclose(np.concatenate(together), (flat - flat.mean()) / flat.std(ddof=1))


def test_hgpo_by_hand():
    """State b: depth 0 of group 0 has to go 6, 2 and 4; depth 1, after a, only 6 and 2."""
    states, rewards = [["a", "b"], ["a", "b"], ["c", "b"]], [[0.0, 6.0], [0.0, 2.0], [0.0, 4.0]]
    options = replaced(OPTIONS, history=3, power=1.0)
    result = credit.hgpo(rewards, [0, 0, 0], states, options)
    # Depth 0 deviates by 2, -2, 0 and depth 1 by 2, -2: weights 2 and 3. c is alone: 0.
    close(result, [[2, 2], [-2, -2], [0, 0]])
    rewards[2][1] = 10.0  # depth 0 deviates by 0, -4, 4
    close(
        credit.hgpo(rewards, [0, 0, 0], states, options),
        [[2, (0 + 3 * 2) / 5], [-2, (2 * -4 - 3 * 2) / 5], [0, 4]],
    )
    even = replaced(options, power=0.0)
    assert credit.hgpo(rewards, [0, 0, 0], states, even)[1][1] == pytest.approx((-4 - 2) / 2)
    shallow = replaced(options, history=0)
    assert credit.hgpo(rewards, [0, 0, 0], states, shallow)[1][1] == pytest.approx(-4)
    scaled = replaced(options, scale="group")
    # Deviations: of 6, 2, 10 it is 4, of 6 and 2 it is 8^0.5.
    wanted = (2 * -4 / 4 - 3 * 2 / 8**0.5) / 5
    assert credit.hgpo(rewards, [0, 0, 0], states, scaled)[1][1] == pytest.approx(wanted, rel=1e-5)


def test_a_group_without_a_spread_is_left_out_of_the_weights():
    """Depth 1 is alone or equal, so depth 0 counts for all."""
    states, rewards = [["a", "b"], ["c", "b"]], [[0.0, 6.0], [0.0, 2.0]]
    options = replaced(OPTIONS, history=1)
    close(credit.hgpo(rewards, [0, 0], states, options), [[0, 2], [0, -2]])
    # Other groups and trajectories that are left out never meet.
    close(credit.hgpo(rewards, [0, 1], states, options), [[0, 0], [0, 0]])
    close(credit.hgpo([rewards[0], []], [0, 0], [states[0], []], options), [[0, 0], []])


def test_istar_by_hand():
    """Implicit rewards 0.5 (0.4 - 0.8) = -0.2, 0.4 and 0.1; the trajectories were paid 1 and 0."""
    trajectories = [trajectory([-1, 0, 0, 1], 1.0), trajectory([0], 0.0)]
    pieces, odds = twin.step_pieces(trajectories, range(9)), [[0.4, -0.8, 0.8], [0.2]]

    def istar(**choices):
        options = replaced(OPTIONS, advantage="istar", implicit_coef=0.5, step_coef=2.0, **choices)
        none = [np.zeros(3), np.zeros(1)]
        result = credit.token_advantages(trajectories, pieces, none, options, odds=odds)
        return [result[0][0][1:], result[1][0]]

    # Means 1/2 and 0.1: 1/2 + 2 (-0.3), 1/2 + 2 (0.3), and -1/2 + 0.
    close(istar(), [[-0.1, -0.1, 1.1], [-0.5]])
    # Over 0.4: -1/2, 1 and 1/4, less 5/8, -1/8 and 1/4; rewards less the other's.
    own = {"baseline": "leave_one_out", "norm": "batch_max"}
    for actual, wanted in zip(istar(**own), [[-1.25, -1.25, 3.25], [-1.0]], strict=True):
        np.testing.assert_allclose(actual, wanted, atol=1e-5)  # 0.4 + 1e-6


def test_a2tgpo_by_hand():
    """Gains at index 0 are 2, 4 and 0, at index 1 only 5; the last turns have none."""
    trajectories = [
        trajectory([-1, 0, 1, 2, 2], 3.0, turn_rewards=[2.0, 5.0, 9.0]),
        trajectory([-1, 0, 1], 1.0, turn_rewards=[4.0, 9.0]),
        trajectory([-1, 0, -1, 1], 2.0),
        trajectory([-1, 0, 1], 9.0, failed=True, turn_rewards=[90.0, 9.0]),
        trajectory([-1, 0, 1], 9.0, group=1, turn_rewards=[90.0, 9.0]),
    ]
    choices = {"advantage": "a2tgpo", "step_coef": 0.5, "discount": 0.5}
    own = [segments[0] for segments in credited(trajectories, **choices)]
    root = 2**0.5
    close(own[0], [0, 0.5 * (0 + 0.5 * 0) / root + 1, 1, 1, 1])
    close(own[1], [0, 0.5 * 2 - 1, -1])
    close(own[2], [0, 0.5 * -2 + 0, 0, 0])
    close(own[3], np.zeros(3))
    close(own[4], np.zeros(3))
    by_group = credited(trajectories, **choices, scale="group")
    unit = (2 / 3) ** 0.5  # the deviation of 3, 1 and 2, and half that of the gains
    wanted = [0, 0.5 / unit - 1 / unit, -1 / unit]
    np.testing.assert_allclose(by_group[1][0], wanted, rtol=1e-5)
    penalised = credited(trajectories, [0.0] * 4 + [1.5, 1.5] + [0.0] * 2, **choices)
    np.testing.assert_allclose(penalised[1][0][2], -3, rtol=1e-6)

    options = replaced(OPTIONS, advantage="a2tgpo", adaptation=0.2)
    scales = credit.clip_scales(trajectories, options)
    tilt = 0.2 * (2 / (1 + np.exp(-1 / unit)) - 1)
    for scale_K, wanted_K in zip(
        scales, [[1, 1, 1], [1 + tilt, 1], [1 - tilt, 1], [1, 1], [1, 1]], strict=True
    ):
        np.testing.assert_allclose(scale_K, wanted_K, rtol=1e-5)
    (flat_K, *_) = credit.clip_scales(trajectories, OPTIONS)
    np.testing.assert_array_equal(flat_K, 1.0)


@pytest.mark.parametrize("advantage", ["gigpo", "hgpo"])
def test_all_tokens_of_a_turn_have_its_advantage(advantage):
    trajectories = [
        trajectory([-1, 0, 0, -1, 1], 4.0, info={"states": ["a", "b"]}),
        trajectory([-1, 0, -1, 1], 2.0, info={"states": ["a", "c"]}),
        trajectory([-1, 0], np.nan, failed=True),
    ]
    (first,), (second,), (failed,) = credited(trajectories, advantage=advantage)
    episode = 1.0 if advantage == "gigpo" else 0.0
    np.testing.assert_allclose(first, [0, 1 + episode, 1 + episode, 0, episode])
    np.testing.assert_allclose(second, [0, -1 - episode, 0, -episode])
    np.testing.assert_allclose(failed, [0, 0])


def test_rae_is_the_reward_less_the_moving_average_before_it():
    """b: 0, 0.5 x 4 = 2, 0.5 x 2 + 0.5 x -2 = 0; what failed changes nothing."""
    rewards = [4.0, 9.0, -2.0, 1.0]
    batch = [trajectory([-1, 0], r, failed=i == 1) for i, r in enumerate(rewards)]
    found = credited(batch, advantage="rae", decay=0.5)
    close([each[0] for each in found], [[0, 4], [0, 0], [0, -4], [0, 1]])
