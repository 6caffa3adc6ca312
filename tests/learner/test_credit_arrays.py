"""What estimators may ask for: anchors, metrics and limits of ragged trajectories."""

import dataclasses

import learner_cases as cases
import numpy as np
import pytest
from stored_fields import with_fields

from seeupo_jax.configuration.algorithm import Algorithm
from seeupo_jax.learner.batching import SegmentBatch, Shapes
from seeupo_jax.learner.credit.advantages import assign_credit
from seeupo_jax.learner.credit.credit_arrays import CreditArrays
from seeupo_jax.types import Trajectory

SHAPES = Shapes((32,), action=16, rows=4, trajectories=9, turns=5)
TURNS = [4, 2, 4, 1, 0, 3, 3, 3]  # the fifth failed


def arrays(**choices):
    algorithm, trajectories = Algorithm(**choices), cases.ragged()
    trajectories[2] = dataclasses.replace(trajectories[2], stop="max_turns")
    trajectories[4] = dataclasses.replace(trajectories[4], info={"states": ["a"]})
    trajectories[5] = dataclasses.replace(trajectories[5], stop="max_tokens")
    rows = SegmentBatch.of(trajectories)
    # The entropy of a token is its turn plus a tenth of its place.
    entropy = [np.where(t >= 0, t + 0.1 * np.arange(len(t)), np.nan) for t in rows.turn]
    return CreditArrays(algorithm, SHAPES, rows, trajectories, {"entropy": entropy})


@pytest.mark.parametrize("anchor", ["turn", "task"])
def test_turns_of_an_index_or_of_a_task_have_one_anchor(anchor):
    batch = arrays(advantage="gigpo", estimator={"anchor": anchor})
    for own_K, turns in zip(batch.state_NK, TURNS, strict=True):
        there = list(range(turns)) if anchor == "turn" else [0] * turns
        assert own_K.tolist() == there + [-1] * (5 - turns)
    assert batch.state_NK.dtype == np.int32


def test_states_are_the_anchors_unless_it_is_said():
    state_NK = arrays(advantage="gigpo").state_NK
    assert len(np.unique(state_NK)) > 10 and (state_NK >= 0).sum(axis=1).tolist() == TURNS


def test_a_trajectory_that_a_limit_ended_is_truncated():
    assert np.flatnonzero(arrays().truncated_N).tolist() == [2, 5]


def test_metrics_are_of_turns_tokens_and_their_entropy():
    def metric_N(name):
        return arrays(advantage="canon", estimator={"metric": name}).metric_N

    assert metric_N("turns").tolist() == TURNS
    assert metric_N("tokens").tolist() == [10, 3, 11, 4, 0, 6, 7, 7]
    # The second: tokens at 5, 9 and 10 of turns 0, 1 and 1. The third has two segments.
    entropy_N = metric_N("entropy")
    assert entropy_N[1] == pytest.approx((0.5 + 1.9 + 2.0) / 3)
    first, second = [4, 5, 7, 8, 9, 10], [6, 7, 10, 11, 12]
    wanted = 2 * 0 + 4 * 1 + 2 * 2 + 3 * 3 + 0.1 * sum(first + second)
    assert entropy_N[2] == pytest.approx(wanted / 11)
    assert entropy_N[4] == 0 and entropy_N.dtype == np.float32


def test_a_token_without_an_entropy_is_not_one_of_entropy_0():
    batch = arrays(advantage="canon", estimator={"metric": "entropy"})
    batch._per_token["entropy"][1][9] = np.nan  # of the second's three, at 5, 9 and 10
    assert batch.metric_N[1] == pytest.approx((0.5 + 2.0) / 2)


def test_what_is_not_learned_from_is_sampled_all_the_same():
    """By tokens and entropies canon compares actions, and by implicit rewards istar, as a whole."""
    whole = {
        name: arrays(advantage="canon", estimator={"metric": name})
        for name in ("tokens", "entropy")
    }
    rows = whole["tokens"].rows
    scored = {
        "old_logp": [np.full(len(t), -1.0) for t in rows.turn],
        "scorer_logp": [np.where(t >= 0, -1.0 + np.arange(len(t)), -1.0) for t in rows.turn],
    }
    masked = rows.without([t == 0 for t in rows.turn])
    for before in whole.values():
        given = before.trajectories, before._per_token | scored
        every, fewer = (
            CreditArrays(before.algorithm, SHAPES, each, *given) for each in (rows, masked)
        )
        np.testing.assert_array_equal(fewer.metric_N, before.metric_N)
        every, fewer = (
            CreditArrays(Algorithm(advantage="istar"), SHAPES, each, *given)
            for each in (rows, masked)
        )
        np.testing.assert_array_equal(fewer.implicit_NK, every.implicit_NK)
        assert np.count_nonzero(every.implicit_NK[:, 0]) == 7


@pytest.mark.parametrize("advantage", ["gigpo", "hgpo", "matchtir"])
def test_turns_of_equal_sums_are_alike_though_float32_rounds_their_rewards(advantage):
    # 137.4 in one turn or in six, which float32 takes for two sums 1.5e-5 apart.
    pay = np.array([12.5, 33.3, 7.1, 25.9, 18.4, 40.2])
    assert np.float32(pay).astype(float).sum() != np.float32(137.4)
    segment = cases.segment(np.random.default_rng(0), *((turn, 1, 1) for turn in range(6)))
    trajectories = [
        Trajectory.of((segment,), 137.4, 0, turn_rewards=tuple(own), info={"states": [*"abcdef"]})
        for own in (pay, np.eye(6)[5] * 137.4)
    ]
    rows = SegmentBatch.of(trajectories)
    algorithm = Algorithm(advantage=advantage, scale="group", estimator={"discount": 1.0})
    credit, _ = assign_credit(CreditArrays(algorithm, SHAPES, rows, trajectories, {}))
    for row in range(2):
        first_L = rows.turn[row] == 0
        assert first_L.any() and not credit["advantage"][row][first_L].any()
        assert credit["advantage"][row][rows.turn[row] == 1].all()


def test_rewards_that_an_estimator_is_not_for_are_refused_by_task():
    algorithm = Algorithm(advantage="a_grae")
    trajectories = cases.ragged()  # the failed one paid 7, the fourth -0.7
    trajectories[3] = dataclasses.replace(trajectories[3], task_id="desk-4")
    rows = SegmentBatch.of(trajectories)
    with pytest.raises(ValueError) as caught:
        assign_credit(CreditArrays(algorithm, SHAPES, rows, trajectories, {}))
    assert str(caught.value) == (
        "desk-4: reward: got -0.7; allowed with advantage=a_grae: a number from 0 to 1."
    )
    trajectories[3] = with_fields(trajectories[3], reward=0.0)
    credit, _ = assign_credit(CreditArrays(algorithm, SHAPES, rows, trajectories, {}))
    assert np.isfinite(np.concatenate(credit["advantage"])).all()
