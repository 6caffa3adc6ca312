"""Memory that runs take, and what a machine can do."""

import itertools
import os
import sys
from types import SimpleNamespace

import jax
import pytest

from seeupo_jax.benchmarks import machine


def test_on_a_gpu_memory_is_measured_without_pytorch_too(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    ran = []
    machine.memory_growth(lambda: ran.append(1), "gpu")
    assert ran == [1]


def test_a_peak_that_cannot_be_forgotten_is_not_known(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "_RESET", tmp_path)  # a folder: there, and not to be written
    ran = []
    assert machine.memory_growth(lambda: ran.append(1), "cpu") is None and ran == [1]


@pytest.mark.parametrize("seconds", [0.5, 0.25])
def test_a_machines_own_limits_follow_from_the_seconds_that_it_takes(monkeypatch, seconds):
    """A copy reads and writes each byte; a product has two FLOPs a pair. By a clock that is set."""
    monkeypatch.setattr(machine, "_COPIED", 2**20)
    monkeypatch.setattr(machine, "_CPU_SIDE", 64)
    clock = itertools.count(step=seconds)
    monkeypatch.setattr(machine, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    assert machine.memory_bandwidth() == 2 * 2**20 / seconds
    assert machine.matmul_peak("float32") == 2 * 64**3 / seconds


def test_a_processor_is_told_with_what_its_name_leaves_open(monkeypatch, tmp_path):
    """As Linux tells them, each core again, of two that share a name."""
    file = tmp_path / "cpuinfo"
    monkeypatch.setattr(machine, "_CPUINFO", file)
    core = "processor\t: {}\ncpu family\t: {}\nmodel name\t: AMD EPYC\nflags\t\t: fpu {}\n\n"
    file.write_text("".join(core.format(n, 26, "avx2 avx512f avx512bw") for n in range(2)))
    assert machine.describe(jax.devices()[0])["device"] == "AMD EPYC (family 26), AVX-512"
    file.write_text("".join(core.format(n, 25, "avx2 fma") for n in range(2)))
    assert machine.describe(jax.devices()[0])["device"] == "AMD EPYC (family 25)"


NVIDIA_SMI = """#!/bin/sh
case "$*" in
*--id=1*|*--id=GPU-b*) echo 142600;;
*--id=*) echo 'No devices were found'; exit 6;;
*) printf '3120\n142600\n';;
esac
"""


@pytest.mark.parametrize(
    ("visible", "mib"),
    [(None, 3120), ("1", 142600), ("1,0", 142600), ("GPU-b", 142600), ("MIG-a", 5)],
)
def test_a_gpus_free_memory_is_the_visible_ones(visible, mib, monkeypatch, tmp_path):
    """By a stand-in that, as the real one, lists all GPUs whatever CUDA_VISIBLE_DEVICES says."""
    tmp_path.joinpath("nvidia-smi").write_text(NVIDIA_SMI)
    tmp_path.joinpath("nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    gpu = SimpleNamespace(platform="gpu")
    gpu.client = SimpleNamespace(local_devices=lambda: [gpu])
    gpu.memory_stats = lambda: {"bytes_limit": 7 * 2**20, "bytes_in_use": 2 * 2**20}
    assert machine.free_bytes(gpu) == mib * 2**20
