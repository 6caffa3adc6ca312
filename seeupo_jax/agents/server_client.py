"""Requests to an OpenAI-compatible server: its models, its key, and what is tried again."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import urllib3

from seeupo_jax.configuration.user_code import listed

KEY_VARIABLE = "OPENAI_API_KEY"
SHOWN = 300  # characters of a reply that an error quotes
CONNECT_S = 10.0  # seconds after which a machine that says nothing is not there

Read = TypeVar("Read")


class TryAgain(Exception):
    """A request failed and may be repeated; the text is the reason."""


class Refused(ValueError):
    """The server refuses a request. reply: its message. status: of HTTP."""

    def __init__(self, sentence: str, reply: str, status: int):
        super().__init__(sentence)
        self.reply, self.status = reply, status


class ServerClient:
    """A server, and one of its models.

    Args:
      url: with or without `/v1` at the end.
      model: the served name; None: the only model that the server lists.
      connections: that are kept.
      timeout_s: a request fails after this many seconds without an answer.
      retries: of a request that failed temporarily (no connection, no answer in time, status 408,
        429 or 5xx, an invalid reply).
      retry_wait_s: seconds before the first retry, doubled for each further one.
      key_variable: the environment variable with the server's key, if it is set.

    Raises:
      ValueError: the address is none of HTTP.
    """

    def __init__(
        self,
        url: str,
        model: str | None,
        *,
        connections: int,
        timeout_s: float,
        retries: int,
        retry_wait_s: float,
        key_variable: str = KEY_VARIABLE,
    ):
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"url: got {url!r}; allowed: http://... or https://...")
        self.url, self.model = url.rstrip("/").removesuffix("/v1"), model
        self.retries, self._retry_wait_s = retries, retry_wait_s
        self._key_variable, key = key_variable, os.environ.get(key_variable)
        self._http = urllib3.PoolManager(
            maxsize=connections,
            headers={} if key is None else {"Authorization": f"Bearer {key}"},
            timeout=urllib3.Timeout(connect=min(CONNECT_S, timeout_s), read=timeout_s),
            retries=False,
        )
        self._closed = threading.Event()

    def card(self) -> Mapping[str, Any]:
        """The server's description of the model, whose name is known from then on.

        Raises:
          ValueError: the server does not answer, or does not serve the model.
        """
        try:
            cards, _ = self.ask("GET", "/v1/models", None, _read_models)
        except TryAgain as error:
            raise ValueError(f"{self.url}: {error}; allowed: a server that answers.") from None
        if self.model is None and len(cards) == 1:
            (self.model,) = cards
        if self.model not in cards:
            raise ValueError(
                f"model: got {self.model!r}; allowed at {self.url}:"
                f" {listed(cards, 'it serves no model')}."
            )
        return cards[self.model]

    def ask(
        self, method: str, path: str, body: Any, read: Callable[[Any], Read]
    ) -> tuple[Read, int]:
        """Sends a request; returns its reply, parsed by `read`, and the number of retries.

        Raises:
          TryAgain: the last of them failed, too.
          Refused: the server will not answer it.
        """
        number = 0
        while True:
            try:
                return self._ask_once(method, path, body, read), number
            except TryAgain:
                if number == self.retries or self._closed.wait(self._retry_wait_s * 2**number):
                    raise
            number += 1

    def stop(self) -> None:
        """Nothing is tried again from now on."""
        self._closed.set()

    def close(self) -> None:
        """Ends the connections."""
        self.stop()
        self._http.clear()

    def _ask_once(self, method: str, path: str, body: Any, read: Callable[[Any], Read]) -> Read:
        try:
            reply = self._http.request(method, self.url + path, json=body)
        except urllib3.exceptions.HTTPError as error:
            raise TryAgain(f"{path}: {error}") from error
        message = _error_text(reply.data)
        answered = f"{path} answered {reply.status}: {message}"
        if reply.status in (408, 429) or reply.status >= 500:
            raise TryAgain(answered)
        if reply.status in (401, 403):
            answered += f" (the key is that of the environment variable {self._key_variable})"
        if reply.status != 200:
            raise Refused(f"{self.url}: {answered}", message, reply.status)
        try:
            return read(json.loads(reply.data) if reply.data else None)
        except (AttributeError, LookupError, TypeError, ValueError, RecursionError):
            raise TryAgain(f"{path} gave an unexpected reply: {message}") from None


def _read_models(reply: Any) -> dict[str, Mapping[str, Any]]:
    return {card["id"]: card for card in reply["data"]}


def _error_text(body: bytes) -> str:
    """Returns the message of an error reply, or the beginning of its body."""
    text = body.decode(errors="replace")
    try:
        reply = json.loads(text)
        return str(reply.get("error", reply)["message"])
    except (AttributeError, LookupError, TypeError, ValueError, RecursionError):
        return text[:SHOWN]
