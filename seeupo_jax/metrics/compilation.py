"""How many programs XLA compiled, and how long it took."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Any

import jax

_COMPILED = "/jax/core/compile/backend_compile_duration"
_TRACED = (
    "/jax/core/compile/jaxpr_trace_duration",
    "/jax/core/compile/jaxpr_to_mlir_module_duration",
)


@dataclass
class Compilations:
    """Counts since it was made.

    programs: compiled, or found in the cache on disk. seconds: in which any was traced, lowered or
    compiled: those of programs that are compiled side by side count once.
    """

    programs: int = 0
    seconds: float = 0.0
    _spans: list[tuple[float, float]] = field(default_factory=list, repr=False)  # disjoint, rising
    _lock: Any = field(default_factory=threading.Lock, repr=False)

    def __post_init__(self) -> None:
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def close(self) -> None:
        """Stops counting."""
        jax.monitoring.unregister_event_duration_listener(self._listen)

    def _listen(self, event: str, duration_s: float, **_: object) -> None:
        """Called by the thread that compiles, as it ends."""
        if event != _COMPILED and event not in _TRACED:
            return
        with self._lock:
            self.programs += event == _COMPILED
            end = time.monotonic()
            start = end - duration_s
            while self._spans and self._spans[-1][1] > start:
                earlier = self._spans.pop()
                self.seconds -= earlier[1] - earlier[0]
                start = min(start, earlier[0])
            self._spans.append((start, end))
            self.seconds += end - start
