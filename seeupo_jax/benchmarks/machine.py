"""The machine of a measurement: processor, memory and its use, versions, speed."""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from seeupo_jax.metrics.run_manifest import versions
from seeupo_jax.parallel.device_memory import GIB, free_memory
from seeupo_jax.parallel.host_cores import usable_cores
from seeupo_jax.planning.chips import CHIPS

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_CPUINFO = Path("/proc/cpuinfo")
_VERSIONS = ("jax", "jaxlib", "flax", "numpy", "torch", "transformers")
_SIDE, _PRODUCTS = 8192, 20  # of the products, and copies, that a peak is measured by
_CPU_SIDE = 2048  # whose products take a core a fifth of a second
_COPIED = 2**29  # bytes of an array that no cache holds
# Dense bfloat16 FLOP/s without sparsity, by the vendors' data sheets (NVIDIA: B200, H200, H100,
# A100, L40S, L4, A10). The first pattern that the device's name matches counts.
_PEAKS = {
    r"B200": 2250e12,
    r"H[12]00 NVL": 835e12,
    r"H100 PCIe": 756e12,
    r"G?H[12]00": 989e12,
    r"A100": 312e12,
    r"L40S": 362e12,
    r"\bL4\b": 121e12,
    r"\bA10\b": 125e12,
    r"TPU ?v4": CHIPS["v4"].peak_flops,
    r"TPU ?v5 ?(lite|e)": CHIPS["v5e"].peak_flops,
    r"TPU ?v5": CHIPS["v5p"].peak_flops,
    r"TPU ?v6": CHIPS["v6e"].peak_flops,
    r"TPU ?7x": CHIPS["tpu7x"].peak_flops / CHIPS["tpu7x"].devices,
}


def only_device() -> jax.Device:
    """The device to measure on.

    Raises:
      ValueError: there are several, which the baseline would not use.
    """
    devices = jax.devices()
    if len(devices) != 1:
        raise ValueError(
            f"bench: got {len(devices)} devices; allowed: one, as with CUDA_VISIBLE_DEVICES=0."
        )
    return devices[0]


def fast_dtype(device: jax.Device) -> str:
    """The faster type of activations: on CPU float32, where XLA's bfloat16 is slower still."""
    return "float32" if device.platform == "cpu" else "bfloat16"


def scans_layers(device: jax.Device) -> bool:
    """Whether all layers are one program's loop: a turn's program of 24 took a GPU's host 35 s."""
    return device.platform != "cpu"


def describe(device: jax.Device) -> dict[str, Any]:
    """The machine as plain values."""
    return {
        "device": device.device_kind if device.platform != "cpu" else _processor(),
        "platform": device.platform,
        "cores": usable_cores(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB, 1),
        "load_before": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.machine()}",
        "versions": versions(_VERSIONS),
    }


def _processor() -> str:
    """The processor's name and, on Linux, its family and whether it has 512-bit vectors."""
    text = _CPUINFO.read_text() if _CPUINFO.exists() else ""
    cpuinfo = dict(re.findall(r"^(model name|cpu family|flags)\s*: (.+)$", text, re.M))
    name = cpuinfo.get("model name") or platform.processor() or platform.machine()
    family = f" (family {cpuinfo['cpu family']})" if "cpu family" in cpuinfo else ""
    wide = ", AVX-512" if "avx512f" in cpuinfo.get("flags", "").split() else ""
    return f"{name}{family}{wide}"


def matmul_peak(dtype: str) -> float:
    """FLOP/s of large matrix products, the fastest of several."""
    side = _CPU_SIDE if jax.devices()[0].platform == "cpu" else _SIDE
    # Zeros and ones take less power, and run faster than any real matrix.
    x = jax.random.normal(jax.random.key(0), (side, side), dtype)
    return 2 * side**3 / _least_seconds(jax.jit(lambda x: x @ x), x)


def memory_bandwidth() -> float:
    """Bytes/s that a copy reads and writes, the fastest of several."""
    x = jax.random.normal(jax.random.key(0), (_COPIED // 4,), "float32")
    return 2 * x.nbytes / _least_seconds(jax.jit(lambda x: -x), x)


def _least_seconds(run: Callable[[jax.Array], jax.Array], x: jax.Array) -> float:
    seconds = []
    for _ in range(_PRODUCTS):
        began = time.perf_counter()
        run(x).block_until_ready()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def peak_flops(name: str) -> float | None:
    """bfloat16 FLOP/s of a device by its name; None for one that is not in the table."""
    return next((peak for pattern, peak in _PEAKS.items() if re.search(pattern, name)), None)


def free_bytes(device: jax.Device) -> int | None:
    """Memory of the first visible device that no process has taken; None where it is not known."""
    if device.platform == "gpu" and shutil.which("nvidia-smi"):
        line = ["nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0].strip()
        line += [f"--id={visible}"] if visible else []  # it lists all, whatever is visible
        done = subprocess.run(line, capture_output=True, text=True)
        first = done.stdout.split("\n")[0].strip()
        if done.returncode == 0 and first.isdigit():
            return int(first) * 2**20
    return free_memory(device)


def memory_growth(run: Callable[[], object], platform: str) -> int | None:
    """Bytes at the peak of a run above those before it; None where unknown.

    On a CPU it is the process's, whose allocator first returns its free memory. On a GPU it is that
    of either library's allocator: PyTorch's peak during the run, and XLA's of the process so far.
    """
    meters = {"cpu": _of_process, "gpu": _of_gpu, "cuda": _of_gpu}
    return meters.get(platform, _of_device)(run)


def _of_process(run: Callable[[], object]) -> int | None:
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
        _RESET.write_text("5")  # the peak so far is forgotten
    except (AttributeError, OSError):  # no glibc, no Linux, or one that does not let us
        run()
        return None
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
