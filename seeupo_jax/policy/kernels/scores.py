"""Scores that models bend: bounded ones, and sinks that take a part of attention's softmax."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def bound(scores: jax.Array, cap: float | None) -> jax.Array:
    """cap · tanh(scores / cap) (Gemma 2, arXiv:2408.00118 §2); without a cap the scores."""
    return scores if cap is None else cap * jnp.tanh(scores / cap)


def unbound_gradient(d_scores: jax.Array, scores: jax.Array, cap: float | None) -> jax.Array:
    """The gradient of what `bound` made these scores of, 0 where they are masked."""
    if cap is None:
        return d_scores
    slope = 1 - jnp.square(scores / cap)
    return d_scores * jnp.maximum(slope, 0)  # of a masked score the square is infinite


def add_sinks(out_NLHd: jax.Array, logsumexp_NLH: jax.Array, sink_H: jax.Array) -> jax.Array:
    """Attention whose softmax has one more score for each head, of a key without a value (gpt-oss).

    Args:
      out_NLHd: attention without it. logsumexp_NLH: float32, of its scores.
    """
    share_NLH = jax.nn.sigmoid(logsumexp_NLH - sink_H.astype(jnp.float32)[None, None, :])
    return (out_NLHd * share_NLH[..., None]).astype(out_NLHd.dtype)
