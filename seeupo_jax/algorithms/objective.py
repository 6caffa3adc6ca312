"""What an update maximises of every action, out of the named choices."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from seeupo_jax.algorithms.surrogate import action_logp, clipped_surrogate, turn_ratio


class _Clips(NamedTuple):
    """Bounds of the ratio, and of the term where its weight is negative; None: there is none."""

    low: float | None
    high: float | None
    dual: float | None


def action_objective(
    logp_NL: jax.Array,
    old_logp_NL: jax.Array,
    mask_NL: jax.Array,
    advantage_NL: jax.Array,
    factor_N: jax.Array,
    *,
    objective: str = "clipped",
    ratio: str = "geometric",
    clip_low: float | None,
    clip_high: float | None,
    clip_dual: float | None = None,
    importance: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """An action's term of the objective, to maximise, and how much of it is clipped.

    Args:
      logp_NL, old_logp_NL: [N, L], log-probabilities (nats) of the sampled tokens now and under the
        old policy; the gradient flows through the first alone.
      mask_NL: [N, L], nonzero at the action's tokens; nothing outside matters.
      advantage_NL: [N, L], of every token. Where the ratio is one number an action, so is the
        advantage: the mean over its tokens.
      factor_N: [N], what the turns already updated multiply it by (`update_weight`).
      objective: `clipped`, min(s W, clip(s) W) (PPO, SeeUPO's Eq. 6); `cispo`, clip(s) W log pi
        with the ratio held constant (arXiv:2506.13585, Eq. 4); `logp`, W log pi (REINFORCE).
      ratio: level of the ratio s and of log pi, as for `turn_ratio`: `geometric` is the mean over
        the tokens of log pi, `product` its sum, `token` a term a token.
      clip_low, clip_high: s counts within [1 - clip_low, 1 + clip_high]; None: unbounded.
      clip_dual: > 1, of objective `clipped` alone: where W < 0 its term is at least clip_dual W,
        as `clipped_surrogate` says. None: unbounded.
      importance: multiplies each term; [N], or [N, L] for `token`. None: 1.

    Returns:
      float32 [N], and float32 [N], the share of the action whose clipped ratio counted. Terms of
      single tokens are averaged over the action. 0 for an empty mask.

    Raises:
      ValueError: an unknown objective or level.
    """
    if objective not in _OBJECTIVES:
        raise ValueError(f"objective: got {objective!r}; allowed: {', '.join(_OBJECTIVES)}.")
    mask_NL = jnp.asarray(mask_NL, bool).astype(jnp.float32)
    count_N = jnp.maximum(mask_NL.sum(axis=-1), 1)
    average = lambda x_NL: (x_NL * mask_NL).sum(axis=-1) / count_N  # noqa: E731
    weight = jnp.where(mask_NL > 0, advantage_NL, 0.0) * factor_N[..., None]
    if ratio != "token":
        weight = average(weight)
    weight = jax.lax.stop_gradient(weight)
    term, clipped = _OBJECTIVES[objective](
        logp_NL, old_logp_NL, mask_NL, weight, ratio, _Clips(clip_low, clip_high, clip_dual)
    )
    if importance is not None:
        term = importance * term
    if ratio == "token":
        term, clipped = average(term), average(clipped)
    empty_N = mask_NL.sum(axis=-1) == 0
    term, clipped = (jnp.where(empty_N, 0.0, x_N) for x_N in (term, clipped))
    return term, jax.lax.stop_gradient(clipped)


def _clipped(logp_NL, old_logp_NL, mask_NL, weight, level, clips):
    ratio = turn_ratio(logp_NL, old_logp_NL, mask_NL, level=level)
    bounds = {"clip_low": clips.low, "clip_high": clips.high, "clip_dual": clips.dual}
    term = clipped_surrogate(ratio, weight, **bounds)
    return term, (term != ratio * weight).astype(jnp.float32)


def _cispo(logp_NL, old_logp_NL, mask_NL, weight, level, clips):
    ratio = turn_ratio(logp_NL, old_logp_NL, mask_NL, level=level)
    low = None if clips.low is None else 1.0 - clips.low
    high = None if clips.high is None else 1.0 + clips.high
    bounded = jax.lax.stop_gradient(jnp.clip(ratio, low, high))
    term = bounded * weight * action_logp(logp_NL, mask_NL, level=level)
    return term, (bounded != ratio).astype(jnp.float32)


def _logp(logp_NL, old_logp_NL, mask_NL, weight, level, clips):
    term = weight * action_logp(logp_NL, mask_NL, level=level)
    return term, jnp.zeros_like(term)


_OBJECTIVES = {"clipped": _clipped, "cispo": _cispo, "logp": _logp}
