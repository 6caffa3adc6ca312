"""Where the tasks of agents come from, and what is refused before long work."""

import json

import pytest
from task_files import write_rows

from seeupo_jax.agents.agent_tasks import describe_tasks, find_tasks
from seeupo_jax.configuration.loading import from_dict
from seeupo_jax.envs.tasks import list_tasks, task_labels, task_reference

LINES = (
    {"task_id": "a", "question": "1+1", "answer": 2},
    {"task_id": "b", "split": "train", "labels": {"kind": "sum"}},
    {"task_id": "a", "split": "test", "data": [1]},
)
FUNCTION = "async def play(task, client):\n    return 1.0\n"


def tasks_of(**agent):
    config = from_dict({"agent": agent})
    return find_tasks(config), describe_tasks(config)


def written(folder, *lines):
    file = folder / "tasks.jsonl"
    file.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines))
    return str(file)


def test_a_file_has_tasks_by_split_with_their_labels_and_data(tmp_path):
    file = written(tmp_path, *LINES[:2], "", LINES[2])
    tasks, where = tasks_of(command="sh", tasks=file)
    assert where == file
    assert list_tasks(tasks, "train") == ["a", "b"] and list_tasks(tasks, "test") == ["a"]
    assert tasks.data("a", "train") == {"question": "1+1", "answer": 2}
    assert tasks.data("b", "train") == {} and tasks.data("a", "test") == {"data": [1]}
    assert task_labels(tasks, "b") == {"kind": "sum"} and task_labels(tasks, "a") == {}
    with pytest.raises(ValueError, match="has no task of the split 'dev'; it has train, test."):
        list_tasks(tasks, "dev")


@pytest.mark.parametrize("form", ["parquet", "json", "arrow"])
def test_a_table_of_tasks_has_nulls_for_what_a_row_lacks(tmp_path, form):
    nulls = {"question": None, "labels": None, "split": None}
    kinds = {"kind": "sum", "level": None}
    rows = [{"task_id": "a", **nulls}, {"task_id": "b", **nulls, "labels": kinds, "split": "test"}]
    tasks, _ = tasks_of(command="sh", tasks=write_rows(tmp_path, form, rows))
    assert list_tasks(tasks, "train") == ["a"] and list_tasks(tasks, "test") == ["b"]
    assert task_labels(tasks, "b") == {"kind": "sum"} and task_labels(tasks, "a") == {}
    assert tasks.data("a", "train") == {"question": None}


def test_the_reference_of_a_task_is_that_of_its_training_line(tmp_path):
    lines = ({"split": "test", "reference": "4"}, {"reference": "2"}, {"split": "test"})
    ids = ("0", "0", "1")
    file = written(tmp_path, *({"task_id": i, **line} for i, line in zip(ids, lines, strict=True)))
    tasks, _ = tasks_of(command="sh", tasks=file)
    assert task_reference(tasks, "0") == "2" and task_reference(tasks, "1") is None
    only = written(tmp_path, {"task_id": "0", **lines[0]})
    assert task_reference(tasks_of(command="sh", tasks=only)[0], "0") == "4"


@pytest.mark.parametrize(
    "line, says",
    [
        ("{", r"line 3: got {, which is not JSON; allowed: a JSON object with the text task_id"),
        ("[]", r"line 3: got \[\]; allowed"),
        ({}, "line 3: got no task_id; allowed"),
        ({"task_id": 7}, "line 3: got 7 as task_id"),
        ({"task_id": ""}, "line 3: got  as task_id"),
        ('{"task_id": "\\ud800"}', "line 3: got .* as task_id"),
        ({"task_id": "c", "split": 1}, "line 3: got 1 as split"),
        ({"task_id": "c", "labels": {"x": 1}}, r"line 3: got 1 as labels\['x'\]"),
        ({"task_id": "c", "labels": "x"}, "line 3: got labels x; allowed: a dict of texts"),
        (
            {"task_id": "b"},
            "line 3: got task_id b a second time in the split 'train'; allowed: each",
        ),
        ({"task_id": "b", "split": "test"}, "line 3: got labels of task_id b that differ"),
    ],
)
def test_a_line_that_is_no_task_is_named(tmp_path, line, says):
    with pytest.raises(ValueError, match=says):
        tasks_of(command="sh", tasks=written(tmp_path, *LINES[:2], line))


def test_a_file_without_tasks_or_no_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match="has no task; allowed: at least one line"):
        tasks_of(command="sh", tasks=written(tmp_path, "", ""))
    with pytest.raises(ValueError, match=r"cannot be read \(No such file or directory\)"):
        tasks_of(command="sh", tasks=str(tmp_path / "nowhere"))


def test_else_they_are_those_beside_the_function_or_the_environments(tmp_path):
    alone, beside = tmp_path / "alone.py", tmp_path / "beside.py"
    alone.write_text(FUNCTION)
    listing = "def task_ids(split):\n    return [split + str(i) for i in range(2)]\n"
    labels = "def labels(task_id):\n    return {'last': task_id[-1]}\n"
    labels += "def reference(task_id):\n    return task_id[-1] + '!'\n"
    beside.write_text(FUNCTION + listing + labels)
    tasks, where = tasks_of(name=f"{beside}:play")
    assert where == f"task_ids(split) in the module of {beside}:play"
    assert list_tasks(tasks, "test") == ["test0", "test1"]
    assert task_labels(tasks, "test1") == {"last": "1"} and tasks.data("test1", "test") is None
    assert task_reference(tasks, "test1") == "1!"
    tasks, where = tasks_of(name=f"{alone}:play")
    assert where == "env order_desk" and list_tasks(tasks, "train")[0] == "train/0"
    assert task_labels(tasks, "train/0").keys() == {"request"}
    assert task_reference(tasks, "train/0").startswith("<tool_call>")
    with pytest.raises(ValueError, match="order_desk split: got 'dev'"):
        list_tasks(tasks, "dev")


@pytest.mark.parametrize(
    "fields, says",
    [
        ({"name": "a:b", "command": "sh"}, "agent.command: got 'sh' with config.agent.name=a:b"),
        ({"command": "sh", "options": {"x": 1}}, "agent.options: got options without"),
        ({"tasks": "x.jsonl"}, "agent.tasks: got 'x.jsonl' without an agent"),
        ({"name": "a:b", "memory_mib": 5}, "agent.memory_mib: got 5; allowed: none, unless"),
        ({"name": "a"}, "agent.name: got 'a'; allowed: module:function or FILE.py:function"),
        ({"command": " "}, "agent.command: got ' '; allowed: a command line"),
    ],
)
def test_fields_that_do_not_go_together_are_refused(fields, says):
    with pytest.raises(ValueError, match=says):
        from_dict({"agent": fields})
