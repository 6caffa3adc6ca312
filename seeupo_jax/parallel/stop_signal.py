"""A request to stop: a signal that is handled where a run can stop and resume later."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any


class Stopped(Exception):
    """The run was asked to stop and did, between two steps; nothing is lost."""


class StoppedCompiling(Stopped):
    """The run was asked to stop between two programs of those that are compiled ahead."""


class StopRequest:
    """Takes SIGTERM (preemption), SIGINT and SIGHUP while it is open.

    SIGHUP comes with a terminal that is closed; one that is ignored, as under nohup, stays so. A
    second SIGINT acts as usual. A second one of the others does not: Slurm sends SIGTERM twice,
    and launchers pass on what their group got.

    On another thread than the main one it takes none: Python allows no handlers there. A signal
    whose handler Python did not install, as where an application embeds it, is left to that.

    asked: whether one has come, or `ask` was called.
    reason: why: the signal's name, or what `ask` was given; None: this process was not asked.
    """

    def __init__(self) -> None:
        self.asked = False
        self.reason: str | None = None
        self._wake: Callable[[], None] = lambda: None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in _signals():
                self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def ask(self, reason: str) -> None:
        """Asks the run to stop, from any thread; of several reasons the first is kept."""
        if self.reason is None:
            self.reason = reason
        self.asked = True
        self._wake()

    @property
    def why(self) -> str:
        """Why a run stopped: `reason`, even an empty one, or that another process was asked."""
        return "another process was asked to stop" if self.reason is None else self.reason

    def wakes(self, function: Callable[[], None]) -> None:
        """Calls a function with every request, in a signal's handler too; at once after one."""
        self._wake = function
        if self.asked:
            function()

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        self.ask(signal.Signals(number).name)
        if number == signal.SIGINT:
            signal.signal(number, self._before[number])


def _signals() -> list[signal.Signals]:
    """The signals that a run handles; Windows has no SIGHUP."""
    hangup = getattr(signal, "SIGHUP", None)
    ignored = hangup is None or signal.getsignal(hangup) == signal.SIG_IGN
    every = [signal.SIGTERM, signal.SIGINT, *([] if ignored else [hangup])]
    return [number for number in every if signal.getsignal(number) is not None]
