"""An environment in a separate process: a crash or hang ends only its episode."""

from __future__ import annotations

import contextlib
import json
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from seeupo_jax.envs.base import Killable, Message, StepResult, Tool
from seeupo_jax.envs.plain_values import PlainDict
from seeupo_jax.envs.transport import remote_calls
from seeupo_jax.envs.transport.http_protocol import MAX_ANSWER_BYTES
from seeupo_jax.envs.transport.processes import (
    end,
    exit_code,
    has_ended,
    python_command,
    signal_name,
    supervised,
)
from seeupo_jax.envs.validation import (
    ProtocolError,
    RemoteEnvironmentError,
    check_finish,
    check_score,
)

_CLOSE_S = 5.0  # for an environment to close, also after the trainer was killed; then it is killed
_POLL_S = 0.002


class ProcessDied(Exception):
    """The environment's process ended without an answer."""


class IsolatedEnvironment(Killable):
    """An environment of `envs.make` in a separate process, which starts with the first call.

    After the process has died, a call starts a new one, in which only `reset` can succeed. Calls
    wait without a time limit, until another thread calls `kill`.

    Args:
      name, options: as for `envs.make`; the options must be JSON.
      memory_mib: limit of the process's address space; None: no limit.
    """

    def __init__(self, name: str, options: Mapping[str, Any], *, memory_mib: int | None = None):
        self._first = {"name": name, "options": dict(options), "memory_mib": memory_mib}
        self._lock = threading.Lock()  # of the two below
        self._process: subprocess.Popen[bytes] | None = None
        self._killed = False
        self._has_finish = False
        self.role = ""  # that acts first

    def begin(self) -> None:
        """Starts the process and makes the environment; otherwise the first call does that."""
        process = _launch()
        with self._lock:
            self._process = process
            if self._killed:
                end(process)
        try:
            self._send(self._first)
        except BaseException:
            self.close()
            raise

    def task_ids(self, split: str) -> Sequence[str]:
        return self._ask("task_ids", split=split)

    def reset(
        self, task_id: str, seed: int, episode_seed: int | None = None
    ) -> tuple[tuple[Message, ...], tuple[Tool, ...]]:
        """Starts an episode, in a new process if none runs."""
        result = self._ask("reset", task_id=task_id, seed=seed, episode_seed=episode_seed)
        self._has_finish, self.role = result["finish"], result.get("role", "")
        result["messages"] = [*map(PlainDict, result["messages"])]
        return remote_calls.read_opening(result)

    def step(self, text: str) -> StepResult:
        result = self._ask("step", text=text)
        result["info"] = PlainDict(result["info"])
        result["observation"] = [*map(PlainDict, result["observation"])]
        return remote_calls.read_step(result)

    def finish(self, stop: str) -> float | None:
        """Calls the environment's `finish`, if it has one, when the trainer ends the episode."""
        if not self._has_finish:
            return None
        return check_finish(self._ask("finish", stop=stop)["reward"])

    def score(self) -> float:
        return check_score(self._ask("score"))

    def close(self) -> None:
        """Closes the environment and ends its process; a later call starts another one."""
        with self._lock:
            process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(OSError):  # it has died
            process.stdin.close()
        _reap(process)

    def kill(self) -> None:
        """Ends the process and its descendants permanently; any thread may call it."""
        with self._lock:
            self._killed = True
            if self._process is not None:
                end(self._process)

    def _ask(self, operation: str, **arguments: Any) -> Any:
        if self._process is None:
            self.begin()
        return self._send({"operation": operation, **arguments})

    def _send(self, request: Mapping[str, Any]) -> Any:
        """Sends a request and returns the answer; an environment's error is raised."""
        process = self._process
        line = b""
        with contextlib.suppress(OSError):  # it has died, or dies during this request
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
            line = process.stdout.readline(MAX_ANSWER_BYTES + 2)
        if not line.endswith(b"\n"):
            raise ProcessDied(self._end())
        answer = json.loads(line)
        if "transient" in answer:
            raise remote_calls.transient(answer)
        if "error" in answer:
            kind, text = answer["error"]["type"], answer["error"]["text"]
            if kind == "ProtocolError":
                raise ProtocolError(text)
            raise RemoteEnvironmentError(f"{kind}: {text}")
        return answer["result"]

    def _end(self) -> str:
        """Removes the process; returns a description of its end."""
        with self._lock:
            process, self._process = self._process, None
        code = _reap(process)
        if code is None:
            return "its process closed the pipe of its answers"
        if code >= 0:
            return f"its process ended with exit code {code}"
        return f"its process was ended by signal {-code} ({signal_name(-code)})"


def check_isolated(
    name: str, options: Mapping[str, Any], *, memory_mib: int | None, timeout_s: float
) -> None:
    """Checks that an environment can be made in a separate process.

    Raises:
      ValueError: that fails, or takes longer than `timeout_s`.
    """
    environment = IsolatedEnvironment(name, options, memory_mib=memory_mib)
    timer = threading.Timer(timeout_s, environment.kill)
    timer.start()
    try:
        environment.begin()
    except (ProcessDied, RemoteEnvironmentError) as error:
        raise ValueError(
            f"config.env.isolation: got process, where env {name} cannot be made within"
            f" {timeout_s:g} s ({error}); allowed: an environment that can, or thread."
        ) from None
    finally:
        timer.cancel()
        environment.close()


def _launch() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        supervised(python_command("seeupo_jax.envs.transport.isolated_process"), grace_s=_CLOSE_S),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C in a terminal is for the trainer only
    )


def _reap(process: subprocess.Popen[bytes]) -> int | None:
    """Waits for a process to end and returns its exit code; None: it had to be killed."""
    until = time.monotonic() + _CLOSE_S
    while not (ended := has_ended(process)) and time.monotonic() < until:
        time.sleep(_POLL_S)
    end(process)
    code = exit_code(process)
    process.stdout.close()
    with contextlib.suppress(OSError):
        process.stdin.close()
    return code if ended else None
