"""The heap of a process that computes on the CPU: what programs free is kept, up to a limit."""

from __future__ import annotations

import ctypes
import functools
import os
import threading
import time
from pathlib import Path

# Of glibc's mallopt: one heap for all threads, nothing outside it, none of it given back unasked,
# and 64 MiB more than asked for when it grows.
_OPTIONS = {-8: 1, -4: 0, -1: -1, -2: 2**26}
_STATM = Path("/proc/self/statm")  # Linux's count of a process's pages
_INTERVAL_S = 0.5
_PAUSES = 20  # times as long as giving back took, until it may be done again


@functools.cache  # once for a process
def keep_freed_memory(limit: int) -> None:
    """Keeps glibc from giving freed memory back while the process holds at most `limit` bytes.

    A program's temporaries are allocated anew at every execution, and the system clears each page
    at its first touch: a tenth of the time of a sweep of 135 million parameters on two cores. But
    blocks of gigabytes find no place between small ones that are in use, and the heap grows: a run
    of that size held 18.7 GB, where 7.6 GB suffice if all is given back. Beyond the limit free
    pages are given back. Only threads that have not allocated yet can share one heap.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt") or not _STATM.exists():
        return  # another C library or system
    for option, value in _OPTIONS.items():
        libc.mallopt(option, value)
    threading.Thread(target=_trim, args=(libc, limit), name="heap", daemon=True).start()


def _trim(libc: ctypes.CDLL, limit: int) -> None:
    """Gives free pages back whenever the process holds more than `limit` bytes."""
    pause = _INTERVAL_S
    while True:
        time.sleep(pause)
        began = time.monotonic()
        if resident_bytes() > limit:
            libc.malloc_trim(0)
        pause = max(_INTERVAL_S, _PAUSES * (time.monotonic() - began))


def resident_bytes() -> int:
    """Bytes of the machine's memory that this process holds."""
    return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
