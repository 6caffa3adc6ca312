"""The heap of a process on the CPU, in processes of their own: its settings hold for good."""

import os
import subprocess
import sys

import pytest

from seeupo_jax.cli import heap

MIB = 2**20
# Frees 1,250 MiB in blocks that small ones in use lie between.
FRAGMENTED = """
import sys, time
import numpy as np
from seeupo_jax.cli import heap

heap._INTERVAL_S = 0.05
for _ in range(2):  # the second call changes nothing
    heap.keep_freed_memory({limit})
before = heap.resident_bytes()
blocks, small = [], []
for _ in range(25):
    blocks.append(np.ones(50 * 2**17))
    small.append(np.ones(10))
full = heap.resident_bytes() - before
del blocks
deadline = time.monotonic() + {seconds}
while time.monotonic() < deadline and heap.resident_bytes() - before > 300 * 2**20:
    time.sleep(0.05)
print(full, heap.resident_bytes() - before, sum(x.sum() for x in small))
"""


def held(limit, seconds):
    """Bytes of the blocks while they were in use, and what was held of them once freed."""
    code = FRAGMENTED.format(limit=limit, seconds=seconds)
    env = os.environ | {"LD_PRELOAD": ""}  # glibc's own malloc
    called = [sys.executable, "-c", code]
    done = subprocess.run(called, env=env, capture_output=True, text=True, check=True)
    full, freed, total = done.stdout.split()
    assert float(total) == 250  # what is in use is left alone
    return int(full), int(freed)


@pytest.mark.skipif(not heap._STATM.exists(), reason="Linux says how much a process holds")
def test_freed_memory_is_kept_up_to_the_limit_and_given_back_beyond_it():
    full, kept = held(limit=2**40, seconds=1)
    assert full > 1200 * MIB and kept > 1200 * MIB
    full, kept = held(limit=500 * MIB, seconds=30)
    assert full > 1200 * MIB and kept < 300 * MIB
