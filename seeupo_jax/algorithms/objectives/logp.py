"""The policy gradient itself: REINFORCE and RLOO."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from seeupo_jax.algorithms.objectives import Objective


def weighted_logp(logp: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
    """W log pi (Williams 1992); no ratio, no bound."""
    term = weight * logp
    return term, jnp.zeros_like(term)


OBJECTIVE = Objective(weighted_logp, ("logp", "weight"))
