"""An agent that compacts its history: when the history is long, the policy summarises it."""

import json

from seeupo_jax import envs
from seeupo_jax.envs.tool_calls import render_hermes

LONGEST = 7  # messages: the request, and three calls with their answers
SUMMARISE = {"role": "user", "content": "Summarise."}


async def agent(task, client):
    desk = envs.make("order_desk")
    (_, request), tools = desk.reset(task.task_id, task.seed)
    shown = [{"type": "function", "function": tool} for tool in tools]

    async def ask(messages):  # always with the same tools, so that a history can be continued
        reply = await client.chat.completions.create(model="policy", messages=messages, tools=shown)
        return reply.choices[0].message

    history, done, summary = [request], False, ""
    while not done:
        if len(history) == LONGEST:
            summary = (await ask([*history, SUMMARISE])).content or ""
            history = [compacted(request, summary)]
        message = await ask(history)
        if not message.tool_calls:
            break
        call = message.tool_calls[0].function
        result = desk.step(render_hermes(call.name, **json.loads(call.arguments)))
        history.append(message)
        for each in message.tool_calls:
            history += [{**answer, "tool_call_id": each.id} for answer in result.observation]
        done = result.done
    return {"reward": desk.score(), "info": {"summary": summary}}


def compacted(request, summary):
    return {"role": "user", "content": f"{request['content']}\n{summary}"}
