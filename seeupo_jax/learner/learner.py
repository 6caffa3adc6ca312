"""What every sweep of a run shares: the policy, the optimizer, the choices, the programs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
import optax

from seeupo_jax import config
from seeupo_jax.algorithms.advantage import group_relative_advantage
from seeupo_jax.learner import update
from seeupo_jax.learner.batching import Shapes
from seeupo_jax.learner.layout import on_device
from seeupo_jax.parallel import distributed
from seeupo_jax.policy.network import Network, join
from seeupo_jax.types import TrainState, TurnBatch


@dataclass(frozen=True, eq=False)
class Learner:
    """What a sweep needs and does not change.

    frozen: parameters that no step changes (all but the adapters, where there are any).
    layout: shardings of the TrainState, and `everywhere` one of small arrays. Every program returns
    what it was given in the same layout, so that no program is compiled twice. None: one device.
    """

    network: Network
    optimizer: optax.GradientTransformation
    algorithm: config.Algorithm
    shapes: Shapes
    temperature: float
    seed: int = 0
    frozen: Any = field(default_factory=dict)
    layout: TrainState | None = None
    everywhere: jax.sharding.Sharding | None = None

    @functools.cached_property
    def turn_step(self) -> functools.partial[Any]:
        """`update.turn_step` from the state on; see there."""
        step = functools.partial(
            update.turn_step, self.network, self.optimizer, self.step_objective, self.layout
        )
        out = (self.layout, self.everywhere, self.everywhere, self.everywhere)
        jitted = jax.jit(step, donate_argnums=(1, 5), out_shardings=out)
        return functools.partial(jitted, self.frozen)

    @functools.cached_property
    def refresh(self) -> functools.partial[Any]:
        """`update.refresh` from the trained parameters on; see there."""
        objective = self.step_objective

        def refresh(frozen: Any, params: Any, batch: TurnBatch, factor_N: jax.Array) -> jax.Array:
            return update.refresh(self.network, objective, join(params, frozen), batch, factor_N)

        jitted = jax.jit(refresh, donate_argnums=3, out_shardings=self.everywhere)
        return functools.partial(jitted, self.frozen)

    @functools.cached_property
    def score(self) -> functools.partial[Any]:
        """`update.score` from the trained parameters on, which may lie in the host's memory."""
        jitted = _score(self.network, self.temperature, self.everywhere)
        return functools.partial(jitted, self.frozen)

    def advantage(
        self, reward_N: np.ndarray, group_N: np.ndarray, valid_N: np.ndarray
    ) -> jax.Array:
        """`group_relative_advantage` by the algorithm's choices, on every device."""
        chosen = self.algorithm
        advantage_N = group_relative_advantage(
            reward_N,
            group_N,
            baseline=chosen.baseline,
            scale=chosen.scale,
            clip=chosen.advantage_clip,
            valid_N=valid_N,
        )
        return self.spread(advantage_N)

    def spread(self, x_N: Any) -> jax.Array:
        """A small array, the same in all processes, on every device."""
        return distributed.spread(np.asarray(x_N), self.everywhere)

    @property
    def step_objective(self) -> update.Objective:
        """The choices that the turn step is compiled with."""
        chosen = self.algorithm
        return update.Objective(
            ratio=chosen.ratio,
            # With several steps a turn, the policy before the first is scored and kept instead.
            old_is_current=chosen.old_policy == "turn" and self.fused,
            clip_low=chosen.clip_low,
            clip_high=chosen.clip_high,
            kl_coef=chosen.kl_coef,
            weight_clip=chosen.weight_clip,
            temperature=self.temperature,
            tis_clip=chosen.tis_clip,
        )

    @property
    def fused(self) -> bool:
        """Whether a turn's step also refreshes the weights of the turn before it."""
        chosen = self.algorithm
        return chosen.refresh != "separate" and config.fused_refresh_applies(chosen)


@functools.cache
def _score(
    network: Network, temperature: float, everywhere: jax.sharding.Sharding | None
) -> Callable[..., jax.Array]:
    """One program for all learners of a network: the algorithm's choices do not matter to it."""

    def score(frozen: Any, params: Any, batch: TurnBatch) -> jax.Array:
        whole = join(on_device(params), frozen)
        return update.score(network, whole, batch, temperature=temperature)

    return jax.jit(score, out_shardings=everywhere)
