"""The policy on other devices of the same process."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import NamedSharding

from seeupo_jax.parallel.mesh import sharding
from seeupo_jax.policy.network import Network
from seeupo_jax.rollout.weights.published_arrays import published_dtype

Shape = tuple[int, ...]
Spans = tuple[tuple[int, int], ...]  # first and last index along each axis


class DeviceCopy(NamedTuple):
    """Parameters on a sampler's mesh. bytes: of the arrays. seconds: that it took to copy them."""

    params: Any
    bytes: int
    seconds: float


def copy_to(
    params: Any, network: Network, mesh: jax.sharding.Mesh, *, int8: bool = False
) -> DeviceCopy:
    """Copies parameters to a sampler's devices, in the types that `publish` sends them in.

    Devices send them to devices, one array after another, and nothing goes by the host. The copy
    shares no memory with `params`, and all of it is there when this returns: they may be donated.

    Args:
      params: the policy's, or a part of them, on the trainer's mesh. All devices are this
        process's.
      network: as the trainer has it.
      mesh: the sampler's. int8: whether it rounds matrices to 8 bits.
    """
    began, axes, copied = time.monotonic(), flatten_dict(network.logical_axes()), {}
    for path, x in flatten_dict(params).items():
        x = _convert(x, published_dtype(network, path, x, int8=int8))
        copied[path] = jax.block_until_ready(_send(x, sharding(mesh, axes[path])))
    size = sum(x.nbytes for x in copied.values())
    return DeviceCopy(unflatten_dict(copied), size, time.monotonic() - began)


def _send(x: jax.Array, where: NamedSharding) -> jax.Array:
    """A copy elsewhere; `jax.device_put` would go by the host unless all parts are cut alike."""
    pieces, whole = _pieces(x), tuple((0, size) for size in x.shape)
    placed = where.devices_indices_map(x.shape)
    wanted = {device: _spans(index, x.shape) for device, index in placed.items()}
    if whole not in pieces and not set(wanted.values()) <= pieces.keys():
        pieces = _pieces(_gathered(x))
    parts = []
    for number, (device, spans) in enumerate(wanted.items()):
        there = pieces[spans if spans in pieces else whole]
        part = there[number % len(there)]  # other devices send to others
        part = part if spans in pieces else _cut(part, spans)
        parts.append(jax.device_put(part, device, may_alias=False))
    return jax.make_array_from_single_device_arrays(x.shape, where, parts)


def _pieces(x: jax.Array) -> dict[Spans, list[jax.Array]]:
    """The parts that an array is cut into, and each device's own."""
    pieces: dict[Spans, list[jax.Array]] = {}
    for shard in x.addressable_shards:
        pieces.setdefault(_spans(shard.index, x.shape), []).append(shard.data)
    return pieces


def _spans(index: tuple[slice, ...], shape: Shape) -> Spans:
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def _gathered(x: jax.Array) -> jax.Array:
    """An array, whole on each of its devices."""
    return _gather(sharding(x.sharding.mesh, (None,) * x.ndim))(x)


@functools.cache
def _gather(where: NamedSharding) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(lambda x: x, out_shardings=where)


def _cut(x: jax.Array, spans: Spans) -> jax.Array:
    first = [start for start, _ in spans]
    return _slice(x, first, tuple(stop - start for start, stop in spans))


@functools.partial(jax.jit, static_argnames="sizes")
def _slice(x: jax.Array, first: Sequence[int], sizes: Shape) -> jax.Array:
    return jax.lax.dynamic_slice(x, first, sizes)


@functools.partial(jax.jit, static_argnames="dtype")
def _convert(x: jax.Array, dtype: np.dtype) -> jax.Array:
    return x.astype(dtype)
