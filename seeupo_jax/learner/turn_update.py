"""One update of a sweep's plan: its steps, and the passes around them.

    maximise  E[min(s_t M, clip(s_t, 1 - ε_low, 1 + ε_high) M)] - β KL(π || π_ref)     (Eq. 6)
    cumulative ratio <- s_t(π after the step) x cumulative ratio                        (Eq. 8)

From arXiv:2602.06554, with M = advantage x cumulative ratio; `algorithms/` has the formulas,
`learner/step/` the compiled step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

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
from seeupo_jax.learner.compiled_programs import Learner
from seeupo_jax.learner.credit.covariance import limit_tokens
from seeupo_jax.learner.optimization.turn_moments import of_turn, put_back
from seeupo_jax.learner.refresh_batch import RefreshBatch, make_refresh_batch
from seeupo_jax.learner.sweep_plan import Kind, SweepPass, TurnUpdate
from seeupo_jax.learner.sweep_state import PerToken, StepScores, SweepState
from seeupo_jax.types import TurnBatch


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
        rows,
        update.layout,
        current.refresh_next,
        learner.shapes,
        current.per_token.get("old_logp", ()),
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
    pending = (update.spans, logp_PA) if by_turn and learner.scores_old_policy else None
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
    train, cumulative_ratio_N, logp_PA, metrics, entropy_PA = learner.turn_step(
        of_turn(current.train, update.turns),
        batch,
        refresh_batch,
        current.cumulative_ratio_N,
        _denominator(learner, current, update, layout.spans),
    )
    train = put_back(train, current.train, update.turns)
    after = current.after_step(update.turns, train, cumulative_ratio_N, {**metrics, **counted})
    if not learner.scores_old_policy:
        after = after._replace(step_scores=StepScores(layout.spans, logp_PA, entropy_PA))
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
    room = {"action": shapes.longest, "copies": learner.adapters}
    return turn_batch(rows, layout, shapes, per_token, **room)


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
    update: _Update,
    part: Sequence[ActionSpan],
) -> np.float32:
    """The denominator of the sum over a part of a turn's spans.

    It is the part's share of all trajectories or of those with the turn, for a constant
    (loss_aggregation) times the maximum tokens of an action; for tokens it is its own tokens, as in
    verl's `loss_agg_mode=token-mean`. Trajectories whose tokens of the turn were all rejected do
    not count.
    """
    algorithm, data = learner.algorithm, current.data
    sampled = (
        update.spans if data.sampled is data.rows else action_spans(data.sampled, update.turns)
    )
    before, active, updated = (
        len({int(data.rows.trajectory_S[span.segment]) for span in some})
        for some in (sampled, update.spans, part)
    )
    counted = {"all": data.valid - (before - active), "active": active}[algorithm.normalize_by]
    counts = {
        "action": counted,
        "constant": counted * learner.shapes.action,
        "token": sum(span.position_A.size for span in part),
    }
    count = np.float32(counts[algorithm.loss_aggregation])
    return count if algorithm.loss_aggregation == "token" else np.float32(count * updated / active)
