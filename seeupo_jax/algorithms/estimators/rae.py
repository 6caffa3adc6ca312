"""Role-conditioned advantages (RAE): rewards less a moving average of their role's rewards."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import chex
import jax
import jax.numpy as jnp

from seeupo_jax.algorithms.estimator_options import BaselineOptions
from seeupo_jax.algorithms.estimators import Estimator
from seeupo_jax.options import Setting, refused


def role_conditioned_advantage(
    reward_N: jax.Array, baseline_N: jax.Array, valid_N: jax.Array
) -> jax.Array:
    """Reward less the moving average of its role's rewards (SPIRAL, arXiv:2506.24119 §3.3).

    A_i = R_i - b_p, with b_p of i's role p before i; then b_p <- decay b_p + (1 - decay) R_i. In a
    game in which one role has the better chances, one baseline for both would make its moves good
    and the other's bad, however they play.

    Args:
      reward_N: [N], of one role of a trajectory each, reward units.
      baseline_N: [N], reward units.
      valid_N: bool [N].

    Returns: float32 [N], reward units; 0 where it is not valid.

    Raises:
      ValueError: arrays of other shapes.
    """
    check = functools.partial(chex.assert_shape, exception_type=ValueError)
    shape = jnp.shape(valid_N)
    check([reward_N, baseline_N], shape, custom_message="reward_N, baseline_N: [N], as valid_N")
    advantage_N = jnp.float32(reward_N) - jnp.float32(baseline_N)
    return jnp.where(jnp.asarray(valid_N, bool), advantage_N, 0.0)


@dataclass(frozen=True)
class RaeOptions(BaselineOptions):
    """Options of `rae`."""

    def check(self, setting: Setting) -> None:
        super().check(setting)
        algorithm = setting.algorithm
        if algorithm.overlong is not None:
            got = f"one with advantage={algorithm.advantage}"
            raise refused("overlong", got, "none, since the baseline has no penalty")


ESTIMATOR = Estimator(
    role_conditioned_advantage,
    "trajectory",
    ("reward_N", "baseline_N", "valid_N"),
    RaeOptions,
)
