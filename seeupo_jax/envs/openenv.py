"""`openenv`: a client of environments that OpenEnv serves, and of plain HTTP reset/step servers.

OpenEnv keeps one episode per WebSocket connection, at `/ws`; its HTTP `/reset` and `/step` make a
new environment for every request. Other servers often keep one episode behind `/reset` and `/step`.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import urllib3

from seeupo_jax.configuration.user_code import escaped
from seeupo_jax.envs.base import Killable, Message, StepResult, Tool, TransientError
from seeupo_jax.envs.seeded_tasks import (
    FIRST_TEST,
    last_line,
    normalized_score,
    numbered_tasks,
    opening_messages,
    text_result,
)
from seeupo_jax.envs.transport.http_client import HttpClient, end_socket
from seeupo_jax.envs.validation import ProtocolError, check_reward

MAX_ANSWER_BYTES = 64 * 2**20
_CONNECT_S = 10.0
_Data = dict[str, Any]


class _InvalidAction(Exception):
    """The server rejects the action; it had no effect."""


class _WebSocket:
    """A connection to one episode's environment; the episode ends when the connection breaks."""

    def __init__(self, url: str, timeout_s: float | None):
        self._url, self._timeout_s = f"{url}/ws", timeout_s
        self._connect = _websockets()
        self._socket: Any = None
        self._opened = contextlib.ExitStack()
        self._killed = False

    def reset(self, options: _Data) -> _Data:
        if self._socket is None:
            connection = self._connect(
                self._url,
                proxy=None,
                open_timeout=_CONNECT_S,
                ping_timeout=None,  # a server that hangs does not answer pings either
                close_timeout=1.0,
                max_size=MAX_ANSWER_BYTES,
            )
            self._socket = self._opened.enter_context(connection)
            if self._killed:  # `kill` could not see this socket
                end_socket(connection.socket)
        return self._ask({"type": "reset", "data": options})

    def step(self, action: _Data) -> _Data:
        return self._ask({"type": "step", "data": action})

    def kill(self) -> None:
        self._killed = True
        if (connection := self._socket) is not None:
            end_socket(connection.socket)

    def close(self) -> None:
        socket, self._socket = self._socket, None
        if socket is None:
            return
        with contextlib.suppress(Exception):  # already gone
            socket.send(json.dumps({"type": "close"}))
        with contextlib.suppress(Exception):
            self._opened.close()

    def _ask(self, message: _Data) -> _Data:
        if self._socket is None:
            raise ConnectionError(f"{self._url}: the connection is closed, so its episode is lost")
        try:
            self._socket.send(json.dumps(message))
            answer = _parsed(self._socket.recv(timeout=self._timeout_s), self._url)
        except Exception:
            self.close()  # a late answer would be taken for the answer to the next message
            raise
        data = _fields(answer, self._url, "type", "data")["data"]
        if answer["type"] != "error":
            return data
        _fields(data, self._url, "code", "message")
        text = f"{data['code']}: {data['message']}"
        if data["code"] == "VALIDATION_ERROR":
            raise _InvalidAction(f"{text}: {json.dumps(data.get('errors', []))}")
        self.close()
        raise RuntimeError(f"{self._url}: {text}")


class _Http:
    """POST /reset and /step to a server that keeps one episode between requests."""

    _playing: ClassVar[dict[str, _Http]] = {}  # by address, the client that reset last

    def __init__(self, url: str, timeout_s: float | None):
        self._url = url
        self._http = HttpClient()
        connect_s = min(_CONNECT_S, timeout_s or math.inf)
        self._timeout = urllib3.Timeout(connect=connect_s, read=timeout_s)

    def reset(self, options: _Data) -> _Data:
        self._playing[self._url] = self
        return self._post("reset", options)

    def step(self, action: _Data) -> _Data:
        if self._playing.get(self._url) is not self:
            raise RuntimeError(
                f"{self._url}: another conversation has reset the server's only episode; allowed:"
                " one open at once (rollout.concurrency=1), or OpenEnv's sessions by ws://."
            )
        return self._post("step", {"action": action})

    def kill(self) -> None:
        self._http.kill()

    def close(self) -> None:
        self._http.clear()
        if self._playing.get(self._url) is self:
            del self._playing[self._url]

    def _post(self, operation: str, body: _Data) -> _Data:
        url = f"{self._url}/{operation}"
        try:
            # Lone surrogates are sent as escapes; urllib3's own JSON encoding fails on them.
            data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
            response = self._http.request(
                "POST",
                url,
                body=data,
                headers=headers,
                timeout=self._timeout,
                preload_content=False,
            )
        except (urllib3.exceptions.NewConnectionError, urllib3.exceptions.ConnectTimeoutError) as e:
            raise TransientError(f"{url}: {e}") from None  # nothing was sent
        payload = response.read(MAX_ANSWER_BYTES + 1)
        response.release_conn()
        if response.status == 422:
            raise _InvalidAction(payload[:500].decode(errors="replace"))
        if response.status != 200 or len(payload) > MAX_ANSWER_BYTES:
            text = payload[:500].decode(errors="replace")
            raise RuntimeError(f"{url}: status {response.status}, {len(payload)} bytes: {text}")
        return _parsed(payload, url)


def _parsed(payload: str | bytes, where: str) -> Any:
    try:
        return json.loads(payload)
    except (ValueError, RecursionError):
        raise ProtocolError(
            f"{where}: got {payload[:60]!r}, which is not JSON; allowed: a JSON object."
        ) from None


_TRANSPORTS = {"ws": _WebSocket, "wss": _WebSocket, "http": _Http, "https": _Http}


@dataclass
class OpenEnv(Killable):
    """A served environment; its tasks are seeds.

    Args:
      url: ws:// or wss:// for OpenEnv's sessions; http:// or https:// for a server that keeps one
        episode behind /reset and /step, which allows one open conversation at a time.
      action_field: the action's field for the text of a response (OpenEnv lists fields at /schema);
        None: the last line of a response is the whole action as a JSON object.
      whole_response: with `action_field`, send the whole response instead of its last line.
      observation_field: the field of an observation that the policy gets; None: all, as JSON.
      reset_options: further fields of every reset request, in addition to the seed.
      instruction: the system message.
      train_tasks, test_tasks: each task is one seed of `reset`; training seeds count from 0.
      full_reward: the sum of rewards that scores 1; 0 scores 0.
      timeout_s: the episode fails after this time without an answer. None: only the pool's limit
        applies, which kills the call.
      test_seed: seed of the first test task; the default is above the training seeds of any run.
    """

    url: str
    action_field: str | None = None
    whole_response: bool = False
    observation_field: str | None = None
    reset_options: Mapping[str, Any] = field(default_factory=dict)
    instruction: str | None = None
    train_tasks: int = 1000
    test_tasks: int = 100
    full_reward: float = 1.0
    timeout_s: float | None = None
    test_seed: int = FIRST_TEST

    def __post_init__(self) -> None:
        scheme = self.url.partition("://")[0]
        if scheme not in _TRANSPORTS:
            allowed = ", ".join(f"{name}://..." for name in _TRANSPORTS)
            raise ValueError(f"openenv url: got {self.url!r}; allowed: {allowed}.")
        self._server = _TRANSPORTS[scheme](self.url.rstrip("/"), self.timeout_s)
        self._tasks = numbered_tasks(
            "openenv", self.train_tasks, self.test_tasks, self.full_reward, self.test_seed
        )
        self._total: float | None = None
        self._done = True

    def task_ids(self, split: str) -> Sequence[str]:
        return self._tasks.ids(split)

    def reset(self, task_id: str, seed: int) -> tuple[tuple[Message, ...], tuple[Tool, ...]]:
        """Starts the task's episode from the task's seed; `seed` is unused."""
        options = {**self.reset_options, "seed": self._tasks.seed(task_id)}
        answer = self._server.reset(options)
        _fields(answer, f"{self.url} reset", "observation", "done")
        self._total, self._done = 0.0, bool(answer["done"])
        return opening_messages(self.instruction, self._shown(answer)), ()

    def step(self, text: str) -> StepResult:
        """Sends the action; if the server rejects it, the observation is the server's reason."""
        if self._done:
            raise ValueError("openenv: reset() must come before step().")
        try:
            answer = self._server.step(self._action(text))
        except _InvalidAction as error:
            return text_result(f"Invalid action: {error}")
        _fields(answer, f"{self.url} step", "observation", "reward", "done")
        stated = 0.0 if answer["reward"] is None else answer["reward"]
        reward = check_reward(stated, f"{self.url} step reward")
        self._total += reward
        self._done = bool(answer["done"])
        return text_result(self._shown(answer), reward, self._done)

    def score(self) -> float:
        if self._total is None:
            raise ValueError("openenv: reset() must come before score().")
        return normalized_score(self._total, self.full_reward)

    def close(self) -> None:
        self._done = True
        self._server.close()

    def kill(self) -> None:
        """Ends the running call and every later one; any thread may call it."""
        self._server.kill()

    def _action(self, text: str) -> _Data:
        if self.action_field is not None:
            content = text.strip() if self.whole_response else last_line(text)
            return {self.action_field: content}
        try:
            action = json.loads(last_line(text))
            json.dumps(action, allow_nan=False)  # Python parses NaN, which is not JSON
        except (ValueError, RecursionError):
            action = None
        if not isinstance(action, dict):
            raise _InvalidAction("the last line must be a JSON object")
        return action

    def _shown(self, answer: _Data) -> str:
        observation = answer["observation"]
        if self.observation_field is None:
            return escaped(json.dumps(observation, ensure_ascii=False))
        fields = _fields(observation, self.url, self.observation_field)
        return escaped(str(fields[self.observation_field]))


def _fields(answer: Any, where: str, *names: str) -> _Data:
    """Returns the answer if it is an object with these fields.

    Raises:
      ProtocolError: it is not; the error quotes it.
    """
    if not isinstance(answer, dict) or not set(names) <= set(answer):
        got = json.dumps(answer)
        raise ProtocolError(
            f"{where}: got {got if len(got) < 100 else f'{got[:100]} ...'}; allowed: a JSON object"
            f" with {', '.join(names)}."
        )
    return answer


def _websockets() -> Any:
    try:
        from websockets.sync.client import connect
    except ImportError:
        raise ValueError(
            "env openenv needs websockets for ws:// and wss://: pip install 'seeupo_jax[openenv]'."
        ) from None
    return connect
