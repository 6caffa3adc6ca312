"""CISPO: the bounded ratio weighs the log-probability and has no gradient of its own."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from seeupo_jax.algorithms.objectives import Objective


def cispo(
    ratio: jax.Array,
    logp: jax.Array,
    weight: jax.Array,
    clip_low: float | jax.Array | None,
    clip_high: float | jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """clip(s) W log pi with the ratio held constant (arXiv:2506.13585, Eq. 4).

    Args:
      clip_low, clip_high: s counts within [1 - clip_low, 1 + clip_high]; None: unbounded.
    """
    low = None if clip_low is None else 1.0 - clip_low
    high = None if clip_high is None else 1.0 + clip_high
    bounded = jax.lax.stop_gradient(jnp.clip(ratio, low, high))
    return bounded * weight * logp, (bounded != ratio).astype(jnp.float32)


OBJECTIVE = Objective(cispo, ("ratio", "logp", "weight"), ("clip_low", "clip_high"))
