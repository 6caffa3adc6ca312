"""The objective of every action that an update maximises."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from seeupo_jax.algorithms.objectives import BOUNDS, Objective
from seeupo_jax.algorithms.surrogate import action_logp, turn_ratio

Bounds = Mapping[str, float | jax.Array | None]
WholeAction = Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]


def action_objective(
    logp_NL: jax.Array,
    old_logp_NL: jax.Array,
    mask_NL: jax.Array,
    advantage_NL: jax.Array,
    cumulative_ratio_N: jax.Array,
    *,
    objective: Objective,
    ratio: str = "geometric",
    importance_NL: jax.Array | None = None,
    clip_scale_NL: jax.Array | None = None,
    whole: WholeAction | None = None,
    **bounds: float | jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """An action's term of the objective, to maximise, and how much of it is clipped.

    Args:
      logp_NL, old_logp_NL: [N, L], log-probabilities (nats) of the sampled tokens now and under the
        old policy; the gradient flows through the first alone.
      mask_NL: [N, L], nonzero at the action's tokens; nothing outside matters.
      advantage_NL: [N, L], of every token. Where the ratio is one number an action, so is the
        advantage: the mean over its tokens.
      cumulative_ratio_N: [N], of the turns already updated (`update_weight`).
      objective: the entry of its term, of `algorithms/objectives` or a user's own.
      ratio: level of the ratio s and of log pi, as for `turn_ratio`: `geometric` is the mean over
        the tokens of log pi, `product` its sum, `token` a term a token.
      importance_NL: [N, L], of every token, >= 0, multiplies each term and is held constant; where
        the ratio is one number an action, so is this: the mean over its tokens. None: 1.
      clip_scale_NL: [N, L], of every token, multiplies clip_low and clip_high; where the ratio is
        one number an action, so is this: the mean over its tokens. None: 1.
      whole: where these are only some tokens of an action, from both log-probabilities, limited as
        the objective says, to those that have the ratio of all its tokens. None: they are all.
      bounds: fields of `BOUNDS`; those that the objective reads and that are missing are its own
        defaults.

    Returns:
      float32 [N], and float32 [N], the share of the action whose clipped ratio counted. Terms of
      single tokens are averaged over the action. 0 for an empty mask.
    """
    mask_NL = jnp.asarray(mask_NL, bool).astype(jnp.float32)
    single = ratio == "token"
    weight = jnp.where(mask_NL > 0, advantage_NL, 0.0) * cumulative_ratio_N[..., None]
    weight = jax.lax.stop_gradient(weight if single else _mean(weight, mask_NL))
    scale = None
    if clip_scale_NL is not None:
        scale = _of_terms(clip_scale_NL, mask_NL, 1.0, single=single)
    bounds = scaled_bounds(objective, bounds, scale)
    limited_NL = limited_logp(logp_NL, old_logp_NL, mask_NL, weight, objective, bounds)
    logps_NL = (limited_NL, old_logp_NL)
    if whole is not None:
        logps_NL = whole(*logps_NL)
    arrays = {"weight": weight}
    if "ratio" in objective.needs:
        arrays["ratio"] = turn_ratio(*logps_NL, mask_NL, level=ratio)
    if "logp" in objective.needs:
        arrays["logp"] = action_logp(logps_NL[0], mask_NL, level=ratio)
    if "old_logp" in objective.needs:
        arrays["old_logp"] = jax.lax.stop_gradient(action_logp(logps_NL[1], mask_NL, level=ratio))
    term, clipped = objective.function(**{name: arrays[name] for name in objective.needs}, **bounds)
    if objective.limit is not None:
        clipped = _mean((limited_NL != logp_NL).astype(jnp.float32), mask_NL)
    if importance_NL is not None:
        importance = _of_terms(importance_NL, mask_NL, 0.0, single=single)
        term = jax.lax.stop_gradient(importance) * term
    if single:
        term, clipped = _mean(term, mask_NL), _mean(clipped, mask_NL)
    empty_N = mask_NL.sum(axis=-1) == 0
    term, clipped = (jnp.where(empty_N, 0.0, x_N) for x_N in (term, clipped))
    return term, jax.lax.stop_gradient(clipped)


def _of_terms(x_NL: jax.Array, mask_NL: jax.Array, elsewhere: float, *, single: bool) -> jax.Array:
    """Of every token, `elsewhere` outside the mask; not `single`: the mean over an action's."""
    own_NL = jnp.where(mask_NL > 0, x_NL, elsewhere)
    return own_NL if single else _mean(own_NL, mask_NL)


def limited_logp(
    logp_NL: jax.Array,
    old_logp_NL: jax.Array,
    mask_NL: jax.Array,
    weight: jax.Array,
    objective: Objective,
    bounds: Bounds,
) -> jax.Array:
    """Log-probabilities now [N, L] whose ratios to the old ones are limited as an objective says.

    Args:
      weight: M [N], of the whole action. bounds: as of `scaled_bounds`.
    """
    if objective.limit is None:
        return logp_NL
    columns = {
        name: x if x is None or jnp.ndim(x) == 0 else x[..., None] for name, x in bounds.items()
    }
    difference_NL = jnp.where(mask_NL > 0, logp_NL - old_logp_NL, 0.0)
    limited_NL = objective.limit(difference_NL, weight[..., None], **columns)
    # Where nothing is limited, to the bit what was given.
    return jnp.where(limited_NL == difference_NL, logp_NL, old_logp_NL + limited_NL)


def scaled_bounds(
    objective: Objective, bounds: Bounds, scale: jax.Array | None
) -> dict[str, float | jax.Array | None]:
    """The bounds that an objective reads, its clip range times a scale; None: as it is."""
    unknown = {*bounds} - {*BOUNDS}
    if unknown:
        raise TypeError(f"bounds: got {', '.join(sorted(unknown))}; allowed: {', '.join(BOUNDS)}.")
    read = {name: bounds[name] for name in objective.bounds if name in bounds}
    if scale is None:
        return read
    scales = {"clip_low", "clip_high"} & {*read}
    return read | {name: None if (x := read[name]) is None else x * scale for name in scales}


def _mean(x_NL: jax.Array, mask_NL: jax.Array) -> jax.Array:
    return (x_NL * mask_NL).sum(axis=-1) / jnp.maximum(mask_NL.sum(axis=-1), 1)
