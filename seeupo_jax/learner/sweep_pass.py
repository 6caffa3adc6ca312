"""A sweep under way: what its steps read and write on the host, and what it needs to go on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from seeupo_jax.learner.batching import (
    Piece,
    Rows,
    Shapes,
    all_actions,
    pieces_of,
    turn_batch,
)
from seeupo_jax.learner.learner import Learner
from seeupo_jax.stop import Stopped
from seeupo_jax.types import TrainState, Trajectory, TurnBatch, learnable


@dataclass
class Pass:
    """A sweep under way: what its steps read and write on the host.

    factor_N: of the weights, M = advantage x factor.
    old_logp, ref_logp: one array a segment, aligned with its tokens.
    start_logp: the same under the parameters that sampled, which no step overwrites; None without
      truncated importance sampling.
    gap: how far the sampler's log-probabilities are from the trainer's.
    """

    rows: Rows
    advantage_N: jax.Array
    factor_N: jax.Array
    valid: int
    old_logp: list[np.ndarray]
    ref_logp: list[np.ndarray]
    start_logp: list[np.ndarray] | None
    gap: dict[str, float]
    previous: list[Piece] = field(default_factory=list)
    done: int = 0  # steps of the order
    metrics: list[dict[str, Any]] = field(default_factory=list)  # of every optimizer step
    tokens: int = 0  # that the steps were asked to compute
    padded: int = 0  # that they computed, padding included

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


def start_pass(
    learner: Learner,
    params: Any,
    ref_params: Any,
    rows: Rows,
    trajectories: Sequence[Trajectory],
) -> Pass:
    """Advantages, and one pass each for the log-probabilities of the old and reference policies."""
    advantage_N, valid = _advantages(learner, trajectories)
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
    return Pass(
        rows,
        advantage_N,
        learner.spread(np.ones(rows.trajectories, np.float32)),
        valid,
        old_logp,
        ref_logp,
        start_logp=[array.copy() for array in old_logp] if weighted else None,
        gap=_sampler_trainer_gap(rows, old_logp),
    )


def _advantages(learner: Learner, trajectories: Sequence[Trajectory]) -> tuple[jax.Array, int]:
    """Of every trajectory, and how many count."""
    valid_N = learnable(trajectories)
    reward_N = np.array([t.reward for t in trajectories], np.float32)
    group_N = np.array([t.group for t in trajectories], np.int32)
    return learner.advantage(reward_N, group_N, valid_N), int(valid_N.sum())


def _flat_logps(current: Pass) -> dict[str, np.ndarray]:
    """The pass's log-probabilities, those of all segments one after the other."""
    ragged = {
        "old_logp": current.old_logp,
        "ref_logp": current.ref_logp,
        "start_logp": current.start_logp,
    }
    return {name: np.concatenate(parts) for name, parts in ragged.items() if parts is not None}


def resume_pass(
    learner: Learner,
    rows: Rows,
    trajectories: Sequence[Trajectory],
    order: Sequence[tuple[int, ...]],
    arrays: Mapping[str, Any],
    notes: Mapping[str, Any],
) -> Pass:
    """The pass of a sweep that was stopped."""
    ends = np.cumsum([len(tokens) for tokens in rows.tokens])[:-1]

    def ragged(name: str) -> list[np.ndarray] | None:
        if name not in arrays:
            return None
        return [part.copy() for part in np.split(np.asarray(arrays[name]), ends)]

    advantage_N, valid = _advantages(learner, trajectories)
    done = notes["done"]
    return Pass(
        rows,
        advantage_N,
        arrays["factor_N"],
        valid,
        ragged("old_logp"),
        ragged("ref_logp"),
        start_logp=ragged("start_logp"),
        gap=dict(notes["gap"]),
        previous=pieces_of(rows, order[done - 1]) if done else [],
        done=done,
        metrics=list(notes["metrics"]),
        tokens=notes["tokens"],
        padded=notes["padded"],
    )


def keep_behaviour(current: Pass, trajectories: Sequence[Trajectory], *, version: int) -> None:
    """Makes the policy that sampled the old one where it is not the one that is swept.

    What the sampler recorded is all that is left of it.
    """
    rows = current.rows
    for segment, owner in enumerate(rows.trajectory_S):
        sampled_by = trajectories[owner].policy_version
        if sampled_by is not None and sampled_by != version:
            acted_L = rows.turn[segment] >= 0
            current.old_logp[segment][acted_L] = rows.logp[segment][acted_L]


class SweepStopped(Stopped):
    """A sweep was stopped between two turns.

    Attributes:
      arrays: what `sweep` needs to go on, the training state first; a pytree to be saved.
      notes: the rest of it, plain values.
    """

    def __init__(self, state: TrainState, current: Pass, learner: Learner):
        super().__init__(f"stopped after {current.done} steps of a sweep")
        logps = _flat_logps(current)
        self.arrays = {"state": state, "factor_N": current.factor_N} | {
            name: learner.spread(logp_X) for name, logp_X in logps.items()
        }
        self.notes = {
            "done": current.done,
            "tokens": current.tokens,
            "padded": current.padded,
            "gap": current.gap,
            "metrics": host_metrics(current.metrics),
        }


def stopped_arrays(learner: Learner, state: Any, trajectories: Sequence[Trajectory]) -> Any:
    """What `SweepStopped.arrays` look like, to load them; `state` may be shapes."""
    rows = Rows.of(trajectories)
    shape = lambda size: jax.ShapeDtypeStruct(  # noqa: E731
        (size,), np.float32, sharding=learner.everywhere
    )
    names = ["old_logp", "ref_logp"]
    if learner.algorithm.tis_clip is not None:
        names.append("start_logp")
    tokens = sum(map(len, rows.tokens))
    logps = {name: shape(tokens) for name in names}
    return {"state": state, "factor_N": shape(rows.trajectories)} | logps


def host_metrics(steps: Sequence[dict[str, Any]]) -> list[dict[str, float]]:
    """Scalars as host numbers; this waits for the device once."""
    return [{k: float(v) for k, v in step.items()} for step in jax.device_get(list(steps))]


def _sampler_trainer_gap(rows: Rows, old_logp: Sequence[np.ndarray]) -> dict[str, float]:
    """How far the sampler's log-probabilities are from the trainer's, over all action tokens."""
    triples = zip(old_logp, rows.logp, rows.turn, strict=True)
    gap = np.concatenate([np.abs(old - logp)[turn >= 0] for old, logp, turn in triples])
    return {
        "logp/sampler_trainer_gap": float(gap.max()),
        "logp/sampler_trainer_gap_mean": float(gap.mean()),
    }
