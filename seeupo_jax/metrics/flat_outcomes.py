"""Whether success or the reward never moved, in a sentence with figures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

SUCCESS, REWARD = "rollout/success_rate", "rollout/reward_mean"
_ROLES = "rollout/role_reward/"  # rewards of roles, which the mean reward has no part of
WHERE_TO_LOOK = "docs/debugging.md has what to look at"
_ROUNDING = 1e-6  # relative, of a mean of float32 rewards


def flat_outcome(lines: Sequence[Mapping[str, Any]]) -> str | None:
    """A warning if success stayed 0 in a run's training rollouts; None if all is well.

    Success that changes while the reward stays constant is a warning, too. A policy that always
    succeeds is none, nor is a single iteration.

    Args:
      lines: of metrics.jsonl; those of evaluations are not read.
    """
    pairs = [(line[SUCCESS], line.get(REWARD)) for line in lines if SUCCESS in line]
    pairs = [pair for pair in pairs if all(map(_is_finite, pair))]
    if len(pairs) < 2:
        return None
    success, reward = ((min(values), max(values)) for values in zip(*pairs, strict=True))
    moves = reward[1] - reward[0] > _ROUNDING * max(map(abs, reward))
    between = (
        f"between {reward[0]:.3g} and {reward[1]:.3g}" if moves else f"{reward[0]:.3g} in each"
    )
    if success[1] == 0:
        return (
            f"{SUCCESS} was 0 in all {len(pairs)} iterations: no episode had a score of 1. The mean"
            f" reward was {between}. {WHERE_TO_LOOK}, in question 3."
        )
    of_roles = any(name.startswith(_ROLES) for line in lines for name in line)
    if success[0] < success[1] and not moves and not of_roles:
        return (
            f"the mean reward was {reward[0]:.3g} in all {len(pairs)} iterations, while {SUCCESS}"
            f" was between {success[0]:.3g} and {success[1]:.3g}: success earns nothing."
            f" {WHERE_TO_LOOK}, in question 3."
        )
    return None


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
