"""Memory that runs take."""

import sys

from seeupo_jax.bench import machine


def test_on_a_gpu_memory_is_measured_without_pytorch_too(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    ran = []
    machine.memory_growth(lambda: ran.append(1), "gpu")
    assert ran == [1]
