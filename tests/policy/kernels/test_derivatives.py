"""Derivatives written by hand against those that JAX derives from the plain formulas."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seeupo_jax.planning.program_flops import count
from seeupo_jax.policy.kernels.derivatives import matmul, rms_norm

N, L, D, F = 2, 5, 6, 4
EPS = 0.1  # large, so that leaving it out shows


def normal(*shape, dtype="float32", seed=0):
    return jnp.asarray(np.random.default_rng([seed, *shape]).normal(size=shape), dtype)


def plain_norm(x, scale):
    y = x.astype(jnp.float32)
    y = y / jnp.sqrt((y * y).mean(axis=-1, keepdims=True) + EPS)
    return (y * scale.reshape((1,) * (x.ndim - 1) + (-1,))).astype(x.dtype)


def pullback(f, *args, seed=7):
    out, back = jax.vjp(f, *args)
    return out, *back(normal(*out.shape, dtype=out.dtype, seed=seed))


def assert_equal_within(actual, expected, tolerance):
    for a, e in zip(actual, expected, strict=True):
        assert a.dtype == e.dtype and a.shape == e.shape
        np.testing.assert_allclose(
            np.float32(a), np.float32(e), rtol=tolerance, atol=tolerance * float(jnp.abs(e).max())
        )


@pytest.mark.parametrize("dtype, tolerance", [("float32", 1e-6), ("bfloat16", 2e-2)])
def test_a_product_and_its_gradients_are_those_of_the_plain_one(dtype, tolerance):
    args = normal(N, L, D, dtype=dtype), normal(D, F, dtype=dtype)
    assert_equal_within(pullback(matmul, *args), pullback(lambda x, w: x @ w, *args), tolerance)


def test_a_weight_that_does_not_train_costs_no_product():
    x, w = normal(N, L, D), normal(D, F)
    product = 2.0 * N * L * D * F

    def loss(x, w):
        return jnp.sum(matmul(x, w) ** 2)

    for what, products in {(0,): 2, (1,): 2, (0, 1): 3}.items():
        traced = jax.make_jaxpr(jax.grad(loss, argnums=what))(x, w)
        assert count(traced).total == products * product


@pytest.mark.parametrize("shape", [(N, L, D), (N, L, 3, D)])
@pytest.mark.parametrize("dtype, tolerance", [("float32", 2e-6), ("bfloat16", 2e-2)])
def test_a_norm_and_its_gradients_are_those_of_the_plain_one(shape, dtype, tolerance):
    args = normal(*shape, dtype=dtype), normal(D, seed=1)
    by_hand = pullback(lambda x, scale: rms_norm(x, scale, EPS), *args)
    assert_equal_within(by_hand, pullback(plain_norm, *args), tolerance)
