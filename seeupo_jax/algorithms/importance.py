"""Importance weights of tokens whose sampler is not the policy that ratios are clipped against."""

from __future__ import annotations

import jax
import jax.numpy as jnp

# float32 ends at exp(88.7).
_MAX_LOG_RATIO = 80.0


def importance_weights(
    logp_X: jax.Array,
    sampler_logp_X: jax.Array,
    unit_X: jax.Array,
    *,
    units: int,
    method: str,
    level: str,
    clip: float | jax.Array,
    low: float | jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The weight of each token by its unit's quotient rho = pi / pi_sampler.

    `truncate`: min(rho, clip), truncated importance sampling (Ionides 2008; of single tokens TIS,
    Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training").
    `mask`: rho within [low, clip], else rejected (of single tokens IcePop, arXiv:2510.18855; of
    sequences masked importance sampling, Liu et al. 2025, "When Speed Kills Stability").
    `reject`: 1 within [low, clip], else rejected (rejection of sequences; with `geometric` the
    length of a sequence does not matter).

    Args:
      logp_X: [X], log-probabilities (nats) under the policy that ratios are clipped against.
      sampler_logp_X: [X], those that the sampler recorded. One with top-k or top-p records those of
        the subset, so the weight makes up for that too, though not for tokens never drawn.
      unit_X: int [X], the unit of each token; `units` or more: none, as of padding.
      units: U, of which some may have no token.
      method: `truncate`, `mask` or `reject`.
      level: of a unit's quotient: `sequence`, exp of the sum over its tokens of the difference;
        `geometric`, exp of its mean.
      clip: > 0, the largest weight or accepted quotient.
      low: the smallest accepted quotient, or None: 0.

    Returns:
      float32 [X], weights in [0, clip], 0 of rejected tokens and 1 of padding; bool [X], which are
      learned from; float32 [U], the quotient of each unit, in [0, e^80], 1 of one without a token.
      A quotient of NaN is not rejected. No gradient flows through them.

    Raises:
      ValueError: an unknown method or level.
    """
    _check("method", method, ("truncate", "mask", "reject"))
    _check("level", level, ("sequence", "geometric"))
    unit_X = jnp.asarray(unit_X)
    real_X = unit_X < units
    difference_X = jnp.asarray(logp_X, jnp.float32) - jnp.asarray(sampler_logp_X, jnp.float32)
    difference_X = jnp.where(real_X, difference_X, 0.0)
    difference_U = jax.ops.segment_sum(difference_X, unit_X, units)
    if level == "geometric":
        count_U = jax.ops.segment_sum(real_X.astype(jnp.float32), unit_X, units)
        difference_U /= jnp.maximum(count_U, 1)
    quotient_U = jnp.exp(jnp.minimum(difference_U, _MAX_LOG_RATIO))
    quotient_X = jnp.where(real_X, quotient_U[jnp.minimum(unit_X, units - 1)], 1.0)
    if method == "truncate":
        kept_X, weight_X = jnp.ones_like(real_X), jnp.minimum(quotient_X, clip)
    else:
        # Not the opposite comparisons: they would reject NaN, whose step is to be skipped.
        kept_X = ~((quotient_X > clip) | (quotient_X < (0.0 if low is None else low)))
        weight_X = jnp.where(kept_X, quotient_X if method == "mask" else 1.0, 0.0)
    weight_X, kept_X = jnp.where(real_X, weight_X, 1.0), kept_X | ~real_X
    return jax.lax.stop_gradient((weight_X, kept_X, quotient_U))


def _check(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}: got {value!r}; allowed: {', '.join(allowed)}.")
