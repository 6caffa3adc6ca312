"""Episodes that were cut, or are too long: left out of updates, or less rewarded."""

import dataclasses
import functools

import learner_cases as cases
import numpy as np
import pytest
from stored_fields import with_fields

from seeupo_jax.algorithms.overlong import Overlong
from seeupo_jax.configuration.algorithm import Algorithm
from seeupo_jax.learner.credit.overlong import with_overlong_penalties
from seeupo_jax.learner.sweep import sweep

CUT = {0: "max_turns", 2: "max_tokens", 3: "max_tokens"}  # those of four turns, and of one
REVERSE = [(2,), (1,), (0,)]


@functools.cache
def cut(every=False):
    """The ragged trajectories, some of which were cut; the fifth failed."""
    stops = {i: "max_turns" for i in range(8)} if every else CUT
    return tuple(
        t if t.failed else dataclasses.replace(t, stop=stops.get(i, "done"))
        for i, t in enumerate(cases.ragged())
    )


@pytest.mark.parametrize(
    "choices",
    [{}, {"normalize_by": "active"}, {"advantage": "returns", "estimator": {"discount": 0.9}}],
    ids=["all", "active", "credit per token"],
)
def test_a_masked_trajectory_is_in_the_statistics_and_in_no_update(choices):
    """Advantages, gradients and weights are the twin's, which drops the actions alone."""
    made = cases.learner(truncated="mask", **choices)
    observed, wanted = cases.assert_equal_to_the_twin(made, cut(), REVERSE)
    kept = cases.twin_sweep(cases.learner(**choices), cut(), [(3,), *REVERSE])
    for masked, own in zip(wanted.credit, kept.credit, strict=True):
        for masked_L, own_L in zip(masked, own, strict=True):
            np.testing.assert_array_equal(masked_L, own_L)
    assert observed.metrics["sweep/masked_trajectories"] == len(CUT)
    assert observed.metrics["sweep/turns"] == 3


def test_nothing_says_that_a_masked_trajectory_was_stepped_on():
    made = cases.learner(truncated="mask")
    state = cases.new_state(made.optimizer)
    *_, stats, _ = sweep(made, state, cases.policy()[1], cut(), iteration=1)
    for number, own in enumerate(stats):
        assert (own is None) == (number == 4)
        if own is not None:
            assert np.isnan(own.weight_K).all() == (number in CUT)
            assert np.isfinite(own.advantage)


def test_without_any_other_trajectory_nothing_changes():
    made = cases.learner(truncated="mask")
    state = cases.new_state(made.optimizer)
    train, metrics, *_ = sweep(made, state, cases.policy()[1], cut(every=True), iteration=1)
    cases.assert_trees_equal(cases.host(train.params), cases.policy()[1])
    assert metrics == {"sweep/turns": 0, "sweep/masked_trajectories": 7}


@pytest.mark.parametrize(
    "tokens, wanted",
    [(0, 0.0), (80, 0.0), (81, -0.05), (90, -0.5), (100, -1.0), (101, -1.0), (10**6, -1.0)],
)
def test_the_soft_overlong_punishment_by_hand(tokens, wanted):
    np.testing.assert_allclose(Overlong(length=100, buffer=20).reward(tokens), wanted)
    doubled = Overlong(length=100, buffer=20, penalty=2.0).reward(tokens)
    np.testing.assert_allclose(doubled, 2 * wanted)


def test_an_overlong_episode_is_less_rewarded_by_its_sampled_tokens():
    """The buffer is a fifth of the length where none is given; the last turn's reward has it."""
    trajectories = [
        with_fields(t, turn_rewards=(t.reward / t.turns,) * t.turns) if i % 3 == 0 else t
        for i, t in enumerate(cases.ragged())
    ]
    algorithm = Algorithm(overlong={"length": 10, "penalty": 3.0})
    made, metrics = with_overlong_penalties(algorithm, trajectories)
    sampled = [10, 3, 11, 4, 6, 6, 7, 7]
    penalty = [-3.0 * min(max(n - 8, 0) / 2, 1) for n in sampled]
    assert [sum((s.turn_L >= 0).sum() for s in t.segments) for t in trajectories] == sampled
    for old, new, less in zip(trajectories, made, penalty, strict=True):
        assert new.reward == old.reward + less
        assert new.turn_rewards[:-1] == old.turn_rewards[:-1]
        if old.turn_rewards:
            assert new.turn_rewards[-1] == old.turn_rewards[-1] + less
        assert new.segments is old.segments
    without = [less for less, t in zip(penalty, trajectories, strict=True) if not t.failed]
    assert metrics["sweep/overlong_penalty"] == np.mean(without)
    assert metrics["sweep/overlong_fraction"] == np.mean(np.array(without) < 0) > 0


def test_without_an_episode_that_counts_no_penalty_is_logged():
    failed = [dataclasses.replace(t, stop="env_error") for t in cases.ragged()]
    made, metrics = with_overlong_penalties(Algorithm(overlong={"length": 10}), failed)
    assert len(made) == len(failed) and metrics == {}


def test_a_sweep_reads_the_rewards_less_the_penalty():
    shaped = cases.learner(overlong={"length": 11, "buffer": 8})
    trajectories = cases.ragged()
    less, metrics = with_overlong_penalties(shaped.algorithm, trajectories)
    observed, plain = (
        cases.observe(made, given)
        for made, given in ((shaped, trajectories), (cases.learner(), less))
    )
    cases.assert_trees_equal(observed.state.params, plain.state.params)
    assert observed.metrics == plain.metrics | metrics
    assert observed.metrics["sweep/overlong_penalty"] < 0


def test_off_the_trajectories_are_those_that_were_given():
    trajectories = cases.ragged()
    made, metrics = with_overlong_penalties(Algorithm(), trajectories)
    assert made is trajectories and metrics == {}
