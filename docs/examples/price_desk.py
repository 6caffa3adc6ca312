"""An environment with tools and tasks from a JSONL file: buy the cheapest item."""

import json

from seeupo_jax.envs import ToolEnvironment, tool
from seeupo_jax.envs.tool_calls import ToolCallError


class PriceDesk(ToolEnvironment):
    def __init__(self, tasks):
        with open(tasks, encoding="utf-8") as lines:
            self.tasks = {task["id"]: task for task in map(json.loads, lines)}

    def task_ids(self, split):
        return [name for name, task in self.tasks.items() if task["split"] == split]

    def begin(self, task_id, seed):
        self.prices, self.bought = self.tasks[task_id]["prices"], None
        request = f"Buy the cheapest of these: {', '.join(self.prices)}."
        return [{"role": "user", "content": request}]

    @tool
    def price(self, item: str) -> str:
        """The price of an item.

        Args:
            item: The name of the item, as in the request.
        """
        if item not in self.prices:
            raise ToolCallError(f"{item!r} is not for sale")  # the policy reads it
        return f"{self.prices[item]} cents"

    @tool
    def buy(self, item: str) -> str:
        """Buys an item, which ends the episode.

        Args:
            item: The name of the item, as in the request.
        """
        price = self.price(item)
        self.bought, self.done = item, True
        return f"Bought for {price}."

    def score(self):
        cheapest = min(self.prices, key=self.prices.get)
        return float(self.bought == cheapest)
