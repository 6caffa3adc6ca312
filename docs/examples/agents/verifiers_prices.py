"""Plays a task of a verifiers taskset; the episode's reward is the trace's reward."""

import asyncio
import json
import os
from pathlib import Path

import verifiers.v1 as vf
from prices_v1 import Prices


async def play(name):
    config = vf.AgentConfig(
        harness={"id": "prices_v1"},
        runtime={"type": "subprocess"},
        model=os.environ["OPENAI_MODEL"],
        client=vf.EvalClientConfig(
            base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY"
        ),
    )
    task = next(task for task in Prices(vf.TasksetConfig()) if task.data.name == name)
    async with vf.make_agent(config) as agent:
        return await agent.run(task)


task = json.loads(Path(os.environ["SEEUPO_TASK"]).read_text())
trace = asyncio.run(play(task["task_id"]))
Path(os.environ["SEEUPO_RESULT"]).write_text(json.dumps(trace.reward))
