"""The start of a sweep: log-probabilities, values, scores and advantages before its first step."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from seeupo_jax.learner.batching import (
    ActionSpan,
    Layout,
    SegmentBatch,
    all_actions,
    lay_out,
    scatter,
    turn_batch,
)
from seeupo_jax.learner.compiled_programs import Learner
from seeupo_jax.learner.credit.advantages import assign_credit
from seeupo_jax.learner.credit.credit_arrays import CreditArrays
from seeupo_jax.learner.credit.information_gain import (
    References,
    answer_branches,
    branch_batch,
    describe_gains,
    information_gain,
)
from seeupo_jax.learner.credit.role_baselines import Baselines
from seeupo_jax.learner.credit.role_rows import by_role
from seeupo_jax.learner.credit.running_rewards import Statistics
from seeupo_jax.learner.credit.teaching import add_teaching, score_by_teachers, teacher_kl
from seeupo_jax.learner.credit.turn_scores import score_turns
from seeupo_jax.learner.expert_record import ExpertRecord, describe_routers
from seeupo_jax.learner.importance_weights import weigh_tokens
from seeupo_jax.learner.reference_policy import options_now, reference_of
from seeupo_jax.learner.step.turn_step import TokenScores
from seeupo_jax.learner.sweep_plan import Kind, SweepPlan, action_numbers
from seeupo_jax.learner.sweep_state import INITIAL, PerToken, SweepData, SweepState
from seeupo_jax.types import (
    CONTEXT,
    UNKNOWN_VERSION,
    TrainState,
    Trajectory,
    TurnBatch,
    learnable,
)


def begin_sweep(
    learner: Learner,
    train: TrainState,
    ref_params: Any,
    rows: SegmentBatch,
    trajectories: Sequence[Trajectory],
    plan: SweepPlan,
    *,
    shaped: Sequence[Trajectory],
    version: int,
    references: References | None = None,
    statistics: Statistics | None = None,
    baselines: Baselines | None = None,
    labels: Sequence[Mapping[str, str]] | None = None,
) -> SweepState:
    """Takes the passes of the plan before the first update, and assigns advantages.

    Args:
      shaped: the trajectories with the rewards that advantages are computed from. The scorer's
        successes and failures are those of the trajectories without penalties.
      version: of the policy that is swept.
      references: answers of the tasks, which the old policy's pass scores too; None: none.
      statistics, baselines, labels: as of `sweep`.
    """
    kinds = {each.kind for each in plan.before}
    passes = _score_trajectories(learner, train, ref_params, rows, trajectories, kinds, references)
    rows, first, initial = passes.rows, passes.first, passes.initial
    unmasked = segments_after_masking(learner, rows, initial)
    per_token, metrics = passes.per_token, {}
    if first is None:
        _check_on_policy(rows, version)
    else:
        metrics = first.metrics | initial_metrics(learner, rows, unmasked, initial)
        per_token |= {"old_logp": _old_logp(learner, rows, per_token["old_logp"], version)}
    scores = {"entropy": initial["entropy"]} | passes.statistics
    if "scorer" in kinds:
        epochs = plan.count("scorer")
        turns = score_turns(learner, train, rows, trajectories, per_token, epochs=epochs)
        train = turns.train
        scores.update(turns.per_token)
        metrics |= turns.metrics
    per_token |= derived_per_token(learner, unmasked, initial)
    algorithm = options_now(learner.algorithm, train)
    arrays = CreditArrays(
        algorithm,
        learner.shapes,
        *by_role(unmasked, shaped, learner.roles),
        {**per_token, **scores},
        learner.reward_weights,
        gains=None if first is None else first.gains,
        statistics=statistics,
        baselines=baselines,
    )
    credit, shares = assign_credit(arrays)
    if "teacher" in kinds:
        teacher = score_by_teachers(learner, train, ref_params, rows, labels)
        scored = initial["trainer_logp"], teacher.logp
        advantage = add_teaching(arrays, learner.teaching, *scored, credit["advantage"])
        credit, metrics = credit | {"advantage": advantage}, metrics | teacher_kl(rows, *scored)
        per_token |= teacher.of_loss
    # After advantages: those of a trajectory do not depend on which of its tokens are rejected.
    accepted, importance, weighed = weigh_tokens(learner, unmasked, initial)
    per_token = {**per_token, **credit, **importance}
    metrics |= {**shares, **weighed}
    if "value" in kinds:
        metrics["sweep/explained_variance"] = _explained_variance(unmasked, per_token)
    valid = count_valid(learner, trajectories)
    data = SweepData(accepted, valid, initial, metrics, sampled=unmasked)
    ones_N = learner.replicate(np.ones(rows.trajectories, np.float32))
    return SweepState(data, train, ones_N, per_token)


def _check_on_policy(rows: SegmentBatch, version: int) -> None:
    others = {*np.concatenate(rows.version).tolist()} - {UNKNOWN_VERSION, version}
    if others:
        raise ValueError(
            f"config.rollout.max_lag: got 0 for trajectories of policy {min(others)}, with which"
            f" policy {version} is updated; allowed: trajectories of that policy."
        )


class _Scores(NamedTuple):
    """The results of the passes over whole trajectories.

    rows: with the experts that the first pass recorded, if the sweep replays them.
    first: None: the old policy was not scored.
    initial: as of `SweepData`. per_token: `old_logp`, `ref_logp` and, with a critic, `value`.
    statistics: of the distributions of tokens, for the estimator alone.
    """

    rows: SegmentBatch
    first: _FirstPass | None
    initial: PerToken
    per_token: dict[str, Sequence[np.ndarray]]
    statistics: dict[str, Sequence[np.ndarray]]


def _score_trajectories(
    learner: Learner,
    train: TrainState,
    ref_params: Any,
    rows: SegmentBatch,
    trajectories: Sequence[Trajectory],
    kinds: Collection[Kind],
    references: References | None,
) -> _Scores:
    """The passes of the old policy, the reference policy and the critic, those that are planned."""
    layout, batch = _pack_actions(learner, rows)
    by_segment = functools.partial(_by_segment, rows, layout.spans)
    per_token: dict[str, Sequence[np.ndarray]] = {}
    statistics: dict[str, Sequence[np.ndarray]] = {}
    first, unknown = None, [np.full(len(tokens), np.nan, np.float32) for tokens in rows.tokens]
    initial: PerToken = dict.fromkeys(INITIAL, unknown)
    if "score" in kinds:
        first = _first_pass(learner, train.params, rows, trajectories, references, layout, batch)
        named = zip(INITIAL, first.initial, strict=True)
        initial = {name: by_segment(x_PA, np.nan) for name, x_PA in named}
        old_logp = by_segment(first.scored.logp_PA)
        per_token = {"old_logp": old_logp, "ref_logp": old_logp}
        if first.scored.collision_PA is not None:
            statistics["collision"] = by_segment(first.scored.collision_PA)
    if "reference" in kinds:  # by routers of its own
        without_experts = batch._replace(expert_MRLG=None)
        reference = reference_of(train, ref_params)
        per_token["ref_logp"] = by_segment(learner.scored(reference, without_experts).logp_PA)
    if first is not None and first.scored.routed_MRLG is not None:
        rows = _with_experts(learner, rows, first)
        if "value" in kinds:  # its pass replays them
            _, batch = _pack_actions(learner, rows)
    if "value" in kinds:
        per_token["value"] = by_segment(learner.value(train.params, train.critic.params, batch))
    return _Scores(rows, first, initial, per_token, statistics)


def _pack_actions(learner: Learner, rows: SegmentBatch) -> tuple[Layout, TurnBatch]:
    """All sampled tokens of the rows, as one batch."""
    shapes = learner.shapes
    layout = lay_out(rows, all_actions(rows), shapes, shapes.long)
    room = {"action": shapes.longest, "copies": learner.adapters}
    return layout, turn_batch(rows, layout, shapes, {}, **room)


def turn_logp(learner: Learner, params: Any, trajectories: Sequence[Trajectory]) -> np.ndarray:
    """Log-probability of every turn's action under a policy, as the pass before a sweep has it.

    Args:
      params: those of the policy that train.

    Returns: float64 [N, K], nats; 0 where a trajectory has no such turn.
    """
    # A sweep leaves out groups of one, and replays experts that a sampler recorded.
    rows = SegmentBatch.of(
        trajectories, grouped=False, routing=learner.routing, adapters=learner.adapters
    )
    layout, batch = _pack_actions(learner, rows)
    logp = _by_segment(rows, layout.spans, learner.scored(params, batch).logp_PA)
    logp_NK = np.zeros((rows.trajectories, rows.turns))
    for trajectory, turn_L, logp_L in zip(rows.trajectory_S, rows.turn, logp, strict=True):
        acted = turn_L != CONTEXT
        np.add.at(logp_NK[trajectory], turn_L[acted], logp_L[acted])
    return logp_NK


def _by_segment(
    rows: SegmentBatch, spans: Sequence[ActionSpan], x_PA: Any, elsewhere: float = 0.0
) -> list[np.ndarray]:
    """Numbers of all action tokens [P, A] as one array a segment, with `elsewhere` at context."""
    numbers = [np.full(len(tokens), elsewhere, np.float32) for tokens in rows.tokens]
    scatter(numbers, spans, np.asarray(x_PA))
    return numbers


def segments_after_masking(learner: Learner, rows: SegmentBatch, initial: PerToken) -> SegmentBatch:
    """The segments without the action tokens that `mask_above` excludes as too likely."""
    bound = learner.algorithm.mask_above
    if bound is None:
        return rows
    # In float32. A comparison with NaN, at context, is False.
    return rows.without([np.exp(logp_L) > np.float32(bound) for logp_L in initial["trainer_logp"]])


def _masked_fraction(rows: SegmentBatch, unmasked: SegmentBatch) -> dict[str, float]:
    """Share of the action tokens that masking excludes."""
    if unmasked is rows:
        return {}
    before, after = (
        sum(int((turn_L != CONTEXT).sum()) for turn_L in each.turn) for each in (rows, unmasked)
    )
    return {"sweep/masked_fraction": 1 - after / before}


def _mean_entropy(rows: SegmentBatch, entropy: Sequence[np.ndarray]) -> float:
    """Mean over the tokens of the loss, as in TRL; NaN without any.

    Tokens that `mask_above` or `truncated=mask` excludes do not count.
    """
    segments = zip(entropy, rows.turn, rows.updated_S, strict=True)
    trained = [x_L[turn_L != CONTEXT] for x_L, turn_L, updated in segments if updated]
    entropies = np.concatenate(trained)
    return float(entropies.mean()) if entropies.size else float("nan")


def count_valid(learner: Learner, trajectories: Sequence[Trajectory]) -> int:
    """The number of trajectories that are learned from."""
    return int(learnable(trajectories, grouped=learner.algorithm.grouped).sum())


class _FirstPass(NamedTuple):
    """The outputs of the old policy's pass, and the layout of its rows.

    gains: of turns; None: not computed.
    """

    scored: TokenScores
    layout: Layout
    gains: list[np.ndarray] | None
    metrics: dict[str, float]

    @property
    def initial(self) -> tuple[Any, Any]:
        """`INITIAL` [P, A], of every action token; the entropy is NaN where it was not computed."""
        logp_PA, entropy_PA = self.scored.logp_PA, self.scored.entropy_PA
        return logp_PA, np.full(logp_PA.shape, np.nan) if entropy_PA is None else entropy_PA


def _first_pass(
    learner: Learner,
    params: Any,
    rows: SegmentBatch,
    trajectories: Sequence[Trajectory],
    references: References | None,
    layout: Layout,
    batch: TurnBatch,
) -> _FirstPass:
    """The old policy's pass over all actions, and over the answers of the tasks, if given."""
    gains, metrics = None, {}
    if references is None:
        scored = learner.scored(params, batch)
    else:
        branches = answer_branches(rows, trajectories, references, learner.shapes)
        wider, span_slots, layout = branch_batch(branches, layout.spans, learner.shapes)
        scored = learner.scored(params, wider)
        gains = information_gain(branches, span_slots, np.asarray(scored.logp_PA), trajectories)
        metrics = describe_gains(gains, rows)
    routers = {} if scored.routers is None else describe_routers(scored.routers)
    return _FirstPass(scored, layout, gains, metrics | routers)


def _with_experts(learner: Learner, rows: SegmentBatch, first: _FirstPass) -> SegmentBatch:
    """The segments with the experts that the policy's routers chose as the sweep began."""
    routed_MRLG, layout = np.asarray(first.scored.routed_MRLG), first.layout
    routed_RLG = routed_MRLG.reshape(-1, *routed_MRLG.shape[2:])
    lengths, segments = [*map(len, rows.tokens)], [span.segment for span in layout.spans]
    experts = ExpertRecord.of_pass(learner.routing, lengths, segments, layout.forest, routed_RLG)
    return replace(rows, experts=experts)


def derived_per_token(
    learner: Learner, rows: SegmentBatch, initial: PerToken
) -> dict[str, Sequence[np.ndarray]]:
    """Fields of tokens that follow from the segments and the policy at the start of the sweep."""
    per_token: dict[str, Sequence[np.ndarray]] = {}
    if "logp" in learner.per_token:
        per_token["logp"] = initial["trainer_logp"]
    if "drift_sign" in learner.per_token:  # each step sets its own
        per_token["drift_sign"] = [np.zeros(len(tokens), np.float32) for tokens in rows.tokens]
    if "action" in learner.per_token:
        if rows.turns > learner.shapes.turns:
            raise ValueError(
                f"a trajectory has {rows.turns} turns; allowed with order=parallel: at most"
                f" {learner.shapes.turns}, rollout.max_turns."
            )
        numbers = functools.partial(action_numbers, learner.algorithm, rows.updated_turns)
        per_token["action"] = [numbers(turn_L) for turn_L in rows.turn]
    return per_token


def _old_logp(
    learner: Learner, rows: SegmentBatch, logp: Sequence[np.ndarray], version: int
) -> Sequence[np.ndarray]:
    """Log-probabilities that ratios are to: those of the policy before the sweep.

    Without importance weights ratios correct for stale tokens: there it is what their sampler
    recorded.
    """
    if learner.algorithm.importance is not None:
        return logp
    behaviour = []
    for own_L, turn_L, version_L, recorded_L in zip(
        logp, rows.turn, rows.version, rows.logp, strict=True
    ):
        elsewhere_L = (version_L != UNKNOWN_VERSION) & (version_L != version)
        behaviour.append(np.where((turn_L != CONTEXT) & elsewhere_L, recorded_L, own_L))
    return behaviour


def with_step_scores(learner: Learner, current: SweepState) -> SweepState:
    """The state with what the step found of the old policy, where no pass before it did."""
    if current.step_scores is None:
        return current
    data, (spans, *found) = current.data, current.step_scores
    initial = dict(data.initial)
    for name, x_PA in zip(INITIAL, found, strict=True):
        if x_PA is not None:
            initial[name] = _by_segment(data.rows, spans, x_PA, np.nan)
    metrics = {**data.initial_metrics, **initial_metrics(learner, data.rows, data.rows, initial)}
    return current._replace(
        data=replace(data, initial=initial, initial_metrics=metrics), step_scores=None
    )


def initial_metrics(
    learner: Learner, rows: SegmentBatch, unmasked: SegmentBatch, initial: PerToken
) -> dict[str, float]:
    """Metrics of the rows' tokens under the old policy."""
    metrics = _sampler_trainer_gap(rows, initial["trainer_logp"])
    metrics |= _masked_fraction(rows, unmasked)
    if learner.finds_entropy:
        metrics["rollout/entropy"] = _mean_entropy(unmasked, initial["entropy"])
    return metrics


def _sampler_trainer_gap(rows: SegmentBatch, old_logp: Sequence[np.ndarray]) -> dict[str, float]:
    """The gap between the sampler's and the trainer's log-probabilities, over all action tokens."""
    triples = zip(old_logp, rows.logp, rows.turn, strict=True)
    gap = np.concatenate([np.abs(old - logp)[turn >= 0] for old, logp, turn in triples])
    return {
        "logp/sampler_trainer_gap": float(gap.max()),
        "logp/sampler_trainer_gap_mean": float(gap.mean()),
    }


def _explained_variance(rows: SegmentBatch, per_token: PerToken) -> float:
    """Share of the returns' variance that the values explain; NaN where all returns are equal."""
    acted = np.concatenate(rows.turn) >= 0
    if not acted.any():
        return float("nan")
    returns, value = (np.concatenate(per_token[name])[acted] for name in ("returns", "value"))
    variance = returns.var(dtype=np.float64)
    error = (returns - value).var(dtype=np.float64)
    return float(1 - error / variance) if variance > 0 else float("nan")
