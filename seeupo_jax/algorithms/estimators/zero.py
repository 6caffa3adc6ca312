"""No advantage of rewards: what is added to it, a teacher's term, is all that is learned from."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from seeupo_jax.algorithms.estimators import Estimator


@jax.jit
def zero_advantage(mask_NL: jax.Array) -> jax.Array:
    """A_l = 0, whatever the reward (https://thinkingmachines.ai/blog/on-policy-distillation).

    Args:
      mask_NL: [N, L], whether there is such a token.

    Returns:
      float32 [N, L].
    """
    return jnp.zeros(mask_NL.shape, jnp.float32)


ESTIMATOR = Estimator(zero_advantage, "token", ("mask_NL",))
