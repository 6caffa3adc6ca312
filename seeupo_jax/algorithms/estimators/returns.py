"""Discounted rewards to go, as in REINFORCE++ (arXiv:2501.03262)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from seeupo_jax.algorithms.estimator_options import TokenDiscount
from seeupo_jax.algorithms.estimators import Estimator
from seeupo_jax.algorithms.standardize import masked


@jax.jit
def reward_to_go(reward_NL: jax.Array, mask_NL: jax.Array, *, discount: float = 1.0) -> jax.Array:
    """Discounted sum of the rewards from each token on, where only masked ones count as steps.

    Args:
      reward_NL: [N, L], reward of each token, or of each turn as [N, K].
      mask_NL: nonzero where there is one; nothing outside is read, and may be NaN.
      discount: in [0, 1], a step.

    Returns:
      float32 [N, L], reward units; 0 outside the mask.
    """
    mask_NL = jnp.asarray(mask_NL, bool)

    def earlier(later_N, token):
        reward_N, mask_N = token
        here_N = jnp.where(mask_N, reward_N + discount * later_N, later_N)
        return here_N, here_N

    reward_NL = masked(reward_NL, mask_NL)
    tokens = (reward_NL.T, mask_NL.T)
    _, return_LN = jax.lax.scan(earlier, jnp.zeros_like(reward_NL[:, 0]), tokens, reverse=True)
    return masked(return_LN.T, mask_NL)


ESTIMATOR = Estimator(reward_to_go, "token", ("reward_NL", "mask_NL"), TokenDiscount)
