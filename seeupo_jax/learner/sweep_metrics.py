"""Metrics of a sweep: over all steps, per turn, and per trajectory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from seeupo_jax.learner.batching import SegmentBatch, forced_fraction
from seeupo_jax.learner.compiled_programs import Learner
from seeupo_jax.learner.sweep_plan import SweepPlan
from seeupo_jax.learner.sweep_state import OptimizerStep, SweepState
from seeupo_jax.metric_table import OF_TURNS, STEPS
from seeupo_jax.types import TrajectoryStats


class Weights(NamedTuple):
    """The weights M of a sweep's steps; NaN where no step was taken.

    mean_NK: M of the turn's action; with ratio=token the mean over the turn's tokens.
    largest_NK: its absolute value; with ratio=token the largest of these tokens.
    """

    mean_NK: np.ndarray
    largest_NK: np.ndarray


def host_metrics(steps: Sequence[OptimizerStep]) -> list[dict[str, float]]:
    """Metrics of every step, as host numbers; this waits for the device once."""
    fetched = jax.device_get([dict(step.metrics) for step in steps])
    return [{name: float(value) for name, value in step.items()} for step in fetched]


def sweep_metrics(
    learner: Learner, current: SweepState, plan: SweepPlan, weights: Weights, iteration: int
) -> dict[str, float]:
    """Metrics of a sweep whose steps are all taken."""
    totals = host_metrics(current.steps)
    metrics = _summary(current, totals, len(plan.updates)) | _of_turns(current, weights, totals)
    if learner.schedule is not None:
        done = max(int(current.train.step) - 1, 0)  # optimizer steps before the sweep's last
        metrics["sweep/learning_rate"] = learner.schedule.rate(iteration, done)
    return {**current.data.initial_metrics, **metrics}


def exclusion_metrics(learner: Learner, rows: SegmentBatch) -> dict[str, float]:
    """Metrics of the tokens and the trajectories that are excluded from updates."""
    metrics = {"sweep/forced_fraction": forced_fraction(rows)} if learner.truncated else {}
    if rows.masked_S is not None:
        masked = len(np.unique(rows.trajectory_S[rows.masked_S]))
        metrics["sweep/masked_trajectories"] = masked
    return metrics


def trajectory_stats(current: SweepState, weights: Weights) -> list[TrajectoryStats | None]:
    """Statistics of every trajectory, in order; None for those that the sweep left out."""
    rows, initial = current.data.rows, current.data.initial
    owner, _, advantage = _actions(current)
    count_N = np.bincount(owner, minlength=rows.trajectories)
    total_N = np.bincount(owner, advantage, minlength=rows.trajectories)
    stats: list[TrajectoryStats | None] = [None] * rows.trajectories
    for number in np.unique(rows.trajectory_S):
        segments = np.flatnonzero(rows.trajectory_S == number)
        turns = 1 + max(int(rows.turn[segment].max(initial=-1)) for segment in segments)
        stats[number] = TrajectoryStats(
            float(total_N[number] / count_N[number]) if count_N[number] else float("nan"),
            weights.mean_NK[number, :turns].astype(np.float32),
            *(tuple(numbers[segment] for segment in segments) for numbers in initial.values()),
        )
    return stats


def step_weights(learner: Learner, current: SweepState, plan: SweepPlan) -> Weights:
    """M = advantage x cumulative ratio of every trajectory and turn; fetches all ratios at once."""
    rows = current.data.rows
    shape = rows.trajectories, rows.turns
    owner, turn, advantage = _actions(current)
    place = np.ravel_multi_index((owner, turn), shape)
    count_NK = np.bincount(place, minlength=np.prod(shape)).reshape(shape)
    total_NK = np.bincount(place, advantage, minlength=np.prod(shape)).reshape(shape)
    largest_NK = np.zeros(shape)
    np.maximum.at(largest_NK, (owner, turn), np.abs(advantage))
    mean_NK = total_NK / np.maximum(count_NK, 1)
    if learner.algorithm.ratio != "token":  # of all tokens of an action, as its term
        for turns in (list(action) for update in plan.updates for action in update.actions):
            total_N, tokens_N = (x_NK[:, turns].sum(axis=1) for x_NK in (total_NK, count_NK))
            mean_NK[:, turns] = (total_N / np.maximum(tokens_N, 1))[:, None]
        largest_NK = abs(mean_NK)
    ratio_NK = np.full(shape, np.nan)
    ratios = jax.device_get([step.cumulative_ratio_N for step in current.steps])
    # The first of several steps on some turns: all of them weighed by its ratio.
    for step, ratio_N in reversed([*zip(current.steps, ratios, strict=True)]):
        ratio_NK[:, list(step.turns)] = np.asarray(ratio_N)[:, None]
    ratio_NK[count_NK == 0] = np.nan
    ratio_NK[rows.trajectory_S[~rows.updated_S]] = np.nan
    return Weights(mean_NK * ratio_NK, largest_NK * abs(ratio_NK))


def _of_turns(
    current: SweepState, weights: Weights, totals: Sequence[Mapping[str, float]]
) -> dict[str, float]:
    """Metrics of every turn that a step was taken on, counted from 1.

    Turns that were updated together have no metrics of their step.

    Args:
      totals: metrics of every optimizer step, on the host.
    """
    metrics: dict[str, float] = {}
    for turn in range(current.data.rows.turns):
        trained_N = ~np.isnan(weights.mean_NK[:, turn])
        if trained_N.any():
            mean, largest = (x_NK[trained_N, turn] for x_NK in weights)
            metrics[f"sweep/weight_mean/turn={turn + 1}"] = float(mean.mean())
            metrics[f"sweep/weight_max/turn={turn + 1}"] = float(largest.max())
        pairs = zip(current.steps, totals, strict=True)
        steps = [total for step, total in pairs if step.turns == (turn,)]
        if any(step["actions"] for step in steps):
            for metric in OF_TURNS:
                share = REDUCTIONS[metric.over](steps, metric.counted)
                metrics[f"{metric.name}/turn={turn + 1}"] = share
    return metrics


def _actions(current: SweepState) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Trajectory, turn and advantage of every action token."""
    rows = current.data.rows
    owner = np.repeat(rows.trajectory_S, [len(tokens) for tokens in rows.tokens])
    turn = np.concatenate(rows.turn)
    advantage = np.concatenate(current.per_token["advantage"]).astype(np.float64)
    acted = turn >= 0
    return owner[acted], turn[acted], advantage[acted]


def _summary(
    current: SweepState, totals: Sequence[Mapping[str, float]], updates: int
) -> dict[str, float]:
    """Metrics over all steps."""
    counts = current.counts
    return {
        "sweep/turns": updates,
        "sweep/steps": len(totals),
        **{
            metric.name: REDUCTIONS[metric.over](totals, metric.counted)
            for metric in STEPS
            if metric.counted in totals[0]
        },
        "sweep/updates": sum(0 < step["grad_norm"] < np.inf for step in totals),
        "sweep/tokens": counts.tokens,
        "sweep/shared_fraction": 1 - counts.computed / counts.tokens,
        "sweep/padding_fraction": 1 - counts.computed / counts.padded,
    }


def _over(counted: str) -> Callable[[Sequence[Mapping[str, float]], str], float]:
    """A sum of all steps, divided by another one; NaN where that is 0."""

    def share(steps: Sequence[Mapping[str, float]], name: str) -> float:
        total = sum(step[counted] for step in steps)
        return sum(step[name] for step in steps) / total if total else float("nan")

    return share


# By their names in `metric_table`.
REDUCTIONS: dict[str, Callable[[Sequence[Mapping[str, float]], str], float]] = {
    "sum / actions": _over("actions"),
    "sum / replayed": _over("replayed"),
    "sum / taught": _over("taught"),
    "mean of steps": lambda steps, name: float(np.mean([step[name] for step in steps])),
    "sum": lambda steps, name: sum(step[name] for step in steps),
    "max": lambda steps, name: max(step[name] for step in steps),
}
