"""The progress of a collection, for other threads to read."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Activity:
    """A collection of this process under way; its numbers may be read a moment apart.

    total: requested trajectories. active: begun and not finished; stepping: of these, those that
      wait for their environment. finished: including failed ones.
    tokens: sampled so far.
    slowest: the task whose environment has been at work on one call for longest, and for how many
      seconds; None: none is at work.
    """

    total: int
    active: int
    stepping: int
    finished: int
    failed: int
    tokens: int
    slowest: tuple[str, float] | None = None


class Watch:
    """Where other threads read how far a collection is; neither side waits."""

    def __init__(self) -> None:
        self._look: Callable[[], Activity] | None = None

    @contextlib.contextmanager
    def on(self, look: Callable[[], Activity]) -> Iterator[None]:
        """Lets others see a collection for as long as this context is open."""
        self._look = look
        try:
            yield
        finally:
            self._look = None

    def look(self) -> Activity | None:
        """The current activity; None: none."""
        look = self._look
        return None if look is None else look()
