"""Numbers so large that float32 cannot hold their squares, brought down without rounding."""

from __future__ import annotations

import jax
import jax.numpy as jnp

# Twice this, squared, 2^30 times over still fits into float32, which ends at 2^128.
_LARGEST_EXPONENT = 40


def exact_unit(magnitude: jax.Array) -> jax.Array:
    """A power of two to divide numbers by, so that sums of their squares stay in float32.

    Dividing by it rounds nothing, and by 1, which it is up to a magnitude of 2^40 (1e12), changes
    not a bit: statistics of ordinary numbers are what they are without it.

    Args:
      magnitude: >= 0, any shape, the largest absolute value of what is divided.

    Returns:
      float32, its shape, >= 1: the magnitude over it is at most 2^40.
    """
    _, exponent = jnp.frexp(jnp.asarray(magnitude, jnp.float32))
    return jnp.ldexp(jnp.ones(exponent.shape), jnp.maximum(exponent - _LARGEST_EXPONENT, 0))
