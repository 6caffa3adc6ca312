"""Pairs of float32 against exact fractions."""

from fractions import Fraction
from functools import partial

import jax
import numpy as np
import pytest

from seeupo_jax.algorithms.double_float import DoubleFloat, add, multiply

ROUNDING = 2.0**-45
FACTORS = (0.9, 0.95, 1 / 3, 0.1, 1e-3, 1 - 1e-9, 1.0, 0.0)


def drawn(seed):
    """Numbers of 48 bits, of either sign and of other sizes."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=200) * 10.0 ** rng.integers(-4, 5, 200)
    return DoubleFloat(np.float32(x), np.float32(x - np.float32(x)))


def exactly(x):
    return [Fraction(float(hi)) + Fraction(float(lo)) for hi, lo in zip(x.hi, x.lo, strict=True)]


def test_sums_are_right_to_45_bits_of_their_terms():
    x, y = drawn(0), drawn(1)
    result = jax.jit(add)(x, y)
    np.testing.assert_array_equal(result.hi, result.hi + result.lo)
    for got, one, other in zip(exactly(result), exactly(x), exactly(y), strict=True):
        assert abs(got - (one + other)) <= ROUNDING * (abs(one) + abs(other))


def test_a_sum_keeps_what_float32_would_lose():
    large, small = (DoubleFloat(np.float32(x), np.float32(0)) for x in (1e6, 1e-4))
    total = jax.jit(add)(large, small)
    assert exactly(jax.tree.map(np.atleast_1d, total)) == [
        10**6 + Fraction(float(np.float32(1e-4)))
    ]


@pytest.mark.parametrize("factor", FACTORS)
def test_products_are_right_to_45_bits_of_a_factor_of_float64(factor):
    x = drawn(2)
    result = jax.jit(partial(multiply, factor=factor))(x)
    np.testing.assert_array_equal(result.hi, result.hi + result.lo)
    for got, one in zip(exactly(result), exactly(x), strict=True):
        assert abs(got - one * Fraction(factor)) <= ROUNDING * abs(one * Fraction(factor))
