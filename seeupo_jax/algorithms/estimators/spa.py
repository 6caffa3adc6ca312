"""SPA-RL: generalized advantages of the progress that a model sees in each turn."""

from __future__ import annotations

from dataclasses import dataclass

import jax

from seeupo_jax.algorithms.estimator_options import ScorerOptions, TokenDiscount
from seeupo_jax.algorithms.estimators import Estimator
from seeupo_jax.algorithms.estimators.gae import generalized_advantage
from seeupo_jax.options import within


@jax.jit
def spa_advantage(
    progress_NL: jax.Array,
    executed_NL: jax.Array,
    value_NL: jax.Array,
    mask_NL: jax.Array,
    *,
    progress_coef: float = 1.0,
    grounding_coef: float = 0.5,
    discount: float = 1.0,
    lam: float = 0.95,
) -> tuple[jax.Array, jax.Array]:
    """Generalized advantages of r = progress_coef c + grounding_coef g at each turn's last token.

    SPA-RL, arXiv:2505.20732: c is what a progress estimator says the turn contributed to the
    trajectory's reward, g is 1 where the environment could execute the turn's action. The reward
    itself counts through c alone.

    Args:
      progress_NL, executed_NL: [N, L], c and g at the last token of each turn, else 0.
      value_NL, mask_NL, discount, lam: as for `generalized_advantage`.
      progress_coef, grounding_coef: >= 0; the paper's alpha and beta.

    Returns:
      float32 [N, L], advantages, and float32 [N, L], the targets of the value function,
      both in reward units and 0 outside the mask.
    """
    reward_NL = progress_coef * progress_NL + grounding_coef * executed_NL
    return generalized_advantage(value_NL, reward_NL, mask_NL, discount=discount, lam=lam)


@dataclass(frozen=True)
class SpaOptions(ScorerOptions, TokenDiscount):
    """Options of `spa`."""

    progress_coef: float = within(0, 1000, 1.0)
    """Weight of the contribution of a turn to the reward, by the progress estimator."""
    grounding_coef: float = within(0, 1000, 0.5)
    """Weight of whether the environment could execute the turn's action."""
    lam: float = within(0, 1, 0.95)
    """Decay of generalised advantage estimation."""


ESTIMATOR = Estimator(
    spa_advantage,
    "token",
    ("progress_NL", "executed_NL", "value_NL", "mask_NL"),
    SpaOptions,
)
