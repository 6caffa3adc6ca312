"""`order_desk`: a customer-service desk with hidden state, tool calls, irreversible actions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from seeupo_jax.envs.base import Demonstration, Message, StepResult, Tool, check_choice
from seeupo_jax.envs.order_desk import orders as world
from seeupo_jax.envs.order_desk.desk import OUTCOMES, REFER, DeskEpisode
from seeupo_jax.envs.order_desk.levels import check_level
from seeupo_jax.envs.order_desk.referrals import Referrals


@dataclass
class OrderDesk:
    """The environment.

    data_dir: the folder of stored demonstrations; None: the user's cache.
    level: 1: one request per task; 2: two or three requests that depend on each other.
    refer_reward: above 0 and below 1: the first call may be `refer`, which ends a case with this
      reward, so that working on it pays only for a policy that solves more; None: no such call.
    """

    data_dir: str | None = None
    level: int = 1
    refer_reward: float | None = None

    def __post_init__(self) -> None:
        self._level = check_level(self.level)
        reward = self.refer_reward
        is_number = isinstance(reward, int | float)
        if reward is not None and not (is_number and 0 < reward < 1):
            allowed = "a number above 0 and below 1, or none"
            raise ValueError(f"order_desk refer_reward: got {reward!r}; allowed: {allowed}.")
        self._case: DeskEpisode | None = None

    def task_ids(self, split: str) -> Sequence[str]:
        check_choice("order_desk split", split, world.SPLITS)
        prefix = self._level.prefix
        return [f"{prefix}{split}/{index}" for index in range(world.SPLITS[split])]

    def reset(self, task_id: str, seed: int) -> tuple[tuple[Message, ...], tuple[Tool, ...]]:
        """Starts an episode. The desk is deterministic: `seed` is unused."""
        task = self._level.find_task(task_id)
        self._case = DeskEpisode(self._level.open_desk(task), self.refer_reward)
        return self._level.opening(task), self._tools

    def step(self, text: str) -> StepResult:
        """Executes a response's tool call; the last reply, a referral or the last turn ends it."""
        return self._running().step(text)

    def score(self) -> float:
        return self._running().score()

    def close(self) -> None:
        self._case = None

    def labels(self, task_id: str) -> Mapping[str, str]:
        """A task's labels.

        Level 1: the customer's request (`request`: cancel, return, address or status). Level 2: the
        number of requests (`requests`), whether serving them in the order asked fails (`order`:
        matters or free), and the number of look-ups besides the orders (`look_ups`).
        """
        return self._level.labels(self._level.find_task(task_id))

    def reference(self, task_id: str) -> str:
        """The call that ends the episode: the last reply, with the outcome by the desk's policy."""
        return self._level.closing(self._level.find_task(task_id))

    def demonstrations(self, split: str, **options: Any) -> Sequence[Demonstration]:
        """Episodes played by the demonstrator; options as in `dataset.load`.

        With `refer_reward` also `referrals`: the share of episodes that are a referral instead.
        """
        from seeupo_jax.envs.order_desk import dataset  # tensorflow_datasets takes seconds

        referrals = 0.0 if self.refer_reward is None else options.pop("referrals", 0.0)
        played = dataset.load(split, level=self.level, data_dir=self.data_dir, **options)
        return Referrals(played, referrals, self._tools) if referrals else played

    def vocabulary(self) -> Sequence[str]:
        """Names, ids and outcomes: one token each, so that copying one takes one step."""
        last_names = tuple(f" {name}" for name in world.LAST_NAMES)
        names = (world.FIRST_NAMES, last_names, world.ITEMS, world.STREETS)
        ids = (world.CUSTOMER_IDS, world.ORDER_NUMBERS, OUTCOMES)
        return tuple(dict.fromkeys(word for group in (*names, *ids) for word in group))

    @property
    def _tools(self) -> tuple[Tool, ...]:
        return self._level.tools if self.refer_reward is None else (*self._level.tools, REFER)

    def _running(self) -> DeskEpisode:
        if self._case is None:
            raise ValueError("order_desk: reset() must come before step() and score().")
        return self._case
