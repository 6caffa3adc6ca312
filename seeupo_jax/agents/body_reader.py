"""Reads the bodies of requests within limits."""

from __future__ import annotations

import asyncio
import contextlib

from starlette.requests import Request

from seeupo_jax.agents.calls import CallRefused

# Of a refused body: read and thrown away, for some clients read no answer before they have sent it.
REST_BYTES = 64 * 2**20
REST_S, IDLE_S = 10.0, 0.25  # in all, and without a byte


async def read_body(request: Request, *, most: int, body_s: float) -> bytes:
    """The whole body, of at most so many bytes.

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
    """Reads the rest of a body that is of no interest, within bounds."""
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
