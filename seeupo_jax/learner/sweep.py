"""One iteration's updates: turn after turn, each weighted by the turns already updated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from seeupo_jax.learner.batching import (
    Piece,
    Rows,
    Shapes,
    all_actions,
    pieces_of,
    refresh_batch,
    turn_batch,
)
from seeupo_jax.learner.learner import Learner
from seeupo_jax.types import TrainState, Trajectory, TurnBatch, learnable


def update_order(
    turns: int,
    order: str,
    *,
    turns_per_update: int = 1,
    custom_order: Sequence[int] = (),
    seed: Sequence[int] = (0,),
) -> list[tuple[int, ...]]:
    """The steps of a sweep, first to last; each is the turns that it updates together.

    Args:
      turns: K, of the longest trajectory. order: `reverse` (SeeUPO), `forward`, `random` or
        `custom` (`custom_order`, of which turns that nobody reached are left out).
      turns_per_update: so many consecutive turns, counted from the last one, make one step.
      seed: of the random order.

    Raises:
      ValueError: an unknown order.
    """
    ends = range(turns, 0, -turns_per_update)
    steps = [tuple(range(max(0, end - turns_per_update), end)) for end in ends]
    orders: dict[str, Callable[[], list[tuple[int, ...]]]] = {
        "reverse": lambda: steps,
        "forward": lambda: steps[::-1],
        "random": lambda: [steps[i] for i in np.random.default_rng(seed).permutation(len(steps))],
        "custom": lambda: [(turn,) for turn in custom_order if turn < turns],
    }
    if order not in orders:
        raise ValueError(f"order: got {order!r}; allowed: {', '.join(orders)}.")
    return orders[order]()


@dataclass
class Pass:
    """A sweep under way: what its steps read and write on the host.

    old_logp, ref_logp: one array a segment, aligned with its tokens.
    start_logp: the same under the parameters that sampled, which no step overwrites; None without
      truncated importance sampling.
    """

    rows: Rows
    advantage_N: jax.Array
    valid: int
    old_logp: list[np.ndarray]
    ref_logp: list[np.ndarray]
    previous: list[Piece]
    tokens: int = 0  # that the steps were asked to compute
    padded: int = 0  # that they computed, padding included
    start_logp: list[np.ndarray] | None = None

    def batch(
        self, pieces: Sequence[Piece], shapes: Shapes, length: int | None = None
    ) -> TurnBatch:
        """The pieces as a padded batch, counted; of the shortest listed length that holds them."""
        if length is None:
            length = shapes.length(max(piece.end for piece in pieces))
        batch = turn_batch(
            self.rows,
            pieces,
            shapes,
            self.old_logp,
            self.ref_logp,
            length=length,
            action=shapes.action,
            start_logp=self.start_logp,
        )
        _, R, L = batch.tokens_MRL.shape
        self.tokens += sum(piece.end for piece in pieces)
        self.padded += int(batch.microbatches) * R * L
        return batch

    def store_old(self, pieces: Sequence[Piece], logp_MRA: jax.Array) -> None:
        """Makes log-probabilities just computed the old policy's at these pieces."""
        scatter(self.old_logp, pieces, np.asarray(logp_MRA))


def scatter(logp: Sequence[np.ndarray], pieces: Sequence[Piece], logp_MRA: np.ndarray) -> None:
    """Writes a batch's log-probabilities back to their segments' tokens."""
    flat_XA = logp_MRA.reshape(-1, logp_MRA.shape[-1])
    for piece, logp_A in zip(pieces, flat_XA, strict=False):
        logp[piece.segment][piece.position_A] = logp_A[: piece.position_A.size]


def sweep(
    learner: Learner,
    state: TrainState,
    ref_params: Any,
    trajectories: Sequence[Trajectory],
    *,
    iteration: int,
) -> tuple[TrainState, dict[str, float]]:
    """Updates the policy with one iteration's trajectories; `state` is donated.

    Args:
      ref_params: parameters of the reference policy of the KL penalty.
      iteration: seeds the random order and the minibatches. Its policy has version iteration - 1:
        ratios of trajectories that say to be of another one are against what the sampler recorded.

    Returns: the state after the last turn's step, and metrics. Without a single sampled turn the
      state is returned as it came.
    """
    rows = Rows.of(trajectories)
    chosen = learner.algorithm
    seed = (learner.seed, iteration)
    order = update_order(
        rows.turns,
        chosen.order,
        turns_per_update=chosen.turns_per_update,
        custom_order=chosen.custom_order,
        seed=seed,
    )
    if not order:
        return state, {"sweep/turns": 0}
    current = start_pass(learner, state.params, ref_params, rows, trajectories)
    gap = _sampler_trainer_gap(rows, current.old_logp)
    _keep_behaviour(current, trajectories, version=iteration - 1)
    factor_N = learner.spread(np.ones(rows.trajectories, np.float32))
    metrics = []
    for turns in order:
        last = turns == order[-1]
        state, factor_N, turn_metrics = update_turn(
            learner, current, state, factor_N, turns, last=last, seed=(*seed, *turns)
        )
        metrics += turn_metrics
    return state, gap | _summarize(current, metrics, len(order))


def start_pass(
    learner: Learner,
    params: Any,
    ref_params: Any,
    rows: Rows,
    trajectories: Sequence[Trajectory],
) -> Pass:
    """Advantages, and one pass each for the log-probabilities of the old and reference policies."""
    valid_N = learnable(trajectories)
    advantage_N = learner.advantage(
        np.array([t.reward for t in trajectories], np.float32),
        np.array([t.group for t in trajectories], np.int32),
        valid_N,
    )
    pieces = all_actions(rows)
    zeros = [np.zeros(len(tokens), np.float32) for tokens in rows.tokens]
    old_logp, ref_logp = ([array.copy() for array in zeros] for _ in range(2))
    length = learner.shapes.long(max(piece.end for piece in pieces))
    batch = turn_batch(rows, pieces, learner.shapes, zeros, zeros, length=length, action=length)
    old_MRA = learner.score(params, batch)
    ref_MRA = learner.score(ref_params, batch) if learner.algorithm.kl_coef else old_MRA
    scatter(old_logp, pieces, np.asarray(old_MRA))
    scatter(ref_logp, pieces, np.asarray(ref_MRA))
    # Copied: old_policy=turn overwrites the old policy's as the sweep goes on.
    weighted = learner.algorithm.tis_clip is not None
    start_logp = [array.copy() for array in old_logp] if weighted else None
    return Pass(
        rows, advantage_N, int(valid_N.sum()), old_logp, ref_logp, [], start_logp=start_logp
    )


def _keep_behaviour(current: Pass, trajectories: Sequence[Trajectory], *, version: int) -> None:
    """Makes the policy that sampled the old one where it is not the one that is swept.

    What the sampler recorded is all that is left of it.
    """
    rows = current.rows
    for segment, owner in enumerate(rows.trajectory_S):
        sampled_by = trajectories[owner].policy_version
        if sampled_by is not None and sampled_by != version:
            acted_L = rows.turn[segment] >= 0
            current.old_logp[segment][acted_L] = rows.logp[segment][acted_L]


def update_turn(
    learner: Learner,
    current: Pass,
    state: TrainState,
    factor_N: jax.Array,
    turns: tuple[int, ...],
    *,
    last: bool,
    seed: Sequence[int],
) -> tuple[TrainState, jax.Array, list[dict[str, jax.Array]]]:
    """Updates the policy at one turn (or at turns merged into one step), and the weights with it.

    Returns: the state, the factors of the weights, and a dict of scalars an optimizer step.
    """
    pieces = pieces_of(current.rows, turns)
    if not pieces:
        return state, factor_N, []
    if learner.fused:
        return _fused_turn(learner, current, state, factor_N, pieces)
    return _separate_turn(learner, current, state, factor_N, pieces, last=last, seed=seed)


def _fused_turn(
    learner: Learner, current: Pass, state: TrainState, factor_N: jax.Array, pieces: list[Piece]
) -> tuple[TrainState, jax.Array, list[dict[str, jax.Array]]]:
    """One step that first refreshes, in the same program, the weights of the step before it."""
    batch = current.batch(pieces, learner.shapes)
    continued, left = refresh_batch(
        current.rows, batch, pieces, current.previous, learner.shapes, current.old_logp
    )
    if left:
        factor_N = learner.refresh(
            state.params,
            current.batch(left, learner.shapes, learner.shapes.lengths[-1]),
            factor_N,
        )
    state, factor_N, logp_MRA, metrics = learner.turn_step(
        state,
        batch,
        continued,
        current.advantage_N,
        factor_N,
        _denominator(learner, current, pieces),
    )
    if learner.algorithm.old_policy == "turn":
        current.store_old(pieces, logp_MRA)
    current.previous = pieces
    return state, factor_N, [metrics]


def _separate_turn(
    learner: Learner,
    current: Pass,
    state: TrainState,
    factor_N: jax.Array,
    pieces: list[Piece],
    *,
    last: bool,
    seed: Sequence[int],
) -> tuple[TrainState, jax.Array, list[dict[str, jax.Array]]]:
    """Any number of steps on one turn, then a pass that refreshes the weights."""
    if learner.algorithm.old_policy == "turn":
        batch = current.batch(pieces, learner.shapes)
        logp_MRA = learner.score(state.params, batch)
        current.store_old(pieces, logp_MRA)
    rng, metrics = np.random.default_rng(seed), []
    share = _denominator(learner, current, pieces) / len(pieces)
    for _ in range(learner.algorithm.inner_epochs):
        for part in _minibatches(pieces, learner.algorithm.minibatches_per_turn, rng):
            state, factor_N, _, step_metrics = learner.turn_step(
                state,
                current.batch(part, learner.shapes),
                None,
                current.advantage_N,
                factor_N,
                np.float32(share * len(part)),
            )
            metrics.append(step_metrics)
    if not last:
        batch = current.batch(pieces, learner.shapes)
        factor_N = learner.refresh(state.params, batch, factor_N)
    return state, factor_N, metrics


def _minibatches(pieces: list[Piece], count: int, rng: np.random.Generator) -> list[list[Piece]]:
    """The pieces in random parts of nearly equal size; one part keeps their own order."""
    if count == 1:
        return [pieces]
    parts = np.array_split(rng.permutation(len(pieces)), count)
    return [[pieces[i] for i in part] for part in parts if part.size]


def _denominator(learner: Learner, current: Pass, pieces: Sequence[Piece]) -> np.float32:
    """What a full step's sum is divided by: all trajectories, or those that have the turn."""
    active = {int(current.rows.trajectory_S[piece.segment]) for piece in pieces}
    counts = {"all": current.valid, "active": len(active)}
    return np.float32(counts[learner.algorithm.pool_mean])


def _summarize(
    current: Pass, steps: Sequence[dict[str, jax.Array]], turns: int
) -> dict[str, float]:
    """Means over rows and steps, as host numbers; this waits for the device once."""
    totals = [{k: float(v) for k, v in step.items()} for step in jax.device_get(list(steps))]
    rows = sum(step["rows"] for step in totals)
    mean = lambda name: sum(step[name] for step in totals) / rows  # noqa: E731
    weights = {"sweep/tis_weight_mean": "tis_weight", "sweep/tis_truncated": "tis_truncated"}
    return {
        "sweep/turns": turns,
        "sweep/steps": len(totals),
        "sweep/loss": float(np.mean([step["loss"] for step in totals])),
        "sweep/clip_fraction": mean("clipped"),
        "sweep/kl": mean("kl"),
        "sweep/weight_max": max(step["weight_max"] for step in totals),
        "sweep/grad_norm": float(np.mean([step["grad_norm"] for step in totals])),
        "sweep/updates_skipped": sum(step["update_skipped"] for step in totals),
        "sweep/tokens": current.tokens,
        "sweep/padding_fraction": 1 - current.tokens / current.padded,
        **{key: mean(name) for key, name in weights.items() if current.start_logp is not None},
    }


def _sampler_trainer_gap(rows: Rows, old_logp: Sequence[np.ndarray]) -> dict[str, float]:
    """How far the sampler's log-probabilities are from the trainer's, over all action tokens."""
    triples = zip(old_logp, rows.logp, rows.turn, strict=True)
    gap = np.concatenate([np.abs(old - logp)[turn >= 0] for old, logp, turn in triples])
    return {
        "logp/sampler_trainer_gap": float(gap.max()),
        "logp/sampler_trainer_gap_mean": float(gap.mean()),
    }
