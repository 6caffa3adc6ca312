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
from seeupo_jax.learner.batching import Rows, Shapes, empty_batch, refresh_batch
from seeupo_jax.policy.network import Network, join
from seeupo_jax.types import TrainState


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
    def turn_step(self) -> Callable[..., Any]:
        """`update.turn_step` from the state on; see there."""
        step = functools.partial(
            update.turn_step, self.network, self.optimizer, self.step_objective
        )
        out = (self.layout, self.everywhere, None, None)
        jitted = jax.jit(step, donate_argnums=(1, 5), out_shardings=out)
        return functools.partial(jitted, self.frozen)

    @functools.cached_property
    def refresh(self) -> Callable[..., jax.Array]:
        """`update.refresh` from the trained parameters on; see there."""
        refresh = functools.partial(update.refresh, self.network, self.step_objective)
        jitted = jax.jit(refresh, donate_argnums=2, out_shardings=self.everywhere)
        return lambda params, *rest: jitted(join(params, self.frozen), *rest)

    @functools.cached_property
    def score(self) -> Callable[..., jax.Array]:
        """`update.score` from the trained parameters on; see there."""
        score = functools.partial(update.score, self.network, temperature=self.temperature)
        return lambda params, batch: score(join(params, self.frozen), batch)

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
        """A small array on every device."""
        return jax.device_put(x_N, self.everywhere)

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


def compile_programs(
    learner: Learner, state: TrainState, ref_params: Any, trajectories: int
) -> TrainState:
    """Compiles every program of the sweeps to come, by running each on a batch without rows.

    Args:
      trajectories: N of every sweep.

    Returns: the state, which was donated and comes back bit for bit.
    """
    shapes = learner.shapes
    rows = Rows((), (), (), np.zeros(0, np.int32), trajectories, 0)
    zeros_N = np.zeros(trajectories, np.float32)
    learner.advantage(zeros_N, zeros_N.astype(np.int32), zeros_N > 0)
    for length in sorted({shapes.long(1), shapes.long(shapes.lengths[-1])}):
        batch = empty_batch(rows, shapes, length=length, action=length)
        for params in (state.params, ref_params):
            learner.score(params, batch)
    importance = learner.algorithm.tis_clip is not None
    for length in shapes.lengths:
        batch = empty_batch(
            rows, shapes, length=length, action=shapes.action, importance=importance
        )
        continued = None
        if learner.fused:
            continued, _ = refresh_batch(rows, batch, [], [], shapes, [])
        elif learner.algorithm.old_policy == "turn":
            learner.score(state.params, batch)
        state, *_ = learner.turn_step(
            state,
            batch,
            continued,
            learner.spread(zeros_N),
            learner.spread(zeros_N),
            np.float32(1),
        )
        if not learner.fused or length == shapes.lengths[-1]:
            learner.refresh(state.params, batch, learner.spread(zeros_N))
    return state
