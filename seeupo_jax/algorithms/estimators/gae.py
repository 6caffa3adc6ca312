"""Generalized advantage estimation, from a critic's values (PPO)."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from seeupo_jax.algorithms.estimator_options import TokenDiscount
from seeupo_jax.algorithms.estimators import Estimator
from seeupo_jax.algorithms.standardize import masked
from seeupo_jax.options import within


@jax.jit
def generalized_advantage(
    value_NL: jax.Array,
    reward_NL: jax.Array,
    mask_NL: jax.Array,
    truncated_N: jax.Array | None = None,
    *,
    discount: float = 1.0,
    lam: float = 0.95,
) -> tuple[jax.Array, jax.Array]:
    """Generalized advantage estimation over action tokens alone (arXiv:1506.02438, Eq. 16).

    With l+ the trajectory's next action token after l, however many observation tokens lie between:
    A_l = (r_l + discount V_l+ - V_l) + discount lam A_l+, where both are 0 after the last, because
    episodes end. Where a limit cut one, V_l+ after its last token is that token's own V_l, since
    nothing has valued what would have followed (EGAE of T-PPO, arXiv:2506.15050).

    Args:
      value_NL: [N, L], the value function before each token, reward units.
      reward_NL: [N, L], reward of each token.
      mask_NL: [N, L], nonzero at action tokens; nothing outside is read, and may be NaN.
      truncated_N: bool [N], whether a limit cut the episode; None: the value after any last is 0.
      discount: in [0, 1], a token.
      lam: in [0, 1]; 0 trusts the value function after one token, 1 not at all.

    Returns:
      float32 [N, L], advantages, and float32 [N, L], the targets of the value function
      (advantage plus value), both in reward units and 0 outside the mask.
    """
    mask_NL = jnp.asarray(mask_NL, bool)
    value_NL = masked(value_NL, mask_NL)

    def earlier(later, token):
        value_N, reward_N, mask_N = token
        later_value_N, later_advantage_N = later
        error_N = reward_N + discount * later_value_N - value_N
        advantage_N = error_N + discount * lam * later_advantage_N
        masked_value_N = jnp.where(mask_N, value_N, later_value_N)
        return (masked_value_N, jnp.where(mask_N, advantage_N, later_advantage_N)), advantage_N

    tokens = (value_NL.T, masked(reward_NL, mask_NL).T, mask_NL.T)
    zero_N = jnp.zeros_like(value_NL[:, 0])
    after_N = (
        zero_N if truncated_N is None else jnp.where(truncated_N, _last(value_NL, mask_NL), 0.0)
    )
    _, advantage_LN = jax.lax.scan(earlier, (after_N, zero_N), tokens, reverse=True)
    advantage_NL = masked(advantage_LN.T, mask_NL)
    return advantage_NL, advantage_NL + value_NL


def _last(value_NL: jax.Array, mask_NL: jax.Array) -> jax.Array:
    """The number at each row's last masked token, [N]; 0 without one."""
    later_NL = jnp.cumsum(mask_NL[:, ::-1], axis=1)[:, ::-1]  # this one and those after it
    return jnp.where(mask_NL & (later_NL == 1), value_NL, 0.0).sum(axis=1)


@dataclass(frozen=True)
class GaeOptions(TokenDiscount):
    """Options of `gae`."""

    lam: float = within(0, 1, 0.95)
    """Decay of generalised advantage estimation."""
    bootstrap_truncated: bool = False
    """The value after an episode that max_turns or max_tokens cut is its last one, not 0."""


ESTIMATOR = Estimator(
    generalized_advantage,
    "token",
    ("value_NL", "reward_NL", "mask_NL"),
    GaeOptions,
    optional_inputs={"truncated_N": "bootstrap_truncated"},
)
