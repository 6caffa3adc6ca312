"""Clients of a server of chat completions, in a process of their own: what `bench serving` runs.

Reads what to ask from standard input, as JSON with the fields of `ask`, and prints `Answered`
as JSON. Every client sends its next request once it has the whole answer to the last.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

import httpx

_TIMEOUT_S = 3600.0


async def ask(
    base_url: str, key: str, model: str, clients: int, prompts: Sequence[str], max_tokens: int
) -> dict[str, Any]:
    """Asks for an answer to every prompt, so many at a time.

    Returns: `seconds` of all, and of each request `first_s`, seconds to its first text (null:
    none came), and `tokens` that were sampled, by the server's count.
    """
    waiting = iter(prompts)
    limits = httpx.Limits(max_connections=clients, max_keepalive_connections=clients)
    headers = {"Authorization": f"Bearer {key}"}

    async def converse(http: httpx.AsyncClient) -> list[dict[str, Any]]:
        return [await _request(http, model, prompt, max_tokens) for prompt in waiting]

    async with httpx.AsyncClient(
        base_url=base_url, headers=headers, limits=limits, timeout=_TIMEOUT_S
    ) as http:
        began = time.perf_counter()
        each = await asyncio.gather(*(converse(http) for _ in range(clients)))
        seconds = time.perf_counter() - began
    return {"seconds": seconds, "requests": [one for client in each for one in client]}


async def _request(
    http: httpx.AsyncClient, model: str, prompt: str, max_tokens: int
) -> dict[str, Any]:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    began, first_s, tokens = time.perf_counter(), None, None
    async with http.stream("POST", "/chat/completions", json=body) as reply:
        if reply.status_code != 200:
            raise RuntimeError(f"{reply.status_code}: {(await reply.aread()).decode()[:500]}")
        async for line in reply.aiter_lines():
            data = line.removeprefix("data:").strip()
            if not line.startswith("data:") or data == "[DONE]":
                continue
            event = json.loads(data)
            texts = (choice["delta"].get("content") for choice in event.get("choices", ()))
            if first_s is None and any(texts):
                first_s = time.perf_counter() - began
            if event.get("usage"):
                tokens = event["usage"]["completion_tokens"]
    return {"first_s": first_s, "tokens": tokens}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(ask(**json.load(sys.stdin)))))
