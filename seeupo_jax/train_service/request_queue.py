"""Requests that wait, and the thread that does them one after the other."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from seeupo_jax.train_service.adapter_sampler import SampledWeights, SampleJob, SamplingSession
from seeupo_jax.train_service.futures import Failed, Futures, Result
from seeupo_jax.train_service.refusals import RequestRefused

_LOGGER = logging.getLogger(__name__)
_SHUTTING_DOWN = "the server is shutting down; ask again later."


class _Work(NamedTuple):
    """A request that waits, and who asks for its result."""

    work: Callable[[], Result]
    future: Future[Result]

    def do(self) -> None:
        try:
            self.end(self.work())
        except Exception as error:
            self.end(error)

    def end(self, result: Result | Exception) -> None:
        if isinstance(result, Exception):
            result = describe_failure(result)
        self.future.set_result(result)


class WaitingSample(NamedTuple):
    """A request to sample that waits."""

    target: SamplingSession
    job: SampleJob


@dataclass(eq=False)
class RequestLine:
    """Requests that are done in the order of their numbers, which begin with 1.

    expected: the number of the next one. early: those with later numbers, which wait for it.
    """

    expected: int = 1
    early: dict[int, _Work] = field(default_factory=dict)


class RequestQueue:
    """Requests that wait, with their results; any thread may add some or `stop`, one may `run`."""

    def __init__(self) -> None:
        self.futures = Futures()
        self._lock = threading.Condition()
        self._jobs: deque[_Work | WaitingSample] = deque()
        self._over = False

    def add(self, key: Any, work: Callable[[], Result]) -> str:
        """The id of a request. key: as of `Futures.add`."""
        request_id, future = self.futures.add(key)
        if future is not None:
            self._put(_Work(work, future))
        return request_id

    def add_in_order(
        self, line: RequestLine, name: str, number: Any, work: Callable[[], Result]
    ) -> str:
        """As `add`, once the line's requests with lower numbers are there.

        Args:
          name: of the line. number: None: the request waits for no other one.

        Raises:
          RequestRefused: no whole number. One whose turn has been ends the request so.
        """
        if number is None:
            return self.add(None, work)
        if type(number) is not int:
            raise RequestRefused(f"seq_id: got {number!r:.40}; allowed: a whole number.")
        with self._lock:
            request_id, future = self.futures.add((name, number))
            if future is None:
                return request_id
            if number < line.expected:
                sentence = f"seq_id: got {number}; allowed: {line.expected} or later."
                _Work(work, future).end(RequestRefused(sentence))
                return request_id
            line.early[number] = _Work(work, future)
            while line.expected in line.early:
                self._put(line.early.pop(line.expected))
                line.expected += 1
        return request_id

    def end_line(self, line: RequestLine, error: Exception) -> None:
        """Ends the requests that wait for an earlier one."""
        with self._lock:
            waiting = [*line.early.values()]
            line.early.clear()
        for each in waiting:
            each.end(error)

    def add_sample(self, target: SamplingSession, job: SampleJob) -> None:
        """Adds a request to sample."""
        self._put(WaitingSample(target, job))

    def _put(self, job: _Work | WaitingSample) -> None:
        with self._lock:
            if not self._over:
                self._jobs.append(job)
                self._lock.notify()
                return
        _end(job, RuntimeError(_SHUTTING_DOWN))

    def take_same(self, weights: SampledWeights, *, alone: bool) -> list[SampleJob]:
        """Waiting requests to the same weights; with `alone` only where no other work waits."""
        with self._lock:
            same = [
                job
                for job in self._jobs
                if isinstance(job, WaitingSample) and job.target.weights is weights
            ]
            if self._over or (alone and len(same) < len(self._jobs)):
                return []
            for job in same:
                self._jobs.remove(job)
        return [sample.job for sample in same]

    def stop(self) -> None:
        """Makes `run` return."""
        with self._lock:
            self._over = True
            self._lock.notify()

    def run(self, sample: Callable[[WaitingSample], None]) -> None:
        """Does requests until `stop`.

        Args:
          sample: answers a request to sample.
        """
        while (job := self._next()) is not None:
            if isinstance(job, WaitingSample):
                sample(job)
            else:
                job.do()

    def end(self, lines: Iterable[RequestLine]) -> None:
        """Tells requests that wait that they are not done any more.

        Args:
          lines: all that there are.
        """
        while self._jobs:
            _end(self._jobs.popleft(), RuntimeError(_SHUTTING_DOWN))
        for line in lines:
            self.end_line(line, RuntimeError(_SHUTTING_DOWN))

    def _next(self) -> _Work | WaitingSample | None:
        """The first request that waits, once there is one; None: it is to stop."""
        with self._lock:
            while not self._jobs and not self._over:
                self._lock.wait(1.0)  # within which a signal is seen
            return None if self._over else self._jobs.popleft()


def _end(job: _Work | WaitingSample, error: Exception) -> None:
    (job.job if isinstance(job, WaitingSample) else job).end(error)


def describe_failure(error: Exception) -> Failed:
    """What a client is told; the log has mistakes of the server."""
    failed = Failed(error)
    if failed.category == "server" and str(error) != _SHUTTING_DOWN:
        _LOGGER.error("a request failed", exc_info=error)
    return failed
