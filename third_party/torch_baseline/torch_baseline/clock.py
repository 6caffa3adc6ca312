"""Time and tokens by phase."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch

PHASES = ("old", "reference", "train", "refresh")


class Clock:
    """Measures phases; on a GPU by events, so that the host need not wait for the device."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._spans: dict[str, list[tuple[Any, Any]]] = defaultdict(list)
        self.tokens = dict.fromkeys(PHASES, 0)
        self.positions = dict.fromkeys(PHASES, 0)

    def count(self, phase: str, tokens: int, positions: int) -> None:
        """Adds what one forward pass computed, without and with padding."""
        self.tokens[phase] += tokens
        self.positions[phase] += positions

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        began = self._now()
        yield
        self._spans[name].append((began, self._now()))

    def seconds(self) -> dict[str, float]:
        """Of each phase; waits for the device."""
        if self._on_gpu:
            torch.cuda.synchronize()
        return {name: sum(self._between(*span) for span in self._spans[name]) for name in PHASES}

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, began: Any, ended: Any) -> float:
        return began.elapsed_time(ended) / 1e3 if self._on_gpu else ended - began
