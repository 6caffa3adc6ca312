"""Whether a run learned something: sentences with figures where it did not."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

SUCCESS, REWARD = "rollout/success_rate", "rollout/reward_mean"
_NO_SIGNAL = "rollout/no_signal_fraction"
_ROLES = "rollout/role_reward/"  # rewards of roles, which the mean reward has no part of
WHERE_TO_LOOK = "docs/debugging.md has what to look at"
LAST_WORDS = "docs/debugging.md#the-last-words-of-a-run"
_FEWEST = 10  # iterations, below which the first and the last fifth are too few to be compared
_ERRORS = 2.0  # standard errors, within which two means are not told apart
_SOLVED = 0.99  # success above which nothing is left to learn
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


def learned_nothing(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """What says that a finished run learned nothing, each a sentence; empty: nothing does.

    Args:
      lines: of metrics.jsonl.
    """
    found = (flat_outcome(lines), _idle(lines), _unmoved(lines))
    return [sentence for sentence in found if sentence is not None]


def _idle(lines: Sequence[Mapping[str, Any]]) -> str | None:
    """Groups that were all equal, or gradients that were all zero, in every iteration."""
    count = sum("sweep/turns" in line for line in lines)
    signals = [line[_NO_SIGNAL] for line in lines if _NO_SIGNAL in line]
    taught = any("sweep/teacher_kl" in line for line in lines)  # learns from equal rewards, too
    if signals and not taught and all(share == 1 for share in signals):
        return (
            f"{_NO_SIGNAL} was 1 in all {len(signals)} iterations: the rewards of every group were"
            " equal, so no episode was better than another of its task."
        )
    if count and not any(line.get("sweep/updates") for line in lines):
        return (
            f"sweep/updates was 0 in all {count} iterations: no optimizer step changed a parameter."
        )
    return None


def _unmoved(lines: Sequence[Mapping[str, Any]]) -> str | None:
    """A mean reward whose first and last fifth differ by less than their standard errors."""
    rows = [line for line in lines if _is_finite(line.get(REWARD))]
    size = len(rows) // 5
    if len(rows) < _FEWEST or _mean(rows[-size:], SUCCESS) >= _SOLVED:
        return None
    first, last = _mean(rows[:size], REWARD), _mean(rows[-size:], REWARD)
    error = math.hypot(_standard_error(rows[:size]), _standard_error(rows[-size:]))
    if last - first > _ERRORS * error:
        return None
    return (
        f"the mean reward did not rise: {first:.3g} over the first {size} iterations and"
        f" {last:.3g} over the last {size}, a difference of {last - first:+.2g} with a standard"
        f" error of {error:.2g}."
    )


def _mean(rows: Sequence[Mapping[str, Any]], name: str) -> float:
    values = [row[name] for row in rows if _is_finite(row.get(name))]
    return math.fsum(values) / len(values) if values else math.nan


def _standard_error(rows: Sequence[Mapping[str, Any]]) -> float:
    """Of the mean of the iterations' mean rewards, from how these differ (n - 1)."""
    mean, count = _mean(rows, REWARD), len(rows)
    squares = math.fsum((row[REWARD] - mean) ** 2 for row in rows)
    return math.sqrt(squares / (count - 1) / count)


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
