"""What the tests of rollouts share."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def stir(params: Any, seed: int = 0) -> Any:
    """Parameters moved at random, so that every part of the network matters."""
    rng = np.random.default_rng(seed)

    def move(leaf: jax.Array) -> jax.Array:
        scale = 0.2 if leaf.ndim == 1 else leaf.shape[-1] ** -0.5
        return leaf + jnp.asarray(scale * rng.normal(size=leaf.shape), leaf.dtype)

    return jax.tree.map(move, params)
