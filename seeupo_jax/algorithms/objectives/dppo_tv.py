"""DPPO with a bound on the total variation of a token being sampled or not."""

from __future__ import annotations

import jax

from seeupo_jax.algorithms.divergence import binary_tv, masked_policy_gradient
from seeupo_jax.algorithms.objectives import Objective


def dppo_tv(
    ratio: jax.Array,
    logp: jax.Array,
    old_logp: jax.Array,
    weight: jax.Array,
    clip_low: float | jax.Array | None = None,
    clip_high: float | jax.Array | None = None,
    clip_dual: float | jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """s W log π of tokens, s constant, 0 beyond the trust region (DPPO, arXiv:2602.04879).

    Args and the mask: as for `masked_policy_gradient`, of the divergence `binary_tv`.
    """
    bounds = {"clip_low": clip_low, "clip_high": clip_high, "clip_dual": clip_dual}
    divergence = binary_tv(logp, old_logp)
    return masked_policy_gradient(ratio, logp, old_logp, weight, divergence, **bounds)


OBJECTIVE = Objective(
    dppo_tv,
    ("ratio", "logp", "old_logp", "weight"),
    ("clip_low", "clip_high", "clip_dual"),
    ratios=("token",),
)
