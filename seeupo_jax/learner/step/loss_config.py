"""What is fixed about the loss of a sweep's steps."""

from __future__ import annotations

from dataclasses import dataclass

from seeupo_jax.algorithms.objectives import Objective


@dataclass(frozen=True)
class LossConfig:
    """What is fixed about the loss; hashable, part of each program.

    actions: that a row of a step may have, each with a ratio of its own.
    """

    objective: Objective
    ratio: str
    loss_mean: str
    old_is_current: bool  # the ratio is to the policy just before this very step
    clip_low: float | None
    clip_high: float | None
    clip_dual: float | None
    kl_coef: float
    weight_clip: float | None
    temperature: float
    tis_clip: float | None = None
    actions: int = 1

    @property
    def sums(self) -> tuple[str, ...]:
        """What a step counts for its metrics, beside the loss."""
        names = ("actions", "clipped", "kl", "weight_max")
        return names if self.tis_clip is None else (*names, "tis_weight", "tis_truncated")

    @property
    def reads_whole_ratio(self) -> bool:
        """Whether the gradient depends on the ratio of an action as a whole."""
        # The log-probability's gradient does not, and a ratio to the step's own policy is 1.
        clips = self.objective.has_ratio and self.ratio != "token"
        return clips and not self.old_is_current

    @property
    def weight_ratio(self) -> str:
        """The level of the ratio that updates M: always one number per action."""
        return "geometric" if self.ratio == "token" else self.ratio
