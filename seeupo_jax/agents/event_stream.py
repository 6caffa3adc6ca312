"""Work for a client that may vanish, and its answer as server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from typing import TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from seeupo_jax.agents.dialects.exchange import Event

LOOK_S = 1.0

Result = TypeVar("Result")


class ClientGone(Exception):
    """The client has closed its connection."""


@contextlib.asynccontextmanager
async def ended(work: Awaitable[Result]) -> AsyncGenerator[asyncio.Task[Result], None]:
    """A task that is over afterwards: it is cancelled where it still runs."""
    task: asyncio.Task[Result] = asyncio.ensure_future(work)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait({task})
        if not task.cancelled():
            task.exception()  # marks it as seen


async def until_gone(receive: Receive, work: Awaitable[Result]) -> Result:
    """Awaits work, which is cancelled when the client closes its connection.

    Raises:
      ClientGone: it has.
    """
    async with ended(work) as task, ended(_disconnect(receive)) as gone:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()


async def _disconnect(receive: Receive) -> None:
    while True:
        # A client that sends on (pipelining) has its connection paused; each call looks again.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOK_S):
                if (await receive())["type"] == "http.disconnect":
                    return


class EventStream(Response):
    """Server-sent events, until they end or the client is gone.

    Args:
      first: which precedes the others.
      fail: what is sent of an error.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        first: Event,
        events: AsyncGenerator[Event, None],
        fail: Callable[[Exception], Iterable[Event]],
    ):
        super().__init__(headers={"cache-control": "no-cache"})
        del self.headers["content-length"]
        self._first, self._events, self._fail = first, events, fail

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(ClientGone):
            await until_gone(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        async def write(event: Event) -> None:
            data = _encode(event)
            await send({"type": "http.response.body", "body": data, "more_body": True})

        async with contextlib.aclosing(self._events):
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await write(self._first)
            try:
                async for event in self._events:
                    await write(event)
            except Exception as error:
                for event in self._fail(error):
                    await write(event)
            await send({"type": "http.response.body", "body": b"", "more_body": False})


def _encode(event: Event) -> bytes:
    if isinstance(event, str):
        return f"data: {event}\n\n".encode()
    head = f"event: {event['type']}\n" if "type" in event else ""
    return f"{head}data: {json.dumps(event, allow_nan=False)}\n\n".encode()
