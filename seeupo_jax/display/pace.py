"""Estimates of the remaining time of a phase and of a run, and rates over a few seconds."""

from __future__ import annotations

import statistics
from collections import deque

_RECENT = 20  # durations that the time left is judged by
_WINDOW_S = 10.0  # window of a rate
_ENOUGH_S = 1.0  # of a phase, before its completed part gives an estimate


class PhaseDurations:
    """Durations of phases by name, and estimates for the current one."""

    def __init__(self) -> None:
        self._took: dict[str, deque[float]] = {}

    def record(self, phase: str, seconds: float) -> None:
        """Records how long a finished phase took."""
        self._took.setdefault(phase, deque(maxlen=_RECENT)).append(seconds)

    def left(self, phase: str, elapsed: float, part: float | None = None) -> float | None:
        """Remaining seconds of a phase, by the median of earlier ones; None: unknown.

        The first one compiles programs, and counts only until there is another. A phase without
        earlier ones, or one that takes longer than they did, is extrapolated from its completed
        part.

        Args:
          part: completed, from 0 to 1; None: unknown.
        """
        took = list(self._took.get(phase, ()))
        typical = statistics.median(took[1:] if len(took) > 1 else took) if took else 0.0
        if typical > elapsed:
            return typical - elapsed
        if part and elapsed >= _ENOUGH_S:
            return elapsed * (1 - part) / part
        return None


class Rate:
    """How fast a count grows, over the last few seconds that it was read in."""

    def __init__(self) -> None:
        self._read: deque[tuple[float, int]] = deque()

    def of(self, now: float, count: int) -> float:
        """Growth a second; 0 until it has been read twice. A smaller count begins anew."""
        if self._read and count < self._read[-1][1]:
            self._read.clear()
        self._read.append((now, count))
        while len(self._read) > 2 and self._read[1][0] <= now - _WINDOW_S:
            self._read.popleft()
        (began, first), (end, last) = self._read[0], self._read[-1]
        return (last - first) / (end - began) if end > began else 0.0
