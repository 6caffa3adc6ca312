"""How many programs XLA compiled, and how long it took."""

from __future__ import annotations

from dataclasses import dataclass

import jax

_COMPILED = "/jax/core/compile/backend_compile_duration"
_TRACED = (
    "/jax/core/compile/jaxpr_trace_duration",
    "/jax/core/compile/jaxpr_to_mlir_module_duration",
)


@dataclass
class Compilations:
    """Counts since it was made: programs, and seconds of tracing, lowering and compiling."""

    programs: int = 0
    seconds: float = 0.0

    def __post_init__(self) -> None:
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def close(self) -> None:
        """Stops counting."""
        jax.monitoring.unregister_event_duration_listener(self._listen)

    def _listen(self, event: str, duration_s: float, **_: object) -> None:
        if event == _COMPILED:
            self.programs += 1
        if event == _COMPILED or event in _TRACED:
            self.seconds += duration_s
