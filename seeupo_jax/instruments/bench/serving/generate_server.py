"""`transformers`' `generate` behind chat completions, as `transformers serve` has it by default.

    python -m seeupo_jax.instruments.bench.serving.generate_server FOLDER PORT DTYPE

One thread generates one answer after the other, and each is streamed token by token. Used where
the dependencies of `transformers serve` itself are not installed.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import transformers
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route
from transformers.generation.streamers import BaseStreamer

from seeupo_jax.parallel.host_cores import usable_cores


class _Streamer(BaseStreamer):
    """Passes text to an event loop's queue with every token that completes a character."""

    def __init__(self, tokenizer: Any, loop: asyncio.AbstractEventLoop, queue: asyncio.Queue[Any]):
        self._tokenizer, self._loop, self._queue = tokenizer, loop, queue
        self._prompt, self._tokens, self._given = True, list[int](), 0

    def put(self, value: Any) -> None:
        if self._prompt:  # is passed first
            self._prompt = False
            return
        self._tokens += value.tolist()
        text = self._tokenizer.decode(self._tokens, skip_special_tokens=True).rstrip("\ufffd")
        new, self._given = text[self._given :], max(self._given, len(text))
        if new:
            self._loop.call_soon_threadsafe(self._queue.put_nowait, new)

    def end(self) -> None:
        """The queue's end is that of the job."""


def build(folder: str, dtype: str) -> Starlette:
    """The server's application; sampling is plain, at the request's temperature."""
    torch.set_num_threads(usable_cores())
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    model = model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
    thread = ThreadPoolExecutor(1)

    def generate(asked: Any, streamer: _Streamer) -> int:
        temperature = asked.get("temperature", 1.0)
        sampling = {"temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
        inputs = tokenizer.apply_chat_template(
            asked["messages"], add_generation_prompt=True, return_tensors="pt", return_dict=True
        ).to(model.device)
        with torch.inference_mode():
            output = model.generate(
                **inputs,
                streamer=streamer,
                max_new_tokens=asked["max_tokens"],
                do_sample=bool(temperature),
                **sampling,
            )
        return output.shape[1] - inputs["input_ids"].shape[1]

    async def events(request: Any) -> AsyncIterator[bytes]:
        loop, queue = asyncio.get_running_loop(), asyncio.Queue()
        streamer = _Streamer(tokenizer, loop, queue)
        job = loop.run_in_executor(thread, generate, request, streamer)
        job.add_done_callback(lambda _: queue.put_nowait(None))
        while (text := await queue.get()) is not None:
            yield _encode([{"index": 0, "delta": {"content": text}}])
        yield _encode([], completion_tokens=await job)
        yield b"data: [DONE]\n\n"

    async def answer(request: Request) -> StreamingResponse:
        return StreamingResponse(events(await request.json()), media_type="text/event-stream")

    async def models(_: Request) -> JSONResponse:
        return JSONResponse({"object": "list", "data": [{"id": folder, "object": "model"}]})

    return Starlette(
        routes=[
            Route("/v1/chat/completions", answer, methods=["POST"]),
            Route("/v1/models", models),
        ]
    )


def _encode(choices: list[Any], **usage: int) -> bytes:
    event = {"object": "chat.completion.chunk", "choices": choices, "usage": usage or None}
    return f"data: {json.dumps(event)}\n\n".encode()


if __name__ == "__main__":
    uvicorn.run(build(sys.argv[1], sys.argv[3]), port=int(sys.argv[2]), log_level="error")
