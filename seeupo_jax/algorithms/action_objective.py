"""The objective of every action that an update maximises."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from seeupo_jax.algorithms.objectives import Objective
from seeupo_jax.algorithms.surrogate import action_logp, turn_ratio


def action_objective(
    logp_NL: jax.Array,
    old_logp_NL: jax.Array,
    mask_NL: jax.Array,
    advantage_NL: jax.Array,
    cumulative_ratio_N: jax.Array,
    *,
    objective: Objective,
    ratio: str = "geometric",
    clip_low: float | None,
    clip_high: float | None,
    clip_dual: float | None = None,
    importance: jax.Array | None = None,
    clip_scale_NL: jax.Array | None = None,
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
      clip_low, clip_high, clip_dual: as for `clipped_surrogate`.
      importance: multiplies each term; [N], or [N, L] for `token`. None: 1.
      clip_scale_NL: [N, L], of every token, multiplies clip_low and clip_high; where the ratio is
        one number an action, so is this: the mean over its tokens. None: 1.

    Returns:
      float32 [N], and float32 [N], the share of the action whose clipped ratio counted. Terms of
      single tokens are averaged over the action. 0 for an empty mask.
    """
    mask_NL = jnp.asarray(mask_NL, bool).astype(jnp.float32)
    count_N = jnp.maximum(mask_NL.sum(axis=-1), 1)

    def average(x_NL: jax.Array) -> jax.Array:
        return (x_NL * mask_NL).sum(axis=-1) / count_N

    weight = jnp.where(mask_NL > 0, advantage_NL, 0.0) * cumulative_ratio_N[..., None]
    if ratio != "token":
        weight = average(weight)
    weight = jax.lax.stop_gradient(weight)
    arrays = {"weight": weight}
    if "ratio" in objective.needs:
        arrays["ratio"] = turn_ratio(logp_NL, old_logp_NL, mask_NL, level=ratio)
    if "logp" in objective.needs:
        arrays["logp"] = action_logp(logp_NL, mask_NL, level=ratio)
    if clip_scale_NL is not None:
        scale = jnp.where(mask_NL > 0, clip_scale_NL, 1.0)
        scale = scale if ratio == "token" else average(scale)
        clip_low, clip_high = (x if x is None else x * scale for x in (clip_low, clip_high))
    bounds = {"clip_low": clip_low, "clip_high": clip_high, "clip_dual": clip_dual}
    term, clipped = objective.function(
        **{name: arrays[name] for name in objective.needs},
        **{name: bounds[name] for name in objective.bounds},
    )
    if importance is not None:
        term = importance * term
    if ratio == "token":
        term, clipped = average(term), average(clipped)
    empty_N = mask_NL.sum(axis=-1) == 0
    term, clipped = (jnp.where(empty_N, 0.0, x_N) for x_N in (term, clipped))
    return term, jax.lax.stop_gradient(clipped)
