"""The order desk's judge prefers what its oracle would do next."""

import random

import pytest

from seeupo_jax.envs.order_desk import orders as world
from seeupo_jax.envs.order_desk.demonstrator import demonstrate, play, play_errand
from seeupo_jax.envs.order_desk.errands import settle
from seeupo_jax.envs.order_desk.levels import LEVELS
from seeupo_jax.envs.tool_calls import render_hermes
from seeupo_jax.rewards.finished_episode import FinishedEpisode
from seeupo_jax.rewards.order_desk_judge import judge_action

TASKS = [f"{level.prefix}train/{index}" for level in LEVELS.values() for index in range(12)]

# An errand of three requests that are all served, in another order than they were asked for.
WANTED = {"requests": "3", "order": "matters", "look_ups": "1"}


def judged(task_id, *said):
    messages = tuple({"role": "assistant", "content": text} for text in said)
    return judge_action(
        FinishedEpisode(task_id, "train", messages, (), "candidate", len(said), 0.0, {}, 0.0, {})
    )


@pytest.mark.parametrize("task_id", TASKS)
def test_the_oracles_every_call_is_worth_1(task_id):
    conversation, score = demonstrate(task_id)
    said = [m["content"] for m in conversation.messages if m["role"] == "assistant"]
    assert score == 1
    assert [judged(task_id, *said[: turn + 1]) for turn in range(len(said))] == [1.0] * len(said)


def test_other_look_ups_are_worth_half_and_all_else_nothing():
    task = LEVELS[1].find_task(TASKS[0])
    oracle = [*play(task, 1.0, random.Random(0))]
    other = next(c for c in task.customers if c is not task.customers[task.customer])
    find = render_hermes("find_customer", name=other.name)
    assert judged(TASKS[0], find) == 0.5
    assert judged(TASKS[0], find, find) == 0.0  # nothing new
    assert judged(TASKS[0], find, oracle[0]) == 1.0
    # Two calls at once are refused, so that neither has been made.
    assert judged(TASKS[0], oracle[0] + oracle[1], oracle[0]) == 1.0
    assert judged(TASKS[0], oracle[0], oracle[2]) == 0.5  # looked up before it was listed
    assert judged(TASKS[0], render_hermes("find_customer", name="No One")) == 0.0
    for text in ("Hello.", "", oracle[0] + oracle[1], oracle[-1]):
        assert judged(TASKS[0], text) == 0.0
    wrong = render_hermes("cancel_order", order_id=other.orders[0].order_id)
    assert judged(TASKS[0], *oracle[:3], wrong) == 0.0
    assert world.resolve(task.request, task.target) in oracle[-1]


def test_look_ups_of_what_is_shared_are_look_ups_and_a_hasty_action_is_worth_nothing():
    task_id = next(
        each
        for each in (f"level2/train/{index}" for index in range(100))
        if LEVELS[2].labels(LEVELS[2].find_task(each)) == WANTED
        and len(settle(LEVELS[2].find_task(each))[0].actions) == 3
    )
    errand = LEVELS[2].find_task(task_id)
    oracle = [*play_errand(errand, 1.0, random.Random(0))]
    looked = [text for text in oracle if "get_" in text or "find" in text or "list" in text]
    look = render_hermes("get_parcel", order_id=errand.account.orders[-1].order_id)
    assert judged(task_id, look) == 0.5
    assert judged(task_id, look, look) == 0.0
    actions = oracle[len(looked) : -3]
    assert len(actions) == 3
    assert judged(task_id, *looked, actions[0]) == 1.0
    assert judged(task_id, *looked, actions[1]) == judged(task_id, *looked, actions[2]) == 0.0
