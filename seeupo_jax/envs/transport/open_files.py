"""How many files a process may have open at once: its sockets and pipes count too."""

from __future__ import annotations

import contextlib
import math
import os
import resource

# What programs that close every possible descriptor, as some do when they start, pass in no time.
MOST = 2**16


def raise_open_files(most: int = MOST) -> float:
    """Raises the soft limit to the hard one, or to `most` where that is higher; never lowers it.

    Returns: the limit that then holds.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = int(min(_finite(hard), most))
    if wanted > _finite(soft):
        with contextlib.suppress(OSError, ValueError):  # systems may allow less than they say
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return _finite(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def open_files() -> int:
    """How many there are; 0 on a system that does not list them."""
    try:
        return len(os.listdir("/dev/fd"))
    except OSError:
        return 0


def _finite(limit: int) -> float:
    return math.inf if limit == resource.RLIM_INFINITY else limit
