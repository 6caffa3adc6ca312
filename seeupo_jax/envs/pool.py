"""Environments stepped side by side in threads; one that hangs or fails costs its own episode."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from seeupo_jax.envs.base import Environment, TransientError


@dataclass(frozen=True)
class Failure:
    """Why a call gave no result. stop: `env_error` or `timeout`."""

    stop: str
    reason: str


def _as_it_is(environment: Environment, answer: Any) -> Any:
    return answer


@dataclass(frozen=True)
class Call:
    """What the environment of a slot is asked.

    ask: puts the question. It is tried again where that cannot change what the episode becomes:
      if it raises `TransientError`, and with `fresh` whatever goes wrong.
    read: makes the result of the environment and its answer, in the same thread; never tried again.
    fresh: the call starts anew, so another try may be made on a newly made environment.
    """

    slot: int
    ask: Callable[[Environment], Any]
    read: Callable[[Environment, Any], Any] = _as_it_is
    fresh: bool = False


class Outcome(NamedTuple):
    """What came of a call. result: a `Failure` if there is none. retries: tries after the first."""

    result: Any
    retries: int


@dataclass(eq=False)
class _Try:
    """One try of a call; its worker fills in what comes of it. Times by the monotonic clock.

    environment: None is one that the worker makes.
    answered: what was asked has happened, so nothing of it may be repeated.
    """

    call: Call
    environment: Environment | None
    number: int = 0  # tries before this one
    due: float = 0.0  # not to begin earlier
    queued: bool = False
    started: float | None = None
    answered: bool = False
    transient: bool = False
    result: Any = None
    finished: bool = False

    @property
    def repeatable(self) -> bool:
        failed = self.finished and isinstance(self.result, Failure)
        return failed and not self.answered and (self.call.fresh or self.transient)


class EnvPool:
    """`size` environments and a few daemon threads that call them.

    Args:
      make: makes an environment; called for every slot at once, and later by the threads.
      workers: threads, at most one a slot.
      timeout_s: a try that takes longer is given up: the slot gets a new environment, and its
        thread, which cannot be stopped, a substitute.
      retries: tries after the first of a call that may be repeated.
      retry_wait_s: before the first of them, twice as long before each further one; no thread is
        held meanwhile.
    """

    def __init__(
        self,
        make: Callable[[], Environment],
        size: int,
        *,
        workers: int,
        timeout_s: float,
        retries: int = 0,
        retry_wait_s: float = 0.0,
    ):
        self._make, self._timeout_s = make, timeout_s
        self._retries, self._retry_wait_s = retries, retry_wait_s
        self._envs: list[Environment | None] = [make() for _ in range(size)]
        self._waiting: queue.SimpleQueue[_Try | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self.abandoned = 0  # tries given up so far
        self._workers = min(workers, size)
        for _ in range(self._workers):
            self._add_worker()

    def call(self, calls: Sequence[Call]) -> list[Outcome]:
        """Makes calls, one a slot, side by side; what came of them, in their order."""
        tries = [_Try(call, self._envs[call.slot]) for call in calls]
        with self._changed:
            while True:
                self._queue_due(tries)
                if all(one.finished for one in tries):
                    return [Outcome(one.result, one.number) for one in tries]
                self._changed.wait(self._until_next(tries))
                self._give_up_late(tries)
                tries = [self._again(one) if one.repeatable else one for one in tries]

    def close(self) -> None:
        """Closes the environments and ends the threads."""
        slots = [slot for slot, environment in enumerate(self._envs) if environment is not None]
        self.call([Call(slot, lambda env: env.close()) for slot in slots])
        self._envs = []  # a later call fails at once: no thread is left to wait for
        for _ in range(self._workers):
            self._waiting.put(None)

    def _queue_due(self, tries: Sequence[_Try]) -> None:
        now = time.monotonic()
        for one in tries:
            if not one.queued and one.due <= now:
                one.queued = True
                self._waiting.put(one)

    def _until_next(self, tries: Sequence[_Try]) -> float | None:
        """Seconds until a try is late or due; None: a worker has to begin or end one first."""
        running = [one.started for one in tries if one.started is not None and not one.finished]
        moments = [started + self._timeout_s for started in running]
        moments += [one.due for one in tries if not one.queued]
        return max(0.0, min(moments) - time.monotonic()) if moments else None

    def _give_up_late(self, tries: Sequence[_Try]) -> None:
        now = time.monotonic()
        for one in tries:
            late = one.started is not None and now - one.started >= self._timeout_s
            if late and not one.finished:
                reason = f"no answer in {self._timeout_s:g} s"
                one.result, one.finished = Failure("timeout", reason), True
                self._envs[one.call.slot] = None
                self.abandoned += 1
                self._add_worker()

    def _again(self, one: _Try) -> _Try:
        """The next try of a call; the same one where there have been enough."""
        if one.number == self._retries:
            return one
        due = time.monotonic() + self._retry_wait_s * 2**one.number
        return _Try(one.call, self._envs[one.call.slot], one.number + 1, due)

    def _add_worker(self) -> None:
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        while (one := self._waiting.get()) is not None:
            with self._changed:
                one.started = time.monotonic()
                self._changed.notify()
            result = self._attempt(one)
            with self._changed:
                if not one.finished:
                    one.result, one.finished = result, True
                    self._envs[one.call.slot] = one.environment
                    self._changed.notify()
                    continue
            _discard(one.environment)  # given up: this slot and this thread have been replaced
            return

    def _attempt(self, one: _Try) -> Any:
        """The call's result or a Failure; an environment that failed to start anew is dropped."""
        call = one.call
        try:
            if one.environment is None:
                one.environment = self._make()
            answer = call.ask(one.environment)
            one.answered = True
            return call.read(one.environment, answer)
        except BaseException as error:  # even SystemExit ends this episode and no other
            one.transient = isinstance(error, TransientError)
            failure = Failure("env_error", f"{type(error).__name__}: {error}")
        if call.fresh and not one.answered:
            _discard(one.environment)
            one.environment = None
        return failure


def _discard(environment: Environment | None) -> None:
    """Closes an environment that is not used again, whatever comes of that."""
    if environment is not None:
        with contextlib.suppress(BaseException):
            environment.close()
