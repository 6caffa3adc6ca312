"""A group with fewer than two trajectories left takes no part in an update, and is counted."""

import dataclasses
import functools

import learner_cases as cases
import numpy as np
import pytest
from stored_fields import with_fields

from seeupo_jax.learner.batching import SegmentBatch
from seeupo_jax.learner.sweep import sweep
from seeupo_jax.learner.sweep_start import begin_sweep
from seeupo_jax.rollout.collect import Collected
from seeupo_jax.rollout.episode_metrics import rollout_metrics
from seeupo_jax.types import Trajectory, learnable


def failing(*failed, stop="env_error"):
    """The ragged trajectories, of groups 0 0 0 1 1 1 2 2, with these failed too; 4 always is."""
    fail = functools.partial(dataclasses.replace, stop=stop)
    return [fail(t) if i in failed else t for i, t in enumerate(cases.ragged())]


@functools.cache
def reference():
    return cases.jittered(cases.policy()[1], 0.02)


def observe(trajectories, **choices):
    return cases.observe(cases.learner(**choices), trajectories, ref_params=reference())


def test_a_trajectory_counts_if_it_and_another_of_its_group_did_not_fail():
    stops = ["done", "env_error", "max_turns", "done", "timeout", "done", "max_tokens", "timeout"]
    groups = [4, 4, 0, 9, 9, 0, 4, 7]
    trajectories = [Trajectory.of((), 0.0, g, stop=s) for g, s in zip(groups, stops, strict=True)]
    wanted = [True, False, True, False, False, True, True, False]
    np.testing.assert_array_equal(learnable(trajectories), wanted)
    assert learnable([]).dtype == bool
    done = [t.stop not in ("env_error", "timeout") for t in trajectories]
    assert learnable(trajectories, grouped=False).tolist() == done


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "choices",
    [
        {"advantage": "returns"},
        {"advantage": "gae", "critic": {"kind": "head"}},
        {"estimator": {"baseline": "batch"}},
    ],
    ids=str,
)
def test_without_groups_the_last_one_left_of_a_group_is_learned_from(choices):
    trajectories = failing(5)  # trajectory 3 is the last one of group 1
    learner = cases.learner(**choices)
    state = cases.new_state(learner.optimizer)
    if learner.critic is not None:
        state = state._replace(critic=learner.critic.init(state.params))
    statistics = sweep(learner, state, reference(), trajectories, iteration=1).stats
    kept = [found is not None for found in statistics]
    assert kept == [True, True, True, True, False, False, True, True]
    assert abs(statistics[3].advantage) > 0.1
    metrics = rollout_metrics(collected(trajectories, [0] * 8, [0] * 8), grouped=False)
    assert metrics["rollout/groups_dropped"] == 0


def test_the_rows_of_a_dropped_group_are_nowhere_and_its_turns_are_not_counted():
    rows = SegmentBatch.of(failing(0, 2))  # group 0 keeps one of two turns, group 1 has three
    assert rows.trajectory_S.tolist() == [3, 5, 6, 6, 7]
    assert (rows.trajectories, rows.turns) == (8, 3)
    assert SegmentBatch.of(failing(0, 1, 3)).turns == 3  # trajectory 2 of four turns is left alone


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "choices",
    [{}, {"refresh": "separate", "scale": "none"}, {"normalize_by": "active", "scale": "group"}],
)
def test_a_sweep_with_a_dropped_group_is_the_sweep_without_its_trajectories(choices):
    # Group 1: trajectory 3 succeeds by far, 4 and 5 have failed.
    trajectories = failing(5)
    trajectories[3] = with_fields(trajectories[3], reward=50.0)
    observed = observe(trajectories, **choices)
    without = observe([t for t in trajectories if t.group != 1], **choices)
    cases.assert_trees_close(observed.state.params, without.state.params, 1e-6)
    assert observed.metrics.keys() == without.metrics.keys()
    for name, value in without.metrics.items():
        np.testing.assert_allclose(observed.metrics[name], value, rtol=2e-6, err_msg=name)
    for update, wanted in zip(observed.updates, without.updates, strict=True):
        np.testing.assert_allclose(
            update.cumulative_ratio_N[[0, 1, 2, 6, 7]], wanted.cumulative_ratio_N, rtol=3e-6
        )
        assert (update.cumulative_ratio_N[[3, 4, 5]] == 1).all()


def test_the_last_one_left_of_a_group_is_as_if_it_had_failed_bit_for_bit():
    left, failed = observe(failing(5)), observe(failing(3, 5, stop="timeout"))
    cases.assert_trees_equal(left.state, failed.state)
    assert left.metrics == failed.metrics
    kept = observe(failing())
    assert kept.metrics["sweep/tokens"] > left.metrics["sweep/tokens"]


def test_the_mean_is_over_the_trajectories_that_count():
    trajectories = failing(5)
    learner = cases.learner()
    state = cases.new_state(learner.optimizer)
    rows = SegmentBatch.of(trajectories)
    plan = learner.plan(rows.updated_turns, iteration=1)
    started = begin_sweep(
        learner, state, reference(), rows, trajectories, plan, shaped=trajectories, version=0
    )
    assert started.data.valid == 5
    largest_S = [abs(advantage_L).max() for advantage_L in started.per_token["advantage"]]
    assert {int(i) for i in started.data.rows.trajectory_S} == {0, 1, 2, 6, 7}
    assert sorted(largest_S)[-4] > 0.1


@pytest.mark.parametrize("algorithm", [{}, {"order": "custom", "custom_order": (1, 0)}])
def test_a_sweep_of_which_all_groups_are_dropped_returns_the_state_as_it_came(algorithm):
    learner = cases.learner(**algorithm)
    state = cases.new_state(learner.optimizer)
    trajectories = failing(0, 1, 5, 6)  # one each is left
    returned, metrics, *_ = sweep(learner, state, reference(), trajectories, iteration=1)
    assert returned is state and metrics == {"sweep/turns": 0}
    assert not state.step.is_deleted()


def collected(trajectories, scores, retries):
    causes = ({"failure": "gone"} if t.failed else {} for t in trajectories)
    info = [
        {"score": score, "retries": tries, **cause}
        for score, tries, cause in zip(scores, retries, causes, strict=True)
    ]
    played = [dataclasses.replace(t, info=i) for t, i in zip(trajectories, info, strict=True)]
    return Collected(tuple(played), 2.0, 1.0, 10, 20)


def test_retries_and_dropped_groups_are_counted_and_what_is_left_stays_in_the_statistics():
    scores, retries = [1, 0, 1, 1, 1, 1, 1, 0], [0, 2, 0, 1, 2, 0, 0, 0]
    metrics = rollout_metrics(collected(failing(5, 6, 7), scores, retries))
    assert metrics["rollout/groups_dropped"] == 2  # one member of group 1 is left, none of group 2
    assert (metrics["rollout/retries"], metrics["rollout/failed"]) == (5, 4)
    assert metrics["rollout/success_rate"] == 0.75  # of trajectories 0, 1, 2 and 3
    np.testing.assert_allclose(metrics["rollout/reward_mean"], (1 + 0 + 0.5 - 0.7) / 4)
    whole = rollout_metrics(collected(failing(), scores, [0] * 8))
    assert (whole["rollout/groups_dropped"], whole["rollout/retries"]) == (0, 0)
