"""How much memory devices have, how much is free, and what arrays take of it."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import jax

GIB = 2**30
# Where Linux says how much memory a container may use, in the second and the first version.
_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
# And how much of that is in use, and its parts: files' pages are given up first.
_IN_USE = ("memory.current", "memory.usage_in_bytes")
_STAT, _OF_FILES = "memory.stat", ("inactive_file ", "total_inactive_file ")


def device_bytes(tree: Any) -> int:
    """Bytes of a tree of arrays or shape structs with shardings on one device.

    What lies in the host's memory is left out.
    """

    def size(leaf: Any) -> int:
        away = leaf.sharding.memory_kind not in (None, "device", "unpinned_host")
        shape = leaf.sharding.shard_shape(leaf.shape)
        return 0 if away else math.prod(shape) * leaf.dtype.itemsize

    return sum(map(size, jax.tree.leaves(tree)))


def total_memory(device: jax.Device) -> int | None:
    """Bytes that the programs of a device may use, whatever is in use now; None: it does not say.

    CPU devices share what the host has, or what a container is allowed of it.
    """
    if device.platform == "cpu":
        return host_memory() // jax.local_device_count()
    stats = device.memory_stats()
    return stats.get("bytes_limit") if stats else None


def host_memory() -> int:
    """Bytes of memory that the host has, or that a container is allowed of them."""
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(host, *_container_limits().values(), host)


def _container_limits() -> dict[Path, int]:
    """Bytes by the files that say so."""
    texts = {Path(name): Path(name).read_text().strip() for name in _LIMITS if Path(name).exists()}
    return {file: int(text) for file, text in texts.items() if text.isdecimal()}


def _free_under_limits() -> list[int]:
    """Bytes that a container may still use, by limit; droppable pages of files count as free."""
    free = []
    for file, limit in _container_limits().items():
        used = [file.parent / name for name in _IN_USE if (file.parent / name).exists()]
        if used:
            free.append(max(0, limit - int(used[0].read_text()) + _droppable(file.parent / _STAT)))
    return free


def _droppable(stat: Path) -> int:
    """Bytes of a container's pages of files that are not in use."""
    lines = stat.read_text().splitlines() if stat.exists() else []
    return max((int(line.split()[1]) for line in lines if line.startswith(_OF_FILES)), default=0)


def free_memory(device: jax.Device) -> int | None:
    """Bytes that a device has left; None where unknown. CPU devices share the host's."""
    if device.platform == "cpu":
        available = _available_on_host()
        return None if available is None else available // jax.local_device_count()
    if device not in device.client.local_devices():  # of a machine that is only compiled for
        return None
    stats = device.memory_stats()
    if not stats or "bytes_limit" not in stats:
        return None
    return stats["bytes_limit"] - stats["bytes_in_use"]


def _available_on_host() -> int | None:
    try:
        with open("/proc/meminfo") as file:
            fields = dict(line.split(":", 1) for line in file)
        return min(int(fields["MemAvailable"].split()[0]) * 1024, *_free_under_limits(), 2**63)
    except (OSError, KeyError):
        return None


def format_bytes(count: float) -> str:
    """A number of bytes as text, in the largest fitting unit."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"
