"""Our calls of the official simulators against the official executor; bounds; isolation."""

import dataclasses
import decimal
import functools
import itertools
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import mpmath
import pytest
from bfcl_eval.eval_checker.multi_turn_eval import multi_turn_utils
from bfcl_eval.eval_checker.multi_turn_eval.func_source_code.long_context import (
    CREDIT_CARD_EXTENSION,
)
from bfcl_eval.eval_checker.multi_turn_eval.func_source_code.posting_api import TwitterAPI
from cpu_cases import costs_less

from seeupo_jax.envs.bfcl import simulated_apis
from seeupo_jax.envs.bfcl.benchmark_files import CATEGORIES, load_tasks
from seeupo_jax.envs.bfcl.simulated_apis import MAX_DIGITS, MultiTurnTask, Verdict, World, official
from seeupo_jax.envs.tool_calls import ToolCall, parse_python

TASKS = [task for category in CATEGORIES for task in load_tasks(category).values()]
UNNAMED = 160  # reference calls with arguments that have no name
EMPTY = {"MathAPI": {}, "GorillaFileSystem": {}, "TwitterAPI": {"authenticated": True}}
_NUMBER = itertools.count()


def world_of(*classes, **scenario):
    return World(MultiTurnTask("multi_turn_base_0", (), classes, scenario or EMPTY, ()))


def call(world, name, /, **arguments):
    return world.call(ToolCall(name, arguments))


def official_answers(calls, scenario, classes, task_id="multi_turn_base_0"):
    """What the official executor says to Python source, in simulators that it just made."""
    tag = f"world{next(_NUMBER)}"
    run = functools.partial(multi_turn_utils.execute_multi_turn_func_call, model_name=tag)
    long_context = "long_context" in task_id
    answers, _ = run(
        list(calls), scenario, list(classes), test_entry_id=task_id, long_context=long_context
    )
    for key in [key for key in vars(multi_turn_utils) if key.startswith(f"{tag}_")]:
        delattr(multi_turn_utils, key)
    return answers


def test_arguments_without_a_name_are_bound_as_officially():
    """Reference calls have 160 of them; `read` names them, so here they are passed as written."""
    unnamed = 0
    for task in TASKS:
        world, calls = World(task), [source for turn in task.reference for source in turn]
        written = [call for source in calls for call in parse_python(f"[{source}]")]
        unnamed += sum(bool(call.positional) for call in written)
        answers = official_answers(calls, task.scenario, task.classes, task.task_id)
        assert [world.call(call) for call in written] == answers, task.task_id
    assert unnamed == UNNAMED


@pytest.mark.parametrize(
    "source",
    [
        "tail('a.txt', 3, 4)",
        "tail('a.txt', file_name='b.txt')",
        "tail()",
        "ls(True)",
        "power(9, exponent=2)",
        "mean([1, 2], numbers=[3])",
        "post_tweet('a', ['#b'], mentions=['@c'])",
    ],
)
def test_arguments_are_counted_in_the_official_words(source):
    (call,) = parse_python(source)
    assert [world_of(*EMPTY).call(call)] == official_answers([source], EMPTY, EMPTY)


def test_an_unnamed_argument_is_bounded_like_a_named_one():
    for source in ("power(9, 387420489)", "square_root(2, 1000000000)"):
        (call,) = parse_python(source)
        assert world_of("MathAPI").call(call).endswith("refused: the result would be too large")
    (call,) = parse_python("post_tweet(['a'])")
    infinite = dataclasses.replace(call, positional=([float("inf")],))
    assert world_of("TwitterAPI").call(infinite).startswith("Error during execution: Out of range")


def test_a_long_contexts_padding_belongs_to_one_world():
    task = TASKS[600 + 187]
    assert task.long_context and "TravelAPI" in task.classes
    card = next(iter(CREDIT_CARD_EXTENSION))
    before = CREDIT_CARD_EXTENSION[card]["balance"]
    first, second = World(task).instances["TravelAPI"], World(task).instances["TravelAPI"]
    first.credit_card_list[card]["balance"] -= 1
    assert second.credit_card_list[card]["balance"] == CREDIT_CARD_EXTENSION[card]["balance"]
    assert CREDIT_CARD_EXTENSION[card]["balance"] == before


def test_the_weather_of_a_long_context_is_read_by_one_thread_at_a_time(monkeypatch):
    def run(seed):
        scenario = {"VehicleControlAPI": {"random_seed": seed}}
        task = MultiTurnTask("x_0", (), ("VehicleControlAPI",), scenario, (), long_context=True)
        return call(World(task), "get_outside_temperature_from_google")

    def let_others_run(result, as_text=simulated_apis._as_text):
        time.sleep(1e-3)
        return as_text(result)

    serial = [run(seed) for seed in range(40)]
    assert len(set(serial)) == 40 and "humidity" in serial[0]
    monkeypatch.setattr(simulated_apis, "_as_text", let_others_run)
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(run, range(40))) == serial


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("power", {"base": 2, "exponent": 10}),
        ("power", {"base": -7, "exponent": 1000}),
        ("power", {"base": 1, "exponent": 10**12}),
        ("power", {"base": 2.5, "exponent": 10**6}),
        ("power", {"base": 0, "exponent": -1}),
        ("power", {"base": "2", "exponent": 3}),
        ("power", {"base": 2}),
        ("round_number", {"number": 1.25, "decimal_places": 1}),
        ("round_number", {"number": 987654, "decimal_places": -3}),
        ("round_number", {"number": 2.5, "decimal_places": -(10**9)}),
        ("square_root", {"number": 2, "precision": MAX_DIGITS}),
        ("square_root", {"number": 2, "precision": "3"}),
        ("square_root", {"number": -2, "precision": 3}),
        ("logarithm", {"value": 20, "base": 10, "precision": 2}),
        ("logarithm", {"value": "20", "base": 10, "precision": "7"}),
        ("logarithm", {"value": 20, "base": 1, "precision": 2}),
        ("logarithm", {"value": 20, "base": 10, "precision": None}),
        ("logarithm", {"value": 20, "base": 10}),
        ("mean", {"numbers": []}),
        ("mean", {"numbers": [1], "more": 2}),
        ("nothing", {"x": 1}),
        ("cat", {"file_name": 5}),
        ("post_tweet", {"content": "é", "tags": ["#a"]}),
    ],
)
def test_answers_within_the_bounds_are_the_official_ones_errors_included(name, arguments):
    source = f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
    actual = call(world_of(*EMPTY), name, **arguments)
    assert [actual] == official_answers([source], EMPTY, EMPTY)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("power", {"base": 9, "exponent": 9**9}),
        ("power", {"base": -(10**4000), "exponent": 10**4000}),
        ("round_number", {"number": 1, "decimal_places": -(10**9)}),
        ("round_number", {"number": True, "decimal_places": -(10**9)}),
        ("square_root", {"number": 2, "precision": MAX_DIGITS + 1}),
        ("square_root", {"number": 2, "precision": 10**9}),
        ("logarithm", {"value": 3, "base": 2, "precision": 10**9}),
        ("logarithm", {"value": 3, "base": 2, "precision": str(10**9)}),
        ("logarithm", {"value": 3, "base": 2, "precision": 1e9}),
        ("logarithm", {"value": "1E999999999", "base": 2, "precision": 5}),
        ("logarithm", {"value": 3, "base": "1e-999999999", "precision": 5}),
    ],
)
def test_a_number_too_large_to_compute_is_refused_at_once(name, arguments):
    world = world_of("MathAPI")
    answer = call(world, name, **arguments)
    assert answer == f"Error during execution: {name} refused: the result would be too large"
    assert costs_less(lambda: call(world, name, **arguments), 0.5)


def test_folders_that_hold_themselves_or_double_are_not_listed():
    world = world_of("GorillaFileSystem")
    assert call(world, "mkdir", dir_name="a") == "None"
    assert call(world, "find") == '{"matches": ["./a"]}'
    call(world, "cp", source="a", destination="a")
    assert call(world, "find").endswith("find refused: the result would be too large")
    doubling = world_of("GorillaFileSystem")
    call(doubling, "mkdir", dir_name="d0")
    for level in range(40):
        call(doubling, "mkdir", dir_name=f"d{level + 1}")
        call(doubling, "cp", source=f"d{level}", destination="copy")
        call(doubling, "mv", source=f"d{level}", destination=f"d{level + 1}")
        call(doubling, "mv", source="copy", destination=f"d{level + 1}")
    assert call(doubling, "du").endswith("du refused: the result would be too large")
    assert costs_less(lambda: call(doubling, "du"), 0.5)


@pytest.mark.parametrize(
    "name",
    [
        "__import__('os').getcwd()",
        "__init__",
        "_load_scenario",
        "root",
        "GorillaFileSystem.ls",
        "ls()",
        "",
        "print",
    ],
)
def test_only_the_public_methods_of_the_simulators_can_be_called(name):
    answer = call(world_of(*EMPTY), name)
    assert answer == f"Error during execution: name '{name}' is not defined"


@pytest.mark.parametrize("number", [float("nan"), float("inf"), [{"x": float("-inf")}]])
def test_arguments_without_a_finite_value_change_nothing(number):
    world = world_of("TwitterAPI")
    assert call(world, "post_tweet", content=number).startswith("Error during execution")
    assert world.instances["TwitterAPI"].tweets == {}


def test_default_arguments_are_shared_within_a_world_and_never_between_worlds(monkeypatch):
    # The official executor, run by other tests, leaves its mark in the defaults.
    monkeypatch.setattr(TwitterAPI.post_tweet, "__defaults__", ([], []))
    first, second = world_of("TwitterAPI"), world_of("TwitterAPI")
    for content in ("a", "b"):
        call(first, "post_tweet", content=content)
    call(first, "mention", tweet_id=0, mentioned_usernames=["@x"])
    assert json.loads(call(first, "get_tweet", tweet_id=1))["mentions"] == ["@x"]  # as officially
    assert json.loads(call(second, "post_tweet", content="c"))["mentions"] == []
    assert TwitterAPI.post_tweet.__defaults__ == ([], [])


def test_a_world_never_changes_the_task_it_was_made_from():
    task = TASKS[0]
    before = json.dumps(task.scenario)
    call(World(task), "mkdir", dir_name="new")
    assert "new" not in call(World(task), "ls")
    assert json.dumps(task.scenario) == before


def test_the_callers_precision_survives_a_call():
    world = world_of("MathAPI")
    before = mpmath.mp.dps, decimal.getcontext().prec
    call(world, "logarithm", value=3, base=2, precision=50)
    call(world, "square_root", number=2, precision=60)
    assert (mpmath.mp.dps, decimal.getcontext().prec) == before


def test_threads_with_different_precisions_do_not_disturb_each_other():
    def run(precision):
        return call(world_of("MathAPI"), "logarithm", value=3, base=2, precision=precision)

    precisions = [5, 900, 40, 700, 300, 999, 12, 500] * 4
    serial = [run(precision) for precision in precisions]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(run, precisions)) == serial
    finally:
        sys.setswitchinterval(interval)


def test_positional_arguments_of_a_reference_call_get_their_names():
    world = world_of("GorillaFileSystem")
    assert world.read("tail('a.txt', lines=3)") == ToolCall(
        "tail", {"file_name": "a.txt", "lines": 3}
    )
    with pytest.raises(ValueError, match="instead of the call"):
        world.read("cat(open('a.txt'))")


def test_a_turn_of_which_every_response_came_earlier_still_needs_a_call():
    reference = (("ls()",), ("ls()",))
    task = MultiTurnTask("multi_turn_base_0", (), ("GorillaFileSystem",), {}, reference)
    for second_turn, passed in (([], 1), (["no such tool"], 2)):
        verdict, world = Verdict(task), World(task)
        answer = world.call(ToolCall("ls", {}))
        verdict.end_turn(world, [answer, answer])
        verdict.end_turn(world, second_turn)
        assert verdict.turns_passed == passed and verdict.valid == (passed == 2)


def test_a_turn_after_a_failed_one_does_not_pass():
    task = MultiTurnTask("multi_turn_base_0", (), ("GorillaFileSystem",), {}, (("ls()",), ()))
    verdict, world = Verdict(task), World(task)
    verdict.end_turn(world, ["wrong"])
    verdict.end_turn(world, [])
    assert verdict.turns_passed == 0 and not verdict.valid


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "bfcl_eval", None)
    with pytest.raises(ValueError, match="bfcl_eval.*pip install --no-deps bfcl-eval=="):
        official("bfcl_eval")
