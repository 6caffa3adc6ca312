"""A matrix of a layer: plain, with an adapter, or rounded to 8 bits."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from seeupo_jax.policy.architecture import LoraAdapters
from seeupo_jax.policy.kernels.derivatives import add_bias, matmul
from seeupo_jax.policy.turn_factors import below_each_other, own_activations, side_by_side


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
            stack, axis = ((lora.per_turn,), ("adapters",)) if lora.per_turn else ((), ())
            low = (*stack, shape[0], lora.rank), (*stack, lora.rank, shape[1])
            self.lora_a = nnx.Param(jnp.zeros(low[0]), logical=(*axis, logical[0], "rank"))
            self.lora_b = nnx.Param(jnp.zeros(low[1]), logical=(*axis, "rank", logical[1]))

    def __call__(self, x: jax.Array, adapter_NL: jax.Array | None = None) -> jax.Array:
        """The outputs [N, L, F]; `adapter_NL`: of each token, where adapters are per turn."""
        y = matmul(x, self.kernel[...].astype(x.dtype))
        if self.kernel_scale is not None:
            y = (y * self.kernel_scale[...][None, None, :]).astype(x.dtype)
        if self.lora is not None:
            a, b = self.factors(x.dtype)
            low = self.own(x @ a, adapter_NL)
            more = (low @ b).astype(jnp.float32) * self.lora.scale
            y = y + more.astype(x.dtype)
        return y if self.bias is None else add_bias(y, self.bias[...].astype(x.dtype))

    def factors(self, dtype: Any) -> tuple[jax.Array, jax.Array]:
        """The adapter's two factors, [D, R] and [R, F]; those of all turns' as one."""
        a, b = self.lora_a[...].astype(dtype), self.lora_b[...].astype(dtype)
        return (side_by_side(a), below_each_other(b)) if self.lora.per_turn else (a, b)

    def own(self, low: jax.Array, adapter: jax.Array | None) -> jax.Array:
        """Low-rank activations [..., R], of each token's own adapter where there are several."""
        if not self.lora.per_turn:
            return low
        assert adapter is not None  # `Transformer` says so in a sentence
        return own_activations(low, adapter, self.lora.per_turn)


def quantize(kernel: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Matrices [..., D, F] as int8, and the scales [..., F] of their columns, float32.

    A column's largest magnitude is 127; others are rounded to the nearest.
    """
    largest = jnp.abs(kernel).max(axis=-2).astype(jnp.float32)
    scale = jnp.where(largest > 0, largest / 127, 1.0)
    return jnp.round(kernel / scale[..., None, :]).astype(jnp.int8), scale
