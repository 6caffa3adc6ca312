"""Generated tasks: solvable as the official checker sees it, each call needed, nobody's words."""

import hashlib
import itertools
import json
import os
import random
import re
import subprocess
import sys
from collections import Counter

import pytest
from world_cases import entry_of, official_verdict, tasks

from seeupo_jax.envs.bfcl.benchmark_files import CATEGORIES, load_tasks
from seeupo_jax.envs.bfcl.simulated_apis import Verdict, World
from seeupo_jax.envs.tool_calls import ToolCall, render_python
from seeupo_jax.instruments.bfcl_worlds import world_words
from seeupo_jax.instruments.bfcl_worlds.composition import CLASSES, ENDS, HELLOS
from seeupo_jax.instruments.bfcl_worlds.generator import (
    SPLITS,
    VARIANTS,
    GenerationOptions,
    generate,
    opening_split,
)

TASKS = 240
GRAM = 6  # words in a row that no generated text may share with an official one


def texts(task):
    return [message["content"] for messages in task.questions for message in messages]


def own_verdict(task, turns):
    world, verdict = World(task), Verdict(task)
    for turn in turns:
        verdict.end_turn(world, [world.call(world.read(source)) for source in turn])
    return verdict.valid


def changed(value):
    """Another value of the same type."""
    match value:
        case bool():
            return not value
        case int() | float():
            return value + 1
        case str():
            return f"{value}x"
        case list():
            return [changed(value[0]), *value[1:]]
        case dict():
            return {key: changed(item) for key, item in value.items()}
    raise AssertionError(value)


def with_wrong_arguments(task, rng):
    """The reference with one argument of one call changed, once for each call that has any."""
    world = World(task)
    for turn, calls in enumerate(task.reference):
        for position, source in enumerate(calls):
            call = world.read(source)
            if call.arguments:
                name = rng.choice(list(call.arguments))
                wrong = dict(call.arguments) | {name: changed(call.arguments[name])}
                answer = [list(calls) for calls in task.reference]
                answer[turn][position] = render_python([ToolCall(call.name, wrong)])[1:-1]
                yield answer


def said(task, turns):
    world = World(task)
    return [world.call(world.read(source)) for turn in turns for source in turn]


def test_the_official_checker_finds_every_reference_valid():
    used = Counter()
    for task in tasks(TASKS):
        assert official_verdict(entry_of(task), task.reference, task.reference), task
        used.update(task.classes)
    assert set(used) == set(CLASSES) and min(used.values()) > TASKS / 20


def test_the_official_checker_finds_an_answer_without_any_one_call_invalid():
    count = 0
    for task in tasks(TASKS):
        for turn, position in ((t, p) for t, c in enumerate(task.reference) for p in range(len(c))):
            answer = [list(calls) for calls in task.reference]
            del answer[turn][position]
            assert not official_verdict(entry_of(task), task.reference, answer), (task, answer)
            assert not own_verdict(task, answer)
            count += 1
    assert count > 3 * TASKS


def test_an_answer_with_a_wrong_argument_is_valid_only_where_no_simulator_tells_it_apart():
    # A password, say, opens whatever it is, and a maximum may be that of other numbers too.
    rng, found = random.Random(0), Counter()
    for task in tasks(TASKS):
        for answer in with_wrong_arguments(task, rng):
            valid = official_verdict(entry_of(task), task.reference, answer)
            assert valid == own_verdict(task, answer)
            assert not valid or said(task, answer) == said(task, task.reference)
            found[valid] += 1
    assert found[False] > 2 * TASKS and found[True] < 0.12 * found.total()


def test_what_is_withheld_is_missing_until_its_turn_and_needed_then():
    seen = Counter()
    for task, category in zip(tasks(TASKS), itertools.cycle(VARIANTS)):
        empty = [turn for turn, calls in enumerate(task.reference) if not calls]
        silent = [turn for turn, messages in enumerate(task.questions) if not messages]
        seen[category] += 1
        if category in ("multi_turn_base", "multi_turn_long_context"):
            assert task.long_context == (category == "multi_turn_long_context")
            assert not empty and not silent and not task.held_out
            continue
        assert len(empty) == 1
        if category == "multi_turn_miss_param":
            assert not silent and not task.held_out
            continue
        ((turn, (tool,)),) = task.held_out.items()
        assert silent == [turn] == [empty[0] + 1]
        before = [source for calls in task.reference[:turn] for source in calls]
        assert not any(source.startswith(f"{tool}(") for source in before)
        assert any(source.startswith(f"{tool}(") for source in task.reference[turn])
    assert set(seen) == set(VARIANTS)


def test_a_conversation_is_the_same_whatever_is_withheld_from_it():
    for index in range(30):
        base, other = (
            generate(GenerationOptions((category,), (2, 2), CLASSES, 0), "train", index)
            for category in ("multi_turn_base", "multi_turn_miss_func")
        )
        assert texts(base) == texts(other)
        assert [calls for calls in other.reference if calls] == list(base.reference)


def opening(task):
    """The first request without the words around it."""
    text = texts(task)[0]
    for lead in filter(None, HELLOS):
        text = text.removeprefix(f"{lead} ")
    for end in filter(None, ENDS):
        text = text.removesuffix(f" {end}")
    return text


def test_no_conversation_begins_with_the_request_of_one_of_another_split():
    whole = ("multi_turn_base", "multi_turn_miss_func", "multi_turn_long_context")
    kinds = [
        GenerationOptions(whole[:1], (1, 1), CLASSES, 3),
        GenerationOptions(whole, (1, 3), CLASSES, 0),
    ]
    first = {split: {opening(t) for o in kinds for t in tasks(60, split, o)} for split in SPLITS}
    assert all(len(begins) > 80 for begins in first.values())
    assert not any(first[a] & first[b] for a, b in itertools.combinations(SPLITS, 2))
    assert all(opening_split(text) == split for split in SPLITS for text in first[split])


def test_conversations_are_many():
    assert len({str(task.questions) for task in tasks(TASKS)}) == TASKS
    requests = {
        re.sub(r"'[^']*'|[\d.]+", "_", text) for task in tasks(TASKS) for text in texts(task)
    }
    assert len(requests) > TASKS


@pytest.mark.parametrize("turns", [(1, 1), (3, 3), (6, 8)])
def test_a_conversation_has_as_many_turns_as_asked_for(turns):
    options = GenerationOptions(("multi_turn_base", "multi_turn_miss_param"), turns, CLASSES, 0)
    for index, task in enumerate(tasks(20, options=options)):
        assert turns[0] <= len(task.questions) - index % 2 <= turns[1]


@pytest.mark.parametrize("name", CLASSES)
def test_one_simulator_is_enough(name):
    made = tasks(12, options=GenerationOptions(tuple(VARIANTS), (2, 5), (name,), 0))
    assert {task.classes for task in made} == {(name,)}


def test_a_task_depends_on_neither_the_process_nor_the_time_zone():
    code = "import sys; sys.path[:0] = sys.argv[1:]\nimport world_cases\n"
    code += (
        "import hashlib\nprint(hashlib.sha256(repr(world_cases.tasks(40)).encode()).hexdigest())"
    )
    settings = {"PYTHONHASHSEED": "7", "TZ": "Asia/Tokyo"}
    command = [sys.executable, "-c", code, *sys.path]
    said = subprocess.check_output(command, env=os.environ | settings, text=True).strip()
    assert said == hashlib.sha256(repr(tasks(40)).encode()).hexdigest()


def test_a_scenario_is_plain_json():
    for task in tasks(60):
        assert json.loads(json.dumps(task.scenario)) == task.scenario


def words_of(text):
    return re.findall(r"[a-z0-9']+", text.lower())


def grams(text):
    words = words_of(text)
    return {tuple(words[i : i + GRAM]) for i in range(len(words) - GRAM + 1)}


def test_no_text_shares_six_words_in_a_row_with_an_official_question():
    official = [task for name in CATEGORIES for task in load_tasks(name).values()]
    taken = set().union(*(grams(text) for task in official for text in texts(task)))
    assert len(taken) > 20_000
    for task in tasks(500):
        for text in texts(task):
            assert not grams(text) & taken, text


def test_no_name_of_a_world_is_an_official_one():
    official = [task for name in CATEGORIES for task in load_tasks(name).values()]
    dump = json.dumps([[t.questions, t.scenario, t.reference] for t in official])
    known = set(words_of(dump)) | set(re.findall(r"[\w.#@ ]+", dump))
    kinds = ("FIRST_NAMES", "LAST_NAMES", "HANDLES", "FOLDERS", "NEW_FOLDERS", "FILE_STEMS")
    for kind in (*kinds, "NEW_STEMS", "TAGS", "TICKERS", "STREETS", "SUBJECTS", "THINGS", "FIXES"):
        for name in getattr(world_words, kind):
            assert name not in known and name.lower() not in known and f'"{name}' not in dump


def test_turns_that_cannot_be_written_are_refused_in_a_sentence():
    with pytest.raises(ValueError, match="no task train/0 of multi_turn_base after 200 attempts"):
        generate(GenerationOptions(("multi_turn_base",), (30, 30), ("MathAPI",), 0), "train", 0)
