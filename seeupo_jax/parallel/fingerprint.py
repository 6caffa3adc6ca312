"""A fingerprint of arrays that stay on their devices: which parameters are these?"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_LANES = (0x9E3779B9, 0x85EBCA77)  # any two numbers: a sum of hashes for each
_FEW = 2**20  # elements, of which NumPy adds up the hashes in 20 ms


def fingerprint(tree: Any) -> str:
    """Distinguishes pytrees of arrays by every bit of every leaf, its place, dtype and path.

    The devices add up hashes of all elements modulo 2^32, which no order of adding changes: how an
    array is cut over devices and processes makes no difference. Two sums per leaf, 64 bits, come to
    the host; no protection against forgery. Every process that holds parts must call it.

    Returns:
      64 hexadecimal digits.
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    # One by one: devices of a CPU wait for each other for ever with 32 sums over them under way.
    sums = [jax.device_get(_sums_of(leaf)) for _, leaf in leaves]
    digest = hashlib.sha256()
    for (path, leaf), leaf_sums in zip(leaves, sums, strict=True):
        name = jax.tree_util.keystr(path)
        digest.update(repr((name, str(leaf.dtype), leaf.shape, [*map(int, leaf_sums)])).encode())
    return digest.hexdigest()


def _sums_of(x: jax.Array) -> Sequence[Any]:
    """Checksums, by NumPy where that is quicker than to compile a program for a shape."""
    on_host = x.is_fully_addressable and all(d.platform == "cpu" for d in x.devices())
    return host_sums(np.asarray(x)) if on_host and x.size <= _FEW else device_sums(x)


def host_sums(x: np.ndarray) -> Sequence[np.uint32]:
    """As `device_sums`, computed by NumPy on the host."""
    # With an axis more, since NumPy warns of what overflows in scalars.
    bits = np.array(x, order="C")[..., None].view(f"uint{min(_width(x), 32)}")
    return _sums(bits.astype(np.uint32), x.ndim + (_width(x) > 32), np)


@jax.jit
def device_sums(x: jax.Array) -> Sequence[jax.Array]:
    """The sum of all elements' hashes, once for each lane: uint32."""
    bits = jax.lax.bitcast_convert_type(x, f"uint{min(_width(x), 32)}").astype(jnp.uint32)
    return _sums(bits, bits.ndim, jnp)


def _width(x: Any) -> int:
    """Bits of an element."""
    return 8 * x.dtype.itemsize


def _sums(bits: Any, axes: int, xp: Any) -> Sequence[Any]:
    """See `device_sums`.

    Args:
      axes: how many of the first ones tell where an element stands.
      xp: numpy or jax.numpy.
    """
    place = xp.zeros(bits.shape, np.uint32)
    for axis in range(axes):
        along = [-1 if other == axis else 1 for other in range(bits.ndim)]
        index = xp.arange(1, bits.shape[axis] + 1, dtype=np.uint32).reshape(along)
        place = mix(place + index)
    hashes = (mix(mix(bits ^ np.uint32(lane)) + place) for lane in _LANES)
    return tuple(xp.sum(each, dtype=np.uint32) for each in hashes)


def mix(x: Any) -> Any:
    """A bijection of uint32 in which every bit changes half of the others.

    MurmurHash3's finalizer (Appleby, public domain).
    """
    x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
