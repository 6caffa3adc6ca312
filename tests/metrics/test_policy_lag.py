"""Lag of sampled tokens, by hand."""

import numpy as np

from seeupo_jax.metrics.policy_lag import policy_lag
from seeupo_jax.types import Segment, Trajectory


def sampled(turns, version, versions=None):
    turn_L = np.array(turns, np.int32)
    version_L = None if versions is None else np.array(versions, np.int32)
    segment = Segment(turn_L, turn_L, np.zeros(turn_L.size, np.float32), version_L=version_L)
    return Trajectory.of((segment,), 0.0, 0, policy_version=version)


def test_lag_is_of_tokens_and_of_the_trajectory_that_began_first():
    trajectories = [
        sampled([-1, 0, 0], 4),
        sampled([-1, 0, -1, 1, 1], 3, [-1, 3, -1, 4, 5]),
        sampled([-1], 2),  # without a sampled token
    ]
    metrics = policy_lag(trajectories, 5)
    assert metrics["rollout/policy_lag"] == 3
    np.testing.assert_allclose(metrics["rollout/policy_lag_mean"], (1 + 1 + 2 + 1 + 0) / 5)
    assert metrics["rollout/mixed_versions"] == 0.5


def test_without_a_sampled_token_there_is_no_mean():
    metrics = policy_lag([sampled([-1], 2)], 2)
    assert metrics["rollout/policy_lag"] == 0
    assert np.isnan(metrics["rollout/policy_lag_mean"])
    assert np.isnan(metrics["rollout/mixed_versions"])
