"""One iteration's updates: turn after turn, each weighted by the turns already updated."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from seeupo_jax.learner.batching import (
    Layout,
    Piece,
    Rows,
    forced_fraction,
    lay_out,
    pieces_of,
)
from seeupo_jax.learner.learner import Learner
from seeupo_jax.learner.refresh_batch import refresh_batch
from seeupo_jax.learner.sweep_state import (
    Pass,
    Step,
    SweepStopped,
    host_metrics,
    resume_pass,
    start_pass,
)
from seeupo_jax.learner.trajectory_stats import learned_of, turn_metrics, weigh
from seeupo_jax.types import Learned, TrainState, Trajectory, TurnBatch

IN_FLIGHT = 2  # steps given to the device and not finished: a request to stop is heard soon


def update_order(
    turns: int,
    order: str,
    *,
    turns_per_update: int | None = 1,
    custom_order: Sequence[int] = (),
    seed: Sequence[int] = (0,),
) -> list[tuple[int, ...]]:
    """The steps of a sweep, first to last; each is the turns that it updates together.

    Args:
      turns: K, of the longest trajectory.
      order: `reverse` (SeeUPO), `forward`, `random`, `custom` (`custom_order`, of which turns that
        nobody reached are left out) or `parallel` (one step on all).
      turns_per_update: so many consecutive turns, counted from the last one, make one step; None:
        all.
      seed: of the random order.

    Raises:
      ValueError: an unknown order.
    """
    span = turns_per_update or max(turns, 1)
    steps = [tuple(range(max(0, end - span), end)) for end in range(turns, 0, -span)]
    orders: dict[str, Callable[[], list[tuple[int, ...]]]] = {
        "reverse": lambda: steps,
        "forward": lambda: steps[::-1],
        "random": lambda: [steps[i] for i in np.random.default_rng(seed).permutation(len(steps))],
        "custom": lambda: [(turn,) for turn in custom_order if turn < turns],
        "parallel": lambda: [tuple(range(turns))] if turns else [],
    }
    if order not in orders:
        raise ValueError(f"order: got {order!r}; allowed: {', '.join(orders)}.")
    return orders[order]()


def sweep(
    learner: Learner,
    state: TrainState,
    ref_params: Any,
    trajectories: Sequence[Trajectory],
    *,
    iteration: int,
    stop: Callable[[], bool] = lambda: False,
    resume: tuple[Mapping[str, Any], Mapping[str, Any]] | None = None,
    observe: Callable[[Step], None] | None = None,
    learned: Callable[[Sequence[Learned | None]], Any] = lambda _: None,
    on_step: Callable[[int, int], None] = lambda done, steps: None,
) -> tuple[TrainState, dict[str, float]]:
    """Updates the policy with one iteration's trajectories; `state` is donated.

    Args:
      ref_params: parameters of the reference policy of the KL penalty.
      iteration: 1 and up; seeds the random order and the minibatches, and sets the learning rate.
        Its policy has version iteration - 1: ratios of trajectories that say to be of another one
        are against what the sampler recorded.
      stop: asked before every turn; with several processes it must say the same in all.
      learned: is told at the end what was learned of each trajectory; None of those left out.
      resume: arrays and notes of the `SweepStopped` that this sweep of the same trajectories ended
        with before; `state` is the one among them.
      on_step: hears how many of the order's steps the device has done, and of how many.

    Returns: the state after the last turn's step, and metrics. Without a single sampled turn the
      state is returned as it came.

    Raises:
      SweepStopped: as asked.
    """
    chosen = learner.algorithm
    rows = Rows.of(trajectories, grouped=chosen.grouped, truncated=learner.truncated)
    seed = (learner.seed, iteration)
    order = update_order(
        rows.turns,
        chosen.order,
        turns_per_update=chosen.turns_per_update,
        custom_order=chosen.custom_order,
        seed=seed,
    )
    forced = {"sweep/forced_fraction": forced_fraction(rows)} if learner.truncated else {}
    if not order:
        learned([None] * len(trajectories))
        return state, {"sweep/turns": 0} | forced
    if resume is None:
        begun = {"version": iteration - 1, "critic": state.critic}
        current = start_pass(learner, state.params, ref_params, rows, trajectories, **begun)
    else:
        current = resume_pass(learner, rows, trajectories, order, *resume)
    current.observe, state = observe, learner.at_iteration(state, iteration)
    flying: deque[Any] = deque()
    for turns in order[current.done :]:
        if len(flying) == IN_FLIGHT:
            jax.block_until_ready(flying.popleft())
        on_step(current.done - len(flying), len(order))
        if stop():
            raise SweepStopped(state, current, learner)
        state = update_turn(
            learner, current, state, turns, last=turns == order[-1], seed=(*seed, *turns)
        )
        flying.append(current.metrics[-1:])
    totals, weights = host_metrics(current.metrics), weigh(current)
    learned(learned_of(current, weights))
    metrics = _summarize(current, totals, len(order)) | turn_metrics(current, weights, totals)
    if learner.schedule is not None:
        done = max(int(state.step) - 1, 0)  # optimizer steps before the sweep's last
        metrics["sweep/learning_rate"] = learner.schedule.rate(iteration, done)
    return state, current.begun | metrics | forced


def update_turn(
    learner: Learner,
    current: Pass,
    state: TrainState,
    turns: tuple[int, ...],
    *,
    last: bool,
    seed: Sequence[int],
) -> TrainState:
    """Updates the policy at one turn (or at turns merged into one step), and the weights too."""
    pieces = pieces_of(current.rows, turns)
    if pieces and learner.fused:
        state = _fused_turn(learner, current, state, turns, pieces)
    elif pieces:
        state = _separate_turn(learner, current, state, turns, pieces, last=last, seed=seed)
    current.done += 1
    return state


def _fused_turn(
    learner: Learner,
    current: Pass,
    state: TrainState,
    turns: tuple[int, ...],
    pieces: list[Piece],
) -> TrainState:
    """One step that first refreshes, in the same program, the weights of the step before it."""
    by_turn = learner.algorithm.old_policy == "turn"
    layout = lay_out(current.rows, pieces, learner.shapes)
    continued, left = refresh_batch(
        current.rows, layout, current.previous, learner.shapes, current.known["old_logp"]
    )
    if by_turn:
        old_logp_PA = current.late[1] if current.late else learner.spread(continued.old_logp_PA)
        continued = continued._replace(old_logp_PA=old_logp_PA)
    if left:
        current.catch_up()
        longest = lay_out(current.rows, left, learner.shapes, learner.shapes.lengths[-1:])
        current.factor_N = learner.refresh(
            state.params, current.batch(longest, learner.shapes), current.factor_N
        )
    state, current.factor_N, logp_PA, metrics = learner.turn_step(
        state,
        _step_batch(learner, current, state, layout),
        continued,
        current.factor_N,
        _denominator(learner, current, pieces, pieces),
    )
    current.late = (pieces, logp_PA) if by_turn else None
    current.previous = pieces
    current.record(turns, metrics)
    return state


def _separate_turn(
    learner: Learner,
    current: Pass,
    state: TrainState,
    turns: tuple[int, ...],
    pieces: list[Piece],
    *,
    last: bool,
    seed: Sequence[int],
) -> TrainState:
    """Any number of steps on one turn, then a pass that refreshes the weights."""
    layout = lay_out(current.rows, pieces, learner.shapes)
    if learner.algorithm.old_policy == "turn":
        logp_PA = learner.score(state.params, current.batch(layout, learner.shapes))
        current.store_old(pieces, logp_PA)
    rng = np.random.default_rng(seed)
    for _ in range(learner.algorithm.inner_epochs):
        for part in _minibatches(current.rows, pieces, learner.algorithm.minibatches_per_turn, rng):
            whole = part is pieces
            part_layout = layout if whole else lay_out(current.rows, part, learner.shapes)
            state, current.factor_N, _, metrics = learner.turn_step(
                state,
                _step_batch(learner, current, state, part_layout),
                None,
                current.factor_N,
                _denominator(learner, current, pieces, part),
            )
            current.record(turns, metrics)
    if learner.algorithm.weighs and not last:
        batch = current.batch(layout, learner.shapes)
        current.factor_N = learner.refresh(state.params, batch, current.factor_N)
    return state


def _step_batch(learner: Learner, current: Pass, state: TrainState, layout: Layout) -> TurnBatch:
    """What a step computes and updates.

    Where an action's tokens lie in several pieces, their ratio under the policy as it is now must
    be known before the gradient. A pass of its own finds it unless no step has moved the policy.
    """
    if current.metrics and "logp" in current.known and learner.step_objective.reads_whole_ratio:
        parts = _parts_of_actions(current, layout.pieces)
        if parts:
            current.rescore(learner, state.params, parts)
    return current.batch(layout, learner.shapes)


def _parts_of_actions(current: Pass, pieces: Sequence[Piece]) -> list[Piece]:
    """The pieces that do not hold all tokens of an action that they hold some of."""
    number = current.known.get("action")  # order=parallel: one of several in a piece

    def actions(piece: Piece) -> set[tuple[int, int]]:
        owner = int(current.rows.trajectory_S[piece.segment])
        own = [0] if number is None else np.unique(number[piece.segment][piece.position_A])
        return {(owner, int(action)) for action in own}

    count = Counter(action for piece in pieces for action in actions(piece))
    return [piece for piece in pieces if any(count[action] > 1 for action in actions(piece))]


def _minibatches(
    rows: Rows, pieces: list[Piece], count: int, rng: np.random.Generator
) -> list[list[Piece]]:
    """All pieces of trajectories in random parts of nearly equal size; one part keeps the order."""
    if count == 1:
        return [pieces]
    owned: dict[int, list[Piece]] = {}
    for piece in pieces:
        owned.setdefault(int(rows.trajectory_S[piece.segment]), []).append(piece)
    each = list(owned.values())
    parts = np.array_split(rng.permutation(len(each)), count)
    return [[piece for i in part for piece in each[i]] for part in parts if part.size]


def _denominator(
    learner: Learner, current: Pass, pieces: Sequence[Piece], part: Sequence[Piece]
) -> np.float32:
    """What the sum of a part of a turn's pieces is divided by in its step.

    All trajectories, or those that have the turn, as many as the part has a share of; times the
    tokens that one may have at the most; or the part's own tokens, as verl divides each minibatch
    (`loss_agg_mode=token-mean`).
    """
    chosen = learner.algorithm
    active, own = (
        len({int(current.rows.trajectory_S[piece.segment]) for piece in some})
        for some in (pieces, part)
    )
    counted = {"all": current.valid, "active": active}[chosen.pool_mean]
    counts = {
        "action": counted,
        "constant": counted * learner.shapes.action,
        "token": sum(piece.position_A.size for piece in part),
    }
    count = np.float32(counts[chosen.loss_mean])
    return count if chosen.loss_mean == "token" else np.float32(count * own / active)


def _summarize(
    current: Pass, totals: Sequence[Mapping[str, float]], turns: int
) -> dict[str, float]:
    """Means over actions and steps; `turns` counts the steps of the order."""
    actions = sum(step["actions"] for step in totals)
    mean = lambda name: sum(step[name] for step in totals) / actions  # noqa: E731
    weights = {"sweep/tis_weight_mean": "tis_weight", "sweep/tis_truncated": "tis_truncated"}
    critic = {}
    if "value" in current.known:
        critic = {
            "sweep/value_loss": mean("value_loss"),
            "sweep/value_clip_fraction": mean("value_clipped"),
            "sweep/critic_grad_norm": float(np.mean([s["critic_grad_norm"] for s in totals])),
        }
    return critic | {
        "sweep/turns": turns,
        "sweep/steps": len(totals),
        "sweep/loss": float(np.mean([step["loss"] for step in totals])),
        "sweep/clip_fraction": mean("clipped"),
        "sweep/kl": mean("kl"),
        "sweep/weight_max": max(step["weight_max"] for step in totals),
        "sweep/grad_norm": float(np.mean([step["grad_norm"] for step in totals])),
        "sweep/updates_skipped": sum(step["update_skipped"] for step in totals),
        "sweep/updates": sum(0 < step["grad_norm"] < np.inf for step in totals),
        "sweep/tokens": current.tokens,
        "sweep/shared_fraction": 1 - current.computed / current.tokens,
        "sweep/padding_fraction": 1 - current.computed / current.padded,
        **{key: mean(name) for key, name in weights.items() if "start_logp" in current.known},
    }
