"""How many cores there are for the threads of a process."""

from __future__ import annotations

import os


def usable_cores() -> int:
    """The number of cores that this process may use, which taskset or Slurm may have bounded."""
    can_ask = hasattr(os, "sched_getaffinity")
    return len(os.sched_getaffinity(0)) if can_ask else os.cpu_count() or 1
