"""How many programs XLA compiled, how long it took, and whether it is compiling one now."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax

_COMPILED = "/jax/core/compile/backend_compile_duration"
_TRACED = (
    "/jax/core/compile/jaxpr_trace_duration",
    "/jax/core/compile/jaxpr_to_mlir_module_duration",
)
_EVENTS = (_COMPILED, *_TRACED)


@dataclass
class Compilations:
    """Counts since it was made.

    programs: compiled, or found in the cache on disk. seconds: in which any was traced, lowered or
    compiled: those of programs that are compiled side by side count once.
    """

    programs: int = 0
    seconds: float = 0.0
    clock: Callable[[], float] = time.monotonic
    _spans: list[tuple[float, float]] = field(default_factory=list, repr=False)  # disjoint, rising
    _under_way: int = 0  # tracings and compilations, which may be nested
    _since: float = 0.0  # when the first of those under way began
    _lock: Any = field(default_factory=threading.Lock, repr=False)

    def __post_init__(self) -> None:
        jax.monitoring.register_scalar_listener(self._begin)
        jax.monitoring.register_event_duration_secs_listener(self._end)

    def close(self) -> None:
        """Stops counting."""
        jax.monitoring.unregister_scalar_listener(self._begin)
        jax.monitoring.unregister_event_duration_listener(self._end)

    def under_way_s(self, now: float) -> float:
        """Seconds for which something has been compiling without a pause; 0: nothing is."""
        with self._lock:
            return max(now - self._since, 0.0) if self._under_way else 0.0

    def seconds_at(self, now: float) -> float:
        """As `seconds`, including the running compilation."""
        with self._lock:
            if not self._under_way:
                return self.seconds
            earlier = (min(end, self._since) - start for start, end in self._spans)
            return sum(each for each in earlier if each > 0) + max(now - self._since, 0.0)

    def _begin(self, event: str, _: float, **__: object) -> None:
        """Called by the thread that compiles, as it begins."""
        if event not in _EVENTS:
            return
        with self._lock:
            if not self._under_way:
                self._since = self.clock()
            self._under_way += 1

    def _end(self, event: str, duration_s: float, **_: object) -> None:
        """Called by the thread that compiles, as it ends."""
        if event not in _EVENTS:
            return
        with self._lock:
            self.programs += event == _COMPILED
            self._under_way = max(self._under_way - 1, 0)  # one may have begun before this was made
            end = self.clock()
            start = end - duration_s
            while self._spans and self._spans[-1][1] > start:
                earlier = self._spans.pop()
                self.seconds -= earlier[1] - earlier[0]
                start = min(start, earlier[0])
            self._spans.append((start, end))
            self.seconds += end - start
