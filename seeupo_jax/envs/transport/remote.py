"""`remote`: an environment that `seeupo_jax.envs.serve` runs in another process or on a machine."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import re
import secrets
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import urllib3

from seeupo_jax.envs.base import (
    Killable,
    Message,
    ServerAtCapacity,
    StepResult,
    TaskShare,
    Tool,
    TransientError,
)
from seeupo_jax.envs.transport import remote_calls
from seeupo_jax.envs.transport.http_client import HttpClient
from seeupo_jax.envs.transport.http_protocol import (
    BUSY,
    GONE,
    MALFORMED,
    MAX_ANSWER_BYTES,
    MAX_REQUEST_BYTES,
    MAY_PASS,
    UNAUTHORIZED,
    UNKNOWN,
    read_token,
)
from seeupo_jax.envs.validation import ProtocolError, check_finish, check_score

_log = logging.getLogger(__name__)

_CONNECT_S = 10.0
_TASKS_S = 60.0  # for requests about tasks, outside of an episode
_CLOSE_S = 5.0
_ANSWERS = {
    "reset": ("messages", "tools", "score"),
    "step": (*remote_calls.STEP, "score"),
    "finish": ("reward", "score"),
}
_FULL = re.compile(rb'\{"refused": "(all \d+ (?:sessions|connections) are open)\."\}')
_ERRORS = {"ValueError": ValueError, "ProtocolError": ProtocolError}


class RemoteError(Exception):
    """The environment failed on its server, or the server no longer has the episode."""


class _Gone(RemoteError):
    """The server does not have the session."""


class _Unknown(RemoteError):
    """The server is older and does not know the operation."""


class _Malformed(RemoteError):
    """The server rejects the fields of a request; it had no effect."""


@dataclass
class Remote(Killable):
    """A client of one session at a time, over one connection.

    Requests are numbered, and the server executes none twice. A broken connection is therefore a
    `TransientError`: the same call on the same object sends the same number. If the server has
    restarted meanwhile, the episode is lost and the call fails.

    Args:
      url: of the server, such as http://127.0.0.1:8700.
      token_file: the file of the server's token; None: the default file of this machine.
      timeout_s: a call without an answer for longer raises `TransientError`. None: calls of an
        episode are limited only by the pool, which kills them, and others by 60 s. If all sessions
        or connections of the server are in use, a call raises `ServerAtCapacity` immediately.
    """

    url: str
    token_file: str | None = None
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"remote url: got {self.url!r}; allowed: http://... or https://....")
        self._headers = {
            "Authorization": f"Bearer {read_token(self.token_file)}",
            "Content-Type": "application/json",
        }
        self._http = HttpClient()  # follows no redirects: the token is for this server only
        self._forget()

    def task_ids(self, split: str) -> Sequence[str]:
        return self._ask("task_ids", {"split": split})

    def task_shares(self, split: str) -> Sequence[TaskShare]:
        """Returns the parts of the environment's tasks; a single part if it has none.

        An older server does not support the request: a single part is assumed, with a warning.
        """
        try:
            parts = self._ask("task_shares", {"split": split})
        except _Unknown:
            _warn_once(self.url, "parts")
            return [TaskShare("", 1.0, self.task_ids(split))]
        try:
            return [TaskShare(name, weight, ids) for name, weight, ids in parts]
        except (TypeError, ValueError):
            got, allowed = str(parts)[:60], "a list of name, weight and task ids"
            raise RemoteError(f"{self.url}/task_shares: got {got}; allowed: {allowed}.") from None

    def labels(self, task_id: str) -> Mapping[str, str]:
        """Returns a task's labels; empty if the server does not support labels."""
        try:
            return self._ask("labels", {"task_id": task_id})
        except _Unknown:
            return {}

    def reference(self, task_id: str) -> str | None:
        """Returns a task's reference answer; None if the server does not support them."""
        try:
            return self._ask("reference", {"task_id": task_id})
        except _Unknown:
            return None

    def reset(
        self, task_id: str, seed: int, episode_seed: int | None = None
    ) -> tuple[tuple[Message, ...], tuple[Tool, ...]]:
        """Starts an episode in this object's session, or in a new session if that has ended.

        If an older server rejects `episode_seed`, the request is sent without it, with a warning.
        """
        request = {"task_id": task_id, "seed": seed}
        seed_field = {} if episode_seed is None else {"episode_seed": episode_seed}
        if self._in_doubt:
            self.close()
        try:
            answer = self._begin(request, seed_field)
        except _Gone:
            self._forget()
            answer = self._begin(request, seed_field)
        self._has_finish = answer.get("finish") is True  # older servers do not report it
        self.role = answer.get("role", "")
        return remote_calls.read_opening(answer)

    def step(self, text: str) -> StepResult:
        if self._score is None:
            raise ValueError("remote: reset() must come before step().")
        return remote_calls.read_step(self._play("step", {"text": text}))

    def finish(self, stop: str) -> float | None:
        """Calls the environment's `finish`, if it has one, when the trainer ends the episode."""
        if self._score is None:
            raise ValueError("remote: reset() must come before finish().")
        if not self._has_finish:
            return None
        return check_finish(self._play("finish", {"stop": stop})["reward"])

    def score(self) -> float:
        if self._score is None:
            raise ValueError("remote: reset() must come before score().")
        return self._score

    def close(self) -> None:
        """Ends the session; if the server cannot be reached, it ends the session itself later."""
        if (self._number or self._in_doubt) and not self._http.killed:
            self._end_session(self._session)
        self._forget()
        self._http.clear()

    def kill(self) -> None:
        """Ends the running request, every later one and the session; any thread may call it."""
        session = (self._session,)  # the thread whose request ends resets the attribute
        self._http.kill()
        threading.Thread(target=self._end_session, args=session).start()  # for at most 10 s

    def _end_session(self, session: str) -> None:
        http = HttpClient() if self._http.killed else self._http
        with http, contextlib.suppress(TransientError, RemoteError, ValueError):
            self._post("close", {"session": session}, timeout_s=_CLOSE_S, http=http)

    def _forget(self) -> None:
        self._session, self._number = secrets.token_hex(16), 0
        self._in_doubt = False  # whether the server has executed the last request
        self._score: float | None = None
        self.role = ""  # that acts first
        self._has_finish = False
        self._takes_episode_seed = True  # until the server rejects it, as older servers do

    def _begin(self, request: dict[str, Any], seed_field: dict[str, Any]) -> dict[str, Any]:
        if not seed_field or not self._takes_episode_seed:
            return self._play("reset", request)
        try:
            return self._play("reset", request | seed_field)
        except _Malformed:
            answer = self._play("reset", request)
        self._takes_episode_seed = False
        _warn_once(self.url, "episode_seed")
        return answer

    def _play(self, operation: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Sends the session's next request, or repeats the last one if it got no answer."""
        numbered = {"session": self._session, "number": self._number}
        self._in_doubt = True
        answer = self._post(operation, numbered | arguments)
        self._number += 1
        self._in_doubt = False
        result = self._result(answer)
        missing = [name for name in _ANSWERS[operation] if name not in _keys(result)]
        if missing:
            allowed = ", ".join(_ANSWERS[operation])
            got = ", ".join(_keys(result)) or "none"
            raise RemoteError(f"{self.url}/{operation}: got the fields {got}; allowed: {allowed}.")
        self._score = check_score(result["score"])
        return result

    def _ask(self, operation: str, request: dict[str, str]) -> Any:
        """Requests information about tasks."""
        limit_s = _TASKS_S if self.timeout_s is None else self.timeout_s
        return self._result(self._post(operation, request, timeout_s=limit_s))

    def _result(self, answer: dict[str, Any]) -> Any:
        """Returns the environment's result, or raises its error."""
        if "result" in answer:
            return answer["result"]
        error = answer.get("error")
        if not _keys(error) >= {"type", "text"}:
            got = ", ".join(answer) or "none"
            raise RemoteError(f"{self.url}: got the fields {got}; allowed: result, or error.")
        kind, text = str(error["type"]), str(error["text"])
        raise _ERRORS[kind](text) if kind in _ERRORS else RemoteError(f"{kind}: {text}")

    def _post(
        self,
        operation: str,
        request: Any,
        *,
        timeout_s: float | None = None,
        http: HttpClient | None = None,
    ) -> dict[str, Any]:
        body = json.dumps(request).encode()
        if len(body) > MAX_REQUEST_BYTES:
            raise ValueError(
                f"remote {operation}: got a request of {len(body)} bytes;"
                f" allowed: at most {MAX_REQUEST_BYTES}."
            )
        read_s = self.timeout_s if timeout_s is None else timeout_s
        try:
            response = (http or self._http).request(
                "POST",
                f"{self.url.rstrip('/')}/{operation}",
                body=body,
                headers=self._headers,
                timeout=urllib3.Timeout(connect=min(_CONNECT_S, read_s or math.inf), read=read_s),
                preload_content=False,
            )
            payload = response.read(MAX_ANSWER_BYTES + 1)
            response.release_conn()
        except urllib3.exceptions.HTTPError as error:
            raise TransientError(f"{self.url}: {error}") from None
        if len(payload) > MAX_ANSWER_BYTES:
            self._http.clear()
            raise RemoteError(f"{self.url}: more than {MAX_ANSWER_BYTES} bytes of answer")
        return self._read(response.status, payload)

    def _read(self, status: int, payload: bytes) -> dict[str, Any]:
        """Parses a reply; returns the environment's answer, a dict with `result` or `error`."""
        if status == BUSY and (full := _FULL.fullmatch(payload)):
            raise ServerAtCapacity(f"{self.url}: {full[1].decode()}")
        if status in MAY_PASS:
            raise TransientError(f"{self.url}: status {status}: {_excerpt(payload)}")
        if status == GONE:
            raise _Gone(f"{self.url}: {_excerpt(payload)}")
        if status == UNKNOWN:
            raise _Unknown(f"{self.url}: {_excerpt(payload)}")
        if status in MALFORMED:
            raise _Malformed(f"{self.url}: status {status}: {_excerpt(payload)}")
        if status == UNAUTHORIZED:
            raise ValueError(f"remote token_file: {self.url} refuses the token in it.")
        try:
            answer = json.loads(payload)
        except (ValueError, RecursionError):
            answer = None
        if status != 200 or not isinstance(answer, dict):
            raise RemoteError(f"{self.url}: status {status}: {_excerpt(payload)}")
        if "transient" in answer:
            raise remote_calls.transient(answer)
        return answer


_OLDER = {
    "episode_seed": "%s does not take episode_seed: if transitions are random there, the members of"
    " a group may share them. A server of this version accepts it.",
    "parts": "%s does not report the parts of its tasks: if it serves a mixture, its weights"
    " have no effect and all tasks are drawn alike. A server of this version reports it.",
}
_warned: set[tuple[str, str]] = set()
_warning = threading.Lock()  # environments of a pool detect it at the same time


def _warn_once(url: str, lacking: str) -> None:
    """Warns once per server and missing feature, a key of `_OLDER`."""
    with _warning:
        warned = (url, lacking) in _warned
        _warned.add((url, lacking))
    if not warned:
        _log.warning(_OLDER[lacking], url)


def _keys(value: Any) -> set[str]:
    return set(value) if isinstance(value, dict) else set()


def _excerpt(payload: bytes) -> str:
    return payload[:500].decode(errors="replace")
