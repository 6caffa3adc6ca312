"""What an episode earns by each reward."""

import pytest

from seeupo_jax.envs.bfcl.environment import CLOSING, Bfcl
from seeupo_jax.envs.episode_rewards import REWARDS

TASK = "multi_turn_base_0"  # four user turns, each with a solution
LOOP = "and again " * 60


def play(reward, solved, spoiled_at=None):
    """Rewards of the messages that solve the first user turns; a spoiled one in front of one."""
    env = Bfcl(reward=reward, max_calls=60)
    env.reset(TASK, seed=0)
    turns = [m if i < solved else (CLOSING,) for i, m in enumerate(env.oracle(TASK))]
    actions = [action for turn in turns for action in turn]
    if spoiled_at is not None:
        actions[spoiled_at] = f"{LOOP}{actions[spoiled_at]}"
    results = [env.step(action) for action in actions]
    return [result.reward for result in results], env.score(), results[-1].info


def test_the_official_reward_is_the_verdict_at_the_end():
    rewards, score, _ = play("official", solved=4)
    assert rewards == [0] * 7 + [1] and score == 1
    assert play("official", solved=3)[:2] == ([0] * 7, 0)


def test_a_fraction_comes_with_each_user_turn_that_passes():
    rewards, score, _ = play("fraction", solved=4)
    assert rewards == [0, 0.25] * 4 and score == 1
    rewards, score, _ = play("fraction", solved=2)
    assert rewards == [0, 0.25, 0, 0.25, 0, 0] and score == 0


def test_the_shaped_reward_is_half_the_share_and_one_more_when_solved():
    rewards, score, _ = play("shaped", solved=4)
    assert rewards == [0, 0.125] * 3 + [0, 1.125] and score == 1
    rewards, score, _ = play("shaped", solved=3)
    assert sum(rewards) == 0.375 and score == 0
    assert sum(play("shaped", solved=0)[0]) == 0


@pytest.mark.parametrize("spoiled_at", [0, 2, 3, 7])
def test_a_degenerate_message_makes_the_shaped_reward_minus_one_for_good(spoiled_at):
    rewards, score, info = play("shaped", 4, spoiled_at)
    assert sum(rewards[: spoiled_at + 1]) == sum(rewards) == -1 and score == 1
    assert info["degenerate"] and not play("shaped", 4)[2]["degenerate"]


@pytest.mark.parametrize("reward", ["official", "fraction"])
def test_the_other_rewards_forgive_a_degenerate_message(reward):
    rewards, _, info = play(reward, 4, spoiled_at=2)
    assert sum(rewards) == 1 and info["degenerate"]


def test_no_reward_is_above_its_largest_value():
    assert {name: sum(play(name, 4)[0]) for name in REWARDS} == {
        "official": 1,
        "shaped": 1.5,
        "fraction": 1,
    }
