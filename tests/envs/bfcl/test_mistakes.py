"""A demonstrator that fails sometimes: each mistake as often as it says, and on the simulators."""

from collections import Counter
from random import Random

import pytest

from seeupo_jax.envs.bfcl.environment import Bfcl
from seeupo_jax.envs.bfcl.mistakes import MISTAKES, with_mistakes
from seeupo_jax.envs.bfcl.multi_turn import CLOSING
from seeupo_jax.envs.tool_calls import ToolCall
from seeupo_jax.instruments.bfcl_worlds.environment import BfclWorlds

A = ToolCall("edit", {"ticket": 3, "title": "screen"})
B = ToolCall("close", {"ticket": 7, "note": "done"})
C = ToolCall("lock", {"now": True})
REFERENCE = ((A, B), (), (C,))


def played(skill, times=4000, reference=REFERENCE):
    rng = Random(0)
    return [tuple(map(tuple, with_mistakes(reference, skill, rng))) for _ in range(times)]


def test_skill_1_makes_the_reference_calls():
    assert {*map(repr, played(1.0, times=50))} == {repr(REFERENCE)}


@pytest.mark.parametrize("skill", [0.0, 0.6])
def test_each_mistake_is_as_frequent_as_the_skill_says(skill):
    turns = [[play[turn] for play in played(skill)] for turn in range(3)]
    names = [[[call.name for call in calls] for calls in turn] for turn in turns]
    seen = Counter(
        omission=sum(found != ["edit", "close"] for found in names[0]),
        misreading=sum(calls == (ToolCall("lock", {"now": False}),) for calls in turns[2]),
        hurry=sum(found == ["lock"] for found in names[1]),
    )
    kept = 1 - (1 - skill) * MISTAKES["omission"]  # of the last turn's only call
    for name, chance in MISTAKES.items():
        expected = (1 - skill) * chance * (kept if name == "misreading" else 1)
        assert seen[name] / 4000 == pytest.approx(expected, abs=0.03), name


def test_a_misread_value_is_another_of_the_conversation_of_the_same_type():
    found = {repr(call) for play in played(0.0) for call in play[0]}
    changed = [
        *(ToolCall("edit", {"ticket": 7, "title": "screen"}), A, B),
        ToolCall("edit", {"ticket": 3, "title": "done"}),
        ToolCall("close", {"ticket": 3, "note": "done"}),
        ToolCall("close", {"ticket": 7, "note": "screen"}),
    ]
    assert found == {*map(repr, changed)}


def test_what_is_done_in_a_hurry_has_a_guess_in_it():
    guess = (ToolCall("lock", {"now": False}),)  # that it is to be `True` comes a message later
    assert {repr(play[1]) for play in played(0.0, times=200)} == {repr(()), repr(guess)}


def test_where_the_conversation_has_no_other_value_a_number_is_one_off():
    alone = ((ToolCall("set", {"speed": 50.5}),),)
    made = {call.arguments["speed"] for play in played(0.0, 200, alone) for call in play[0]}
    assert made == {50.5, 51.5}
    text = ((ToolCall("say", {"text": "hello"}),), (ToolCall("ls", {}),))
    made = {repr(call) for play in played(0.0, 200, text) for turn in play for call in turn}
    assert made == {repr(call) for turn in text for call in turn}


@pytest.mark.parametrize("calls_per_message", ["turn", "one"])
def test_lower_skill_succeeds_less_and_its_conversations_are_the_simulators_own(calls_per_message):
    options = {"categories": ("multi_turn_base", "multi_turn_miss_param"), "turns": (2, 2)}
    env = BfclWorlds(train_tasks=100, max_calls=12, **options)
    success = []
    for skill in (1.0, 0.6, 0.0):
        shown = env.demonstrations("train", calls_per_message=calls_per_message, skill=skill)
        scores = [judged(env, f"train/{i}", each) for i, each in enumerate(shown)]
        success.append(sum(scores) / 100)
    assert success[0] == 1 and 0.3 < success[1] < 0.7 and success[2] < 0.2


def judged(env, task_id, demonstration):
    """The score of a demonstration that is played again; its observations must be the same."""
    messages, _ = env.reset(task_id, seed=0)
    for message in demonstration.messages[len(messages) :]:
        if message["role"] == "assistant":
            messages += (message, *env.step(message["content"]).observation)
    assert messages == demonstration.messages
    return env.score()


def test_the_same_arguments_give_the_same_conversations_and_another_seed_others():
    def shown(seed, skill=0.3):
        return [*Bfcl().demonstrations("train", skill=skill, seed=seed)]

    assert shown(0) == shown(0) != shown(1)
    assert shown(0, skill=1.0) == shown(1, skill=1.0)


def test_a_conversation_that_mistakes_make_too_long_ends_where_the_environment_ends_it():
    options = {"turns": (1, 1), "train_tasks": 40, "max_calls": 3}
    env = BfclWorlds(categories=("multi_turn_miss_param",), **options)
    replies = [
        [m["content"] for m in each.messages if m["role"] == "assistant"]
        for each in env.demonstrations("train", skill=0.0)
    ]
    assert max(map(len, replies)) == 3
    assert {each[-1] == CLOSING for each in replies} == {True, False}


@pytest.mark.parametrize("skill", [-0.1, 1.5])
def test_skill_is_a_share(skill):
    with pytest.raises(ValueError, match=f"bfcl skill: got {skill}; allowed: a number from 0 to 1"):
        Bfcl().demonstrations("train", skill=skill)
