"""Fields of the optimizer: its learning rate and schedule, and groups of parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from seeupo_jax.options import above, at_least, checked

SCHEDULES = ("constant", "linear", "cosine", "warmup_stable_decay")


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters that train in a way of their own: those that no group before it matches."""

    pattern: str = ""
    """A glob of whole paths such as layers/0/q/kernel, as --explain prints; * matches a / too."""
    frozen: bool = False
    """They do not train: they have no gradient and no optimizer state."""
    name: str | None = None
    """An optimizer as in optimizer.name; none: that one."""
    learning_rate: float | None = above(0, None, most=100)
    """Its learning rate, with the same schedule; none: optimizer.learning_rate."""
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Further arguments; those of optimizer.kwargs stay where the name is the same."""


@dataclass(frozen=True)
class Optimizer:
    """An optax optimizer, its learning rate and its schedule."""

    name: str = "adam"
    """An optimizer of optax, such as adamw or contrib.muon, or a user's own module:function."""
    learning_rate: float = above(0, 3e-4, most=100)
    """The highest learning rate of the schedule."""
    schedule: str = checked(
        "constant",
        f"one of {', '.join(SCHEDULES)}, or module:function",
        lambda v: v in SCHEDULES or ":" in v,
    )
    """Course of the learning rate over the iterations; a function of the iteration (from 1) and of
    their number returns the share of learning_rate."""
    warmup_iterations: int = at_least(0, 0)
    """Iterations over which the learning rate rises to its value."""
    warmup_steps: int = at_least(0, 0)
    """The same in optimizer steps, instead of iterations."""
    decay_iterations: int = at_least(0, 0)
    """The last iterations, over which warmup_stable_decay falls; 0 with any other schedule."""
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Further arguments of the optimizer."""
    max_grad_norm: float | None = above(0, 1.0)
    """Gradients are clipped to this norm, with lora.per_turn each adapter's by its own; none: not
    clipped."""
    groups: tuple[ParameterGroup, ...] = ()
    """Parameters with an optimizer of their own, or frozen: each a dict of pattern and what differs
    (frozen, name, learning_rate, kwargs); (): none."""
    ema: float | None = checked(None, "a number > 0 and < 1", lambda v: 0 < v < 1)
    """Decay per iteration of an average of the parameters, which is evaluated and exported in their
    place; none: no average."""
