"""The learning rate as a function of the iteration, however many optimizer steps one takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from seeupo_jax.configuration.schema import Optimizer
from seeupo_jax.configuration.user_code import import_attribute, located, shown

# Iterations that are over and that there are, warm-up left out, and those of the decay at the end
# -> share of the learning rate.
_DECAY: dict[str, Callable[[int, int, int], float]] = {
    "constant": lambda done, of, last: 1.0,
    "linear": lambda done, of, last: 1.0 - done / of,
    "cosine": lambda done, of, last: 0.5 * (1.0 + math.cos(math.pi * (done / of))),
    "warmup_stable_decay": lambda done, of, last: min(1.0, (of - done) / (last + 1)),
}

# Optimizers that learn a step size and divide by sums of steps: after one of rate 0 all is NaN.
_NEVER_ZERO = ("contrib.dadapt_adamw", "contrib.prodigy")


@dataclass(frozen=True)
class Schedule:
    """The learning rate of a run, for the policy and the value function as shares of their own.

    It rises over `warmup_iterations` (the first has 1/warmup_iterations of the full rate), then
    stays (`constant`), or falls to 0 in the iteration after the last: from there on (`linear`,
    `cosine`), or over the last `decay_iterations` (`warmup_stable_decay`, a line). A user's
    function of the iteration (1, 2, ...) and of their number returns the share; a warm-up
    multiplies it. All optimizer steps of one iteration have the same rate, except over
    `warmup_steps`.

    config: of the optimizer. iterations: of the whole run.

    Raises:
      ValueError: a warm-up as long as the run, or one in steps and in iterations; a decay that
        does not go with the schedule; a function that fails, or returns no share, or 0 for an
        optimizer that divides by it.
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
        self._check_decay()
        if ":" in self.config.schedule:  # a mistake in it is found before the run
            shares = [self.share(iteration) for iteration in range(1, self.iterations + 1)]
            self._check_above_zero(shares)

    def _check_decay(self) -> None:
        config, decay = self.config, self.config.decay_iterations
        if config.schedule != "warmup_stable_decay":
            allowed = "0 unless config.optimizer.schedule=warmup_stable_decay" if decay else None
        else:
            most = self.iterations - config.warmup_iterations
            allowed = None if 0 < decay <= most else f"a number from 1 to {most}, the iterations"
            if allowed is not None and config.warmup_iterations:
                allowed += f" after the {config.warmup_iterations} of the warm-up"
        if allowed is not None:
            raise ValueError(
                f"config.optimizer.decay_iterations: got {decay} with schedule={config.schedule};"
                f" allowed: {allowed}."
            )

    def _check_above_zero(self, shares: Sequence[float]) -> None:
        names = {self.config.name, *(group.name for group in self.config.groups)}
        if 0.0 in shares and (dividing := names.intersection(_NEVER_ZERO)):
            raise ValueError(
                f"config.optimizer.schedule: {self.config.schedule} returned 0 for iteration"
                f" {shares.index(0.0) + 1}; allowed with {' and '.join(sorted(dividing))}: numbers"
                " > 0, since a step of rate 0 makes their state NaN."
            )

    def share(self, iteration: int) -> float:
        """Share of the full learning rate that an iteration (1, 2, ...) has.

        It is in [0, 1], or whatever a user's function returns.
        """
        config, warmup = self.config, self.config.warmup_iterations
        rise = min(iteration / max(warmup, 1), 1.0)
        if ":" in config.schedule:
            return rise * _own_share(config.schedule, iteration, self.iterations)
        of = max(self.iterations - warmup, 1)
        done = min(max(iteration - 1 - warmup, 0), of)
        return rise * _DECAY[config.schedule](done, of, config.decay_iterations)

    def rate(self, iteration: int, step: int) -> float:
        """The policy's learning rate in an iteration, of the step after `step` others."""
        rise = min((step + 1) / max(self.config.warmup_steps, 1), 1.0)
        return self.config.learning_rate * self.share(iteration) * rise


class Scheduled(NamedTuple):
    """State of an optimizer that `by_iteration` made: float32 [] `share`, and its own state."""

    share: jax.Array
    state: Any


def _own_share(name: str, iteration: int, iterations: int) -> float:
    """The share that a user's `module:function` returns for an iteration."""
    function = import_attribute(name, "config.optimizer.schedule", "function", callable)
    try:
        share = function(iteration, iterations)
    except (Exception, SystemExit) as error:
        raise ValueError(
            f"config.optimizer.schedule: {name}({iteration}, {iterations}) failed:"
            f" {located(error)}."
        ) from error
    try:
        number = float(share)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 <= number < math.inf:
        raise ValueError(
            f"config.optimizer.schedule: {name}({iteration}, {iterations}) returned {shown(share)};"
            " allowed: a finite number >= 0, the share of config.optimizer.learning_rate."
        )
    return number


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


def at_share(state: Any, share: float, place: Callable[[np.ndarray], jax.Array]) -> Any:
    """A training state whose optimizers have another share of their learning rates.

    `place` puts numbers onto the devices, for each optimizer anew: no buffer is donated twice.
    """

    def set_share(node: Any) -> Any:
        if not isinstance(node, Scheduled):
            return node
        # Of adapters per turn each has its own.
        return node._replace(share=place(np.full(node.share.shape, share, np.float32)))

    return jax.tree.map(set_share, state, is_leaf=lambda node: isinstance(node, Scheduled))
