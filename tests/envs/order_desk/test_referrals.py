"""A case may be handed over unopened: a safe early choice beside the work that a skill pays."""

import itertools

import pytest

from seeupo_jax import envs
from seeupo_jax.envs.order_desk.demonstrator import demonstrate
from seeupo_jax.envs.tool_calls import render_hermes

REFERS = render_hermes("refer")
TASKS = 200


def play(task_id, texts, level=1, refer_reward=0.5):
    """The reward and the score of an episode of these responses, and how many were taken."""
    desk = envs.make("order_desk", level=level, refer_reward=refer_reward)
    desk.reset(task_id, seed=0)
    for turns, text in enumerate(texts, 1):
        step = desk.step(text)
        if step.done:
            return step.reward, desk.score(), turns
    raise AssertionError("the episode is not over")


def responses(task_id, skill):
    messages = demonstrate(task_id, skill=skill)[0].messages
    return [message["content"] for message in messages if message["role"] == "assistant"]


@pytest.mark.parametrize("level, prefix", [(1, ""), (2, "level2/")])
def test_a_referral_pays_at_once_and_the_skilled_player_is_paid_more(level, prefix):
    for index in range(20):
        task = f"{prefix}train/{index}"
        assert play(task, [REFERS], level) == (0.5, 0.5, 1)
        reward, score, turns = play(task, responses(task, skill=1.0), level)
        assert (reward, score) == (1.0, 1.0) and turns >= 4


def test_working_on_cases_pays_less_than_a_referral_without_the_skill_and_more_with_it():
    tasks = [f"train/{index}" for index in range(TASKS)]
    means = [
        sum(play(task, responses(task, skill))[0] for task in tasks) / TASKS for skill in (0.4, 0.8)
    ]
    assert means[0] < 0.5 < means[1]


def test_a_case_under_way_is_not_handed_over():
    desk = envs.make("order_desk", refer_reward=0.5)
    desk.reset("train/0", seed=0)
    desk.step("no call")
    step = desk.step(REFERS)
    assert not step.done and "refer is the first call or none" in step.observation[0]["content"]
    assert step.info["executed"] == [False, False] and desk.score() == 0


def test_a_referral_takes_no_arguments_and_is_there_by_option_alone():
    desk = envs.make("order_desk", refer_reward=0.5)
    _, tools = desk.reset("train/0", seed=0)
    assert tools[-1]["name"] == "refer"
    step = desk.step(render_hermes("refer", to="a colleague"))
    assert not step.done and "refer takes exactly" in step.observation[0]["content"]
    desk = envs.make("order_desk")
    assert "refer" not in [tool["name"] for tool in desk.reset("train/0", seed=0)[1]]
    step = desk.step(REFERS)
    assert not step.done and "no tool 'refer'" in step.observation[0]["content"]


@pytest.mark.parametrize("reward", [0, 1, -0.5, "half", True])
def test_other_rewards_of_a_referral_are_refused(reward):
    with pytest.raises(ValueError, match="refer_reward: got .* allowed: a number above 0 and"):
        envs.make("order_desk", refer_reward=reward)


def test_a_share_of_the_demonstrations_is_a_referral(tmp_path):
    desk = envs.make("order_desk", refer_reward=0.5, data_dir=str(tmp_path))
    shown = desk.demonstrations("train", skill=1.0, episodes=TASKS, referrals=0.25)
    again = desk.demonstrations("train", skill=1.0, episodes=TASKS, referrals=0.25)
    plain = desk.demonstrations("train", skill=1.0, episodes=TASKS)
    assert list(shown) == list(again)
    last = [demonstration.messages[-1]["content"] for demonstration in shown]
    referred = [text == REFERS for text in last]
    assert 0.15 < sum(referred) / TASKS < 0.35
    for one, other, refers in zip(shown, plain, referred, strict=True):
        assert one.messages == (
            (*other.messages[:2], one.messages[-1]) if refers else other.messages
        )
    assert {tool["name"] for tool in shown[0].tools} >= {"refer", "reply"}
    with pytest.raises(ValueError, match="referrals: got 1.5; allowed: a number from 0 to 1"):
        desk.demonstrations("train", skill=1.0, episodes=TASKS, referrals=1.5)
    assert len(list(itertools.islice(iter(shown), 3))) == 3
