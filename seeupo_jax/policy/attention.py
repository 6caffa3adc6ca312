"""Causal attention over keys that lie in the same pass, in a cache, or in both."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

NOWHERE = jnp.iinfo(jnp.int32).max  # the position of a key that no query may see


class KeyValues(NamedTuple):
    """Keys and values of one layer.

    k, v: [N, C, kv_heads, head_dim].
    """

    k: jax.Array
    v: jax.Array


def rotate(x_NLHd: jax.Array, position_NL: jax.Array, theta: float) -> jax.Array:
    """Rotary position embedding (Su et al., arXiv:2104.09864), halves rotated as in Llama."""
    half = x_NLHd.shape[-1] // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = position_NL[:, :, None, None].astype(jnp.float32) * frequency[None, None, None, :]
    cos, sin = jnp.cos(angle).astype(x_NLHd.dtype), jnp.sin(angle).astype(x_NLHd.dtype)
    first, second = jnp.split(x_NLHd, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def attend(
    q_NLHd: jax.Array, keys: KeyValues, position_NL: jax.Array, key_position_NC: jax.Array
) -> jax.Array:
    """Softmax attention; a query sees the keys at its own position and before.

    Heads are grouped over the key-value heads (GQA). Scores and softmax are float32.
    Returns [N, L, H, head_dim] in the dtype of q.
    """
    N, L, H, d = q_NLHd.shape
    kv_heads = keys.k.shape[2]
    groups = H // kv_heads
    # Heads before positions: plain batched matrix products, 3x faster on CPU than one einsum.
    q = q_NLHd.reshape(N, L, kv_heads, groups, d).transpose(0, 2, 3, 1, 4)
    q = q.reshape(N, kv_heads, groups * L, d)
    k, v = keys.k.transpose(0, 2, 1, 3), keys.v.transpose(0, 2, 1, 3)
    scores = jnp.einsum("nkqd,nkcd->nkqc", q, k, preferred_element_type=jnp.float32) * d**-0.5
    visible_NLC = key_position_NC[:, None, :] <= position_NL[:, :, None]
    scores = jnp.where(
        visible_NLC[:, None, None], scores.reshape(N, kv_heads, groups, L, -1), -1e30
    )
    weights = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
    out = jnp.einsum("nkqc,nkcd->nkqd", weights.reshape(N, kv_heads, groups * L, -1), v)
    out = out.reshape(N, kv_heads, groups, L, d).transpose(0, 3, 1, 2, 4)
    return out.reshape(N, L, H, d)


def write(cache: KeyValues, new: KeyValues, position_NL: jax.Array) -> KeyValues:
    """Puts keys and values at the slots of their positions; beyond the cache they are dropped."""
    rows = jnp.arange(position_NL.shape[0])[:, None]
    put = lambda old, x: old.at[rows, position_NL].set(x.astype(old.dtype), mode="drop")  # noqa: E731
    return KeyValues(put(cache.k, new.k), put(cache.v, new.v))


def join(past: KeyValues, new: KeyValues) -> KeyValues:
    """Past keys and values followed by new ones."""
    return KeyValues(*(jnp.concatenate(pair, axis=1) for pair in zip(past, new, strict=True)))
