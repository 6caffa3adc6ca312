"""Where the devices' time goes in a collection, as the host sees it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax


class Ticket(NamedTuple):
    """A decode dispatch: when, and the prefills that the devices do before it."""

    began: float
    prefills: tuple[tuple[float, Any], ...]


class Clock:
    """Seconds of prefilling and of decoding since `begin`.

    The devices do one dispatch after the other, so the time from the end of one, or from when it
    was given to them if that was later, to the end of the next is the next one's. Ends are seen
    only where the host waits for results anyway: nothing is held up.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Starts from zero."""
        self._seconds = {"prefill_s": 0.0, "decode_s": 0.0}
        self._ended = 0.0  # the last dispatch that is known to be over
        self._prefills: list[tuple[float, Any]] = []

    @property
    def seconds(self) -> Mapping[str, float]:
        """Seconds by kind of dispatch."""
        return dict(self._seconds)

    def prefill(self, mark: Any) -> None:
        """Notes a prefill; `mark` is an array of its results."""
        self._prefills.append((time.monotonic(), mark))

    def decode(self) -> Ticket:
        """Notes a decode dispatch."""
        prefills, self._prefills = tuple(self._prefills), []
        return Ticket(time.monotonic(), prefills)

    def land(self, ticket: Ticket, results: Any) -> None:
        """Waits for the results of a decode dispatch."""
        for began, mark in ticket.prefills:
            self._end("prefill_s", began, mark)
        self._end("decode_s", ticket.began, results)

    def _end(self, kind: str, began: float, results: Any) -> None:
        jax.block_until_ready(results)
        now = time.monotonic()
        self._seconds[kind] += now - max(self._ended, began)
        self._ended = now
