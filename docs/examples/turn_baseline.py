"""An estimator of your own: each turn is compared with the same turn of its group."""

import functools

import jax
import jax.numpy as jnp

from seeupo_jax.algorithms.estimator_options import TurnDiscount
from seeupo_jax.algorithms.estimators import Estimator


def turn_baseline(
    reward_NK: jax.Array, mask_NK: jax.Array, group_N: jax.Array, discount: float
) -> jax.Array:
    """The discounted reward from turn k on, minus its mean over the group's turns k.

    Returns: float32 [N, K], reward units; 0 where there is no turn.
    """
    product = functools.partial(jnp.einsum, precision="highest")  # accelerators round otherwise
    turn_K = jnp.arange(reward_NK.shape[1])
    wait_KK = turn_K[None, :] - turn_K[:, None]  # turns from row to column
    share_KK = jnp.where(wait_KK >= 0, discount ** jnp.maximum(wait_KK, 0), 0.0)
    return_NK = jnp.where(mask_NK, product("nj,kj->nk", reward_NK, share_KK), 0.0)
    same_NN = jnp.float32(group_N[:, None] == group_N[None, :])
    count_NK = product("nm,mk->nk", same_NN, jnp.float32(mask_NK))
    mean_NK = product("nm,mk->nk", same_NN, return_NK) / jnp.maximum(count_NK, 1.0)
    return jnp.where(mask_NK, return_NK - mean_NK, 0.0)


ESTIMATOR = Estimator(
    turn_baseline,
    level="turn",
    needs=("reward_NK", "mask_NK", "group_N"),
    options=TurnDiscount,
)
