"""Functions whose derivatives are written by hand, since XLA runs those that JAX derives slowly.

On CPU, that is; elsewhere the same products and sums are computed in either case.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.custom_derivatives import CustomVJPPrimal

FUSED = "fused attention"  # the name of results that a tree kernel keeps for its derivative
RECOMPUTE = "again"  # the scope of operations that a backward pass recomputes


@jax.custom_vjp
def matmul(x_NLD: jax.Array, w_DF: jax.Array) -> jax.Array:
    """x @ w, [N, L, F].

    JAX would derive the weight's gradient as [F, D] and turn it around, for which XLA's CPU code
    copies an operand and multiplies in an order of axes that is a third slower.
    """
    return x_NLD @ w_DF


def _matmul_forward(
    x_NLD: CustomVJPPrimal, w_DF: CustomVJPPrimal
) -> tuple[jax.Array, tuple[jax.Array | None, jax.Array | None]]:
    # A frozen weight (one with an adapter) has no gradient, and nothing is kept for it.
    residuals = x_NLD.value if w_DF.perturbed else None, w_DF.value if x_NLD.perturbed else None
    return x_NLD.value @ w_DF.value, residuals


def _matmul_backward(
    residuals: tuple[jax.Array | None, jax.Array | None], dy_NLF: jax.Array
) -> tuple[jax.Array | None, jax.Array | None]:
    x_NLD, w_DF = residuals

    def dot(a: jax.Array, b: jax.Array, axes: tuple) -> jax.Array:
        return jax.lax.dot_general(a, b, (axes, ((), ())))

    dx_NLD = None if w_DF is None else dot(dy_NLF, w_DF, ((2,), (1,)))
    dw_DF = None if x_NLD is None else dot(x_NLD, dy_NLF, ((0, 1), (0, 1)))
    return dx_NLD, dw_DF


matmul.defvjp(_matmul_forward, _matmul_backward, symbolic_zeros=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def rms_norm(x: jax.Array, scale: jax.Array, eps: float, offset: float = 0.0) -> jax.Array:
    """x / sqrt(mean(x²) + eps) * (scale + offset) over the last axis, in float32.

    Returns: in the dtype of x.
    """
    return _rms_norm_forward(x, scale, eps, offset)[0]


def _full_scale(scale: jax.Array, offset: float, x: jax.Array) -> jax.Array:
    return _last(scale.astype(jnp.float32) + offset if offset else scale, x)


def _rms_norm_forward(
    x: jax.Array, scale: jax.Array, eps: float, offset: float
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
    y = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    return (y * inverse * _full_scale(scale, offset, x)).astype(x.dtype), (x, scale, inverse)


def _rms_norm_backward(
    eps: float, offset: float, residuals: tuple[jax.Array, jax.Array, jax.Array], dy: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, scale, inverse = residuals
    dy, unit = dy.astype(jnp.float32), x.astype(jnp.float32) * inverse
    d_unit = dy * _full_scale(scale, offset, x)
    dx = inverse * (d_unit - unit * jnp.mean(d_unit * unit, axis=-1, keepdims=True))
    d_scale = jnp.sum(dy * unit, axis=tuple(range(x.ndim - 1)))
    return dx.astype(x.dtype), d_scale.astype(scale.dtype)


rms_norm.defvjp(_rms_norm_forward, _rms_norm_backward)


@jax.custom_vjp
def look_up(table_VD: jax.Array, tokens_NL: jax.Array) -> jax.Array:
    """Vectors of tokens, [N, L, D].

    Their gradients are summed in float32: in bfloat16, in which JAX would sum them, a token that
    occurs 16,384 times got 0.07 of what it should, since small numbers added to a large one vanish.
    """
    return table_VD[tokens_NL]


def _look_up_forward(
    table_VD: CustomVJPPrimal, tokens_NL: CustomVJPPrimal
) -> tuple[jax.Array, tuple[jax.Array | None, jax.Array]]:
    # A frozen table (of a policy with adapters) has no gradient.
    like_VD = table_VD.value if table_VD.perturbed else None
    return table_VD.value[tokens_NL.value], (like_VD, tokens_NL.value)


def _look_up_backward(
    residuals: tuple[jax.Array | None, jax.Array], d_NLD: jax.Array
) -> tuple[jax.Array | None, None]:
    like_VD, tokens_NL = residuals
    if like_VD is None:
        return None, None
    zeros_VD = jnp.zeros(like_VD.shape, jnp.float32)
    return zeros_VD.at[tokens_NL].add(d_NLD.astype(jnp.float32)).astype(like_VD.dtype), None


look_up.defvjp(_look_up_forward, _look_up_backward, symbolic_zeros=True)


@jax.custom_vjp
def add_bias(x_NLF: jax.Array, bias_F: jax.Array) -> jax.Array:
    """x + bias, [N, L, F]; the bias's gradient is summed in float32, as that of `look_up`."""
    return x_NLF + bias_F[None, None, :]


def _add_bias_forward(x_NLF: jax.Array, bias_F: jax.Array) -> tuple[jax.Array, None]:
    return add_bias(x_NLF, bias_F), None


def _add_bias_backward(_: None, d_NLF: jax.Array) -> tuple[jax.Array, jax.Array]:
    return d_NLF, jnp.sum(d_NLF, axis=(0, 1), dtype=jnp.float32).astype(d_NLF.dtype)


add_bias.defvjp(_add_bias_forward, _add_bias_backward)


def _last(scale: jax.Array, x: jax.Array) -> jax.Array:
    return scale.reshape((1,) * (x.ndim - 1) + (-1,))


def dot(x: jax.Array, y: jax.Array) -> jax.Array:
    """x @ y of two blocks in a kernel, summed in float32."""
    return jnp.dot(x, y, preferred_element_type=jnp.float32)


def dot_t(x: jax.Array, y: jax.Array) -> jax.Array:
    """x @ y.T, as `dot`."""
    axes = (((1,), (1,)), ((), ()))
    return jax.lax.dot_general(x, y, axes, preferred_element_type=jnp.float32)
