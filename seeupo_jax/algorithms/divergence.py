"""The policy gradient within a trust region of divergences: DPPO (arXiv:2602.04879)."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from seeupo_jax.algorithms.objectives import Objective

_EPSILON = 1e-8  # added to the probability of all other tokens, as in the authors' code


def binary_tv(logp: jax.Array, old_logp: jax.Array) -> jax.Array:
    """Total variation of "this token or another" between two policies: |π - π_old|, in [0, 1]."""
    return jnp.abs(jnp.exp(logp) - jnp.exp(old_logp))


def binary_kl(logp: jax.Array, old_logp: jax.Array) -> jax.Array:
    """KL(old || now) of "this token or another", nats; log-probabilities in any one shape."""
    # Not below 0: rounding may leave the log-probability of a certain token above 0.
    rest, old_rest = (jnp.maximum(-jnp.expm1(x), 0.0) for x in (logp, old_logp))
    others = jnp.log((old_rest + _EPSILON) / (rest + _EPSILON))
    return jnp.exp(old_logp) * (old_logp - logp) + old_rest * others


def trust_region(divergence: Callable[[jax.Array, jax.Array], jax.Array]) -> Objective:
    """The objective of DPPO whose region is bounded by this divergence of two log-probabilities."""
    return Objective(
        functools.partial(masked_policy_gradient, divergence),
        ("ratio", "logp", "old_logp", "weight"),
        ("clip_low", "clip_high", "clip_dual"),
        ratios=("token",),
    )


def masked_policy_gradient(
    divergence: Callable[[jax.Array, jax.Array], jax.Array],
    ratio: jax.Array,
    logp: jax.Array,
    old_logp: jax.Array,
    weight: jax.Array,
    clip_low: float | jax.Array | None = None,
    clip_high: float | jax.Array | None = None,
    clip_dual: float | jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """s W log π with s held constant, and 0 where the policy is to move on out of the region.

    Args:
      divergence: of tokens' log-probabilities, now and old. Where W > 0 and the token has become
        likelier it is at most clip_high, where W <= 0 and it has become less likely at most
        clip_low; None: unbounded.
      clip_dual: s counts as at most this; None: unbounded.

    Returns:
      The term and 1.0 where it is 0 for the divergence; each in the shape of the ratio.
    """
    outside, distance = jnp.zeros(jnp.shape(ratio), bool), divergence(logp, old_logp)
    if clip_high is not None:
        outside |= (weight > 0) & (logp > old_logp) & (distance > clip_high)
    if clip_low is not None:
        outside |= (weight <= 0) & (logp < old_logp) & (distance > clip_low)
    bounded = ratio if clip_dual is None else jnp.minimum(ratio, clip_dual)
    factor = jax.lax.stop_gradient(jnp.where(outside, 0.0, bounded))
    return factor * weight * logp, jax.lax.stop_gradient(outside).astype(jnp.float32)
