"""The preference loss of a model that scores trajectories: pairs of a success and a failure."""

from __future__ import annotations

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp


class Preference(NamedTuple):
    """A loss over pairs, and its derivative by every score.

    loss: float32, nats; the mean over pairs, 0 without any.
    accuracy: float32, share of the pairs whose success has the higher score; a tie is half.
    pairs: int32.
    slope_N: float32 [N].
    """

    loss: jax.Array
    accuracy: jax.Array
    pairs: jax.Array
    slope_N: jax.Array


@jax.jit
def pair_preference(
    score_N: jax.Array, success_N: jax.Array, group_N: jax.Array, valid_N: jax.Array
) -> Preference:
    """The mean of -log sigmoid(v_i - v_j) over all pairs of a success i and a failure j of a group.

    iStar, arXiv:2509.19199, the trajectory-level DPO objective. Its authors' code pairs every
    success with every failure of its group too, and counts all pairs of the batch alike.

    Args:
      score_N: float32 [N], v of each trajectory; those of invalid ones are not read.
      success_N: bool [N].
      group_N: int [N], any ids.
      valid_N: bool [N]; False leaves a trajectory out of every pair.
    """
    chex.assert_rank(score_N, 1, exception_type=ValueError)
    chex.assert_equal_shape([score_N, success_N, group_N, valid_N], exception_type=ValueError)
    better_N, worse_N = valid_N & success_N, valid_N & ~success_N
    pair_NN = better_N[:, None] & worse_N[None, :] & (group_N[:, None] == group_N[None, :])
    pairs = pair_NN.sum(dtype=jnp.int32)
    score_N = jnp.where(valid_N, score_N, 0.0)

    def over_pairs(x_NN: jax.Array) -> jax.Array:
        return jnp.where(pair_NN, x_NN, 0.0).sum() / jnp.maximum(pairs, 1)

    def loss(score_N: jax.Array) -> jax.Array:
        return over_pairs(-jax.nn.log_sigmoid(score_N[:, None] - score_N[None, :]))

    value, slope_N = jax.value_and_grad(loss)(score_N)
    sign_NN = jnp.sign(score_N[:, None] - score_N[None, :])
    return Preference(value, over_pairs((1 + sign_NN) / 2), pairs, slope_N)
