"""One iteration's updates: turn after turn, each weighted by the turns already updated.

In the order of the steps, with M = advantage x cumulative ratio:

    maximise  E[min(s_t M, clip(s_t, 1 - ε_low, 1 + ε_high) M)] - β KL(π || π_ref)     (Eq. 6)
    cumulative ratio <- s_t(π after the step) x cumulative ratio                        (Eq. 8)

From arXiv:2602.06554; `algorithms/` has the formulas, `learner/step/` the compiled step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from seeupo_jax.learner.batching import (
    ActionSpan,
    Layout,
    Rows,
    action_spans,
    lay_out,
    turn_batch,
)
from seeupo_jax.learner.credit.covariance import limit_tokens
from seeupo_jax.learner.credit.information_gain import References
from seeupo_jax.learner.credit.overlong import with_overlong_penalties
from seeupo_jax.learner.credit.running_rewards import Statistics
from seeupo_jax.learner.learner import Learner
from seeupo_jax.learner.optimization.turn_moments import of_turn, put_back
from seeupo_jax.learner.reference_policy import next_kl_coef, sampled_kl
from seeupo_jax.learner.refresh_batch import RefreshBatch, make_refresh_batch
from seeupo_jax.learner.sweep_control import Pace, SweepStopped, resume_sweep
from seeupo_jax.learner.sweep_metrics import (
    exclusion_metrics,
    step_weights,
    sweep_metrics,
    trajectory_stats,
)
from seeupo_jax.learner.sweep_start import begin_sweep, sweep_order
from seeupo_jax.learner.sweep_state import Step, SweepState
from seeupo_jax.types import TrainState, Trajectory, TrajectoryStats, TurnBatch


class SweepResult(NamedTuple):
    """The state after the last turn's step, metrics, and what the steps were.

    stats: of each trajectory; None of those left out.
    """

    train: TrainState
    metrics: dict[str, float]
    stats: Sequence[TrajectoryStats | None]
    steps: Sequence[Step]


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
) -> SweepResult:
    """Updates the policy with one iteration's trajectories; `train` is donated.

    Args:
      ref_params: parameters of the reference policy of the KL penalty, unless the state has them.
      iteration: from 1; seeds the random order and the minibatches, and sets the learning rate. Its
        policy has version iteration - 1: ratios of other versions are to what the sampler recorded.
      stop: asked before every turn; with several processes it must say the same in all.
      on_step: called with how many of the order's steps the device has done, last all, and of all.
      resume: arrays and notes of the `SweepStopped` that this sweep of the same trajectories ended
        with before; `train` is the one among them.
      references: answers of the tasks, for the information gain of turns; None: the gain of a turn
        is its reward.
      statistics: of the run's rewards, as of `running_statistics`; None: of these trajectories.

    Returns: without a single sampled turn nearly no metrics, and the state as it came but for what
      moves once an iteration: the average of the parameters and the reference policy.

    Raises:
      SweepStopped: as asked.
    """
    algorithm, seed = learner.algorithm, (learner.seed, iteration)
    _, shaped = with_overlong_penalties(algorithm, trajectories)
    rows = learner.rows(trajectories)
    shaped |= exclusion_metrics(learner, rows)
    if not rows.updated_turns:
        return _without_step(learner, train, trajectories, iteration, shaped)
    train = learner.at_iteration(train, iteration)
    if resume is None:
        current = begin_sweep(
            learner,
            train,
            ref_params,
            rows,
            trajectories,
            version=iteration - 1,
            references=references,
            statistics=statistics,
        )
    else:
        current = resume_sweep(learner, train, rows, trajectories, *resume)
    order = sweep_order(algorithm, current.data.rows, seed)
    if not order:  # every token was too likely to learn from
        metrics = {**current.data.initial_metrics, **shaped}
        return _without_step(learner, current.train, trajectories, iteration, metrics)
    pace = Pace(len(order), stop, on_step)
    for turns in order[current.done :]:
        if not pace.ready(current):
            raise SweepStopped(learner, current)
        last = turns == order[-1]
        current = update_turn(learner, current, turns, last=last, seed=(*seed, *turns))
    weights = step_weights(learner, current)
    metrics = sweep_metrics(learner, current, weights, iteration, len(order)) | shaped
    on_step(len(order), len(order))  # the metrics have waited for the last step
    train, adapted = _adapt_kl_coef(learner, current, rows)
    train = _end_iteration(learner, train, iteration)
    return SweepResult(train, metrics | adapted, trajectory_stats(current, weights), current.steps)


def _without_step(
    learner: Learner,
    train: TrainState,
    trajectories: Sequence[Trajectory],
    iteration: int,
    metrics: Mapping[str, float],
) -> SweepResult:
    """The result of a sweep that takes no step."""
    train = _end_iteration(learner, train, iteration)
    return SweepResult(train, {"sweep/turns": 0, **metrics}, [None] * len(trajectories), ())


def _end_iteration(learner: Learner, train: TrainState, iteration: int) -> TrainState:
    """The state with what follows the policy once an iteration, also where no step was taken."""
    if learner.ema is not None:
        train = train._replace(ema=learner.average(train.params, train.ema))
    updates = learner.algorithm.reference
    if updates is not None and iteration % updates.every == 0:
        train = train._replace(reference=learner.move_reference(train.params, train.reference))
    return train


def _adapt_kl_coef(
    learner: Learner, current: SweepState, rows: Rows
) -> tuple[TrainState, dict[str, float]]:
    """The state after the last step with the next iteration's KL coefficient, and metrics of it.

    Args:
      rows: with the tokens that `mask_above` makes context in those of the sweep.
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


def update_turn(
    learner: Learner,
    current: SweepState,
    turns: tuple[int, ...],
    *,
    last: bool,
    seed: Sequence[int],
) -> SweepState:
    """Updates the policy at one turn, or at turns merged into one step, and its weights M.

    Args:
      current: its arrays on the device are donated.
      last: whether no step follows that would be weighted.
      seed: of minibatches, and of tokens that are drawn at random.
    """
    spans = action_spans(current.data.rows, turns)
    if spans and learner.fused:
        current = _fused_turn(learner, current, turns, spans, seed=seed)
    elif spans:
        current = _separate_turn(learner, current, turns, spans, last=last, seed=seed)
    return current._replace(done=current.done + 1)


def _fused_turn(
    learner: Learner,
    current: SweepState,
    turns: tuple[int, ...],
    spans: list[ActionSpan],
    *,
    seed: Sequence[int],
) -> SweepState:
    """One program: Eq. 8 of the step before, then Eq. 6 of these turns."""
    rows, by_turn = current.data.rows, learner.algorithm.old_policy == "turn"
    layout = lay_out(rows, spans, learner.shapes)
    refresh_batch, remaining = make_refresh_batch(
        rows, layout, current.refresh_next, learner.shapes, current.per_token["old_logp"]
    )
    if by_turn:
        pending = current.pending_logp
        old_logp_PA = pending[1] if pending else learner.replicate(refresh_batch.old_logp_PA)
        refresh_batch = refresh_batch._replace(old_logp_PA=old_logp_PA)
    if remaining:  # Eq. 8 of spans that the program has no room for, by one of their own
        current = current.fetch_pending()
        longest = lay_out(rows, remaining, learner.shapes, learner.shapes.lengths[-1:])
        current = _refresh(learner, current, longest)
    current, logp_PA = _step(learner, current, turns, layout, refresh_batch, spans, seed)
    return current._replace(pending_logp=(spans, logp_PA) if by_turn else None, refresh_next=spans)


def _separate_turn(
    learner: Learner,
    current: SweepState,
    turns: tuple[int, ...],
    spans: list[ActionSpan],
    *,
    last: bool,
    seed: Sequence[int],
) -> SweepState:
    """Any number of steps on these turns (Eq. 6), then a pass of its own for Eq. 8."""
    rows, algorithm = current.data.rows, learner.algorithm
    layout = lay_out(rows, spans, learner.shapes)
    if algorithm.old_policy == "turn":
        current, batch = current.batch(learner, layout)
        current = current.with_logp("old_logp", spans, learner.score(current.train.params, batch))
    rng = np.random.default_rng(seed)
    for _ in range(algorithm.inner_epochs):
        for part in _minibatches(rows, spans, algorithm.minibatches_per_turn, rng):
            part_layout = layout if part is spans else lay_out(rows, part, learner.shapes)
            current, _ = _step(learner, current, turns, part_layout, None, spans, seed)
    return _refresh(learner, current, layout) if algorithm.weighs and not last else current


def _step(
    learner: Learner,
    current: SweepState,
    turns: tuple[int, ...],
    layout: Layout,
    refresh_batch: RefreshBatch | None,
    spans: Sequence[ActionSpan],
    seed: Sequence[int],
) -> tuple[SweepState, jax.Array]:
    """One optimizer step (Eq. 6) on the spans of a layout: all of a turn's `spans`, or a minibatch.

    Args:
      refresh_batch: spans of the step before, refreshed (Eq. 8) by the same program; None: none.

    Returns: the state, and the log-probabilities [P, A] of the step's tokens before it.
    """
    current, batch, counted = _step_batch(learner, current, layout, seed)
    train, cumulative_ratio_N, logp_PA, metrics = learner.turn_step(
        of_turn(current.train, turns),
        batch,
        refresh_batch,
        current.cumulative_ratio_N,
        _denominator(learner, current, spans, layout.spans),
    )
    train = put_back(train, current.train, turns)
    after = current.after_step(turns, train, cumulative_ratio_N, {**metrics, **counted})
    return after, logp_PA


def _refresh(learner: Learner, current: SweepState, layout: Layout) -> SweepState:
    """Eq. 8 of spans that the last step updated, by a pass of its own."""
    current, batch = current.batch(learner, layout)
    refreshed_N = learner.refresh(current.train.params, batch, current.cumulative_ratio_N)
    return current._replace(cumulative_ratio_N=refreshed_N)


def _step_batch(
    learner: Learner, current: SweepState, layout: Layout, seed: Sequence[int]
) -> tuple[SweepState, TurnBatch, Mapping[str, float]]:
    """The batch of a step, and what it counts for the step's metrics.

    Where an action's tokens lie in several spans, its ratio is needed before the gradient: by a
    pass of its own, unless no step has moved the policy yet.
    """
    reads = "logp" in current.per_token and learner.loss_config.reads_action_ratio
    parts = _parts_of_actions(current, layout.spans) if reads and current.steps else []
    if parts:
        current = current.with_logp("logp", parts, _logp_now(learner, current, parts))
    current, batch = current.batch(learner, layout)
    algorithm = learner.algorithm
    if algorithm.covariance.kind == "none":
        return current, batch, {}
    logp_PA = _logp_now(learner, current, layout.spans)[:, : batch.mask_PA.shape[1]]
    rng = np.random.default_rng((*seed, len(current.steps)))
    return current, *limit_tokens(algorithm, batch, logp_PA, rng)


def _logp_now(learner: Learner, current: SweepState, spans: Sequence[ActionSpan]) -> np.ndarray:
    """Log-probabilities [P, A] of spans' tokens, by a pass unless no step has moved the policy."""
    rows, shapes = current.data.rows, learner.shapes
    layout = lay_out(rows, spans, shapes, shapes.long)
    initial = {} if current.steps else {"logp": current.data.initial["trainer_logp"]}
    batch = turn_batch(rows, layout, shapes, initial, action=shapes.longest)
    if initial:
        return np.asarray(batch.logp_PA)
    return np.asarray(learner.scored(current.train.params, batch).logp_PA)


def _parts_of_actions(current: SweepState, spans: Sequence[ActionSpan]) -> list[ActionSpan]:
    """The spans that do not hold all tokens of an action that they hold some of."""
    number = current.per_token.get("action")  # order=parallel: one of several in a span

    def actions(span: ActionSpan) -> set[tuple[int, int]]:
        owner = int(current.data.rows.trajectory_S[span.segment])
        numbers = [0] if number is None else np.unique(number[span.segment][span.position_A])
        return {(owner, int(action)) for action in numbers}

    count = Counter(action for span in spans for action in actions(span))
    return [span for span in spans if any(count[action] > 1 for action in actions(span))]


def _minibatches(
    rows: Rows, spans: list[ActionSpan], count: int, rng: np.random.Generator
) -> list[list[ActionSpan]]:
    """All spans of trajectories in random parts of nearly equal size; one part keeps the order."""
    if count == 1:
        return [spans]
    owned: dict[int, list[ActionSpan]] = {}
    for span in spans:
        owned.setdefault(int(rows.trajectory_S[span.segment]), []).append(span)
    each = list(owned.values())
    parts = np.array_split(rng.permutation(len(each)), count)
    return [[span for i in part for span in each[i]] for part in parts if part.size]


def _denominator(
    learner: Learner,
    current: SweepState,
    spans: Sequence[ActionSpan],
    part: Sequence[ActionSpan],
) -> np.float32:
    """What the sum of a part of a turn's spans is divided by in its step.

    The part's share of all trajectories or of those with the turn, times the most tokens of an
    action where the loss is so; or the part's own tokens, as in verl's `loss_agg_mode=token-mean`.
    """
    algorithm = learner.algorithm
    active, updated = (
        len({int(current.data.rows.trajectory_S[span.segment]) for span in some})
        for some in (spans, part)
    )
    counted = {"all": current.data.valid, "active": active}[algorithm.normalize_by]
    counts = {
        "action": counted,
        "constant": counted * learner.shapes.action,
        "token": sum(span.position_A.size for span in part),
    }
    count = np.float32(counts[algorithm.loss_aggregation])
    return count if algorithm.loss_aggregation == "token" else np.float32(count * updated / active)
