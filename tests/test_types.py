"""What follows from the fields of the data types."""

import dataclasses

import numpy as np
import pytest
from stored_fields import with_fields

from seeupo_jax.types import RewardRow, RewardTable, Segment, Trajectory, rewards_of


def played(turns, **fields):
    turn_L = np.array([-1, *range(turns)], np.int32)
    segment = Segment(turn_L, turn_L, np.zeros(turns + 1, np.float32))
    return Trajectory.of((segment,), 0.75, 0, **fields)


def test_a_reward_that_nobody_divided_came_with_the_last_turn():
    assert rewards_of(played(3)) == [0.0, 0.0, 0.75]
    assert rewards_of(played(1)) == [0.75]
    assert rewards_of(played(0)) == rewards_of(Trajectory.of((), 1.0, 0)) == []


def test_the_rewards_of_turns_are_what_they_were_said_to_be():
    assert rewards_of(played(3, turn_rewards=(0.5, 0.0, 0.25))) == [0.5, 0.0, 0.25]


@pytest.mark.parametrize("turns", [0, 1, 3])
def test_rewards_of_another_number_of_turns_are_told(turns):
    trajectory = with_fields(played(turns, task_id="a/1"), turn_rewards=(1.0, 2.0))
    logged = f"task 'a/1': got 2; allowed: none, or one for each of its {turns} turns"
    with pytest.raises(ValueError, match=logged):
        rewards_of(trajectory)


def test_the_four_reward_fields_read_one_table():
    named = {
        "env": RewardRow(0.5, (0.25, 0.25)),
        "late": RewardRow(2.0),
        "no_turn": RewardRow(0, ()),
    }
    table = RewardTable(RewardRow(1.5, (0.5, 1.0)), named)
    trajectory = Trajectory((), table, 0)
    assert (trajectory.reward, trajectory.turn_rewards) == (1.5, (0.5, 1.0))
    assert trajectory.rewards == {"env": 0.5, "late": 2.0, "no_turn": 0}
    assert trajectory.named_turn_rewards == {"env": (0.25, 0.25), "no_turn": ()}
    again = Trajectory.of(**trajectory.stored_fields())
    assert again.reward_table == table and again == trajectory


def test_stored_fields_are_all_fields_with_five_in_place_of_the_table():
    rewards = {"reward", "turn_rewards", "rewards", "named_turn_rewards", "role_rewards"}
    names = {field.name for field in dataclasses.fields(Trajectory)} - {"reward_table"}
    assert set(played(2).stored_fields()) == names | rewards


def test_named_turns_without_the_rewards_of_their_name_are_refused():
    with pytest.raises(ValueError, match="named_turn_rewards: got 'late', which rewards lacks"):
        RewardTable.of(1.0, rewards={"env": 1.0}, named_turn_rewards={"late": (1.0,)})


def test_an_amount_is_added_to_the_episode_and_to_its_last_turn():
    table = RewardTable.of(1.5, (0.5, 1.0), {"env": 1.5})
    assert table.plus(-0.5) == RewardTable.of(1.0, (0.5, 0.5), {"env": 1.5})
    assert RewardTable.of(1.5).plus(-0.5) == RewardTable.of(1.0)
    assert table.with_reward(9.0) == RewardTable.of(9.0, (0.5, 1.0), {"env": 1.5})


def test_the_first_tokens_of_a_segment_keep_their_record():
    arrays = np.arange(4), np.array([-1, 0, 0, 1]), np.arange(4.0)
    cut = Segment(*arrays, np.arange(8).reshape(4, 2)).until(2)
    assert (cut.tokens_L.tolist(), cut.turn_L.tolist()) == ([0, 1], [-1, 0])
    assert (cut.logp_L.tolist(), cut.expert_LG.tolist()) == ([0, 1], [[0, 1], [2, 3]])
    assert Segment(*arrays).until(2).expert_LG is None
    version_L = np.array([-1, 3, 3, 4], np.int32)
    assert Segment(*arrays, version_L=version_L).until(2).version_L.tolist() == [-1, 3]


def test_tokens_without_versions_are_of_their_trajectorys():
    arrays = np.arange(3), np.array([-1, 0, 1]), np.zeros(3)
    assert Segment(*arrays).versions(5).tolist() == [-1, 5, 5]
    assert Segment(*arrays).versions(None).tolist() == [-1, -1, -1]
    own_L = np.array([-1, 2, 3], np.int32)
    assert Segment(*arrays, version_L=own_L).versions(5).tolist() == [-1, 2, 3]
