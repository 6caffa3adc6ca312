"""Ratios are against the policy that sampled, also where it is not the one that is swept.

With importance weights they are against the policy before the sweep, and the weights alone against
the one that sampled.
"""

import dataclasses
import functools
from unittest import mock

import learner_cases as cases
import numpy as np
import numpy_model
import numpy_twin as twin
import pytest

REVERSE = [(3,), (2,), (1,), (0,)]
SWEPT = 2  # the version of the policy that `cases.observe` sweeps: its iteration is 3
# Of the ragged trajectories: the fifth failed, the third and the seventh have two segments.
VERSIONS = (1, None, 0, SWEPT, 1, SWEPT, 5, None)


def sampled_by(*versions):
    """The ragged trajectories, recorded by a sampler that is not the policy that is swept."""
    trajectories = cases.as_sampled(cases.ragged(), spread=0.4)
    pairs = zip(trajectories, versions, strict=True)
    return [dataclasses.replace(t, policy_version=version) for t, version in pairs]


@functools.cache
def reference():
    return cases.jittered(cases.policy()[1], 0.02)


def observe(trajectories, **choices):
    return cases.observe(cases.learner(**choices), trajectories, ref_params=reference())


def twin_sweep(trajectories, **choices):
    """The twin's sweep with the recorded log-probabilities as the old policy's where one is behind.

    A sweep asks for those of the parameters that it begins with first.
    """
    behind = {
        id(segment.tokens_L): ~np.isin(segment.versions(trajectory.policy_version), (-1, SWEPT))
        for trajectory in trajectories
        for segment in trajectory.segments
    }
    real, asked = twin.piece_logps, []

    def piece_logps(weights, spans, arch, options):
        asked.append(weights)
        exact = real(weights, spans, arch, options)
        if weights is not asked[0]:
            return exact
        said = [span.segment.logp_L[span.position_A].astype(np.float64) for span in spans]
        triples = zip(spans, said, exact, strict=True)
        return [
            np.where(behind[id(p.segment.tokens_L)][p.position_A], said_A, exact_A)
            for p, said_A, exact_A in triples
        ]

    with mock.patch.object(twin, "piece_logps", piece_logps):
        learner = cases.learner(**choices)
        return cases.twin_sweep(learner, trajectories, REVERSE, ref_params=reference())


@pytest.mark.parametrize(
    "choices",
    [
        {},
        {"refresh": "separate"},
        {"ratio": "product", "weight_clip": None},
        {"ratio": "token"},
        {"inner_epochs": 2},
    ],
    ids=str,
)
def test_a_sweep_with_trajectories_of_other_policies_is_the_twins_with_what_they_recorded(choices):
    trajectories = sampled_by(*VERSIONS)
    observed, wanted = observe(trajectories, **choices), twin_sweep(trajectories, **choices)
    losses = [step.loss for step in wanted.steps]
    np.testing.assert_allclose(observed.losses, losses, rtol=1e-5, atol=1e-5)
    if choices.get("refresh") == "separate":
        for update, step in zip(observed.updates[:-1], wanted.steps, strict=False):
            np.testing.assert_allclose(
                update.cumulative_ratio_N, step.cumulative_ratio_N, atol=1e-5
            )
    params = cases.weights_of(observed.state.params)
    for name, weight in wanted.weights.items():
        np.testing.assert_allclose(params[name], weight, atol=1e-5, rtol=1e-5, err_msg=name)
    on_policy = cases.weights_of(observe(cases.ragged(), **choices).state.params)
    assert max(abs(on_policy[name] - weight).max() for name, weight in params.items()) > 1e-4


def test_every_token_has_the_version_of_its_own_policy():
    # The policy changed between turns 0 and 1 of every trajectory, from version 0 to the swept one.
    mixed = [
        dataclasses.replace(
            trajectory,
            segments=tuple(
                dataclasses.replace(
                    s, version_L=np.select([s.turn_L == 0, s.turn_L > 0], [0, SWEPT], -1)
                )
                for s in trajectory.segments
            ),
        )
        for trajectory in sampled_by(*[0] * 8)
    ]
    observed, wanted = observe(mixed), twin_sweep(mixed)
    params = cases.weights_of(observed.state.params)
    for name, weight in wanted.weights.items():
        np.testing.assert_allclose(params[name], weight, atol=1e-5, rtol=1e-5, err_msg=name)
    # Turn 0 is updated last: the steps before it are those of fresh trajectories.
    fresh, stale = (observe(sampled_by(*[version] * 8)) for version in (SWEPT, 0))
    losses = np.array([observed.losses, fresh.losses, stale.losses])
    np.testing.assert_array_equal(losses[0, :3], losses[1, :3])
    assert (abs(losses[0, :3] - losses[2, :3]) > 1e-3).all()
    assert abs(losses[0, 3] - losses[1, 3]) > 1e-3


@pytest.mark.parametrize("version", [None, SWEPT])
def test_trajectories_of_the_policy_that_is_swept_owe_nothing_to_what_was_recorded(version):
    observed = observe(sampled_by(*[version] * 8))
    cases.assert_trees_equal(observed.state, observe(cases.ragged()).state)


@pytest.mark.parametrize(
    "choices",
    [
        {"importance": {"clip": 1.1}},
        {"importance": {"clip": 2.0, "low": 0.5, "method": "reject"}, "ratio": "product"},
        {"importance": {"clip": 1.2, "per": "trajectory", "method": "mask"}, "ratio": "token"},
    ],
    ids=["truncated", "rejected", "masked trajectories"],
)
def test_with_importance_weights_ratios_are_to_the_policy_before_the_sweep(choices):
    trajectories = sampled_by(*VERSIONS)
    learner = cases.learner(**choices)
    observed, _ = cases.assert_equal_to_the_twin(
        learner, trajectories, REVERSE, ref_params=reference()
    )
    # The first step begins from that policy: nothing is clipped, however stale a trajectory is.
    assert observed.metrics["sweep/clip_fraction/turn=4"] == 0
    own = observe(sampled_by(*[None] * 8), **choices)
    cases.assert_trees_equal(observed.state, own.state)
    without = observe(trajectories, ratio=learner.algorithm.ratio)
    assert without.metrics["sweep/clip_fraction/turn=4"] > 0


def test_the_gap_between_sampler_and_trainer_is_told_of_every_policy():
    gaps = []
    for versions in (VERSIONS, [None] * 8):
        metrics = observe(sampled_by(*versions)).metrics
        gaps.append((metrics["logp/sampler_trainer_gap"], metrics["logp/sampler_trainer_gap_mean"]))
    assert gaps[0] == gaps[1] and min(gaps[0]) > 0.05
    weights, apart = cases.weights_of(cases.policy()[1]), []
    for segment in (s for t in sampled_by(*VERSIONS) if not t.failed for s in t.segments):
        exact_L, _ = numpy_model.token_logps(weights, segment.tokens_L, cases.NUMPY_ARCH, 1.0)
        apart.extend(np.abs(exact_L - segment.logp_L)[segment.turn_L >= 0])
    np.testing.assert_allclose(gaps[0], (max(apart), np.mean(apart)), rtol=1e-4)
