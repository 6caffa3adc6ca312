"""The vectors of tokens: a table, and the look-up in it."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from seeupo_jax.parallel.mesh import RULES, axis_parts, constrain, per_shard
from seeupo_jax.policy.architecture import Architecture
from seeupo_jax.policy.kernels.derivatives import look_up

_VOCAB = RULES["vocab"]


def new_table(arch: Architecture, rngs: nnx.Rngs) -> nnx.Param:
    """Token vectors [V, D], of unit expected norm."""
    init = jax.random.normal(rngs.params(), (arch.vocab_size, arch.width)) * arch.width**-0.5
    return nnx.Param(init, logical=("vocab", "embed"))


def embed(table_VD: jax.Array, tokens_NL: jax.Array, scale: float = 1.0) -> jax.Array:
    """The tokens' vectors, times a scale, [N, L, D].

    Every device looks up its own tokens, and sums their gradients in float32, in its own part of
    the vocabulary; devices' sums are added in the type of the table.
    """
    # Replicated lengths: a program's inputs must be sharded evenly, and lengths may not divide.
    tokens_NL = constrain(tokens_NL, "rows", None)
    local = functools.partial(_look_up, cut=axis_parts("vocab") > 1)
    inputs, vectors = [("vocab", "embed"), ("rows", "length")], ("rows", "length", "embed")
    x = constrain(per_shard(local, inputs, vectors)(table_VD, tokens_NL), *vectors)
    return x if scale == 1 else x * jnp.asarray(scale, x.dtype)


def _look_up(table_VD: jax.Array, tokens_NL: jax.Array, *, cut: bool) -> jax.Array:
    """`embed` on one device. cut: other devices have the rest of the vocabulary."""
    if not cut:
        return look_up(table_VD, tokens_NL)
    V = table_VD.shape[0]
    index_NL = tokens_NL - jax.lax.axis_index(_VOCAB) * V
    own_NL = (index_NL >= 0) & (index_NL < V)
    x = look_up(table_VD, jnp.clip(index_NL, 0, V - 1))
    return jax.lax.psum(jnp.where(own_NL[:, :, None], x, 0), _VOCAB)
