"""The memory that a run adds to what lay there before it."""

from __future__ import annotations

import ctypes
import gc
import re
import sys
from collections.abc import Callable
from pathlib import Path

import jax

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def growth(run: Callable[[], object], platform: str) -> int | None:
    """Bytes at the peak of a run above those before it; None where unknown.

    On CPU of the whole process, whose allocator gives back first what it keeps. On a GPU of either
    library's own allocator: PyTorch's peak during the run, and XLA's of the process so far.
    """
    meters = {"cpu": _of_process, "gpu": _of_gpu, "cuda": _of_gpu}
    return meters.get(platform, _of_device)(run)


def _of_process(run: Callable[[], object]) -> int | None:
    if not _RESET.exists():  # no Linux
        run()
        return None
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    _RESET.write_text("5")  # the peak so far is forgotten
    before = _kilobytes("VmRSS")
    run()
    return 1024 * max(0, _kilobytes("VmHWM") - before)


def _kilobytes(name: str) -> int:
    return int(re.search(rf"^{name}:\s+(\d+) kB$", _STATUS.read_text(), re.MULTILINE)[1])


def _of_gpu(run: Callable[[], object]) -> int | None:
    if "torch" not in sys.modules:  # only XLA has taken any
        return _of_device(run)
    cuda = sys.modules["torch"].cuda
    cuda.reset_peak_memory_stats()
    before = cuda.memory_allocated()
    xla = _of_device(run)
    grown = cuda.max_memory_allocated() - before
    return grown if grown > 0 else xla


def _of_device(run: Callable[[], object]) -> int | None:
    device = jax.devices()[0]
    before = device.memory_stats()
    run()
    after = device.memory_stats()
    if before is None or after is None:
        return None
    return after["peak_bytes_in_use"] - before["bytes_in_use"]
