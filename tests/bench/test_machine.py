"""Memory that runs take, and what a machine can do."""

import itertools
import sys
from types import SimpleNamespace

import pytest

from seeupo_jax.bench import machine


def test_on_a_gpu_memory_is_measured_without_pytorch_too(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    ran = []
    machine.memory_growth(lambda: ran.append(1), "gpu")
    assert ran == [1]


@pytest.mark.parametrize("seconds", [0.5, 0.25])
def test_a_machines_own_limits_follow_from_the_seconds_that_it_takes(monkeypatch, seconds):
    """A copy reads and writes each byte; a product has two FLOPs a pair. By a clock that is set."""
    monkeypatch.setattr(machine, "_COPIED", 2**20)
    monkeypatch.setattr(machine, "_CPU_SIDE", 64)
    clock = itertools.count(step=seconds)
    monkeypatch.setattr(machine, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    assert machine.memory_bandwidth() == 2 * 2**20 / seconds
    assert machine.matmul_peak("float32") == 2 * 64**3 / seconds
