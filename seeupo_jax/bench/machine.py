"""Where figures were measured: processor, memory, versions, and how fast it multiplies."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import time
from pathlib import Path
from typing import Any

import jax

_VERSIONS = ("jax", "jaxlib", "flax", "numpy", "torch", "transformers")
_SIDE, _PRODUCTS = 8192, 20  # of the products that the peak is measured by


def describe(device: jax.Device) -> dict[str, Any]:
    """The machine as plain values."""
    return {
        "device": device.device_kind if device.platform != "cpu" else _processor(),
        "platform": device.platform,
        "cores": cores(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load_before": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.machine()}",
        "versions": {"python": platform.python_version()} | _installed(),
    }


def cores() -> int:
    """That this process may use."""
    can_ask = hasattr(os, "sched_getaffinity")
    return len(os.sched_getaffinity(0)) if can_ask else os.cpu_count() or 1


def _processor() -> str:
    file = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*: (.+)$", file.read_text(), re.M) if file.exists() else None
    return found[1] if found else platform.processor() or platform.machine()


def _installed() -> dict[str, str]:
    found = {}
    for name in _VERSIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def matmul_peak(dtype: str) -> float:
    """FLOP/s of large matrix products, the fastest of several."""
    # Zeros and ones take less power, and run faster than any real matrix.
    x = jax.random.normal(jax.random.key(0), (_SIDE, _SIDE), dtype)
    multiply = jax.jit(lambda x: x @ x)
    seconds = []
    for _ in range(_PRODUCTS):
        began = time.perf_counter()
        multiply(x).block_until_ready()
        seconds.append(time.perf_counter() - began)
    return 2 * _SIDE**3 / min(seconds)
