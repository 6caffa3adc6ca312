"""Numbers over a mask are standardised as NumPy's float64 does, at any size."""

import numpy as np
import pytest

from seeupo_jax.algorithms.standardize import standardize


@pytest.mark.parametrize("garbage", [-np.inf, np.nan, 1e30])
def test_no_number_outside_the_mask_is_read(garbage):
    rng = np.random.default_rng(2)
    mask, x = rng.random((6, 9)) < 0.5, rng.normal(size=(6, 9))
    dirty = np.where(mask, x, garbage)
    np.testing.assert_array_equal(standardize(dirty, mask), standardize(x, mask))


def test_numbers_are_standardised_over_the_mask_with_n_minus_one():
    x, mask = np.array([[1.0, 50.0], [2.0, 6.0]]), np.array([[1, 0], [1, 1]])
    std = (26 / 3 - 12 / 3 + 7 / 3) ** 0.5  # squares of -2, -1 and 3: 14 over 2
    np.testing.assert_allclose(
        standardize(x, mask), [[-2 / std, 0], [-1 / std, 3 / std]], rtol=1e-5
    )
    assert standardize(x, mask, clip=1.0)[1, 1] == 1.0
    np.testing.assert_allclose(standardize(x, mask, clip=1.0)[0, 0], -2 / std, rtol=1e-5)


@pytest.mark.parametrize("size", [1e13, 1e30, 3e38])
def test_numbers_whose_squares_float32_cannot_hold_are_standardised(size):
    x = np.float32(size) * np.array([1.0, -1.0, 0.5, 0.0])
    exact = x.astype(np.float64)
    expected = (exact - exact.mean()) / exact.std(ddof=1)
    np.testing.assert_allclose(standardize(x, np.ones(4)), expected, rtol=1e-6)
    assert not standardize(np.full(4, size), np.ones(4)).any()


def test_equal_numbers_are_exactly_zero_and_tiny_spreads_only_centred():
    assert not standardize(np.full(7, 100.1), np.ones(7)).any()
    assert not standardize(np.array([3.0, np.nan]), np.array([1, 0])).any()
    assert not standardize(np.array([3.0, np.nan]), np.zeros(2)).any()
    np.testing.assert_allclose(standardize(np.array([1e-6, 0.0]), np.ones(2)), [5e-7, -5e-7])
    np.testing.assert_allclose(
        standardize(np.array([2e-6, 0.0]), np.ones(2)), [0.5**0.5, -(0.5**0.5)], rtol=1e-5
    )


def test_a_clip_that_is_not_positive_is_named():
    with pytest.raises(ValueError, match="clip: got 0.0; allowed: a number > 0, or None"):
        standardize(np.zeros(2), np.ones(2), clip=0.0)
