"""The levels of the order desk: their tasks, tools, desks and labels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from seeupo_jax.envs.base import Message, Tool
from seeupo_jax.envs.order_desk import errands
from seeupo_jax.envs.order_desk import orders as world
from seeupo_jax.envs.order_desk.account_desk import ERRAND_TOOLS, AccountDesk
from seeupo_jax.envs.order_desk.desk import TOOLS, Desk, DeskState
from seeupo_jax.envs.tool_calls import render_hermes


@dataclass(frozen=True)
class Level:
    """One level; a task is an `orders.Task` or an `errands.Errand`.

    prefix: of its task ids.
    open_desk: makes the tools and the database of a task.
    labels: a task's labels.
    closing: the call that ends a task successfully.
    """

    prefix: str
    policy: str
    tools: tuple[Tool, ...]
    make_task: Callable[[str, int], Any]
    open_desk: Callable[[Any], DeskState]
    labels: Callable[[Any], Mapping[str, str]]
    closing: Callable[[Any], str]

    def find_task(self, task_id: str) -> Any:
        """Returns the task with an id.

        Raises:
          ValueError: this level has no such task.
        """
        split, _, index = task_id.removeprefix(self.prefix).partition("/")
        numbered = index.isascii() and index.isdigit()
        if not task_id.startswith(self.prefix) or not numbered:
            allowed = f"{self.prefix}SPLIT/NUMBER"
            raise ValueError(f"order_desk task: got {task_id!r}; allowed: {allowed}.")
        return self.make_task(split, int(index))

    def opening(self, task: Any) -> tuple[Message, ...]:
        """The first messages of an episode."""
        return (
            {"role": "system", "content": self.policy},
            {"role": "user", "content": task.message},
        )


def _label_errand(errand: errands.Errand) -> Mapping[str, str]:
    return {
        "requests": str(len(errand.requests)),
        "order": "matters" if errands.order_matters(errand) else "free",
        "look_ups": str(len(errands.plan(errand)[0])),
    }


def _close_task(task: world.Task) -> str:
    return render_hermes("reply", outcome=world.resolve(task.request, task.target))


def _close_errand(errand: errands.Errand) -> str:
    settled, _ = errands.settle(errand)
    return render_hermes("reply", item=errand.targets[-1].item, outcome=settled.outcomes[-1])


LEVELS = {
    1: Level(
        prefix="",
        policy=world.POLICY,
        tools=TOOLS,
        make_task=world.make_task,
        open_desk=Desk,
        labels=lambda task: {"request": task.request},
        closing=_close_task,
    ),
    2: Level(
        prefix="level2/",
        policy=errands.POLICY,
        tools=ERRAND_TOOLS,
        make_task=errands.make_errand,
        open_desk=AccountDesk,
        labels=_label_errand,
        closing=_close_errand,
    ),
}


def check_level(level: int) -> Level:
    """Returns a level by its number.

    Raises:
      ValueError: there is no such level.
    """
    if type(level) is not int or level not in LEVELS:
        allowed = ", ".join(map(str, LEVELS))
        raise ValueError(f"order_desk level: got {level!r}; allowed: {allowed}.")
    return LEVELS[level]


def level_of(task_id: str) -> int:
    """The number of the level to which a task id belongs."""
    return 2 if task_id.startswith(LEVELS[2].prefix) else 1
