"""What is fixed about the loss of a sweep's steps."""

from __future__ import annotations

from dataclasses import dataclass

from seeupo_jax.algorithms.objectives import Objective
from seeupo_jax.configuration.algorithm import LossOptions
from seeupo_jax.configuration.entry_points import find_entry


@dataclass(frozen=True)
class LossConfig:
    """What is fixed about the loss; hashable, part of each program.

    old_is_current: the ratio is to the policy just before this very step.
    actions: that a row of a step may have, each with a ratio of its own.
    """

    options: LossOptions
    temperature: float
    old_is_current: bool
    actions: int = 1

    @property
    def objective(self) -> Objective:
        return find_entry("objective", self.options.objective)

    @property
    def kl_coef(self) -> float:
        """Of the KL term in the loss; 0 where rewards have it."""
        return self.options.kl_coef if self.options.kl_in == "loss" else 0.0

    @property
    def sums(self) -> tuple[str, ...]:
        """What a step counts for its metrics, beside the loss."""
        names = ("actions", "clipped", "kl", "weight_max")
        if self.options.tis_clip is not None:
            names = (*names, "tis_weight", "tis_truncated")
        if self.options.router_replay != "none":
            names = (*names, "routed", "router_mismatched")
        return (*names, "entropy") if self.options.entropy_coef else names

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
