"""The process of one environment, with a pipe for requests and one for answers.

Both carry lines of JSON. The first request names the environment; each later one is an operation
with its arguments. The process ends when the request pipe is closed.
"""

from __future__ import annotations

import functools
import json
import mmap
import os
import resource
import signal
from collections.abc import Callable
from typing import Any, BinaryIO

from seeupo_jax import envs
from seeupo_jax.envs.base import Environment
from seeupo_jax.envs.tasks import list_tasks
from seeupo_jax.envs.transport import processes, remote_calls

_MIB = 2**20
_OPERATIONS = {
    "task_ids": list_tasks,
    "reset": remote_calls.reset,
    "step": remote_calls.step,
    "finish": remote_calls.finish,
    "score": remote_calls.score,
}


def main() -> None:
    """Serves the environment that the first request names."""
    pipes = processes.take_pipes()
    requests, answers = os.fdopen(pipes[0], "rb"), os.fdopen(pipes[1], "wb")
    for number in (signal.SIGINT, signal.SIGTERM):
        # Only the trainer ends this process. A function, since children of the environment would
        # inherit SIG_IGN.
        signal.signal(number, lambda *_: None)
    begin = json.loads(requests.readline())
    made: list[Environment] = []
    _answer(answers, lambda: made.append(_make(**begin)))
    try:
        for line in requests:
            _answer(answers, functools.partial(_play, made[0], json.loads(line)))
    except BrokenPipeError:
        pass  # the trainer has ended
    finally:
        if made:
            made[0].close()


def _make(name: str, options: dict[str, Any], memory_mib: int | None) -> Environment:
    if memory_mib is not None:
        resource.setrlimit(resource.RLIMIT_AS, (memory_mib * _MIB, memory_mib * _MIB))
        try:
            mmap.mmap(-1, mmap.PAGESIZE).close()
        except OSError:  # without this, the process would run on what its heap happens to have free
            raise MemoryError(
                f"{memory_mib} MiB (config.env.memory_mib) is less than its process has before it"
            ) from None
    return envs.make(name, **options)


def _play(environment: Environment, request: dict[str, Any]) -> Any:
    return _OPERATIONS[request.pop("operation")](environment, **request)


def _answer(answers: BinaryIO, question: Callable[[], Any]) -> None:
    data, _ = remote_calls.answer(question)
    answers.write(data + b"\n")
    answers.flush()
