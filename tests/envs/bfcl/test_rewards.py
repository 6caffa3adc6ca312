"""What an episode earns by each reward."""

import itertools

import numpy as np
import pytest

from seeupo_jax.envs.bfcl.benchmark_files import CATEGORIES, load_tasks
from seeupo_jax.envs.bfcl.environment import Bfcl
from seeupo_jax.envs.bfcl.multi_turn import CLOSING
from seeupo_jax.envs.episode_rewards import REWARDS
from seeupo_jax.envs.tool_calls import render_hermes

TASK = "multi_turn_base_0"  # four user turns, each with a solution
LOOP = "and again " * 60


def play(reward, solved, spoiled_at=None):
    """Rewards of the messages that solve the first user turns; a spoiled one in front of one."""
    env = Bfcl(reward=reward, max_calls=60)
    env.reset(TASK, seed=0)
    turns = [m if i < solved else (CLOSING,) for i, m in enumerate(env.play(TASK))]
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


def matched(env, task_id, actions):
    """The reward `matching` of each message, the others' sum, and the score."""
    env.reset(task_id, seed=0)
    by_turn, own = np.zeros(0), 0.0
    for action in actions:
        result = env.step(action)
        by_turn = np.append(by_turn, 0.0) + result.rewards["matching"]
        own += result.reward
    return by_turn, own, env.score()


@pytest.mark.parametrize("category", CATEGORIES)
@pytest.mark.parametrize("form", ["hermes", "python"])
def test_reference_calls_match_themselves(category, form):
    env = Bfcl(category, format=form, max_calls=100, turn_reward="matching_hard")
    for task_id in itertools.islice(load_tasks(category), 0, 200, 40):
        turns = [turn for turn in env.play(task_id, "one")]
        actions = [action for turn in turns for action in turn]
        by_turn, own, score = matched(env, task_id, actions)
        np.testing.assert_allclose(by_turn, [action != CLOSING for action in actions], atol=1e-12)
        assert own == score == 1
        # Nothing of one user turn's calls matches the next one's: all come one user turn late.
        late = [action for turn in [(CLOSING,), *turns[:-1]] for action in turn]
        by_turn, own, score = matched(env, task_id, late)
        assert by_turn.sum() < len(actions) - len(turns) and own == score == 0


def test_the_soft_matching_of_a_user_turn_sums_to_its_plan():
    env = Bfcl(max_calls=60, turn_reward="matching_soft")
    turns = [*env.play(TASK, "one")]
    by_turn, _, score = matched(env, TASK, [action for turn in turns for action in turn])
    start = 0
    for messages in turns:
        calls, size = len(messages) - 1, len(messages)
        own = by_turn[start : start + size]
        assert own[-1] == 0 and 0.9 / calls < own[0] <= 1 / calls + 1e-9
        assert 0.9 < own.sum() <= 1 + 1e-9
        start += size
    assert score == 1


def test_a_later_call_takes_the_reference_call_from_a_worse_one():
    env = Bfcl(max_calls=60, turn_reward="matching_hard")
    first = next(env.play(TASK, "one"))[0]  # cd(folder="document")
    env.reset(TASK, seed=0)
    worse = env.step(first.replace("document", "elsewhere"))
    assert worse.rewards == {"matching": [2 / 3]} and worse.reward == 0
    unread = env.step("<tool_call>")
    assert unread.info["bad_call"] and unread.rewards == {"matching": [0, 0]}
    assert env.step(first).rewards == {"matching": [-2 / 3, 0, 1]}


def test_a_message_is_matched_as_it_was_written_whatever_a_simulator_did_with_its_arguments():
    # TwitterAPI keeps the lists of a post and adds later mentions to them.
    env = Bfcl(max_calls=60, turn_reward="matching_hard")
    task_id = "multi_turn_base_4"
    turns = [*env.play(task_id, "one")]
    matched(env, task_id, itertools.chain(*turns[:2]))
    post = turns[2][0]
    assert '"name": "post_tweet"' in post and env.step(post).rewards["matching"][-1] == 1
    env.step(render_hermes("mention", tweet_id=2, mentioned_usernames=["@somebody"]))
    later = env.step(render_hermes("get_tweet", tweet_id=2))
    assert "@somebody" in later.observation[0]["content"]
    assert later.rewards["matching"] == [0.0] * len(later.rewards["matching"])


def test_the_turn_reward_is_off_by_default_and_named_wrongly_refused():
    env = Bfcl()
    env.reset(TASK, seed=0)
    assert env.step(CLOSING).rewards == {}
    with pytest.raises(ValueError, match="bfcl turn_reward: got 'hard'; allowed: matching_hard, m"):
        Bfcl(turn_reward="hard")
