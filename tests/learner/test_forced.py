"""A token that its sampler had no alternative to is no choice: nothing is learned from it."""

import dataclasses
import functools

import jax
import learner_cases as cases
import numpy as np
import pytest

from seeupo_jax.configuration.algorithm import Algorithm
from seeupo_jax.learner.batching import SegmentBatch
from seeupo_jax.learner.credit.advantages import assign_credit
from seeupo_jax.learner.credit.credit_arrays import CreditArrays
from seeupo_jax.learner.sweep import sweep
from seeupo_jax.learner.sweep_control import SweepStopped
from seeupo_jax.types import CONTEXT, Segment, Trajectory


def forced(trajectories, share=0.4, turns=(), seed=3):
    """Some sampled tokens, and all of some turns, had probability 1; at which positions."""
    rng, where = np.random.default_rng(seed), []

    def of(segment):
        acted = segment.turn_L != CONTEXT
        place_L = acted & ((rng.random(acted.size) < share) | np.isin(segment.turn_L, turns))
        where.append(place_L)
        logp_L = np.where(place_L, np.float32(0), segment.logp_L)
        return dataclasses.replace(segment, logp_L=logp_L)

    made = [dataclasses.replace(t, segments=tuple(map(of, t.segments))) for t in trajectories]
    return made, where


def as_context(trajectories, where):
    """The same, as if somebody else had written these tokens."""
    marks = iter(where)

    def of(segment):
        return dataclasses.replace(segment, turn_L=np.where(next(marks), CONTEXT, segment.turn_L))

    return [dataclasses.replace(t, segments=tuple(map(of, t.segments))) for t in trajectories]


@functools.cache
def observed(truncated, context=False, **choices):
    """A sweep on `ragged` with forced tokens, none of a turn left in some of its trajectories."""
    made, where = forced(cases.ragged())
    made = as_context(made, where) if context else made
    learner = dataclasses.replace(cases.learner(**choices), truncated=truncated)
    return cases.observe(learner, made)


@pytest.mark.parametrize(
    "choices", [{}, {"refresh": "separate", "ratio": "product"}, {"order": "forward"}]
)
def test_forced_tokens_are_context_to_an_update(choices):
    got, wanted = observed(True, **choices), observed(False, context=True, **choices)
    jax.tree.map(np.testing.assert_array_equal, got.state.params, wanted.state.params)
    plain = observed(False, **choices)
    pairs = zip(*(jax.tree.leaves(o.state.params) for o in (got, plain)), strict=True)
    assert any((a != b).any() for a, b in pairs)
    made, where = forced(cases.ragged())
    failed = [t.failed for t in made for _ in t.segments]
    marked = sum(int(w.sum()) for w, left in zip(where, failed, strict=True) if not left)
    acted = sum(int((s.turn_L >= 0).sum()) for t in made for s in t.segments if not t.failed)
    assert "sweep/forced_fraction" not in plain.metrics
    assert got.metrics == wanted.metrics | {"sweep/forced_fraction": marked / acted}


def test_an_action_of_forced_tokens_only_changes_no_weight_and_no_parameter():
    made, _ = forced(cases.ragged(), share=0.0, turns=(2,))
    learner = dataclasses.replace(cases.learner(kl_coef=0.0), truncated=True)
    got = cases.observe(learner, made)
    before = {update.turns: update for update in got.updates}
    # Turns 3, 2, 1, 0: what comes out of turn 2 is what came out of turn 3.
    for a, b in zip(*(jax.tree.leaves(before[turn,].params) for turn in (3, 2)), strict=True):
        np.testing.assert_array_equal(a, b)
    assert before[2,].metrics == [] and "sweep/weight_mean/turn=3" not in got.metrics


def test_a_sweep_that_stops_behind_an_action_of_forced_tokens_goes_on_to_the_same_bits():
    made, _ = forced(cases.ragged(), share=0.0, turns=(2,))
    learner = dataclasses.replace(cases.learner(), truncated=True)
    reference = cases.jittered(cases.policy()[1], 0.02)

    def run(state, **rest):
        done = sweep(learner, state, reference, made, iteration=3, **rest)
        return cases.host(done.train), done.metrics

    state, metrics = run(cases.new_state(learner.optimizer))
    asked = iter([False, False])
    with pytest.raises(SweepStopped) as stopped:
        run(cases.new_state(learner.optimizer), stop=lambda: next(asked, True))
    arrays, notes = stopped.value.arrays, stopped.value.notes
    assert notes["done"] == 2  # turn 3's ratio waits for the step on turn 1
    resumed, again = run(arrays["state"], resume=(arrays, notes))
    cases.assert_trees_equal(resumed, state)
    assert again == metrics


def test_a_sweep_of_forced_tokens_only_leaves_the_policy_as_it_is():
    made, _ = forced(cases.ragged(), share=1.0)
    learner = dataclasses.replace(cases.learner(), truncated=True)
    got = cases.observe(learner, made)
    assert got.metrics == {"sweep/turns": 0, "sweep/forced_fraction": 1.0} and not got.updates


def test_a_reward_that_came_with_a_forced_action_is_that_of_the_choices_before_it():
    turn_L = np.array([-1, 0, 0, -1, 1, 1, -1, 2], np.int32)
    logp_L = np.array([0, -1, -2, 0, 0, 0, 0, -1], np.float32)  # all of turn 1 is forced
    segment = Segment(np.arange(8, dtype=np.int32), turn_L, logp_L)
    rewards = (0.5, 2.0, 0.25)
    made = [Trajectory.of((segment,), 2.75, 0, turn_rewards=rewards)] * 2
    rows = SegmentBatch.of(made, truncated=True)
    algorithm = Algorithm(advantage="returns", scale="none", advantage_clip=None)
    credit, _ = assign_credit(CreditArrays(algorithm, cases.SHAPES, rows, made, {}))
    for advantage_L in credit["advantage"]:
        # Turn 0's tokens get 0.5 + 2 + 0.25, turn 2's 0.25.
        np.testing.assert_allclose(advantage_L, [0, 2.75, 2.75, 0, 0, 0, 0, 0.25])


def test_a_progress_that_came_with_a_forced_token_is_that_of_the_last_choice_of_its_turn():
    turn_L = np.array([-1, 0, 0, -1, 1, 1], np.int32)
    logp_L = np.array([0, -1, 0, 0, -2, 0], np.float32)  # both turns end with a forced token
    segment = Segment(np.arange(6, dtype=np.int32), turn_L, logp_L)
    made = [Trajectory.of((segment,), 1.0, 0)] * 2
    rows = SegmentBatch.of(made, truncated=True)
    progress_L = np.array([0, 0, 0.75, 0, 0, 0.25], np.float32)
    arrays = CreditArrays(Algorithm(), cases.SHAPES, rows, made, {"progress": [progress_L] * 2})
    np.testing.assert_array_equal(arrays.progress_NL[:, :2], [[0.75, 0.25]] * 2)
    assert arrays.progress_NL.sum() == 2


def test_without_any_choice_there_is_no_reward_to_place():
    segment = Segment(np.arange(3, dtype=np.int32), np.array([-1, 0, 0], np.int32), np.zeros(3))
    made = [Trajectory.of((segment,), 1.0, 0, turn_rewards=(1.0,))] * 2
    rows = SegmentBatch.of(made, truncated=True)
    arrays = CreditArrays(Algorithm(), cases.SHAPES, rows, made, {})
    assert not arrays.reward_NL.any() and not arrays.mask_NL.any()
