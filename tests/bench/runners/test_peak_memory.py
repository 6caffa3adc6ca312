"""Memory that runs take."""

import sys

import pytest

from seeupo_jax.bench.runners import peak_memory, torch_imports


def test_on_a_gpu_memory_is_measured_without_pytorch_too(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(torch_imports, "torch", lambda: pytest.fail("asked for PyTorch"))
    ran = []
    peak_memory.growth(lambda: ran.append(1), "gpu")
    assert ran == [1]
