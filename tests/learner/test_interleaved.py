"""Segments whose turns interleave, as an agent's calls leave them: the sweep is the twin's."""

import dataclasses
import functools

import learner_cases as cases
import numpy as np
import pytest

from seeupo_jax.configuration.recipes import RECIPES
from seeupo_jax.learner.batching import Shapes
from seeupo_jax.trajectories.states import turn_states
from seeupo_jax.types import CONTEXT, Segment, Trajectory, rewards_of

SHAPES = Shapes((32,), action=16, rows=4, trajectories=12, turns=4)  # as in test_recipes.py
REVERSE = [(3,), (2,), (1,), (0,)]
CASES = {
    "default": ({}, REVERSE),
    "old_policy=turn": ({"old_policy": "turn"}, REVERSE),
    "inner_epochs=2": ({"inner_epochs": 2}, REVERSE),
    "two turns an action": ({"turns_per_update": 2}, [(2, 3), (0, 1)]),
    "tis_clip": ({"importance": {"clip": 1.1}}, REVERSE),
    "rewards to go": ({"advantage": "returns", "estimator": {"discount": 0.9}}, REVERSE),
    "gspo": (RECIPES["gspo"] | {"kl_coef": 0.1}, [(0, 1, 2, 3)]),
}


def joined(*parts):
    """A segment of tokens, each part with its turn."""
    tokens = np.concatenate([tokens for tokens, _ in parts]).astype(np.int32)
    turn = np.concatenate([np.full(len(tokens), turn) for tokens, turn in parts]).astype(np.int32)
    return Segment(tokens, turn, np.zeros(len(tokens), np.float32))


@functools.cache
def trajectories():
    """Two groups: branches after a first turn, sub-agents side by side, and plain ones."""
    rng = np.random.default_rng(6)

    def draw(size):
        return rng.integers(0, cases.VOCAB - 1, size)

    made = []
    for number in range(4):
        prompt = np.random.default_rng(number // 2).integers(0, cases.VOCAB - 1, 4)
        begun, action = (prompt, CONTEXT), draw(3)
        left = joined(begun, (action, 0), (draw(2), CONTEXT), (draw(3), 2))
        right = [begun, (action, CONTEXT), (draw(1), CONTEXT), (draw(2), 1)]
        right = joined(*right, (draw(2), CONTEXT), (draw(4), 3))
        rewards = tuple(rng.normal(size=4).tolist())
        made.append(Trajectory.of((left, right), sum(rewards), number // 2, turn_rewards=rewards))
    helpers = joined((draw(5), CONTEXT), (draw(2), 1)), joined((draw(3), CONTEXT), (draw(2), 2))
    own = joined((draw(4), CONTEXT), (draw(2), 0), (draw(2), CONTEXT), (draw(3), 3))
    made.append(Trajectory.of((*helpers, own), 1.5, 0))
    made.append(Trajectory.of((cases.segment(rng, (0, 4, 2), (1, 2, 3), (2, 1, 2)),), -0.5, 1))
    return tuple(cases.as_sampled(made, spread=0.5))


def in_order(trajectory):
    """The same turns, each in a segment of its own, after exactly what it was sampled after."""
    alone = []
    for turn in range(trajectory.turns):
        (segment,) = (s for s in trajectory.segments if (s.turn_L == turn).any())
        end = np.flatnonzero(segment.turn_L == turn)[-1] + 1
        turn_L = np.where(segment.turn_L[:end] == turn, turn, CONTEXT).astype(np.int32)
        logp_L = np.where(turn_L == turn, segment.logp_L[:end], 0).astype(np.float32)
        alone.append(Segment(segment.tokens_L[:end], turn_L, logp_L))
    return dataclasses.replace(trajectory, segments=tuple(alone))


@functools.cache
def reference():
    return cases.jittered(cases.policy()[1], 0.02)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", CASES)
def test_a_sweep_of_interleaved_segments_is_the_twins(name):
    choices, order = CASES[name]
    learner = cases.learner(shapes=SHAPES, **choices)
    observed, _ = cases.assert_equal_to_the_twin(
        learner, trajectories(), order, ref_params=reference()
    )
    # How segments share the turns out changes nothing.
    alone = cases.observe(learner, [*map(in_order, trajectories())], ref_params=reference())
    np.testing.assert_allclose(alone.losses, observed.losses, rtol=1e-5, atol=1e-6)
    cases.assert_trees_close(alone.state.params, observed.state.params, 1e-5)


def test_turns_rewards_and_states_are_those_of_the_turns_wherever_they_lie():
    for trajectory in trajectories():
        assert trajectory.turns == in_order(trajectory).turns
        assert rewards_of(trajectory) == rewards_of(in_order(trajectory))
    state_NK = turn_states(trajectories())
    assert (state_NK[:4] >= 0).all() and (state_NK[5] >= 0).tolist() == [True] * 3 + [False]
    # Those that begin alike are in the same state there and, their actions apart, nowhere else.
    np.testing.assert_array_equal(state_NK[:4, 0] == state_NK[0, 0], [True, True, False, False])
