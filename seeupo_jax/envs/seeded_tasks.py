"""Tasks, actions and scores of environments whose tasks are seeds and actions short commands."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from seeupo_jax.envs.base import Message, StepResult, check_choice
from seeupo_jax.envs.validation import check_score

FIRST_TEST = 2**30  # above the seeds of any number of training tasks


class SeedTasks:
    """Tasks `SPLIT/INDEX`, one seed each.

    Args:
      name: the environment's name, for error messages.
      seeds: the seeds of each split's tasks.
    """

    def __init__(self, name: str, seeds: Mapping[str, range]):
        self._name, self._seeds = name, seeds

    def ids(self, split: str) -> Sequence[str]:
        """Returns the task ids of a split. Raises ValueError if the split is unknown."""
        check_choice(f"{self._name} split", split, self._seeds)
        return [f"{split}/{index}" for index in range(len(self._seeds[split]))]

    def seed(self, task_id: str) -> int:
        """Returns the seed of a task. Raises ValueError if there is no such task."""
        split, _, index = task_id.partition("/")
        seeds = self._seeds.get(split, range(0))
        if not (index.isascii() and index.isdigit()) or int(index) >= len(seeds):
            allowed = ", ".join(f"{name}/0 to {len(s) - 1}" for name, s in self._seeds.items())
            raise ValueError(f"{self._name} task: got {task_id!r}; allowed: {allowed}.")
        return seeds[int(index)]


def numbered_tasks(
    name: str, train_tasks: int, test_tasks: int, full_reward: float, test_seed: int
) -> SeedTasks:
    """Makes tasks whose seeds count from 0 in `train` and from `test_seed` in `test`.

    Raises:
      ValueError: a number of tasks is no integer >= 1, the full reward is no number > 0, or
        `test_seed` is no integer above the training seeds.
    """
    for option, tasks in (("train_tasks", train_tasks), ("test_tasks", test_tasks)):
        check_count(f"{name} {option}", tasks)
    if not isinstance(full_reward, int | float) or not 0 < full_reward < math.inf:
        raise ValueError(f"{name} full_reward: got {full_reward!r}; allowed: a number > 0.")
    if type(test_seed) is not int or test_seed < train_tasks:
        allowed = f"a whole number >= train_tasks, {train_tasks}"
        raise ValueError(f"{name} test_seed: got {test_seed!r}; allowed: {allowed}.")
    tests = range(test_seed, test_seed + test_tasks)
    return SeedTasks(name, {"train": range(train_tasks), "test": tests})


def check_count(option: str, value: Any) -> None:
    """Raises ValueError if an option is no whole number >= 1."""
    if type(value) is not int or value < 1:
        raise ValueError(f"{option}: got {value!r}; allowed: a whole number >= 1.")


def text_result(text: str, reward: float = 0.0, done: bool = False) -> StepResult:
    """Makes the result of a step whose observation is one user message."""
    return StepResult(({"role": "user", "content": text},), reward, done)


def last_line(text: str) -> str:
    """Returns the command in a response: its last non-empty line; reasoning may precede it."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def opening_messages(instruction: str | None, observation: str) -> tuple[Message, ...]:
    """Returns the first messages: the instruction as system message, then the observation."""
    system = () if instruction is None else ({"role": "system", "content": instruction},)
    return (*system, {"role": "user", "content": observation})


def normalized_score(total: float, full: float) -> float:
    """Maps an episode's sum of rewards to a score: `full` or more is 1, zero or less is 0."""
    return check_score(min(max(total / full, 0.0), 1.0))
