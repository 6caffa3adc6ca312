"""The clipped surrogate of PPO and of SeeUPO."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from seeupo_jax.algorithms.objectives import Objective
from seeupo_jax.algorithms.surrogate import clipped_surrogate


def clipped(
    ratio: jax.Array,
    weight: jax.Array,
    clip_low: float | jax.Array | None,
    clip_high: float | jax.Array | None,
    clip_dual: float | None = None,
) -> tuple[jax.Array, jax.Array]:
    """min(s W, clip(s) W) (arXiv:1707.06347, Eq. 7; SeeUPO's Eq. 6, arXiv:2602.06554).

    Args and the dual clip: as for `clipped_surrogate`.
    """
    bounds = {"clip_low": clip_low, "clip_high": clip_high, "clip_dual": clip_dual}
    term = clipped_surrogate(ratio, weight, **bounds)
    return term, (term != ratio * weight).astype(jnp.float32)


OBJECTIVE = Objective(clipped, ("ratio", "weight"), ("clip_low", "clip_high", "clip_dual"))
