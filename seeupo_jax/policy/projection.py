"""A matrix of a layer: plain, with an adapter, or rounded to 8 bits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from seeupo_jax.policy.architecture import LoraAdapters
from seeupo_jax.policy.kernels.derivatives import add_bias, matmul


class Projection(nnx.Module):
    """A dense layer, plus a low-rank adapter if `lora` is given.

    Normal initialisation scaled by 1/sqrt(fan-in) times `gain`; adapters get their first values in
    `policy/lora.py`. With `int8` the matrix is `kernel` times `kernel_scale`, a number for each
    output, which `quantize` gives.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        logical: tuple[str, str],
        rngs: nnx.Rngs,
        *,
        bias: bool = False,
        gain: float = 1.0,
        lora: LoraAdapters | None = None,
        int8: bool = False,
    ):
        init = jax.random.normal(rngs.params(), shape) * (gain * shape[0] ** -0.5)
        scale = None
        if int8:
            init, scale = quantize(init)
        self.kernel = nnx.Param(init, logical=logical)
        self.kernel_scale = None if scale is None else nnx.Param(scale, logical=logical[1:])
        self.bias = nnx.Param(jnp.zeros(shape[1]), logical=logical[1:]) if bias else None
        self.lora = lora
        if lora is not None:
            low = (shape[0], lora.rank), (lora.rank, shape[1])
            self.lora_a = nnx.Param(jnp.zeros(low[0]), logical=(logical[0], "rank"))
            self.lora_b = nnx.Param(jnp.zeros(low[1]), logical=("rank", logical[1]))

    def __call__(self, x: jax.Array) -> jax.Array:
        y = matmul(x, self.kernel[...].astype(x.dtype))
        if self.kernel_scale is not None:
            y = (y * self.kernel_scale[...][None, None, :]).astype(x.dtype)
        if self.lora is not None:
            low = x @ self.lora_a[...].astype(x.dtype)
            more = (low @ self.lora_b[...].astype(x.dtype)).astype(jnp.float32) * self.lora.scale
            y = y + more.astype(x.dtype)
        return y if self.bias is None else add_bias(y, self.bias[...].astype(x.dtype))


def quantize(kernel: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Matrices [..., D, F] as int8, and the scales [..., F] of their columns, float32.

    A column's largest magnitude is 127; others are rounded to the nearest.
    """
    largest = jnp.abs(kernel).max(axis=-2).astype(jnp.float32)
    scale = jnp.where(largest > 0, largest / 127, 1.0)
    return jnp.round(kernel / scale[..., None, :]).astype(jnp.int8), scale
