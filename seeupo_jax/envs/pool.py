"""Environments stepped in parallel threads; a hang or failure ends only its episode."""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from seeupo_jax.configuration.user_code import origin
from seeupo_jax.envs.base import Environment, Killable, ServerAtCapacity, TransientError
from seeupo_jax.envs.validation import ProtocolError, describe

_log = logging.getLogger(__name__)
_ROOM_WAIT_S = 0.5  # before a full server is asked again


class ServerFull(ValueError):
    """A server has been full for too long; the text is a sentence."""


@dataclass(frozen=True)
class Failure:
    """The reason why a call has no result. stop: `env_error` or `timeout`."""

    stop: str
    reason: str


def _unchanged(environment: Environment, answer: Any) -> Any:
    return answer


@dataclass(frozen=True)
class EnvCall:
    """A call of a slot's environment.

    ask: the call itself. It is retried if that cannot change the episode: after a
      `TransientError`, and with `fresh` after any error.
    read: makes the result from the environment and its answer, in the same thread; never retried.
    fresh: the call starts an episode, so it may be retried on a new environment.
    make: makes a new environment for the call, which replaces the slot's; None: use the slot's.
    """

    slot: int
    ask: Callable[[Environment], Any]
    read: Callable[[Environment, Any], Any] = _unchanged
    fresh: bool = False
    make: Callable[[], Environment] | None = None


class CallOutcome(NamedTuple):
    """The outcome of a call. result: its value or a `Failure`. retries: further attempts."""

    result: Any
    retries: int


@dataclass(eq=False)
class _Attempt:
    """One attempt of a call. Times are from the monotonic clock.

    environment: None: the worker makes one.
    number: attempts before this one.
    due: the time at which it will be queued; None once it is queued.
    worker: the thread that executes it, from `started` on.
    answered: the call has had its effect, so no part of it may be repeated.
    waited_s: time that earlier attempts waited for room on a server.
    full: this attempt found the server full.
    """

    call: EnvCall
    environment: Environment | None
    number: int = 0
    due: float | None = None
    started: float | None = None
    worker: threading.Thread | None = None
    answered: bool = False
    transient: bool = False
    waited_s: float = 0.0
    full: bool = False

    @property
    def repeatable(self) -> bool:
        return not self.answered and (self.call.fresh or self.transient)


class EnvPool:
    """`size` environments and a few daemon threads that call them; one thread submits and polls.

    Args:
      make: makes an environment; called here for every slot, and later by the threads.
      workers: number of threads, at most one per slot.
      timeout_s: an attempt that takes longer is abandoned by the next poll: its slot gets a new
        environment, and its thread, which cannot be stopped, is replaced. A `Killable` environment
        (in a separate process, or on a server) is killed, which ends the thread.
      retries: attempts after the first, for a call that may be repeated.
      retry_wait_s: wait before the first retry, doubled for each further one. No thread is blocked.

    A call that raises `ServerAtCapacity` is repeated for up to `timeout_s` of polling and uses no
    retries.
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
        self._waiting: queue.SimpleQueue[_Attempt | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._trying: dict[int, _Attempt] = {}  # by slot, the latest attempt of each call
        self._finished: dict[
            int, tuple[EnvCall, CallOutcome]
        ] = {}  # by slot, the first to finish first
        self.abandoned = 0  # attempts abandoned so far
        self._waits = True  # whether calls wait for room on a full server
        self._warned = False
        self._full: ServerFull | None = None
        self._threads: set[threading.Thread] = set()  # those that are not abandoned
        for _ in range(min(workers, size)):
            self._add_worker()

    @property
    def open(self) -> int:
        """The number of calls that have been submitted and not yet returned by a poll."""
        with self._changed:
            return len(self._trying) + len(self._finished)

    @property
    def oldest(self) -> tuple[int, float] | None:
        """The slot of the longest-running call, and its duration in seconds; None: none runs."""
        with self._changed:
            running = [(one.started, slot) for slot, one in self._trying.items() if one.started]
        started, slot = min(running, default=(0.0, -1))
        return (slot, time.monotonic() - started) if running else None

    def submit(self, call: EnvCall) -> None:
        """Queues a call on its slot and returns at once.

        Raises:
          ValueError: the pool is closed, it has no such slot, or the slot's last call is open.
        """
        slot, size = call.slot, len(self._envs)
        with self._changed:
            if not size:
                raise ValueError(f"slot {slot} was called in a closed pool, which takes no call")
            if not 0 <= slot < size:
                raise ValueError(f"slot {slot} was called in a pool with slots 0 to {size - 1}")
            if slot in self._trying or slot in self._finished:
                raise ValueError(f"slot {slot} was called before a poll returned its last call")
            self._trying[slot] = _Attempt(call, self._envs[slot])
            self._waiting.put(self._trying[slot])

    def poll(self, timeout_s: float | None = 0.0) -> list[tuple[EnvCall, CallOutcome]]:
        """Abandons late calls, queues retries that are due, and returns the finished calls.

        Args:
          timeout_s: how long to wait for a first call to finish; None: without a limit.

        Returns:
          The calls finished since the last poll, in order (abandoned ones: by slot); none after
          `timeout_s`, or immediately if no call is open.

        Raises:
          ServerFull: a call has waited too long for room on a full server; it stays open.
        """
        until = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            while True:
                now = time.monotonic()
                self._meet_deadlines(now)
                if self._full is not None and self._waits:
                    raise self._full
                if self._finished or not self._trying or now >= until:
                    finished, self._finished = list(self._finished.values()), {}
                    return finished
                deadlines = [self._deadline(one, now) for one in self._trying.values()]
                self._changed.wait(max(0.0, min(until, *deadlines) - now))

    def drain(self) -> None:
        """Waits until no call is open and drops the results; no call waits for a full server."""
        self._waits = False
        while self.open:
            self.poll(None)
        self._waits, self._full = True, None

    def close(self, most_s: float = math.inf) -> None:
        """Closes the environments and ends the threads; calls that have not started are dropped.

        A running call first ends, or is abandoned once it is late; then its environment is closed.

        Args:
          most_s: calls that run longer are late, even if `timeout_s` is larger.
        """
        with self._changed:
            self._waits, self._retries = False, 0
            self._timeout_s = min(self._timeout_s, most_s)
            self._trying = {s: one for s, one in self._trying.items() if one.started is not None}
            idle = [slot for slot in range(len(self._envs)) if slot not in self._trying]
            self._finished = {}
        self._close_environments(idle)
        while self.open:
            ended = [call.slot for call, _ in self.poll(None) if call.ask is not _close]
            self._close_environments(ended)
        self._envs = []
        for _ in self._threads:
            self._waiting.put(None)
        for thread in self._threads:  # none may run when the interpreter shuts down
            thread.join(self._timeout_s)

    def _close_environments(self, slots: Iterable[int]) -> None:
        for slot in slots:
            if self._envs[slot] is not None:
                self.submit(EnvCall(slot, _close))

    def _deadline(self, one: _Attempt, now: float) -> float:
        """When to queue or abandon an attempt; one that has not started counts as starting now."""
        if one.due is not None:
            return one.due
        return (now if one.started is None else one.started) + self._timeout_s

    def _meet_deadlines(self, now: float) -> None:
        missed = [one for one in self._trying.values() if self._deadline(one, now) <= now]
        for one in sorted(missed, key=lambda one: one.call.slot):
            if one.due is not None:
                one.due = None
                self._waiting.put(one)
                continue
            self.abandoned += 1
            one.answered |= not one.call.fresh  # no retry: its environment is lost
            if isinstance(one.environment, Killable):
                one.environment.kill()  # also ends its thread's wait
            self._threads.discard(one.worker)
            self._add_worker()
            self._end(one, None, Failure("timeout", f"no answer in {self._timeout_s:g} s"))

    def _end(self, one: _Attempt, environment: Environment | None, result: Any) -> None:
        """Sets the slot's environment; finishes the call or schedules its retry."""
        slot, number = one.call.slot, one.number
        self._envs[slot] = environment
        if isinstance(result, Failure) and one.full and one.repeatable and self._waits:
            due, waited_s = time.monotonic() + _ROOM_WAIT_S, one.waited_s + _ROOM_WAIT_S
            self._trying[slot] = _Attempt(one.call, environment, number, due, waited_s=waited_s)
            self._judge_wait(waited_s, result.reason.removeprefix("ServerAtCapacity: "))
        elif isinstance(result, Failure) and one.repeatable and number < self._retries:
            due = time.monotonic() + self._retry_wait_s * 2**number
            self._trying[slot] = _Attempt(one.call, environment, number + 1, due)
        else:
            del self._trying[slot]
            self._finished[slot] = one.call, CallOutcome(result, number)
        self._changed.notify()

    def _judge_wait(self, waited_s: float, reason: str) -> None:
        """Warns once about a long wait for a full server, and ends a wait that is too long."""
        text = f"{reason}, and this process has up to {len(self._envs)} environments (those of"
        text += " config.rollout.concurrency)"
        allowed = "a server whose --max-sessions suffices for all trainers"
        if waited_s > self._timeout_s:
            waited = f"waited for {self._timeout_s:g} s (config.env.timeout_s)"
            self._full = ServerFull(f"{text}; {waited}; allowed: {allowed}.")
        elif waited_s > self._timeout_s / 4 and not self._warned:
            self._warned = True
            _log.warning("%s; waiting. Needed: %s.", text, allowed)

    def _add_worker(self) -> None:
        # Daemon: a hanging thread must not keep the process alive. If it resumes while the
        # interpreter shuts down, Python before 3.14 ends it by unwinding its stack, and C++ code
        # on it (such as the destructor of a collected jax array) aborts the process.
        thread = threading.Thread(target=self._work, daemon=True)
        self._threads.add(thread)
        thread.start()

    def _work(self) -> None:
        while (one := self._waiting.get()) is not None:
            with self._changed:
                if self._trying.get(one.call.slot) is not one:
                    continue  # the pool was closed before its turn
                one.worker, one.started = threading.current_thread(), time.monotonic()
            result = self._attempt(one)
            with self._changed:
                if self._trying.get(one.call.slot) is one:
                    self._end(one, one.environment, result)
                    continue
            _discard(one.environment)  # abandoned: slot and thread have been replaced
            return

    def _attempt(self, one: _Attempt) -> Any:
        """The call's result or a Failure; an environment that fails in a fresh call is dropped."""
        call = one.call
        try:
            if call.make is not None:
                _discard(one.environment)
                one.environment = None
                one.environment = call.make()
            if one.environment is None:
                one.environment = self._make()
            answer = call.ask(one.environment)
            one.answered = True
            return call.read(one.environment, answer)
        except BaseException as error:  # even SystemExit ends this episode and no other
            one.transient = issubclass(type(error), TransientError)
            one.full = issubclass(type(error), ServerAtCapacity)
            one.answered |= issubclass(type(error), ProtocolError)  # raised by checks of the answer
            where = "" if one.transient else origin(error)
            failure = Failure("env_error", f"{describe(error)} {where}".rstrip())
        if call.fresh and not (one.answered or one.full):
            _discard(one.environment)
            one.environment = None
        return failure


def _close(environment: Environment) -> None:
    environment.close()


def _discard(environment: Environment | None) -> None:
    """Closes an environment that will not be used again; errors are ignored."""
    if environment is not None:
        with contextlib.suppress(BaseException):
            environment.close()
