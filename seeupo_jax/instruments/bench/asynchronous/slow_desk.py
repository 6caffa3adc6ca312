"""The order desk with answers that take their time."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

from seeupo_jax.envs.base import Message, StepResult, Tool
from seeupo_jax.envs.order_desk.environment import OrderDesk

_ANSWERS = 3  # of an episode, over which its delay is spread


@dataclass
class SlowDesk(OrderDesk):
    """An order desk whose training episodes wait; those of other splits do not.

    seconds: an episode's delay is uniform from 0 to this many seconds.
    slow_one_in: one episode in so many has `slow_times` the longest delay.
    """

    seconds: float = 30.0
    slow_one_in: int = 20
    slow_times: float = 4.0

    def reset(
        self, task_id: str, seed: int, *, episode_seed: int = 0
    ) -> tuple[tuple[Message, ...], tuple[Tool, ...]]:
        begun = super().reset(task_id, seed)
        draw = random.Random(episode_seed)
        delay_s = self.seconds * draw.random()
        if draw.random() < 1 / self.slow_one_in:
            delay_s = self.seconds * self.slow_times
        self._answer_s = delay_s / _ANSWERS if "train/" in task_id else 0.0
        self._answers = 0
        return begun

    def step(self, text: str) -> StepResult:
        if self._answers < _ANSWERS:
            time.sleep(self._answer_s)
        self._answers += 1
        return super().step(text)
