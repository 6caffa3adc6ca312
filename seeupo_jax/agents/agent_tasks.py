"""An agent's tasks: from a file, from the module of its function, or from the environment."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from seeupo_jax import envs
from seeupo_jax.agents.harnesses.harness_task import check_harness_task
from seeupo_jax.configuration.agent_schema import Agent
from seeupo_jax.configuration.schema import Config
from seeupo_jax.configuration.user_code import (
    attribute_beside,
    encodes,
    functions_beside,
    near_misses,
)
from seeupo_jax.envs import Environment
from seeupo_jax.envs.base import Tasks, TaskShare
from seeupo_jax.envs.tasks import list_task_shares, list_tasks, task_labels, task_reference
from seeupo_jax.tasks.records import open_records
from seeupo_jax.tasks.row_list import short
from seeupo_jax.tasks.task_folders import TaskFolders, find_folder

TRAIN = "train"  # the split of a line that names none
_FIELD = "config.agent.tasks"  # names a file of tasks
_ALLOWED = (
    "a JSON object with the text task_id, and optionally the text split and a dict of texts labels"
)


class AgentTasks(Tasks, Protocol):
    """Tasks by split, which do not change; `close` it after use.

    `envs.tasks` reads ids and labels from it as from an environment.
    """

    def labels(self, task_id: str) -> Mapping[str, str]:
        """Returns a task's labels, as `Labelled.labels`; empty if it has none."""
        ...

    def reference(self, task_id: str) -> str | None:
        """Returns a task's reference answer, as `Referenced.reference`; None if it has none."""
        ...

    def data(self, task_id: str, split: str) -> Any:
        """Returns additional data for an agent: `AgentTask.data`."""
        ...

    def close(self) -> None:
        """Closes the environment that lists the tasks, if one does."""
        ...


def find_tasks(config: Config) -> AgentTasks:
    """Finds the tasks of an agent.

    They come from the folder `config.tasks`, else from the file `config.agent.tasks`, else from a
    function `task_ids(split)` in the module of the agent's function, else from `config.env`.

    Raises:
      ValueError: the file or the environment has no valid tasks.
    """
    agent = config.agent
    if config.tasks is not None:
        return TaskFolders(find_folder(config.tasks), local=config.sandbox.runtime == "local")
    if agent.tasks is not None:
        check = None if agent.harness is None else check_harness_task
        return _read_tasks(Path(agent.tasks), check)
    task_ids = None if agent.name is None else attribute_beside(agent.name, "task_ids")
    if task_ids is not None:
        labels, reference = (
            attribute_beside(str(agent.name), name) for name in ("labels", "reference")
        )
        return _TasksBeside(
            task_ids,
            (lambda task_id: {}) if labels is None else labels,
            (lambda task_id: None) if reference is None else reference,
        )
    return _EnvironmentTasks(envs.make(config.env.name, **config.env.options))


def misspelt_functions(agent: Agent) -> dict[str, str]:
    """Maps functions in the agent's module to task functions whose names they resemble."""
    task_functions = ("task_ids", "labels", "reference")
    return {} if agent.name is None else near_misses(functions_beside(agent.name), task_functions)


def describe_tasks(config: Config) -> str:
    """Describes the place where `find_tasks` finds the tasks."""
    agent = config.agent
    if config.tasks is not None:
        return config.tasks
    if agent.tasks is not None:
        return agent.tasks
    if agent.name is not None and attribute_beside(agent.name, "task_ids") is not None:
        return f"task_ids(split) in the module of {agent.name}"
    return f"env {config.env.name}"


@dataclass(frozen=True)
class _EnvironmentTasks:
    environment: Environment

    def task_ids(self, split: str) -> Sequence[str]:
        return list_tasks(self.environment, split)

    def task_shares(self, split: str) -> Sequence[TaskShare]:
        return list_task_shares(self.environment, split)

    def labels(self, task_id: str) -> Mapping[str, str]:
        return task_labels(self.environment, task_id)

    def reference(self, task_id: str) -> str | None:
        return task_reference(self.environment, task_id)

    def data(self, task_id: str, split: str) -> None:
        return None

    def close(self) -> None:
        with contextlib.suppress(Exception, SystemExit):  # of a user's code; no episode is affected
            self.environment.close()


@dataclass(frozen=True)
class _TasksBeside:
    """Functions in the module of the agent's function: `task_ids(split)`, optionally the others."""

    task_ids: Callable[[str], Sequence[str]]
    labels: Callable[[str], Mapping[str, str]]
    reference: Callable[[str], str | None]

    def data(self, task_id: str, split: str) -> None:
        return None

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class _Line:
    """A task of a file. data: its fields except task_id, split and labels."""

    labels: Mapping[str, str]
    data: Mapping[str, Any]


class _FileTasks:
    def __init__(self, path: Path, lines: Mapping[str, Mapping[str, _Line]]):
        self._path, self._lines = path, lines
        self._labels = {
            task_id: line.labels for of in lines.values() for task_id, line in of.items()
        }

    def task_ids(self, split: str) -> Sequence[str]:
        if split not in self._lines:
            raise ValueError(
                f"config.agent.tasks: {self._path} has no task of the split {split!r}; it has"
                f" {', '.join(self._lines)}."
            )
        return list(self._lines[split])

    def labels(self, task_id: str) -> Mapping[str, str]:
        return self._labels[task_id]

    def reference(self, task_id: str) -> str | None:
        """The field `reference` of the task's data, from the training split if it is there."""
        splits = sorted(self._lines, key=lambda split: split != TRAIN)
        matches = (self._lines[split].get(task_id) for split in splits)
        lines = (line.data for line in matches if line is not None)
        return next((data["reference"] for data in lines if "reference" in data), None)

    def data(self, task_id: str, split: str) -> Mapping[str, Any]:
        return self._lines[split][task_id].data

    def close(self) -> None:
        pass


def _read_tasks(path: Path, check: Callable[[Mapping[str, Any]], Any] | None) -> AgentTasks:
    """Reads the tasks of a file: one per row, with `task_id` and optional `split`, `labels`.

    All other columns of a row are the task's data.

    Args:
      check: raises ValueError for a task's data that the agent cannot read; None: it reads any.

    Raises:
      ValueError: there is no such file, it has no task, or a line is invalid; names the line.
    """
    records = open_records(str(path), _FIELD, TRAIN, row_form=_ALLOWED)
    splits: dict[str, dict[str, _Line]] = {}
    labels: dict[str, Mapping[str, str]] = {}  # by task, whatever its split
    for number in range(len(records)):
        where = records.where(number)
        split, task_id, task = _read_row(records[number], where)
        if check is not None:
            _check_data(check, task.data, where)
        if task_id in splits.setdefault(split, {}):
            raise ValueError(
                f"{where}: got task_id {short(task_id)} a second time in the split {split!r};"
                " allowed: each once in a split."
            )
        if labels.setdefault(task_id, task.labels) != task.labels:
            raise ValueError(
                f"{where}: got labels of task_id {short(task_id)} that differ from another split's;"
                " allowed: the same, or another task_id."
            )
        splits[split][task_id] = task
    if not splits:
        raise ValueError(f"{_FIELD}: {path} has no task; allowed: at least one line, {_ALLOWED}.")
    return _FileTasks(path, splits)


def _read_row(fields: dict[str, Any], where: str) -> tuple[str, str, _Line]:
    """Takes a row apart; returns the task's split, id and rest."""
    task_id, split, labels = fields.pop("task_id", None), TRAIN, {}
    _check_text(task_id, "task_id", where)
    given = {name: fields.pop(name, None) for name in ("split", "labels")}
    if given["split"] is not None:
        split = given["split"]
        _check_text(split, "split", where)
    if given["labels"] is not None:
        labels = given["labels"]
        if not isinstance(labels, dict):
            raise ValueError(f"{where}: got labels {short(labels)}; allowed: a dict of texts.")
        # A table has the labels of all its rows in each, with null for those that one lacks.
        labels = {name: label for name, label in labels.items() if label is not None}
        for name, label in labels.items():
            _check_text(name, "a label's name", where)
            _check_text(label, f"labels[{name!r}]", where)
    return split, task_id, _Line(labels, fields)


def _check_data(
    check: Callable[[Mapping[str, Any]], Any], data: Mapping[str, Any], where: str
) -> None:
    try:
        check(data)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _check_text(value: Any, name: str, where: str) -> None:
    """Checks a text: JSON can contain lone surrogates, which the run's files cannot."""
    if not isinstance(value, str) or not value or not encodes(value):
        got = "no" if value is None else f"{short(value)} as"
        raise ValueError(f"{where}: got {got} {name}; allowed: {_ALLOWED}.")
