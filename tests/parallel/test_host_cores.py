"""Threads are as many as the cores that a process may use, not as those of the machine."""

import os
import subprocess
import sys

import pytest

from seeupo_jax.parallel.host_cores import usable_cores

PROGRAM = """if True:
    import os
    os.cpu_count = lambda: 64
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    from seeupo_jax.checkpoint import manifest
    from seeupo_jax.parallel import compiling
    print(manifest._READERS, compiling.WORKERS)
"""


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system binds to no cores")
def test_a_process_that_is_bound_to_cores_counts_these(monkeypatch):
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.stdout == "1 1\n", done.stderr
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2, 3, 5})
    assert usable_cores() == 3


def test_without_an_affinity_all_cores_count(monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 7)
    assert usable_cores() == 7
