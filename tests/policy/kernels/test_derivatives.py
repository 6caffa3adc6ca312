"""Derivatives written by hand against those that JAX derives from the plain formulas."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seeupo_jax.planning.program_flops import count
from seeupo_jax.policy.kernels.derivatives import add_bias, look_up, matmul, rms_norm

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


def test_a_look_up_and_its_gradient_are_those_of_the_plain_one():
    table, tokens = normal(7, D), jnp.asarray([[1, 4, 1], [6, 1, 0]])
    by_hand = pullback(lambda table: look_up(table, tokens), table)
    assert_equal_within(by_hand, pullback(lambda table: table[tokens], table), 1e-6)


def test_a_table_that_does_not_train_is_not_added_to():
    table, tokens = normal(7, D), jnp.asarray([[1, 4, 1]])

    def loss(scale, table):
        return jnp.sum(look_up(table, tokens) * scale)

    assert "scatter" not in str(jax.make_jaxpr(jax.grad(loss))(1.0, table))
    assert "scatter" in str(jax.make_jaxpr(jax.grad(loss, argnums=1))(1.0, table))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_bias_and_its_gradient_are_those_of_the_plain_one_summed_in_float32(dtype):
    args = normal(N, 300, F, dtype=dtype), normal(F, dtype=dtype)
    y, d_x, d_bias = pullback(add_bias, *args)
    np.testing.assert_array_equal(np.float32(y), np.float32(args[0] + args[1][None, None, :]))
    d_y = normal(*y.shape, dtype=dtype, seed=7)
    np.testing.assert_array_equal(np.float32(d_x), np.float32(d_y))
    wanted = np.float64(d_y).sum((0, 1))
    assert d_bias.dtype == dtype
    one = float(jnp.finfo(dtype).eps)  # one rounding to the type
    np.testing.assert_allclose(np.float64(d_bias), wanted, rtol=one, atol=1e-4)


def test_sums_of_a_bias_are_of_float32_in_the_program_too():
    """On CPU XLA sums bfloat16 in float32 anyway; on a GPU and a TPU it may not."""
    x, bias = normal(N, L, F, dtype="bfloat16"), normal(F, dtype="bfloat16")

    def loss(bias):
        return jnp.sum(add_bias(x, bias).astype(jnp.float32))

    sums = [
        equation
        for equation in jax.make_jaxpr(jax.grad(loss))(bias).eqns
        if equation.primitive.name == "reduce_sum"
    ]
    assert sums and all(equation.outvars[0].aval.dtype == jnp.float32 for equation in sums)
