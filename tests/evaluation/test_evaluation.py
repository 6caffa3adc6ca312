"""The best checkpoint is chosen on tasks that nothing else is reported on, or that is said."""

from types import SimpleNamespace

import pytest
from hostile_cases import Held, Hostile
from rollout_cases import NumberTokenizer, Saying, make_worker

from seeupo_jax.agents.agent_tasks import find_tasks
from seeupo_jax.configuration.loading import from_dict
from seeupo_jax.envs import make
from seeupo_jax.envs.pool import EnvPool
from seeupo_jax.evaluation.evaluation import (
    evaluate_split,
    evaluated_splits,
    selection_split,
    selection_warning,
)
from seeupo_jax.evaluation.evaluation_run import evaluate_policy
from seeupo_jax.evaluation.policy_sources import PolicySource
from seeupo_jax.training.run_components import RunComponents

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


def test_evaluations_ask_one_catalogue_of_tasks_which_a_longer_file_does_not_change(tmp_path):
    file = tmp_path / "tasks.jsonl"
    file.write_text('{"task_id": "a", "split": "test"}\n')
    config = from_dict({"agent": {"command": "sh", "tasks": str(file)}})
    tasks, pool, played = find_tasks(config), EnvPool(Hostile, 4, workers=1, timeout_s=5.0), []
    file.write_text('{"task_id": "a", "split": "test"}\n{"task_id": "b", "split": "test"}\n')
    worker = make_worker(Saying(), pool, max_turns=2)
    try:
        evaluate_split(
            config,
            worker,
            None,
            tasks=tasks,
            split="test",
            k=1,
            on_counted=lambda episodes, _: played.extend(episodes),
        )
    finally:
        pool.close()
    assert [episode.task_id for episode in played] == ["a"]


def test_what_lists_the_tasks_is_closed_with_the_evaluation_and_with_the_run(tmp_path):
    config = from_dict({"env": {"name": "hostile_cases:Held"}, "evaluation": {"tasks": 1}})
    source = PolicySource(Saying(), NumberTokenizer(), None, 0, {}, {"iteration": 0})
    result = evaluate_policy(config, tmp_path, source, split="test", k=1)
    assert len(result.episodes) == 1 and Held.open == 0
    tasks, part = find_tasks(config), SimpleNamespace(close=lambda: None)
    assert Held.open == 1
    RunComponents.close(SimpleNamespace(tasks=tasks, sampler=part, log=part, source=part))
    assert Held.open == 0
