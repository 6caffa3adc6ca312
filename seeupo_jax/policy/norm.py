"""The norm of hidden states, queries, keys and latents."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from seeupo_jax.policy.architecture import Architecture
from seeupo_jax.policy.kernels.derivatives import rms_norm


class Norm(nnx.Module):
    """Root-mean-square norm over the last axis, in float32.

    eps: None: the architecture's.
    """

    def __init__(self, arch: Architecture, size: int, logical: str, eps: float | None = None):
        self.scale = nnx.Param(jnp.full((size,), 1 - arch.norm_offset), logical=(logical,))
        self.eps, self.offset = arch.norm_eps if eps is None else eps, arch.norm_offset

    def __call__(self, x: jax.Array) -> jax.Array:
        return rms_norm(x, self.scale[...], self.eps, self.offset)
