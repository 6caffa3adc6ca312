"""A verifiers taskset and its harness, as in any published package."""

import json
from pathlib import Path

import verifiers.v1 as vf
from openai import AsyncOpenAI

__all__ = ["Ask", "Prices"]  # verifiers finds them here


class Row(vf.TaskData):
    answer: str


class Cheapest(vf.Task[Row]):
    @vf.reward
    async def cheapest(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)


class Prices(vf.Taskset[Cheapest, vf.TasksetConfig]):
    def load(self):
        for line in Path(__file__).with_name("prices.jsonl").read_bytes().splitlines():
            row = json.loads(line)
            offers = ", ".join(f"{item} for {cents}" for item, cents in row["prices"].items())
            answer = min(row["prices"], key=row["prices"].get)
            prompt = f"{offers}: which is the cheapest? Answer with its name alone."
            yield Cheapest(Row(name=row["task_id"], prompt=prompt, answer=answer))


class Ask(vf.Harness[vf.HarnessConfig]):
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        messages = [{"role": "user", "content": data.prompt}]
        async with AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
            await client.chat.completions.create(model=ctx.model, messages=messages)
        return vf.ProgramResult(0, "", "")
