"""Group-relative advantages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_FLAT = 1e-6  # a batch whose standard deviation is at most this is not divided by it
SCALES = ("batch", "none", "group")


def group_relative(
    reward: Sequence[float],
    group: Sequence[int],
    kept: np.ndarray,
    *,
    scale: str,
    clip: float | None,
) -> np.ndarray:
    """Reward minus its group's mean, in the unit of `scale`; NaN where not kept: float64 [N].

    Args:
      kept: bool [N]; the others count in no mean. No group has a single one kept.
      scale: `none`; `batch`, divided by the standard deviation over all (n - 1) and then bounded
        by `clip`; `group`, divided by the group's standard deviation (n - 1).
    """
    # Float32 first: what a trainer that keeps rewards in float32 tells apart.
    reward_N = np.array(reward, np.float32).astype(np.float64)
    advantage_N = np.full(len(reward_N), np.nan)
    for name in set(np.array(group)[kept].tolist()):
        members = kept & (np.array(group) == name)
        own = reward_N[members] - reward_N[members].mean()
        if scale == "group":
            own = own / (own.std(ddof=1) + _FLAT)
        advantage_N[members] = own
    if scale == "batch" and kept.any():
        own = advantage_N[kept]
        std = np.sqrt((own**2).sum() / (len(own) - 1))
        own = own / std if std > _FLAT else own
        advantage_N[kept] = own if clip is None else own.clip(-clip, clip)
    return advantage_N
