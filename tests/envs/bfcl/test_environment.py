"""The environment played end to end, and its verdicts against the official multi-turn checker."""

import functools
import itertools
import json
import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files

import bfcl_eval
import pytest
from bfcl_eval.eval_checker.multi_turn_eval import multi_turn_utils
from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker import multi_turn_checker

from seeupo_jax.envs.base import Labelled
from seeupo_jax.envs.bfcl.benchmark_files import CATEGORIES
from seeupo_jax.envs.bfcl.environment import Bfcl
from seeupo_jax.envs.bfcl.formats import FORMATS
from seeupo_jax.envs.bfcl.multi_turn import CLOSING
from seeupo_jax.envs.tool_calls import parse_hermes, render_hermes

DATA = files(bfcl_eval) / "data"
PATIENT = {"max_calls": 60, "max_calls_per_user_turn": 60}
_NUMBER = itertools.count()


def ids_of(category):
    return [f"{category}_{index}" for index in range(200)]


IDS = ids_of("multi_turn_base")
ALL_IDS = [task_id for category in CATEGORIES for task_id in ids_of(category)]


def rows(path):
    return {row["id"]: row for row in map(json.loads, (DATA / path).read_text().splitlines())}


ENTRIES, ANSWERS = {}, {}
for name in CATEGORIES:
    ENTRIES |= rows(f"BFCL_v4_{name}.json")
    ANSWERS |= rows(f"possible_answer/BFCL_v4_{name}.json")


def category_of(task_id):
    return task_id.rpartition("_")[0]


@functools.cache
def reference_turns(task_id):
    """For each user turn, its reference calls."""
    turns = Bfcl(category=category_of(task_id)).play(task_id)
    return [[call for message in turn for call in parse_hermes(message)] for turn in turns]


def play(task_id, turns, **options):
    """One message a user turn with all its calls, and one that ends it; the results."""
    env = Bfcl(category_of(task_id), **(PATIENT | options))
    env.reset(task_id, seed=0)
    render, results = FORMATS[env.format].render, []
    for turn in turns:
        results += [env.step(text) for text in ([render(turn)] if turn else []) + [CLOSING]]
    return results


def forget(tag):
    """Removes the simulators that the official executor keeps under a name."""
    for key in [key for key in vars(multi_turn_utils) if key.startswith(tag)]:
        delattr(multi_turn_utils, key)


def official_verdict(task_id, turns):
    """The official checker's verdict on the same calls, in simulators that it just made."""
    tag = f"turns{next(_NUMBER)}x"
    sources = [[f"{c.name}(**{dict(c.arguments)!r})" for c in turn] for turn in turns]
    decoded = [[turn] if turn else [] for turn in sources]
    truth = ANSWERS[task_id]["ground_truth"]
    result = multi_turn_checker(decoded, truth, ENTRIES[task_id], category_of(task_id), tag)
    forget(tag)
    return float(result["valid"])


@functools.cache
def official_answers(task_id):
    """What the official executor says to the reference calls, in simulators that it just made."""
    tag, entry = f"answers{next(_NUMBER)}x", ENTRIES[task_id]
    answers, _ = multi_turn_utils.execute_multi_turn_func_call(
        [source for turn in ANSWERS[task_id]["ground_truth"] for source in turn],
        entry["initial_config"],
        entry["involved_classes"],
        tag,
        task_id,
        long_context="long_context" in task_id,
    )
    forget(tag)
    return answers


def edited(turns, rng):
    """Calls with one random change: some of them harmless, most of them not."""
    turns = [list(turn) for turn in turns]
    full = [index for index, turn in enumerate(turns) if turn]
    here, there = turns[rng.choice(full)], turns[rng.choice(full)]
    kind = rng.randrange(5)
    if kind == 0:
        del here[rng.randrange(len(here))]
    elif kind == 1:
        here.append(rng.choice(here))
    elif kind == 2:
        there.append(here.pop())
    elif kind == 3:
        rng.shuffle(here)
    else:
        here.insert(rng.randrange(len(here) + 1), rng.choice(there))
    return turns


@pytest.mark.sampled(4)
@pytest.mark.parametrize("calls_per_message", ["turn", "one"])
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("category", CATEGORIES)
def test_the_oracle_solves_every_task_with_the_official_answers(category, form, calls_per_message):
    env = Bfcl(category, format=form, **PATIENT)
    for task_id in ids_of(category):
        env.reset(task_id, seed=0)
        messages = [m for turn in env.play(task_id, calls_per_message) for m in turn]
        results = [env.step(message) for message in messages]
        assert [result.done for result in results] == [False] * (len(messages) - 1) + [True]
        assert sum(result.reward for result in results) == env.score() == 1.0, task_id
        assert results[-1].info["user_turns_passed"] == len(ENTRIES[task_id]["question"])
        assert not results[-1].info["degenerate"]
        said = [m["content"] for r in results for m in r.observation if m["role"] == "tool"]
        assert said == official_answers(task_id), task_id


@pytest.mark.sampled(2)
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("category", CATEGORIES)
def test_an_oracle_that_drops_a_call_solves_no_task(category, form):
    rng, env = random.Random(0), Bfcl(category, format=form, **PATIENT)
    for task_id in ids_of(category):
        env.reset(task_id, seed=0)
        turns = list(env.play(task_id, "one"))
        dropped = rng.choice([index for index, turn in enumerate(turns) if len(turn) > 1])
        turns[dropped] = (*turns[dropped][:-2], CLOSING)
        assert [env.step(message) for turn in turns for message in turn][-1].done
        assert env.score() == 0, task_id


def test_without_a_turns_last_call_the_verdict_is_the_official_one():
    scores = []
    for task_id in IDS:
        turns = reference_turns(task_id)
        for index in [index for index, turn in enumerate(turns) if turn]:
            dropped = [*turns[:index], turns[index][:-1], *turns[index + 1 :]]
            scores.append(play(task_id, dropped)[-1].reward)
            assert scores[-1] == official_verdict(task_id, dropped), (task_id, index)
    assert len(scores) == 731 and sum(scores) == 0  # no turn's last call can be left out


@pytest.mark.parametrize("category", CATEGORIES)
def test_after_a_random_change_the_verdict_is_the_official_one(category):
    rng = random.Random(0)
    scores = []
    for task_id in ids_of(category):
        turns = edited(reference_turns(task_id), rng)
        scores.append(play(task_id, turns)[-1].reward)
        assert scores[-1] == official_verdict(task_id, turns), (task_id, turns)
    assert 20 < sum(scores) < 180


def test_user_turns_follow_a_message_without_a_call():
    env, questions = Bfcl(), ENTRIES[IDS[0]]["question"]
    messages, _ = env.reset(IDS[0], seed=0)
    assert [message["role"] for message in messages] == ["system", "user"]
    assert messages[1:] == tuple(questions[0])
    result = env.step("Nothing to do.")
    assert result.observation == tuple(questions[1]) and result.reward == 0 and not result.done
    assert result.info["user_turns"] == 1 and result.info["user_turns_passed"] == 0
    assert result.info["user_turns_of_task"] == len(questions) == 4


def test_each_call_is_answered_by_one_tool_message_in_order():
    result = play(IDS[1], reference_turns(IDS[1]))[2]
    assert result.observation == (
        {"role": "tool", "content": '{"current_working_directory": "workspace"}'},
        {"role": "tool", "content": "{\"result\": \"'log.txt' moved to 'archive/log.txt'\"}"},
    )


def test_a_message_that_cannot_be_read_runs_nothing_and_keeps_the_turn():
    env = Bfcl()
    env.reset(IDS[0], seed=0)
    result = env.step(render_hermes("mkdir", dir_name="x") + "<tool_call>")
    assert result.info["bad_call"] and result.info["user_turns"] == 0 and not result.done
    (message,) = result.observation
    assert message["role"] == "tool" and "</tool_call>" in json.loads(message["content"])["error"]
    answer = env.step(render_hermes("ls"))
    assert '"x"' not in answer.observation[0]["content"]
    last = env.step(render_hermes("no_such_tool")).info["executed"]
    assert (result.info["executed"], last) == ([False], [False, True, False])
    mixed = env.step(render_hermes("ls") + render_hermes("no_such_tool"))
    assert mixed.info["executed"][-1] is False and len(mixed.observation) == 2


def test_the_last_allowed_message_ends_the_episode_without_success():
    turns = reference_turns(IDS[0])
    results = play(IDS[0], turns[:-1], max_calls=6)
    assert [result.done for result in results] == [False] * 5 + [True]
    assert results[-1].reward == 0 and results[-1].info["out_of_calls"]
    assert results[-1].info["user_turns_passed"] == 3
    exactly = play(IDS[0], turns, max_calls=8)
    assert exactly[-1].reward == 1 and not exactly[-1].info["out_of_calls"]


def test_one_message_too_many_in_a_user_turn_ends_the_episode():
    env = Bfcl(max_calls=60, max_calls_per_user_turn=2)
    env.reset(IDS[0], seed=0)
    call = render_hermes("pwd")
    results = [env.step(text) for text in (call, call, CLOSING, call, call, call)]
    assert [result.done for result in results] == [False] * 5 + [True]
    assert results[-1].info["out_of_calls"] and results[-1].info["user_turns"] == 1


def test_a_done_or_unstarted_episode_takes_no_message():
    env = Bfcl(max_calls=1)
    with pytest.raises(ValueError, match="reset"):
        env.step(CLOSING)
    env.reset(IDS[0], seed=0)
    assert env.step(CLOSING).done
    with pytest.raises(ValueError, match="reset"):
        env.step(CLOSING)
    env.close()
    with pytest.raises(ValueError, match="reset"):
        env.score()


def test_a_long_answer_is_cut_for_the_policy_and_whole_for_the_verdict():
    def answers(results):
        return [m["content"] for r in results for m in r.observation if m["role"] == "tool"]

    whole = play(IDS[0], reference_turns(IDS[0]))
    short = play(IDS[0], reference_turns(IDS[0]), max_observation_chars=20)
    assert short[-1].reward == 1 and whole[-1].info["observations_cut"] == 0
    assert answers(short)[0] == '{"current_working_di... [21 more characters]'
    uncut = [content for content in answers(whole) if len(content) <= 20]
    assert [content for content in answers(short) if content in uncut] == uncut
    assert short[-1].info["observations_cut"] == len(answers(whole)) - len(uncut) == 8


def test_an_answer_as_long_as_the_limit_is_whole():
    answer = '{"current_working_directory": "document"}'
    for limit, cut in ((len(answer), 0), (len(answer) - 1, 1)):
        env = Bfcl(max_observation_chars=limit)
        env.reset(IDS[0], seed=0)
        result = env.step(render_hermes("cd", folder="document"))
        assert (result.observation[0]["content"] == answer) == (cut == 0)
        assert result.info["observations_cut"] == cut


def test_half_a_character_from_the_model_comes_back_as_text():
    env = Bfcl()
    env.reset(IDS[0], seed=0)
    (message,) = env.step(render_hermes("\ud800")).observation
    assert message["content"] == "Error during execution: name '\\ud800' is not defined"


def test_code_in_a_message_is_text(tmp_path):
    target = tmp_path / "written"
    code = f"__import__('pathlib').Path({str(target)!r}).write_text('x')"
    env = Bfcl()
    for action in (
        code,
        render_hermes(code),
        render_hermes("ls", **{f"a={code}, b": 1}),
        render_hermes("echo", content=code),
        render_hermes("eval", source=code),
    ):
        env.reset(IDS[0], seed=0)
        assert not env.step(action).done and not target.exists()


def test_threads_give_the_same_episodes_as_one_after_the_other():
    def run(task_id, form):
        results = play(task_id, reference_turns(task_id), format=form)
        return [(r.observation, r.reward, r.info) for r in results]

    forms = [*FORMATS] * 400
    serial = [*map(run, ALL_IDS, forms)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(run, ALL_IDS, forms)) == serial


def test_answers_depend_on_neither_the_hash_seed_nor_the_time_zone():
    # Python's sets have another order in every process, and one simulator asks for local times.
    code = """
import hashlib
from seeupo_jax.envs.bfcl.benchmark_files import CATEGORIES, load_tasks
from seeupo_jax.envs.bfcl.simulated_apis import World
found = hashlib.sha256()
for task in [task for name in CATEGORIES for task in load_tasks(name).values()]:
    world = World(task)
    for source in [source for turn in task.reference for source in turn]:
        found.update(world.call(world.read(source)).encode())
print(found.hexdigest())
"""
    settings = [{"PYTHONHASHSEED": "1", "TZ": "UTC"}, {"PYTHONHASHSEED": "2", "TZ": "Asia/Tokyo"}]
    found = {
        subprocess.check_output([sys.executable, "-c", code], env=os.environ | own)
        for own in settings
    }
    assert len(found) == 1


@pytest.mark.parametrize(
    ("calls_per_message", "split", "skipped"),
    [("turn", "train", 1), ("turn", "test", 12), ("one", "train", 37), ("one", "test", 30)],
)
def test_tasks_whose_oracle_breaks_a_bound_have_no_demonstration(calls_per_message, split, skipped):
    shown = Bfcl().demonstrations(split, calls_per_message=calls_per_message)
    assert shown.skipped == skipped and len(shown) == 100 - skipped


def test_the_bound_on_a_user_turn_skips_demonstrations_too():
    env = Bfcl(max_calls=60, max_calls_per_user_turn=2)
    longest = [max(map(len, ANSWERS[task_id]["ground_truth"])) for task_id in env.task_ids("test")]
    shown = env.demonstrations("test", calls_per_message="one")
    assert len(shown) == sum(calls <= 2 for calls in longest) < 100
    assert len(env.demonstrations("test", calls_per_message="turn")) == 100


def test_a_demonstration_is_a_solved_conversation_that_disturbs_no_running_episode():
    env = Bfcl()
    messages, tools = env.reset("multi_turn_base_100", seed=0)
    shown = env.demonstrations("test")
    assert shown[0].messages[:2] == messages and shown[0].tools == tools
    assert shown[0] == shown[-len(shown)] and shown[0] != shown[1]
    actions = [m["content"] for m in shown[0].messages if m["role"] == "assistant"]
    assert shown[0].messages[-1]["content"] == actions[-1] == CLOSING
    assert [env.step(action).reward for action in actions][-1] == 1.0


def test_whole_words_are_names_that_no_sentence_holds():
    words = Bfcl().vocabulary()
    assert {"get_flight_cost", "file_name", "lockDoors"} <= set(words)
    assert not {"ls", "sort", "name", "symbol"} & set(words) and len(words) == len(set(words))


@pytest.mark.parametrize(
    ("action", "sentence"),
    [
        (lambda: Bfcl(category="base"), "category: got 'base'; allowed: multi_turn_base, multi_"),
        (lambda: Bfcl(format="json"), "format: got 'json'; allowed: hermes, python."),
        (
            lambda: Bfcl(reward="dense"),
            "reward: got 'dense'; allowed: official, fraction, shaped.",
        ),
        (lambda: Bfcl(max_calls=0), "max_calls: got 0"),
        (lambda: Bfcl(max_calls=None), "max_calls: got None"),
        (lambda: Bfcl(max_calls_per_user_turn="2"), "max_calls_per_user_turn: got '2'"),
        (lambda: Bfcl(max_observation_chars=0), "max_observation_chars: got 0"),
        (lambda: Bfcl().task_ids("dev"), "split: got 'dev'; allowed: train, test"),
        (lambda: Bfcl().reset("multi_turn_base_200", 0), "task: got 'multi_turn_base_200'"),
        (lambda: Bfcl().demonstrations("dev"), "split: got 'dev'"),
        (
            lambda: Bfcl().demonstrations("test", calls_per_message="all"),
            "calls_per_message: got 'all'; allowed: turn, one",
        ),
    ],
)
def test_a_users_mistake_is_answered_with_what_is_allowed(action, sentence):
    with pytest.raises(ValueError, match=sentence):
        action()


def test_a_tasks_labels_are_its_category_and_its_user_turns():
    env = Bfcl()
    assert isinstance(env, Labelled)
    labels = env.labels("multi_turn_base_0")
    assert labels == {"category": "multi_turn_base", "user_turns": "4"}
