"""PPO's controller of the coefficient of the KL penalty."""

from __future__ import annotations

_MOST = 0.2  # of the proportional error


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
