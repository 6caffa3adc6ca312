"""How much memory the sampler takes, decided before anything runs."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from seeupo_jax.configuration import schema
from seeupo_jax.parallel.device_memory import GIB, format_bytes
from seeupo_jax.parallel.mesh import kv_heads_of_device
from seeupo_jax.policy.architecture import Architecture
from seeupo_jax.policy.delta_net import new_states
from seeupo_jax.rollout.engine.read_plan import ANYWHERE, KVReadPlan


@dataclass(frozen=True)
class Reshard:
    """The cost of the policy's copy in the sampler's layout, which is made before each rollout.

    axes: the sampler's layout of the devices, in words.
    held_bytes: the sampler's own copy, on one device; 0: it reads the trainer's parameters.
    received_bytes: from other devices, on the device that receives most.
    own_bytes: received by all devices of this process.
    int8: whether the copy's matrices of the layers have 8 bits.
    """

    axes: str
    held_bytes: int
    received_bytes: int
    own_bytes: int
    int8: bool = False

    def __str__(self) -> str:
        if not self.held_bytes:
            return f"sampler's layout: {self.axes}; it reads the trainer's parameters"
        rounded = ", layers in int8" if self.int8 else ""
        return (
            f"sampler's layout: {self.axes}; {format_bytes(self.held_bytes)} per device for its"
            f" copy of the policy{rounded}, {format_bytes(self.received_bytes)} of it from"
            " other devices before each rollout"
        )


@dataclass(frozen=True)
class CachePlan:
    """Sizes of the cache; slots, concurrency and pages are per shard of the rows.

    slots: actions being decoded. concurrency: open episodes. pages: of page_size tokens each.
    conversations: of an episode; pages are for all of them.
    token_bytes: keys and values of one token in all layers, on one device.
    reshard: cost of the sampler's copy of the policy; None: unknown.
    gathered_bytes: keys and values of one layer that a decode step gathers of whole rows, on one
      device; 0: a block of tokens at a time, or none.
    states: of recurrent layers: those being decoded, and those kept for turns that continue them.
    state_bytes: of all of them and of a dispatch's own, on one device.
    history_bytes: of the tokens' numbers that penalties read, and a dispatch's own, on one device.
    """

    shards: int
    slots: int
    concurrency: int
    pages: int
    page_size: int
    max_context: int
    token_bytes: int
    reshard: Reshard | None = None
    gathered_bytes: int = 0
    states: int = 0
    state_bytes: int = 0
    history_bytes: int = 0
    conversations: int = 1

    @property
    def row_pages(self) -> int:
        """Pages of the longest conversation."""
        return -(-self.max_context // self.page_size)

    @property
    def bytes(self) -> int:
        """Bytes of the cache on one device."""
        return self.pages * self.page_size * self.token_bytes

    @property
    def policy_bytes(self) -> int:
        """Bytes of the sampler's own copy of the policy on one device."""
        return 0 if self.reshard is None else self.reshard.held_bytes

    @property
    def needed_bytes(self) -> int:
        """Bytes of all of it on one device."""
        others = self.gathered_bytes + self.state_bytes + self.history_bytes
        return self.bytes + self.policy_bytes + others

    def __str__(self) -> str:
        row_bytes = self.row_pages * self.page_size * self.token_bytes
        fit = self.pages // self.row_pages
        cut = f" on each of {self.shards} shards" if self.shards > 1 else ""
        way = "" if self.reshard is None else f"; {self.reshard}"
        gathered = ""
        if self.gathered_bytes:
            gathered = f"; {format_bytes(self.gathered_bytes)} beside it, gathered to decode"
        if self.state_bytes:
            states = f"{format_bytes(self.state_bytes)} of recurrent states"
            gathered += f"; {states}, {self.states - self.slots} of them kept for later turns"
        if self.history_bytes:
            gathered += f"; {format_bytes(self.history_bytes)} of token counts for penalties"
        opened = f"{self.concurrency} conversations"
        if self.conversations > 1:
            opened = f"{self.concurrency} episodes of {self.conversations} conversations"
        return (
            f"KV cache: {self.slots} slots{cut} for {opened},"
            f" {format_bytes(self.bytes)} in {self.pages} pages of {self.page_size} tokens"
            f" ({format_bytes(self.token_bytes)} per token, {format_bytes(row_bytes)} per"
            f" conversation of {self.max_context} tokens; {fit} of them fit at once){gathered}{way}"
        )


def plan_cache(
    arch: Architecture,
    rollout: schema.Rollout,
    *,
    shards: int = 1,
    tensor: int = 1,
    reshard: Reshard | None = None,
    free_bytes: int | None = None,
    read_plan: KVReadPlan = ANYWHERE,
    per_turn: bool = False,
    conversations: int = 1,
) -> CachePlan:
    """The cache of a run: every open conversation at full length, limited by `cache_gib`.

    Args:
      shards: of the rows. tensor: devices that share a row's heads.
      reshard: cost of the sampler's copy of the policy, which shares the memory with the cache.
      free_bytes: free memory of a device; None: unknown.
      read_plan: how the cache is read. Without blocks a decode step gathers whole rows.
      per_turn: as of `SlotEngine`. conversations: of an episode.

    Raises:
      ValueError: numbers that shards do not divide, or that the model has no use for; less memory
        than one conversation needs; more than a device has.
    """
    concurrency, slots, states = _counts(arch, rollout, shards, conversations)
    heads = kv_heads_of_device(arch.heads, arch.cached_heads, tensor)
    layers = sum(not arch.is_recurrent(i) for i in range(arch.layers))
    token_bytes = layers * heads * arch.cached_numbers * jnp.dtype(arch.dtype).itemsize
    page_bytes = token_bytes * rollout.page_size
    row_pages = -(-rollout.max_context // rollout.page_size)
    row_bytes = row_pages * page_bytes // layers  # in one layer
    pages = concurrency // shards * conversations * row_pages
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
        reshard=reshard,
        gathered_bytes=_gathered_rows(rollout, read_plan, slots // shards) * row_bytes,
        states=states // shards,
        # Decoding takes the states of its rows out of the pool and puts them back.
        state_bytes=_state_bytes(arch, (states + slots) // shards),
        # As it does with their numbers of tokens, int32.
        history_bytes=per_turn * 2 * 4 * (slots // shards) * -(-arch.vocab_size // tensor),
        conversations=conversations,
    )
    if free_bytes is not None:
        _check_free(rollout, plan, free_bytes)
    _check_places(rollout, heads, plan)
    return plan


def _counts(
    arch: Architecture, rollout: schema.Rollout, shards: int, conversations: int
) -> tuple[int, int, int]:
    """Open episodes, slots and states of recurrent layers, of all shards; see `plan_cache`."""
    concurrency = rollout.open_at_once
    slots = concurrency if rollout.slots is None else min(rollout.slots, concurrency)
    every = concurrency * conversations
    kept = every if rollout.cached_states is None else rollout.cached_states
    sizes = {"concurrency": concurrency, "slots": slots, "cached_states": kept}
    for name, size in sizes.items():
        if size % shards:
            raise ValueError(
                f"config.rollout.{name}: got {size}; allowed: a multiple of the {shards} devices"
                f" that rows are spread over ({_whose_mesh(rollout)})."
            )
    if rollout.cached_states is not None and not arch.recurrent:
        raise ValueError(
            f"config.rollout.cached_states: got {kept}; allowed without recurrent layers: none."
        )
    return concurrency, slots, slots + kept if arch.recurrent else 0


def _state_bytes(arch: Architecture, states: int) -> int:
    """Bytes of so many states of the recurrent layers."""
    one = jax.tree.leaves(jax.eval_shape(lambda: new_states(arch, 1))) if arch.recurrent else ()
    layers = sum(map(arch.is_recurrent, range(arch.layers)))
    return states * layers * sum(x.size * x.dtype.itemsize for x in one)


def _gathered_rows(rollout: schema.Rollout, read_plan: KVReadPlan, slots: int) -> int:
    """Rows at full length that a decode step gathers: slots, and prefixes that groups share."""
    if read_plan.block is not None:
        return 0
    return slots + (max(1, slots // rollout.group_size) if rollout.group_size > 1 else 0)


def _check_free(rollout: schema.Rollout, plan: CachePlan, free_bytes: int) -> None:
    """ValueError: more than a device has left."""
    if plan.needed_bytes <= free_bytes:
        return
    others = []
    if plan.policy_bytes:
        whose = _whose_mesh(rollout)
        others.append(f"{format_bytes(plan.policy_bytes)} of the sampler's policy ({whose})")
    if plan.gathered_bytes:
        size = format_bytes(plan.gathered_bytes)
        others.append(f"{size} that decoding gathers (config.rollout.slots, {plan.slots})")
    if plan.state_bytes:
        size = format_bytes(plan.state_bytes)
        counts = (
            f"config.rollout.slots, {plan.slots}, and cached_states, {plan.states - plan.slots}"
        )
        others.append(f"{size} of recurrent states ({counts})")
    if plan.history_bytes:
        size = format_bytes(plan.history_bytes)
        others.append(f"{size} of token counts for penalties (config.rollout.slots, {plan.slots})")
    together = f"with {' and '.join(others)} together " if others else ""
    raise ValueError(
        f"config.rollout.cache_gib: got {rollout.cache_gib}, which means {format_bytes(plan.bytes)}"
        f" per device for {plan.concurrency * plan.conversations} conversations of"
        f" {plan.max_context} tokens;"
        f" allowed: {together}less than the {format_bytes(free_bytes)} that are free."
    )


def _check_places(rollout: schema.Rollout, heads: int, plan: CachePlan) -> None:
    """Keys are written to the place of their head, page and token in one flat array."""
    if heads * plan.pages * plan.page_size > np.iinfo(np.int32).max:
        raise ValueError(
            f"config.rollout.cache_gib: got {rollout.cache_gib}, which means {plan.pages} pages of"
            f" {plan.page_size} tokens for {heads} heads per device; allowed: fewer than 2**31 keys"
            " per layer, which int32 counts."
        )


def _whose_mesh(rollout: schema.Rollout) -> str:
    """The field that lays the sampler out."""
    return "config.mesh" if rollout.mesh is None else "config.rollout.mesh"
