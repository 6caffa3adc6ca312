"""An agent that answers after a random while, in every process another one."""

import asyncio
import random

WAIT = random.Random()


async def play(task, client):
    """Task `N`: N calls; `!`: it fails then. Every sign that is said is a reward of 1."""
    turns, total = int(task.task_id[0]), 0
    messages = [{"role": "user", "content": " ".join("123456789" * (1 + turns))}]
    for turn in range(turns):
        answer = await client.chat.completions.create(model="policy", messages=messages)
        said = answer.choices[0].message
        total += len(said.content)
        messages += [said, {"role": "user", "content": f"{turn} {len(said.content)}"}]
        await asyncio.sleep(WAIT.choice([0, 0.001, 0.02]))
    if "!" in task.task_id:
        raise RuntimeError("it fails")
    return total
