"""An agent for the order desk with its own loop on the OpenAI SDK: an example to train or copy."""

from __future__ import annotations

import json
from typing import Any

from seeupo_jax.agents.calls import AgentResult, AgentTask
from seeupo_jax.envs.order_desk.environment import OrderDesk
from seeupo_jax.envs.order_desk.levels import level_of
from seeupo_jax.envs.tool_calls import render_hermes


async def play(task: AgentTask, client: Any) -> AgentResult:
    """Requests tool calls until the episode ends; the desk executes them and gives rewards.

    Args:
      client: an `openai.AsyncOpenAI`.
    """
    desk, done, reward = OrderDesk(level=level_of(task.task_id)), False, 0.0
    opening, functions = desk.reset(task.task_id, task.seed)
    messages: list[Any] = list(opening)
    tools: list[Any] = [{"type": "function", "function": each} for each in functions]
    while not done:
        completion = await client.chat.completions.create(
            model="policy", messages=messages, tools=tools
        )
        answer = completion.choices[0].message
        calls = [call.function for call in answer.tool_calls or ()]
        text = answer.content or ""
        text += "".join(render_hermes(each.name, **json.loads(each.arguments)) for each in calls)
        step = desk.step(text)
        done, reward = step.done, reward + step.reward
        messages.append(answer)
        # Each call needs a result; a text without a valid call is answered without an id.
        named = [{"tool_call_id": call.id} for call in answer.tool_calls or ()] or [{}]
        messages += [{**each, **name} for each in step.observation for name in named]
    return AgentResult(reward, desk.score(), info=step.info)
