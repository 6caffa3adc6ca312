"""The limit of a process's open files, which include sockets and pipes."""

from __future__ import annotations

import contextlib
import math
import os
import resource

# Some programs close every possible descriptor when they start; up to this number it takes no time.
MOST = 2**16


def raise_open_files(most: int = MOST) -> float:
    """Raises the soft limit to the hard limit, but at most to `most`; never lowers it.

    Returns: the resulting limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = int(min(_finite(hard), most))
    if wanted > _finite(soft):
        with contextlib.suppress(OSError, ValueError):  # systems may allow less than they report
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return _finite(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def open_files() -> int:
    """The number of open files; 0 on a system that does not list them."""
    try:
        return len(os.listdir("/dev/fd"))
    except OSError:
        return 0


def _finite(limit: int) -> float:
    return math.inf if limit == resource.RLIM_INFINITY else limit
