"""`bfcl`: the multi-turn tasks of the Berkeley Function Calling Leaderboard (v4)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from seeupo_jax.envs.base import check_choice
from seeupo_jax.envs.bfcl.benchmark_files import CATEGORIES, SPLITS, load_tasks, split_ids
from seeupo_jax.envs.bfcl.multi_turn import MultiTurn
from seeupo_jax.envs.bfcl.simulated_apis import Task


@dataclass
class Bfcl(MultiTurn):
    """The environment; its other options are those of `MultiTurn`.

    category: one of `CATEGORIES`. In `multi_turn_miss_func` a user turn may bring new tools, in the
      user's message; in `multi_turn_miss_param` a request may lack a detail that the next one has.
    """

    name = "bfcl"

    category: str = "multi_turn_base"

    def __post_init__(self) -> None:
        check_choice("bfcl category", self.category, CATEGORIES)
        super().__post_init__()
        self._tasks = load_tasks(self.category)

    def task_ids(self, split: str) -> Sequence[str]:
        """The official ids of a hundred tasks; `split_ids` says which."""
        check_choice("bfcl split", split, SPLITS)
        return split_ids(self.category, split)

    def find_task(self, task_id: str) -> Task:
        if task_id not in self._tasks:
            raise ValueError(f"bfcl task: got {task_id!r}; allowed: {self.category}_NUMBER.")
        return self._tasks[task_id]

    def simulators(self) -> Sequence[str]:
        return [*dict.fromkeys(name for task in self._tasks.values() for name in task.classes)]

    def labels(self, task_id: str) -> Mapping[str, str]:
        """The category, and how many turns the user takes."""
        turns = len(self.find_task(task_id).questions)
        return {"category": self.category, "user_turns": str(turns)}
