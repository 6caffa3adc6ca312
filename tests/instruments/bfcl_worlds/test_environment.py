"""The environment over generated tasks: played by an oracle, shown, labelled, refused."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from seeupo_jax import envs
from seeupo_jax.envs.base import Demonstrator, Labelled
from seeupo_jax.envs.bfcl.formats import FORMATS
from seeupo_jax.envs.bfcl.multi_turn import CLOSING
from seeupo_jax.instruments.bfcl_worlds.environment import BfclWorlds
from seeupo_jax.instruments.bfcl_worlds.generator import SPLITS, VARIANTS

ALL = {"categories": list(VARIANTS), "turns": [1, 4], "max_calls": 60}


def make(**options):
    return envs.make("bfcl_worlds", **(ALL | options))


def play(env, task_id, messages):
    env.reset(task_id, seed=0)
    return [env.step(message) for message in messages]


@pytest.mark.parametrize("calls_per_message", ["turn", "one"])
@pytest.mark.parametrize("form", FORMATS)
def test_the_oracle_solves_every_task_and_no_other_does(form, calls_per_message):
    env = make(format=form, reward="fraction")
    for task_id in [f"{split}/{index}" for split in SPLITS for index in range(12)]:
        turns = [*env.play(task_id, calls_per_message)]
        results = play(env, task_id, [message for turn in turns for message in turn])
        assert [result.done for result in results] == [False] * (len(results) - 1) + [True]
        assert sum(result.reward for result in results) == env.score() == 1.0
        last = max(index for index, turn in enumerate(turns) if len(turn) > 1)
        short = [m for t, turn in enumerate(turns) for m in (turn[1:] if t == last else turn)]
        results = play(env, task_id, short)
        assert results[-1].done and env.score() == 0
        assert sum(result.reward for result in results) == pytest.approx(last / len(turns))


def test_a_tool_that_is_missing_comes_with_a_later_message_and_is_not_listed_before():
    env = make(categories=["multi_turn_miss_func"])
    for index in range(10):
        ((turn, (tool,)),) = env.find_task(f"test/{index}").held_out.items()
        messages, tools = env.reset(f"test/{index}", seed=0)
        assert tool not in {listed["name"] for listed in tools}
        replies = [env.step(CLOSING).observation for _ in range(turn)]
        assert f'"name": "{tool}"' in replies[-1][0]["content"]
        assert not any(f'"name": "{tool}"' in m["content"] for r in replies[:-1] for m in r)


def test_a_missing_detail_is_given_by_the_next_message():
    env = make(categories=["multi_turn_miss_param"], turns=[1, 1])
    for index in range(10):
        first, second = env.play(f"train/{index}")
        assert first == (CLOSING,) and len(second) == 2


def test_demonstrations_are_solved_conversations_in_the_tool_format():
    env = make(max_calls=10)
    assert isinstance(env, Demonstrator) and isinstance(env, Labelled)
    shown = make(validation_tasks=12, max_calls=10).demonstrations("validation")
    assert len(shown) == 12 and shown.skipped == 0
    for index, demonstration in enumerate(shown):
        messages, tools = env.reset(f"validation/{index}", seed=0)
        assert demonstration.messages[: len(messages)] == messages
        assert demonstration.tools == tools
        actions = [m["content"] for m in demonstration.messages if m["role"] == "assistant"]
        assert [env.step(action) for action in actions][-1].done and env.score() == 1
    few = make(validation_tasks=12, max_calls=3).demonstrations("validation")
    assert len(few) + few.skipped == 12 and few.skipped > 0


def test_labels_are_the_category_the_turns_and_the_simulators():
    env = make(turns=[2, 2], classes=["TicketAPI", "MathAPI"])
    found = [env.labels(f"train/{index}") for index in range(12)]
    assert [label["category"] for label in found] == [*VARIANTS] * 3
    assert {label["user_turns"] for label in found} == {"2", "3"}
    assert {label["classes"] for label in found} == {"MathAPI", "TicketAPI", "MathAPI+TicketAPI"}
    assert "create_ticket" in env.vocabulary() and "book_flight" not in env.vocabulary()


def test_as_many_tasks_as_wanted_cost_nothing_before_they_are_used():
    env = make(train_tasks=1_000_000)
    ids = env.task_ids("train")
    assert len(ids) == 1_000_000 and ids[-1] == "train/999999"
    env.reset(ids[-1], seed=0)
    assert [len(make().task_ids(split)) for split in SPLITS] == [2000, 100, 200]


def test_another_seed_is_another_family_of_tasks():
    one, other = make(), make(seed=1)
    assert one.find_task("train/0") != other.find_task("train/0")
    assert one.find_task("train/0") is make().find_task("train/0")


def test_threads_play_the_same_episodes_as_one_after_the_other():
    ids = [f"train/{index}" for index in range(40)]
    local = threading.local()

    def run(task_id):
        if not hasattr(local, "env"):
            local.env = make()
        messages = [m for turn in local.env.play(task_id) for m in turn]
        return [(r.observation, r.reward, r.info) for r in play(local.env, task_id, messages)]

    serial = [*map(run, ids)]
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(run, ids)) == serial


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"categories": ["base"]},
            "categories: got 'base'; allowed: multi_turn_base, multi_turn_m",
        ),
        ({"categories": []}, r"categories: got \[\]; allowed: a list of multi_turn_base, "),
        (
            {"categories": "multi_turn_base"},
            "categories: got 'multi_turn_base'; allowed: a list of",
        ),
        ({"classes": ["Files"]}, "classes: got 'Files'; allowed: GorillaFileSystem, MathAPI, Mess"),
        ({"classes": ["MathAPI", "MathAPI"]}, "classes: got .* allowed: a list of GorillaFileSys"),
        ({"turns": 3}, r"turns: got 3; allowed: the fewest and the most, from 1 to 8, such as"),
        ({"turns": [3, 2]}, r"turns: got \[3, 2\]; allowed: the fewest and the most"),
        ({"turns": [1, 9]}, r"turns: got \[1, 9\]; allowed: the fewest and the most"),
        ({"turns": [1.0, 2.0]}, r"turns: got \[1.0, 2.0\]; allowed: the fewest and the most"),
        ({"train_tasks": 0}, "train_tasks: got 0; allowed: an integer >= 1"),
        ({"test_tasks": None}, "test_tasks: got None; allowed: an integer >= 1"),
        ({"seed": "x"}, "seed: got 'x'; allowed: an integer"),
        ({"format": "xml"}, "format: got 'xml'; allowed: hermes, python"),
        ({"reward": "dense"}, "reward: got 'dense'; allowed: official, fraction, shaped"),
        ({"max_calls": 0}, "max_calls: got 0"),
    ],
)
def test_an_option_that_is_none_is_refused_in_a_sentence(options, sentence):
    with pytest.raises(ValueError, match=f"^bfcl_worlds {sentence}"):
        make(**options)


def test_a_task_that_is_none_is_refused_in_a_sentence():
    env = BfclWorlds()
    for task_id in ("train/2000", "multi_turn_base_0", "dev/0"):
        with pytest.raises(ValueError, match=f"bfcl_worlds task: got '{task_id}'; allowed: train/"):
            env.reset(task_id, seed=0)
    with pytest.raises(ValueError, match="bfcl_worlds split: got 'dev'; allowed: train"):
        env.task_ids("dev")
    with pytest.raises(ValueError, match=r"bfcl_worlds: reset\(\) must come before"):
        env.step(CLOSING)
