"""The official tasks as they are read: their number, their halves, the tools of each."""

import hashlib
import json

import pytest

from seeupo_jax.envs.bfcl.benchmark_files import (
    CATEGORIES,
    SPLITS,
    added_docs,
    file_name,
    listed_docs,
    load_tasks,
    read_docs,
    split_ids,
)

OTHERS = [category for category in CATEGORIES if category != "multi_turn_base"]


@pytest.mark.parametrize("category", CATEGORIES)
def test_a_category_has_two_hundred_tasks_in_two_halves(category):
    halves = [split_ids(category, split) for split in SPLITS]
    assert [len(half) for half in halves] == [100, 100]
    assert sorted(halves[0] + halves[1]) == sorted(load_tasks(category))
    assert len(load_tasks(category)) == 200


def test_base_tasks_are_cut_by_their_number():
    ids = [f"multi_turn_base_{number}" for number in range(200)]
    assert split_ids("multi_turn_base", "train") + split_ids("multi_turn_base", "test") == ids


def test_the_other_categories_are_cut_alike_and_never_otherwise():
    for split, digest in (("train", TRAIN_DIGEST), ("test", TEST_DIGEST)):
        numbers = {
            ",".join(task_id.rpartition("_")[2] for task_id in split_ids(category, split))
            for category in OTHERS
        }
        assert len(numbers) == 1
        assert hashlib.sha256(numbers.pop().encode()).hexdigest()[:16] == digest
    first = [f"multi_turn_miss_func_{number}" for number in (1, 2, 4, 6, 7, 10)]
    assert split_ids("multi_turn_miss_func", "train")[:6] == first


# Of the numbers in order, with commas between them.
TRAIN_DIGEST = "d6aed7637d6489d2"
TEST_DIGEST = "7844fd28a99261de"


def test_only_long_contexts_are_padded():
    padded = {c: {task.long_context for task in load_tasks(c).values()} for c in CATEGORIES}
    assert padded == {category: {"long_context" in category} for category in CATEGORIES}


def test_tools_are_held_out_in_one_category_and_all_come_back():
    for category in CATEGORIES:
        for task in load_tasks(category).values():
            listed = [doc["name"] for doc in listed_docs(task)]
            added = {turn: [doc["name"] for doc in added_docs(task, turn)] for turn in range(9)}
            come = [name for names in added.values() for name in names]
            assert sorted(listed + come) == sorted(
                doc["name"] for name in task.classes for doc in read_docs(name)
            )
            assert {turn for turn in added if added[turn]} == set(task.held_out)
            assert bool(come) == (category == "multi_turn_miss_func")


def test_a_turn_that_brings_tools_has_no_question_and_follows_one_without_a_solution():
    for task in load_tasks("multi_turn_miss_func").values():
        ((turn, names),) = task.held_out.items()
        assert task.questions[turn] == () and task.reference[turn - 1] == () and names


def test_tasks_of_a_folder_that_is_written_again_are_the_new_ones(tmp_path):
    folder, name = tmp_path / "train", file_name("multi_turn_base")
    (folder / "possible_answer").mkdir(parents=True)
    for task_id in ("first", "second"):
        row = {"id": task_id, "question": [[{"role": "user", "content": "Sum?"}]]}
        row |= {"involved_classes": ["MathAPI"], "initial_config": {}}
        (folder / name).write_text(json.dumps(row))
        truth = {"id": task_id, "ground_truth": [["add(a=1,b=2)"]]}
        (folder / "possible_answer" / name).write_text(json.dumps(truth))
        tasks = load_tasks("multi_turn_base", folder)
        assert [*tasks] == [task_id]
        assert load_tasks("multi_turn_base", folder) is tasks
    truth |= {"ground_truth": [["add(a=10,b=2)"]]}  # while the questions stay
    (folder / "possible_answer" / name).write_text(json.dumps(truth))
    (task,) = load_tasks("multi_turn_base", folder).values()
    assert task.reference == (("add(a=10,b=2)",),)
