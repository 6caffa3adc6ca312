"""A desk with a cost per message: an environment whose tools are typed methods."""

import random
from dataclasses import replace

from seeupo_jax.envs import ToolEnvironment, tool
from seeupo_jax.envs.tool_calls import ToolCall, ToolCallError

ITEMS = ("kettle", "lamp", "jacket", "mug", "tent", "bike", "drill", "camera")
STATUSES = ("processing", "shipped", "delivered")
SIZES = {"train": 1000, "test": 200}


class ThriftyDesk(ToolEnvironment):
    def __init__(self, price=0.05):
        self.price = price

    def task_ids(self, split):
        return [f"{split}/{index}" for index in range(SIZES[split])]

    def begin(self, task_id, seed):
        chance = random.Random(task_id)  # the task decides, not the seed
        self.item, self.status = chance.choice(ITEMS), chance.choice(STATUSES)
        self.order_id, self.told = f"{self.item}-{chance.randrange(10, 70)}", None
        return [{"role": "user", "content": f"Where is {self.order_id}?"}]

    @tool
    def list_orders(self, item: str) -> list:
        """The ids of the customer's orders of one item.

        Args:
            item: Such as mug.
        """
        return [self.order_id] if item == self.item else []

    @tool
    def get_order(self, order_id: str) -> str:
        """An order's status.

        Args:
            order_id: Such as mug-34.
        """
        if order_id != self.order_id:
            raise ToolCallError(f"there is no order {order_id!r}")  # the policy reads it
        return self.status

    @tool
    def reply(self, outcome: str) -> str:
        """Answers the customer, which ends the episode.

        Args:
            outcome: processing, shipped or delivered.
        """
        self.told, self.done = outcome, True
        return "Sent."

    def step(self, text):
        result = super().step(text)
        return replace(result, reward=result.reward - self.price)

    def score(self):
        return float(self.told == self.status)

    def demonstrations(self, split):
        """Episodes of a clerk who asks too much, too little, or the right amount."""
        return [self.play(task_id, self.clerk(task_id)) for task_id in self.task_ids(split)]

    def clerk(self, task_id):
        self.begin(task_id, seed=0)
        chance = random.Random(f"clerk/{task_id}")
        look = ToolCall("get_order", {"order_id": self.order_id})
        listed = ToolCall("list_orders", {"item": self.item})
        looks = chance.choice([[], [look], [listed, look], [listed, look, look]])
        outcome = self.status if looks else chance.choice(STATUSES)
        return [*looks, ToolCall("reply", {"outcome": outcome})]
