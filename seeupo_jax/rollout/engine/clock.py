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


class TimedDispatch(NamedTuple):
    """A decode dispatch, and the prefills that the devices do before it."""

    prefills: Sequence[Dispatch]
    decode: Dispatch


class DispatchTimes:
    """When the devices were busy, of dispatches that they do one after the other.

    The time from the end of one, or from when it was given to them if that was later, to the end of
    the next is the next one's. A thread waits for the ends: nothing is held up, and a dispatch that
    holds the host up, as a loop on a GPU does, hides none.

    Attributes:
      idle_s: seconds in which the devices had nothing to do, since the end of the first dispatch.
    """

    def __init__(self) -> None:
        self.idle_s = 0.0
        self._thread: ThreadPoolExecutor | None = None
        self._ended: float | None = None  # the last dispatch that is known to be over

    def note(self, began: float, results: Any) -> Dispatch:
        """A dispatch that was given to the devices at `began`; `results` are arrays of its own."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="clock")
        return Dispatch(began, self._thread.submit(_end, results))

    def wait(self, dispatch: Dispatch) -> float:
        """Waits until a dispatch is over, the oldest first; the seconds that it took."""
        ended, before = dispatch.ended.result(), self._ended
        self._ended = ended
        if before is None:
            return ended - dispatch.began
        self.idle_s += max(0.0, dispatch.began - before)
        return ended - max(before, dispatch.began)

    def close(self) -> None:
        """Ends the thread once all dispatched work is finished."""
        if self._thread is not None:
            self._thread.shutdown(wait=False)
            self._thread = None


class Clock:
    """Seconds of prefilling and of decoding since `begin`, and of swaps, if there were any."""

    def __init__(self) -> None:
        self._times = DispatchTimes()
        self.begin()

    def begin(self) -> None:
        """Starts from zero."""
        self._times.close()
        self._times = DispatchTimes()
        self._seconds = {"prefill_s": 0.0, "decode_s": 0.0}
        self._prefills: list[Dispatch] = []

    def end(self) -> None:
        """Ends the thread once all dispatched work is finished; the seconds stay readable."""
        self._times.close()

    @property
    def seconds(self) -> Mapping[str, float]:
        """Seconds by kind of dispatch."""
        return dict(self._seconds)

    @property
    def idle_s(self) -> float:
        """Seconds without a dispatch, since the end of the first; see `DispatchTimes`."""
        return self._times.idle_s

    @staticmethod
    def now() -> float:
        """The current time by the clock that measures the seconds."""
        return time.monotonic()

    def prefill(self, began: float, mark: Any) -> None:
        """Notes a prefill that was dispatched at `began`; `mark` is an array of its results."""
        self._prefills.append(self._times.note(began, mark))

    def decode(self, began: float, results: Any) -> TimedDispatch:
        """Notes a decode dispatch, as `prefill`."""
        prefills, self._prefills = self._prefills, []
        return TimedDispatch(prefills, self._times.note(began, results))

    def land(self, timed: TimedDispatch) -> None:
        """Waits for the results of a decode dispatch."""
        for prefill in timed.prefills:
            self._seconds["prefill_s"] += self._times.wait(prefill)
        self._seconds["decode_s"] += self._times.wait(timed.decode)

    def swap(self, began: float) -> None:
        """Notes a swap of the policy that began at `began` and is over."""
        self._seconds["swap_s"] = self._seconds.get("swap_s", 0.0) + self.now() - began


def _end(results: Any) -> float:
    jax.block_until_ready(results)
    return Clock.now()
