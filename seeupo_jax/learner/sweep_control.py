"""Control of a sweep's steps: how far the host runs ahead, stopping, and resuming."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from seeupo_jax.learner.batching import TOKEN_DTYPES, SegmentBatch, action_spans
from seeupo_jax.learner.compiled_programs import Learner
from seeupo_jax.learner.expert_record import ExpertRecord
from seeupo_jax.learner.importance_weights import weigh_tokens
from seeupo_jax.learner.sweep_metrics import host_metrics
from seeupo_jax.learner.sweep_start import (
    count_valid,
    derived_per_token,
    segments_after_masking,
)
from seeupo_jax.learner.sweep_state import (
    INITIAL,
    OptimizerStep,
    SweepData,
    SweepState,
    TokenCounts,
)
from seeupo_jax.parallel.stop_signal import Stopped
from seeupo_jax.types import TrainState, Trajectory

IN_FLIGHT = 2  # unfinished steps on the device: few, so that a request to stop acts soon


class StepsInFlight:
    """Lets the host run few steps ahead of the device, and checks `stop` before each.

    Args:
      steps: updates of the plan. stop, on_step: as of `sweep`.
    """

    def __init__(
        self, steps: int, stop: Callable[[], bool], on_step: Callable[[int, int], None]
    ) -> None:
        self._steps, self._stop, self._on_step = steps, stop, on_step
        self._in_flight: deque[Any] = deque()
        self._done: int | None = None  # at the last check

    def ready(self, current: SweepState) -> bool:
        """Waits until the device has room for a step; False: the sweep has to stop."""
        if self._done is not None and current.done > self._done:
            self._in_flight.append([step.metrics for step in current.steps[-1:]])
        self._done = current.done
        if len(self._in_flight) == IN_FLIGHT:
            jax.block_until_ready(self._in_flight.popleft())
        self._on_step(current.done - len(self._in_flight), self._steps)
        return not self._stop()


class SweepStopped(Stopped):
    """A sweep was stopped between two turns.

    Attributes:
      arrays: the arrays that `sweep` resumes from, the training state first; a pytree to be saved.
      notes: the plain values that it resumes from.
    """

    def __init__(self, learner: Learner, current: SweepState):
        super().__init__(f"stopped after {current.done} steps of a sweep")
        current = current.fetch_pending()
        per_token = {**current.per_token, **current.data.initial}
        self.arrays = {"state": current.train, "cumulative_ratio_N": current.cumulative_ratio_N} | {
            name: learner.replicate(np.concatenate(per_token[name])) for name in _stored(learner)
        }
        experts = current.data.rows.experts
        if _records(learner):  # of a policy that has since been updated
            self.arrays["expert"] = learner.replicate(np.concatenate(experts.expert_LG))
        # The first step on some turns decides: its update weighs by this ratio.
        ratio_of_turns: dict[tuple[int, ...], jax.Array] = {}
        for step in current.steps:
            ratio_of_turns.setdefault(step.turns, step.cumulative_ratio_N)
        self.notes = {
            "done": current.done,
            **current.counts._asdict(),
            "initial_metrics": dict(current.data.initial_metrics),
            "metrics": host_metrics(current.steps),
            "updated_turns": [step.turns for step in current.steps],
            "ratio_of_turns": [
                (turns, ratio_N.tolist())
                for turns, ratio_N in jax.device_get(ratio_of_turns).items()
            ],
        }


def resume_sweep(
    learner: Learner,
    train: TrainState,
    rows: SegmentBatch,
    trajectories: Sequence[Trajectory],
    arrays: Mapping[str, Any],
    notes: Mapping[str, Any],
) -> SweepState:
    """The state of a stopped sweep, from the arrays and notes of `SweepStopped`."""
    ends = np.cumsum([len(tokens) for tokens in rows.tokens])[:-1]
    ragged = {name: np.split(np.asarray(arrays[name]), ends) for name in _stored(learner)}
    initial = {name: ragged.pop(name) for name in INITIAL}
    if _records(learner):
        expert_LG = tuple(np.split(np.asarray(arrays["expert"]), ends))
        rows = replace(rows, experts=ExpertRecord(learner.routing, expert_LG))
    sampled = segments_after_masking(learner, rows, initial)
    rows, importance, _ = weigh_tokens(learner, sampled, initial)
    per_token = ragged | derived_per_token(learner, sampled, initial) | importance
    ratio_of_turns = {
        tuple(turns): np.float32(ratio_N) for turns, ratio_N in notes["ratio_of_turns"]
    }
    done, updated_turns = notes["done"], [tuple(turns) for turns in notes["updated_turns"]]
    steps = [
        OptimizerStep(turns, per_token["advantage"], ratio_of_turns[turns], metrics)
        for turns, metrics in zip(updated_turns, notes["metrics"], strict=True)
    ]
    return SweepState(
        SweepData(
            rows, count_valid(learner, trajectories), initial, notes["initial_metrics"], sampled
        ),
        train,
        arrays["cumulative_ratio_N"],
        per_token,
        done,
        tuple(steps),
        # A turn without tokens has no step: the one before it is still to be refreshed.
        refresh_next=action_spans(rows, updated_turns[-1]) if updated_turns else (),
        counts=TokenCounts(**{name: notes[name] for name in TokenCounts._fields}),
    )


def stopped_arrays(learner: Learner, state: Any, trajectories: Sequence[Trajectory]) -> Any:
    """The structure of `SweepStopped.arrays`, to load them; `state` may be shapes."""
    rows = learner.rows(trajectories)

    def shape(*sizes: int, dtype: Any = np.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=learner.replicated)

    tokens, own = sum(map(len, rows.tokens)), learner.per_token
    named = {
        name: shape(tokens, *own.get(name, ()), dtype=TOKEN_DTYPES.get(name, np.float32))
        for name in _stored(learner)
    }
    if _records(learner):
        routing = learner.routing
        named["expert"] = shape(tokens, routing.size, dtype=routing.dtype)
    return {"state": state, "cumulative_ratio_N": shape(rows.trajectories)} | named


def _records(learner: Learner) -> bool:
    """Whether a sweep replays the experts that its first pass chose."""
    return learner.algorithm.router_replay == "old"


def _stored(learner: Learner) -> list[str]:
    """Fields of every token that a resumed sweep cannot recompute."""
    found_again = ("logp", "importance", "action", "drift_sign")
    return [*(name for name in learner.per_token if name not in found_again), *INITIAL]
