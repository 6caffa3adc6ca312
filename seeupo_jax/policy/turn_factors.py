"""The factors of adapters per turn (`LoraAdapters.per_turn`), computed as one low-rank product.

K adapters of rank r are one of rank K·r, whose low-rank activations are kept where they belong to
a token's own adapter and are exact zeros elsewhere. So the numbers of the other adapters change no
bit of an output, and their gradients are exact zeros.

Axes beyond the legend in `types.py`: K adapters, R their rank, I inputs, O outputs of a matrix.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def side_by_side(a_KIR: jax.Array) -> jax.Array:
    """The first factors of all adapters as one, [..., I, K·R] of [K, ..., I, R]."""
    a_IKR = jnp.moveaxis(a_KIR, 0, -2)
    return a_IKR.reshape(*a_IKR.shape[:-2], -1)


def below_each_other(b_KRO: jax.Array) -> jax.Array:
    """The second factors of all adapters as one, [..., K·R, O] of [K, ..., R, O]."""
    b_KRO = jnp.moveaxis(b_KRO, 0, -3)
    return b_KRO.reshape(*b_KRO.shape[:-3], -1, b_KRO.shape[-1])


def own_activations(low: jax.Array, adapter: jax.Array, adapters: int) -> jax.Array:
    """Low-rank activations [..., K·R], but 0 where they are not of the token's own adapter.

    Args:
      adapter: int32 [...], of each token; of none of so many `adapters` (padding): all are 0.
    """
    own = jax.nn.one_hot(adapter, adapters, dtype=bool)
    return jnp.where(jnp.repeat(own, low.shape[-1] // adapters, axis=-1), low, 0)
