"""Level 1 is what it was before there were levels: golden values of then."""

import hashlib
import json

import pytest
from places import SUPPORT

from seeupo_jax.envs.order_desk import orders as world
from seeupo_jax.envs.order_desk.demonstrator import demonstrate
from seeupo_jax.envs.order_desk.environment import OrderDesk
from seeupo_jax.envs.tool_calls import render_hermes

GOLDEN = json.loads((SUPPORT / "golden" / "order_desk_level1.json").read_text())
IDS = [f"{split}/{index}" for split in world.SPLITS for index in range(100)]
HOSTILE = (
    "Hm.",
    render_hermes("no"),
    render_hermes("reply", outcome="sold"),
    render_hermes("get_order", order_id="mug-0"),
)


def digest(value):
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def test_tasks_openings_labels_and_words_are_those_of_before():
    tasks = [world.make_task(split, int(i)) for split, i in (each.split("/") for each in IDS)]
    assert digest([repr(task) for task in tasks]) == GOLDEN["tasks"]
    desk = OrderDesk()
    assert digest([desk.reset(task_id, seed=0) for task_id in IDS]) == GOLDEN["openings"]
    labelled = [(dict(desk.labels(task_id)), desk.reference(task_id)) for task_id in IDS]
    assert digest(labelled) == GOLDEN["labels_and_references"]
    assert digest(list(desk.vocabulary())) == GOLDEN["vocabulary"]
    assert OrderDesk(level=1).task_ids("test") == desk.task_ids("test")


@pytest.mark.parametrize("skill", [1.0, 0.4, 0.0])
def test_demonstrations_and_scores_are_those_of_before(skill):
    played = (demonstrate(task_id, skill=skill, seed=3) for task_id in IDS)
    reported = [(list(shown.messages), list(shown.tools), score) for shown, score in played]
    assert digest(reported) == GOLDEN[f"demonstrations_skill{skill}"]


def test_answers_to_bad_calls_are_those_of_before():
    desk, logged = OrderDesk(), []
    for task_id in IDS[:100]:
        for text in HOSTILE:
            desk.reset(task_id, seed=1)
            step = desk.step(text)
            logged.append((step.observation, step.reward, step.done, step.info, desk.score()))
    assert digest(logged) == GOLDEN["hostile_steps"]
