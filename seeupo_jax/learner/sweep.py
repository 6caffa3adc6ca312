"""One iteration's updates: turn after turn, each weighted by the turns already updated.

`sweep_plan` states the passes; the sweep executes them in order. `sweep_start` has those before the
first update, `turn_update` those of one update: Eq. 6 and 8 of arXiv:2602.06554.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from seeupo_jax.learner.batching import SegmentBatch
from seeupo_jax.learner.compiled_programs import Learner
from seeupo_jax.learner.credit.information_gain import References
from seeupo_jax.learner.credit.overlong import with_overlong_penalties
from seeupo_jax.learner.credit.role_baselines import Baselines
from seeupo_jax.learner.credit.running_rewards import Statistics
from seeupo_jax.learner.reference_policy import next_kl_coef, sampled_kl
from seeupo_jax.learner.sweep_control import StepsInFlight, SweepStopped, resume_sweep
from seeupo_jax.learner.sweep_metrics import (
    exclusion_metrics,
    step_weights,
    sweep_metrics,
    trajectory_stats,
)
from seeupo_jax.learner.sweep_plan import SweepPlan
from seeupo_jax.learner.sweep_start import begin_sweep, with_step_scores
from seeupo_jax.learner.sweep_state import OptimizerStep, SweepState
from seeupo_jax.learner.turn_update import update_turn
from seeupo_jax.types import TrainState, Trajectory, TrajectoryStats


class SweepResult(NamedTuple):
    """The state after the last update, metrics, and the optimizer steps.

    stats: of each trajectory; None for those that were left out.
    """

    train: TrainState
    metrics: dict[str, float]
    stats: Sequence[TrajectoryStats | None]
    steps: Sequence[OptimizerStep]


def sweep(
    learner: Learner,
    train: TrainState,
    ref_params: Any,
    trajectories: Sequence[Trajectory],
    *,
    iteration: int,
    stop: Callable[[], bool] = lambda: False,
    on_step: Callable[[int, int], None] = lambda done, steps: None,
    resume: tuple[Mapping[str, Any], Mapping[str, Any]] | None = None,
    references: References | None = None,
    statistics: Statistics | None = None,
    baselines: Baselines | None = None,
    labels: Sequence[Mapping[str, str]] | None = None,
) -> SweepResult:
    """Updates the policy with one iteration's trajectories; `train` is donated.

    Args:
      ref_params: parameters of the reference policy of the KL penalty, unless the state has them.
      iteration: from 1; seeds the random order and the minibatches, and sets the learning rate. Its
        policy has version iteration - 1: ratios of other versions are to what the sampler recorded.
      stop: called before every update; it must return the same in all processes.
      on_step: called with the number of updates that the device has finished, and their total; the
        last call has the total twice.
      resume: arrays and notes of the `SweepStopped` that this sweep of the same trajectories ended
        with before; `train` is the one among them.
      references: answers of the tasks, for the information gain of turns; None: the gain of a turn
        is its reward.
      statistics, baselines: of the run's rewards and of its roles, as of `CreditArrays`.
      labels: of each trajectory's task, which select its teacher; None: none has any.

    Returns: without a single sampled turn nearly no metrics, and a state in which only the average
      of the parameters and the reference policy may have changed.

    Raises:
      SweepStopped: `stop` returned True.
    """
    shaped, shaping = with_overlong_penalties(learner.algorithm, trajectories)
    rows = learner.rows(trajectories)
    own = shaping | exclusion_metrics(learner, rows)
    of_run: dict[str, Any] = {
        "references": references,
        "statistics": statistics,
        "baselines": baselines,
        "labels": labels,
    }
    plan = learner.plan(rows.updated_turns, iteration)
    if not plan.updates:
        return _without_step(learner, train, plan, trajectories, own)
    train = learner.at_iteration(train, iteration)
    if resume is None:
        given = learner, train, ref_params, rows, trajectories, plan
        current = begin_sweep(*given, shaped=shaped, version=iteration - 1, **of_run)
    else:
        current = resume_sweep(learner, train, rows, trajectories, *resume)
    # Again: `mask_above` may have left no token of the last turns.
    plan = learner.plan(current.data.rows.updated_turns, iteration)
    if not plan.updates:
        metrics = {**current.data.initial_metrics, **own}
        return _without_step(learner, current.train, plan, trajectories, metrics)
    pace = StepsInFlight(len(plan.updates), stop, on_step)
    for update in plan.updates[current.done :]:
        if not pace.ready(current):
            raise SweepStopped(learner, current)
        current = update_turn(learner, current, update, seed=(learner.seed, iteration))
    result = _finish(learner, current, plan, rows, iteration, own)
    on_step(len(plan.updates), len(plan.updates))  # the metrics have waited for the last step
    return result


def _finish(
    learner: Learner,
    current: SweepState,
    plan: SweepPlan,
    rows: SegmentBatch,
    iteration: int,
    metrics: Mapping[str, float],
) -> SweepResult:
    """The result after the last update.

    Args:
      rows: as of `_adapt_kl_coef`. metrics: of all trajectories.
    """
    current = with_step_scores(learner, current)
    weights = step_weights(learner, current, plan)
    metrics = sweep_metrics(learner, current, plan, weights, iteration) | metrics
    train, adapted = _adapt_kl_coef(learner, current, rows)
    train = _end_iteration(learner, train, plan)
    return SweepResult(train, metrics | adapted, trajectory_stats(current, weights), current.steps)


def _without_step(
    learner: Learner,
    train: TrainState,
    plan: SweepPlan,
    trajectories: Sequence[Trajectory],
    metrics: Mapping[str, float],
) -> SweepResult:
    """The result of a sweep that takes no step."""
    train = _end_iteration(learner, train, plan)
    return SweepResult(train, {"sweep/turns": 0, **metrics}, [None] * len(trajectories), ())


def _end_iteration(learner: Learner, train: TrainState, plan: SweepPlan) -> TrainState:
    """The state after the passes that follow the updates, also if no step was taken."""
    for each in plan.after:
        if each.kind == "average":
            train = train._replace(ema=learner.average(train.params, train.ema))
        else:
            train = train._replace(reference=learner.move_reference(train.params, train.reference))
    return train


def _adapt_kl_coef(
    learner: Learner, current: SweepState, rows: SegmentBatch
) -> tuple[TrainState, dict[str, float]]:
    """The state with the next iteration's KL coefficient, and metrics of it.

    Args:
      rows: with the tokens that `mask_above` excludes from the sweep's.
    """
    train = current.train
    if train.kl_coef is None:
        return train, {}
    acted = np.concatenate(rows.turn) >= 0
    both = current.data.initial["trainer_logp"], current.per_token["ref_logp"]
    kl = sampled_kl(*(np.concatenate(logp)[acted] for logp in both))
    metrics = {"sweep/kl_coef": float(np.asarray(train.kl_coef)), "sweep/kl_sampled": kl}
    coef = next_kl_coef(learner.algorithm, train, kl, current.data.valid)
    return train._replace(kl_coef=learner.replicate(np.float32(coef))), metrics
