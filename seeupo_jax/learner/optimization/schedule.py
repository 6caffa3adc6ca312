"""The learning rate as a function of the iteration, however many optimizer steps one takes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from seeupo_jax.configuration.schema import Optimizer

# Share of the iterations that are over, warm-up left out -> share of the learning rate.
_DECAY: dict[str, Callable[[float], float]] = {
    "constant": lambda progress: 1.0,
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
}


@dataclass(frozen=True)
class Schedule:
    """The learning rate of a run, for the policy and the value function as shares of their own.

    It rises over `warmup_iterations` (the first has 1/warmup_iterations of the full rate), then
    stays (`constant`) or falls to 0 (`linear`, `cosine`) in the iteration after the last. All
    optimizer steps of one iteration have the same rate, except over `warmup_steps`.

    config: of the optimizer. iterations: of the whole run.

    Raises:
      ValueError: a warm-up as long as the run, or one in steps and in iterations.
    """

    config: Optimizer
    iterations: int

    def __post_init__(self) -> None:
        warmup, steps = self.config.warmup_iterations, self.config.warmup_steps
        if warmup and warmup >= self.iterations:
            raise ValueError(
                f"config.optimizer.warmup_iterations: got {warmup}; allowed: fewer than the run's"
                f" {self.iterations} iterations."
            )
        if warmup and steps:
            raise ValueError(
                f"config.optimizer.warmup_steps: got {steps} with warmup_iterations={warmup};"
                " allowed: one of the two."
            )

    def share(self, iteration: int) -> float:
        """Share of the full learning rate, in [0, 1], that an iteration (1, 2, ...) has."""
        warmup = self.config.warmup_iterations
        progress = (iteration - 1 - warmup) / max(self.iterations - warmup, 1)
        rise = min(iteration / max(warmup, 1), 1.0)
        return rise * _DECAY[self.config.schedule](min(max(progress, 0.0), 1.0))

    def rate(self, iteration: int, step: int) -> float:
        """The policy's learning rate in an iteration, of the step after `step` others."""
        rise = min((step + 1) / max(self.config.warmup_steps, 1), 1.0)
        return self.config.learning_rate * self.share(iteration) * rise


class Scheduled(NamedTuple):
    """State of an optimizer that `by_iteration` made: float32 [] `share`, and its own state."""

    share: jax.Array
    state: Any


def step_warmup(config: Optimizer) -> optax.Schedule:
    """The full learning rate after a rise over `warmup_steps`, of the optimizer's steps so far."""

    def rate(step: jax.Array | int) -> jax.Array:
        step = jnp.asarray(step, jnp.float32)
        return config.learning_rate * jnp.minimum((step + 1) / max(config.warmup_steps, 1), 1.0)

    return rate


def by_iteration(
    build: Callable[[optax.Schedule], optax.GradientTransformation], rate: optax.Schedule
) -> optax.GradientTransformation:
    """The optimizer that `build` makes of a schedule: `rate` times the share in its own state.

    The share is an array, which `at_share` sets: another iteration needs no other program.
    """

    def init(params: Any) -> Scheduled:
        return Scheduled(jnp.ones(()), build(rate).init(params))

    def update(grads: Any, state: Scheduled, params: Any = None) -> tuple[Any, Scheduled]:
        optimizer = build(lambda step: state.share * rate(step))
        updates, inner = optimizer.update(grads, state.state, params)
        return updates, Scheduled(state.share, inner)

    return optax.GradientTransformation(init, update)


def at_share(state: Any, share: float, place: Callable[[np.float32], jax.Array]) -> Any:
    """A training state whose optimizers have another share of their learning rates.

    `place` puts a number onto the devices, for each optimizer anew: no buffer is donated twice.
    """

    def set_share(node: Any) -> Any:
        follows = isinstance(node, Scheduled)
        return node._replace(share=place(np.float32(share))) if follows else node

    return jax.tree.map(set_share, state, is_leaf=lambda node: isinstance(node, Scheduled))
