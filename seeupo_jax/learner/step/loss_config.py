"""The static options of the loss of a sweep's steps."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from seeupo_jax.algorithms.covariance import KlCovariance, NoCovariance
from seeupo_jax.algorithms.objectives import BOUNDS, Objective
from seeupo_jax.configuration.algorithm import LossOptions

# Options of the loss that are numbers, or None. Programs take them, and those of its sections, as
# arguments, so that another coefficient or clip range compiles nothing anew.
NUMBERS = tuple(field.name for field in fields(LossOptions) if "float" in str(field.type))
Numbers = dict[str, np.float32]


@dataclass(frozen=True)
class LossConfig:
    """The static options of the loss; without its numbers it is hashable, part of each program.

    objective: what the options' name of one stands for: a user's may be another one by now.
    old_is_current: the ratio is to the policy just before this very step.
    actions: that a row of a step may have, each with a ratio of its own.
    finds_entropy: whether a step also returns the entropy at every token.
    teacher_coef: of the forward KL divergence from teachers; None: the loss has none.
    """

    options: LossOptions
    objective: Objective
    temperature: float
    old_is_current: bool
    actions: int = 1
    finds_entropy: bool = False
    teacher_coef: float | None = None

    def split(self) -> tuple[LossConfig, Numbers]:
        """Itself without numbers, and these by name, without what the program does not read."""
        options, unread = self.options, {*BOUNDS} - {*self.objective.bounds}
        if not self.entropy:
            unread.add("entropy_coef")
        held = {name: vars(options)[name] for name in NUMBERS if name not in unread}
        blank: dict[str, Any] = dict.fromkeys(NUMBERS)
        if not self.entropy:
            blank["entropy_coef"] = 0.0
        # What a sum over tokens is divided by, and the tokens that are limited, are arguments too.
        blank["covariance"] = NoCovariance()
        if isinstance(options.covariance, KlCovariance):
            held["covariance.coef"] = options.covariance.coef
            blank["covariance"] = KlCovariance()
        if options.loss_aggregation == "constant":
            blank |= {"loss_aggregation": "token"}
        of_teacher = None if self.teacher_coef is None else 0.0
        held["teacher_coef"] = self.teacher_coef
        numbers = {name: np.float32(x) for name, x in held.items() if x is not None}
        blanked = replace(self, options=replace(options, **blank), teacher_coef=of_teacher)
        return blanked, numbers

    def with_numbers(self, numbers: Numbers) -> LossConfig:
        """The inverse of `split`, with arrays as numbers."""
        values: dict[str, Any] = {}
        of_options = dict(numbers)
        teacher_coef: Any = of_options.pop("teacher_coef", None)
        for name, x in of_options.items():
            section, _, option = name.rpartition(".")
            if section:
                values[section] = replace(vars(self.options)[section], **{option: x})
            else:
                values[name] = x
        options = replace(self.options, **values)
        return replace(self, options=options, teacher_coef=teacher_coef)

    @property
    def kl_coef(self) -> float:
        """The coefficient of the KL term in the loss; 0 where rewards have it."""
        return self.options.kl_coef if self.options.kl_in == "loss" else 0.0

    @property
    def bounds(self) -> dict[str, Any]:
        """The options that the objective reads, by name."""
        return {name: vars(self.options)[name] for name in self.objective.bounds}

    @property
    def entropy(self) -> bool:
        """Whether the loss has an entropy bonus."""
        coef = self.options.entropy_coef
        return coef > 0 if isinstance(coef, int | float) else True  # an argument is never 0

    @property
    def needs_entropy(self) -> bool:
        """Whether a step computes the entropy."""
        return self.entropy or self.finds_entropy

    @property
    def sums(self) -> tuple[str, ...]:
        """The names of the sums that a step returns for its metrics, without the loss."""
        names = ("actions", "clipped", "kl", "weight_max")
        if self.options.router_replay != "none":
            names = (*names, "replayed", "router_mismatched")
        if self.teacher_coef is not None:
            names = (*names, "taught", "forward_kl")
        return (*names, "entropy") if self.entropy else names

    @property
    def reads_action_ratio(self) -> bool:
        """Whether the gradient depends on the ratio of an action as a whole."""
        # The log-probability's gradient does not, and a ratio to the step's own policy is 1.
        clips = self.objective.has_ratio and self.options.ratio != "token"
        return clips and not self.old_is_current

    @property
    def weight_ratio(self) -> str:
        """The level of the ratio that updates M: always one number per action."""
        return "geometric" if self.options.ratio == "token" else self.options.ratio
