"""What follows from the fields of the data types."""

import dataclasses

import numpy as np
import pytest

from seeupo_jax.types import Segment, Trajectory, rewards_of


def played(turns, **fields):
    turn_L = np.array([-1, *range(turns)], np.int32)
    segment = Segment(turn_L, turn_L, np.zeros(turns + 1, np.float32))
    return Trajectory((segment,), 0.75, 0, **fields)


def test_a_reward_that_nobody_divided_came_with_the_last_turn():
    assert rewards_of(played(3)) == [0.0, 0.0, 0.75]
    assert rewards_of(played(1)) == [0.75]
    assert rewards_of(played(0)) == rewards_of(Trajectory((), 1.0, 0)) == []


def test_the_rewards_of_turns_are_what_they_were_said_to_be():
    assert rewards_of(played(3, turn_rewards=(0.5, 0.0, 0.25))) == [0.5, 0.0, 0.25]


@pytest.mark.parametrize("turns", [0, 1, 3])
def test_rewards_of_another_number_of_turns_are_told(turns):
    trajectory = dataclasses.replace(played(turns, task_id="a/1"), turn_rewards=(1.0, 2.0))
    logged = f"task 'a/1': got 2; allowed: none, or one for each of its {turns} turns"
    with pytest.raises(ValueError, match=logged):
        rewards_of(trajectory)


def test_the_first_tokens_of_a_segment_keep_their_record():
    arrays = np.arange(4), np.array([-1, 0, 0, 1]), np.arange(4.0)
    cut = Segment(*arrays, np.arange(8).reshape(4, 2)).until(2)
    assert (cut.tokens_L.tolist(), cut.turn_L.tolist()) == ([0, 1], [-1, 0])
    assert (cut.logp_L.tolist(), cut.expert_LG.tolist()) == ([0, 1], [[0, 1], [2, 3]])
    assert Segment(*arrays).until(2).expert_LG is None
