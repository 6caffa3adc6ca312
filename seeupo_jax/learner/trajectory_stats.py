"""What a sweep learned of each trajectory and at each turn, once all its steps are taken."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from seeupo_jax.learner.sweep_state import Pass
from seeupo_jax.types import Learned


class Weights(NamedTuple):
    """The weights that a sweep's steps were taken by; NaN where none was.

    mean_NK: M, its mean over the action's tokens where advantages differ between them.
    largest_NK: the largest |M| of these tokens.
    """

    mean_NK: np.ndarray
    largest_NK: np.ndarray


def weigh(current: Pass) -> Weights:
    """M = advantage x factor of every trajectory and turn; fetches all factors at once."""
    rows = current.rows
    shape = rows.trajectories, rows.turns
    owner, turn, advantage = _actions(current)
    place = np.ravel_multi_index((owner, turn), shape)
    count_NK = np.bincount(place, minlength=np.prod(shape)).reshape(shape)
    total_NK = np.bincount(place, advantage, minlength=np.prod(shape)).reshape(shape)
    largest_NK = np.zeros(shape)
    np.maximum.at(largest_NK, (owner, turn), np.abs(advantage))
    factor_NK = np.full(shape, np.nan)
    for turns, factor_N in jax.device_get(current.weighed):
        factor_NK[:, list(turns)] = np.asarray(factor_N)[:, None]
    factor_NK[count_NK == 0] = np.nan
    return Weights(total_NK / np.maximum(count_NK, 1) * factor_NK, largest_NK * abs(factor_NK))


def learned_of(current: Pass, weights: Weights) -> list[Learned | None]:
    """Of every trajectory, in order; None of those that the sweep left out."""
    rows = current.rows
    owner, _, advantage = _actions(current)
    count_N = np.bincount(owner, minlength=rows.trajectories)
    total_N = np.bincount(owner, advantage, minlength=rows.trajectories)
    learned: list[Learned | None] = [None] * rows.trajectories
    for number in np.unique(rows.trajectory_S):
        own = np.flatnonzero(rows.trajectory_S == number)
        turns = 1 + max(int(rows.turn[segment].max(initial=-1)) for segment in own)
        learned[number] = Learned(
            float(total_N[number] / count_N[number]) if count_N[number] else float("nan"),
            weights.mean_NK[number, :turns].astype(np.float32),
            *(tuple(numbers[segment] for segment in own) for numbers in current.started.values()),
        )
    return learned


def turn_metrics(
    current: Pass, weights: Weights, totals: Sequence[Mapping[str, float]]
) -> dict[str, float]:
    """Of every turn that a step was taken on, counted from 1.

    What only a step knows is left out of turns that were updated together.

    Args:
      totals: of every optimizer step, on the host.
    """
    metrics: dict[str, float] = {}
    for turn in range(current.rows.turns):
        trained_N = ~np.isnan(weights.mean_NK[:, turn])
        if trained_N.any():
            metrics |= {
                f"sweep/weight_mean/turn={turn + 1}": float(
                    weights.mean_NK[trained_N, turn].mean()
                ),
                f"sweep/weight_max/turn={turn + 1}": float(
                    weights.largest_NK[trained_N, turn].max()
                ),
            }
        pairs = zip(current.stepped, totals, strict=True)
        steps = [step for turns, step in pairs if turns == (turn,)]
        if actions := sum(step["actions"] for step in steps):
            for name, total in {"clip_fraction": "clipped", "kl": "kl"}.items():
                share = sum(step[total] for step in steps) / actions
                metrics[f"sweep/{name}/turn={turn + 1}"] = share
    return metrics


def _actions(current: Pass) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Trajectory, turn and advantage of every action token."""
    rows = current.rows
    owner = np.repeat(rows.trajectory_S, [len(tokens) for tokens in rows.tokens])
    turn = np.concatenate(rows.turn)
    advantage = np.concatenate(current.known["advantage"]).astype(np.float64)
    acted = turn >= 0
    return owner[acted], turn[acted], advantage[acted]
