"""Roles in a sweep: advantages within a role, baselines of roles, and tokens of frozen roles."""

import dataclasses
import json

import jax
import learner_cases as cases
import numpy as np
import numpy_credit as twin
import pytest

from seeupo_jax.configuration.algorithm import Algorithm
from seeupo_jax.learner.batching import SegmentBatch, Shapes
from seeupo_jax.learner.credit.advantages import assign_credit
from seeupo_jax.learner.credit.credit_arrays import CreditArrays
from seeupo_jax.learner.credit.role_baselines import baselines_before, next_baselines
from seeupo_jax.learner.credit.role_rows import by_role
from seeupo_jax.learner.sweep import sweep
from seeupo_jax.rollout.resample import has_signal
from seeupo_jax.trajectories.roles import role_views, without_frozen
from seeupo_jax.types import CONTEXT, Trajectory

SHAPES = Shapes((64,), action=8, rows=4, trajectories=8)
ROLES = ("", "a", "b")


def played(*payoffs, reward=0.0, turns=4, group=0, seed=0):
    """Trajectories of two roles whose turns alternate; `a` won these payoffs of `b`."""
    rng = np.random.default_rng(seed)

    def of_role(number):
        own = [(turn, 2, 2) for turn in range(number, turns, 2)]
        return dataclasses.replace(cases.segment(rng, *own), role="ab"[number])

    return [
        Trajectory.of(
            (of_role(0), of_role(1)), reward, group, role_rewards={"a": payoff, "b": -payoff}
        )
        for payoff in payoffs
    ]


def credited(trajectories, roles=ROLES, baselines=None, **choices):
    """The advantage of each turn of each trajectory."""
    algorithm = Algorithm(**({"scale": "none"} | choices))
    rows = SegmentBatch.of(trajectories, grouped=algorithm.grouped)
    split = by_role(rows, trajectories, roles)
    arrays = CreditArrays(algorithm, SHAPES, *split, {}, baselines=baselines)
    advantage = assign_credit(arrays)[0]["advantage"]
    found = [[0.0] * trajectory.turns for trajectory in trajectories]
    for owner, turn_L, advantage_L in zip(rows.trajectory_S, rows.turn, advantage, strict=True):
        for turn in set(turn_L.tolist()) - {CONTEXT}:
            found[owner][turn] = advantage_L[turn_L == turn][-1]
    return found


def test_rewards_are_compared_within_a_role():
    """Of `a` 1, 0 and -1 with mean 0; of `b` the opposite; of the whole episode always 0."""
    batch = played(1.0, 0.0, -1.0)
    np.testing.assert_allclose(credited(batch), [[1, -1] * 2, [0, 0] * 2, [-1, 1] * 2])
    np.testing.assert_array_equal(credited(batch, roles=()), 0)
    assert has_signal(batch) and not has_signal(played(0.5, 0.5))


def test_all_roles_earn_the_reward_of_the_episode():
    """`a`: 3 and 1, of which the mean is 2; `b`: -1 and 1, of which it is 0."""
    batch = [*played(2.0, reward=1.0), *played(0.0, reward=1.0)]
    np.testing.assert_allclose(credited(batch), [[1, -1] * 2, [-1, 1] * 2])


def test_rae_has_a_baseline_for_each_role():
    """Decay 0.5. `a`: 2 - 0, then -2 - 1; then its baseline is 0.5 x 1 - 0.5 x 2 = -0.5."""
    batch = [*played(2.0), *played(-2.0, group=1)]
    rae = {"advantage": "rae", "estimator": {"decay": 0.5}}
    np.testing.assert_allclose(credited(batch, **rae), [[2, -2] * 2, [-3, 3] * 2])
    after = next_baselines(batch, ROLES, None, 0.5)
    assert after == {"a": -0.5, "b": 0.5}
    later = credited(played(1.0), baselines=after, **rae)
    np.testing.assert_allclose(later, [[1.5, -1.5] * 2])


def test_baselines_are_the_twins_and_a_resumed_run_has_them_bit_for_bit():
    rng = np.random.default_rng(1)
    payoffs = rng.normal(size=9).tolist()
    batches = [played(*payoffs[:4]), played(*payoffs[4:])]
    state, found = None, []
    for batch in batches:
        before_N, _ = baselines_before(role_views(batch, ROLES), state, 0.9)
        found += (np.array(payoffs[len(found) : len(found) + len(batch)]) - before_N[1::3]).tolist()
        state = json.loads(json.dumps(next_baselines(batch, ROLES, state, 0.9)))
    np.testing.assert_allclose(found, twin.moving_average_advantages(payoffs, 0.9), rtol=1e-12)
    assert state == next_baselines(played(*payoffs), ROLES, None, 0.9)


@pytest.mark.parametrize(
    "choices",
    [
        {"advantage": "gigpo", "estimator": {"anchor": "turn", "discount": 0.9}},
        {"advantage": "returns", "estimator": {"discount": 0.9}},
        {"advantage": "grae", "scale": "group"},
    ],
)
def test_a_roles_advantages_are_those_of_episodes_that_it_plays_alone(choices):
    batch = [*played(2.0, 0.5, seed=3), *played(-1.0, 0.25, turns=3, group=1, seed=4)]
    both = credited(batch, **choices)
    for number, role in ((1, "a"), (2, "b")):
        alone = [
            dataclasses.replace(
                view, segments=tuple(dataclasses.replace(s, role="") for s in view.segments)
            )
            for view in role_views(batch, ROLES)[number::3]
        ]
        wanted = credited(alone, roles=(), **choices)
        own = [turns[number - 1 :: 2] for turns in both]
        for one, expected in zip(own, wanted, strict=True):
            np.testing.assert_allclose(one, expected, rtol=1e-5, atol=1e-6, err_msg=role)


def swept(trajectories, roles):
    made = dataclasses.replace(cases.learner(scale="none", kl_coef=0.0), roles=roles)
    train = cases.new_state(made.optimizer)
    return sweep(made, train, cases.policy()[1], trajectories, iteration=1)


def test_frozen_tokens_have_no_gradient():
    """An update with a frozen role's conversations is that without them."""
    whole = played(1.0, 0.0, -1.0)
    frozen = [without_frozen(t, {"b"}) for t in whole]
    assert [t.turns for t in frozen] == [2, 2, 2]
    assert all(not (t.segments[1].turn_L >= 0).any() for t in frozen)
    without = [dataclasses.replace(t, segments=t.segments[:1]) for t in frozen]
    found, wanted = (swept(batch, ("", "a")) for batch in (frozen, without))
    for one, other in zip(
        jax.tree.leaves(found.train.params), jax.tree.leaves(wanted.train.params), strict=True
    ):
        np.testing.assert_array_equal(one, other)
    moved = zip(
        jax.tree.leaves(found.train.params), jax.tree.leaves(cases.policy()[1]), strict=True
    )
    assert max(np.abs(np.asarray(x) - y).max() for x, y in moved) > 1e-4


def test_a_frozen_turns_reward_is_the_trained_turns_before_it():
    (whole,) = played(1.0)
    table = dataclasses.replace(
        whole.reward_table, total=whole.reward_table.total._replace(turns=(1.0, 2.0, 4.0, 8.0))
    )
    whole = dataclasses.replace(whole, reward_table=table, info={"states": [*"wxyz"]})
    for frozen, rewards, states in (("b", (3.0, 12.0), ["w", "y"]), ("a", (7.0, 8.0), ["x", "z"])):
        left = without_frozen(whole, {frozen})
        assert left.turn_rewards == rewards and left.info["states"] == states


def test_turns_of_both_roles_are_updated_in_reverse_order():
    result = swept(played(1.0, 0.0, -1.0), ROLES)
    assert result.metrics["sweep/turns"] == 4
    weights = np.array([stats.weight_K for stats in result.stats])
    np.testing.assert_allclose(weights[0, -1], -1)  # of `b`, before any ratio
    assert (np.sign(weights[0]) == [1, -1, 1, -1]).all()
