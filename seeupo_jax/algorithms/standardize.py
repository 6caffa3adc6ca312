"""Numbers over a mask, and their standardisation."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

# Twice this, squared, 2^30 times over still fits into float32, which ends at 2^128.
_LARGEST_EXPONENT = 40
FLAT = 1e-6  # numbers whose standard deviation is at most this are not divided by it


@functools.partial(jax.jit, static_argnames=("clip",))
def standardize(x: jax.Array, mask: jax.Array, *, clip: float | None = None) -> jax.Array:
    """Numbers less their mean, over their standard deviation (n - 1) unless that is at most 1e-6.

    Args:
      x: any shape.
      mask: the shape of `x`, nonzero at the numbers that there are; others may be NaN.
      clip: bound > 0 on the magnitude of the result; None: no bound.

    Returns:
      float32, the shape of `x`, in standard deviations, also where squares of the numbers lie
      beyond float32; exactly 0 where all are equal and outside the mask.

    Raises:
      ValueError: a clip that is not > 0.
    """
    if clip is not None and not clip > 0:
        raise ValueError(f"clip: got {clip!r}; allowed: a number > 0, or None.")
    mask = jnp.asarray(mask, bool)
    count = mask.sum()
    x = masked(x, mask)
    unit = exact_unit(jnp.max(jnp.abs(x), initial=0.0))
    x = x / unit
    # Above the least one first: the float32 mean of equal numbers is not always that number.
    x = masked(x - jnp.min(jnp.where(mask, x, jnp.inf)), mask)
    x = masked(x - x.sum() / jnp.maximum(count, 1), mask)
    std = jnp.sqrt((x**2).sum() / jnp.maximum(count - 1, 1))
    x = x / jnp.where(std > FLAT / unit, std, 1.0 / unit)
    return x if clip is None else jnp.clip(x, -clip, clip)


def masked(x: jax.Array, mask: jax.Array) -> jax.Array:
    """`x` in float32, 0 outside the mask."""
    return jnp.where(mask, jnp.asarray(x, jnp.float32), 0.0)


def exact_unit(magnitude: jax.Array) -> jax.Array:
    """A power of two to divide numbers by, which rounds none: sums of squares stay in float32.

    Args:
      magnitude: >= 0, any shape, the largest absolute value of what is divided.

    Returns:
      float32, its shape, >= 1: the magnitude over it is at most 2^40; 1 for those that are.
    """
    _, exponent = jnp.frexp(jnp.asarray(magnitude, jnp.float32))
    return jnp.ldexp(jnp.ones(exponent.shape), jnp.maximum(exponent - _LARGEST_EXPONENT, 0))
