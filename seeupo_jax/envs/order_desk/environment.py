"""`order_desk`: a customer-service desk with hidden state, tool calls, irreversible actions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from seeupo_jax.envs.base import Demonstration, Message, StepResult, Tool, check_choice
from seeupo_jax.envs.order_desk import orders as world
from seeupo_jax.envs.order_desk.desk import OUTCOMES, TOOLS, Case, find_task, opening
from seeupo_jax.envs.tool_calls import render_hermes


@dataclass
class OrderDesk:
    """The environment. `data_dir`: where demonstrations are kept (None: the user's cache)."""

    data_dir: str | None = None

    def __post_init__(self) -> None:
        self._case: Case | None = None

    def task_ids(self, split: str) -> Sequence[str]:
        check_choice("order_desk split", split, world.SPLITS)
        return [f"{split}/{index}" for index in range(world.SPLITS[split])]

    def reset(self, task_id: str, seed: int) -> tuple[tuple[Message, ...], tuple[Tool, ...]]:
        """Starts a case. The desk is deterministic: `seed` changes nothing."""
        task = find_task(task_id)
        self._case = Case(task)
        return opening(task), TOOLS

    def step(self, text: str) -> StepResult:
        """Executes a response's one tool call; the reply, or the sixth turn, ends the case."""
        return self._running().step(text)

    def score(self) -> float:
        return self._running().score()

    def close(self) -> None:
        self._case = None

    def labels(self, task_id: str) -> Mapping[str, str]:
        """What the customer wants: cancel, return, address or status."""
        return {"request": find_task(task_id).request}

    def reference(self, task_id: str) -> str:
        """The call that ends the case: the reply with the outcome by the desk's policy."""
        task = find_task(task_id)
        return render_hermes("reply", outcome=world.resolve(task.request, task.target))

    def demonstrations(self, split: str, **options: Any) -> Sequence[Demonstration]:
        """Cases played by the demonstrator; options as of `dataset.load`."""
        from seeupo_jax.envs.order_desk import dataset  # tensorflow_datasets takes seconds

        return dataset.load(split, data_dir=self.data_dir, **options)

    def vocabulary(self) -> Sequence[str]:
        """Names, ids and outcomes as one token each, so that copying one is one step."""
        last_names = tuple(f" {name}" for name in world.LAST_NAMES)
        names = (world.FIRST_NAMES, last_names, world.ITEMS, world.STREETS)
        ids = (world.CUSTOMER_IDS, world.ORDER_NUMBERS, OUTCOMES)
        return tuple(dict.fromkeys(word for group in (*names, *ids) for word in group))

    def _running(self) -> Case:
        if self._case is None:
            raise ValueError("order_desk: reset() must come before step() and score().")
        return self._case
