"""The best checkpoint is chosen on tasks that nothing else is reported on, or that is said."""

import pytest

from seeupo_jax.configuration.loading import from_dict
from seeupo_jax.envs import make
from seeupo_jax.runtime.evaluation import evaluated_splits, selection_split, selection_warning

TASKS = {"train": ["a", "b"], "test": ["c"]}


class Tasks:
    """Knows the splits of a table; `unknown` is what it raises of another."""

    def __init__(self, splits, unknown=ValueError):
        self._splits, self._unknown = splits, unknown

    def task_ids(self, split):
        if split not in self._splits:
            raise self._unknown(split)
        return self._splits[split]


def selected(environment, **fields):
    return selection_split(from_dict(fields), environment)


@pytest.mark.parametrize("unknown", [ValueError, KeyError, IndexError])
def test_without_validation_tasks_it_is_the_split_that_is_reported(unknown):
    assert selected(Tasks(TASKS, unknown)) == "test"
    assert selected(Tasks(TASKS | {"dev": ["d"]}), evaluation={"split": "dev"}) == "dev"


def test_validation_tasks_are_taken_where_there_are_some():
    assert selected(Tasks(TASKS | {"validation": ["d"]})) == "validation"
    assert selected(Tasks(TASKS | {"validation": []})) == "test"


@pytest.mark.parametrize("split", ["train", "test"])
def test_tasks_of_another_split_under_the_name_of_validation_are_none(split):
    # As of an environment that looks at the name of one split only.
    assert selected(Tasks(TASKS | {"validation": TASKS[split]})) == "test"


def test_the_configuration_decides_before_the_environment():
    environment = Tasks(TASKS | {"validation": ["d"], "dev": ["e"]})
    assert selected(environment, evaluation={"select_on": "dev"}) == "dev"
    assert selected(environment, evaluation={"select_on": "test"}) == "test"
    assert selected(environment, checkpoint={"keep_best": 0}) is None


def test_it_is_said_where_one_split_is_chosen_on_and_reported():
    config = from_dict({"env": {"name": "bfcl"}})
    assert selection_warning(config, "validation") is None
    assert selection_warning(config, None) is None
    warning = selection_warning(config, "test")
    assert "'test'" in warning and "env bfcl" in warning and "evaluation.select_on" in warning


def test_the_order_desk_has_validation_tasks():
    assert selected(make("order_desk")) == "validation"


def test_each_split_is_evaluated_once_and_where_its_figure_is_wanted():
    config = from_dict(
        {
            "iterations": 4,
            "evaluation": {"extra_splits": ["train", "test", "train"]},
            "checkpoint": {"every": 2},
        }
    )
    splits = [evaluated_splits(config, "validation", iteration) for iteration in range(5)]
    some, last = ["test", "validation"], ["test", "train", "validation"]
    assert splits == [["test", "train"], ["test"], some, ["test"], last]
    assert evaluated_splits(config, None, 2) == ["test"]
    assert evaluated_splits(config, "train", 4) == ["test", "train"]
