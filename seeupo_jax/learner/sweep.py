"""One iteration's updates: turn after turn, each weighted by the turns already updated.

`sweep_plan` states the passes; here they are executed, in order. With M = advantage x cumulative
ratio:

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
    SegmentBatch,
    action_spans,
    lay_out,
    turn_batch,
)
from seeupo_jax.learner.credit.covariance import limit_tokens
from seeupo_jax.learner.credit.information_gain import References
from seeupo_jax.learner.credit.overlong import with_overlong_penalties
from seeupo_jax.learner.credit.running_rewards import Statistics
from seeupo_jax.learner.optimization.turn_moments import of_turn, put_back
from seeupo_jax.learner.program_cache import Learner
from seeupo_jax.learner.reference_policy import next_kl_coef, sampled_kl
from seeupo_jax.learner.refresh_batch import RefreshBatch, make_refresh_batch
from seeupo_jax.learner.sweep_control import StepsInFlight, SweepStopped, resume_sweep
from seeupo_jax.learner.sweep_metrics import (
    exclusion_metrics,
    step_weights,
    sweep_metrics,
    trajectory_stats,
)
from seeupo_jax.learner.sweep_plan import Kind, SweepPass, SweepPlan, TurnUpdate
from seeupo_jax.learner.sweep_start import begin_sweep
from seeupo_jax.learner.sweep_state import OptimizerStep, PerToken, SweepState
from seeupo_jax.types import TrainState, Trajectory, TrajectoryStats, TurnBatch


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
      statistics: of the run's rewards, as of `running_statistics`; None: of these trajectories.

    Returns: without a single sampled turn nearly no metrics, and a state in which only the average
      of the parameters and the reference policy may have changed.

    Raises:
      SweepStopped: `stop` returned True.
    """
    shaped, shaping = with_overlong_penalties(learner.algorithm, trajectories)
    rows = learner.rows(trajectories)
    own = shaping | exclusion_metrics(learner, rows)
    plan = learner.plan(rows.updated_turns, iteration)
    if not plan.before:
        return _without_step(learner, train, plan, trajectories, own)
    train = learner.at_iteration(train, iteration)
    if resume is None:
        current = begin_sweep(
            learner,
            train,
            ref_params,
            rows,
            trajectories,
            plan,
            shaped=shaped,
            version=iteration - 1,
            references=references,
            statistics=statistics,
        )
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
    weights = step_weights(learner, current, plan)
    metrics = sweep_metrics(learner, current, plan, weights, iteration) | own
    on_step(len(plan.updates), len(plan.updates))  # the metrics have waited for the last step
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


class _Update(NamedTuple):
    """The tokens of an update of the plan.

    layout: of all `spans`. seed: of tokens that are drawn at random. rng: of minibatches.
    """

    turns: tuple[int, ...]
    spans: list[ActionSpan]
    layout: Layout
    seed: Sequence[int]
    rng: np.random.Generator


def update_turn(
    learner: Learner, current: SweepState, planned: TurnUpdate, *, seed: Sequence[int]
) -> SweepState:
    """Updates the policy at one turn, or at turns merged into one step, and its weights M.

    Args:
      current: its arrays on the device are donated.
      seed: of minibatches, and of tokens that are drawn at random.
    """
    rows, seed = current.data.rows, (*seed, *planned.turns)
    if spans := action_spans(rows, planned.turns):
        layout = lay_out(rows, spans, learner.shapes)
        update = _Update(planned.turns, spans, layout, seed, np.random.default_rng(seed))
        for each in planned.passes:
            current = _EXECUTE[each.kind](learner, current, update, each)
    return current._replace(done=current.done + 1)


def _score_old(learner: Learner, current: SweepState, update: _Update, _: SweepPass) -> SweepState:
    """The policy before the update becomes the old policy of its ratios."""
    current, batch = current.batch(learner, update.layout)
    return current.with_logp("old_logp", update.spans, learner.score(current.train.params, batch))


def _take_steps(
    learner: Learner, current: SweepState, update: _Update, each: SweepPass
) -> SweepState:
    """Eq. 6: one optimizer step on all tokens of the update, or one on each minibatch."""
    if each.refreshes is not None:
        return _take_fused_step(learner, current, update, rescore=each.rescored > 0)
    rows, unmoved = current.data.rows, each.times - each.rescored
    for number, part in enumerate(_minibatches(rows, update.spans, each.times, update.rng)):
        whole = part is update.spans
        layout = update.layout if whole else lay_out(rows, part, learner.shapes)
        current, _ = _step(learner, current, update, layout, None, rescore=number >= unmoved)
    return current


def _take_fused_step(
    learner: Learner, current: SweepState, update: _Update, *, rescore: bool
) -> SweepState:
    """One program: Eq. 8 of the update before, then Eq. 6 of this one."""
    rows, by_turn = current.data.rows, learner.loss_config.old_is_current
    refresh_batch, remaining = make_refresh_batch(
        rows, update.layout, current.refresh_next, learner.shapes, current.per_token["old_logp"]
    )
    if by_turn:
        pending = current.pending_logp
        old_logp_PA = pending[1] if pending else learner.replicate(refresh_batch.old_logp_PA)
        refresh_batch = refresh_batch._replace(old_logp_PA=old_logp_PA)
    if remaining:  # Eq. 8 of spans that the program has no room for, by one of their own
        current = current.fetch_pending()
        longest = lay_out(rows, remaining, learner.shapes, learner.shapes.lengths[-1:])
        current = _refresh(learner, current, longest)
    current, logp_PA = _step(
        learner, current, update, update.layout, refresh_batch, rescore=rescore
    )
    pending = (update.spans, logp_PA) if by_turn else None
    return current._replace(pending_logp=pending, refresh_next=update.spans)


def _refresh_ratios(
    learner: Learner, current: SweepState, update: _Update, _: SweepPass
) -> SweepState:
    """Eq. 8: the cumulative ratios after the steps of the update."""
    return _refresh(learner, current, update.layout)


_EXECUTE: dict[Kind, Callable[[Learner, SweepState, _Update, SweepPass], SweepState]] = {
    "old": _score_old,
    "turn": _take_steps,
    "refresh": _refresh_ratios,
}


def _step(
    learner: Learner,
    current: SweepState,
    update: _Update,
    layout: Layout,
    refresh_batch: RefreshBatch | None,
    *,
    rescore: bool,
) -> tuple[SweepState, jax.Array]:
    """One optimizer step (Eq. 6) on the spans of a layout: all of an update's, or a minibatch.

    Args:
      refresh_batch: spans of the step before, refreshed (Eq. 8) by the same program; None: none.
      rescore: whether `covariance` limits tokens by their log-probabilities under the current
        policy; False: by those that the sweep began with.

    Returns: the state, and the log-probabilities [P, A] of the step's tokens before it.
    """
    current, batch, counted = _step_batch(learner, current, layout, update.seed, rescore)
    train, cumulative_ratio_N, logp_PA, metrics = learner.turn_step(
        of_turn(current.train, update.turns),
        batch,
        refresh_batch,
        current.cumulative_ratio_N,
        _denominator(learner, current, update.spans, layout.spans),
    )
    train = put_back(train, current.train, update.turns)
    after = current.after_step(update.turns, train, cumulative_ratio_N, {**metrics, **counted})
    return after, logp_PA


def _refresh(learner: Learner, current: SweepState, layout: Layout) -> SweepState:
    """Eq. 8 of spans that the last step updated, by a pass of its own."""
    current, batch = current.batch(learner, layout)
    refreshed_N = learner.refresh(current.train.params, batch, current.cumulative_ratio_N)
    return current._replace(cumulative_ratio_N=refreshed_N)


def _step_batch(
    learner: Learner,
    current: SweepState,
    layout: Layout,
    seed: Sequence[int],
    rescore: bool,
) -> tuple[SweepState, TurnBatch, Mapping[str, float]]:
    """The batch of a step, and metrics of its tokens.

    If an action's tokens lie in several spans, its ratio is needed before the gradient: a separate
    pass computes it, unless no step has changed the policy yet.
    """
    reads = "logp" in current.per_token and learner.loss_config.reads_action_ratio
    parts = _parts_of_actions(current, layout.spans) if reads and current.steps else []
    if parts:
        current = current.with_logp("logp", parts, _current_logp(learner, current, parts))
    current, batch = current.batch(learner, layout)
    algorithm = learner.algorithm
    if algorithm.covariance.kind == "none":
        return current, batch, {}
    # Turns without a token take no step: the policy may be the first one still.
    find_logp = _current_logp if rescore and current.steps else _initial_logp
    logp_PA = find_logp(learner, current, layout.spans)[:, : batch.mask_PA.shape[1]]
    rng = np.random.default_rng((*seed, len(current.steps)))
    return current, *limit_tokens(algorithm, batch, logp_PA, rng)


def _current_logp(learner: Learner, current: SweepState, spans: Sequence[ActionSpan]) -> np.ndarray:
    """Log-probabilities [P, A] of spans' tokens under the current policy, by a pass."""
    batch = _scoring_batch(learner, current, spans, {})
    return np.asarray(learner.scored(current.train.params, batch).logp_PA)


def _initial_logp(learner: Learner, current: SweepState, spans: Sequence[ActionSpan]) -> np.ndarray:
    """Log-probabilities [P, A] of spans' tokens under the policy that the sweep began with."""
    initial = {"logp": current.data.initial["trainer_logp"]}
    return np.asarray(_scoring_batch(learner, current, spans, initial).logp_PA)


def _scoring_batch(
    learner: Learner, current: SweepState, spans: Sequence[ActionSpan], per_token: PerToken
) -> TurnBatch:
    rows, shapes = current.data.rows, learner.shapes
    layout = lay_out(rows, spans, shapes, shapes.long)
    return turn_batch(rows, layout, shapes, per_token, action=shapes.longest)


def _parts_of_actions(current: SweepState, spans: Sequence[ActionSpan]) -> list[ActionSpan]:
    """The spans that hold only some of the tokens of an action."""
    number = current.per_token.get("action")  # order=parallel: one of several in a span

    def actions(span: ActionSpan) -> set[tuple[int, int]]:
        owner = int(current.data.rows.trajectory_S[span.segment])
        numbers = [0] if number is None else np.unique(number[span.segment][span.position_A])
        return {(owner, int(action)) for action in numbers}

    count = Counter(action for span in spans for action in actions(span))
    return [span for span in spans if any(count[action] > 1 for action in actions(span))]


def _minibatches(
    rows: SegmentBatch, spans: list[ActionSpan], count: int, rng: np.random.Generator
) -> list[list[ActionSpan]]:
    """The spans in random parts of nearly as many trajectories; one part keeps the order."""
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
    """The denominator of the sum over a part of a turn's spans.

    It is the part's share of all trajectories or of those with the turn, with loss_mean=constant
    times the maximum tokens of an action; with loss_mean=token it is the part's own tokens, as in
    verl's `loss_agg_mode=token-mean`.
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
