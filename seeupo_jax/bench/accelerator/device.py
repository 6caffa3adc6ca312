"""The accelerator: which one it is, what memory is free, and how fast its vendor says it is."""

from __future__ import annotations

import re
import shutil
import subprocess

import jax

from seeupo_jax.bench import machine
from seeupo_jax.bench.accelerator.record import Record, sentence
from seeupo_jax.bench.runners import torch_imports
from seeupo_jax.planning.chips import CHIPS

MIB = 2**20
PROBE = "machine"  # the name of the record of what the machine is
# Dense bfloat16 FLOP/s without sparsity, by the vendors' data sheets (NVIDIA: B200, H200, H100,
# A100, L40S, L4, A10). The first pattern that the device's name matches counts.
_PEAKS: tuple[tuple[str, float], ...] = (
    (r"B200", 2250e12),
    (r"H[12]00 NVL", 835e12),
    (r"H100 PCIe", 756e12),
    (r"G?H[12]00", 989e12),
    (r"A100", 312e12),
    (r"L40S", 362e12),
    (r"\bL4\b", 121e12),
    (r"\bA10\b", 125e12),
    (r"TPU ?v4", CHIPS["v4"].peak_flops),
    (r"TPU ?v5 ?(lite|e)", CHIPS["v5e"].peak_flops),
    (r"TPU ?v5", CHIPS["v5p"].peak_flops),
    (r"TPU ?v6", CHIPS["v6e"].peak_flops),
    (r"TPU ?7x", CHIPS["tpu7x"].peak_flops / CHIPS["tpu7x"].devices),
)


def peak_flops(name: str) -> float | None:
    """bfloat16 FLOP/s of a device by its name; None for one that is not in the table."""
    found = (peak for pattern, peak in _PEAKS if re.search(pattern, name))
    return next(found, None)


def probe(record: Record) -> None:
    """Writes down what this machine has; the figures of the record `machine`."""
    devices = jax.devices()
    about = machine.describe(devices[0])
    record.put(
        figures=about
        | {
            "count": len(devices),
            "free_bytes": free_bytes(devices[0]),
            "peak_flops": peak_flops(about["device"]),
            "no_torch": no_torch(devices[0].platform),
        }
    )


def free_bytes(device: jax.Device) -> int | None:
    """Memory of a device that nobody has taken; None where it is not known."""
    if device.platform == "gpu" and shutil.which("nvidia-smi"):
        line = ["nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
        done = subprocess.run(line, capture_output=True, text=True)
        first = done.stdout.split("\n")[0].strip()
        if done.returncode == 0 and first.isdigit():
            return int(first) * MIB
    stats = device.memory_stats()
    if stats is None or "bytes_limit" not in stats:
        return None
    return stats["bytes_limit"] - stats["bytes_in_use"]


def no_torch(platform: str) -> str | None:
    """Why the PyTorch baseline cannot run beside ours on a platform; None where it can."""
    if platform == "tpu":
        return "the PyTorch baseline does not run on TPU"
    try:
        torch_imports.load("generate")
        torch = torch_imports.torch()
    except ValueError as error:  # a sentence already
        return str(error).removeprefix("bench: ").rstrip(".")
    except Exception as error:  # a broken CUDA library raises whatever it likes
        return sentence(error)
    if platform != "cpu" and not torch.cuda.is_available():
        return f"PyTorch {torch.__version__} sees no GPU"
    return None
