"""PPO's controller of the coefficient of the KL penalty."""

from __future__ import annotations

from dataclasses import dataclass

from seeupo_jax.options import Group, Setting, above, refused, required, within

_MOST = 0.2  # of the proportional error


@dataclass(frozen=True)
class KlControl(Group):
    """Options of the controller."""

    target: float = required("a number > 0 and <= 10", lambda value: 0 < value <= 10)
    """KL to the reference policy, nats per token, that kl_coef is adapted to between iterations."""
    horizon: float = above(0, 10000.0)
    """Trajectories over which kl_coef changes by at most a fifth."""

    def check(self, setting: Setting) -> None:
        if not setting.algorithm.kl_coef:
            raise refused(
                "kl_control.target",
                f"{self.target:g} with kl_coef=0",
                "none, since kl_coef is multiplied, and 0 stays 0",
            )


@dataclass(frozen=True)
class ReferenceUpdates(Group):
    """Options of a reference policy that follows the policy."""

    every: int = required("a number >= 1", lambda value: value >= 1)
    """Iterations after each of which the reference policy moves to the policy."""
    decay: float = within(0, 1, 0.0)
    """Share of itself that the reference policy keeps, as a moving average; 0: none."""

    def check(self, setting: Setting) -> None:
        if not (setting.algorithm.reads_reference or setting.teacher):
            raise refused(
                "reference.every",
                f"{self.every} with kl_coef=0",
                "none, since nothing else reads the reference policy",
            )


def adapted_kl_coef(
    coef: float, kl: float, *, target: float, horizon: float, trajectories: int
) -> float:
    """coef (1 + clip(kl / target - 1, -0.2, 0.2) trajectories / horizon) (arXiv:1909.08593, §2.2).

    Args:
      coef: of the iteration that is over. kl, target: nats per token.
      horizon: trajectories; the share of it that an iteration has is at most 1.

    Returns: that of the next iteration, above 0 where `coef` is.
    """
    error = min(max(kl / target - 1.0, -_MOST), _MOST)
    return coef * (1.0 + error * min(1.0, trajectories / horizon))
