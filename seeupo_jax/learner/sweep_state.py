"""A sweep under way: what its steps read and write on the host, and what it needs to go on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from seeupo_jax.learner.advantages import assign_credit
from seeupo_jax.learner.batching import (
    Layout,
    Piece,
    Rows,
    Shapes,
    all_actions,
    lay_out,
    pieces_of,
    turn_batch,
)
from seeupo_jax.learner.learner import Learner
from seeupo_jax.parallel.stop_signal import Stopped
from seeupo_jax.types import CriticState, TrainState, Trajectory, TurnBatch, learnable


@dataclass(frozen=True)
class Step:
    """One optimizer step of a sweep; the device may still be computing it.

    turns: that it updated.
    advantage: of every token, one array a segment of the sweep's `Rows`.
    factor_N: float32 [N]; the step weighed a trajectory by M = advantage x factor.
    metrics: float32 scalars by name; the loss, the gradient's norm, and sums over `actions`.
    """

    turns: tuple[int, ...]
    advantage: Sequence[np.ndarray]
    factor_N: jax.Array
    metrics: Mapping[str, jax.Array]


@dataclass
class Pass:
    """A sweep under way: what its steps read and write on the host.

    factor_N: of the weights, M = advantage x factor.
    known: what is known of every token, by the names of `TurnBatch`; one array a segment, aligned
      with its tokens.
    begun: metrics of what the sweep began with.
    late: with old_policy=turn, pieces whose old log-probabilities [P, A] are still on the device
      only: `known` has them after `catch_up`.
    started: log-probability and entropy of every token as the sweep began, as in `known`; NaN at
      context, and where nobody computed it.
    weighed: the turns of each step of the order, and the factors that it weighed by.
    stepped: the turns of every optimizer step.
    observe: is shown every optimizer step, in their order; None: nobody looks.
    """

    rows: Rows
    factor_N: jax.Array
    valid: int
    known: dict[str, list[np.ndarray]]
    begun: dict[str, float]
    started: dict[str, list[np.ndarray]]
    previous: list[Piece] = field(default_factory=list)
    done: int = 0  # steps of the order
    metrics: list[dict[str, Any]] = field(default_factory=list)  # of every optimizer step
    stepped: list[tuple[int, ...]] = field(default_factory=list)
    weighed: list[tuple[tuple[int, ...], Any]] = field(default_factory=list)
    tokens: int = 0  # that the steps' rows would have, each for itself
    computed: int = 0  # that they computed: what rows share counts once
    padded: int = 0  # the same with padding
    late: tuple[list[Piece], jax.Array] | None = None
    observe: Callable[[Step], None] | None = None

    def record(self, turns: tuple[int, ...], metrics: dict[str, Any]) -> None:
        """Keeps the metrics of the step just taken; `factor_N` is what it weighed by."""
        self.metrics.append(metrics)
        self.stepped.append(turns)
        # Copied, on the device: what comes next overwrites the factors where they lie.
        copied_N = jnp.copy(self.factor_N)
        if turns not in dict(self.weighed):
            self.weighed.append((turns, copied_N))
        if self.observe is not None:
            self.observe(Step(turns, self.known["advantage"], copied_N, metrics))

    def batch(self, layout: Layout, shapes: Shapes) -> TurnBatch:
        """Pieces that were laid out as a padded batch, counted."""
        batch = turn_batch(self.rows, layout, shapes, self.known, action=shapes.action)
        _, R, L = batch.tokens_MRL.shape
        self.tokens += sum(piece.end for piece in layout.pieces)
        self.computed += layout.tokens
        self.padded += int(batch.microbatches) * R * L
        return batch

    def store_old(self, pieces: Sequence[Piece], logp_PA: jax.Array) -> None:
        """Makes log-probabilities just computed the old policy's at these pieces."""
        scatter(self.known["old_logp"], pieces, np.asarray(logp_PA))

    def rescore(self, learner: Learner, params: Any, pieces: list[Piece]) -> None:
        """Scores these pieces by the policy as it is now, which waits for the device."""
        layout = lay_out(self.rows, pieces, learner.shapes, learner.shapes.long)
        batch = turn_batch(self.rows, layout, learner.shapes, {}, action=learner.shapes.longest)
        scatter(self.known["logp"], pieces, np.asarray(_scored(learner, params, batch)[0]))

    def catch_up(self) -> None:
        """Fetches what is late, which waits for the device."""
        if self.late is not None:
            self.store_old(*self.late)
            self.late = None


STARTED = ("trainer_logp", "entropy")  # of `Pass.started`
_COUNTS = ("tokens", "computed", "padded")


def scatter(numbers: Sequence[np.ndarray], pieces: Sequence[Piece], found_PA: np.ndarray) -> None:
    """Writes what a batch's program found of action tokens back to their segments' tokens."""
    for piece, found_A in zip(pieces, found_PA, strict=False):
        numbers[piece.segment][piece.position_A] = found_A[: piece.position_A.size]


def start_pass(
    learner: Learner,
    params: Any,
    ref_params: Any,
    rows: Rows,
    trajectories: Sequence[Trajectory],
    *,
    version: int,
    critic: CriticState | None = None,
) -> Pass:
    """Advantages, and one pass each for the log-probabilities of the old and reference policies.

    Args:
      version: of the policy that is swept.
      critic: the value function, which takes one pass too.
    """
    pieces = all_actions(rows)
    layout = lay_out(rows, pieces, learner.shapes, learner.shapes.long)
    batch = turn_batch(rows, layout, learner.shapes, {}, action=learner.shapes.longest)

    def ragged(found_PA: Any, elsewhere: float = 0.0) -> list[np.ndarray]:
        numbers = [np.full(len(tokens), elsewhere, np.float32) for tokens in rows.tokens]
        scatter(numbers, pieces, np.asarray(found_PA))
        return numbers

    copied = lambda arrays: [array.copy() for array in arrays]  # noqa: E731
    found = _scored(learner, params, batch)
    old_logp = ragged(found[0])
    started = dict(zip(STARTED, (ragged(x_PA, np.nan) for x_PA in found), strict=True))
    ref_logp = (
        ragged(_scored(learner, ref_params, batch)[0])
        if learner.algorithm.kl_coef
        else copied(old_logp)
    )
    known = {"old_logp": old_logp, "ref_logp": ref_logp}
    if critic is not None:
        known["value"] = ragged(learner.value(params, critic.params, batch))
    if "start_logp" in learner.known:
        # Copied: old_policy=turn overwrites the old policy's as the sweep goes on.
        known["start_logp"] = copied(old_logp)
    begun = _sampler_trainer_gap(rows, old_logp)
    if learner.entropy:
        begun["rollout/entropy"] = float(np.nanmean(np.concatenate(started["entropy"])))
    _keep_behaviour(rows, old_logp, trajectories, version)
    known |= _recorded(learner, rows, started) | assign_credit(
        learner.algorithm, learner.shapes, rows, trajectories, known
    )
    if critic is not None:
        begun["sweep/explained_variance"] = _explained_variance(rows, known)
    factor_N = learner.spread(np.ones(rows.trajectories, np.float32))
    return Pass(rows, factor_N, _valid(learner, trajectories), known, begun, started)


def _valid(learner: Learner, trajectories: Sequence[Trajectory]) -> int:
    """How many trajectories are learned from."""
    return int(learnable(trajectories, grouped=learner.algorithm.grouped).sum())


def _scored(learner: Learner, params: Any, batch: TurnBatch) -> tuple[Any, Any]:
    """Log-probability and entropy [P, A] of every action token; the entropy NaN where not asked."""
    found = learner.begin(params, batch)
    return found if learner.entropy else (found, np.full(batch.mask_PA.shape, np.nan))


def _recorded(
    learner: Learner, rows: Rows, started: Mapping[str, Sequence[np.ndarray]]
) -> dict[str, list[np.ndarray]]:
    """What the rows themselves, and the policy that the sweep began with, say of their tokens."""
    known: dict[str, list[np.ndarray]] = {}
    if "logp" in learner.known:
        known["logp"] = [array.copy() for array in started["trainer_logp"]]
    if "sampler_logp" in learner.known:
        known["sampler_logp"] = list(rows.logp)
    if "action" in learner.known:
        if rows.turns > learner.shapes.turns:
            raise ValueError(
                f"a trajectory has {rows.turns} turns; allowed with order=parallel: at most"
                f" {learner.shapes.turns}, rollout.max_turns."
            )
        span = learner.algorithm.span(learner.shapes.turns)
        # Counted from the last turn, as the steps of the other orders are.
        known["action"] = [(rows.turns - 1 - turn_L) // span for turn_L in rows.turn]
    return known


def _stored(learner: Learner) -> list[str]:
    """What of `Pass.known` a sweep that was stopped cannot find out again."""
    return [name for name in learner.known if name not in ("logp", "sampler_logp", "action")]


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
    ragged = lambda name: [part.copy() for part in np.split(np.asarray(arrays[name]), ends)]  # noqa: E731
    done, started = notes["done"], {name: ragged(name) for name in STARTED}
    return Pass(
        rows,
        arrays["factor_N"],
        _valid(learner, trajectories),
        {name: ragged(name) for name in _stored(learner)} | _recorded(learner, rows, started),
        begun=dict(notes["begun"]),
        started=started,
        previous=pieces_of(rows, order[done - 1]) if done else [],
        done=done,
        metrics=list(notes["metrics"]),
        stepped=[tuple(turns) for turns in notes["stepped"]],
        weighed=[(tuple(turns), np.float32(factor_N)) for turns, factor_N in notes["weighed"]],
        **{name: notes[name] for name in _COUNTS},
    )


def _keep_behaviour(
    rows: Rows,
    old_logp: Sequence[np.ndarray],
    trajectories: Sequence[Trajectory],
    version: int,
) -> None:
    """Makes the policy that sampled the old one where it is not the one that is swept.

    What the sampler recorded is all that is left of it.
    """
    for segment, owner in enumerate(rows.trajectory_S):
        sampled_by = trajectories[owner].policy_version
        if sampled_by is not None and sampled_by != version:
            acted_L = rows.turn[segment] >= 0
            old_logp[segment][acted_L] = rows.logp[segment][acted_L]


class SweepStopped(Stopped):
    """A sweep was stopped between two turns.

    Attributes:
      arrays: what `sweep` needs to go on, the training state first; a pytree to be saved.
      notes: the rest of it, plain values.
    """

    def __init__(self, state: TrainState, current: Pass, learner: Learner):
        super().__init__(f"stopped after {current.done} steps of a sweep")
        current.catch_up()
        self.arrays = {"state": state, "factor_N": current.factor_N} | {
            name: learner.spread(np.concatenate(numbers))
            for name, numbers in (current.known | current.started).items()
            if name in (*_stored(learner), *STARTED)
        }
        self.notes = {
            "done": current.done,
            **{name: vars(current)[name] for name in _COUNTS},
            "begun": current.begun,
            "metrics": host_metrics(current.metrics),
            "stepped": current.stepped,
            "weighed": [
                (turns, factor_N.tolist()) for turns, factor_N in jax.device_get(current.weighed)
            ],
        }


def stopped_arrays(learner: Learner, state: Any, trajectories: Sequence[Trajectory]) -> Any:
    """What `SweepStopped.arrays` look like, to load them; `state` may be shapes."""
    grouped = learner.algorithm.grouped
    rows = Rows.of(trajectories, grouped=grouped, truncated=learner.truncated)
    shape = lambda size: jax.ShapeDtypeStruct(  # noqa: E731
        (size,), np.float32, sharding=learner.everywhere
    )
    tokens = sum(map(len, rows.tokens))
    known = {name: shape(tokens) for name in (*_stored(learner), *STARTED)}
    return {"state": state, "factor_N": shape(rows.trajectories)} | known


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


def _explained_variance(rows: Rows, known: Mapping[str, Sequence[np.ndarray]]) -> float:
    """Which share of the returns' variance the values have, over all action tokens.

    NaN where all returns are equal, and there is nothing to explain.
    """
    acted = np.concatenate(rows.turn) >= 0
    returns, value = (np.concatenate(known[name])[acted] for name in ("returns", "value"))
    variance = returns.var(dtype=np.float64)
    error = (returns - value).var(dtype=np.float64)
    return float(1 - error / variance) if variance > 0 else float("nan")
