"""Changes of what a server serves, in the order in which they are asked for, between its calls."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from seeupo_jax.agents.calls import CallRefused


class Change(NamedTuple):
    """A change, which waits until no call is open where it `drains`, and ends them if it `aborts`.

    make: makes it; raises ValueError. done: receives None, or why it was not made.
    """

    make: Callable[[], None]
    done: Callable[[CallRefused | None], None]
    drains: bool = False
    aborts: bool = False


class ServingChanges:
    """The changes that wait, and whether sampling is paused; used by the thread of `run`.

    Attributes:
      paused: open calls stand still, and others do not begin.
    """

    def __init__(self) -> None:
        self._changes: deque[Change] = deque()
        self.paused = False

    def add(self, change: Change) -> None:
        """Puts a change behind the others."""
        self._changes.append(change)

    @property
    def waiting(self) -> bool:
        """Whether a change is still to be made."""
        return bool(self._changes)

    @property
    def drains(self) -> bool:
        """Whether a change waits for the open calls, which go on even if sampling is paused."""
        return bool(self._changes) and self._changes[0].drains

    @property
    def holds(self) -> bool:
        """Whether calls have to wait before they begin."""
        return self.paused or self.drains

    @property
    def freezes(self) -> bool:
        """Whether open calls stand still."""
        return self.paused and not self.drains

    def make(self, is_open: Callable[[], bool], abort: Callable[[], None]) -> None:
        """Makes the changes whose time has come.

        Args:
          is_open: whether calls are open. abort: ends those, now or at their next tokens.
        """
        while self._changes:
            change = self._changes[0]
            if change.drains and change.aborts:
                abort()
            if change.drains and is_open():
                return
            self._changes.popleft()
            try:
                change.make()
            except ValueError as error:
                change.done(CallRefused(str(error), code="invalid_value"))
            else:
                change.done(None)

    def refuse(self, sentence: str) -> None:
        """Refuses the changes that wait."""
        while self._changes:
            self._changes.popleft().done(CallRefused(sentence, status=503, code="shutting_down"))


def awaited() -> tuple[asyncio.Future[None], Callable[[CallRefused | None], None]]:
    """A future of the running loop, and what ends it: any thread may call that."""
    loop = asyncio.get_running_loop()
    made: asyncio.Future[None] = loop.create_future()

    def finish(refusal: CallRefused | None) -> None:
        if made.done():  # its client has disconnected
            return
        if refusal is None:
            made.set_result(None)
        else:
            made.set_exception(refusal)

    def done(refusal: CallRefused | None) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: no client waits
            loop.call_soon_threadsafe(finish, refusal)

    return made, done
