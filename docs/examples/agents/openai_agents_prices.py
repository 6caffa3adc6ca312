"""An agent of the OpenAI Agents SDK with a tool."""

import json
import os
from pathlib import Path

from agents import Agent, Runner, function_tool, set_tracing_disabled

set_tracing_disabled(True)  # tracing would send the agent's actions to OpenAI
task = json.loads(Path(os.environ["SEEUPO_TASK"]).read_text())
prices = task["data"]["prices"]


@function_tool
def price(item: str) -> str:
    """The price of an item in cents."""
    return str(prices.get(item, "no such item"))


agent = Agent("Shopper", tools=[price], model=os.environ["OPENAI_MODEL"])
question = f"Which is the cheapest: {', '.join(prices)}? Answer with its name alone."
result = Runner.run_sync(agent, question, max_turns=6)

reward = float(result.final_output == min(prices, key=prices.get))
Path(os.environ["SEEUPO_RESULT"]).write_text(json.dumps(reward))
