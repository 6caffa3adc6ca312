"""The loss of a value function."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from seeupo_jax.algorithms.standardize import masked


def clipped_value_loss(
    value_NL: jax.Array,
    old_value_NL: jax.Array,
    return_NL: jax.Array,
    *,
    clip: float | None,
    mask: jax.Array | None = None,
) -> jax.Array:
    """Half the squared error of a value function that may not gain from leaving its old value.

    The larger of the errors of V and of V held within `clip` of the old one. PPO's paper
    (arXiv:1707.06347, Eq. 9) has the plain error alone; the bound is its authors' implementation's.

    Args:
      value_NL: [N, L], or any shape, reward units; the gradient flows through it alone.
      old_value_NL, return_NL: its shape; held constant.
      clip: > 0, reward units; None: the plain error.
      mask: nonzero where there is a token; elsewhere the loss is 0 and no value, not even an
        infinite one, reaches a gradient. None: all.

    Returns:
      float32, the shape of the values. Where the two errors are equal the gradient is the plain
      one's, at the ends of the clip range too.
    """
    mask = jnp.ones(jnp.shape(value_NL), bool) if mask is None else jnp.asarray(mask, bool)
    value_NL = masked(value_NL, mask)
    old_value_NL, return_NL = (
        jax.lax.stop_gradient(masked(x_NL, mask)) for x_NL in (old_value_NL, return_NL)
    )
    plain_NL = 0.5 * (value_NL - return_NL) ** 2
    if clip is None:
        return plain_NL
    near_NL = jnp.clip(value_NL, old_value_NL - clip, old_value_NL + clip)
    near_NL = 0.5 * (near_NL - return_NL) ** 2
    # Not jnp.maximum: at a tie it averages the two gradients, and the clip's is 1/2 or 0 there.
    return jnp.where(plain_NL >= near_NL, plain_NL, near_NL)
