"""How far the policies that sampled tokens are behind the one that is trained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from seeupo_jax.types import UNKNOWN_VERSION, Trajectory

# Versions whose optimizer steps a run remembers: a conversation may begin 64 sweeps too early, and
# what it is trained on ends a sweep later.
_REMEMBERED = 66


def remember_steps(steps_V: tuple[int, ...], steps: int) -> tuple[int, ...]:
    """The optimizer steps behind the newest versions of the policy, with those of one more.

    Args:
      steps_V: of consecutive versions, the newest last. steps: >= the last of them.
    """
    return (*steps_V, steps)[-_REMEMBERED:]


def policy_lag(
    trajectories: Sequence[Trajectory], version: int, steps_V: Sequence[int]
) -> dict[str, float]:
    """Metrics of the lag, of every sampled token of known version; NaN without any.

    The lag in steps is of the tokens whose version is one of the last in `steps_V`.

    Args:
      version: sweeps that the policy before the sweep has behind it.
      steps_V: optimizer steps behind this policy and the versions before it, its own last.
    """
    known = [version_L for t in trajectories if (version_L := _versions(t)).size]
    lag_X = version - np.concatenate(known) if known else np.zeros(0, int)
    behind_V = np.asarray(steps_V, int)[::-1]  # by lag
    steps_X = behind_V[:1] - behind_V[lag_X[lag_X < behind_V.size]]
    mixed = [len(np.unique(version_L)) > 1 for version_L in known]
    return {
        "rollout/policy_lag": _reduced(np.max, lag_X),
        "rollout/policy_lag_mean": _reduced(np.mean, lag_X),
        "rollout/policy_lag_steps": _reduced(np.max, steps_X),
        "rollout/policy_lag_steps_mean": _reduced(np.mean, steps_X),
        "rollout/mixed_versions": _reduced(np.mean, mixed),
    }


def _versions(trajectory: Trajectory) -> np.ndarray:
    """The known versions of its sampled tokens."""
    by_segment = [s.versions(trajectory.policy_version) for s in trajectory.segments]
    version_L = np.concatenate([np.zeros(0, np.int32), *by_segment])
    return version_L[version_L != UNKNOWN_VERSION]


def _reduced(reduction: Any, x_X: np.ndarray | Sequence[float]) -> float:
    return float(reduction(x_X)) if len(x_X) else float("nan")
