"""HTTP for the endpoint: bodies within limits, server-sent events, clients that disconnect."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from typing import Any, TypeVar
from urllib.parse import urlsplit

import h11
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from seeupo_jax.agents.calls import CallRefused
from seeupo_jax.agents.dialects.exchange import Event

# The rest of a refused body is read and discarded within these bounds: some clients read no answer
# before they have sent it.
REST_BYTES = 64 * 2**20
REST_S, IDLE_S = 10.0, 0.25  # in total, and without a byte
_TIMEOUT = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
LOOK_S = 1.0  # between two looks whether a client is still connected

Result = TypeVar("Result")


async def read_body(request: Request, *, most: int, body_s: float) -> bytes:
    """Reads a whole body of at most `most` bytes.

    Raises:
      CallRefused: it is larger, or not complete within `body_s` seconds.
    """
    refusal = CallRefused(
        f"the body: got more than {most} bytes; allowed: at most as many.",
        status=413,
        code="request_too_large",
    )
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > most:
        raise refusal
    body = bytearray()
    try:
        async with asyncio.timeout(body_s):
            async for chunk in request.stream():
                body += chunk
                if len(body) > most:
                    raise refusal
    except TimeoutError:
        sentence = f"the body: not complete within {body_s:g} s."
        raise CallRefused(sentence, status=408) from None
    return bytes(body)


async def discard_rest(request: Request) -> None:
    """Reads and discards the rest of a body, within bounds."""
    if "expect" in request.headers:  # the client waits for an answer before it sends the body
        return
    left = REST_BYTES
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(REST_S):
            while left > 0:
                message = await asyncio.wait_for(request.receive(), IDLE_S)
                if not message.get("more_body"):
                    return
                left -= len(message["body"])


class ClientGone(Exception):
    """The client has closed its connection."""


@contextlib.asynccontextmanager
async def task_of(work: Awaitable[Result]) -> AsyncGenerator[asyncio.Task[Result], None]:
    """Runs work as a task within a `with` block; at its end the task is cancelled and awaited."""
    task: asyncio.Task[Result] = asyncio.ensure_future(work)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait({task})
        if not task.cancelled():
            task.exception()  # marks it as retrieved


async def until_disconnect(receive: Receive, work: Awaitable[Result]) -> Result:
    """Awaits work, which is cancelled when the client closes its connection.

    Raises:
      ClientGone: the client has closed it.
    """
    async with task_of(work) as task, task_of(_disconnect(receive)) as gone:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()


async def _disconnect(receive: Receive) -> None:
    while True:
        # The connection of a client that keeps sending (pipelining) is paused; each call looks
        # again.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOK_S):
                if (await receive())["type"] == "http.disconnect":
                    return


class EventStream(Response):
    """Server-sent events, until they end or the client disconnects.

    Args:
      first: the event before the others.
      fail: the events that report an error.
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
            await until_disconnect(receive, self._send_all(send))

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


class OriginForm:
    """An app whose requests may name the whole address, as clients of a proxy do (RFC 9112 §3.2.2).

    It reads of `POST http://host/v1/messages` what it reads of `POST /v1/messages`.
    """

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith(("http://", "https://")):
            scope = {**scope, "path": urlsplit(scope["path"]).path or "/"}
            scope["raw_path"] = urlsplit(scope["raw_path"]).path or b"/"
        await self._app(scope, receive, send)


class StrictProtocol(H11Protocol):
    """uvicorn's HTTP/1.1, with a time limit for headers, and for a client that violates HTTP.

    A client that violates it after it has its answer is disconnected: uvicorn would write a second
    answer, which h11 rejects with an exception in the log.

    Args:
      head_s: seconds until a request's headers have arrived, from the first byte of them, or from
        the beginning of a connection.
    """

    def __init__(self, *arguments: Any, head_s: float, **options: Any):
        super().__init__(*arguments, **options)
        self._head_s = head_s
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._time_head(waits=True)

    def connection_lost(self, exc: Exception | None) -> None:
        self._time_head(waits=False)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._time_head(waits=self._has_half_a_head())

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._time_head(waits=self._has_half_a_head())

    def _has_half_a_head(self) -> bool:
        return self.conn.their_state is h11.IDLE and bool(self.conn.trailing_data[0])

    def _time_head(self, *, waits: bool) -> None:
        if waits and self._head_timer is None:
            self._head_timer = self.loop.call_later(self._head_s, self._end_late_head)
        if not waits and self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _end_late_head(self) -> None:
        if self._has_half_a_head():
            self.transport.write(_TIMEOUT)
        self.transport.close()

    def send_400_response(self, msg: str) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True  # the client reads no further output
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.close()
