"""`bfcl_worlds`: generated multi-turn tasks on BFCL's simulators, judged by its checkers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from seeupo_jax.envs.base import check_choice
from seeupo_jax.envs.bfcl.multi_turn import MultiTurn, check_bound
from seeupo_jax.envs.bfcl.simulated_apis import MultiTurnTask, official
from seeupo_jax.envs.seeded_tasks import SeedTasks
from seeupo_jax.instruments.bfcl_worlds.composition import CLASSES
from seeupo_jax.instruments.bfcl_worlds.generator import VARIANTS, Options, generate

MAX_TURNS = 8  # requests that fit into a world without contradicting each other


@dataclass
class BfclWorlds(MultiTurn):
    """The environment; its other options are documented in `MultiTurn`.

    categories: of the tasks, in rotation: `multi_turn_base`, `multi_turn_miss_func` (a request
      needs a tool that is added after it), `multi_turn_miss_param` (a request lacks a detail that
      the next message gives) and `multi_turn_long_context` (the simulators pad their answers).
    turns: minimum and maximum of a conversation's requests; a withheld tool or detail adds one user
      turn.
    classes: the simulators to draw from, by their official names; a conversation uses one or two.
      None: all.
    train_tasks, validation_tasks, test_tasks: numbers of tasks, without an upper limit.
    seed: of all tasks.
    """

    name = "bfcl_worlds"

    categories: Sequence[str] = ("multi_turn_base",)
    turns: Sequence[int] = (1, 3)
    classes: Sequence[str] | None = None
    train_tasks: int = 2000
    validation_tasks: int = 100
    test_tasks: int = 200
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        official("bfcl_eval")  # reports a missing package now instead of in an episode
        categories = _names("categories", self.categories, VARIANTS)
        classes = CLASSES if self.classes is None else _names("classes", self.classes, CLASSES)
        sizes = {"train": self.train_tasks, "test": self.test_tasks}
        sizes["validation"] = self.validation_tasks
        for split, size in sizes.items():
            check_bound(f"bfcl_worlds {split}_tasks", size)
        if type(self.seed) is not int:
            raise ValueError(f"bfcl_worlds seed: got {self.seed!r}; allowed: an integer.")
        self._options = Options(categories, _span(self.turns), classes, self.seed)
        for index in range(len(categories)):  # checks that such tasks exist
            generate(self._options, "train", index)
        self._tasks = SeedTasks("bfcl_worlds", {s: range(size) for s, size in sizes.items()})

    def task_ids(self, split: str) -> Sequence[str]:
        """Returns ids `SPLIT/INDEX`. A task is generated when it is first used."""
        return self._tasks.ids(split)

    def find_task(self, task_id: str) -> MultiTurnTask:
        index = self._tasks.seed(task_id)
        return generate(self._options, task_id.partition("/")[0], index)

    def simulators(self) -> Sequence[str]:
        return self._options.classes

    def labels(self, task_id: str) -> Mapping[str, str]:
        """Returns the category, the number of user turns, and the simulators."""
        task, categories = self.find_task(task_id), self._options.categories
        return {
            "category": categories[self._tasks.seed(task_id) % len(categories)],
            "user_turns": str(len(task.questions)),
            "classes": "+".join(task.classes),
        }


def _names(option: str, given: Any, allowed: Any) -> tuple[str, ...]:
    """Checks an option that is a list of different names."""
    names = () if isinstance(given, str) or not isinstance(given, Sequence) else tuple(given)
    if not names or len({*map(str, names)}) < len(names):
        raise ValueError(
            f"bfcl_worlds {option}: got {given!r}; allowed: a list of {', '.join(allowed)}."
        )
    for value in names:
        check_choice(f"bfcl_worlds {option}", value, allowed)
    return names


def _span(given: Any) -> tuple[int, int]:
    """Checks the option `turns`."""
    span = tuple(given) if isinstance(given, Sequence) else ()
    is_pair = len(span) == 2 and all(type(value) is int for value in span)
    if not is_pair or not 1 <= span[0] <= span[1] <= MAX_TURNS:
        raise ValueError(
            f"bfcl_worlds turns: got {given!r}; allowed: the fewest and the most, from 1 to"
            f" {MAX_TURNS}, such as (1, 3)."
        )
    return span[0], span[1]
