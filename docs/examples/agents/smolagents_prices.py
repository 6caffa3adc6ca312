"""A smolagents agent with a tool."""

import json
import os
from pathlib import Path

from smolagents import OpenAIModel, ToolCallingAgent, tool

task = json.loads(Path(os.environ["SEEUPO_TASK"]).read_text())
prices = task["data"]["prices"]


@tool
def price(item: str) -> str:
    """The price of an item in cents.

    Args:
        item: name of the item
    """
    return str(prices.get(item, "no such item"))


model = OpenAIModel(
    model_id=os.environ["OPENAI_MODEL"],
    api_base=os.environ["OPENAI_BASE_URL"],
    api_key=os.environ["OPENAI_API_KEY"],
    tool_choice="auto",
)
agent = ToolCallingAgent(tools=[price], model=model, max_steps=6, verbosity_level=0)
answer = agent.run(f"Which is the cheapest: {', '.join(prices)}? Answer with its name alone.")

reward = float(answer == min(prices, key=prices.get))
Path(os.environ["SEEUPO_RESULT"]).write_text(json.dumps(reward))
