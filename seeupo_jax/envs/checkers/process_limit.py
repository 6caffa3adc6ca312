"""How many processes of one kind checkers run at a time."""

from __future__ import annotations

import os

# One per core that this process may use: more would only wait for each other.
MOST_PROCESSES = (
    len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
)
