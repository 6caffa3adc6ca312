"""A fingerprint of arrays that stay on their devices: which parameters are these?"""

from __future__ import annotations

import hashlib
from typing import Any

import jax
import jax.numpy as jnp

_LANES = (0x9E3779B9, 0x85EBCA77)  # any two numbers: a sum of hashes for each


def fingerprint(tree: Any) -> str:
    """Tells pytrees of arrays apart, by every bit of every leaf, its place, dtype and path.

    The devices add up hashes of all elements modulo 2^32, which no order of adding changes: how an
    array is cut over devices and processes makes no difference. Two sums per leaf, 64 bits, come to
    the host; no protection against forgery. Every process that holds parts must call it.

    Returns:
      64 hexadecimal digits.
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    sums = jax.device_get([_sums(leaf) for _, leaf in leaves])
    digest = hashlib.sha256()
    for (path, leaf), own in zip(leaves, sums, strict=True):
        name = jax.tree_util.keystr(path)
        digest.update(repr((name, str(leaf.dtype), leaf.shape, [*map(int, own)])).encode())
    return digest.hexdigest()


@jax.jit
def _sums(x: jax.Array) -> tuple[jax.Array, ...]:
    """The sum of all elements' hashes, once for each lane: uint32."""
    width = 8 * x.dtype.itemsize
    bits = jax.lax.bitcast_convert_type(x, f"uint{min(width, 32)}").astype(jnp.uint32)
    place = jnp.zeros(bits.shape, jnp.uint32)
    for axis in range(bits.ndim):
        place = mix(place + jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis) + jnp.uint32(1))
    hashes = (mix(mix(bits ^ jnp.uint32(lane)) + place) for lane in _LANES)
    return tuple(jnp.sum(each, dtype=jnp.uint32) for each in hashes)


def mix(x: jax.Array) -> jax.Array:
    """A bijection of uint32 in which every bit changes half of the others.

    MurmurHash3's finalizer (Appleby, public domain).
    """
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
