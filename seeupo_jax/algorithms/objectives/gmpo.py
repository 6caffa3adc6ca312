"""GMPO: the geometric mean of the ratios of tokens, each clipped by itself."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from seeupo_jax.algorithms.objectives import Objective


def geometric_surrogate(
    ratio: jax.Array,
    weight: jax.Array,
    clip_low: float | jax.Array | None = None,
    clip_high: float | jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """s W, with s the geometric mean of clipped ratios of tokens (arXiv:2507.20673, Eq. 4).

    The bounds have had their effect in `limit_tokens`.
    """
    term = ratio * weight
    return term, jnp.zeros_like(term)


def limit_tokens(
    difference_NL: jax.Array,
    weight_N1: jax.Array,
    clip_low: float | jax.Array | None = None,
    clip_high: float | jax.Array | None = None,
) -> jax.Array:
    """Log-ratios of tokens, of which none raises the action's term by more than its bound.

    Args:
      difference_NL: [N, L], log s of each token, nats.
      weight_N1: of which the sign counts: where it is above 0 log s is at most clip_high, where it
        is below 0 at least -clip_low. At 0 the term is 0 anyway.
      clip_low, clip_high: >= 0, nats; None: unbounded.

    Returns:
      [N, L]; without a gradient where a bound is exceeded.
    """
    limited_NL = difference_NL
    if clip_high is not None:
        above_NL = (weight_N1 > 0) & (difference_NL > clip_high)
        limited_NL = jnp.where(above_NL, clip_high, limited_NL)
    if clip_low is not None:
        below_NL = (weight_N1 < 0) & (difference_NL < -clip_low)
        limited_NL = jnp.where(below_NL, -clip_low, limited_NL)
    return limited_NL


OBJECTIVE = Objective(
    geometric_surrogate,
    ("ratio", "weight"),
    ("clip_low", "clip_high"),
    limit=limit_tokens,
    ratios=("geometric",),
)
