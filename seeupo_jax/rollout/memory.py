"""How much memory the KV cache takes, decided before anything runs."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from seeupo_jax import config
from seeupo_jax.policy.architecture import Architecture

GIB = 2**30


@dataclass(frozen=True)
class CachePlan:
    """Sizes of the cache. slots, concurrency and pages are of one shard of the rows.

    slots: actions in the making. concurrency: open conversations. pages: of page_size tokens each.
    token_bytes: keys and values of one token in all layers, on one device.
    """

    shards: int
    slots: int
    concurrency: int
    pages: int
    page_size: int
    max_context: int
    token_bytes: int

    @property
    def row_pages(self) -> int:
        """Pages of the longest conversation."""
        return -(-self.max_context // self.page_size)

    @property
    def bytes(self) -> int:
        """Of the whole cache, on one device."""
        return self.pages * self.page_size * self.token_bytes

    def __str__(self) -> str:
        whole = self.row_pages * self.page_size * self.token_bytes
        fit = self.pages // self.row_pages
        cut = f" on each of {self.shards} shards" if self.shards > 1 else ""
        return (
            f"KV cache: {self.slots} slots{cut} for {self.concurrency} conversations,"
            f" {_size(self.bytes)} in {self.pages} pages of {self.page_size} tokens"
            f" ({_size(self.token_bytes)} a token, {_size(whole)} a conversation of"
            f" {self.max_context} tokens; {fit} of them fit at once)"
        )


def plan_cache(
    arch: Architecture,
    rollout: config.Rollout,
    *,
    shards: int = 1,
    tensor: int = 1,
    free_bytes: int | None = None,
) -> CachePlan:
    """The cache of a run: every open conversation at full length, or what `cache_gib` allows.

    Args:
      shards: parts that rows are cut into. tensor: devices that share a row's heads.
      free_bytes: what a device has left; None: unknown.

    Raises:
      ValueError: numbers that shards do not divide; less memory than one conversation needs; more
        than a device has.
    """
    every = rollout.tasks * rollout.group_size
    concurrency = every if rollout.concurrency is None else rollout.concurrency
    slots = concurrency if rollout.slots is None else min(rollout.slots, concurrency)
    sizes = {"concurrency": concurrency, "slots": slots}
    for name, size in sizes.items():
        if size % shards:
            raise ValueError(
                f"config.rollout.{name}: got {size}; allowed: a multiple of the {shards} devices"
                " that rows are spread over."
            )
    heads = arch.kv_heads // tensor if arch.kv_heads % tensor == 0 else arch.kv_heads
    token_bytes = arch.layers * 2 * heads * arch.head_dim * jnp.dtype(arch.dtype).itemsize
    page_bytes = token_bytes * rollout.page_size
    row_pages = -(-rollout.max_context // rollout.page_size)
    pages = concurrency // shards * row_pages
    if rollout.cache_gib is not None:
        pages = min(pages, int(rollout.cache_gib * GIB) // page_bytes)
    if pages < row_pages:
        raise ValueError(
            f"config.rollout.cache_gib: got {rollout.cache_gib}; allowed: at least"
            f" {math.ceil(row_pages * page_bytes / GIB * 1e6) / 1e6:g}, one conversation of"
            f" config.rollout.max_context={rollout.max_context} tokens."
        )
    plan = CachePlan(
        shards=shards,
        slots=slots // shards,
        concurrency=concurrency // shards,
        pages=pages,
        page_size=rollout.page_size,
        max_context=rollout.max_context,
        token_bytes=token_bytes,
    )
    if free_bytes is not None and plan.bytes > free_bytes:
        raise ValueError(
            f"config.rollout.cache_gib: got {rollout.cache_gib}, which means {_size(plan.bytes)} a"
            f" device for {plan.concurrency} conversations of {plan.max_context} tokens; allowed:"
            f" less than the {_size(free_bytes)} that are free."
        )
    return plan


def free_memory(device: jax.Device) -> int | None:
    """Bytes that a device has left; None where nobody knows. CPU devices share the host's."""
    if device.platform == "cpu":
        available = _available_on_host()
        return None if available is None else available // jax.local_device_count()
    stats = device.memory_stats()
    if not stats or "bytes_limit" not in stats:
        return None
    return stats["bytes_limit"] - stats["bytes_in_use"]


def _available_on_host() -> int | None:
    try:
        with open("/proc/meminfo") as file:
            fields = dict(line.split(":", 1) for line in file)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return None


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"
