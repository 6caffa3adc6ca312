"""A limit on the time that code of somebody else's, such as a chat template, computes for."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any


class _TimeIsUp(BaseException):
    """No Exception: libraries catch those."""


@contextlib.contextmanager
def time_limit(seconds: float, sentence: str) -> Iterator[None]:
    """Ends what runs within by ValueError(sentence), after so many seconds of this thread's CPU.

    A thread cannot be killed, and a signal reaches the main one only: a trace function raises the
    error, at the next line or call of Python code.
    """
    end = time.thread_time() + seconds

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if time.thread_time() > end:
            raise _TimeIsUp
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    except _TimeIsUp:
        raise ValueError(sentence) from None
    finally:
        sys.settrace(before)
