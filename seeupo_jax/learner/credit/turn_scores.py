"""Scores of turns by an auxiliary model, and its steps on an iteration's trajectories."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from seeupo_jax.algorithms.preference import pair_preference
from seeupo_jax.algorithms.progress_attribution import progress_loss
from seeupo_jax.configuration.algorithm import Algorithm
from seeupo_jax.learner.batching import (
    ActionSpan,
    SegmentBatch,
    all_actions,
    lay_out,
    scatter,
    turn_batch,
)
from seeupo_jax.learner.compiled_programs import Learner
from seeupo_jax.learner.credit.credit_arrays import CreditArrays
from seeupo_jax.learner.credit.sampled_tokens import Ragged
from seeupo_jax.types import TrainState, Trajectory, TurnBatch


class ScorerLoss(NamedTuple):
    """The loss of the scorer's step.

    score_grad: derivative of the loss by the score of each token; None: there is nothing to learn
      from, and no step is taken.
    """

    score_grad: Ragged | None
    metrics: dict[str, float]


class TurnScores(NamedTuple):
    """A scorer before and after its steps.

    per_token: scores before the steps, by the name that `CreditArrays` reads.
    """

    train: TrainState
    per_token: Mapping[str, Ragged]
    metrics: dict[str, float]


def score_turns(
    learner: Learner,
    train: TrainState,
    rows: SegmentBatch,
    trajectories: Sequence[Trajectory],
    per_token: Mapping[str, Ragged],
    *,
    epochs: int,
) -> TurnScores:
    """The scorer's scores of an iteration's turns, and its steps on them; `train` is donated.

    Args:
      per_token: `old_logp`.
      epochs: passes that score all turns and then take a step.
    """
    algorithm, shapes, scorer = learner.algorithm, learner.shapes, learner.scorer
    rows = dataclasses.replace(rows, experts=None)  # the scorer has routers of its own
    spans = all_actions(rows) if scorer.of_tokens else _turn_ends(rows)
    layout = lay_out(rows, spans, shapes, shapes.long)
    size = {"action": shapes.longest, "behind": not scorer.of_tokens}
    batch = turn_batch(rows, layout, shapes, {}, **size)
    first, metrics, steps = None, {}, []
    for _ in range(epochs):
        output = [np.zeros(len(tokens), np.float32) for tokens in rows.tokens]
        scatter(output, spans, np.asarray(_scorer_output(learner, train, batch)))
        scores = {"scorer_logp" if scorer.of_tokens else "progress": output}
        arrays = CreditArrays(algorithm, shapes, rows, trajectories, {**per_token, **scores})
        loss = scorer_loss(algorithm, arrays, rows, trajectories)
        if first is None:
            first, metrics = scores, loss.metrics
        if loss.score_grad is None:
            break
        with_grad = turn_batch(rows, layout, shapes, {"score_grad": loss.score_grad}, **size)
        train, step_metrics = learner.scorer_step(train, with_grad)
        steps.append(step_metrics)
    if steps:
        fetched = jax.device_get(steps)
        norms, skipped = ([float(step[name]) for step in fetched] for name in _STEP_METRICS)
        metrics["sweep/scorer_grad_norm"] = float(np.mean(norms))
        metrics["sweep/scorer_skipped"] = sum(skipped)
    return TurnScores(train, first, metrics)


_STEP_METRICS = ("scorer_grad_norm", "scorer_skipped")


def _scorer_output(learner: Learner, train: TrainState, batch: TurnBatch) -> Any:
    """The scorer's output for each of a batch's tokens: progress or log-probability, [P, A]."""
    params = train.scorer.params
    if not learner.scorer.of_tokens:
        return learner.value(train.params, params, batch)
    return learner.scored(params["trunk"], batch).logp_PA


def _turn_ends(rows: SegmentBatch) -> list[ActionSpan]:
    """The last sampled token of each turn."""
    spans = []
    for segment, turn_L in enumerate(rows.turn):
        # Each turn lies in one segment. Reversed: the first of a turn is found.
        turns, first = np.unique(turn_L[::-1], return_index=True)
        last = np.sort(len(turn_L) - 1 - first[turns >= 0])
        if last.size:
            spans.append(ActionSpan(segment, last))
    return spans


def scorer_loss(
    algorithm: Algorithm,
    arrays: CreditArrays,
    rows: SegmentBatch,
    trajectories: Sequence[Trajectory],
) -> ScorerLoss:
    """The loss of the scorer that an algorithm's estimator needs.

    Args:
      arrays: with the scores.
    """
    loss = _over_pairs if algorithm.scorer == "policy" else _of_progress
    return loss(algorithm, arrays, rows, trajectories)


def scorer_program(algorithm: Algorithm) -> str:
    """Name of the program that `scorer_loss` runs."""
    return (pair_preference if algorithm.scorer == "policy" else progress_loss).__name__


def _over_pairs(
    algorithm: Algorithm,
    arrays: CreditArrays,
    rows: SegmentBatch,
    trajectories: Sequence[Trajectory],
) -> ScorerLoss:
    """Over the pairs of a success and a failure of one group.

    A trajectory's score is the mean (iStar's authors' code) or the sum (their paper) of its turns'
    implicit rewards.
    """
    turns_N = arrays.mask_NK.sum(axis=1)
    share_N = np.ones(len(turns_N), np.float32)
    if algorithm.estimator.pair_score == "mean":
        share_N = np.float32(1 / np.maximum(turns_N, 1))
    success_N = np.array([t.reward > algorithm.estimator.success_above for t in trajectories], bool)
    preference = pair_preference(
        arrays.implicit_NK.sum(axis=1) * share_N, success_N, arrays.group_N, arrays.valid_N
    )
    pairs = int(preference.pairs)
    metrics = {"sweep/pairs": float(pairs)}
    if not pairs:
        return ScorerLoss(None, metrics)
    metrics["sweep/pair_loss"] = float(preference.loss)
    metrics["sweep/pair_accuracy"] = float(preference.accuracy)
    slope_N = algorithm.estimator.implicit_coef * share_N * np.asarray(preference.slope_N)
    return ScorerLoss(_of_tokens(rows, slope_N), metrics)


def _of_progress(
    algorithm: Algorithm,
    arrays: CreditArrays,
    rows: SegmentBatch,
    trajectories: Sequence[Trajectory],
) -> ScorerLoss:
    """The loss of each trajectory's summed contributions against its reward."""
    reward_N = np.array([t.reward for t in trajectories], np.float32)
    regression = progress_loss(arrays.progress_NL.sum(axis=1), reward_N, arrays.valid_N)
    metrics = {
        "sweep/progress_loss": float(regression.loss),
        "sweep/progress_error": float(regression.error),
    }
    return ScorerLoss(_of_tokens(rows, np.asarray(regression.slope_N)), metrics)


def _of_tokens(rows: SegmentBatch, slope_N: np.ndarray) -> Ragged:
    pairs = zip(rows.trajectory_S, rows.turn, strict=True)
    return [np.full(len(turn_L), slope_N[owner], np.float32) for owner, turn_L in pairs]
