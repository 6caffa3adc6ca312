"""`bfcl`: the multi-turn tasks of the Berkeley Function Calling Leaderboard (v4)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from seeupo_jax.configuration.user_code import expand_home
from seeupo_jax.envs.base import check_choice
from seeupo_jax.envs.bfcl.benchmark_files import (
    CATEGORIES,
    SPLITS,
    file_name,
    load_tasks,
    split_ids,
)
from seeupo_jax.envs.bfcl.multi_turn import MultiTurn
from seeupo_jax.envs.bfcl.simulated_apis import MultiTurnTask


@dataclass
class Bfcl(MultiTurn):
    """The environment; its other options are documented in `MultiTurn`.

    category: one of `CATEGORIES`. In `multi_turn_miss_func` a user's message may add tools; in
      `multi_turn_miss_param` a request may lack a detail that the next message gives.
    data: a folder with your own tasks in the official format, instead of the official tasks:
      `SPLIT/BFCL_v4_CATEGORY.json` and `SPLIT/possible_answer/BFCL_v4_CATEGORY.json` for each of
      its splits, as `python -m seeupo_jax.instruments.bfcl_worlds` writes them.
    """

    name = "bfcl"

    category: str = "multi_turn_base"
    data: str | None = None

    def __post_init__(self) -> None:
        check_choice("bfcl category", self.category, CATEGORIES)
        super().__post_init__()
        self._splits = _own_splits(self.category, self.data)
        self._tasks = {k: v for tasks in self._splits.values() for k, v in tasks.items()}
        if self.data is None:
            self._tasks = load_tasks(self.category)

    def task_ids(self, split: str) -> Sequence[str]:
        """Returns the ids of a hundred official tasks (`split_ids`), or those of `data`."""
        check_choice("bfcl split", split, SPLITS if self.data is None else self._splits)
        return split_ids(self.category, split) if self.data is None else [*self._splits[split]]

    def find_task(self, task_id: str) -> MultiTurnTask:
        if task_id not in self._tasks:
            raise ValueError(f"bfcl task: got {task_id!r}; allowed: {self.category}_NUMBER.")
        return self._tasks[task_id]

    def simulators(self) -> Sequence[str]:
        return [*dict.fromkeys(name for task in self._tasks.values() for name in task.classes)]

    def labels(self, task_id: str) -> Mapping[str, str]:
        """Returns the category and the number of user turns."""
        turns = len(self.find_task(task_id).questions)
        return {"category": self.category, "user_turns": str(turns)}


def _own_splits(category: str, data: str | None) -> dict[str, dict[str, MultiTurnTask]]:
    """The tasks of each split of a user's folder; empty without a folder."""
    if data is None:
        return {}
    places = sorted(expand_home(data).glob(f"*/{file_name(category)}"))
    if not places:
        raise ValueError(f"bfcl data: got {data!r}, which has no SPLIT/{file_name(category)}.")
    splits = {place.parent.name: load_tasks(category, place.parent) for place in places}
    ids = [task_id for tasks in splits.values() for task_id in tasks]
    if len({*ids}) < len(ids):
        raise ValueError(f"bfcl data: got {data!r}, where tasks of two splits have one id.")
    return splits
