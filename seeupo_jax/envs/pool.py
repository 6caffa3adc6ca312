"""Environments stepped side by side in threads; one that hangs or fails costs its own episode."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from seeupo_jax.envs.base import Environment


@dataclass(frozen=True)
class Failure:
    """Why an environment's call gave no result. stop: `env_error` or `timeout`."""

    stop: str
    reason: str


@dataclass
class _Call:
    """One call waiting for a worker; `result` is filled in by it."""

    slot: int
    function: Callable[[], Any]
    result: Any = None
    started: float | None = None
    finished: bool = False


class EnvPool:
    """`size` environments and a few daemon threads that call them.

    A call that takes longer than `timeout_s` is given up: its environment is replaced by a new one,
    and its thread, which cannot be stopped, by another.
    """

    def __init__(
        self, make: Callable[[], Environment], size: int, *, workers: int, timeout_s: float
    ):
        self._make, self._timeout_s = make, timeout_s
        self._envs = [make() for _ in range(size)]
        self._waiting: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self.abandoned = 0  # calls given up so far
        self._workers = min(workers, size)
        for _ in range(self._workers):
            self._add_worker()

    def call(self, calls: Sequence[tuple[int, Callable[[Environment], Any]]]) -> list[Any]:
        """Runs `function(environment)` for (slot, function) pairs; results or Failures in order."""
        pending = [
            _Call(slot, lambda env=self._envs[slot], function=function: function(env))
            for slot, function in calls
        ]
        for call in pending:
            self._waiting.put(call)
        with self._changed:
            while unfinished := [call for call in pending if not call.finished]:
                running = [call.started for call in unfinished if call.started is not None]
                deadline = min(running, default=time.monotonic()) + self._timeout_s
                self._changed.wait(max(0.0, deadline - time.monotonic()))
                self._give_up_late(unfinished)
        return [call.result for call in pending]

    def close(self) -> None:
        """Closes the environments and ends the threads."""
        self.call([(slot, lambda env: env.close()) for slot in range(len(self._envs))])
        self._envs = []  # a later call fails at once: no thread is left to wait for
        for _ in range(self._workers):
            self._waiting.put(None)

    def _give_up_late(self, calls: Sequence[_Call]) -> None:
        now = time.monotonic()
        for call in calls:
            late = call.started is not None and now - call.started >= self._timeout_s
            if late and not call.finished:
                reason = f"no answer in {self._timeout_s:g} s"
                call.result, call.finished = Failure("timeout", reason), True
                self._envs[call.slot] = self._make()
                self.abandoned += 1
                self._add_worker()

    def _add_worker(self) -> None:
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        while (call := self._waiting.get()) is not None:
            with self._changed:
                call.started = time.monotonic()
                self._changed.notify()
            try:
                result = call.function()
            except BaseException as error:  # even SystemExit ends this episode and no other
                result = Failure("env_error", f"{type(error).__name__}: {error}")
            with self._changed:
                if call.finished:
                    return  # given up: another thread has taken this one's place
                call.result, call.finished = result, True
                self._changed.notify()
