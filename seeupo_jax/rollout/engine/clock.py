"""Where the devices' time goes in a collection."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax


class Dispatch(NamedTuple):
    """When work was given to the devices, and when it will have been done."""

    began: float
    ended: Future[float]


class Ticket(NamedTuple):
    """A decode dispatch, and the prefills that the devices do before it."""

    prefills: Sequence[Dispatch]
    decode: Dispatch


class Clock:
    """Seconds of prefilling and of decoding since `begin`.

    The devices do one dispatch after the other, so the time from the end of one, or from when it
    was given to them if that was later, to the end of the next is the next one's. A thread waits
    for the ends: nothing is held up, and a dispatch that holds the host up, as a loop on a GPU
    does, hides none.
    """

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self.begin()

    def begin(self) -> None:
        """Starts from zero."""
        self._seconds = {"prefill_s": 0.0, "decode_s": 0.0}
        self._ended = 0.0  # the last dispatch that is known to be over
        self._prefills: list[Dispatch] = []

    def end(self) -> None:
        """Ends the thread once all dispatched work is finished; the seconds stay readable."""
        if self._thread is not None:
            self._thread.shutdown(wait=False)
            self._thread = None

    @property
    def seconds(self) -> Mapping[str, float]:
        """Seconds by kind of dispatch."""
        return dict(self._seconds)

    @staticmethod
    def now() -> float:
        """The current time by the clock that measures the seconds."""
        return time.monotonic()

    def prefill(self, began: float, mark: Any) -> None:
        """Notes a prefill that was dispatched at `began`; `mark` is an array of its results."""
        self._prefills.append(self._dispatch(began, mark))

    def decode(self, began: float, results: Any) -> Ticket:
        """Notes a decode dispatch, as `prefill`."""
        prefills, self._prefills = self._prefills, []
        return Ticket(prefills, self._dispatch(began, results))

    def land(self, ticket: Ticket) -> None:
        """Waits for the results of a decode dispatch."""
        for prefill in ticket.prefills:
            self._add("prefill_s", prefill)
        self._add("decode_s", ticket.decode)

    def _dispatch(self, began: float, results: Any) -> Dispatch:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="clock")
        return Dispatch(began, self._thread.submit(_end, results))

    def _add(self, kind: str, dispatch: Dispatch) -> None:
        ended = dispatch.ended.result()
        self._seconds[kind] += ended - max(self._ended, dispatch.began)
        self._ended = ended


def _end(results: Any) -> float:
    jax.block_until_ready(results)
    return Clock.now()
