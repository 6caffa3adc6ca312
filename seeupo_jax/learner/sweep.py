"""One iteration's updates: turn after turn, each weighted by the turns already updated."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from seeupo_jax.learner.batching import Piece, Rows, forced_fraction, lay_out, pieces_of
from seeupo_jax.learner.learned import learned_of, turn_metrics, weigh
from seeupo_jax.learner.learner import Learner
from seeupo_jax.learner.refresh_batch import refresh_batch
from seeupo_jax.learner.sweep_pass import (
    Pass,
    Step,
    SweepStopped,
    host_metrics,
    resume_pass,
    start_pass,
)
from seeupo_jax.types import Learned, TrainState, Trajectory

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
    rows, chosen = Rows.of(trajectories, truncated=learner.truncated), learner.algorithm
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
        current.batch(layout, learner.shapes),
        continued,
        current.factor_N,
        _denominator(learner, current, pieces),
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
    share = _denominator(learner, current, pieces) / len(pieces)
    for _ in range(learner.algorithm.inner_epochs):
        for part in _minibatches(pieces, learner.algorithm.minibatches_per_turn, rng):
            whole = part is pieces
            part_layout = layout if whole else lay_out(current.rows, part, learner.shapes)
            state, current.factor_N, _, metrics = learner.turn_step(
                state,
                current.batch(part_layout, learner.shapes),
                None,
                current.factor_N,
                np.float32(share * len(part)),
            )
            current.record(turns, metrics)
    if learner.algorithm.weighs and not last:
        batch = current.batch(layout, learner.shapes)
        current.factor_N = learner.refresh(state.params, batch, current.factor_N)
    return state


def _minibatches(pieces: list[Piece], count: int, rng: np.random.Generator) -> list[list[Piece]]:
    """The pieces in random parts of nearly equal size; one part keeps their own order."""
    if count == 1:
        return [pieces]
    parts = np.array_split(rng.permutation(len(pieces)), count)
    return [[pieces[i] for i in part] for part in parts if part.size]


def _denominator(learner: Learner, current: Pass, pieces: Sequence[Piece]) -> np.float32:
    """What a full step's sum is divided by.

    All trajectories, or those that have the turn; times the tokens that one may have at the most;
    or all tokens of the step.
    """
    chosen = learner.algorithm
    active = {int(current.rows.trajectory_S[piece.segment]) for piece in pieces}
    counted = {"all": current.valid, "active": len(active)}[chosen.pool_mean]
    counts = {
        "action": counted,
        "constant": counted * learner.shapes.action,
        "token": sum(piece.position_A.size for piece in pieces),
    }
    return np.float32(counts[chosen.loss_mean])


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
