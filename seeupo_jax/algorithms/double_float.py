"""Sums and multiples to 46 bits, as pairs of float32: float64 is not to be had on accelerators."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

_HALF = 12  # bits: products of two numbers of so many are exact in float32, with or without FMA
_UPPER_HALF = -(1 << _HALF)  # of the 24 bits of a float32, as a mask


class DoubleFloat(NamedTuple):
    """A number hi + lo, of which hi is the nearest float32."""

    hi: jax.Array
    lo: jax.Array


def add(x: DoubleFloat, y: DoubleFloat) -> DoubleFloat:
    """The sum of two numbers."""
    total = _exact_sum(x.hi, y.hi)
    return _exact_sum(total.hi, total.lo + (x.lo + y.lo))


def multiply(x: DoubleFloat, factor: float) -> DoubleFloat:
    """The product with a number that is known to float64."""
    first, second, third = _thirds(factor)
    bits = jax.lax.bitcast_convert_type(x.hi, jnp.int32) & _UPPER_HALF
    upper = jax.lax.bitcast_convert_type(bits, jnp.float32)
    lower = x.hi - upper
    large = _exact_sum(upper * first, lower * first)
    product = add(large, _exact_sum(upper * second, lower * second))
    return _exact_sum(product.hi, product.lo + (x.hi * third + x.lo * (first + second)))


def select(condition: jax.Array, x: DoubleFloat, y: DoubleFloat) -> DoubleFloat:
    """`jnp.where` of both parts."""
    return DoubleFloat(jnp.where(condition, x.hi, y.hi), jnp.where(condition, x.lo, y.lo))


def _exact_sum(x: jax.Array, y: jax.Array) -> DoubleFloat:
    """The sum and what rounding takes from it (Knuth, TAOCP vol. 2, 4.2.2, theorem B)."""
    total = x + y
    of_y = total - x
    return DoubleFloat(total, (x - (total - of_y)) + (y - of_y))


def _thirds(factor: float) -> tuple[float, float, float]:
    """Numbers of 12, 12 and 24 bits that add up to 48 bits of a number."""
    parts = []
    for _ in range(2):
        _, exponent = math.frexp(factor)
        unit = math.ldexp(1.0, exponent - _HALF)
        parts.append(math.trunc(factor / unit) * unit)
        factor -= parts[-1]
    return parts[0], parts[1], factor
