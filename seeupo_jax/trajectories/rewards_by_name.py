"""The named rewards of several trajectories as columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from seeupo_jax.envs.validation import OWN_REWARD as OWN_REWARD
from seeupo_jax.types import Trajectory, rewards_of


def named_rewards(
    trajectories: Sequence[Trajectory], first: Iterable[str] = ()
) -> dict[str, np.ndarray]:
    """Rewards by name, float64 [N], before their weights; empty where none has a name.

    One that a trajectory was not given is 0 there.

    Args:
      first: names that come first, where trajectories have them; then `env`, then the others by the
        alphabet: the order of the trajectories does not matter.
    """
    named = {name for t in trajectories for name in t.rewards}
    # A reward without names is all the environment's own.
    given = [t.rewards if t.rewards else {OWN_REWARD: t.reward} for t in trajectories]
    names = _in_order(named, first)
    return {name: np.array([g.get(name, 0.0) for g in given], np.float64) for name in names}


def named_turn_rewards(
    trajectories: Sequence[Trajectory], first: Iterable[str] = (), earlier: Iterable[str] = ()
) -> dict[str, list[list[float]]]:
    """As `named_rewards`, for each turn: a list per trajectory, empty for one that failed.

    Args:
      earlier: names that the run has had, even if no trajectory here has them; `env` alone does not
        count as a name.
    """
    named = {name for t in trajectories if not t.failed for name in t.named_turn_rewards}
    if named or {*earlier} - {OWN_REWARD}:
        named |= {*earlier}
    return {
        name: [[] if t.failed else _of_turns(t, name) for t in trajectories]
        for name in _in_order(named, first)
    }


def _in_order(named: set[str], first: Iterable[str]) -> list[str]:
    names = [name for name in dict.fromkeys((*first, OWN_REWARD)) if name in named]
    return names + sorted(named.difference(names))


def _of_turns(trajectory: Trajectory, name: str) -> list[float]:
    named = trajectory.named_turn_rewards
    if not named:
        return rewards_of(trajectory) if name == OWN_REWARD else [0.0] * trajectory.turns
    return list(named.get(name, [0.0] * trajectory.turns))
