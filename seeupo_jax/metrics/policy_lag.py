"""How far the policies that sampled trajectories are behind the one that is trained."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from seeupo_jax.types import UNKNOWN_VERSION, Trajectory


def policy_lag(trajectories: Sequence[Trajectory], version: int) -> dict[str, float]:
    """Metrics of the lag, in sweeps; means are NaN without a sampled token of known version.

    Args:
      trajectories: of which at least one has a `policy_version`.
      version: sweeps that the trained policy has behind it.
    """
    versions = [
        np.concatenate(
            [segment.versions(t.policy_version) for segment in t.segments] or [np.zeros(0, int)]
        )
        for t in trajectories
    ]
    known = [version_L[version_L != UNKNOWN_VERSION] for version_L in versions]
    sampled = [version_L for version_L in known if version_L.size]
    mean, mixed = float("nan"), float("nan")
    if sampled:
        mean = float(np.mean(version - np.concatenate(sampled)))
        mixed = float(np.mean([len(np.unique(version_L)) > 1 for version_L in sampled]))
    began = [t.policy_version for t in trajectories if t.policy_version is not None]
    return {
        "rollout/policy_lag": version - min(began),
        "rollout/policy_lag_mean": mean,
        "rollout/mixed_versions": mixed,
    }
