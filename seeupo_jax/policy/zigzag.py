"""How rows are dealt to the devices that share them, so that all have as many keys to attend to.

Of contiguous parts of a causal row, the last of c devices would see (2c - 1) / c times the average.
Of 2c chunks the i-th device gets chunks i and 2c - 1 - i instead.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from seeupo_jax.parallel.mesh import RULES, axis_parts, per_shard

LENGTH = RULES["length"]


def zigzag_devices(length: int) -> int:
    """How many devices rows of a length are dealt to; 1: all is left in order."""
    devices = axis_parts("length")
    return devices if length % (2 * devices) == 0 else 1


def to_zigzag(x_NL: jax.Array, devices: int) -> jax.Array:
    """[N, L, ...], which every device has, in the order of what they get."""
    if devices == 1:
        return x_NL
    N, L, *rest = x_NL.shape
    first, last = jnp.unstack(x_NL.reshape(N, 2, devices, -1, *rest), axis=1)
    return jnp.stack([first, jnp.flip(last, 1)], 2).reshape(N, L, *rest)


def from_zigzag(x_NL: jax.Array, devices: int) -> jax.Array:
    """The inverse of `to_zigzag`."""
    N, L, *rest = x_NL.shape
    first, last = jnp.unstack(x_NL.reshape(N, devices, 2, -1, *rest), axis=2)
    return jnp.stack([first, jnp.flip(last, 1)], 1).reshape(N, L, *rest)


def gather_in_order(x_NL: jax.Array, devices: int, *logical: str | None) -> jax.Array:
    """[N, L, ...] of dealt rows back in order: each device then has a contiguous part.

    devices: more than one. logical: names of the axes behind the length, as of `constrain`.
    """

    def local_part(part_NL: jax.Array) -> jax.Array:
        whole_NL = from_zigzag(jax.lax.all_gather(part_NL, LENGTH, axis=1, tiled=True), devices)
        size = part_NL.shape[1]
        return jax.lax.dynamic_slice_in_dim(whole_NL, jax.lax.axis_index(LENGTH) * size, size, 1)

    axes = ("rows", "length", *logical)
    return per_shard(local_part, [axes], axes)(x_NL)
