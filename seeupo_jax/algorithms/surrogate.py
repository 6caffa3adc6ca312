"""The clipped surrogate of one turn: probability ratio, objective, running weight, KL estimate."""

from __future__ import annotations

import jax
import jax.numpy as jnp

# float32 ends at exp(88.7). A ratio stops at exp(80) instead: an infinite one times an advantage of
# 0 is NaN, and far outside the clip range its size changes nothing.
_MAX_LOG_RATIO = 80.0
# Of the product of ratios, which multiplies gradients: the square of their norm must be finite too,
# or every later step with such a trajectory is skipped.
_MAX_LOG_PRODUCT = 30.0
# Of k3, as in the framework of SeeUPO's authors: volcengine/verl, verl/trainer/ppo/core_algos.py,
# `kl_penalty_forward` ("low_var_kl", "k3"), which holds d and then the estimate within these.
MAX_K3_DIFFERENCE = 20.0  # nats
MAX_K3 = 10.0  # nats


def turn_ratio(
    logp_NL: jax.Array, old_logp_NL: jax.Array, mask_NL: jax.Array, *, level: str = "geometric"
) -> jax.Array:
    """Probability of each action under the current policy over that under the old one (Eq. 6).

    Args:
      logp_NL, old_logp_NL: [N, L], log-probabilities (nats) of the sampled tokens. Values outside
        the mask, infinite ones included, reach neither the result nor a gradient.
      mask_NL: [N, L], nonzero at the action's tokens.
      level: `geometric`, exp of the mean over the tokens of the difference (GSPO); `product`, exp
        of its sum; `token`, one ratio per token (PPO, GRPO).

    Returns:
      float32 [N], or [N, L] for `token`, in [0, e^80]; 1 for an empty mask and, with `token`,
      outside the mask.

    Raises:
      ValueError: an unknown level.
    """
    _check_level(level)
    mask_NL = jnp.asarray(mask_NL, bool)
    difference_NL = _difference(logp_NL, old_logp_NL, mask_NL)
    return jnp.exp(jnp.minimum(_LEVELS[level](difference_NL, mask_NL), _MAX_LOG_RATIO))


def action_logp(logp_NL: jax.Array, mask_NL: jax.Array, *, level: str) -> jax.Array:
    """Log-probability of each action at the level of a ratio: its log is a difference of two.

    Args:
      logp_NL, mask_NL, level: as for `turn_ratio`.

    Returns:
      float32 [N], nats (a mean over the tokens for `geometric`), or [N, L] for `token`; 0 for an
      empty mask and, with `token`, outside the mask.
    """
    _check_level(level)
    mask_NL = jnp.asarray(mask_NL, bool)
    return _LEVELS[level](jnp.where(mask_NL, jnp.asarray(logp_NL, jnp.float32), 0.0), mask_NL)


def clipped_surrogate(
    ratio_N: jax.Array,
    weight_N: jax.Array,
    *,
    clip_low: float | jax.Array | None,
    clip_high: float | jax.Array | None,
    clip_dual: float | None = None,
) -> jax.Array:
    """The lesser of ratio x weight and clipped ratio x weight, to maximise (Eq. 6).

    Args:
      ratio_N: [N], or any shape; the gradient flows through it alone.
      weight_N: M of the trajectory, in a shape that broadcasts to the ratio's; held constant.
      clip_low, clip_high: the ratio counts within [1 - clip_low, 1 + clip_high], numbers or arrays
        that broadcast to the ratio's shape; None: unbounded on that side.
      clip_dual: > 1; where the weight is negative the result is at least clip_dual x weight, with
        no gradient beyond, however large the ratio (dual-clip PPO, arXiv:1912.09729; verl's
        `clip_ratio_c`). None: there it falls with the ratio without a bound.

    Returns:
      float32, the ratio's shape, in units of the weight. Where the two are equal the gradient is
      that of ratio x weight, at the ends of the clip range too, and so it is at the dual bound.
    """
    ratio_N = jnp.asarray(ratio_N, jnp.float32)
    weight_N = jax.lax.stop_gradient(jnp.asarray(weight_N, jnp.float32))
    low = None if clip_low is None else 1.0 - clip_low
    high = None if clip_high is None else 1.0 + clip_high
    plain_N, clipped_N = ratio_N * weight_N, jnp.clip(ratio_N, low, high) * weight_N
    # Not jnp.minimum: at a tie it averages the two gradients, and the clip's is 1/2 or 0 there.
    surrogate_N = jnp.where(plain_N <= clipped_N, plain_N, clipped_N)
    if clip_dual is None:
        return surrogate_N
    bound_N = clip_dual * weight_N
    return jnp.where((weight_N < 0) & (surrogate_N < bound_N), bound_N, surrogate_N)


def update_weight(factor_N: jax.Array, ratio_N: jax.Array, *, clip: float | None) -> jax.Array:
    """Multiplies an updated turn's ratio into the running product of factors (Eq. 8).

    Args:
      factor_N: [N], the product so far; 1 before the first turn. A trajectory's weight is
        M = advantage x factor.
      ratio_N: [N], the turn's ratio under the updated parameters; 1 at null turns.
      clip: the ratio and the product both stay within [1 - clip, 1 + clip]; None: the product
        is at most e^30.

    Returns:
      float32 [N], the product with this turn.
    """
    factor_N = jnp.asarray(factor_N, jnp.float32)
    ratio_N = jnp.asarray(ratio_N, jnp.float32)
    if clip is None:
        return jnp.minimum(factor_N * ratio_N, jnp.exp(_MAX_LOG_PRODUCT))
    low, high = 1.0 - clip, 1.0 + clip
    return jnp.clip(factor_N * jnp.clip(ratio_N, low, high), low, high)


def kl_estimate(
    logp: jax.Array, ref_logp: jax.Array, *, kind: str = "k3", mask: jax.Array | None = None
) -> jax.Array:
    """A sampled token's estimate of KL(policy || reference), token by token.

    Args:
      logp, ref_logp: the same shape, log-probabilities (nats) of the sampled tokens.
      kind: with d = ref_logp - logp, `k1` is -d (unbiased, of either sign), `k2` is d^2 / 2, `k3`
        is exp(d) - d - 1 (unbiased up to its bound, never negative). k3 is at most 10 nats, which
        it is at d = 2.61 and at d = -11; beyond these its gradient is 0, as that of verl's
        `torch.clamp`: a token 95 nats off would else be an infinite step, one 25 nats off all of a
        clipped gradient. `k3+` has the value of k3 and the gradient of k2, by which the penalty's
        expected gradient on samples of the policy is that of the KL, as verl's. The gradients of k1
        and k2 are 1 and |d| at most, and not bounded.
      mask: nonzero where there is a token; elsewhere the estimate is 0 and no value, not even an
        infinite one, reaches a gradient. Masking the result instead cannot ensure that. None: all.

    Returns:
      float32, nats, the shape of `logp`.

    Raises:
      ValueError: an unknown kind.
    """
    if kind not in _KINDS:
        raise ValueError(f"kind: got {kind!r}; allowed: {', '.join(_KINDS)}.")
    mask = jnp.ones(jnp.shape(logp), bool) if mask is None else jnp.asarray(mask, bool)
    return _KINDS[kind](_difference(ref_logp, logp, mask))


def _check_level(level: str) -> None:
    if level not in _LEVELS:
        raise ValueError(f"level: got {level!r}; allowed: {', '.join(_LEVELS)}.")


def _difference(logp: jax.Array, other_logp: jax.Array, mask: jax.Array) -> jax.Array:
    """`logp - other_logp` in float32, 0 outside the mask.

    Masked before anything nonlinear: a masked result would still send 0 x inf = NaN backwards.
    """
    difference = jnp.asarray(logp, jnp.float32) - jnp.asarray(other_logp, jnp.float32)
    return jnp.where(mask, difference, 0.0)


def _geometric(difference_NL: jax.Array, mask_NL: jax.Array) -> jax.Array:
    return jnp.sum(difference_NL, axis=-1) / jnp.maximum(jnp.sum(mask_NL, axis=-1), 1)


def _product(difference_NL: jax.Array, mask_NL: jax.Array) -> jax.Array:
    return jnp.sum(difference_NL, axis=-1)


def _token(difference_NL: jax.Array, mask_NL: jax.Array) -> jax.Array:
    return difference_NL


_LEVELS = {"geometric": _geometric, "product": _product, "token": _token}


def _k3(difference: jax.Array) -> jax.Array:
    # The difference too: exp(95) is infinite, and backwards 0 times that is NaN.
    difference = jnp.clip(difference, -MAX_K3_DIFFERENCE, MAX_K3_DIFFERENCE)
    # expm1: near d = 0 float32 rounds exp(d) - 1 to multiples of 1e-7, the size of the estimate.
    return jnp.clip(jnp.expm1(difference) - difference, max=MAX_K3)


def _k2(difference: jax.Array) -> jax.Array:
    return 0.5 * difference**2


def _k3_straight_through(difference: jax.Array) -> jax.Array:
    squared = _k2(difference)
    # Added where it is exactly 0: the value is that of k3 to the bit, however large the square.
    return jax.lax.stop_gradient(_k3(difference)) + (squared - jax.lax.stop_gradient(squared))


_KINDS = {"k1": lambda d: -d, "k2": _k2, "k3": _k3, "k3+": _k3_straight_through}
