"""An environment with tools and tasks from a JSONL file: buy the cheapest item."""

import json

from seeupo_jax.envs import StepResult
from seeupo_jax.envs.tool_calls import ToolCallError, parse_hermes

ITEM = {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]}
TOOLS = (
    {"name": "price", "description": "The price of an item in cents.", "parameters": ITEM},
    {"name": "buy", "description": "Buys an item, which ends the episode.", "parameters": ITEM},
)


class PriceDesk:
    def __init__(self, tasks, max_turns=6):
        with open(tasks, encoding="utf-8") as lines:
            self.tasks = {task["id"]: task for task in map(json.loads, lines)}
        self.max_turns = max_turns

    def task_ids(self, split):
        return [name for name, task in self.tasks.items() if task["split"] == split]

    def reset(self, task_id, seed):
        self.prices = self.tasks[task_id]["prices"]
        self.turns, self.bought = 0, None
        request = f"Buy the cheapest of these: {', '.join(self.prices)}."
        return ({"role": "user", "content": request},), TOOLS

    def step(self, text):
        self.turns += 1
        try:
            reply = self.answer(text)
        except ToolCallError as error:
            reply = f"Error: {error}."  # the policy reads it and may correct itself
        done = self.bought is not None or self.turns == self.max_turns
        return StepResult(({"role": "tool", "content": reply},), self.score(), done)

    def answer(self, text):
        calls = parse_hermes(text)
        if len(calls) != 1:
            raise ToolCallError(f"got {len(calls)} tool calls; allowed: one per message")
        name, item = calls[0].name, calls[0].arguments.get("item")
        if name not in ("price", "buy") or item not in list(self.prices):
            raise ToolCallError(f"there is no {name}({item}); use price or buy with a listed item")
        if name == "buy":
            self.bought = item
        return f"{self.prices[item]} cents"

    def score(self):
        return float(self.bought is not None and self.prices[self.bought] == self.cheapest())

    def cheapest(self):
        return min(self.prices.values())

    def close(self):
        pass
