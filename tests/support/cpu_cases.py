"""What a call costs the processor, whatever else the machine does."""

import gc
import time
from collections.abc import Callable
from typing import Any

TRIES = 3


def costs_less(call: Callable[[], Any], seconds: float) -> bool:
    """Whether one of a few calls takes less processor time than so many seconds.

    Garbage of other tests is not collected meanwhile: in a process that has traced many programs
    that takes longer than the calls themselves.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return any(_once(call) < seconds for _ in range(TRIES))
    finally:
        if collects:
            gc.enable()


def _once(call: Callable[[], Any]) -> float:
    start = time.thread_time()
    call()
    return time.thread_time() - start
