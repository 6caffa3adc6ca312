"""Optimizers with optax's names and defaults, schedules, and the bound on the gradients' norm."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_baseline import options

_BETAS = {"b1": 0.9, "b2": 0.999, "eps": 1e-8}
# Optimizer -> the keyword arguments it takes, with optax's defaults.
KWARGS: dict[str, dict[str, Any]] = {
    "sgd": {"momentum": None, "nesterov": False},
    "adam": _BETAS,
    "adamw": _BETAS | {"weight_decay": 1e-4},
}
_DECAY: dict[str, Callable[[float], float]] = {
    "constant": lambda progress: 1.0,
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
}


class Stepper:
    """Steps parameters by their gradients, or not at all where those are not finite."""

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        config: options.Optimizer,
        *,
        iterations: int,
        total_steps: int,
    ) -> None:
        """Raises ValueError where a keyword argument is unknown or the warm-up too long."""
        if config.warmup_iterations and config.warmup_iterations >= iterations:
            raise ValueError(
                f"config.optimizer.warmup_iterations: got {config.warmup_iterations}; allowed:"
                f" fewer than the run's {iterations} iterations."
            )
        if config.warmup_steps and config.warmup_steps >= total_steps:
            raise ValueError(
                f"config.optimizer.warmup_steps: got {config.warmup_steps}; allowed: fewer than"
                f" the run's {total_steps} optimizer steps."
            )
        self._parameters = list(parameters)
        self._config, self._iterations = config, iterations
        self._optimizer = _make(self._parameters, config)
        self.iteration = 1  # that steps are taken in
        self.steps = 0
        self.skipped = 0

    def step(self) -> torch.Tensor:
        """Steps and clears the gradients; returns their global norm before it was bounded."""
        grads = [p.grad for p in self._parameters if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(grads)
        if torch.isfinite(norm):
            if self._config.max_grad_norm is not None:
                torch._foreach_mul_(grads, (self._config.max_grad_norm / norm).clamp(max=1.0))
            for group in self._optimizer.param_groups:
                group["lr"] = learning_rate(
                    self._config, self.steps, self.iteration, self._iterations
                )
            self._optimizer.step()
            self.steps += 1
        else:
            self.skipped += 1
        self._optimizer.zero_grad(set_to_none=True)
        return norm


def learning_rate(config: options.Optimizer, step: int, iteration: int, iterations: int) -> float:
    """Of the step after `step` others, in an iteration from 1 on.

    It rises over the warm-up of iterations, then goes by the schedule; times a rise over a warm-up
    of steps.
    """
    warmup = config.warmup_iterations
    progress = (iteration - 1 - warmup) / max(iterations - warmup, 1)
    rise = min(iteration / max(warmup, 1), 1.0)
    rise *= min((step + 1) / max(config.warmup_steps, 1), 1.0)
    return config.learning_rate * rise * _DECAY[config.schedule](min(max(progress, 0.0), 1.0))


def _make(parameters: list[torch.Tensor], config: options.Optimizer) -> torch.optim.Optimizer:
    defaults = KWARGS[config.name]
    wrong = [key for key in config.kwargs if key not in defaults]
    if wrong:
        raise ValueError(
            f"config.optimizer.kwargs: got {wrong[0]!r} for {config.name}; allowed here:"
            f" {', '.join(defaults)}."
        )
    settings = defaults | dict(config.kwargs)
    shared = {"lr": config.learning_rate, "fused": True}
    if config.name == "sgd":
        momentum = 0.0 if settings["momentum"] is None else settings["momentum"]
        nesterov = settings["nesterov"] and momentum > 0
        return torch.optim.SGD(parameters, momentum=momentum, nesterov=nesterov, **shared)
    shared |= {"betas": (settings["b1"], settings["b2"]), "eps": settings["eps"]}
    if config.name == "adam":
        return torch.optim.Adam(parameters, **shared)
    return torch.optim.AdamW(parameters, weight_decay=settings["weight_decay"], **shared)
