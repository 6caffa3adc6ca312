"""Lag of sampled tokens, by hand."""

import numpy as np

from seeupo_jax.metrics.policy_lag import policy_lag, remember_steps
from seeupo_jax.types import Segment, Trajectory


def sampled(turns, version, versions=None):
    turn_L = np.array(turns, np.int32)
    version_L = None if versions is None else np.array(versions, np.int32)
    segment = Segment(turn_L, turn_L, np.zeros(turn_L.size, np.float32), version_L=version_L)
    return Trajectory.of((segment,), 0.0, 0, policy_version=version)


def test_lag_is_of_tokens():
    trajectories = [
        sampled([-1, 0, 0], 4),
        sampled([-1, 0, -1, 1, 1], 2, [-1, 3, -1, 4, 5]),  # the policy changed within turn 1
        sampled([-1], 2),  # without a sampled token
        sampled([-1, 0], None),
    ]
    # Optimizer steps behind versions 2 to 5; the sweep after version 3 took none.
    metrics = policy_lag(trajectories, 5, (8, 11, 11, 15))
    assert metrics["rollout/policy_lag"] == 2
    np.testing.assert_allclose(metrics["rollout/policy_lag_mean"], (1 + 1 + 2 + 1 + 0) / 5)
    assert metrics["rollout/policy_lag_steps"] == 4
    np.testing.assert_allclose(metrics["rollout/policy_lag_steps_mean"], (4 + 4 + 4 + 4 + 0) / 5)
    assert metrics["rollout/mixed_versions"] == 0.5


def test_the_lag_in_steps_is_of_the_versions_whose_steps_are_known():
    trajectories = [sampled([-1, 0, 0, 1], 1, [-1, 1, 4, 5])]
    metrics = policy_lag(trajectories, 5, (11, 15))
    assert metrics["rollout/policy_lag"] == 4
    assert metrics["rollout/policy_lag_steps"] == 4
    assert metrics["rollout/policy_lag_steps_mean"] == 2
    assert np.isnan(policy_lag(trajectories, 5, ())["rollout/policy_lag_steps"])


def test_without_a_sampled_token_there_is_no_lag():
    assert np.isnan([*policy_lag([sampled([-1], 2)], 2, (0,)).values()]).all()


def test_a_run_remembers_the_steps_of_all_versions_that_its_tokens_may_have():
    steps_V = ()
    for version in range(100):
        steps_V = remember_steps(steps_V, 3 * version)
    metrics = policy_lag([sampled([-1, 0], 98 - 64)], 98, steps_V[:-1])
    assert metrics["rollout/policy_lag_steps"] == 3 * 64
    assert len(steps_V) < 70
