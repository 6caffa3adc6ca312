"""What is exported is what was played: the official scorer comes to the same verdicts."""

import itertools
import json
import random
import subprocess
import sys

import pytest
from places import SUPPORT

from seeupo_jax.envs.bfcl.environment import Bfcl
from seeupo_jax.envs.bfcl.result_files import DECODER, export_results, to_result
from seeupo_jax.envs.tool_calls import render_hermes

SCORER = SUPPORT / "bfcl_official.py"
CATEGORIES, FORMS = ("multi_turn_base", "multi_turn_miss_func"), ("hermes", "python")
NOTHING = '<tool_call>\n{"name": "no_such_tool", "arguments": {}}\n</tool_call>'


def play(env, task_id, actions):
    """The messages of an episode, as far as it goes."""
    messages, _ = env.reset(task_id, 0)
    messages = list(messages)
    for action in actions:
        step = env.step(action)
        messages += [{"role": "assistant", "content": action}, *step.observation]
        if step.done:
            break
    return messages


@pytest.fixture(scope="module")
def judged(tmp_path_factory):
    """What was exported, and what the official scorer, begun once for all of it, says of it."""
    mark = tmp_path_factory.mktemp("hostile") / "mark"
    env, task_id = Bfcl(max_calls=20), "multi_turn_base_0"
    played = play(env, task_id, [*hostile(mark), *["No."] * 4])
    exported = {"hostile": (env, [(task_id, 0, played)], {task_id})}
    for category, form in itertools.product(CATEGORIES, FORMS):
        exported[category, form] = solved_and_spoilt(category, form)
    places = []
    for env, played, _ in exported.values():
        root = tmp_path_factory.mktemp("exported")
        export_results(env, played, root)
        places += [str(root / "member_0"), env.category]
    line = [sys.executable, str(SCORER), DECODER, *places]
    done = subprocess.run(line, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    verdicts = [json.loads(text) for text in done.stdout.splitlines() if text.startswith('{"head"')]
    pairs = zip(exported.items(), verdicts, strict=True)
    return mark, {name: (failed, verdict) for (name, (*_, failed)), verdict in pairs}


def steps(env, task_id, *actions):
    return to_result(env, task_id, play(env, task_id, actions))


def spoil(actions, rng):
    """An oracle's actions, most often with a fault."""
    actions, index = list(actions), rng.randrange(len(actions))
    faults = {
        "none": lambda: None,
        "a message is missing": lambda: actions.pop(index),
        "a message comes twice": lambda: actions.insert(index, actions[index]),
        "a value is wrong": lambda: actions.__setitem__(index, actions[index].replace("e", "3", 9)),
        "it stops early": lambda: actions.__delitem__(slice(index, None)),
        "it thinks": lambda: actions.__setitem__(
            index, f"<think>so [ls()]</think>{actions[index]}"
        ),
        "it cannot be read": lambda: actions.insert(index, "<tool_call>[ls(</tool_call>"),
    }
    faults[rng.choice(list(faults))]()
    return actions


def solved_and_spoilt(category, form):
    """The environment, episodes of it, and the tasks that they failed."""
    env, rng = Bfcl(category=category, format=form, max_calls=40), random.Random(form)
    played, failed = [], set()
    for task_id in env.task_ids("test"):
        actions = [a for turn in env.play(task_id, rng.choice(["turn", "one"])) for a in turn]
        played.append((task_id, 0, play(env, task_id, spoil(actions, rng))))
        if env.score() < 1:
            failed.add(task_id)
    return env, played, failed


@pytest.mark.exhaustive
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("category", CATEGORIES)
def test_the_official_scorer_agrees_on_solved_and_spoilt_episodes(judged, category, form):
    failed, verdict = judged[1][category, form]
    assert 20 < len(failed) < 80
    assert verdict["head"]["total_count"] == 100
    assert set(verdict["failed"]) == failed


def test_each_member_has_files_of_its_own_in_the_order_of_numbers(tmp_path):
    env = Bfcl(max_calls=1)
    ids = ["multi_turn_base_11", "multi_turn_base_2"]
    played = [(i, member, play(env, i, ["Hello."])) for i in ids for member in (0, 2)]
    commands = export_results(env, played, tmp_path)
    name = "result/Qwen_Qwen3-14B-FC/multi_turn/BFCL_v4_multi_turn_base_result.json"
    for member in (0, 2):
        lines = (tmp_path / f"member_{member}" / name).read_text().splitlines()
        assert [json.loads(line)["id"] for line in lines] == ids[::-1]
    assert commands[1] == (
        f"BFCL_PROJECT_ROOT={tmp_path}/member_2 bfcl evaluate --model Qwen/Qwen3-14B-FC"
        " --test-category multi_turn_base --partial-eval"
    )
    export_results(env, played[:1], tmp_path)
    assert len((tmp_path / "member_0" / name).read_text().splitlines()) == 1


def test_a_user_turn_that_did_not_end_is_left_out():
    env = Bfcl(max_calls=3)
    call = render_hermes("ls", a=True)
    written = '<tool_call>\n{"name": "ls", "arguments": {"a": true}}\n</tool_call>'
    assert steps(env, "multi_turn_base_0", call, "Done.", call) == [[written, "Done."]]


def test_arguments_without_a_name_get_the_tools():
    env = Bfcl(format="python")
    (turn,) = steps(env, "multi_turn_base_0", "[cd('document'), cd(1, 2)]", "Done.")
    call = '<tool_call>\n{"name": "cd", "arguments": {"folder": "document"}}\n</tool_call>'
    assert turn == [f"{call}\n{NOTHING}", "Done."]


def test_text_that_was_not_run_is_no_call_to_the_scorer():
    env = Bfcl(format="python")
    call = '<tool_call>\n{"name": "ls", "arguments": {}}\n</tool_call>'
    ((chat,),) = steps(env, "multi_turn_base_0", call)
    assert chat == call.replace("<tool_call>", "<tool_call >")
    env = Bfcl()
    ((unread, thought),) = steps(env, "multi_turn_base_0", call + "?", f"<think>{call}</think>ok")
    assert "<tool_call>" not in unread + thought


def hostile(mark):
    """Actions that would write a file if any of them were evaluated."""
    return [
        render_hermes("open", file=str(mark), mode="w"),
        render_hermes(f"open('{mark}', 'w').write"),
        render_hermes("ls", **{f"a=open('{mark}', 'w'), b": 1}),
        render_hermes("__init__"),
        render_hermes("_load_scenario", scenario={}),
    ]


def test_nothing_that_a_policy_writes_is_evaluated_by_the_official_executor(judged):
    mark, verdicts = judged
    exported = steps(Bfcl(max_calls=20), "multi_turn_base_0", *hostile(mark), "No.")
    assert exported == [[*[NOTHING] * 5, "No."]]
    failed, verdict = verdicts["hostile"]
    assert set(verdict["failed"]) == failed
    assert not mark.exists()


def test_a_call_that_was_refused_for_its_size_is_not_left_to_the_scorer():
    env = Bfcl()
    task_id = next(i for i, t in env._tasks.items() if "MathAPI" in t.classes)
    (turn,) = steps(
        env,
        task_id,
        render_hermes("power", base=7, exponent=10**9),
        render_hermes("power", base=7, exponent=2),
        "Done.",
    )
    assert turn[0] == NOTHING and '"exponent": 2}' in turn[1]


def test_a_command_is_one_of_a_shell_and_an_earlier_export_of_the_category_is_replaced(tmp_path):
    folder = tmp_path / "John's results; echo"
    env, other = Bfcl(max_calls=1), Bfcl(category="multi_turn_miss_func", max_calls=1)
    name, other_name = "multi_turn_base_0", "multi_turn_miss_func_0"
    export_results(other, [(other_name, 1, play(other, other_name, ["No."]))], folder)
    played = play(env, name, ["No."])
    export_results(env, [(name, member, played) for member in range(3)], folder)
    (command,) = export_results(env, [(name, 0, played)], folder)
    written = sorted(str(file.relative_to(folder)) for file in folder.rglob("*.json"))
    assert [(file[:8], file.rpartition("/")[2]) for file in written] == [
        ("member_0", "BFCL_v4_multi_turn_base_result.json"),
        ("member_1", "BFCL_v4_multi_turn_miss_func_result.json"),
    ]
    ran = command.replace("bfcl evaluate", "printenv BFCL_PROJECT_ROOT #")
    said = subprocess.run(["sh", "-c", ran], capture_output=True, text=True, check=True).stdout
    assert said == f"{folder / 'member_0'}\n"
