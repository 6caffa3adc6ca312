"""SAPO: a sigmoid of the ratio instead of a clip range."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from seeupo_jax.algorithms.objectives import Objective


def sapo(
    ratio: jax.Array,
    weight: jax.Array,
    tau_pos: float | jax.Array = 1.0,
    tau_neg: float | jax.Array = 1.05,
) -> tuple[jax.Array, jax.Array]:
    """(4 / tau) sigmoid(tau (s - 1)) W (Soft Adaptive Policy Optimization, arXiv:2511.20347).

    Its derivative by s is W at s = 1 and falls to 0 on both sides, the faster the larger tau is.

    Args:
      tau_pos, tau_neg: > 0; tau where W > 0, and elsewhere.
    """
    tau = jnp.where(weight > 0, jnp.float32(tau_pos), jnp.float32(tau_neg))
    term = 4.0 / tau * jax.nn.sigmoid(tau * (ratio - 1.0)) * weight
    return term, jnp.zeros_like(term)


OBJECTIVE = Objective(sapo, ("ratio", "weight"), ("tau_pos", "tau_neg"))
